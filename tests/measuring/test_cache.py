"""The cache of measured files: the same content answers at once, any other is measured, and an entry is only data."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import gonio
from catalog import seeded
from cli.shell import invoke
from gonio.errors import InvalidArgumentError, UnreadableFileError
from gonio.measuring import cache as caching
from gonio.measuring.cache import cache_folder
from gonio.measuring.figures.tensor import TensorMeasurement
from gonio.measuring.reading.source import CheckpointPart

measuring = sys.modules["gonio.measuring.measure"]  # the package has the function of this name
SAID = "The figures are from the cache, measured on "


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = {f"layers.{i}.weight": seeded(12, 8, seed=i) for i in range(3)} | {"bias": torch.zeros(3)}
    made["layers.1.weight"][0, 0] = float("inf")
    save_file(made, tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tensors that are measured, in order."""
    names: list[str] = []
    plainly = measuring.measure_tensors

    def measure_tensors(part: Sequence[Any], **options: Any) -> list[TensorMeasurement]:
        names.extend(entry.name for entry in part)
        return plainly(part, **options)

    monkeypatch.setattr(measuring, "measure_tensors", measure_tensors)
    return names


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


def test_the_second_time_nothing_is_measured_and_a_note_says_so(
    file: Path, tmp_path: Path, measured: list[str]
) -> None:
    cache = tmp_path / "cache"
    plainly, first = gonio.measure(file), gonio.measure(file, cache=cache)
    assert (len(measured), len(entries(cache)), first.notes) == (8, 1, plainly.notes)
    second = gonio.measure(file, cache=cache)
    assert len(measured) == 8
    assert second.notes[0].startswith(SAID)
    assert second.notes[0] in str(second)
    same = replace(second, notes=first.notes)
    assert (same.to_dict(), same.findings) == (first.to_dict(), first.findings)
    for row, again in zip(first.tensors, second.tensors, strict=True):
        assert [str(getattr(row, f.name)) for f in fields(row)] == [str(getattr(again, f.name)) for f in fields(row)]


def test_one_byte_changed_in_place_with_the_time_set_back_is_noticed(
    file: Path, tmp_path: Path, measured: list[str]
) -> None:
    before, about = gonio.measure(file, cache=tmp_path / "cache"), file.stat()
    with file.open("r+b") as raw:
        raw.seek(-2, os.SEEK_END)
        byte = raw.read(1)
        raw.seek(-2, os.SEEK_END)
        raw.write(bytes([byte[0] ^ 0x40]))
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    now = file.stat()
    assert (now.st_size, now.st_mtime_ns, now.st_ino) == (about.st_size, about.st_mtime_ns, about.st_ino)
    after = gonio.measure(file, cache=tmp_path / "cache")
    assert (len(measured), after.notes) == (8, before.notes)
    assert [r.frobenius for r in after.tensors] == [r.frobenius for r in gonio.measure(file).tensors]
    assert [r.frobenius for r in after.tensors] != [r.frobenius for r in before.tensors]


def test_a_copy_elsewhere_is_the_same_content_and_a_configuration_beside_it_is_not(
    file: Path, tmp_path: Path, measured: list[str]
) -> None:
    gonio.measure(file, cache=tmp_path / "cache")
    (tmp_path / "b").mkdir()
    copy = tmp_path / "b" / file.name
    copy.write_bytes(file.read_bytes())
    assert gonio.measure(copy, cache=tmp_path / "cache").source == str(copy)
    assert gonio.measure(copy.parent, cache=tmp_path / "cache").notes[0].startswith(SAID)
    assert len(measured) == 4
    (tmp_path / "b" / "config.json").write_text('{"pad_token_id": 3}')
    gonio.measure(copy, cache=tmp_path / "cache")
    assert len(measured) == 8


@pytest.mark.parametrize("options", [{"deep": True}, {"extra_figures": ("quantisation",)}])
def test_other_options_are_measured(file: Path, tmp_path: Path, measured: list[str], options: dict[str, Any]) -> None:
    for _ in range(2):
        gonio.measure(file, cache=tmp_path)
        gonio.measure(file, cache=tmp_path, **options)
    assert (len(measured), len(entries(tmp_path))) == (8, 2)


def test_another_version_or_other_code_is_measured(
    file: Path, tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gonio.measure(file, cache=tmp_path)
    about, code = caching._program()
    monkeypatch.setattr(caching, "_program", lambda: ({**about, "gonio": "9.9"}, code))
    gonio.measure(file, cache=tmp_path)
    monkeypatch.setattr(caching, "_program", lambda: (about, "other"))
    gonio.measure(file, cache=tmp_path)
    assert len(measured) == 12


def test_shards_and_keys_are_content_too(tmp_path: Path, measured: list[str]) -> None:
    save_file({"a.weight": seeded(8, 8, seed=0)}, tmp_path / "m-1.safetensors")
    (tmp_path / "m.safetensors.index.json").write_text('{"weight_map": {"a.weight": "m-1.safetensors"}}')
    index, cache = tmp_path / "m.safetensors.index.json", tmp_path / "cache"
    for _ in range(2):
        gonio.measure(index, cache=cache)
    assert len(measured) == 1
    save_file({"a.weight": seeded(8, 8, seed=1)}, tmp_path / "m-1.safetensors")
    gonio.measure(index, cache=cache)
    assert len(measured) == 2
    torch.save(
        {"ema": {"w.weight": seeded(8, 8, seed=0)}, "model": {"w.weight": seeded(8, 8, seed=1)}}, tmp_path / "two.pt"
    )
    found = [
        gonio.measure(CheckpointPart(str(tmp_path / "two.pt"), key), cache=cache)["w"].frobenius
        for key in ("ema", "model", "ema")
    ]
    assert (found[0] == found[2], found[0] == found[1], len(measured)) == (True, False, 4)


def edited(entry: Path, change: Callable[[list[Any]], object], *, mark: bool) -> None:
    """The rows of an entry changed, with a checksum that fits if `mark`."""
    head, _, text = entry.read_text().partition("\n")
    rows = json.loads(text)
    change(rows)
    text = json.dumps(rows)
    head = f"{caching._mark(text.encode())} {head.split(' ')[1]}" if mark else head
    entry.write_text(f"{head}\n{text}")


HOSTILE: dict[str, Callable[[Path], object]] = {
    "cut off": lambda entry: entry.write_bytes(entry.read_bytes()[:-9]),
    "empty": lambda entry: entry.write_bytes(b""),
    "no text": lambda entry: entry.write_bytes(bytes(range(256))),
    "nested": lambda entry: entry.write_text("0" * 64 + " 2026-01-01\n" + "[" * 100_000),
    "another number": lambda entry: edited(entry, lambda rows: rows[0].update(frobenius=1.0), mark=False),
    "text for a number": lambda entry: edited(entry, lambda rows: rows[0].update(frobenius="1"), mark=True),
    "fewer rows": lambda entry: edited(entry, lambda rows: rows.pop(), mark=True),
    "other names": lambda entry: edited(entry, lambda rows: rows[0].update(name="x"), mark=True),
    "a folder": lambda entry: (entry.unlink(), entry.mkdir()),
    "no date": lambda entry: entry.write_text(entry.read_text().replace(" 20", " x", 1)),
    "too large": lambda entry: os.truncate(entry, caching.LARGEST + 1),
}


@pytest.mark.parametrize("harm", HOSTILE)
def test_a_damaged_entry_is_measured_anew_and_replaced(
    file: Path, tmp_path: Path, measured: list[str], harm: str
) -> None:
    cache = tmp_path / "cache"
    first = gonio.measure(file, cache=cache)
    HOSTILE[harm](entries(cache)[0])
    assert gonio.measure(file, cache=cache).to_dict() == first.to_dict()
    assert len(measured) == 8
    gonio.measure(file, cache=cache)
    assert len(measured) == (12 if harm == "a folder" else 8)


def test_a_folder_that_cannot_be_written_is_no_error(file: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    assert gonio.measure(file, cache=tmp_path / "taken" / "cache").to_dict() == gonio.measure(file).to_dict()


def test_a_file_that_changes_while_it_is_measured_is_not_kept(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plainly = measuring.measure_tensors

    def measure_tensors(part: Sequence[Any], **options: Any) -> list[TensorMeasurement]:
        with file.open("ab") as raw:
            raw.write(b"\0")
        return plainly(part, **options)

    monkeypatch.setattr(measuring, "measure_tensors", measure_tensors)
    gonio.measure(file, cache=tmp_path / "cache")
    assert entries(tmp_path / "cache") == []


def test_a_tensor_that_could_not_be_read_is_tried_again(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plainly = measuring.measure_tensors

    def fails() -> None:
        raise OSError("the disk is busy")

    def failing(part: Sequence[Any], **options: Any) -> list[TensorMeasurement]:
        return plainly([replace(entry, load=fails) for entry in part], **options)

    with monkeypatch.context() as patched:
        patched.setattr(measuring, "measure_tensors", failing)
        assert gonio.measure(file, cache=tmp_path / "cache")["bias"].reason == "cannot be read: the disk is busy"
    assert gonio.measure(file, cache=tmp_path / "cache")["bias"].reason == "a vector"


def test_the_entries_that_were_not_used_for_longest_go_first(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    gonio.measure(file, cache=cache)
    old = entries(cache)[0]
    os.utime(old, (1, 1))
    (cache / "mine.json").write_text("x" * 9)
    monkeypatch.setattr(caching, "MOST", old.stat().st_size + 100)
    gonio.measure(file, cache=cache)
    assert old.stat().st_mtime > 1  # a use counts
    os.utime(old, (1, 1))
    gonio.measure(file, deep=True, cache=cache)
    assert (old.exists(), len(entries(cache)), (cache / "mine.json").exists()) == (False, 2, True)
    monkeypatch.setattr(caching, "LARGEST", 300)
    gonio.measure(file, cache=cache)
    assert len(entries(cache)) == 2


def test_models_and_errors_are_as_without_a_cache(file: Path, tmp_path: Path) -> None:
    gonio.measure(torch.nn.Linear(4, 3), cache=tmp_path / "cache")
    gonio.measure({"w": torch.eye(3)}, cache=tmp_path / "cache")
    with pytest.raises(UnreadableFileError, match="there is no such file"):
        gonio.measure(tmp_path / "none.pt", cache=tmp_path / "cache")
    with pytest.raises(InvalidArgumentError, match=r"measure\(cache=\) keeps a whole measurement; found journal="):
        gonio.measure(file, cache=tmp_path / "cache", journal=tmp_path / "j")
    with pytest.raises(InvalidArgumentError, match="cache= as well"):
        gonio.measure(file, file, cache=tmp_path / "cache")  # type: ignore[call-overload]
    assert not (tmp_path / "cache").exists()


def test_the_command_uses_the_cache_of_the_user(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GONIO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    first, second = (invoke("measure", file).stdout for _ in range(2))
    assert (SAID in first, SAID in second, len(entries(tmp_path / "home" / "gonio"))) == (False, True, 1)
    assert [line for line in second.splitlines() if SAID not in line] == first.splitlines()
    assert invoke("measure", file, "--no-cache").stdout == first
    assert "数值取自缓存，测量于" in invoke("measure", file, "--lang", "zh").stdout
    suppressed = invoke("measure", file, "--ignore", "G001", "--json", "-").stdout
    assert {found["code"] for found in json.loads(suppressed)["findings"]} & {"G001"} == set()


def test_where_the_cache_is() -> None:
    assert cache_folder({"GONIO_CACHE": "off"}) is None
    assert cache_folder({"GONIO_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/gonio")
    assert cache_folder({"XDG_CACHE_HOME": "relative"}) == cache_folder({}) == Path.home() / ".cache" / "gonio"
