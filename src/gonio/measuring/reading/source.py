"""Everything that can be measured: a model, a state dict, a file, or a folder that holds a model.

Files are read tensor by tensor, and no code in a file ever runs.
"""

from __future__ import annotations

import json
import os
import re
import struct
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from gonio.errors import GonioError, InvalidArgumentError, UnreadableFileError, closest, listing
from gonio.escaping import plain, redact, shorten
from gonio.geometry import Layout
from gonio.measuring.reading.adapters import MARKS, Adapter, Rotation, adapters_in, entries_of_adapters
from gonio.measuring.reading.entry import (
    PART,
    Entry,
    Packed,
    Stored,
    clean_names,
    dtype_named,
    infer,
    packed_weights,
    stored_entries,
)
from gonio.measuring.reading.model import entries_of_model

Source = nn.Module | Mapping[str, Any] | str | os.PathLike[str]

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")  # of torch checkpoints
_CLASS = re.compile(r"GLOBAL ([\w.]{1,200}) was not an allowed global")  # in errors of torch's reader
LARGEST_JSON = 1 << 20  # bytes, of a configuration; those of large models have some thousands


@dataclass(frozen=True)
class Contents:
    """A source's tensors, notes on how it was read, and the adapters of a file or state dict."""

    entries: list[Entry]
    notes: tuple[str, ...] = ()
    adapters: tuple[Adapter | Rotation, ...] = ()


@dataclass(frozen=True)
class Opened:
    """The tensors of files or of a state dict; an entry with a reason for everything else; notes."""

    stored: dict[str, Stored]
    others: tuple[Entry, ...] = ()
    notes: tuple[str, ...] = ()


def name_of(source: Source) -> str:
    """The name of the source in tables."""
    if isinstance(source, nn.Module):
        return type(source).__name__
    return redact(os.fspath(source)) if isinstance(source, (str, os.PathLike)) else "state dict"


def contents_of(source: Source, base: Source | None = None) -> Contents:
    """The source's tensors and, for each adapter in a file or state dict, its product and sum.

    A `config.json` beside a file describes its quantisation, an `adapter_config.json` the scale of its adapters.

    Args:
        base: of a source that holds adapters, the model that they adapt.

    Raises:
        InvalidArgumentError, UnreadableFileError: as :func:`gonio.measure`.
    """
    adapters: list[Adapter | Rotation] = []
    if isinstance(source, nn.Module):
        opened, made = Opened({}), entries_of_model(source)
    else:
        opened, quantization, adapter_config = _opened(source)
        made = [*_entries(opened.stored, quantization), *opened.others]
        if any(mark in name for name in opened.stored for mark in MARKS):
            adapters = adapters_in(opened.stored, adapter_config)
    if base is not None and not adapters:
        raise InvalidArgumentError(
            "measure(base=) adds adapters to the weights that they adapt",
            f"{name_of(source)} without adapters",
            "Pass the adapters first and the model that they adapt as base, or no base.",
        )
    if adapters:
        held = {} if base is None else {entry.path: entry for entry in contents_of(base).entries}
        made += entries_of_adapters(adapters, held)
    return Contents(made, opened.notes, tuple(adapters))


def _entries(stored: Mapping[str, Stored], quantization: Mapping[str, Any]) -> Iterator[Entry]:
    """One entry per tensor; a quantised weight is the entry of its first part, computed from all of them."""
    packed = {part: weight for weight in packed_weights(stored, quantization) for part in weight.parts}
    cleaned, shapes = clean_names(stored), {name: tensor.shape for name, tensor in stored.items()}
    for name, tensor in stored.items():
        weight = packed.get(name)
        if weight is None:
            layout, kind, reason, notes = infer(name, shapes)
            yield tensor.entry(cleaned[name], kind, layout, reason, notes)
        elif weight.parts[0] == name:
            yield _unpacked(weight, cleaned.get(weight.name, weight.name), shapes)
        else:
            reason = f"a part of the quantised {cleaned.get(weight.name, weight.name)}"
            yield tensor.entry(cleaned[name], PART, None, reason)


def _unpacked(weight: Packed, name: str, shapes: Mapping[str, tuple[int, ...]]) -> Entry:
    """The entry of a weight computed from its parts; a stack of matrices is read as one of experts."""
    layout, kind, reason, notes = infer(weight.name, {**shapes, weight.name: weight.stored.shape})
    if weight.matrices > 1 or layout is None:
        layout, kind, reason = Layout(blocks=weight.matrices), "linear", ""
    return weight.stored.entry(name, kind, layout, reason, (weight.note, *notes))


def _opened(source: Mapping[str, Any] | str | os.PathLike[str]) -> tuple[Opened, Mapping[str, Any], Mapping[str, Any]]:
    """The tensors, and the configurations of quantisation and of adapters in the file's folder."""
    if isinstance(source, Mapping):
        return _of_state(state_in(source, what="the mapping")), {}, {}
    if not isinstance(source, (str, os.PathLike)):
        raise _no_source(source)
    path = Path(source)
    files = _in_folder(path) if path.is_dir() else [path]
    opened = _of_file(files[0]) if len(files) == 1 else _of_parts(files)
    config, adapters = (_small_json(files[0].parent / f"{kind}config.json") for kind in ("", "adapter_"))
    quantization = config.get("quantization_config")
    quantization = quantization if isinstance(quantization, dict) else {}
    return opened, quantization, adapters if files[0].name.startswith("adapter_model") else {}


def _no_source(given: object) -> InvalidArgumentError:
    """The error for anything else."""
    found, do = type(given).__name__, "Pass one of them."
    if isinstance(given, type):
        found, do = f"the class {given.__name__}", f"Pass an instance of it: {given.__name__}(...)."
    elif isinstance(given, Tensor):
        do = "For one tensor use the functions of gonio.geometry."
    return InvalidArgumentError("measure() takes a model, a state dict or a path", found, do)


def absent(path: str | os.PathLike[str]) -> UnreadableFileError:
    """The error for a path without a file; it names similar files in the folder."""
    path = Path(path)
    if ".py:" in path.name:
        do = "In Python pass the model itself; FILE.py:NAME is a word of the command line."
        return UnreadableFileError(str(path), "there is no such file", do)
    near = closest(path.name, (file.name for file in islice(path.parent.glob("*"), 10_000) if file.is_file()))
    do = f"Did you mean {' or '.join(str(path.with_name(name)) for name in near)}?" if near else "Check the path."
    return UnreadableFileError(str(path), "there is no such file", do)


def _of_file(path: Path) -> Opened:
    if not path.is_file():
        raise absent(path)
    if path.name.endswith(".index.json"):
        return _of_shards(path)
    if path.suffix == ".safetensors":
        return Opened(stored_in_safetensors(path))
    if path.suffix in SUFFIXES:
        return _of_torch(path)
    known = ", ".join((".safetensors", ".safetensors.index.json", *SUFFIXES))
    raise UnreadableFileError(str(path), f"its kind {path.suffix!r} is not known", f"Known kinds: {known}.")


def _in_folder(folder: Path) -> list[Path]:
    """The one model of a folder, an index before single files; or its parts, where the index is missing."""
    for pattern in ("*.safetensors.index.json", "*.safetensors", "*.bin.index.json", "*.bin", "*.pt", "*.pth"):
        found = sorted(folder.glob(pattern))
        parts = [_PART.fullmatch(file.name) for file in found]
        if len(found) == 1 or (all(parts) and len({(m[1], m[3], m[4]) for m in parts if m}) == 1):
            return found
        if found:
            names = ", ".join(f.name for f in found[:8])
            raise UnreadableFileError(str(folder), f"it holds several: {names}", "Name one of them.")
    raise UnreadableFileError(str(folder), "it holds no checkpoint", "Name a .safetensors or .pt file.")


def _small_json(path: Path) -> dict[str, Any]:
    """The object in a small JSON file; an empty one if there is no such file, or if it holds anything else."""
    try:
        small = path.is_file() and path.stat().st_size <= LARGEST_JSON
        content = json.loads(path.read_text(encoding="utf-8")) if small else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


# --- state dicts, in memory and in checkpoints -----------------------------------------------------------------------

# The keys under which trainers store the weights, most trusted first; averages of the weights last.
_KEYS = ("state_dict", "model_state_dict", "model", "module", "net", "network", "params", "weights", "state")
_AVERAGES = ("state_dict_ema", "model_ema", "ema_state_dict", "params_ema", "ema", "shadow_params")
_DEPTH = 3


@dataclass(frozen=True)
class Found:
    """A state dict in a checkpoint.

    Attributes:
        key: its place, with dots between keys; "" for the checkpoint itself.
        beside: the keys of other state dicts in the checkpoint, which were not read.
    """

    state: Mapping[Any, Any]
    key: str
    beside: tuple[str, ...]


def state_in(content: Any, *, what: str) -> Found:
    """The state dict in a checkpoint: the least deep one, and of several the one under the most trusted key.

    Args:
        what: the name of `content` in the error.

    Raises:
        InvalidArgumentError: if it holds no named tensors.
    """
    places = list(_places(content, "", _DEPTH)) if isinstance(content, Mapping) else []
    if not places:
        held = f"a mapping with the keys [{some(content, repr)}]" if isinstance(content, Mapping) else None
        raise InvalidArgumentError(
            f"measure() looks for named tensors in {what}",
            held or type(content).__name__,
            f"Pass the state dict itself, or store it under one of: {', '.join(_KEYS)}.",
        )
    key, state = min(places, key=lambda place: place[0].count("."))  # the first of the least deep
    return Found(state, key.removeprefix("."), tuple(other.removeprefix(".") for other, _ in places if other != key))


def _places(content: Mapping[Any, Any], at: str, depth: int) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """(place, state dict) for the mapping, or for every state dict in it under the known keys."""
    if any(isinstance(value, Tensor) for value in content.values()):
        yield at, content
    elif depth:
        for key in (*_KEYS, *_AVERAGES):
            if isinstance(inner := content.get(key), Mapping):
                yield from _places(inner, f"{at}.{key}", depth - 1)


def some(names: Collection[Any], form: Callable[[Any], str] = str) -> str:
    """The first names, shortened, and how many more there are; for errors, which stay short whatever the names are."""
    shown = ", ".join(shorten(form(name)[:200]) for name in islice(names, 8))
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"


def _of_state(found: Found, read: Callable[[Any], Tensor] | None = None) -> Opened:
    """The tensors of a state dict; torch's quantised linear layers store (weight, bias) under one key.

    Args:
        read: returns the tensor of a key when it is measured; by default tensors are kept in memory.
    """
    stored: dict[str, Stored] = {}
    packed: dict[str, Stored] = {}
    others = []
    for name, value in found.state.items():
        path = str(name).removesuffix("._packed_params").removesuffix("._packed_params")
        if isinstance(value, Tensor):
            stored[str(name)] = Stored.of(value, read and partial(read, name))
        elif path != str(name) and isinstance(value, tuple) and value and isinstance(value[0], Tensor):
            packed[f"{path}.weight"] = Stored.of(value[0])
        elif value is not None:
            kind = type(value).__name__
            others.append(Entry(str(name), kind, None, None, f"not a tensor but {kind}"))
    notes = [f"read from {plain(found.key)!r} of the checkpoint"] if found.key else []
    if found.beside:
        beside = listing([plain(key) for key in found.beside], limit=4)
        notes.append(f"not read: {beside}, of the same checkpoint")
    return Opened(stored | packed, tuple(others), tuple(notes))


# --- safetensors -----------------------------------------------------------------------------------------------------

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
    said = f"it is not an intact file of its kind ({str(error)[:300]})"
    return UnreadableFileError(str(path), said, "Copy or download it again.")


# --- torch checkpoints -----------------------------------------------------------------------------------------------

REMAP = 256 << 20  # bytes of tensors after which a checkpoint is mapped again


def _of_torch(path: Path) -> Opened:
    """The tensors of a torch checkpoint, read when they are measured.

    Torch maps an archive into memory, and pages once read count as this process's memory while the map lasts:
    after every :data:`REMAP` bytes the file is loaded again. Files of the old format are loaded whole.
    """
    zipped = _is_archive(path)

    def load() -> Found:
        return state_in(_unpickled(path, mapped=zipped), what=repr(path.name))

    found, touched = load(), 0

    def read(name: Any) -> Tensor:
        nonlocal found, touched
        if zipped and touched > REMAP:
            del found  # releases the old map before the new one is made
            found, touched = load(), 0
        tensor: Tensor = found.state[name]
        _check_stored(tensor)
        touched += tensor.nbytes if tensor.layout == torch.strided else 0
        return tensor

    return _of_state(found, read)


def load_torch(path: Path) -> Any:
    """The content of a torch file: tensors and plain containers, in memory.

    Raises:
        UnreadableFileError: if the file is damaged, holds more than data, or unpacks to more than its size.
    """
    _is_archive(path)
    content = _unpickled(path, mapped=False)
    try:
        for value in content.values() if isinstance(content, dict) else [content]:
            _check_stored(value)
    except ValueError as error:
        raise UnreadableFileError(str(path), str(error), "Save the tensor's clone().") from error
    return content


def state_of_torch(path: Path) -> tuple[Found, Any]:
    """The state dict of a torch checkpoint, to be loaded into a model, and the content of the file.

    Raises:
        UnreadableFileError: as :func:`load_torch`, for keys that are not text, and for a tensor with more entries
            than the file stores.
        InvalidArgumentError: if it holds no named tensors.
    """
    content = load_torch(path)
    found = state_in(content, what=repr(path.name))
    try:
        for name, value in found.state.items():
            if not isinstance(name, str):
                raise ValueError(f"the key {shorten(repr(name))} is not text")
            _check_stored(value)
    except ValueError as error:
        raise UnreadableFileError(str(path), f"it is no state dict: {error}", "Save model.state_dict().") from error
    return found, content


def _check_stored(value: Any) -> None:
    """Refuse a tensor with more entries than its storage: a kilobyte can claim terabytes by a stride of 0."""
    if isinstance(value, Tensor) and value.layout == torch.strided and value.numel() > stored_entries(value):
        raise ValueError(f"a tensor has {value.numel():,} entries, of which {stored_entries(value):,} are stored")


def _unpickled(path: Path, *, mapped: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a hostile pickle provokes almost any of them
        try:
            why = _why_not(path, error)
        except OSError as refused:
            why = f"the system refuses it ({refused.strerror})", "Check the permissions."
        raise UnreadableFileError(str(path), *why) from error


def _why_not(path: Path, error: Exception) -> tuple[str, str]:
    """Why torch does not read a file, and what to do."""
    with path.open("rb") as file:
        start = file.read(4)
    if not start:
        return "it is empty (0 bytes)", "Save it again."
    if start.startswith(b"PK") and not zipfile.is_zipfile(path):
        return "it is damaged: the end of the archive is missing", "Copy, download or save it again."
    if not start.startswith((b"PK", b"\x80")):
        return f"it is damaged or no checkpoint of torch: it begins with {start!r}", "Save model.state_dict()."
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    known = [line for line in lines if line.startswith("WeightsUnpickler error")]
    said = (known or lines or [type(error).__name__])[0]
    do = "Code in a file is never run here: save model.state_dict(), best as .safetensors."
    held = _CLASS.search(said)
    if held:
        return f"it holds more than tensors and plain containers: an object of {held[1]}", do
    return f"it is damaged or holds more than tensors and plain containers ({said[:300]})", do


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
        said = f"its archive would unfold to {unfolded} bytes"
        raise UnreadableFileError(str(path), said, "Such a file is not written by torch.save.")
    return True


# --- several files: an index that names the file of each tensor, or parts numbered by their names --------------------

LARGEST_INDEX = 100 << 20  # bytes; the index of a model of a million tensors is smaller
_PART = re.compile(r"(.+)-(\d+)-of-(\d+)(\.[a-z]+)")


def _of_shards(index: Path) -> Opened:
    """The tensors of all shards that an index names. A missing or damaged shard takes only its own tensors with it."""
    wanted, doubled = _weight_map(index)
    shards = {shard: _shard(index.parent / shard) for shard in dict.fromkeys(wanted.values())}
    stored, missing = {}, []
    for name, shard in wanted.items():
        tensors = shards[shard]
        if not isinstance(tensors, str) and name in tensors:
            stored[name] = tensors[name]
        else:
            reason = tensors if isinstance(tensors, str) else f"the shard {plain(shard)} does not hold it"
            missing.append(Entry(name, "", None, None, reason))
    notes = [f"the index names {plain(name)} twice; the last place is read" for name in doubled[:5]]
    held = [(name, shard) for shard, tensors in shards.items() if not isinstance(tensors, str) for name in tensors]
    strays = {
        "in the shards but not in the index, and not read": [
            f"{plain(name)} (in {plain(shard)})" for name, shard in held if name not in wanted
        ],
        "in several shards, read where the index says": [
            f"{plain(name)} (in {plain(shard)} too)" for name, shard in held if wanted.get(name, shard) != shard
        ],
    }
    notes += [f"{what}: {listing(names, limit=4)}" for what, names in strays.items() if names]
    return Opened(stored, tuple(missing), tuple(notes))


def _shard(path: Path) -> dict[str, Stored] | str:
    """The tensors of a shard, or the reason why there are none."""
    if not path.is_file():
        return f"its shard {plain(path.name)} is missing"
    try:
        return stored_in_safetensors(path) if path.suffix == ".safetensors" else _of_torch(path).stored
    except GonioError as error:
        return f"its shard {plain(path.name)} cannot be read: {error}"


def _weight_map(index: Path) -> tuple[dict[str, str], list[str]]:
    """Tensor → shard, and the names that occur twice in the index."""
    if index.stat().st_size > LARGEST_INDEX:
        raise UnreadableFileError(str(index), f"it is larger than {LARGEST_INDEX} bytes", "It is no index.")
    doubled: list[str] = []

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        doubled.extend(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        return dict(pairs)

    try:
        content = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=once)
        placed = {str(name): str(shard) for name, shard in content["weight_map"].items()}
    except Exception as error:
        said = f"it is not an index with a weight_map ({str(error)[:300]})"
        raise UnreadableFileError(str(index), said, "Name the shards one by one.") from error
    for shard in set(placed.values()):
        if PurePosixPath(shard).name != shard or "\\" in shard or shard in ("", ".", ".."):
            said = f"it names a file outside its folder: {shorten(repr(shard))}"
            raise UnreadableFileError(str(index), said, "Shards lie beside their index.")
    return placed, [name for name in doubled if name in placed]


def _of_parts(files: list[Path]) -> Opened:
    """The tensors of parts without an index; the names of the parts tell how many there should be."""
    stored: dict[str, Stored] = {}
    notes = ["the parts have no index: what is missing cannot be told"]
    for file in files:
        held = _shard(file)
        if isinstance(held, str):
            raise UnreadableFileError(str(file), held, "Copy or download it again.")
        twice = [plain(name) for name in held if name in stored]
        notes += [f"in several parts, read from the first: {listing(twice, limit=4)}"] if twice else []
        stored = {**held, **stored}
    expected = int(files[0].stem.rpartition("-of-")[2])
    if expected != len(files):
        notes.append(f"{len(files)} of {expected} parts are there")
    return Opened(stored, (), tuple(notes))
