"""Archives of NumPy (`.npz`): one array per member, read when it is measured; objects are never unpickled."""

from __future__ import annotations

import zipfile
from functools import partial
from math import prod
from pathlib import Path

import numpy
import torch
from numpy.lib import format as npy
from torch import Tensor

from gonio.escaping import plain
from gonio.measuring.reading.entry import StoredTensor, dtype_named, no_dtype
from gonio.measuring.reading.opened import MOST_UNFOLDED, Listing, Opened, intact


def open_numpy(path: Path) -> Opened:
    """The arrays of an archive by their names. Headers are read, and no values yet.

    The format is that of `numpy.lib.format`. A member of a dtype that torch does not have is an entry that says so.

    Raises:
        UnreadableFileError: if the file is no archive, holds a name twice, or a member that is no array
            or has another size than its header says.
    """
    found = Listing()
    with intact(path), zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if name in found.stored or any(other.name == name for other in found.others):
                raise ValueError(f"it holds {plain(name, longest=80)} twice")
            held, said = _member(path, archive, info)
            if said:
                found.refuse(name, said, shape=held.shape, dtype=held.dtype)
            else:
                found.stored[name] = held
    return found.opened()


def _member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> tuple[StoredTensor, str]:
    """A member by its header, and why its values cannot be read; empty if they can."""
    with archive.open(info) as file:
        version = npy.read_magic(file)
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
        if read is None:
            raise ValueError(f"{plain(info.filename, longest=80)} has the version {version} of the format")
        shape, by_columns, dtype = read(file)
        start = file.tell()
    if any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"{plain(info.filename, longest=80)} has a size that is not a natural number")
    if not dtype.hasobject and info.file_size - start != (size := prod(shape) * dtype.itemsize):
        raise ValueError(f"{plain(info.filename, longest=80)} holds {info.file_size - start} bytes, not {size}")
    if info.file_size > MOST_UNFOLDED * min(info.compress_size, path.stat().st_size) + start:
        raise ValueError(f"{plain(info.filename, longest=80)} would unfold to {info.file_size} bytes")
    named = "objects of Python" if dtype.hasobject else dtype.name
    said = "" if dtype_named(named) is not None else no_dtype(str(dtype))
    said = "objects of Python, which are never unpickled" if dtype.hasobject else said
    return StoredTensor(shape, named, partial(_read, path, info.filename, start, shape, dtype, by_columns)), said


def _read(path: Path, member: str, start: int, shape: tuple[int, ...], dtype: numpy.dtype, by_columns: bool) -> Tensor:
    with intact(path), zipfile.ZipFile(path) as archive, archive.open(member) as file:
        raw = numpy.empty(prod(shape), dtype)
        file.read(start)
        view, done = raw.view(numpy.uint8).data, 0
        while block := file.read(min(1 << 20, raw.nbytes - done)):
            view[done : done + len(block)] = block
            done += len(block)
        if done != raw.nbytes or file.read(1):  # the last read compares the checksum
            raise EOFError("it ends before this array does")
    native = raw.astype(dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(native.reshape(shape, order="F" if by_columns else "C")).contiguous()
