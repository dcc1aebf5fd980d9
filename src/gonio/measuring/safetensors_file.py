"""A safetensors file, read tensor by tensor."""

from __future__ import annotations

import json
import struct
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from gonio.errors import UnreadableFileError
from gonio.measuring.stored import Stored, dtype_named

__all__ = ["damaged", "stored_in_safetensors"]

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}


def stored_in_safetensors(path: Path) -> dict[str, Stored]:
    """The tensors of a file. The format's own reader checks its header; nothing else is read yet.

    That reader maps the file to read tensors. Pages once touched count as this process's memory while the map
    lasts, and torch's map of a file that is larger than memory is refused. So a tensor is read from its place in the
    file into memory that is given back when it has been measured.

    Raises:
        UnreadableFileError: if the header does not fit the file.
    """
    try:
        with safe_open(path, framework="np") as file:  # for torch it would map the file as memory to write to
            names = list(file.keys())
        header, start = _header(path)
        return {name: _stored(path, start, header[name]) for name in names}
    except UnreadableFileError:
        raise
    except Exception as error:  # the reader's own errors, OSError, and what a hostile header provokes
        raise damaged(path, error) from error


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The header, which has been checked, and where the data begin."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length)), 8 + length


def _stored(path: Path, start: int, of: dict[str, Any]) -> Stored:
    shape, (begin, end) = tuple(of["shape"]), of["data_offsets"]
    dtype = _DTYPES.get(of["dtype"], of["dtype"])
    return Stored(shape, dtype, partial(_read, path, start + begin, end - begin, dtype, shape))


def _read(path: Path, place: int, size: int, name: str, shape: tuple[int, ...]) -> Tensor:
    dtype = dtype_named(name)
    if dtype is None:
        raise UnreadableFileError(str(path), f"torch has no dtype {name}", "Convert the tensor first.")
    data = torch.empty(size, dtype=torch.uint8)
    with path.open("rb", buffering=0) as file:
        file.seek(place)
        view, done = data.numpy().data, 0
        while done < size:  # one call reads 2 GiB at most
            got = file.readinto(view[done:])
            if not got:
                raise damaged(path, EOFError("it ends before this tensor does"))
            done += got
    return data.view(dtype).reshape(shape)


def damaged(path: Path, error: BaseException) -> UnreadableFileError:
    return UnreadableFileError(
        str(path), f"it is not an intact file of its kind ({error})", "Copy or download it again."
    )
