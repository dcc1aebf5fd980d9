"""Hostile models, state dicts and files: each gets the right verdict; none crashes, hangs or runs code."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from gonio.errors import GonioError, UnreadableFileError
from gonio.measuring import Measurements, difference, measure
from gonio.measuring.reading.source import load_torch, state_of_torch
from measuring.mutants import main
from measuring.zoo_files import FILES, STATES
from measuring.zoo_models import MODELS, NAMES, Verdict


def test_the_zoo_has_more_than_120_animals() -> None:
    assert len(MODELS) + len(STATES) + len(FILES) >= 120


def judge(found: Measurements, verdict: Verdict | None) -> None:
    assert all(t.status == "measured" or t.reason for t in found.values())
    if verdict is None:
        assert len(found) == 0
        return
    row = found[verdict.path]
    assert row.status == verdict.status, row.reason
    assert row.reason.startswith(verdict.reason)
    said = {finding.code: finding.found for finding in found.findings if finding.path == row.path}
    assert ("G001" in said) == (verdict.code == "G001")
    if verdict.code:
        assert verdict.said in said[verdict.code]


def shown(found: Measurements) -> None:
    """Every form is there, with no control character, no live markup, no formula."""
    page, markdown, csv = found.to_html(), found.to_markdown(), found.to_csv()
    texts = [str(found), found.to_json(), csv, markdown, page, found.coverage, repr(found)]
    for text in texts:
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u200b\u202a-\u202e\u2066-\u2069\ud800-\udfff]", text)
    json.loads(texts[1])
    assert "<script" not in page
    assert "<script" not in markdown
    assert 'onmouseover="' not in page
    assert not re.search(r"^[=+@]", csv, re.M)


@pytest.mark.filterwarnings("ignore:.*lazy.*:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", MODELS)
def test_a_hostile_model(name: str) -> None:
    make, verdict = MODELS[name]
    state = torch.get_rng_state()
    model = make()
    torch.set_rng_state(state)
    found = measure(model)
    judge(found, verdict)
    shown(found)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", STATES)
def test_a_hostile_state_dict(name: str) -> None:
    make, verdict = STATES[name]
    found = measure(make())
    judge(found, verdict)
    shown(found)


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file(name: str, tmp_path: Path) -> None:
    make, verdict = FILES[name]
    path: Any = make(tmp_path)
    if isinstance(verdict, str):
        with pytest.raises(GonioError, match=verdict):
            measure(path)
    else:
        found = measure(path)
        judge(found, verdict)
        shown(found)
    assert not (tmp_path / "canary").exists()


def test_every_hostile_name_is_in_a_state_dict_too() -> None:
    found = measure({f"{name}.weight": torch.eye(3) for name in NAMES.values()})
    assert len(found.layers) == len(NAMES)
    shown(found)


class Runs:
    """A pickle that runs code where pickles are trusted."""

    def __init__(self, call: object, *arguments: object) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


def gadgets(canary: Path) -> dict[str, object]:
    touch = f"open({str(canary)!r}, 'w').close()"
    return {
        "system": Runs(os.system, f"touch {canary}"),
        "exec": Runs(exec, touch),
        "eval": Runs(eval, f"open({str(canary)!r}, 'w')"),
        "open": Runs(open, str(canary), "w"),
        "nested": {"state_dict": {"w": torch.ones(2), "x": Runs(exec, touch)}},
        "getattr": Runs(getattr, Runs(__import__, "os"), "system"),
        "torch.load": Runs(torch.load, str(canary)),
        "bytes": pickle.dumps(Runs(exec, touch)),
    }


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", gadgets(Path("x")))
def test_no_code_in_a_checkpoint_runs(name: str, zipped: bool, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    path = tmp_path / "model.pt"
    torch.save(gadgets(canary)[name], path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(GonioError, match=r"holds more than tensors|looks for named tensors"):
        measure(path)
    assert not canary.exists()


def test_truncated_and_mutated_checkpoints_give_an_error_or_a_result(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"a.weight": torch.randn(4, 3), "n": 3}, path)
    intact = path.read_bytes()
    rng = random.Random(0)
    for i in range(200):
        mutated = bytearray(intact)
        mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        path.write_bytes(bytes(mutated[: rng.randrange(len(mutated))] if i % 2 else mutated))
        try:
            measure(path)
        except GonioError:
            continue


def test_a_state_dict_to_be_loaded_has_text_as_keys_and_stores_its_entries(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    for state, said in (
        ({1: torch.randn(4, 4)}, "it is no state dict: the key 1 is not text"),
        ({"w": torch.ones(1).expand(9, 9)}, "it is no state dict: a tensor has 81 entries, of which 1 are stored"),
        ({"w": torch.ones(2), "x" * 9: Runs(print, 1)}, "damaged or holds more than tensors"),
    ):
        torch.save(state, path)
        with pytest.raises(UnreadableFileError, match=said):
            state_of_torch(path)
    torch.save({"state_dict": {"w": torch.ones(2)}, "epoch": 3}, path)
    found, content = state_of_torch(path)
    assert (list(found.state), found.key, content["epoch"]) == (["w"], "state_dict", 3)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x00" * 5_000_000)
    with pytest.raises(UnreadableFileError, match="would unfold to 5000000 bytes"):
        load_torch(path)


def test_errors_and_summaries_stay_short(tmp_path: Path) -> None:
    """Whatever the names are: 300 of 10,000 characters."""
    long = {f"{i:010}" * 1000: torch.ones(2) for i in range(300)}
    shard = tmp_path / "m.safetensors.index.json"
    shard.write_text(json.dumps({"weight_map": {"w": "../" * 10_000}}))
    for act in (
        lambda: measure(dict.fromkeys(long, 1)),
        lambda: difference(long, {f"x{name}": value for name, value in long.items()}),
        lambda: measure(long)["y" * 10_000],
        lambda: measure(shard),
    ):
        with pytest.raises(GonioError, match=r"(?s)\A.{1,4999}\Z"):
            act()
    skipped = measure(dict.fromkeys(list(long)[:20], 1) | {"w": torch.ones(2)})
    assert len(skipped.coverage) < 5000


def test_missing_unknown_and_ambiguous_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFileError, match="there is no such file"):
        measure(tmp_path / "none.pt")
    (tmp_path / "model.h5").write_bytes(b"x")
    with pytest.raises(UnreadableFileError, match=r"kind '.h5' is not known.*Known kinds: .safetensors"):
        measure(tmp_path / "model.h5")
    with pytest.raises(UnreadableFileError, match="it holds no checkpoint"):
        measure(tmp_path)
    for name in ("a.pt", "b.pt"):
        torch.save({"w": torch.ones(2)}, tmp_path / name)
    with pytest.raises(UnreadableFileError, match=r"it holds several: a.pt, b.pt"):
        measure(tmp_path)


TESTS = Path(__file__).resolve().parents[1]

LIMIT = 600  # seconds for a batch that takes some 5; the machine may be busy


def outcomes(lines: str) -> Counter[str]:
    return Counter(line.split()[1] for line in lines.splitlines())


def test_500_mutated_headers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(tmp_path, 0, 500)
    found = outcomes(capsys.readouterr().out)
    assert found.total() == 500
    assert found["refused"] > 100
    assert found["measured"] >= 5  # some mutations, as in a name, leave a file that is in order


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 10_000, 1000))
def test_10_000_mutated_headers_neither_crash_nor_hang(first: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "measuring.mutants", str(tmp_path), str(first), "1000"]
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, (done.stdout.splitlines()[-1:], done.stderr[-2000:])
    assert outcomes(done.stdout).total() == 1000
