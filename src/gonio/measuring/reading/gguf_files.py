"""GGUF files: the tensors' headers are read here, blocks of quantised values by the package `gguf`.

A file is: magic, version, the numbers of tensors and of keys; keys with their values; name, dimensions, type and offset
of each tensor; the data, aligned. The first dimension is the one whose entries are neighbours, so that torch's
shape is the reverse.

References: ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import numpy
import torch
from torch import Tensor

from gonio.errors import UnreadableFileError, import_extra
from gonio.escaping import plain
from gonio.measuring.reading.entry import StoredTensor
from gonio.measuring.reading.opened import HeaderFacts, Listing, Opened, gaps, intact, read_tensor

_PLAIN = {0: "float32", 1: "float16", 24: "int8", 25: "int16", 26: "int32", 27: "int64", 28: "float64", 30: "bfloat16"}
# Name, entries of a block and its bytes, of each type that has blocks; ggml.h and ggml-common.h.
_BLOCKS: dict[int, tuple[str, int, int]] = {
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_TOKENS = "tokenizer.ggml.tokens"
_KEYS = frozenset(("general.alignment", "general.architecture", "general.type", "split.tensors.count", _TOKENS))
_NUMBERS = (".block_count", ".nextn_predict_layers", ".embedding_length")  # after the architecture
_MOST_DIMS = 4  # GGML_MAX_DIMS
_DEPTH = 4  # of arrays in arrays
_CHUNK = 1 << 20  # entries that are dequantised together
_PACKAGE = "gguf"
_VERSIONS = (b"\2", b"\3")


@dataclass(frozen=True)
class _Info:
    """A tensor in the header."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


def open_gguf(path: Path) -> Opened:
    """The tensors of a GGUF file; no values are read yet.

    Raises:
        UnreadableFileError: if the header is damaged, or of a version before 2 or of big-endian numbers.
        MissingExtraError: if it holds quantised tensors, and the package `gguf` is not installed.
    """
    with intact(path), path.open("rb") as file:
        begin = file.read(8)
    _check_version(path, begin)
    with intact(path):
        with path.open("rb") as file:
            keys, infos, start = _header(file)
        data = path.stat().st_size - start
    reader = None
    if any(info.type in _BLOCKS for info in infos):
        reader = import_extra(
            f"{_PACKAGE}.quants", "reading quantised tensors of GGUF", package=_PACKAGE, extra=_PACKAGE
        )
    alignment = keys["general.alignment"]
    found, ends = Listing(), []
    for info in infos:
        size, said = _size(info, alignment)
        code = "G704" if said else ""
        if info.name in found.stored:
            found.problem("G703", info.name, f"twice in the header of {plain(path.name)}")
        if size:
            ends.append((info.offset, info.offset + size, info.name))
        kind = _PLAIN.get(info.type) or _BLOCKS.get(info.type, (f"type {info.type}", 1, 1))[0]
        if not said and info.offset + size > data:
            said = found.cut.add(path.name, start + data, start + info.offset + size, info.name)
        elif not said and reader is not None and info.type in _BLOCKS and not _readable(reader, _BLOCKS[info.type]):
            said = f"its type {kind} is not read by the package {_PACKAGE}"
        if said:
            found.refuse(info.name, said, code, shape=info.shape, dtype=kind)
        else:
            found.stored[info.name] = _stored(path, info, start, size, kind, reader)
    found.problems += [*found.cut.problems(), *gaps(sorted(ends), data, path.name, alignment=alignment)]
    architecture = keys.get("general.architecture")
    notes = (f"general.architecture is {plain(architecture, longest=80)}",) if isinstance(architecture, str) else ()
    return replace(found.opened(*notes), header=_facts(keys))


def _facts(keys: Mapping[str, Any]) -> HeaderFacts | None:
    """What the keys state of a language model; None of an adapter, a projector, or a later part of several."""
    architecture = keys.get("general.architecture")
    if not isinstance(architecture, str) or keys.get("general.type", "model") != "model":
        return None

    def number(key: str) -> int | None:
        return keys[key] if type(keys.get(key)) is int else None

    tokens = keys.get(_TOKENS)
    return HeaderFacts(
        number(f"{architecture}.block_count"),
        number(f"{architecture}.nextn_predict_layers") or 0,
        number(f"{architecture}.embedding_length"),
        tokens.stop if isinstance(tokens, range) else None,  # its len ends at 2⁶³
        number("split.tensors.count"),
    )


def _check_version(path: Path, start: bytes) -> None:
    """Refuse an intact file of another version of the format, or of numbers with the highest byte first."""
    version = start[4:]
    if start[:4] != b"GGUF" or len(version) < 4 or version[:1] in _VERSIONS:
        return
    big = version[3:] in _VERSIONS and not any(version[:3])
    found = "its numbers are stored with the highest byte first (big-endian)"
    found = found if big else f"its version {int.from_bytes(version, 'little')} of GGUF is not read"
    raise UnreadableFileError(str(path), found, "Versions 2 and 3 with little-endian numbers are: convert the model.")


def _header(file: BinaryIO) -> tuple[dict[str, Any], list[_Info], int]:
    """The keys that are used here, the tensors, and the byte at which the data begin."""

    def numbers(form: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", _exactly(file, struct.calcsize(f"<{form}")))

    magic, version = _exactly(file, 4), numbers("I")[0]
    if magic != b"GGUF":
        raise ValueError(f"it begins with {magic!r}, not with GGUF")
    if version not in (2, 3):
        raise ValueError(f"its version is {version}")
    tensors, count = numbers("QQ")
    keys: dict[str, Any] = {"general.alignment": 32}
    for _ in range(count):
        name = _text(file, numbers)
        value = _value(file, numbers, numbers("I")[0], 0)
        if name in _KEYS or name.endswith(_NUMBERS):
            keys[name] = value
    alignment = keys["general.alignment"]
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise ValueError(f"its alignment is {alignment!r:.40}, not a power of two")
    infos = []
    for _ in range(tensors):
        name, dims = _text(file, numbers), numbers("I")[0]
        if dims > _MOST_DIMS:
            raise ValueError(f"{plain(name, longest=80)} has {dims} dimensions")
        shape = tuple(reversed(numbers(f"{dims}Q")))
        infos.append(_Info(name, shape, *numbers("IQ")))
    return keys, infos, -(-file.tell() // alignment) * alignment


def _exactly(file: BinaryIO, size: int) -> bytes:
    if size > 1 << 24:
        raise ValueError(f"a text of {size} bytes")
    found = file.read(size)
    if len(found) != size:
        raise EOFError("it ends in its header")
    return found


def _text(file: BinaryIO, numbers: Callable[[str], tuple[Any, ...]]) -> str:
    return _exactly(file, numbers("Q")[0]).decode("utf-8", "replace")


def _value(file: BinaryIO, numbers: Callable[[str], tuple[Any, ...]], kind: int, depth: int) -> Any:
    """The value of a key; an array is passed over, and a range of its length stands for it."""
    if kind in _FORMATS:
        return numbers(_FORMATS[kind])[0]
    if kind == _STRING:
        return _text(file, numbers)
    if kind != _ARRAY or depth == _DEPTH:
        raise ValueError(f"a key has a value of the type {kind}")
    of, count = numbers("IQ")
    if of in _FORMATS:
        file.seek(count * struct.calcsize(f"<{_FORMATS[of]}"), 1)
        return range(count)
    for _ in range(count):
        _value(file, numbers, of, depth + 1)
    return range(count)


def _size(info: _Info, alignment: int) -> tuple[int, str]:
    """The bytes of a tensor, and why its place does not fit its header."""
    block, width = 1, 0
    if info.type in _PLAIN:
        width = getattr(torch, _PLAIN[info.type]).itemsize
    elif info.type in _BLOCKS:
        _, block, width = _BLOCKS[info.type]
    if not width:
        return 0, f"its type {info.type} is not known"
    if info.shape and info.shape[-1] % block:
        return 0, f"its rows have {info.shape[-1]} entries, no multiple of a block of {block}"
    size = prod(info.shape) // block * width
    if info.offset % alignment:
        return size, f"it begins at byte {info.offset}, no multiple of {alignment}"
    return size, ""


def _stored(path: Path, info: _Info, start: int, size: int, kind: str, reader: ModuleType | None) -> StoredTensor:
    if info.type in _PLAIN or reader is None:
        return StoredTensor(info.shape, kind, partial(read_tensor, path, start + info.offset, size, kind, info.shape))
    load = partial(_dequantized, path, start + info.offset, _BLOCKS[info.type], info.shape, reader)
    return StoredTensor(info.shape, kind, load, values="float32")


def _readable(reader: ModuleType, block: tuple[str, int, int]) -> bool:
    """Whether the package dequantises a type: it tries a block of zeros."""
    name, entries, width = block
    try:
        return bool(_values(reader, name, numpy.zeros((1, width), numpy.uint8)).size == entries)
    except (AttributeError, NotImplementedError):
        return False


def _values(reader: ModuleType, kind: str, raw: Any) -> Any:
    with numpy.errstate(all="ignore"):  # a scale that is not finite is a finding, not a warning
        return reader.dequantize(raw, getattr(reader.GGMLQuantizationType, kind))


def _dequantized(
    path: Path, offset: int, block: tuple[str, int, int], shape: tuple[int, ...], reader: ModuleType
) -> Tensor:
    """The values of a quantised tensor in float32, some blocks at a time."""
    kind, entries, width = block
    whole = torch.empty(shape, device="cpu", dtype=torch.float32)
    flat, step = whole.reshape(-1).numpy(), _CHUNK // entries
    for first in range(0, len(flat) // entries, step):
        count = min(step, len(flat) // entries - first)
        raw = read_tensor(path, offset + first * width, count * width, "uint8", (1, count * width)).numpy()
        flat[first * entries : (first + count) * entries] = _values(reader, kind, raw)[0]
    return whole
