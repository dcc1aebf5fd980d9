"""Folders of DeepSpeed: ZeRO's flat partitions of the float32 weights of each rank, and universal checkpoints.

Of ZeRO, stages 1 and 2 cut the flattened weights of a parameter group into equal partitions, one of each rank. Stage 3
cuts each weight by itself. A weight is put together from its pieces when it is read. What else the files hold is
beside: the copy of the weights in 16 bits, and the state of the optimizer. The files are pickles with objects of
DeepSpeed: they are read with a closed list of classes (:mod:`gonio.measuring.reading.pickles`).

A universal checkpoint has a folder for each weight: `zero/NAME/fp32.pt` holds {"param": the float32 weight}, already
joined over all ranks; `exp_avg.pt`, `exp_avg_sq.pt` and `step.pt` hold the state of the optimizer. Other files of the
folder hold what a trainer saved beside.

References: deepspeed/utils/zero_to_fp32.py and deepspeed/checkpoint/ds_to_universal.py of DeepSpeed; S. Rajbhandari et
al., "ZeRO: memory optimizations toward training trillion parameter models", 2020, arXiv 1910.02054, section 5; X. Lian
et al., "Universal checkpointing", 2024, arXiv 2406.18820, section 3.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gonio.errors import UnreadableFileError, listing
from gonio.escaping import plain
from gonio.measuring.reading.entry import StoredTensor
from gonio.measuring.reading.opened import Listing, Opened, Problem, damaged, intact
from gonio.measuring.reading.optimizers import Raw, fitted
from gonio.measuring.reading.pickles import OF_TORCH, Archive, Record, StoredPart
from gonio.measuring.reading.state_dicts import leaves

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


_Pieces = list[tuple[Archive, StoredPart]]
_Shapes = list[dict[str, tuple[int, ...]]]  # of each group the weights in their order


def _joined(shape: tuple[int, ...], pieces: _Pieces) -> StoredTensor:
    """The tensor in these pieces."""
    dtype = pieces[0][1].dtype if pieces else "float32"
    file = pieces[0][0].path.name if pieces else ""
    return StoredTensor(shape, dtype, partial(_read, shape, dtype, pieces), file=file)


class _Zero(Listing):
    """What is found in a folder."""

    def add(self, name: str, shape: tuple[int, ...], pieces: _Pieces) -> None:
        """A weight in these pieces; what is wrong with them is a finding."""
        held = sum(prod(part.shape) for _, part in pieces)
        if held != prod(shape):
            self.refuse(name, f"{held} of its {prod(shape)} entries are in the partitions", "G704", shape=shape)
        else:
            self.stored[name] = _joined(shape, pieces)

    def add_beside(self, archive: Archive, content: Any, at: str) -> None:
        """All tensors of a part of a file, by their places."""
        parts = ((f"{at}.{place}", one) for place, one in leaves(content, _DEPTH) if isinstance(one, StoredPart))
        for name, part in parts:
            if not archive.holds(part):
                self.problem("G704", name, "its archive holds fewer entries than it claims")
            else:
                self.beside[name] = _joined(part.shape, [(archive, part)])


def open_zero(path: Path) -> Opened:
    """The float32 weights of a folder of ZeRO, its buffers, and beside them all other tensors of its files.

    Raises:
        UnreadableFileError: if no file of the optimizer, or not the one of the model, can be read, or if the model is
            divided over ranks of tensor parallelism too, which are not merged.
    """
    zero = _Zero()
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
    with intact(path):
        return _assembled(zero, ranks, states)


def _archives(zero: _Zero, files: Mapping[int, Path]) -> dict[int, Archive]:
    found = {}
    for rank, file in sorted(files.items()):
        try:
            found[rank] = Archive(file, allowed=_CLASSES)
            if not isinstance(found[rank].content, dict):
                raise ValueError("it holds no mapping")
        except Exception as error:
            found.pop(rank, None)
            zero.problem("G701", file.name, str(damaged(file, error)))
    return found


def _assembled(zero: _Zero, ranks: dict[int, Archive], states: dict[int, Archive]) -> Opened:
    optimizers = {rank: archive.content["optimizer_state_dict"] for rank, archive in ranks.items()}
    first = next(iter(optimizers.values()))
    stage, counts = _natural(first["zero_stage"]), first["partition_count"]
    world = max(_natural(n) for n in counts) if isinstance(counts, (list, tuple)) else _natural(counts)
    if stage not in _GROUPS or not 0 < world <= 1 << 20:
        raise ValueError(f"its stage is {stage}, with {world} partitions")
    missing = [rank for rank in range(world) if rank not in ranks]
    if missing:
        what = listing([str(rank) for rank in missing], limit=4)
        zero.problem("G702", "", f"{len(ranks)} of {world} partitions are there, without rank {what}")
    groups = {rank: _flat(zero, ranks[rank], held, _GROUPS[stage]) for rank, held in optimizers.items()}
    model, raw = states[0].content, list[Raw]()
    shapes = [{str(n): _shape(s) for n, s in dict(group).items()} for group in model["param_shapes"]]
    if missing or any(held is None for held in groups.values()):
        for name, shape in ((n, s) for group in shapes for n, s in group.items()):
            zero.refuse(name, "a partition that holds a piece of it is missing or damaged", shape=shape)
    else:
        whole = [[part for part in groups[rank] or () if part] for rank in range(world)]
        archives, facts = [ranks[rank] for rank in range(world)], [optimizers[rank] for rank in range(world)]
        divide = _by_weight if stage == 3 else partial(_by_group, paddings=_paddings(facts, shapes))
        for name, shape, pieces in divide(zero.problems, whole, archives, shapes):
            zero.add(name, shape, pieces)
        raw = _states(facts, whole, archives, shapes, divide)
    _of_states(zero, states, world if stage == 3 else 1)
    for rank, archive in ranks.items():
        rest = {key: value for key, value in optimizers[rank].items() if key != _GROUPS[stage]}
        zero.add_beside(archive, {**archive.content, "optimizer_state_dict": rest}, f"rank_{rank}")
    notes = [f"ZeRO stage {stage}, {world} partition{'s' if world > 1 else ''} of the float32 weights"]
    if zero.beside:
        notes.append(f"not the weights: {len(zero.beside)} tensors of the optimizer and of copies in 16 bits")
    return zero.opened(*notes, optimizer=fitted(raw, zero.stored, in_order=True))


def _paddings(facts: list[dict[str, Any]], shapes: _Shapes) -> tuple[list[list[int]], list[list[int]]]:
    """By rank and group the entries at the end that are left out of the file, by group those after each weight."""

    def naturals(value: Any, count: int) -> list[int]:
        right = isinstance(value, (list, tuple)) and len(value) == count
        return [_natural(n) for n in value] if right else [0] * count

    after = facts[0].get("param_alignment_paddings")
    after = after if isinstance(after, (list, tuple)) and len(after) == len(shapes) else [()] * len(shapes)
    ends = [naturals(held.get("group_paddings"), len(shapes)) for held in facts]
    return ends, [naturals(one, len(group)) for one, group in zip(after, shapes, strict=True)]


def _states(
    facts: list[dict[str, Any]], whole: list[list[StoredPart]], ranks: list[Archive], shapes: _Shapes, divide: _Divide
) -> list[Raw]:
    """The moments of each weight: flat tensors of the same sizes as the partitions, divided as these are."""
    held = [one.get("base_optimizer_state", one.get("optimizer_state_dict")) for one in facts]
    by_group = [_numbered(one.get("state") if isinstance(one, dict) else one) for one in held]
    made: dict[str, dict[str, Any]] = {}
    ends, _ = _paddings(facts, shapes)
    for word in sorted({str(word) for one in by_group for state in one.values() for word in state}):
        flat: list[list[StoredPart]] = []
        for one, archive, parts, pads in zip(by_group, ranks, whole, ends, strict=True):
            states = [state for _, state in sorted(one.items())]
            cut = [_cut(s.get(word), p, pad, archive) for s, p, pad in zip(states, parts, pads, strict=False)]
            flat.append([part for part in cut if part is not None])
        if all(len(ours) == len(parts) for ours, parts in zip(flat, whole, strict=True)):
            for name, shape, pieces in divide([], flat, ranks, shapes):
                if sum(prod(part.shape) for _, part in pieces) == prod(shape):
                    made.setdefault(name, {})[word] = _joined(shape, pieces)
    options = held[0].get("param_groups", ()) if isinstance(held[0], dict) else ()
    groups = [{**g, "params": list(s)} for g, s in zip(options, shapes, strict=False) if isinstance(g, dict)]
    for number, group in enumerate(shapes):
        step = by_group[0].get(number, {}).get("step")
        step = _joined((), [(ranks[0], step)]) if isinstance(step, StoredPart) and not step.shape else step
        for name in group.keys() & made.keys():
            made[name]["step"] = step
    return [Raw("optimizer", made, groups)] if made else []


def _numbered(states: Any) -> dict[int, dict[Any, Any]]:
    """The states of the groups of one rank, by number; newer and older versions store a mapping or a list."""
    listed = states if isinstance(states, (list, tuple)) else ()
    pairs = states.items() if isinstance(states, dict) else enumerate(listed)
    return {key: state for key, state in pairs if type(key) is int and isinstance(state, dict)}


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
    held_parts = list(found) if isinstance(found, (list, tuple)) else [None]
    parts = [part for part in held_parts if isinstance(part, StoredPart) and len(part.shape) == 1 and part.contiguous]
    if len(parts) == len(held_parts) and all(map(archive.holds, parts)) and len({part.dtype for part in parts}) <= 1:
        return parts
    zero.problem("G704", archive.path.name, f"its {key} are no flat tensors of one dtype in the file")
    return None


def _cut(found: Any, like: StoredPart, padding: int, archive: Archive) -> StoredPart | None:
    """A flat tensor of the state as long as its partition, without the padding; None for another one."""
    if not isinstance(found, StoredPart) or len(found.shape) != 1 or not found.contiguous or not archive.holds(found):
        return None
    return replace(found, shape=like.shape) if 0 <= found.shape[0] - like.shape[0] <= padding else None


_Divided = Iterator[tuple[str, tuple[int, ...], _Pieces]]
_Divide = Callable[[list[Problem], list[list[StoredPart]], list[Archive], _Shapes], _Divided]


def _by_group(
    problems: list[Problem],
    whole: list[list[StoredPart]],
    ranks: list[Archive],
    shapes: _Shapes,
    *,
    paddings: tuple[list[list[int]], list[list[int]]],
) -> _Divided:
    """Stages 1 and 2: a group's partitions of all ranks in a row are its weights in a row.

    Partitions are of one size with the padding, which is not stored; newer versions may pad each weight too.
    """
    ends, after = paddings
    if {len(parts) for parts in whole} != {len(shapes)}:
        problems.append(Problem("G704", "", f"the partitions are not of {len(shapes)} groups on each rank"))
    for number, group in enumerate(shapes):
        held = [(archive, parts[number]) for archive, parts in zip(ranks, whole, strict=True) if number < len(parts)]
        sizes = {prod(part.shape) + end[number] for (_, part), end in zip(held, ends, strict=False)}
        if len(sizes) > 1:
            problems.append(Problem("G704", "", f"the partitions of group {number} differ in size"))
        vector, first = _Vector(tuple(held)), 0
        for (name, shape), pad in zip(group.items(), after[number], strict=True):
            yield name, shape, list(vector.pieces(first, prod(shape)))
            first += prod(shape) + pad
        if vector.size - first >= 4 * len(ranks):  # both sides are padded to a multiple of twice the ranks
            said = f"{vector.size - first} entries of group {number} belong to no weight"
            problems.append(Problem("G705", "", said))


def _by_weight(
    problems: list[Problem], whole: list[list[StoredPart]], ranks: list[Archive], shapes: _Shapes
) -> _Divided:
    """Stage 3: each rank has a piece of each weight, padded so that all are of one size."""
    vectors = [_Vector(tuple((rank, part) for part in parts)) for rank, parts in zip(ranks, whole, strict=True)]
    first = 0
    for name, shape in ((n, s) for group in shapes for n, s in group.items()):
        size = -(-prod(shape) // len(ranks))
        pieces: _Pieces = []
        for rank, vector in enumerate(vectors):
            pieces += vector.pieces(first, max(min(size, prod(shape) - rank * size), 0))
        yield name, shape, pieces
        first += size
    for rank, vector in enumerate(vectors):
        if vector.size != first:
            said = f"its partition has {vector.size} entries, of which the weights take {first}"
            problems.append(Problem("G704" if vector.size < first else "G705", ranks[rank].path.name, said))


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
        pieces: _Pieces = []
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
        zero.problem("G702", "", said)


def _read(shape: tuple[int, ...], dtype: str, pieces: _Pieces) -> Tensor:
    whole = torch.empty(prod(shape), dtype=getattr(torch, dtype), device="cpu")
    done = 0
    for archive, part in pieces:
        with intact(archive.path):
            whole[done : done + prod(part.shape)] = archive.entries(part)
        done += prod(part.shape)
    return whole.reshape(shape)


# --- universal checkpoints --------------------------------------------------------------------------------------------

_HOME, _WEIGHT, _PARAM = "zero", "fp32.pt", "param"
_MOST = 1 << 20  # folders


def is_universal(folder: Path) -> bool:
    """Whether a folder holds a universal checkpoint."""
    home = folder / _HOME
    return home.is_dir() and any((one / _WEIGHT).is_file() for one in islice(home.iterdir(), 1000))


def archives_in(folder: Path) -> list[Path]:
    """The files of its weights and of their states."""
    return sorted(file for one in islice((folder / _HOME).iterdir(), _MOST) for file in one.glob("*.pt"))


def open_universal(path: Path) -> Opened:
    """The float32 weights of a universal checkpoint, and the state of its optimizer."""
    found, states = Listing(), dict[str, dict[str, Any]]()
    for file in archives_in(path):
        name, word = file.parent.name, file.name.removesuffix(".pt")
        try:
            held = _held(file)
            if file.name == _WEIGHT:
                if not isinstance(held, StoredTensor):
                    raise ValueError(f"it holds no tensor under {_PARAM!r}")
                found.stored[name] = held
            else:
                states.setdefault(name, {})[word] = held
        except Exception as error:  # a hostile pickle provokes almost any of them
            found.problem("G701", f"{plain(name)}/{file.name}", str(damaged(file, error)))
            if file.name == _WEIGHT:
                found.refuse(name, f"its file {file.name} cannot be read")
    raw = [Raw("optimizer", states, [{"params": list(states)}])] if states else []
    found.beside = {
        f"{name}/{word}": one
        for name, state in states.items()
        for word, one in state.items()
        if isinstance(one, StoredTensor)
    }
    optimizer = fitted(raw, found.stored, in_order=True)
    return found.opened("a universal checkpoint of DeepSpeed: its float32 weights", optimizer=optimizer)


def _held(file: Path) -> Any:
    """The tensor in a file, or what else it holds: a number of steps."""
    archive = Archive(file, allowed=OF_TORCH)
    part = archive.content.get(_PARAM) if isinstance(archive.content, dict) else archive.content
    if not isinstance(part, StoredPart):
        return part
    if not archive.holds(part):
        raise ValueError("its archive holds fewer entries than it claims")
    return StoredTensor(part.shape, part.dtype, partial(_checked, archive, part), file=file.name)


def _checked(archive: Archive, part: StoredPart) -> Tensor:
    with intact(archive.path):
        return archive.tensor(part)
