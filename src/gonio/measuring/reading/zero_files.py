"""Folders of DeepSpeed's ZeRO: flat partitions of the float32 weights of each rank, and the names and shapes of these.

Stages 1 and 2 cut the flattened weights of a parameter group into equal partitions, one of each rank. Stage 3 cuts each
weight by itself. A weight is put together from its pieces when it is read. What else the files hold is beside: the
copy of the weights in 16 bits, and the state of the optimizer. The files are pickles with objects of DeepSpeed: they
are read with a closed list of classes (:mod:`gonio.measuring.reading.pickles`).

References: deepspeed/utils/zero_to_fp32.py of DeepSpeed; S. Rajbhandari et al., "ZeRO: memory optimizations toward
training trillion parameter models", 2020, arXiv 1910.02054, section 5.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gonio.errors import UnreadableFileError, listing
from gonio.measuring.reading.entry import StoredTensor, TensorEntry
from gonio.measuring.reading.pickles import OF_TORCH, Archive, Record, StoredPart
from gonio.measuring.reading.safetensors_files import damaged
from gonio.measuring.reading.state_dicts import Opened, Problem

_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_CLASSES = OF_TORCH | {
    "argparse.Namespace",
    "_codecs.encode",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScalerBase",
    "deepspeed.utils.tensor_fragment.fragment_address",
}
_GROUPS = {1: "single_partition_of_fp32_groups", 2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}
_DEPTH = 16  # of containers in which tensors beside the model are looked for


def is_zero(folder: Path) -> bool:
    """Whether a folder holds a checkpoint of ZeRO."""
    return any(_OPTIMIZER.fullmatch(file.name) for file in folder.glob("*_optim_states.pt"))


@dataclass(frozen=True)
class _Vector:
    """A flat vector in pieces: tensors of archives, one after the other."""

    parts: tuple[tuple[Archive, StoredPart], ...]

    @property
    def size(self) -> int:
        return sum(prod(part.shape) for _, part in self.parts)

    def pieces(self, first: int, count: int) -> Iterator[tuple[Archive, StoredPart]]:
        """The pieces that hold `count` entries from `first` on."""
        for archive, part in self.parts:
            size = prod(part.shape)
            begin, end = max(first, 0), min(first + count, size)
            if begin < end:
                yield archive, replace(part, offset=part.offset + begin, shape=(end - begin,), strides=(1,))
            first -= size


@dataclass
class _Zero:
    """What is found in a folder."""

    path: Path
    stored: dict[str, StoredTensor] = field(default_factory=dict)
    others: list[TensorEntry] = field(default_factory=list)
    beside: dict[str, StoredTensor] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def add(self, name: str, shape: tuple[int, ...], pieces: list[tuple[Archive, StoredPart]]) -> None:
        """A weight in these pieces; what is wrong with them is a finding."""
        held = sum(prod(part.shape) for _, part in pieces)
        if held != prod(shape):
            said = f"{held} of its {prod(shape)} entries are in the partitions"
            self.problems.append(Problem("G704", name, said))
            self.others.append(TensorEntry(name, "", None, None, said, shape=shape))
        else:
            dtype = pieces[0][1].dtype if pieces else "float32"
            file = pieces[0][0].path.name if pieces else ""
            self.stored[name] = StoredTensor(shape, dtype, partial(_read, shape, dtype, pieces), file=file)

    def add_beside(self, archive: Archive, content: Any, at: str) -> None:
        """All tensors of a part of a file, by their places."""
        for name, part in _parts(content, at, _DEPTH):
            load = partial(_read, part.shape, part.dtype, [(archive, part)])
            if not archive.holds(part):
                self.problems.append(Problem("G704", name, "its archive holds fewer entries than it claims"))
            else:
                self.beside[name] = StoredTensor(part.shape, part.dtype, load, file=archive.path.name)


def open_zero(path: Path) -> Opened:
    """The float32 weights of a folder of ZeRO, its buffers, and beside them all other tensors of its files.

    Raises:
        UnreadableFileError: if no file of the optimizer, or not the one of the model, can be read, or if the model is
            divided over ranks of tensor parallelism too, which are not merged.
    """
    zero = _Zero(path)
    files = {file.name: file for file in path.iterdir() if file.is_file()}
    optimizers = {int(m[1]): files[n] for n in files if (m := _OPTIMIZER.fullmatch(n)) and int(m[2]) == 0}
    models = {int(m[1] or 0): files[n] for n in files if (m := _MODEL.fullmatch(n)) and int(m[2]) == 0}
    if foreign := [n for n in files if (m := _OPTIMIZER.fullmatch(n) or _MODEL.fullmatch(n)) and int(m[2])]:
        said = f"its weights are divided over ranks of tensor parallelism ({listing(sorted(foreign), limit=2)})"
        raise UnreadableFileError(str(path), said, "Convert it by DeepSpeed's zero_to_fp32.py.")
    ranks = _archives(zero, optimizers)
    states = _archives(zero, models)
    if not ranks or 0 not in states:
        missing = "no file of an optimizer" if not ranks else "not the file of the model's states of rank 0"
        raise UnreadableFileError(str(path), f"{missing} can be read", "Copy or save it again.")
    try:
        return _assembled(zero, ranks, states)
    except Exception as error:  # of a hostile pickle's content
        raise damaged(path, error) from error


def _archives(zero: _Zero, files: Mapping[int, Path]) -> dict[int, Archive]:
    found = {}
    for rank, file in sorted(files.items()):
        try:
            found[rank] = Archive(file, allowed=_CLASSES)
            if not isinstance(found[rank].content, dict):
                raise ValueError("it holds no mapping")
        except Exception as error:
            found.pop(rank, None)
            zero.problems.append(Problem("G701", file.name, str(damaged(file, error))))
    return found


def _assembled(zero: _Zero, ranks: dict[int, Archive], states: dict[int, Archive]) -> Opened:
    optimizers = {rank: archive.content["optimizer_state_dict"] for rank, archive in ranks.items()}
    facts = next(iter(optimizers.values()))
    stage, counts = _natural(facts["zero_stage"]), facts["partition_count"]
    world = max(_natural(n) for n in counts) if isinstance(counts, (list, tuple)) else _natural(counts)
    if stage not in _GROUPS or not 0 < world <= 1 << 20:
        raise ValueError(f"its stage is {stage}, with {world} partitions")
    missing = [rank for rank in range(world) if rank not in ranks]
    if missing:
        what = listing([str(rank) for rank in missing], limit=4)
        zero.problems.append(Problem("G702", "", f"{len(ranks)} of {world} partitions are there, without rank {what}"))
    groups = {rank: _flat(zero, ranks[rank], held, _GROUPS[stage]) for rank, held in optimizers.items()}
    model = states[0].content
    shapes = [{str(n): _shape(s) for n, s in dict(group).items()} for group in model["param_shapes"]]
    if missing or any(held is None for held in groups.values()):
        for name, shape in ((n, s) for group in shapes for n, s in group.items()):
            said = "a partition that holds a piece of it is missing or damaged"
            zero.others.append(TensorEntry(name, "", None, None, said, shape=shape))
    else:
        whole = [[part for part in groups[rank] or () if part] for rank in range(world)]
        divide = _by_weight if stage == 3 else _by_group
        divide(zero, whole, [ranks[rank] for rank in range(world)], shapes)
    _of_states(zero, states, world if stage == 3 else 1)
    for rank, archive in ranks.items():
        rest = {key: value for key, value in optimizers[rank].items() if key != _GROUPS[stage]}
        zero.add_beside(archive, {**archive.content, "optimizer_state_dict": rest}, f"rank_{rank}")
    notes = [f"ZeRO stage {stage}, {world} partition{'s' if world > 1 else ''} of the float32 weights"]
    if zero.beside:
        notes.append(f"not the weights: {len(zero.beside)} tensors of the optimizer and of copies in 16 bits")
    return Opened(zero.stored, tuple(zero.others), tuple(notes), zero.beside, tuple(zero.problems))


def _natural(value: Any) -> int:
    value = value.args[0] if isinstance(value, Record) and len(value.args) == 1 else value  # an enumeration
    if type(value) is not int or value < 0:
        raise ValueError("a number of its facts is no natural number")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(_natural(n) for n in value)


def _flat(zero: _Zero, archive: Archive, held: Mapping[str, Any], key: str) -> list[StoredPart] | None:
    """The flat partitions of one rank; None, with a finding, if they are none."""
    found = held.get(key)
    parts = [part for part in found if isinstance(part, StoredPart)] if isinstance(found, (list, tuple)) else None
    if (
        parts is not None
        and len(parts) == len(held[key])
        and all(len(part.shape) == 1 and part.contiguous and archive.holds(part) for part in parts)
        and len({part.dtype for part in parts}) <= 1
    ):
        return parts
    zero.problems.append(Problem("G704", archive.path.name, f"its {key} are no flat tensors of one dtype in the file"))
    return None


def _by_group(
    zero: _Zero, whole: list[list[StoredPart]], ranks: list[Archive], shapes: list[dict[str, tuple[int, ...]]]
) -> None:
    """Stages 1 and 2: a group's partitions of all ranks in a row are its weights in a row."""
    if {len(parts) for parts in whole} != {len(shapes)}:
        zero.problems.append(Problem("G704", "", f"the partitions are not of {len(shapes)} groups on each rank"))
    for number, group in enumerate(shapes):
        held = [(archive, parts[number]) for archive, parts in zip(ranks, whole, strict=True) if number < len(parts)]
        if len({part.shape for _, part in held}) > 1:
            zero.problems.append(Problem("G704", "", f"the partitions of group {number} differ in size"))
        vector, first = _Vector(tuple(held)), 0
        for name, shape in group.items():
            zero.add(name, shape, list(vector.pieces(first, prod(shape))))
            first += prod(shape)
        if vector.size - first >= 4 * len(ranks):  # both sides are padded to a multiple of twice the ranks
            said = f"{vector.size - first} entries of group {number} belong to no weight"
            zero.problems.append(Problem("G705", "", said))


def _by_weight(
    zero: _Zero, whole: list[list[StoredPart]], ranks: list[Archive], shapes: list[dict[str, tuple[int, ...]]]
) -> None:
    """Stage 3: each rank has a piece of each weight, padded so that all are of one size."""
    vectors = [_Vector(tuple((rank, part) for part in parts)) for rank, parts in zip(ranks, whole, strict=True)]
    first = 0
    for name, shape in ((n, s) for group in shapes for n, s in group.items()):
        size = -(-prod(shape) // len(ranks))
        pieces: list[tuple[Archive, StoredPart]] = []
        for rank, vector in enumerate(vectors):
            pieces += vector.pieces(first, max(min(size, prod(shape) - rank * size), 0))
        zero.add(name, shape, pieces)
        first += size
    for rank, vector in enumerate(vectors):
        if vector.size != first:
            said = f"its partition has {vector.size} entries, of which the weights take {first}"
            zero.problems.append(Problem("G704" if vector.size < first else "G705", ranks[rank].path.name, said))


def _of_states(zero: _Zero, states: dict[int, Archive], world: int) -> None:
    """Buffers, frozen weights and shared ones; the copy of the weights is beside."""
    model, archive = states[0].content, states[0]
    module, buffers = dict(model["module"]), set(model.get("buffer_names") or ())
    for name, part in list(module.items()):
        if name in buffers and isinstance(part, StoredPart) and archive.holds(part):
            zero.add(str(name), part.shape, [(archive, part)])
            del module[name]
    zero.add_beside(archive, module, "module")
    frozen = {str(name): _shape(shape) for name, shape in dict(model.get("frozen_param_shapes") or {}).items()}
    for name, shape in frozen.items():
        pieces: list[tuple[Archive, StoredPart]] = []
        left = prod(shape)
        for rank in range(world):
            part = states[rank].content["frozen_param_fragments"][name] if rank in states else None
            if isinstance(part, StoredPart) and part.contiguous and states[rank].holds(part):
                pieces += _Vector(((states[rank], part),)).pieces(0, left)
                left -= min(left, prod(part.shape))
        zero.add(name, shape, pieces)
    for name, source in dict(model.get("shared_params") or {}).items():
        if str(source) in zero.stored:
            zero.stored[str(name)] = zero.stored[str(source)]
    if lost := [rank for rank in range(world) if rank not in states]:
        said = f"the model's states of rank {listing([str(rank) for rank in lost], limit=4)} are missing"
        zero.problems.append(Problem("G702", "", said))


def _parts(content: Any, at: str, depth: int) -> Iterator[tuple[str, StoredPart]]:
    if isinstance(content, StoredPart):
        yield at, content
    elif depth and isinstance(content, (dict, list, tuple)):
        inner = content.items() if isinstance(content, dict) else enumerate(content)
        for key, value in inner:
            yield from _parts(value, f"{at}.{key}", depth - 1)


def _read(shape: tuple[int, ...], dtype: str, pieces: list[tuple[Archive, StoredPart]]) -> Tensor:
    whole = torch.empty(prod(shape), dtype=getattr(torch, dtype))
    done = 0
    for archive, part in pieces:
        try:
            whole[done : done + prod(part.shape)] = archive.entries(part)
        except Exception as error:
            raise damaged(archive.path, error) from error
        done += prod(part.shape)
    return whole.reshape(shape)
