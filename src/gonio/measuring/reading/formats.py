"""The tensors of one file: safetensors, read tensor by tensor, and torch checkpoints. No code in a file ever runs."""

from __future__ import annotations

import json
import struct
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from gonio.errors import UnreadableFileError
from gonio.escaping import shorten
from gonio.measuring.reading.entry import Stored, dtype_named, header_of, stored_entries
from gonio.measuring.reading.state_dict import Found, state_in

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")  # of torch checkpoints
REMAP = 256 << 20  # bytes

_DTYPES = {
    **{f"F{bits}": f"float{bits}" for bits in (64, 32, 16)},
    **{f"I{bits}": f"int{bits}" for bits in (64, 32, 16, 8)},
    **{f"U{bits}": f"uint{bits}" for bits in (64, 32, 16, 8)},
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "BOOL": "bool",
    "C64": "complex64",
}


def stored_in_safetensors(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file. The format's own reader checks the header; no values are read yet.

    That reader maps the file into memory to read tensors. Pages of a map count as this process's memory while it
    lasts, and torch refuses to map a file larger than memory. Therefore each tensor is read from its offset in
    the file, and its memory is released after it has been measured.

    Raises:
        UnreadableFileError: if the header does not fit the file.
    """
    try:
        with safe_open(path, framework="np") as file:  # for torch it would map the file as writable memory
            names = list(file.keys())
        with path.open("rb") as raw:
            (length,) = struct.unpack("<Q", raw.read(8))
            header = json.loads(raw.read(length))
        stored = {}
        for name in names:
            shape, (begin, end) = tuple(header[name]["shape"]), header[name]["data_offsets"]
            dtype = _DTYPES.get(header[name]["dtype"], header[name]["dtype"])
            stored[name] = Stored(shape, dtype, partial(_read, path, 8 + length + begin, end - begin, dtype, shape))
        return stored
    except Exception as error:  # the reader's own errors, OSError, and those that a hostile header provokes
        raise _damaged(path, error) from error


def _read(path: Path, offset: int, size: int, name: str, shape: tuple[int, ...]) -> Tensor:
    dtype = dtype_named(name)
    if dtype is None:
        raise UnreadableFileError(str(path), f"torch has no dtype {name}", "Convert the tensor first.")
    data = torch.empty(size, dtype=torch.uint8)
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        view, done = data.numpy().data, 0
        while done < size:  # one call reads 2 GiB at most
            got = file.readinto(view[done:])
            if not got:
                raise _damaged(path, EOFError("it ends before this tensor does"))
            done += got
    return data.view(dtype).reshape(shape)


def _damaged(path: Path, error: BaseException) -> UnreadableFileError:
    return UnreadableFileError(
        str(path), f"it is not an intact file of its kind ({str(error)[:300]})", "Copy or download it again."
    )


def stored_in_torch(path: Path) -> tuple[Found, dict[str, Stored]]:
    """The state dict of a torch checkpoint without its tensors, and the tensors, read when they are measured.

    Raises:
        UnreadableFileError: if the file is damaged or holds more than data.
        InvalidArgumentError: if it holds no named tensors.
    """
    file = _TorchFile(path)
    found = file.found
    stored = {
        str(name): Stored(*header_of(value), partial(file.read, name))
        for name, value in found.state.items()
        if isinstance(value, Tensor)
    }
    others = {name: value for name, value in found.state.items() if not isinstance(value, Tensor)}
    return Found(others, found.key, found.beside), stored


def load_torch(path: Path) -> Any:
    """The content of a torch file: tensors and plain containers, in memory.

    Raises:
        UnreadableFileError: as :func:`stored_in_torch`.
    """
    _is_archive(path)
    return _unpickled(path, mapped=False)


def state_of_torch(path: Path) -> tuple[Found, Any]:
    """The state dict of a torch checkpoint, to be loaded into a model, and the content of the file.

    Raises:
        UnreadableFileError: as :func:`stored_in_torch`, for keys that are not text, and for a tensor with more entries
            than the file stores.
        InvalidArgumentError: if it holds no named tensors.
    """
    content = load_torch(path)
    found = state_in(content, what=repr(path.name))
    other = next((name for name in found.state if not isinstance(name, str)), None)
    try:
        if other is not None:
            raise ValueError(f"the key {shorten(repr(other))} is not text")
        for value in found.state.values():
            _check_stored(value)
    except ValueError as error:
        raise UnreadableFileError(str(path), f"it is no state dict: {error}", "Save model.state_dict().") from error
    return found, content


def _check_stored(value: Any) -> None:
    """Refuse a tensor with more entries than its storage: a kilobyte can claim terabytes by a stride of 0."""
    if isinstance(value, Tensor) and value.layout == torch.strided and value.numel() > stored_entries(value):
        raise ValueError(f"a tensor has {value.numel():,} entries, of which {stored_entries(value):,} are stored")


class _TorchFile:
    """A torch checkpoint, loaded again after every :data:`REMAP` bytes of tensors.

    Torch maps an archive into memory, and pages once read count as this process's memory while the map lasts.
    Files of the old format are loaded whole.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.touched, self.zipped = path, 0, _is_archive(path)
        self.found = self.load()

    def load(self) -> Found:
        return state_in(_unpickled(self.path, mapped=self.zipped), what=repr(self.path.name))

    def read(self, name: Any) -> Tensor:
        if self.zipped and self.touched > REMAP:
            del self.found  # releases the old map before the new one is made
            self.found, self.touched = self.load(), 0
        tensor: Tensor = self.found.state[name]
        _check_stored(tensor)
        self.touched += tensor.nbytes if tensor.layout == torch.strided else 0
        return tensor


def _unpickled(path: Path, *, mapped: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a hostile pickle provokes almost any of them
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        known = [line for line in lines if line.startswith("WeightsUnpickler error")]
        said = (known or lines or [type(error).__name__])[0][:300]
        raise UnreadableFileError(
            str(path),
            f"it is damaged or holds more than tensors and plain containers ({said})",
            "Code in a file is never run here: save model.state_dict(), best as .safetensors.",
        ) from error


def _is_archive(path: Path) -> bool:
    """Whether the file is a zip archive.

    Raises:
        UnreadableFileError: for an archive that unpacks to more than its size. torch stores without compression,
            so that no file of its own does.
    """
    try:
        if not zipfile.is_zipfile(path):
            return False
        with zipfile.ZipFile(path) as archive:
            unfolded = sum(info.file_size for info in archive.infolist())
    except Exception as error:
        raise _damaged(path, error) from error
    if unfolded > path.stat().st_size:
        raise UnreadableFileError(
            str(path), f"its archive would unfold to {unfolded} bytes", "Such a file is not written by torch.save."
        )
    return True
