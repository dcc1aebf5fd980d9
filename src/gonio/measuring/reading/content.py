"""What a file that cannot be read is by its first bytes, where its name says another kind."""

from __future__ import annotations

import zipfile
from pathlib import Path

from gonio.errors import UnreadableFileError
from gonio.messages import say

# The endings of each kind; the first is suggested.
TORCH = (".pt", ".pth", ".bin", ".ckpt", ".tar")  # scripts of torch's own examples write model.pth.tar
_KERAS, _ARRAYS = (".keras",), (".npz",)
_SAFETENSORS, _GGUF, _HDF5 = (".safetensors",), (".gguf",), (".h5", ".hdf5", ".keras")
_TELLING = frozenset((*TORCH, *_KERAS, *_ARRAYS, *_SAFETENSORS, *_GGUF, *_HDF5, ".onnx"))


def misnamed(path: Path) -> UnreadableFileError | None:
    """The error for a file whose first bytes are of another kind than its name says; None where they do not tell.

    It is asked after the reader of the name's kind has failed. Another reader is not tried: the name would still
    mislead every other program.
    """
    if path.suffix not in _TELLING:
        return None
    try:
        found = _kind(path)
    except Exception:  # a damaged archive may raise anything; the reader's own error says that it is damaged
        return None
    if found is None or path.suffix in found[1]:
        return None
    kind, endings = found
    why = say("its content is that of {kind}, and its name ends in {suffix}", kind=kind, suffix=path.suffix)
    return UnreadableFileError(str(path), why, say("Rename it to {name}.", name=path.with_suffix(endings[0]).name))


def _kind(path: Path) -> tuple[str, tuple[str, ...]] | None:
    """The kind of a file and its endings, by its first bytes; None for an unknown one."""
    with path.open("rb") as file:
        start, size = file.read(9), path.stat().st_size
    if start.startswith(b"GGUF"):
        return say("a GGUF file"), _GGUF
    if start.startswith(b"\x89HDF\r\n\x1a\n"):
        return say("an HDF5 file"), _HDF5
    if start.startswith(b"PK\x03\x04"):
        return _archive(path)
    if start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return say("a file of torch, or another pickle"), TORCH
    if start[8:9] == b"{" and 2 <= int.from_bytes(start[:8], "little") <= size - 8:
        return say("a safetensors file"), _SAFETENSORS
    return None


def _archive(path: Path) -> tuple[str, tuple[str, ...]] | None:
    """The kind of a zip archive, by the names of its members."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    if any(name.endswith("/data.pkl") for name in names):
        return say("a file of torch"), TORCH
    if "model.weights.h5" in names:
        return say("a Keras archive"), _KERAS
    if names and all(name.endswith(".npy") for name in names):
        return say("a NumPy archive"), _ARRAYS
    return None
