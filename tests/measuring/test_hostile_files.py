"""Damaged and malicious files: a clear error or a result, never a crash and never code that runs."""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gonio.errors import GonioError, UnreadableFileError
from gonio.measuring import measure


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


def test_a_raw_pickle_under_a_torch_name_does_not_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    path = tmp_path / "model.bin"
    path.write_bytes(pickle.dumps(Runs(os.system, f"touch {canary}")))
    with pytest.raises(UnreadableFileError, match="Code in a file is never run here"):
        measure(path)
    assert not canary.exists()


def header(content: object, data: bytes = b"") -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(**changes: object) -> dict[str, object]:
    return {"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}}


MALFORMED = {
    "empty file": b"",
    "short": b"\x01\x00",
    "header longer than the file": struct.pack("<Q", 1 << 40) + b"{}",
    "largest length": struct.pack("<Q", (1 << 64) - 1) + b"{}",
    "no json": header(b"not json"),
    "list": header([]),
    "deep": header(b"[" * 100_000),
    "not utf-8": header(b"\xff\xfe{}"),
    "no data": header(tensor()),
    "truncated": header(tensor(), b"\x00" * 15),
    "too long": header(tensor(), b"\x00" * 17),
    "ten gigabytes declared": header(tensor(shape=[50_000, 50_000], data_offsets=[0, 10**10]), b"\x00" * 16),
    "shape and length differ": header(tensor(shape=[3, 3]), b"\x00" * 16),
    "negative shape": header(tensor(shape=[-2, -2]), b"\x00" * 16),
    "overflowing shape": header(tensor(shape=[1 << 63, 4]), b"\x00" * 16),
    "backwards": header(tensor(data_offsets=[16, 0]), b"\x00" * 16),
    "negative offset": header(tensor(data_offsets=[-16, 0]), b"\x00" * 16),
    "overlap": header({**tensor(), "v": tensor()["w"]}, b"\x00" * 16),
    "hole": header(tensor(data_offsets=[16, 32]), b"\x00" * 32),
    "unknown dtype": header(tensor(dtype="F128"), b"\x00" * 16),
    "no dtype": header({"w": {"shape": [2], "data_offsets": [0, 8]}}, b"\x00" * 8),
    "zip": b"PK\x03\x04" + b"\x00" * 40,
    "html": b"<!DOCTYPE html><html>404</html>",
}


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_malformed_files_are_refused(name: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model{suffix}"
    path.write_bytes(MALFORMED[name])
    with pytest.raises(UnreadableFileError, match=r"was to be read; it is (not an intact file|damaged)"):
        measure(path)


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


def test_an_archive_that_unfolds_to_more_than_its_size_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x00" * 50_000_000)
    assert path.stat().st_size < 100_000
    with pytest.raises(UnreadableFileError, match="would unfold to 50000000 bytes"):
        measure(path)


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "..\\x"])
def test_an_index_names_no_file_outside_its_folder(shard: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w.weight": torch.ones(2, 2)}, tmp_path / "secret.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w.weight": shard}}))
    with pytest.raises(UnreadableFileError, match="names a file outside its folder"):
        measure(index)


@pytest.mark.parametrize("content", ["", "[]", '{"weight_map": 3}', "{", '{"other": {}}', "[" * 100_000])
def test_a_broken_index_is_refused(content: str, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(content)
    with pytest.raises(UnreadableFileError, match="not an index with a weight_map"):
        measure(index)


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
