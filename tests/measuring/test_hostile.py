"""Hostile models, state dicts and files: each gets the right verdict; none crashes, hangs or runs code."""

from __future__ import annotations

import io
import json
import random
import re
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from foreign import FLOAT8_ROWS
from gonio.errors import GonioError, UnreadableFileError
from gonio.measuring import Measurements, difference, measure
from gonio.measuring.reading.torch_files import load_torch, state_of_torch
from html_reader import Page
from measuring.zoo_files import FILES, STATES, Runs
from measuring.zoo_models import MODELS, NAMES, Verdict


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
    assert len(Page(page).may_run()) == 1
    assert "<script" not in markdown
    assert 'onmouseover="' not in page
    assert not re.search(r"^[=+@]", csv, re.M)


SOURCES = {**MODELS, **{f"state dict: {name}": case for name, case in STATES.items()}}
NEED_FLOAT8 = ("float8", "state dict: scales of another shape")


@pytest.mark.grid(2)
@pytest.mark.filterwarnings("ignore:.*lazy.*:UserWarning", "ignore:Sparse", "ignore:.*quantize_per_tensor")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=FLOAT8_ROWS) if name in NEED_FLOAT8 else name for name in SOURCES]
)
def test_a_hostile_model_or_state_dict(name: str) -> None:
    make, verdict = SOURCES[name]
    state = torch.get_rng_state()
    source = make()
    torch.set_rng_state(state)
    found = measure(source)
    judge(found, verdict)
    shown(found)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.grid(2)
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


def test_a_state_dict_to_be_loaded_has_text_as_keys_and_stores_its_entries(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    for state, said in (
        ({1: torch.randn(4, 4)}, "it is no state dict: the key 1 is not text"),
        ({"w": torch.ones(1).expand(10**5, 10**5)}, "a tensor has 10,000,000,000 entries, of which 1 are stored"),
        ({"w": torch.ones(2), "x" * 9: Runs(print, 1)}, "holds more than tensors"),
    ):
        torch.save(state, path)
        with pytest.raises(UnreadableFileError, match=said):
            state_of_torch(path)
    torch.save({"state_dict": {"w": torch.ones(2)}, "epoch": 3}, path)
    found, content = state_of_torch(path)
    assert (list(found.state), found.place, content["epoch"]) == (["w"], "state_dict", 3)
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


def test_a_folder_of_several_models_is_refused(tmp_path: Path) -> None:
    for name in ("a.pt", "b.pt"):
        torch.save({"w": torch.ones(2)}, tmp_path / name)
    with pytest.raises(UnreadableFileError, match=r"it holds several: a.pt, b.pt"):
        measure(tmp_path)


STATE = {"a.weight": torch.ones(4, 3), "b": torch.ones(2), "c.weight": torch.zeros(2, 2, 1, 1)}
TOKENS = (b"-1", b"0", b"1e99", b"null", b"[]", b"{}", b'"', b"F64", b"BOOL", b"18446744073709551616", b"[", b",,")


def damaged_header(number: int) -> bytes:
    """The mutant of this number: bytes changed, cut, doubled or replaced by what parsers stumble over."""
    rng = random.Random(number)
    made = bytearray(save(STATE))
    head = 8 + int.from_bytes(made[:8], "little")
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        place = rng.randrange(min(head, len(made)))
        match rng.randrange(5):
            case 0:
                made[place] = rng.randrange(256)
            case 1:
                made[place] = rng.choice(b'abcxyz"{}[],:0123456789')
            case 2:
                made[place : place + rng.randrange(6)] = rng.choice(TOKENS)
            case 3:
                made[place:place] = made[place : place + rng.randrange(40)]
            case _:
                made[:8] = rng.choice([rng.randrange(1 << 64), rng.randrange(2 * head)]).to_bytes(8, "little")
    return bytes(made[: rng.randrange(1, len(made)) if rng.random() < 0.1 else len(made)])


def damaged_archive(number: int) -> bytes:
    """A checkpoint of torch with one byte changed; every other one is cut as well."""
    rng, file = random.Random(number), io.BytesIO()
    torch.save(STATE, file)
    made = bytearray(file.getvalue())
    made[rng.randrange(len(made))] = rng.randrange(256)
    return bytes(made[: rng.randrange(len(made))] if number % 2 else made)


@pytest.mark.parametrize(
    ("suffix", "mutant", "count"), [("safetensors", damaged_header, 500), ("pt", damaged_archive, 200)]
)
def test_damaged_files_are_refused_or_measured(
    suffix: str, mutant: Callable[[int], bytes], count: int, tmp_path: Path
) -> None:
    path, outcomes = tmp_path / f"mutant.{suffix}", Counter[str]()
    for number in range(count):
        path.write_bytes(mutant(number))
        try:
            outcomes["measured"] += measure(path) is not None
        except GonioError:
            outcomes["refused"] += 1
    assert outcomes["refused"] >= 100
    assert outcomes["measured"] >= 5  # some mutations, as in a name, leave a file that is in order
