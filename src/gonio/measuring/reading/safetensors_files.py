"""Safetensors files: the tensors' headers, and the values when they are measured."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from gonio.errors import UnreadableFileError
from gonio.escaping import plain
from gonio.measuring.reading.content import misnamed
from gonio.measuring.reading.entry import StoredTensor, dtype_named
from gonio.measuring.reading.state_dicts import Opened, Problem
from gonio.messages import say

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
    try:
        with safe_open(path, framework="np") as file:  # for torch it would map the file as writable memory
            names = list(file.keys())
        with path.open("rb") as raw:
            (length,) = struct.unpack("<Q", raw.read(8))
            header = json.loads(raw.read(length))
        stored, described = {}, _described(texts_of(header))
        for name in names:
            shape, (begin, end) = tuple(header[name]["shape"]), header[name]["data_offsets"]
            dtype = DTYPES.get(header[name]["dtype"], header[name]["dtype"])
            load = partial(read_tensor, path, 8 + length + begin, end - begin, dtype, shape)
            stored[name] = StoredTensor(shape, dtype, load, described=described.get(name, {}))
        return Opened(stored, metadata=texts_of(header))
    except Exception as error:  # the reader's own errors, OSError, and those that a hostile header provokes
        raise damaged(path, error) from error


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


def read_tensor(path: Path, offset: int, size: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """The tensor of these bytes of a file, in a dtype of torch."""
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
                raise damaged(path, EOFError("it ends before this tensor does"))
            done += got
    return data.view(dtype).reshape(shape)


def gaps(ends: list[tuple[int, int, str]], data: int, file: str, *, alignment: int = 1) -> Iterator[Problem]:
    """Tensors that overlap, and bytes between and after them that belong to none.

    Args:
        ends: (first byte, byte after the last one, name) of each tensor, sorted. `data`: bytes that there are.
        alignment: tensors begin at multiples of it, so that fewer bytes than this may lie between two.
    """
    reached, last = 0, ""
    for begin, end, name in ends:
        if begin < reached:
            count = min(reached, end) - begin
            yield Problem("G704", name, f"overlaps {plain(last)}: {count} bytes belong to both")
        elif begin - reached >= alignment:
            yield Problem("G705", file, f"{begin - reached} bytes before {plain(name)} belong to no tensor")
        if end > reached:
            reached, last = end, name
    if data - reached >= alignment:
        yield Problem("G705", file, f"{data - reached} bytes after the last tensor belong to none")


def damaged(path: Path, error: BaseException) -> UnreadableFileError:
    """The error for a file that its reader refuses, or whose content is of another kind."""
    said = f"it is not an intact file of its kind ({str(error)[:300]})"
    return misnamed(path) or UnreadableFileError(str(path), said, say("Copy or download it again."))
