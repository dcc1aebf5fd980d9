"""The exact symmetries of transformer blocks: scale that moves between two weights without changing the function."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gonio.editing.twin import evaluating, in_mode, set_tensors_
from gonio.editing.where import unwrapped
from gonio.errors import listing
from gonio.geometry.views import why_not_dense
from gonio.messages import say
from gonio.seeding import generator
from gonio.surgery.anatomy import anatomy
from gonio.surgery.blocks import Anatomy, Attention, Mlp
from gonio.surgery.equivalent import SAME_OUTPUTS, call, deviation, tensors_in
from gonio.surgery.facts import may_change
from gonio.surgery.products import floats_in
from gonio.surgery.recording import Part

SWEEPS = 10_000
CONVERGED = 1e-13  # of the logarithm of a factor: rounding, so that closed forms are reached to float64 precision
_EXPONENTS = {torch.float16: 3}  # of the powers of two of a trial, where the range of a type is small
_UNITS = "up and down"
_ACTIVATION = "the activation is not positively homogeneous"
Change = TypeVar("Change")
_Grain = Literal["channel", "half", "pairs", "head", "block"]


@dataclass(frozen=True, eq=False)
class Side:
    """Rows of a weight along a dimension, with the number of the factor of each."""

    tensor: str
    dim: int
    bias: str
    bias_start: int
    index: Tensor
    units: Tensor


@dataclass(frozen=True, eq=False)
class Symmetry:
    r"""Factors :math:`s > 0` by which rows are multiplied, and other rows or columns by :math:`s^{-degree}`.

    Attributes:
        path: the module of the block.
        kind: the two weights, in words.
        made, read: what is multiplied, with its biases, and what is divided.
        units: the number of factors, for each of the experts of a stacked weight.
    """

    path: str
    kind: str
    made: tuple[Side, ...]
    read: tuple[Side, ...]
    units: int
    degree: int = 1
    experts: int = 0

    @property
    def tensors(self) -> dict[str, None]:
        """The names of the weights and biases, in order."""
        return {name: None for side in (*self.made, *self.read) for name in (side.tensor, side.bias) if name}

    @property
    def weights(self) -> dict[str, None]:
        """The names of the weights, in order."""
        return {side.tensor: None for side in (*self.made, *self.read)}

    def joined(self) -> Symmetry:
        """The same with one factor for all rows."""
        made, read = (
            tuple(replace(side, units=torch.zeros_like(side.units)) for side in sides)
            for sides in (self.made, self.read)
        )
        return replace(self, made=made, read=read, units=1, experts=0)


@dataclass(frozen=True)
class BlockSymmetries:
    """The symmetries of a model that were confirmed, and why others were not.

    Attributes:
        parameters: by name, those of the model.
        left: the pairs of weights and the path of each block that is left alone, by the reason.
    """

    symmetries: tuple[Symmetry, ...] = ()
    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)
    left: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    anatomy: Anatomy | None = None  # of the model, if it was run
    trial: TwinTrial[Symmetry] | None = None  # that confirmed them

    @property
    def eps(self) -> float:
        """The largest rounding of the types in which the model computes."""
        return 0.0 if self.trial is None else self.trial.coarsest()

    @property
    def trained(self) -> bool:
        """Whether the outputs in training mode were compared, too."""
        return self.trial is None or self.trial.trains

    def joined(self) -> BlockSymmetries:
        """The same with one factor for each pair of weights of a block."""
        return replace(self, symmetries=tuple(each.joined() for each in self.symmetries))

    def reasons(self) -> list[str]:
        """What is left alone and why, one sentence for each pair and reason."""
        found: list[str] = []
        for why, places in self.left.items():
            for kind in dict.fromkeys(kind for kind, _ in places):
                paths = [path or "the model" for of, path in places if of == kind]
                named = listing(paths)
                found.append(say("the scale of {kind} stays in {paths}: {why}", kind=kind, paths=named, why=why))
        return found


def block_symmetries(model: nn.Module, example: Any, *, traced: bool, taken: frozenset[int]) -> BlockSymmetries:
    """Find the symmetries of attention and MLP blocks by :func:`gonio.surgery.anatomy`, and confirm them by running.

    Each one is tried with random powers of two, which floating-point numbers are multiplied by without rounding: the
    outputs must stay, in evaluation and in training mode. Of several grains the finest that is confirmed is taken.

    Args:
        example: an input of the model.
        traced: whether the graph of the model says what it knows of activations.
        taken: the `id` of parameters that are left alone.
    """
    found, trial = anatomy(model, example=example), OfBlocks(model, example)
    parameters = trial.parameters
    left: dict[str, list[tuple[str, str]]] = {}
    able: list[list[Symmetry]] = []
    for why, options in _candidates(found):
        first = options[0]
        known = why == _ACTIVATION or all(id(parameters[side.tensor]) in taken for side in first.made)
        if first.kind == _UNITS and traced and known:  # the graph says which activations are homogeneous
            continue
        if why := why or _why_not(first, found, parameters, taken) or trial.why_not:
            left.setdefault(why, []).append((first.kind, first.path))
        else:
            able.append(options)
    for path, why in found.unknown.items():
        left.setdefault(why, []).append(("query, key, value and output", path))
    able.sort(key=lambda options: options[0].kind)
    tried = confirmed(trial, able)
    for options in [options for options, each in zip(able, tried, strict=True) if each is None]:
        left.setdefault("the outputs change if it moves", []).append((options[0].kind, options[0].path))
    chosen = tuple(each for each in tried if each is not None)
    kept = {why: tuple(places) for why, places in left.items()}
    return BlockSymmetries(chosen, parameters, kept, found, trial if chosen else None)


# --- which there may be -----------------------------------------------------------------------------------------------


def _candidates(found: Anatomy) -> Iterator[tuple[str, list[Symmetry]]]:
    """For each pair of weights why its scale is fixed, and what to try, the finest grain first."""
    for block in found.attention:
        why = "" if all(block.linear[:2]) else "the products are not proportional to queries and keys"
        why = "a norm follows queries or keys" if block.normed else why
        yield why, [_of_queries(block, grain) for grain in _grains(block)]
        why = "" if block.linear[2] else "the next layer reads what is not proportional to the values"
        yield why, [of_values(block, grain) for grain in ("channel", "head", "block")]
    for mlp in found.mlps:
        yield "" if mlp.degree else _ACTIVATION, [_of_units(mlp, grain) for grain in ("channel", "block")]


def _grains(block: Attention) -> tuple[_Grain, ...]:
    pairs: dict[str | None, tuple[_Grain, ...]] = {"": ("channel",), "half": ("half",), "pairs": ("pairs",)}
    even = block.head_size % 2 == 0 or not block.rotary
    return (*(pairs.get(block.rotary, ()) if even and not block.shared_key else ()), "head", "block")


def _of_queries(block: Attention, grain: _Grain) -> Symmetry:
    """Queries of all heads of a group are multiplied, its keys divided; where keys are shared, all heads are one."""
    one = bool(block.shared_key)
    groups = [0] * block.heads if one else list(block.groups)
    made, units = _sides(zip(groups, block.query, strict=True), grain)
    keys = [(0 if one else n, parts) for n, parts in enumerate(block.key)]
    read, _ = _sides([*keys, *([(0, block.shared_key)] if one else [])], grain)
    return Symmetry(block.path, "query and key", made, read, units)


def of_values(block: Attention, grain: _Grain) -> Symmetry:
    """Values of each head are multiplied, and the columns that read them divided."""
    made, units = _sides(enumerate(block.value), grain)
    read, _ = _sides(((group, (part,)) for group, part in zip(block.groups, block.output, strict=True)), grain)
    return Symmetry(block.path, "value and output", made, read, units)


def _of_units(mlp: Mlp, grain: _Grain) -> Symmetry:
    made, units = _sides([(0, (mlp.up,))], grain)
    read, _ = _sides([(0, (mlp.down,))], grain)
    experts = mlp.experts if grain == "channel" else 0
    return Symmetry(mlp.path, _UNITS, made, read, units, max(mlp.degree, 1), experts)


def _sides(heads: Iterable[tuple[int, tuple[Part, ...]]], grain: _Grain) -> tuple[tuple[Side, ...], int]:
    """The parts of the heads of these groups, joined by tensor, and the number of factors."""
    joined: dict[tuple[str, int, str, int], list[tuple[Tensor, Tensor]]] = {}
    most = 0
    for group, parts in heads:
        place = torch.arange(sum(part.count for part in parts), device="cpu")
        half = max(len(place) // 2, 1)
        within = {"channel": place, "half": place % half, "pairs": place // 2}.get(grain, torch.zeros_like(place))
        units = within + (0 if grain == "block" else group * (int(within.max()) + 1))
        most = max(most, int(units.max()) + 1)
        for part, mine in zip(parts, units.split([part.count for part in parts]), strict=True):
            key = (part.tensor, part.dim, part.bias, part.bias_start)
            joined.setdefault(key, []).append((torch.tensor(part.indices, device="cpu"), mine))
    return tuple(Side(*key, *map(torch.cat, zip(*each, strict=True))) for key, each in joined.items()), most


def _why_not(symmetry: Symmetry, found: Anatomy, parameters: Mapping[str, nn.Parameter], taken: frozenset[int]) -> str:
    """Why the scale of a pair of weights cannot move; empty if it may."""
    tied = {name for names in found.ties for name in names}
    for name in symmetry.tensors:
        if name in tied:
            return say("{name} is shared with another layer", name=name)
        if (why := why_not_dense(parameters[name])) is not None:
            return say("{tensor}: {why}", tensor=name, why=why)
        if id(parameters[name]) in taken:
            return say("{name} takes part in the scales of other layers", name=name)
    if {(s.tensor, 1 - s.dim) for s in symmetry.made} & {(s.tensor, s.dim) for s in symmetry.read}:
        return say("one weight both computes and reads it")
    for side in (*symmetry.made, *symmetry.read):
        shapes = [parameters[name].shape for name in (side.tensor, side.bias) if name]
        sizes = [shapes[0][side.dim], *(shape[-1] - side.bias_start for shape in shapes[1:])]
        stacked = side.dim > 0 and all(len(shape) > 1 and shape[0] == symmetry.experts for shape in shapes)
        if int(side.index.max()) >= min(sizes) or (symmetry.experts and not stacked):
            return say("{tensor} does not read or compute its channels one by one", tensor=side.tensor)
    return ""


# --- confirmed by running ---------------------------------------------------------------------------------------------


def confirmed(trial: TwinTrial[Change], able: list[list[Change]]) -> list[Change | None]:
    """For each list of changes, such as the grains of a symmetry, the first one that is confirmed."""
    found = _held(trial, [options[0] for options in able])
    rest = [n for n, each in enumerate(found) if each is None and len(able[n]) > 1]
    for n, each in zip(rest, confirmed(trial, [able[n][1:] for n in rest]) if rest else (), strict=True):
        found[n] = each
    return found


def _held(trial: TwinTrial[Change], changes: list[Change]) -> list[Change | None]:
    """Those that hold, and None for others; by halves where not all do."""
    if not changes or trial.holds(changes):
        return list(changes)
    half = len(changes) // 2
    return [*_held(trial, changes[:half]), *_held(trial, changes[half:])] if half else [None]


@dataclass(frozen=True)
class Confirmed(Generic[Change]):
    """The changes that were confirmed, the parameters of the model by name, and by name why other changes cannot be."""

    able: tuple[Change, ...]
    parameters: Mapping[str, nn.Parameter]
    stay: Mapping[str, str]
    eps: float = 0.0  # the largest rounding of the types in which the model computes


class TwinTrial(ABC, Generic[Change]):
    """Runs of a model with other values of its parameters, which the model keeps.

    Parameters of one value, such as a bias or a gain of 0 before training, get random ones, with which the outputs show
    what they do.

    Attributes:
        parameters: those of the model by name.
        start: values of parameters with which the trials start, in the place of the model's own.
        least: a relative deviation of the outputs that is rounding in any case.
    """

    least = 0.0

    def __init__(self, model: nn.Module, example: Any) -> None:
        self.model, self.example = model, example
        with evaluating(model) as plain:
            self.parameters = dict(plain.named_parameters())
        self._before: dict[bool, list[Tensor] | None] = {}
        random = generator(1, "symmetries")
        self.start: dict[str, Tensor] = {}
        for name, p in self.parameters.items():
            value = p.detach()
            if value.numel() and why_not_dense(p) is None and bool((value == value.flatten()[0]).all()):
                self.start[name] = value + 0.1 * torch.randn(
                    value.shape, generator=random, device="cpu", dtype=torch.float32
                ).to(value)

    @abstractmethod
    def holds(self, changes: Sequence[Change]) -> bool:
        """Whether the outputs stay with random amounts of these changes, all at once."""

    def value(self, name: str) -> Tensor:
        """The value of a parameter in the trial, before a change."""
        return self.start.get(name, self.parameters[name].detach())

    @property
    def why_not(self) -> str:
        """Why the outputs cannot be compared; empty if they can."""
        return "" if self._unchanged(training=False) is not None else say("the outputs differ from run to run")

    @property
    def trains(self) -> bool:
        """Whether the model runs in training mode, twice with the same outputs."""
        return self._unchanged(training=True) is not None

    def coarsest(self) -> float:
        """The largest rounding, relative, of the types of floating-point numbers in which the model computes."""
        with _Coarsest() as seen:
            self._run({}, training=False)
        return seen.eps

    def stays(self, values: Mapping[str, Tensor], *, training: bool) -> bool:
        """Whether the outputs stay with these values."""
        before = self._unchanged(training=training)
        if before is None:
            return training  # a model that runs only in evaluation mode, or draws numbers that have no seed
        with suppress(Exception):  # a model can raise anything at weights that it does not take
            after = self._run(values, training=training)
            return _same(before, after, self.least)
        return False

    def moved(self, values: Mapping[str, Tensor]) -> float:
        """The relative deviation of the outputs with these values; infinite where the model does not take them."""
        before = self._unchanged(training=False)
        with suppress(Exception):  # as in `stays`
            if before is not None:
                return deviation(before, self._run(values, training=False)).relative
        return math.inf

    def _unchanged(self, *, training: bool) -> list[Tensor] | None:
        """The outputs of the model as it is; None if it does not run, or if they are not the same in two runs."""
        if training not in self._before:
            self._before[training] = None
            with suppress(Exception):
                first, second = (self._run({}, training=training) for _ in range(2))
                self._before[training] = first if _same(first, second) else None
            if self._before[training] is None and self.start and not training:
                self.start, self._before = {}, {}  # the model does not take other values
                return self._unchanged(training=training)
        return self._before[training]

    def _run(self, values: Mapping[str, Tensor], *, training: bool) -> list[Tensor]:
        with evaluating(self.model) as plain, torch.no_grad():
            changed = {**self.start, **values}
            tried = {name: nn.Parameter(value, requires_grad=False) for name, value in changed.items()}
            for module in plain.modules() if plain is not unwrapped(self.model) else ():
                for hooks in (module._forward_hooks, module._forward_pre_hooks):
                    for key in [key for key, hook in hooks.items() if not may_change(hook)]:
                        del hooks[key]
            try:
                set_tensors_(plain, {id(self.parameters[name]): value for name, value in tried.items()})
                return tensors_in(call(in_mode(plain, training=training), self.example))
            finally:  # some models are their own twins
                set_tensors_(plain, {id(value): self.parameters[name] for name, value in tried.items()})


class OfBlocks(TwinTrial[Symmetry]):
    """Runs with random powers of two, and with their inverses."""

    def holds(self, changes: Sequence[Symmetry]) -> bool:
        """Whether the outputs stay with random factors, and with their inverses."""
        random = generator(0, "symmetries")
        most = min(_EXPONENTS.get(p.dtype, 20) for s in changes for p in map(self.parameters.__getitem__, s.tensors))
        exponents = [
            torch.randint(-most, most + 1, _shape(each), generator=random, dtype=torch.float64, device="cpu")
            for each in changes
        ]
        for sign in (1, -1):
            factors = Factors(self.parameters)
            for each, exponent in zip(changes, exponents, strict=True):
                factors.scale_(each, torch.exp2(sign * exponent))
            values = {name: self.value(name) * factors.of(name) for name in factors.names}
            if not all(self.stays(values, training=mode) for mode in (False, True)):
                return False
        return True


class _Coarsest(TorchDispatchMode):
    eps = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.eps = max([self.eps, *(torch.finfo(x.dtype).eps for x in floats_in(out))])
        return out


def _same(a: list[Tensor], b: list[Tensor], least: float = 0.0) -> bool:
    return deviation(a, b).relative <= max(
        least, min(SAME_OUTPUTS.get(x.dtype, SAME_OUTPUTS[torch.float32]) for x in a)
    )


# --- factors ----------------------------------------------------------------------------------------------------------


def _shape(symmetry: Symmetry) -> tuple[int, ...]:
    return (symmetry.experts, symmetry.units) if symmetry.experts else (symmetry.units,)


Sums = dict[tuple[str, int, bool], Tensor]
"""Sums of squares along a dimension of a tensor, of a stack for each matrix: each weight is read once for it."""


class Factors:
    """By the name of a tensor and a dimension, the factors along it (of a stack of experts, for each expert)."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], sums: Sums | None = None) -> None:
        self.parameters = parameters
        self._along: dict[tuple[str, int], Tensor] = {}
        self._sums: Sums = {} if sums is None else sums

    @property
    def names(self) -> list[str]:
        """The tensors that have factors, in the order of the model."""
        scaled = {name for name, _ in self._along}
        return [name for name in self.parameters if name in scaled]

    def scale_(self, symmetry: Symmetry, factors: Tensor) -> None:
        """Multiply both sides of a symmetry."""
        for sides, power in ((symmetry.made, 1), (symmetry.read, -symmetry.degree)):
            for side in sides:
                own = factors.pow(power)[..., side.units]
                places = [(side.tensor, side.dim, side.index)]
                if side.bias:
                    places.append((side.bias, self.parameters[side.bias].ndim - 1, side.index + side.bias_start))
                for name, dim, index in places:
                    shape = (*factors.shape[:-1], self.parameters[name].shape[dim])
                    along = self._along.setdefault((name, dim), torch.ones(shape, dtype=torch.float64, device="cpu"))
                    along[..., index] *= own

    def of(self, name: str) -> Tensor:
        """The factor of every entry of a tensor, of its type; broadcasts."""
        return self.exact(name).to(self.parameters[name].dtype)

    def exact(self, name: str) -> Tensor:
        """The factor of every entry of a tensor in float64."""
        parameter = self.parameters[name]
        found = torch.ones([1] * parameter.ndim, dtype=torch.float64, device="cpu")
        for (tensor, dim), along in self._along.items():
            if tensor == name:
                shape = [1] * parameter.ndim
                shape[dim] = along.shape[-1]
                if along.ndim == 2:
                    shape[0] = len(along)
                found = found * along.reshape(shape)
        return found.to(parameter.device)

    def squares(self, symmetry: Symmetry, sides: Sequence[Side]) -> Tensor:
        """For each factor the sum of squares of the weights that it acts on, at the present factors."""
        found = torch.zeros(_shape(symmetry), dtype=torch.float64, device="cpu")
        for side in sides:
            rows = self._rows(side.tensor, side.dim, stacked=symmetry.experts > 0)
            found.index_add_(-1, side.units, rows.index_select(-1, side.index))
        return found

    def sum_of(self, symmetry: Symmetry) -> float:
        """The sum of squares of both sides of a symmetry, at the present factors."""
        return sum(float(self.squares(symmetry, sides).sum()) for sides in (symmetry.made, symmetry.read))

    def sum_of_squares(self, names: Iterable[str]) -> float:
        """The sum of squares of these tensors, at the present factors."""
        found = []
        for name in names:
            dim, stacked = next(((d, along.ndim > 1) for (n, d), along in self._along.items() if n == name), (0, False))
            found.append(float(self._rows(name, dim, stacked=stacked).sum()))
        return math.fsum(found)

    def _rows(self, name: str, dim: int, *, stacked: bool) -> Tensor:
        """The sums of squares along a dimension, and of a stack along the first one, at the present factors."""
        weight, kept = self.parameters[name].detach(), {0, dim} if stacked else {dim}
        others = [d for d in range(weight.ndim) if d not in kept]
        if any(n == name and (d != dim or along.ndim > 1 + stacked) for (n, d), along in self._along.items()):
            squares = (weight.double() * self.exact(name)).square()
            return (squares.sum(others) if others else squares).cpu()
        if (name, dim, stacked) not in self._sums:
            norms = torch.linalg.vector_norm(weight, dim=others, dtype=torch.float64) if others else weight.double()
            self._sums[name, dim, stacked] = norms.square().cpu()
        along = self._along.get((name, dim))
        return self._sums[name, dim, stacked] * (1 if along is None else along.square())


@dataclass
class LeastFactors:
    """The factors of the least sum of squares, with the sums of squares of these weights before and after."""

    factors: Factors
    pairs: tuple[tuple[float, float], ...] = ()  # of each symmetry the sum of squares before and after
    before: float = 0.0
    after: float = 0.0
    converged: bool = True


@torch.no_grad()
def least_factors(
    symmetries: Sequence[Symmetry],
    parameters: Mapping[str, nn.Parameter],
    *,
    sweeps: int = SWEEPS,
    tolerance: float = CONVERGED,
    sums: Sums | None = None,
) -> LeastFactors:
    r"""The factors at which the sum of the squared weights is least.

    With P and Q the sums of squares of what a factor multiplies and of what it divides, :math:`s^2 P + Q / s^{2n}` is
    least at :math:`s^{2 + 2n} = nQ/P`, n being the degree. Weights that have factors along two dimensions couple
    them; then this is repeated until nothing moves, as the sum is convex in the logarithms. `sums` keeps what was read
    of the weights for another search.
    """
    least = LeastFactors(Factors(parameters, {} if sums is None else sums))
    dims: dict[str, set[int]] = {}
    for each in symmetries:
        for side in (*each.made, *each.read):
            dims.setdefault(side.tensor, set()).add(side.dim)
    coupled = [each for each in symmetries if any(len(dims.get(name, ())) > 1 for name in each.tensors)]
    least.before = least.factors.sum_of_squares(dims)
    before = [least.factors.sum_of(each) for each in symmetries]
    moved = [_improve_(least.factors, each) for each in symmetries]
    for _ in range(sweeps if coupled and moved else 0):
        if max(_improve_(least.factors, each) for each in coupled) < tolerance:
            break
    else:
        least.converged = not coupled
    least.after = least.factors.sum_of_squares(dims)
    least.pairs = tuple(zip(before, map(least.factors.sum_of, symmetries), strict=True))
    return least


def _improve_(factors: Factors, symmetry: Symmetry) -> float:
    """Give one symmetry its best factors, the others held; the largest step of a logarithm."""
    made, read = factors.squares(symmetry, symmetry.made), factors.squares(symmetry, symmetry.read)
    n = symmetry.degree
    # what is never computed or never read has no best scale: it stays
    step = torch.where((made > 0) & (read > 0), (n * read / made).pow(1 / (2 + 2 * n)), 1.0)
    factors.scale_(symmetry, step)
    return float(step.log().abs().max())
