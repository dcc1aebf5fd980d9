"""The reader of each kind of file that is no index, by the ending of its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gonio.errors import InvalidArgumentError, UnreadableFileError
from gonio.measuring.reading.flax_files import open_flax
from gonio.measuring.reading.gguf_files import open_gguf
from gonio.measuring.reading.hdf5_files import open_hdf5
from gonio.measuring.reading.numpy_files import open_numpy
from gonio.measuring.reading.onnx_files import open_onnx
from gonio.measuring.reading.opened import Opened
from gonio.measuring.reading.safetensors_files import open_safetensors
from gonio.measuring.reading.torch_files import SUFFIXES, open_torch

OTHERS: dict[str, Callable[[Path], Opened]] = {
    ".safetensors": open_safetensors,
    ".gguf": open_gguf,
    ".onnx": open_onnx,
    **dict.fromkeys((".keras", ".h5", ".hdf5"), open_hdf5),
    ".msgpack": open_flax,
    ".npz": open_numpy,
}
KINDS = (".safetensors", ".safetensors.index.json", *SUFFIXES, *(kind for kind in OTHERS if kind != ".safetensors"))


def open_single(path: Path, key: str = "") -> Opened:
    """The tensors of one file that is no index.

    Args:
        key: of one state dict of several in a checkpoint of torch.

    Raises:
        UnreadableFileError: its kind is not known, or it is damaged.
        InvalidArgumentError: a key, but the file is not of torch.
    """
    if path.suffix in SUFFIXES:
        return open_torch(path, key)
    if path.suffix not in OTHERS:
        raise UnreadableFileError(
            str(path), f"its kind {path.suffix!r} is not known", f"Known kinds: {', '.join(KINDS)}."
        )
    if key:
        raise InvalidArgumentError("a key names a state dict in a checkpoint of torch", path.name, "Leave the key out.")
    return OTHERS[path.suffix](path)
