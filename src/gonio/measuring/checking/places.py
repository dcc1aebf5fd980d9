"""Where the tensors of a checkpoint are, and what is wrong with its files; no values are read.

Other readers refuse a file whose header does not fit. Here every tensor of such a file is named with its problem, and
all bytes of a file are accounted for.
"""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from gonio.errors import GonioError, InvalidArgumentError, RefusedFileError, listing
from gonio.escaping import plain
from gonio.measuring.reading.deepspeed_files import archives_in, is_universal, is_zero
from gonio.measuring.reading.entry import (
    StoredTensor,
    dtype_name,
    dtype_named,
    header_of,
    is_blown_up,
    numbers_of,
    stored_entries,
)
from gonio.measuring.reading.formats import ENDINGS, stored_weights
from gonio.measuring.reading.opened import CutOff, HeaderFacts, Opened, Problem, fill, gaps, intact
from gonio.measuring.reading.optimizers import in_memory, optimizers_in
from gonio.measuring.reading.pickles import ARRAY, is_array, record_start
from gonio.measuring.reading.safetensors_files import DTYPES, texts_of
from gonio.measuring.reading.shards import (
    are_parts,
    around,
    is_index,
    misplaced,
    missing_in,
    of_one_part,
    of_parts,
    parsed,
    placed_in,
    weight_map,
)
from gonio.measuring.reading.source import absent, files_in, left_out, open_file
from gonio.measuring.reading.state_dicts import holders, leaves, state_in
from gonio.measuring.reading.torch_files import SUFFIXES, mapped_content, of_module, of_parallel, optimizer_files
from gonio.messages import Message, say

LARGEST_HEADER = 100_000_000  # bytes, the limit of the format
_HALF_BYTES = {"F4": 1, "F6_E2M3": 1.5, "F6_E3M2": 1.5}  # half bytes per entry of dtypes that torch does not have
_DEPTH = 32  # levels of containers in a checkpoint

CODES = "codes"

Read = Callable[[int, Any], None]
Content = str | os.PathLike[str] | Mapping[str, Any]


@dataclass(frozen=True)
class Place:
    """A tensor that was found, before its values are read.

    Attributes:
        open: a context with a function that fills an array from the given byte of the tensor on.
        values: the dtype of these bytes, where it is not `dtype`, as of values that are dequantised; :data:`CODES` of
            packed codes that are stored as floats.
        beside: whether it is not of the model. `reason`: why it cannot be read. `damaged`: whether that is
            damage. `state`: whether it is an optimizer's. `address`: of its values in memory, 0 of those in a file.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    size: int = 0
    open: Callable[[], Any] = nullcontext
    beside: bool = False
    reason: str = ""
    values: str = ""
    state: bool = False
    damaged: bool = False
    address: int = 0


@dataclass(frozen=True)
class Inventory:
    """What a checkpoint holds.

    Attributes:
        places: its tensors. `problems`: of its files. `notes`: remarks. `files`: their names.
        metadata: texts of a header. `header`: what it states of the model.
        objects: names of what the model's state dict holds that is no tensor.
    """

    places: tuple[Place, ...]
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    objects: tuple[str, ...] = ()
    header: HeaderFacts | None = None


def inventory(source: object) -> Inventory:
    """The tensors of a file, of a folder with a model, of an index with its shards, or of a state dict.

    Raises:
        UnreadableFileError: for a file of which nothing can be read.
        InvalidArgumentError: for anything else than a path or a mapping.
    """
    if isinstance(source, Mapping):
        return _of_content(source, "")
    if not isinstance(source, (str, os.PathLike)):
        found_type = type(source).__name__
        raise InvalidArgumentError("check() takes a path or a state dict", found_type, "Pass model.state_dict().")
    path = Path(source)
    files, others = files_in(path) if path.is_dir() else ([path], [])
    if are_parts(files, of_folder=path.is_dir()):
        found = _of_parts(files)
    elif not (files[0].is_file() or files[0].is_dir()):
        raise absent(files[0])
    else:
        found = _of_index(files[0]) if is_index(files[0]) else _of_file(files[0])
    found = replace(found, problems=(*found.problems, *around(files, of_folder=path.is_dir())))
    if not path.is_dir():
        return replace(found, notes=(*found.notes, *of_one_part(path)))
    if files[0] == path:
        return found
    found = _with_optimizers(found, path, files)
    unread = [file for file in others if file not in found.files]
    return replace(found, notes=(*found.notes, *left_out(path, unread, files)))


def _with_optimizers(found: Inventory, folder: Path, model: list[Path]) -> Inventory:
    """The model with the tensors of torch files beside it that hold the state of an optimizer."""
    for file in optimizer_files(folder, model)[0]:
        held = _of_file(file)
        places = (replace(place, name=f"{file.name}: {place.name}", beside=True) for place in held.places)
        problems = (*found.problems, *held.problems)
        found = replace(found, places=(*found.places, *places), problems=problems, files=(*found.files, file))
    return found


def _of_file(path: Path) -> Inventory:
    if path.suffix == ".safetensors" and not path.is_dir():
        return _of_safetensors(path)
    if path.suffix in SUFFIXES and not path.is_dir():
        found = _of_content(mapped_content(path), path.name)
        return replace(found, problems=(*found.problems, *_checksums(path)), files=(path,))
    found = _of_opened(path, open_file(path))
    if not path.is_dir():
        return found
    archives = archives_in(path) if is_universal(path) else []
    archives += [file for file in sorted(path.glob("*_states.pt")) if is_zero(path)]
    return replace(found, problems=(*found.problems, *(p for file in archives for p in _checksums(file))))


def vectors_of(found: Inventory) -> dict[str, tuple[tuple[int, ...], Callable[[], Tensor | None]]]:
    """The model's vectors that can be read: shape and a function that reads it, by name."""
    own = (place for place in found.places if len(place.shape) == 1 and not place.beside and not place.reason)
    return {place.name: (place.shape, partial(_values, place)) for place in own}


def with_codes(found: Inventory) -> Inventory:
    """What was found, with the places of floats that are packed codes: their weight has another number of entries.

    bitsandbytes packs 4-bit codes into the dtype of the other weights (`bnb_4bit_quant_storage`), so that FSDP can
    join them; as floats, such bits may be NaN.
    """
    own = {place.name: place for place in found.places if not (place.beside or place.reason)}
    suspects = [name for name in own if name.endswith(ENDINGS)]
    stored = {
        name: StoredTensor(place.shape, place.dtype, partial(_stored, place)) for name, place in own.items() if suspects
    }
    codes = set()
    for weight in stored_weights(suspects, stored, {}):
        first = stored[weight.parts[0]]
        if first.floating and weight.stored is not None and weight.stored.entries != first.entries:
            codes.add(weight.parts[0])
    coded = (replace(one, values=CODES) if one.name in codes and not one.beside else one for one in found.places)
    return replace(found, places=tuple(coded))


def _stored(place: Place) -> Tensor:
    """The values of a place as a reader of formats loads them."""
    values = _values(place)
    if values is None:
        return torch.zeros(place.shape, device="cpu", dtype=torch.float32)
    return values.reshape(place.shape)


def _values(place: Place) -> Tensor | None:
    dtype = dtype_named(place.values or place.dtype)
    if dtype is None or not place.size:
        return None
    data = torch.empty(place.size, dtype=torch.uint8, device="cpu")
    with place.open() as read:
        read(0, data.numpy())
    return data.view(dtype)


# --- several files ---------------------------------------------------------------------------------------------------


def _of_files(files: Mapping[str, Path]) -> tuple[dict[str, Inventory], list[Problem]]:
    """What each file holds, by its name, and a problem for each that cannot be read; nothing of one that is absent."""
    held, problems = {}, []
    for name, file in files.items():
        try:
            held[name] = _of_file(file) if file.is_file() else Inventory(())
        except RefusedFileError:
            raise
        except GonioError as error:
            problems.append(Problem("G701", name, str(error)))
            continue
        problems += held[name].problems
    return held, problems


def _of_parts(files: list[Path]) -> Inventory:
    """Parts without an index; their names say how many there are."""
    held, problems = _of_files({file.name: file for file in files})
    problems += of_parts(files, Counter(place.name for found in held.values() for place in found.places))
    places = tuple(place for found in held.values() for place in found.places)
    note = "the parts have no index: a missing tensor cannot be noticed"
    there, headers = tuple(filter(Path.is_file, files)), (found.header for found in held.values())
    header = next((each for each in headers if each is not None), None)
    return Inventory(places, tuple(problems), (note,), there, header=header)


def _of_index(index: Path) -> Inventory:
    """The shards that an index names, each tensor held against it."""
    wanted, doubled, stated = weight_map(index)
    shards = {shard: index.parent / shard for shard in dict.fromkeys(wanted.values())}
    held, problems = _of_files(shards)
    problems = [
        problem if problem.path in held else replace(problem, tensors=placed_in(problem.path, wanted))
        for problem in problems
    ]
    gone = missing_in(index, shards)
    names = {
        shard: [*(place.name for place in found.places), *(name for name in found.objects if name in wanted)]
        for shard, found in held.items()
    }
    problems += misplaced(wanted, doubled, names, gone)
    places = tuple(place for found in held.values() for place in found.places)
    notes = tuple(dict.fromkeys(note for found in held.values() for note in found.notes))
    notes += _of_size(stated, places, list(shards.values())) if len(held) == len(shards) and not gone else ()
    there = [file for shard, file in shards.items() if shard not in gone]
    return Inventory(places, tuple(problems), notes, (index, *there))


def _of_size(stated: int | None, places: Sequence[Place], files: Sequence[Path]) -> tuple[Message, ...]:
    """A note where an index states another size of all tensors than they have; nothing reads that number.

    Some programs count tensors that share memory once, others write the size of the files with their headers.
    """
    held, shared = sum(place.size for place in places), {place.address or place.name: place.size for place in places}
    if stated is None or stated in (held, sum(shared.values()), sum(file.stat().st_size for file in files)):
        return ()
    return (say("the index states {stated:,} bytes of tensors, its shards hold {held:,}", stated=stated, held=held),)


# --- safetensors -----------------------------------------------------------------------------------------------------


def _of_safetensors(path: Path) -> Inventory:
    header, start, doubled = _header(path)
    data = path.stat().st_size - start
    problems = [Problem("G703", name, say("twice in the header of {name}", name=plain(path.name))) for name in doubled]
    places: list[tuple[int, Place]] = []
    ends, cut = [], CutOff()
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = str(entry["dtype"]), tuple(entry["shape"])
            begin, end = entry["data_offsets"]
            if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
                raise ValueError("a size is not a natural number")
        except (KeyError, TypeError, ValueError) as error:
            problems.append(
                Problem("G704", name, say("its entry in the header is invalid ({error})", error=str(error)[:100]))
            )
            continue
        said = _misfit(dtype, shape, begin, end)
        problems += [Problem("G704", name, said)] if said else []
        if not said and end > data:
            said = cut.add(path.name, start + data, start + end, name)
        opened = partial(_opened, path, start + begin)
        named = DTYPES.get(dtype, dtype)
        places.append((begin, Place(name, path.name, named, shape, max(end - begin, 0), opened, reason=said)))
        if begin < end:
            ends.append((begin, end, name))
    problems += [*cut.problems(), *gaps(sorted(ends), data, path.name)]
    in_order = tuple(place for _, place in sorted(places, key=lambda pair: pair[0]))  # disks read in one direction
    return Inventory(in_order, tuple(problems), files=(path,), metadata=texts_of(header))


def _header(path: Path) -> tuple[dict[str, Any], int, list[str]]:
    """The header of a safetensors file, the byte at which the data begin, and names that occur twice.

    Raises:
        UnreadableFileError: if it is not one.
    """
    with intact(path):
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, LARGEST_HEADER):
                raise ValueError(f"{size} bytes, of which the header would take {length}")
            header, doubled = parsed(file.read(length))
        if not isinstance(header, dict):
            raise ValueError("the header is no object")
    return header, 8 + length, [name for name in doubled if name in header]


def _misfit(dtype: str, shape: tuple[int, ...], begin: int, end: int) -> str:
    """Why a tensor's place does not fit its header; empty if it does."""
    known = dtype_named(DTYPES.get(dtype, ""))
    if known is None and dtype not in _HALF_BYTES:
        return say("its dtype {dtype} is not known", dtype=plain(dtype, longest=40) or repr(""))
    width = known.itemsize if known is not None else _HALF_BYTES[dtype] / 2
    if end - begin != prod(shape) * width:
        return say(
            "{bytes} bytes are stored for {entries} entries of {dtype}, which take {size:g}",
            bytes=end - begin,
            entries=prod(shape),
            dtype=dtype,
            size=prod(shape) * width,
        )
    return ""


@contextmanager
def _opened(path: Path, offset: int) -> Iterator[Read]:
    with path.open("rb", buffering=0) as file:

        def read(at: int, target: Any) -> None:
            file.seek(offset + at)
            with intact(path):
                fill(file, target)

        yield read


# --- torch -----------------------------------------------------------------------------------------------------------


def _of_content(content: Any, file: str) -> Inventory:
    """All tensors of a state dict or of what a trainer saved: the model's by their own names, others by their place."""
    state: Mapping[Any, Any] = {}
    key, unknown = "", list[str]()
    if isinstance(content, Mapping):
        try:
            found = state_in(content, what="the checkpoint")
            state, key = found.state, found.place
        except InvalidArgumentError:  # then all tensors are beside
            unknown = [plain(name) for name in holders(content)]
    places, problems = [], []
    prefix, names = f"{key}." if key else "", {str(name) for name in state}
    others = 0
    raw = optimizers_in(content, in_memory)
    starts = tuple(f"{one.place}.state.".removeprefix(".") for one in raw)
    for name, value in leaves(content, _DEPTH):
        own = name.startswith(prefix) and name.removeprefix(prefix) in names
        if is_array(value) and (own or not state):  # others are a trainer's, as the state of a random generator
            array = name.removeprefix(prefix) if own else name
            places.append(Place(array, file, "array of NumPy", (), beside=not own, reason=ARRAY))
            continue
        if not isinstance(value, Tensor):
            others += not isinstance(value, (type(None), bool, int, float, str, bytes))
            continue
        place = _of_tensor(name.removeprefix(prefix) if own else name, value, file)
        places.append(replace(place, beside=not own, state=not own and name.startswith(starts)))
        problems += [Problem("G704", place.name, place.reason)] if place.damaged else []
    notes = [f"the model is read from {plain(key)!r} of the checkpoint"] if key else []
    notes += [
        *of_module(state),
        *of_parallel(content),
        _not_compared(content, [name for name in unknown if not any(one.startswith(f"{name}.") for one in starts)]),
    ]
    notes = [note for note in notes if note]
    notes += [f"{others} other objects are not checked"] if others else []
    objects = tuple(str(name) for name, value in state.items() if not isinstance(value, (Tensor, type(None))))
    return Inventory(tuple(places), tuple(problems), tuple(notes), objects=objects)


def _not_compared(content: Any, unknown: Sequence[str]) -> str:
    """What is not looked for where it is not known which tensors are a model's; empty where it is."""
    if not isinstance(content, Mapping):
        return say("its tensors have no names: rows, filters and layers were not compared")
    if not unknown:
        return ""
    names = listing(unknown, limit=4)
    return say(
        "which tensors are the model's is not known (there are some under {names}): rows, filters and layers were not "
        "compared; gonio measure --key NAME reads one",
        names=names,
    )


def _of_tensor(name: str, tensor: Tensor, file: str) -> Place:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # of a sharded tensor, what is here
    if is_lazy(local):
        return Place(name, file, "", (), reason="a lazy layer that has seen no input yet")
    if local.is_nested:
        return Place(name, file, dtype_name(local.dtype), (), reason=numbers_of(local).reason)
    if type(local).dequantize is not Tensor.dequantize:  # a quantised tensor of another library
        found = numbers_of(local)
        if found.tensor is None:
            return Place(name, file, header_of(local)[1], header_of(local)[0], reason=found.reason)
        local = found.tensor
    local = local.detach()
    shape, dtype = header_of(local)
    reason, size, damaged, address = "", 0, False, 0
    if local.is_meta:
        reason = "on the meta device: it has no values"
    elif local.layout != torch.strided or local.is_quantized:
        reason = f"its layout {local.layout} is not read" if not local.is_quantized else "a quantised tensor of torch"
    elif is_blown_up(local):
        reason = f"claims {local.numel()} entries, of which {stored_entries(local)} are stored"
        damaged = True
    else:
        size, address = local.nbytes, local.data_ptr()
    opened = partial(_loaded, lambda: local)
    return Place(name, file, dtype, shape, size, opened, reason=reason, damaged=damaged, address=address)


def _of_opened(path: Path, opened: Opened) -> Inventory:
    """What a reader of a format found: each tensor is in memory while it is checked."""
    places = []
    states = {id(t) for one in opened.optimizer.parameters for t in one.tensors.values()}
    for beside, tensors in ((False, opened.stored), (True, opened.beside)):
        for name, stored in tensors.items():
            values = stored.values or stored.dtype
            dtype = dtype_named(values)
            size = 0 if dtype is None else stored.entries * dtype.itemsize
            reason = f"torch has no dtype for {stored.dtype}" if dtype is None else ""
            file, opened_by = stored.file or path.name, partial(_loaded, stored.load)
            place = Place(name, file, stored.dtype, stored.shape, size, opened_by, beside, reason, values)
            places.append(replace(place, state=id(stored) in states))
    places += [
        Place(other.name, path.name, other.dtype, other.shape or (), reason=other.reason) for other in opened.others
    ]
    return Inventory(tuple(places), opened.problems, opened.notes, (path,), header=opened.header)


@contextmanager
def _loaded(load: Callable[[], Tensor]) -> Iterator[Read]:
    data = load().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)

    def read(at: int, target: Any) -> None:  # by torch: a storage that NumPy has seen cannot be resized, as FSDP does
        torch.from_numpy(target).copy_(data[at : at + len(target)])

    yield read


def _checksums(path: Path) -> Iterator[Problem]:
    """The archive's records against their checksums, which torch does not compare when it loads a file.

    Records of an archive that was written under `torch.serialization.set_crc32_options(False)` have none; then all
    large ones differ, which is no damage.
    """
    bad, good = [], 0
    try:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            for info in archive.infolist():
                if info.file_size and info.compress_type == zipfile.ZIP_STORED:
                    right = _crc(file, info) == info.CRC
                    good += right and "/data/" in info.filename
                    bad += [] if right else [info.filename]
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, struct.error) as error:
        yield Problem("G701", path.name, say("its archive cannot be read ({error})", error=str(error)[:200]))
        return
    if bad and good:
        told = {"n": len(bad), "s": "s differ" if len(bad) > 1 else " differs"}
        names = listing([plain(name) for name in bad], limit=3)
        yield Problem("G711", path.name, say("{n} record{s} from the checksum: {names}", names=names, **told))


def _crc(file: BinaryIO, info: zipfile.ZipInfo) -> int:
    """The checksum of the bytes of a stored record."""
    file.seek(record_start(file, info))
    found, left = 0, info.file_size
    while left and (block := file.read(min(left, 1 << 20))):
        found, left = zlib.crc32(block, found), left - len(block)
    return found
