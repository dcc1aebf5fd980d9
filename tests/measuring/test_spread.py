"""Measuring files in several processes, and with a journal that a stopped measurement goes on from."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import gonio
from catalog import seeded
from gonio.errors import InvalidArgumentError, UnreadableFileError
from gonio.measuring.engines import SMALL, parcels_of
from gonio.measuring.journal import Journal


def state(tensors: int = 6, shift: float = 0.0) -> dict[str, Tensor]:
    made = {f"layers.{i}.weight": seeded(12, 8, seed=i) + shift * seeded(12, 8, seed=i + 50) for i in range(tensors)}
    made["layers.1.weight"][0, 0] = float("inf")
    return made | {"bias": torch.zeros(3), "steps": torch.tensor(3)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(state(), tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    save_file(state(shift=0.1), tmp_path / "b.safetensors")
    return tmp_path / "b.safetensors"


Measured = Callable[..., Any]


def one(file: Path, other: Path, **options: Any) -> Any:
    return gonio.measure(file, **options)


def two(file: Path, other: Path, **options: Any) -> Any:
    return gonio.measure(file, other, **options)


BOTH = pytest.mark.parametrize("measured", [one, two])


@pytest.mark.slow
@pytest.mark.parametrize("journal", [False, True])
@BOTH
def test_processes_give_the_same_rows(measured: Measured, journal: bool, file: Path, other: Path) -> None:
    seen: list[tuple[int, int]] = []
    options = {"journal": file.with_suffix(".jsonl")} if journal else {}
    found = measured(file, other, jobs=2, progress=lambda done, total: seen.append((done, total)), **options)
    assert found.to_dict() == measured(file, other).to_dict()
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (8, 8)


def test_rows_from_a_journal_have_the_same_findings(tmp_path: Path) -> None:
    """An adapter of another shape than its base, one without a layer there, and values that are not finite."""
    base = {"fc.weight": seeded(40, 40), "g.weight": seeded(8, 8), "h.weight": seeded(8, 8)}
    adapter = {"fc": (30, 40), "g": (8, 8), "h": (8, 8), "lost": (8, 8)}
    state = {}
    for i, (name, (columns, rows)) in enumerate(adapter.items()):
        state[f"base_model.model.{name}.lora_A.weight"] = 9 * seeded(4, columns, seed=i)
        state[f"base_model.model.{name}.lora_B.weight"] = 9 * seeded(rows, 4, seed=i)
    base["h.weight"][0, 0] = float("nan")
    save_file(base, tmp_path / "base.safetensors")
    (tmp_path / "a").mkdir()
    save_file(state, tmp_path / "a" / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": 4, "lora_alpha": 4}
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(about))
    found = [
        gonio.measure(tmp_path / "base.safetensors", tmp_path / "a", journal=tmp_path / "rows.jsonl") for _ in range(2)
    ]
    told = {(f.code, f.path) for f in found[0].findings}
    assert {("G713", "fc"), ("G713", "lost"), ("G502", "g"), ("G001", "h")} <= told
    assert {(f.code, f.path) for f in found[1].findings} == told
    assert [t.cause for t in found[1].tensors if t.cause] == ["adapter", "nonfinite", "adapter"]


@BOTH
def test_a_journal_is_gone_on_with(
    measured: Measured, file: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gonio.measuring.figures.tensor.SMALL", 0)  # one by one
    journal, whole = file.with_suffix(".jsonl"), measured(file, other)

    class Stopped(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done == 3:
            raise Stopped("stopped")

    with pytest.raises(Stopped, match="stopped"):
        measured(file, other, journal=journal, progress=stop)
    assert len(journal.read_bytes().splitlines()) == 4
    with journal.open("ab") as torn:
        torn.write(b'0000abcd {"number": 3, "row": {"na')  # what a kill leaves
    seen: list[int] = []
    found = measured(file, other, journal=journal, progress=lambda done, _: seen.append(done))
    assert seen == [4, 5, 6, 7, 8]
    assert found.to_dict() == whole.to_dict()
    assert str(found) == str(whole)
    seen.clear()
    assert (
        measured(file, other, journal=journal, progress=lambda done, _: seen.append(done)).to_dict() == whole.to_dict()
    )
    assert seen == []


def test_what_is_written_beside_the_files_does_not_stop_a_journal(file: Path) -> None:
    journal = file.with_suffix(".jsonl")
    for folder in (False, True):
        source = file.parent if folder else file
        whole = gonio.measure(source, journal=journal)
        file.with_suffix(".json").write_text(whole.to_json())
        assert gonio.measure(source, journal=journal).to_dict() == whole.to_dict()
        journal.unlink()
        file.with_suffix(".json").unlink()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda file: save_file(state(5), file), "other files"),
        (lambda file: os.utime(file, (1, 1)), "other files"),
        (lambda file: (file.parent / "config.json").write_text("{}"), "other files"),
    ],
    ids=["another file", "another time", "a configuration"],
)
def test_a_journal_of_another_measurement_is_refused(change: Callable[[Path], Any], named: str, file: Path) -> None:
    journal = file.with_suffix(".jsonl")
    gonio.measure(file, journal=journal)
    kept = journal.read_bytes()
    with pytest.raises(InvalidArgumentError, match=r"of another one \(other options\)"):
        gonio.measure(file, journal=journal, deep=True)
    change(file)
    with pytest.raises(InvalidArgumentError, match=named):
        gonio.measure(file, journal=journal)
    assert journal.read_bytes() == kept


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: b"some notes of mine\n", "it is no journal of gonio"),
        (lambda text: text.replace(b'"number": 1,', b'"number": 2,'), r"its line \d is damaged"),
        (lambda text: b"\x00" * len(text), "it is no journal of gonio"),
    ],
)
def test_damaged_journals_are_named_and_stay(damage: Callable[[bytes], bytes], said: str, file: Path) -> None:
    journal = file.with_suffix(".jsonl")
    gonio.measure(file, journal=journal)
    journal.write_bytes(damage(journal.read_bytes()))
    kept = journal.read_bytes()
    with pytest.raises(UnreadableFileError, match=said):
        gonio.measure(file, journal=journal)
    assert journal.read_bytes() == kept


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"number": 0}', "its line 2 is no row"),
        (b'{"number": "a", "row": {}}', "its line 2 is no row"),
        (b'{"number": 0, "row": {"name": "a"}}', "its line 2 is no row"),
        (b"[1]", "its line 2 is no row"),
        (b"not json", "its line 2 is no JSON"),
        (b"[" * 100_000, "its line 2 is no JSON"),
    ],
)
def test_lines_that_are_no_rows_are_refused(content: bytes, said: str, file: Path) -> None:
    journal = file.with_suffix(".jsonl")
    gonio.measure(file, journal=journal)
    head = journal.read_bytes().splitlines(keepends=True)[0]
    journal.write_bytes(head + b"%08x %s\n" % (zlib.crc32(content), content))
    with pytest.raises(UnreadableFileError, match=said):
        gonio.measure(file, journal=journal)


def test_numbers_that_are_not_finite_come_back(tmp_path: Path) -> None:
    row = gonio.measure({"a.weight": torch.tensor([[1.0, float("nan")], [2.0, 3.0]])}).tensors[0]
    with Journal(tmp_path / "j", {"a": 1}, type(row)) as kept:
        kept.add(0, row)
    with Journal(tmp_path / "j", {"a": 1}, type(row)) as kept:
        assert repr(kept.rows[0].__dict__) == repr(row.__dict__)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"jobs": 2}, r"measure\(jobs=\) distributes the tensors of files; found Linear"),
        ({"journal": "j"}, r"measure\(journal=\) keeps the tensors of files; found Linear"),
        ({"jobs": 0}, r"measure\(jobs=\) is a number of processes; found 0"),
        ({"jobs": True}, r"measure\(jobs=\) is a number of processes; found True"),
        ({"jobs": 2, "engine": "ray"}, r"measure\(jobs=\) is for engine='local'|distributes the tensors of files"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(InvalidArgumentError, match=message):
        gonio.measure(layer, **options)
    with pytest.raises(InvalidArgumentError, match=message):
        gonio.measure(layer, layer, **options)


def test_a_journal_of_three_sources_is_refused(file: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"measure\(journal=\) keeps one source, or two"):
        gonio.measure(file, file, file, journal="j")


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("count", [0, 1, 5, 300])
def test_parcels_hold_what_is_left_once(count: int, fine: bool) -> None:
    sizes = [SMALL * 2 if i % 7 == 0 else 4096 for i in range(count)]
    left = [i for i in range(count) if i % 3]
    parcels = parcels_of(sizes, left, 2, fine)
    assert sorted(n for parcel in parcels for n in parcel) == left
    if fine:
        assert all(len(parcel) == 1 or sum(sizes[n] for n in parcel) <= SMALL for parcel in parcels)


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_of_it(file: Path) -> None:
    script = file.with_suffix(".py")
    script.write_text(f"import gonio\nprint(len(gonio.measure({str(file)!r}, jobs=2)))\n")
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode != 0
    assert "call it below `if __name__ == '__main__':`" in run.stderr.replace("\n", " ")


LOGGED = """
import os
from importlib import import_module

measuring = import_module("gonio.measuring.measure")  # not the function of this name
LOG, measured = os.open(os.environ["GONIO_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT), measuring.measure_tensors


def logged(entries, **options):
    os.write(LOG, "".join(f"{entry.name}\\n" for entry in entries).encode())
    return measured(entries, **options)


measuring.measure_tensors = logged  # in workers too, which import this script
if __name__ == "__main__":
    from gonio.cli import main

    main()
"""


def shards_of(folder: Path, size: int) -> int:
    """A folder of bf16 shards with an index, of about so many bytes; the number of its tensors."""
    folder.mkdir()
    pool = torch.randn(1 << 23, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    shapes, names, written = [(1024, 1100), (1536, 1536), (4096, 1536)], dict[str, str](), 0
    while written < size:
        shard, held = f"model-{len(names):05d}.safetensors", dict[str, Tensor]()
        while written < size and sum(w.nbytes for w in held.values()) < max(size // 8, 1):
            (n, d), place = shapes[len(names) % 3], len(names) * 7919 % (1 << 20)
            name = f"layers.{len(names)}.weight"
            held[name], names[name] = pool[place : place + n * d].view(n, d).clone(), shard
            written += 2 * n * d
        save_file(held, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return len(names)


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_kills_lose_at_most_the_tensors_at_work(jobs: int, tmp_path: Path) -> None:
    """Killed again and again, a measurement repeats one tensor per process, and ends with the rows of one that was not.

    GONIO_MEASURE_KILLS is the number of kills of both, GONIO_MEASURE_BYTES the size of the folder.
    """
    wanted, draw = int(os.environ.get("GONIO_MEASURE_KILLS", "8")) // 2, random.Random(jobs)
    tensors = shards_of(tmp_path / "m", int(os.environ.get("GONIO_MEASURE_BYTES", str(60 << 20))))
    script, log, out = tmp_path / "logged.py", tmp_path / "log", tmp_path / "out.json"
    script.write_text(LOGGED)
    kills, ends, lost = 0, 0, Counter[int]()
    while kills < wanted or not ends:
        journal, kept = tmp_path / f"{ends}.jsonl", set[str]()
        while not out.exists():
            log.write_bytes(b"")
            command = [sys.executable, script, "measure", tmp_path / "m", "--journal", journal, "--json", out]
            run = subprocess.Popen(
                [*map(str, command), "--jobs", str(jobs)],
                start_new_session=True,
                env={**os.environ, "GONIO_LOG": str(log)},
            )
            _kill(run, log, after=draw.uniform(0, 3.0) if kills < wanted else None, least=draw.randrange(4))
            rows = _names(journal)
            assert kept <= rows  # nothing that was written is lost
            begun = [name for name in log.read_text().splitlines() if name]
            assert not kept & set(begun)  # nothing that was written is repeated
            assert len(begun) == len(set(begun))
            assert run.returncode in (0, -signal.SIGKILL)
            if run.returncode:
                kills += 1
                lost[len(set(begun) - rows)] += 1
            kept = rows
        assert len(kept) == tensors
        found = json.loads(out.read_text())["tensors"]
        out.unlink()
        ends += 1
    (tmp_path / "lost.json").write_text(json.dumps({"measurements": ends, "kills by tensors lost": lost}))  # for people
    assert max(lost) <= jobs
    assert found == json.loads(json.dumps(gonio.measure(tmp_path / "m").to_dict()["tensors"]))


def _kill(run: subprocess.Popen[bytes], log: Path, *, after: float | None, least: int) -> None:
    """Kill a run some seconds after it has begun with so many tensors; wait for its end with None."""
    try:
        if after is not None:
            while run.poll() is None and len(log.read_bytes().splitlines()) < least:
                time.sleep(0.01)
            with suppress(subprocess.TimeoutExpired):
                run.wait(after)
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
    finally:
        run.wait()


def _names(journal: Path) -> set[str]:
    """The tensors of a journal, whose last line a kill may have cut off."""
    lines = journal.read_bytes().split(b"\n")[1:-1] if journal.exists() else []
    return {json.loads(line.partition(b" ")[2])["row"]["name"] for line in lines}
