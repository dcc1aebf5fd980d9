"""Files of `flax.serialization` (`.msgpack`): nested maps whose leaves are arrays.

An array is an extension of type 1, which holds (shape, name of the dtype, bytes); one of more than 1 GiB is a map of
flat pieces. The headers are followed here, because the package `msgpack` would read all bytes into memory; an array is
read from its place. The format does not name classes of layers: which dimension of a kernel holds the outputs is told
by its bias alone.

References: flax.serialization of Flax; msgpack/msgpack, spec.md.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gonio.geometry import Layout
from gonio.measuring.reading.entry import FEW_DIMENSIONS, Axes, StoredTensor, dtype_named, no_dtype, wrong_size
from gonio.measuring.reading.opened import Listing, Opened, Problem, intact, naturals, read_tensor

_CHUNKED = "__msgpack_chunked_array__"
_ARRAYS = (1, 3)  # types of extensions: an array, and a scalar of NumPy, which is stored as one
_DEPTH = 64  # of maps in maps
_MOST = 10_000_000  # values in a file; the largest models have some thousands
_STATE = ("params", "opt_state")  # fields of flax.training.train_state.TrainState
# First byte → (what follows, bytes of its length); spec.md, section Formats.
_SIZED = {
    **{0xC4 + i: ("bin", 1 << i) for i in range(3)},
    **{0xC7 + i: ("ext", 1 << i) for i in range(3)},
    **{0xD9 + i: ("str", 1 << i) for i in range(3)},
    **{0xDC + i: ("array", 2 << i) for i in range(2)},
    **{0xDE + i: ("map", 2 << i) for i in range(2)},
}
_FORMS = (">f", ">d", ">B", ">H", ">I", ">Q", ">b", ">h", ">i", ">q")
_NUMBERS = {0xCA + number: form for number, form in enumerate(_FORMS)}
_PLAIN = {0xC0: None, 0xC2: False, 0xC3: True}


@dataclass(frozen=True)
class _Array:
    """The shape and dtype of an array, and the places of its bytes: (first byte, number) of each piece."""

    shape: tuple[int, ...]
    dtype: str
    places: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        return sum(size for _, size in self.places)


def open_flax(path: Path) -> Opened:
    """The arrays of a file; no values are read yet.

    Raises:
        UnreadableFileError: if it is damaged, or no map of msgpack.
    """
    with intact(path), path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
        if not (0x80 <= raw[0] < 0x90 or raw[0] in (0xDE, 0xDF)):
            raise ValueError("it is no map of msgpack")
        walker = _Walker(raw)
        tree, length = walker.value(0), len(raw)
    tree = tree if isinstance(tree, dict) else {"": tree}  # one array in pieces is a map too
    found = Listing(problems=[Problem("G703", name, "twice in the same map") for name in walker.doubled])
    if walker.at != length:
        found.problem("G705", path.name, f"{length - walker.at} bytes after the last array belong to none")
    for name, array in dict(_arrays(tree, "")).items():
        dtype = dtype_named(array.dtype)
        size = 0 if dtype is None else prod(array.shape) * dtype.itemsize
        if dtype is None:
            found.refuse(name, no_dtype(array.dtype), shape=array.shape, dtype=array.dtype)
        elif size != array.size:
            said = wrong_size(array.size, prod(array.shape), size)
            found.refuse(name, said, "G704", shape=array.shape, dtype=array.dtype)
        else:
            found.stored[name] = StoredTensor(array.shape, array.dtype, partial(_read, path, array))
    stored = found.stored
    # whether all kernels whose bias fits one dimension alone have their outputs on the last one
    told = {at[0] == len(t.shape) - 1 for name, t in stored.items() if len(at := _candidates(name, stored)) == 1}
    last = told == {True}
    stored = {name: replace(tensor, axes=_axes(name, stored, last)) for name, tensor in stored.items()}
    whole = set(_STATE) <= set(tree)
    found.beside = {name: tensor for name, tensor in stored.items() if whole and name.startswith("opt_state.")}
    found.stored = {name: tensor for name, tensor in stored.items() if name not in found.beside}
    return found.opened(*found.of_optimizer)


class _Walker:
    """The values of a file, with places instead of the bytes of arrays.

    Attributes:
        at: the byte after the last value that was followed. `doubled`: keys that a map has twice.
    """

    def __init__(self, raw: mmap.mmap) -> None:
        self._raw, self.at, self._count = raw, 0, 0
        self.doubled: list[str] = []

    def value(self, depth: int) -> Any:
        """The next value: a map, an array, a text, a number; None for all that is not used."""
        self._count += 1
        if depth > _DEPTH or self._count > _MOST:
            raise ValueError(f"more than {_DEPTH} levels of maps, or {_MOST} values")
        first = self._take(1)[0]
        if first in _PLAIN:
            return _PLAIN[first]
        if first < 0x80 or first >= 0xE0:
            return first if first < 0x80 else first - 0x100
        if first in _NUMBERS:
            return struct.unpack(_NUMBERS[first], self._take(struct.calcsize(_NUMBERS[first])))[0]
        if 0xD4 <= first <= 0xD8:
            return self._extension(1 << (first - 0xD4))
        if first in _SIZED:
            kind, width = _SIZED[first]
            count = int.from_bytes(self._take(width), "big")
        elif first < 0xC0:
            kind = "map" if first < 0x90 else "array" if first < 0xA0 else "str"
            count = first & (31 if kind == "str" else 15)
        else:
            raise ValueError(f"a value begins with the byte {first}")
        match kind:
            case "map":
                return self._map(count, depth)
            case "array":
                inner = ((str(number), self.value(depth + 1)) for number in range(count))
                return {key: held for key, held in inner if isinstance(held, (_Array, dict)) and held}
            case "ext":
                return self._extension(count)
            case "str":
                return self._take(count).decode("utf-8", "replace")
        self._skip(count)
        return None

    def _take(self, count: int) -> bytes:
        start = self.at
        self._skip(count)
        return self._raw[start : self.at]

    def _skip(self, count: int) -> None:
        self.at += count
        if self.at > len(self._raw):
            raise EOFError(f"the file ends {self.at - len(self._raw)} bytes before a value does")

    def _map(self, count: int, depth: int) -> Any:
        found: dict[str, Any] = {}
        for _ in range(count):
            key = str(self.value(depth + 1))
            held = self.value(depth + 1)
            if key in found:
                self.doubled.append(key)
            found[key] = held
        if _CHUNKED not in found:
            return found
        shape, pieces = found.get("shape"), found.get("chunks")
        if not isinstance(shape, dict) or not isinstance(pieces, dict) or not pieces:
            raise ValueError("an array of pieces has no shape or no pieces")
        parts = [pieces[str(number)] for number in range(len(pieces))]
        sizes = tuple(shape[str(number)] for number in range(len(shape)))
        if any(not isinstance(part, _Array) or part.dtype != parts[0].dtype for part in parts):
            raise ValueError("an array of pieces of several dtypes")
        return _Array(naturals(sizes), parts[0].dtype, tuple(place for part in parts for place in part.places))

    def _extension(self, count: int) -> Any:
        kind = self._take(1)[0]
        end = self.at + count
        if kind not in _ARRAYS:
            self._skip(count)
            return None
        first = self._take(1)[0]
        if first != 0x93:
            raise ValueError("an array is no list of shape, dtype and bytes")
        shape, dtype = self._numbers(), self._word()
        code = self._take(1)[0]
        if code not in (0xC4, 0xC5, 0xC6):
            raise ValueError("an array's values are no bytes")
        size = int.from_bytes(self._take(1 << (code - 0xC4)), "big")
        place = (self.at, size)
        self._skip(size)
        if self.at != end:
            raise ValueError(f"an array ends {self.at - end} bytes after its extension")
        return _Array(naturals(shape), dtype, (place,))

    def _numbers(self) -> tuple[Any, ...]:
        """A short list of numbers."""
        first = self._take(1)[0]
        if not 0x90 <= first < 0xA0:
            raise ValueError("a shape is no list")
        return tuple(self.value(_DEPTH) for _ in range(first & 15))

    def _word(self) -> str:
        """A short text, which flax also writes as bytes."""
        first = self._take(1)[0]
        if not 0xA0 <= first < 0xC0 and first not in (0xC4, 0xD9):
            raise ValueError("a dtype is no text")
        return self._take(first & 31 if first < 0xC0 else self._take(1)[0]).decode("utf-8", "replace")


def _arrays(tree: Mapping[str, Any], at: str) -> Iterator[tuple[str, _Array]]:
    for key, held in tree.items():
        name = f"{at}.{key}" if at else key
        if isinstance(held, _Array):
            yield name, held
        elif isinstance(held, dict):
            yield from _arrays(held, name)


def _read(path: Path, array: _Array) -> Tensor:
    dtype = getattr(torch, array.dtype)
    whole = torch.empty(array.size, dtype=torch.uint8, device="cpu")
    done = 0
    for begin, size in array.places:
        whole[done : done + size] = read_tensor(path, begin, size, "uint8", (size,))
        done += size
    return whole.view(dtype).reshape(array.shape)


# --- axes ------------------------------------------------------------------------------------------------------------


def _candidates(name: str, stored: Mapping[str, StoredTensor]) -> tuple[int, ...]:
    """The dimensions of a kernel that have as many entries as the bias beside it; none without a bias."""
    path, _, last = name.rpartition(".")
    bias = stored.get(f"{path}.bias" if path else "bias")
    if last != "kernel" or bias is None or len(bias.shape) != 1:
        return ()
    return tuple(dim for dim, size in enumerate(stored[name].shape) if size == bias.shape[0])


def _axes(name: str, stored: Mapping[str, StoredTensor], outputs_last: bool) -> Axes:
    n = len(stored[name].shape)
    if n < 2:
        return Axes(reason=FEW_DIMENSIONS[n])
    found = _candidates(name, stored)
    if not 2 <= n <= 5 or not (len(found) == 1 or (n - 1 in found and outputs_last)):
        return Axes(reason="no bias tells which dimension holds its outputs")
    if found[-1] == n - 1:
        kind = "linear" if n == 2 else f"{n - 2}-d convolution"
        notes = ("stored with its outputs last, as the bias tells", *(("groups unknown, read as 1",) if n > 2 else ()))
        return Axes((n - 1, n - 2, *range(n - 2)), kind, Layout(), notes=notes)
    if n == 2:
        return Axes((0, 1), "linear", Layout(), notes=("stored with its outputs first, as the bias tells",))
    return Axes(reason="its bias fits a dimension that holds no outputs in flax")
