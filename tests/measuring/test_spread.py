"""Measuring files in several processes, and with a journal that a stopped measurement goes on from."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
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


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_kills_lose_at_most_the_tensors_at_work(jobs: int, tmp_path: Path) -> None:
    """Killed again and again, a measurement ends with the rows of one that was not."""
    path, journal, out = tmp_path / "m.safetensors", tmp_path / "j.jsonl", tmp_path / "out.json"
    save_file({f"layers.{i}.weight": seeded(1024, 1100, seed=i) for i in range(8)}, path)
    command = [sys.executable, "-m", "gonio", "measure", str(path), "--journal", str(journal), "--json", str(out)]
    kept, kills = 0, 0
    for _ in range(60):
        run = subprocess.Popen([*command, "--jobs", str(jobs)], start_new_session=True, stdout=subprocess.DEVNULL)
        try:
            while run.poll() is None and len(journal.read_bytes().splitlines() if journal.exists() else ()) <= kept + 2:
                time.sleep(0.01)
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
                kills += 1
            run.wait()
        now = len(journal.read_bytes().splitlines()) - 1
        assert now >= kept
        kept = now
        if out.exists():
            break
    assert kills >= 3
    plain = gonio.measure(path).to_dict()
    assert json.loads(out.read_text())["tensors"] == json.loads(json.dumps(plain["tensors"]))
