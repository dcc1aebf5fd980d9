"""Folders of torch.distributed.checkpoint: `.metadata` places pieces of each tensor in the files of the ranks.

A tensor is put together from its pieces when it is read. Which tensors are the model's follows from the keys of the
saved state dict, which the metadata keep; the state of an optimizer is beside.

References: torch.distributed.checkpoint.metadata and .filesystem of torch; megatron.core.dist_checkpointing.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError, listing
from gonio.escaping import plain
from gonio.measuring.reading.entry import StoredTensor, dtype_name, wrong_size
from gonio.measuring.reading.opened import Listing, Opened, Problem, intact, naturals
from gonio.measuring.reading.optimizers import FORM, Raw, fitted, in_memory, optimizers_in
from gonio.measuring.reading.pickles import LARGEST_PICKLE, Archive, Record, StoredPart, unpickled
from gonio.measuring.reading.state_dicts import of_states, state_in

METADATA, PIECES = ".metadata", ".distcp"  # written last, and the ending of what holds values
MOST_PIECES = 1 << 16  # of one tensor; as many as there are ranks
_MCORE = "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata"
_HOME = "torch.distributed.checkpoint.metadata."
_OLD = "torch.distributed._shard.sharded_tensor.metadata."
_METADATA = (f"{_HOME}Metadata", _MCORE)
_OF_METADATA = (
    *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex", "TensorProperties"),
    *("StorageMeta", "_MEM_FORMAT_ENCODING"),
)
_OF_PLANS = ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")  # which Megatron keeps
_CLASSES = frozenset(
    {
        *_METADATA,
        *(f"{_HOME}{name}" for name in _OF_METADATA),
        *(f"{_OLD}{name}" for name in ("TensorProperties", "MEM_FORMAT_ENCODING")),
        *(f"torch.distributed.checkpoint.filesystem.{name}" for name in ("_StorageInfo", "_StoragePrefix")),
        *(f"torch.distributed.checkpoint.planner.{name}" for name in _OF_PLANS),
        *(
            f"{module}.{name}"
            for module in ("pathlib", "pathlib._local")  # the second in Python 3.13
            for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
        ),
        *("torch.Size", "torch.serialization._get_layout", "collections.OrderedDict", "builtins.set"),
    }
)
_OF_MCORE = "optimizer."  # the prefix that Megatron's format gives to tensors of the optimizer
_SMALL = 16 << 20  # bytes of an object in an optimizer's state that is read
_DEPTH = 6  # levels at which the state of an optimizer is looked for


@dataclass(frozen=True)
class _Piece:
    """A piece of a tensor: its place there, and the bytes of the file that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    length: int

    @property
    def end(self) -> int:
        return self.begin + self.length


@dataclass
class _Folder(Listing):
    """What is known of a folder while its metadata are read."""

    path: Path = field(kw_only=True)
    sizes: dict[str, int] = field(kw_only=True)
    used: dict[str, list[tuple[int, int, str]]] = field(default_factory=dict)
    absent: Counter[str] = field(default_factory=Counter)
    objects: dict[str, _Piece | None] = field(default_factory=dict)  # by name, with the place of each that has one
    read: set[str] = field(default_factory=set)  # of the objects, those that are plain data of an optimizer


def is_distributed(folder: Path) -> bool:
    """Whether a folder holds a checkpoint of torch.distributed.checkpoint."""
    return (folder / METADATA).is_file()


def open_distributed(path: Path, key: str = "") -> Opened:
    """The tensors of a folder of torch.distributed.checkpoint; no values are read yet.

    Args:
        key: the place of the state dict to read, with dots between keys, where the checkpoint holds several.

    Raises:
        UnreadableFileError: if the metadata are damaged, or hold an object of a class that is not theirs.
    """
    with intact(path / METADATA):
        if (path / METADATA).stat().st_size > LARGEST_PICKLE:
            raise ValueError(f"it is larger than {LARGEST_PICKLE} bytes")
        metadata = unpickled(io.BytesIO((path / METADATA).read_bytes()), _CLASSES)
        if not isinstance(metadata, Record) or metadata.name not in _METADATA:
            raise ValueError("it holds no metadata of torch.distributed.checkpoint")
        places = _places(metadata["storage_data"])
        named = {str(name): value for name, value in dict(metadata["state_dict_metadata"]).items()}
    folder = _Folder(path=path, sizes={file.name: file.stat().st_size for file in path.iterdir() if file.is_file()})
    for name, value in named.items():
        try:
            _add(folder, name, value, places.pop(name, {}))
        except (ValueError, TypeError, AttributeError, OverflowError, KeyError) as error:
            folder.problem("G704", name, f"its entry in the metadata is invalid ({str(error)[:200]})")
            folder.refuse(name, "its entry in the metadata is invalid")
    folder.problems += _of_files(folder, [name for name in places if name not in named])
    return _sorted_out(metadata, folder, key)


def _places(data: Any) -> dict[str, dict[Any, list[Record]]]:
    """For each tensor by the offset of a piece the places of its bytes: more than one is a finding."""
    found: dict[str, dict[Any, list[Record]]] = {}
    for index, info in dict(data).items():
        offset = index.state.get("offset")
        found.setdefault(str(index["fqn"]), {}).setdefault(None if offset is None else tuple(offset), []).append(info)
    return found


def _add(folder: _Folder, name: str, value: Record, places: Mapping[Any, list[Record]]) -> None:
    """One tensor: its pieces cover it exactly, and each lies in a file, or its entry says what is wrong."""
    if value.name.endswith(".BytesStorageMetadata"):
        held = [info for infos in places.values() for info in infos]
        folder.objects[name] = _piece((), (), held[0]) if held else None
        return
    shape, chunks = naturals(value["size"]), value["chunks"]
    properties = value["properties"].state
    dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
    if not isinstance(dtype, torch.dtype) or len(chunks) > MOST_PIECES:
        raise ValueError(f"no dtype of torch, or {len(chunks)} pieces")
    said = dtype_name(dtype)
    pieces, wrong = [], []
    for chunk in chunks:
        offsets, sizes = naturals(chunk["offsets"]), naturals(chunk["sizes"])
        held = places.get(offsets, [])
        if len(held) > 1:
            folder.problem("G703", name, f"its piece at {list(offsets)} has {len(held)} places")
        if not held:
            wrong.append(("G702", f"its piece at {list(offsets)} is in no file"))
        else:
            pieces.append(_piece(offsets, sizes, held[0]))
            wrong += list(_piece_wrong(folder, name, pieces[-1], held[0], dtype.itemsize))
    wrong += list(_uncovered(shape, [(naturals(c["offsets"]), naturals(c["sizes"])) for c in chunks]))
    if prod(shape) * dtype.itemsize > sum(folder.sizes.values()):
        wrong.append(("G704", f"it claims {prod(shape)} entries, more than the folder holds"))
    folder.problems += [Problem(code, name, found) for code, found in wrong if code]
    if wrong:
        folder.refuse(name, wrong[0][1], shape=shape, dtype=said)
        return
    file = pieces[0].file if pieces else ""
    folder.stored[name] = StoredTensor(shape, said, partial(_read, folder.path, pieces, shape, dtype), file=file)


def _piece(offsets: tuple[int, ...], sizes: tuple[int, ...], info: Record) -> _Piece:
    file, (begin, length) = info["relative_path"], naturals((info["offset"], info["length"]))
    if not isinstance(file, str) or PurePosixPath(file).name != file or "\\" in file or file in ("", ".", ".."):
        raise ValueError(f"it names a file outside its folder: {plain(str(file), longest=80)}")
    return _Piece(offsets, sizes, file, begin, length)


def _piece_wrong(folder: _Folder, name: str, piece: _Piece, info: Record, width: int) -> Iterator[tuple[str, str]]:
    """(code, what is wrong) with a piece; the code is empty where the file has its own problem."""
    if piece.file not in folder.sizes:
        folder.absent[piece.file] += 1
        yield "", f"its file {plain(piece.file)} is missing"
        return
    folder.used.setdefault(piece.file, []).append((piece.begin, piece.end, name))
    size, wanted = folder.sizes[piece.file], prod(piece.sizes) * width
    if piece.end > size:
        yield "", folder.cut.add(plain(piece.file), size, piece.end, name)
    elif piece.length < wanted:
        yield "G704", wrong_size(piece.length, prod(piece.sizes), wanted)
    elif transforms := info.state.get("transform_descriptors"):
        yield "", f"its bytes are transformed ({plain(str(transforms), longest=80)}), which is not read"


def _uncovered(
    shape: tuple[int, ...], pieces: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> Iterator[tuple[str, str]]:
    """Where pieces leave the tensor, overlap, or do not cover it."""
    for offsets, sizes in pieces:
        if not len(offsets) == len(sizes) == len(shape):
            yield "G704", f"a piece has {len(sizes)} dimensions, the tensor {len(shape)}"
            return
        if any(at + size > whole for at, size, whole in zip(offsets, sizes, shape, strict=True)):
            yield "G704", f"its piece at {list(offsets)} of sizes {list(sizes)} leaves the shape {list(shape)}"
            return
    if overlapping := _overlap([piece for piece in pieces if prod(piece[1])]):
        yield "G704", f"its pieces at {list(overlapping[0])} and {list(overlapping[1])} overlap"
    elif (missing := prod(shape) - sum(prod(sizes) for _, sizes in pieces)) > 0:
        yield "G702", f"{missing} of {prod(shape)} entries belong to no piece"


def _overlap(pieces: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The offsets of two pieces that overlap: a sweep along the dimension in which most pieces differ."""
    if len(pieces) < 2:
        return None
    dims = range(len(pieces[0][0]))
    along = max(dims, key=lambda dim: len({offsets[dim] for offsets, _ in pieces}), default=None)
    if along is None:
        return pieces[0][0], pieces[1][0]  # a number has one piece
    active: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for offsets, sizes in sorted(pieces, key=lambda piece: piece[0][along]):
        active = [(o, s) for o, s in active if o[along] + s[along] > offsets[along]]
        for other, extent in active:
            if all(o < at + size and at < o + s for o, s, at, size in zip(other, extent, offsets, sizes, strict=True)):
                return other, offsets
        active.append((offsets, sizes))
    return None


def _of_files(folder: _Folder, unnamed: list[str]) -> Iterator[Problem]:
    """Files that are missing or that nothing names, bytes of two pieces or of none, places of tensors that are none."""
    for file, count in folder.absent.items():
        pieces = f"{count} piece{'s' if count > 1 else ''}"
        yield Problem("G702", file, f"the file is missing; the metadata place {pieces} in it")
    yield from folder.cut.problems()
    for name in unnamed:
        yield Problem("G703", name, "has a place in the files, but the metadata name no such tensor")
    for file, ranges in folder.used.items():
        reached, last = 0, ""
        for begin, end, name in sorted(ranges):
            if begin < reached:
                yield Problem("G704", name, f"overlaps {plain(last)} in {plain(file)}: bytes belong to both")
            reached, last = max((reached, last), (end, name))
    for file, size in folder.sizes.items():
        if file.endswith(PIECES) and file not in folder.used and size:
            yield Problem("G705", file, f"the metadata place no tensor in its {size} bytes")


def _read(folder: Path, pieces: list[_Piece], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    whole = torch.empty(shape, dtype=dtype, device="cpu")
    for piece in pieces:
        with intact(folder / piece.file):
            archive = Archive(folder / piece.file, piece.begin, piece.length)
            part = archive.content
            if not isinstance(part, StoredPart) or part.shape != piece.sizes:
                raise ValueError(f"the piece at {list(piece.offsets)} is no tensor of sizes {list(piece.sizes)}")
            if part.dtype != dtype_name(dtype):
                raise ValueError(f"the piece at {list(piece.offsets)} is of the dtype {part.dtype}")
            view = whole[tuple(slice(at, at + size) for at, size in zip(piece.offsets, piece.sizes, strict=True))]
            archive.read(part, view)
    return whole


# --- which tensors are the model's -----------------------------------------------------------------------------------


def _sorted_out(metadata: Record, folder: _Folder, key: str) -> Opened:
    """The model's tensors by their names in its state dict, and those of optimizers and other objects beside."""
    stored = folder.stored
    of_mcore = _is_mcore(metadata, stored)
    mcore = [name for name in _headers(folder) if of_mcore and name.startswith(_OF_MCORE)]
    with intact(Path(METADATA)):  # keys of a hostile file
        nested, names = _nested(metadata, folder, mcore=of_mcore)
        states = list(_optimizers(nested, "", _DEPTH, partial(_leaf, names, folder)))
    notes = [f"{len(mcore)} tensors of the optimizer are not weights"] if mcore else []
    notes += of_states([raw.place for raw in states])
    objects = len(folder.objects) - len(folder.read)
    notes += [f"objects that are not read: {objects}"] if objects else []
    try:
        found = state_in(nested, what="the checkpoint", key=key)
    except InvalidArgumentError as error:
        folder.stored, folder.beside = {}, stored
        return replace(folder.opened(*notes, optimizer=fitted(states, {}, in_order=True)), refusal=error)
    held = {str(word): flat for word, flat in names[id(found.whole)].items()}
    owned = {flat: word.removeprefix(found.prefix) for word, flat in held.items() if word.startswith(found.prefix)}
    folder.stored = {owned[flat]: tensor for flat, tensor in stored.items() if flat in owned}
    folder.beside = {flat: tensor for flat, tensor in stored.items() if flat not in owned}
    folder.others = [replace(entry, name=owned[entry.name]) for entry in folder.others if entry.name in owned]
    folder.problems = [
        replace(
            problem,
            path=owned.get(problem.path, problem.path),
            tensors=tuple(owned.get(name, name) for name in problem.tensors),
        )
        for problem in folder.problems
    ]
    if found.place:
        notes.insert(0, f"read from {plain(found.place)!r} of the checkpoint")
    if found.beside:
        notes.append(f"not read: {listing([plain(name) for name in found.beside], limit=4)}, of the same checkpoint")
    states += _of_mcore(stored, mcore, folder.stored)
    return folder.opened(*notes, optimizer=fitted(states, folder.stored, in_order=True))


def _headers(folder: _Folder) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors, of one that is not known that of a matrix."""
    lost = {entry.name: (1, 1) if entry.shape is None else entry.shape for entry in folder.others}
    return {name: tensor.shape for name, tensor in folder.stored.items()} | lost


def _is_mcore(metadata: Record, stored: Mapping[str, StoredTensor]) -> bool:
    """Whether Megatron wrote a folder: its own metadata, or flat names of moments that end in the name of a weight."""
    if metadata.name == _MCORE:
        return True
    ends = (name.removeprefix(f"{_OF_MCORE}state.").partition(".")[2] for name in stored if name.startswith(_OF_MCORE))
    return not metadata.state.get("planner_data") and any(end in stored for end in ends)


def _of_mcore(stored: dict[str, StoredTensor], names: list[str], model: dict[str, StoredTensor]) -> list[Raw]:
    """The states that Megatron names `optimizer.state.KEY.WEIGHT`; its options are in another file."""
    state: dict[str, dict[str, Any]] = {}
    for name in names:
        word, _, weight = name.removeprefix(f"{_OF_MCORE}state.").partition(".")
        if name.startswith(f"{_OF_MCORE}state.") and weight in model and name in stored:
            state.setdefault(weight, {})[word] = stored[name]
    return [Raw("optimizer", state, [])] if state else []


def _nested(metadata: Record, folder: _Folder, *, mcore: bool) -> tuple[dict[Any, Any], dict[int, dict[Any, str]]]:
    """The saved mapping with a tensor without values for each tensor, and the names of the tensors by mapping."""
    shapes = _headers(folder)
    paths = metadata.state.get("planner_data")
    paths = paths if isinstance(paths, dict) else {}
    nested: dict[Any, Any] = {}
    names: dict[int, dict[Any, str]] = {id(nested): {}}
    leaves = [torch.empty((1,) * n, device="meta") for n in range(3)]
    for name in [*shapes, *folder.objects]:
        if mcore and name.startswith(_OF_MCORE):
            continue
        path, inner = paths.get(name), nested
        path = path if isinstance(path, (tuple, list)) and path else (name,)
        for word in path[:-1]:
            inner = inner.setdefault(word, {})
        if path[-1] in inner:
            raise ValueError(f"two keys of the checkpoint are {plain(name, longest=80)}")
        inner[path[-1]] = leaves[min(len(shapes[name]), 2)] if name in shapes else None
        names.setdefault(id(inner), {})[path[-1]] = name
    return nested, names


def _optimizers(held: dict[Any, Any], at: str, depth: int, leaf: Callable[[int, Any], Any]) -> Iterator[Raw]:
    """Remove the states of optimizers from nested mappings; each with its tensors, and with its options if read.

    Args:
        leaf: makes of (`id` of a mapping, key there) a tensor or an object.
    """
    if {str(word).partition(".")[0] for word in held} == FORM:
        place = at or "the checkpoint itself"
        try:
            found = optimizers_in(_whole(held, leaf), in_memory)
        finally:
            held.clear()
        yield replace(found[0], place=place) if found else Raw(place, {}, [])
        return
    for word, value in held.items():
        if isinstance(value, dict) and depth:
            yield from _optimizers(value, f"{at}.{plain(str(word))}".removeprefix("."), depth - 1, leaf)


def _whole(held: dict[Any, Any], leaf: Callable[[int, Any], Any]) -> dict[Any, Any]:
    """The state dict of an optimizer; its flat form has keys as `state.WEIGHT.KEY` and `param_groups.WEIGHT.lr`."""
    made: dict[Any, Any] = {}
    for word, value in held.items():
        one = _whole(value, leaf) if isinstance(value, dict) else leaf(id(held), word)
        part, _, rest = str(word).partition(".")
        weight, _, last = rest.rpartition(".")
        if part in FORM and weight:
            made.setdefault(part, {}).setdefault(weight, {})[last] = one
        else:
            made[word] = one
    if made.keys() == FORM and isinstance(made["param_groups"], dict):
        groups = made["param_groups"]
        made["param_groups"] = [
            {"params": [weight], **group} if "params" not in group else group
            for weight, group in groups.items()
            if isinstance(group, dict)
        ]
    return made


def _leaf(names: Mapping[int, Mapping[Any, str]], folder: _Folder, held: int, word: Any) -> Any:
    """A tensor, or an object of plain data that is small; None for anything else."""
    name = names.get(held, {}).get(word, "")
    piece = folder.objects.get(name)
    if piece is None:
        return folder.stored.get(name)
    if piece.length > _SMALL or piece.file not in folder.sizes:
        return None
    with suppress(Exception):  # of a hostile pickle; options that are not read are not known
        content = Archive(folder.path / piece.file, piece.begin, piece.length).content
        folder.read.add(name)
        return content
    return None
