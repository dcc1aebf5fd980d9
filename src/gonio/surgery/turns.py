"""The exact turns of a transformer: orthogonal matrices between what writes to a space and what alone reads it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from gonio.editing.where import sites
from gonio.errors import NotApplicableError, first_line, listing
from gonio.execution import derivatives
from gonio.geometry.views import why_not_dense
from gonio.init import orthogonal_
from gonio.messages import say
from gonio.seeding import generator
from gonio.surgery.anatomy import Attention, anatomy
from gonio.surgery.gains import not_run
from gonio.surgery.products import floats_in
from gonio.surgery.recording import Call, Normed, Part, Recording, noise_like, random_mask, record
from gonio.surgery.symmetries import Confirmed, OfBlocks, Symmetry, TwinTrial, confirmed, of_values

VALUES, STREAM = "values", "stream"
_ROUNDINGS = 1000  # times the rounding of the types of a model, by which outputs in a trial may differ
_MOST = 0.05
_SHARE = 0.1  # of what a turn of one side alone does, below which a deviation is rounding
_EQUAL = 0.02  # relative; of sums in any dtype
_VALUES = "the next layer reads what is not proportional to the values"


@dataclass(frozen=True)
class Slot:
    """Entries along a dimension of a tensor, which turn together; of some rows of it, along `across`, or of all."""

    tensor: str
    dim: int
    index: tuple[int, ...]
    across: int = 0
    start: int = 0
    rows: int | None = None

    def turn_(self, value: Tensor, matrix: Tensor) -> None:
        """Multiply the entries, as columns, by a matrix."""
        mine = value if self.rows is None else value.narrow(self.across, self.start, self.rows)
        moved = mine.movedim(self.dim, -1)
        index = torch.tensor(self.index, device=value.device)
        moved[..., index] = moved[..., index] @ matrix.mT.to(value)


@dataclass(frozen=True, eq=False)
class Turn:
    """Slots that orthogonal matrices multiply, one for each sequence of them.

    Attributes:
        kind: "values" or "stream".
        name: a module or tensor that it is known by.
        size: of the matrices.
        slots: for each matrix what it multiplies.
        keeps_mean: whether the matrices map the vector of ones to itself, as layer norms need it.
    """

    kind: str
    name: str
    size: int
    slots: tuple[tuple[Slot, ...], ...]
    keeps_mean: bool = False

    @property
    def tensors(self) -> list[str]:
        """The names of what changes, in order."""
        return list(dict.fromkeys(slot.tensor for each in self.slots for slot in each))

    def turned(self, name: str, value: Tensor, matrices: Sequence[Tensor]) -> Tensor:
        """The value of a tensor with which the outputs are the same, in float64."""
        new = value.detach().double().clone()
        for slots, matrix in zip(self.slots, matrices, strict=True):
            for slot in [slot for slot in slots if slot.tensor == name]:
                slot.turn_(new, matrix)
        return new


def random_turn(size: int, random: torch.Generator, *, keeps_mean: bool = False) -> Tensor:
    """A random orthogonal matrix in float64 (Haar), among those that map the vector of ones to itself if wanted."""
    inner = size - keeps_mean
    free = (
        orthogonal_(torch.empty(inner, inner, dtype=torch.float64, device="cpu"), generator=random)
        if inner
        else torch.empty(0, 0, device="cpu", dtype=torch.float32)
    )
    return keeping_mean(free) if keeps_mean else free


def keeping_mean(free: Tensor) -> Tensor:
    """An orthogonal matrix, one larger, that maps the vector of ones to itself and turns what is orthogonal to it."""
    size = len(free) + 1
    inner = torch.eye(size, dtype=torch.float64, device="cpu")
    inner[1:, 1:] = free
    normal = torch.full((size,), -(size**-0.5), dtype=torch.float64, device="cpu")
    normal[0] += 1  # of the mirror between the first axis and the ones
    mirror = torch.eye(size, dtype=torch.float64, device="cpu") - 2 * torch.outer(normal, normal) / max(
        float(normal @ normal), 1e-30
    )
    return mirror @ inner @ mirror


class _OfTurns(TwinTrial[Turn]):
    """Runs with random turns.

    Attributes:
        coarse: the relative deviation that is rounding if the model computes in coarser types than its outputs have.
    """

    coarse = 0.0

    def holds(self, changes: Sequence[Turn]) -> bool:
        """Whether the outputs in evaluation mode stay with random turns."""
        if self.stays(self._turned(changes), training=False):
            return True
        if len(changes) > 1:
            return False
        moved = self.moved(self._turned(changes))
        alone = [replace(each, slots=tuple(slots[:1] for slots in each.slots)) for each in changes]
        return moved <= min(self.coarse, _SHARE * self.moved(self._turned(alone)))

    def _turned(self, changes: Sequence[Turn]) -> dict[str, Tensor]:
        random = generator(0, "turns")
        values: dict[str, Tensor] = {}
        for each in changes:
            matrices = [random_turn(each.size, random, keeps_mean=each.keeps_mean) for _ in each.slots]
            for name in each.tensors:
                new = each.turned(name, values.get(name, self.value(name)), matrices)
                values[name] = new.to(self.value(name).dtype)
        return values


def turns_of(model: nn.Module, example: Any, kinds: Collection[str]) -> Confirmed[Turn]:
    """Find the turns of the heads' values and of the spaces that norms read, and confirm them by running.

    Values are those of :func:`gonio.surgery.anatomy`. A space consists of the outputs of layers, tables and parameters
    that are only added up and normalised, position by position, before layers read them; it is left alone if anything
    else reads it. Each turn is tried with random matrices: the outputs in evaluation mode must stay.
    """
    trial = _OfTurns(model, example)
    parameters = trial.parameters
    stay: dict[str, str] = {}
    options: list[list[Turn]] = []
    scales: dict[Turn, Symmetry] = {}
    for block in anatomy(model, example=example).attention if VALUES in kinds else ():
        turn = _of_values(block)
        if not block.linear[2]:
            stay[turn.name] = _VALUES
        else:
            options.append([turn])
            scales[turn] = of_values(block, "head")
    gains: list[str] = []
    if STREAM in kinds:
        spaces = _Spaces(model, record(model, example), parameters)
        options += [spaces.options(space) for space in spaces.able]
        stay.update(spaces.stay)
        gains = spaces.gains
    for each in [each for each in options if (why := _why_not(each[0], parameters))]:
        options.remove(each)
        stay[each[0].name] = why
    for name in gains:
        trial.start.pop(name, None)
    eps = trial.coarsest()
    trial.coarse = min(_ROUNDINGS * eps, _MOST)
    if options and trial.why_not:
        return Confirmed((), parameters, stay | {each[0].name: trial.why_not for each in options})
    scaled = [each for each in options if each[0] in scales]  # a clip that the run does not reach shows at large scales
    held = confirmed(OfBlocks(model, example), [[scales[turn]] for turn, *_ in scaled])
    for each in [each for each, scale in zip(scaled, held, strict=True) if scale is None]:
        options.remove(each)
        stay[each[0].name] = _VALUES
    tried = confirmed(trial, options)
    changes = say("the outputs change if it turns")
    stay.update({o[0].name: changes for o, t in zip(options, tried, strict=True) if t is None})
    return Confirmed(tuple(each for each in tried if each is not None), parameters, stay, eps)


def _of_values(block: Attention) -> Turn:
    """The rows of each head of values, and the columns that read it in all heads that share it."""
    slots = [_slots_of(parts) for parts in block.value]
    for group, part in zip(block.groups, block.output, strict=True):
        slots[group] = (*slots[group], *_slots_of((part,)))
    size = sum(part.count for part in block.value[0])
    return Turn(VALUES, say("the values of {path}", path=block.path or say("the model")), size, tuple(slots))


def _slots_of(parts: Sequence[Part]) -> tuple[Slot, ...]:
    found = []
    for part in parts:
        found.append(Slot(part.tensor, part.dim, tuple(part.indices)))
        if part.bias:
            found.append(Slot(part.bias, -1, tuple(index + part.bias_start for index in part.indices)))
    return tuple(found)


def _why_not(turn: Turn, parameters: Mapping[str, nn.Parameter]) -> str:
    """Why tensors cannot be turned; empty if they can."""
    for each in turn.slots:
        for slot in each:
            if slot.tensor not in parameters:
                return say("{tensor} is not a parameter of the model", tensor=slot.tensor)
            if (why := why_not_dense(parameters[slot.tensor])) is not None:
                return say("{tensor}: {why}", tensor=slot.tensor, why=why)
            if len(slot.index) != turn.size or max(slot.index) >= parameters[slot.tensor].shape[slot.dim]:
                return say("{tensor} does not read or compute its channels one by one", tensor=slot.tensor)
    return ""


# --- spaces that are only added up and normalised ---------------------------------------------------------------------


@dataclass(eq=False)
class _Leaf:
    """A tensor at which the recorded graph ends: an output of a layer, a looked-up table, or a parameter itself."""

    out: Tensor
    channel: int
    slots: tuple[Slot, ...]

    @property
    def size(self) -> int:
        return self.out.shape[self.channel]


@dataclass(eq=False)
class _Space:
    size: int
    slots: dict[Slot, None] = field(default_factory=dict)  # in order
    norms: dict[str, Normed] = field(default_factory=dict)  # by path
    why_not: str = ""


class _Spaces:
    """The spaces that norms read, from one run.

    Attributes:
        able: those that may turn. stay: why others do not, by name.
        gains: of their norms.
    """

    def __init__(self, model: nn.Module, run: Recording, parameters: Mapping[str, nn.Parameter]) -> None:
        self.model, self.run, self.parameters = model, run, parameters
        self.leaves = [*self._layers(), *self._tables(), *self._directly()]
        self._joined: dict[Slot, _Space] = {}
        for leaf in self.leaves:
            self._join(leaf.slots, leaf.size)
        for norm in run.gained:
            self._read(norm.out, -1, norm.path, norm=norm)
        for call in run.calls:
            self._read(call.x, call.channel, call.tensor, reader=call)
        for x in (x for x in floats_in(run.outputs) if x.ndim):
            for leaf in self._sources(x):
                self._space(leaf).why_not = say("it is an output of the model")
        spaces = list(dict.fromkeys(self._joined.values()))
        self.able: list[_Space] = []
        self.stay: dict[str, str] = {}
        for space in [space for space in spaces if space.norms and space.size > 1]:
            if why := space.why_not or self._why_not(space):
                if sum(leaf.slots[0] in space.slots for leaf in self.leaves) > 1:  # not one layer and its norm
                    self.stay[self.name(space)] = why
            else:
                self.able.append(space)
        self.gains = [name for space in self.able for norm in space.norms.values() for name in norm.gains]

    def name(self, space: _Space) -> str:
        """What a space is called in notes: by its first tensor in the order of the model."""
        mine = {slot.tensor for slot in space.slots}
        return say("the stream of {tensor}", tensor=next(name for name in self.parameters if name in mine))

    def options(self, space: _Space) -> list[Turn]:
        """Any turn, and one that keeps means."""
        shifts = [
            Slot(name, -1, tuple(range(space.size)))
            for norm in space.norms.values()
            for name, p in self.parameters.items()
            if name.rpartition(".")[0] == norm.path and name not in norm.gains and p.shape == (space.size,)
        ]
        slots = tuple(dict.fromkeys([*space.slots, *shifts]))
        return [Turn(STREAM, self.name(space), space.size, (slots,), keeps) for keeps in (False, True)]

    # what there is

    def _layers(self) -> Iterator[_Leaf]:
        for call in self.run.calls:
            size = call.out.shape[call.channel]
            rows = range(call.start, call.start + size)
            slots = [Slot(call.tensor, call.out_dim, tuple(rows))]
            if call.bias:
                slots.append(Slot(call.bias, -1, tuple(index + call.bias_start for index in rows)))
            yield _Leaf(call.out, call.channel, tuple(slots))

    def _tables(self) -> Iterator[_Leaf]:
        for name, out in self.run.tables:
            yield _Leaf(out, -1, (self._whole(name, 1),))

    def _directly(self) -> Iterator[_Leaf]:
        """Parameters that no layer has, such as positions that are added."""
        known = {slot.tensor for leaf in [*self._layers(), *self._tables()] for slot in leaf.slots}
        for name, p in self.parameters.items():
            direct = name in self.run.used and name not in known and p.requires_grad
            if direct and p.ndim and p.layout is torch.strided:
                yield _Leaf(p, -1, (self._whole(name, p.ndim - 1),))

    def _whole(self, tensor: str, dim: int) -> Slot:
        return Slot(tensor, dim, tuple(range(self.parameters[tensor].shape[dim])))

    # which belong together

    def _space(self, leaf: _Leaf) -> _Space:
        return self._joined[leaf.slots[0]]

    def _join(self, slots: Sequence[Slot], size: int) -> _Space:
        """One space of all spaces in which these slots are."""
        spaces = list(dict.fromkeys(self._joined[slot] for slot in slots if slot in self._joined))
        whole = spaces[0] if spaces else _Space(size)
        for other in spaces[1:]:
            whole.why_not = whole.why_not or other.why_not
            whole.norms.update(other.norms)
            whole.slots.update(other.slots)
        whole.slots.update(dict.fromkeys(slots))
        self._joined.update(dict.fromkeys(whole.slots, whole))
        return whole

    def _sources(self, x: Tensor, noise: Tensor | None = None) -> dict[_Leaf, Tensor]:
        """The leaves on which a tensor depends, with the gradients of a random sum."""
        if not x.requires_grad or not self.leaves:
            return {}
        noise = noise_like(x, "turns", 2) if noise is None else noise
        outs = [leaf.out for leaf in self.leaves]
        try:
            gradients = derivatives(x, outs, noise, retain_graph=True, allow_unused=True)
        except RuntimeError as error:  # an operation in place, or a function without a backward
            why = say("the gradients that show what reads what cannot be computed ({error})", error=first_line(error))
            do = "Leave this model as it is, or run it without operations in place."
            raise NotApplicableError("rotate_", "", why, do, action="turn") from error
        return {
            leaf: g for leaf, g in zip(self.leaves, gradients, strict=True) if g is not None and bool((g != 0).any())
        }

    def _read(
        self, x: Tensor, channel: int, name: str, *, reader: Call | None = None, norm: Normed | None = None
    ) -> None:
        """Join what is only added up in a tensor, with the layer or norm that reads it; others stay as they are."""
        noise, size = noise_like(x, "turns", 2), x.shape[channel]
        sources = self._sources(x, noise)
        if any(each.is_complex() for each in (x, *(leaf.out for leaf in sources))):
            for leaf in sources:
                self._space(leaf).why_not = say("{name} reads complex numbers", name=name)
            return
        shown = random_mask((size,), "turns", 3).to(x.device)
        masked = noise * shown.view([size if d == channel % x.ndim else 1 for d in range(x.ndim)]).to(noise)
        some = self._sources(x, masked)
        added = [leaf for leaf in sources if leaf.size == size and not _reaches(some.get(leaf), leaf.channel, ~shown)]
        terms = (noise.double() * x.detach().double()).flatten()
        total = sum(float((sources[leaf].double() * leaf.out.detach().double()).sum()) for leaf in added)
        other = not added or abs(float(terms.sum()) - total) > _EQUAL * float(terms.norm())
        added = [leaf for leaf in sources if leaf.size == size] if other else added
        for leaf in sources:
            if other or leaf not in added:
                space = self._space(leaf)
                mixed = say("{name} reads something else than a sum of layers' outputs", name=name)
                space.why_not = space.why_not or mixed
        if not added:
            return
        whole = self._join([slot for leaf in added for slot in leaf.slots], size)
        if reader is not None:
            whole = self._join([next(iter(whole.slots)), self._columns(reader)], size)
        if norm is not None:
            whole.norms[norm.path] = norm

    def _columns(self, call: Call) -> Slot:
        """The columns of a layer, of the rows that it uses."""
        shape = self.parameters[call.tensor].shape
        rows: int | None = call.out.shape[call.channel]
        rows = None if call.index is not None or rows == shape[call.out_dim] else rows
        start = 0 if rows is None else call.start
        return Slot(call.tensor, call.in_dim, tuple(range(shape[call.in_dim])), call.out_dim, start, rows)

    def _why_not(self, space: _Space) -> str:
        """Why a space cannot turn; empty if it may."""
        uneven = [
            path
            for path, norm in space.norms.items()
            if any(bool((self.parameters[g] != self.parameters[g].flatten()[0]).any()) for g in norm.gains)
        ]
        passed = say("it passes a norm whose gain is not one number ({norms})", norms=listing(uneven))
        do = say("gonio.fold_(model, gains=True) merges gains that layers alone read")
        tables = {name for name, _ in self.run.tables}
        if uneven and (tied := self._reader(uneven, tables)):
            why = say("{tied}, which reads it, is a table of embeddings, too", tied=tied)
            head = say("give the head a weight of its own, and {do}", do=do)
            return say("{passed}, and {why}; {do}", passed=passed, why=why, do=head)
        if uneven:
            return say("{passed}; {do}", passed=passed, do=do)
        mine = {id(self.parameters[slot.tensor]) for slot in space.slots}
        known = {slot.tensor.rpartition(".")[0] for slot in space.slots} | set(self.run.began)
        owners = [site.path for site in sites(self.model) if mine & {id(p) for p in site.module._parameters.values()}]
        if other := [path for path in owners if path not in known]:
            return say("{layers} did not run, and shares a tensor of it", layers=listing(other))
        idle = not_run(self.run, self.parameters, space.size, ())
        return say("{layers} had no part in the run, and may belong to it", layers=listing(idle)) if idle else ""

    def _reader(self, norms: Collection[str], tensors: Collection[str]) -> str:
        """The first of the tensors with which a layer reads the results of all of these norms; empty for none."""
        outs = [normed.out for normed in self.run.gained if normed.path in norms]
        for call in [call for call in self.run.calls if call.tensor in tensors and call.x.requires_grad]:
            found = derivatives(call.x, outs, noise_like(call.x, "turns", 2), retain_graph=True, allow_unused=True)
            if all(g is not None and bool((g != 0).any()) for g in found):
                return call.tensor
        return ""


def _reaches(gradient: Tensor | None, dim: int, hidden: Tensor) -> bool:
    """Whether a gradient is not 0 at channels that do not belong to the sum."""
    return gradient is not None and bool((gradient.movedim(dim, -1)[..., hidden] != 0).any())
