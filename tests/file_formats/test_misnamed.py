"""A file whose name says another kind than its content: the error says what it is, by its first bytes."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import gonio
from gonio.errors import UnreadableFileError
from gonio.measuring.reading.opened import misnamed


def _write(kind: str, path: Path) -> None:
    state = nn.Linear(4, 3).state_dict()
    match kind:
        case "torch":
            torch.save(state, path)
        case "old torch":
            torch.save(state, path, _use_new_zipfile_serialization=False)
        case "safetensors":
            save_file(state, path)
        case "gguf":
            path.write_bytes(b"GGUF" + bytes(100))
        case "hdf5":
            with h5py.File(path, "w") as file:
                file["w"] = np.ones((3, 4))
        case "keras":
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("model.weights.h5", b"")
        case "numpy":
            with path.open("wb") as file:
                np.savez(file, w=np.ones((3, 4)))


CASES = [
    ("torch", ".safetensors", "a file of torch", ".pt"),
    ("torch", ".gguf", "a file of torch", ".pt"),
    ("torch", ".npz", "a file of torch", ".pt"),
    ("old torch", ".safetensors", "a file of torch, or another pickle", ".pt"),
    ("safetensors", ".bin", "a safetensors file", ".safetensors"),
    ("safetensors", ".pth", "a safetensors file", ".safetensors"),
    ("safetensors", ".h5", "a safetensors file", ".safetensors"),
    ("gguf", ".safetensors", "a GGUF file", ".gguf"),
    ("hdf5", ".pt", "an HDF5 file", ".h5"),
    ("keras", ".pt", "a Keras archive", ".keras"),
    ("numpy", ".safetensors", "a NumPy archive", ".npz"),
]


@pytest.mark.parametrize(("kind", "ending", "said", "right"), CASES, ids=[f"{c[0]} as {c[1]}" for c in CASES])
@pytest.mark.parametrize("read", [gonio.measure, gonio.check])
def test_the_error_says_what_the_file_is(
    kind: str, ending: str, said: str, right: str, read: Any, tmp_path: Path
) -> None:
    path = tmp_path / f"mine{ending}"
    _write(kind, path)
    match = rf"its content is that of {said}, and its name ends in \{ending}\. Rename it to mine\{right}\.$"
    with pytest.raises(UnreadableFileError, match=match):
        read(path)


@pytest.mark.parametrize(
    "content", [b"", b"P", b"PK\x03\x04 cut off", bytes(8) + b"{", b"\xff" * 8 + b"{", b"\x80\x7f", b"text"]
)
@pytest.mark.parametrize("ending", [".safetensors", ".pt", ".gguf", ".xyz"])
def test_other_bytes_tell_nothing(content: bytes, ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"mine{ending}"
    path.write_bytes(content)
    assert misnamed(path) is None
    assert misnamed(tmp_path / f"absent{ending}") is None


def test_a_pattern_that_the_shell_did_not_replace(tmp_path: Path) -> None:
    _write("torch", tmp_path / "a1.pt")
    with pytest.raises(
        UnreadableFileError, match=r"It is a pattern, .* it matches .*a1\.pt\. Leave the marks out, or name one"
    ):
        gonio.measure(tmp_path / "a*.pt")


def test_a_damaged_archive_is_only_damaged(tmp_path: Path) -> None:
    """Each byte of the archive of another kind changed once: no error of zipfile is seen."""
    _write("torch", tmp_path / "mine.pt")
    whole, path = (tmp_path / "mine.pt").read_bytes(), tmp_path / "mine.safetensors"
    told = 0
    for at in range(4, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        told += misnamed(path) is not None
    assert told, "most bytes do not tell the kind"
