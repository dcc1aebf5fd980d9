"""Safetensors files: the tensors' headers, and the values when they are measured."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open

from gonio.measuring.reading.entry import StoredTensor, TensorEntry, dtype_named, no_dtype
from gonio.measuring.reading.opened import Opened, intact, read_tensor

DTYPES = {
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


def open_safetensors(path: Path) -> Opened:
    """The tensors of a safetensors file and its header's texts. The format's own reader checks it; no values are read.

    That reader maps the file into memory to read tensors. Pages of a map count as this process's memory while it
    lasts, and torch refuses to map a file larger than memory. Therefore each tensor is read from its offset in
    the file, and its memory is released after it has been measured.

    Raises:
        UnreadableFileError: if the header does not fit the file.
    """
    with intact(path):
        with path.open("rb") as raw, safe_open(path, framework="np") as file:
            names = list(file.keys())  # opened for torch, it would map the file as writable memory
            (length,) = struct.unpack("<Q", raw.read(8))
            header = json.loads(raw.read(length))
        stored, others, described = {}, [], _described(texts_of(header))
        for name in names:
            shape, (begin, end) = tuple(header[name]["shape"]), header[name]["data_offsets"]
            dtype = DTYPES.get(header[name]["dtype"], header[name]["dtype"])
            if dtype_named(dtype) is None:  # of 4 and 6 bits
                others.append(TensorEntry.unread(name, no_dtype(dtype), shape, dtype))
                continue
            load = partial(read_tensor, path, 8 + length + begin, end - begin, dtype, shape)
            stored[name] = StoredTensor(shape, dtype, load, described=described.get(name, {}))
        return Opened(stored, tuple(others), metadata=texts_of(header))


def texts_of(header: Mapping[str, Any]) -> dict[str, str]:
    """The texts that a program has written into a header."""
    held = header.get("__metadata__")
    return {k: v for k, v in held.items() if isinstance(v, str)} if isinstance(held, dict) else {}


def _described(texts: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """For the key of each part of a tensor subclass, what torchao writes of the subclass."""
    found: dict[str, dict[str, Any]] = {}
    for name, text in texts.items():
        try:
            about: Any = json.loads(text) if text.startswith("{") else None
        except (ValueError, RecursionError):
            continue
        parts = about.get("_tensor_data_names") if isinstance(about, dict) else None
        path, _, last = name.rpartition(".")
        for part in parts if isinstance(parts, list) else ():
            found[f"{path}._{last}_{part}".removeprefix(".")] = about
    return found
