"""The gain and the shift of a norm, merged into the linear layers that alone read its result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gonio.editing.where import modules_at
from gonio.errors import first_line, listing
from gonio.execution import derivatives
from gonio.geometry.views import why_not_dense
from gonio.seeding import generator
from gonio.surgery.logits import facts_of_norm
from gonio.surgery.products import floats_in
from gonio.surgery.recording import Call, Normed, Recording, noise_like, record
from gonio.surgery.symmetries import Confirmed, TwinTrial, confirmed

_MOST = 3  # exponent of the powers of two of a trial
_EQUAL = 0.02  # relative; of what a layer reads and a norm's result, in any dtype
_ROUNDING = 1e-5  # the largest relative deviation of outputs in a trial, where a model computes in several types


@dataclass(frozen=True)
class Reader:
    """Rows of a weight (`rows` from `start` on; None for all) whose columns read a norm's result."""

    tensor: str
    out_dim: int
    in_dim: int
    start: int
    rows: int | None
    bias: str
    bias_start: int

    @classmethod
    def of(cls, call: Call) -> Reader:
        """The rows that a call of a layer uses; a stack of experts is one."""
        rows = call.out.shape[call.channel] if call.index is None else None
        return cls(call.tensor, call.out_dim, call.in_dim, call.start, rows, call.bias, call.bias_start)

    def overlaps(self, other: Reader) -> bool:
        """Whether two calls use the same rows."""
        if self.tensor != other.tensor or self.rows is None or other.rows is None:
            return self.tensor == other.tensor
        return self.start < other.start + other.rows and other.start < self.start + self.rows

    def fits(self, bias: Tensor) -> bool:
        """Whether a bias has an entry for each of the rows."""
        return bias.ndim == 1 and self.rows is not None and self.start + self.bias_start + self.rows <= len(bias)

    def matrix(self, weight: Tensor) -> Tensor:
        """A view (…, rows, columns)."""
        mine = weight if self.rows is None else weight.narrow(self.out_dim, self.start, self.rows)
        return mine.movedim((self.out_dim, self.in_dim), (-2, -1))


@dataclass(frozen=True)
class Gain:
    """A norm and what reads it.

    Attributes:
        path: its module.
        gain, shift: names of parameters; "" for no shift.
        added: the norm multiplies by its gain plus this, which is 0 or 1.
        moves_shift: whether the biases of the readers take the shift; else it is divided by the gain.
    """

    path: str
    gain: str
    shift: str
    added: float
    readers: tuple[Reader, ...]
    moves_shift: bool = False

    @property
    def neutral(self) -> float:
        """The value at which the norm multiplies by one."""
        return 1 - self.added

    @property
    def tensors(self) -> list[str]:
        """The names of what changes, in order."""
        of_readers = [name for r in self.readers for name in (r.tensor, r.bias if self.moves_shift else "")]
        return list(dict.fromkeys(name for name in (self.gain, self.shift, *of_readers) if name))

    def values(self, old: Mapping[str, Tensor], gain: Tensor) -> dict[str, Tensor]:
        """The parameters with which the outputs are the same when the norm multiplies by `gain`, in float64."""
        new = {name: old[name].double().clone() for name in self.tensors}
        ratio = (new[self.gain] + self.added) / gain.to(new[self.gain])
        shift = new[self.shift].clone() if self.shift else None
        for r in self.readers:
            matrix = r.matrix(new[r.tensor])
            if shift is not None and self.moves_shift:
                moved = (matrix @ shift).flatten()
                new[r.bias].narrow(-1, r.start + r.bias_start, len(moved)).add_(moved)
            matrix.mul_(ratio)
        if shift is not None:
            new[self.shift] = torch.zeros_like(shift) if self.moves_shift else shift / ratio
        new[self.gain] = gain.to(new[self.gain]) - self.added
        return new


def _powers(gain: nn.Parameter, random: torch.Generator) -> Tensor:
    """Powers of two of both signs, by which floating-point numbers of any type are multiplied without rounding."""
    exponent = torch.randint(-_MOST, _MOST + 1, gain.shape, generator=random, dtype=torch.float64, device="cpu")
    sign = 2.0 * torch.randint(0, 2, gain.shape, generator=random, dtype=torch.float64, device="cpu") - 1
    return (sign * exponent.exp2()).to(gain.device)


class _OfGains(TwinTrial[Gain]):
    def holds(self, changes: Sequence[Gain]) -> bool:
        """Whether the outputs in evaluation mode stay with gains of other sizes and signs."""
        random = generator(0, "gains")
        values: dict[str, Tensor] = {}
        for each in changes:
            old = {name: self.value(name) for name in each.tensors}
            new = each.values(old | values, _powers(self.parameters[each.gain], random))
            values.update({name: value.to(old[name].dtype) for name, value in new.items()})
        return self.stays(values, training=False)


def gains_of(model: nn.Module, example: Any, chosen: Collection[int]) -> Confirmed[Gain]:
    """Find the gains of norms that linear layers alone read, and confirm them by running.

    The layers are those whose input is the norm's result in the run. Each gain is tried with random powers of two of
    both signs, and the columns of its readers with the inverse: the outputs in evaluation mode must stay.

    Args:
        example: an input of the model.
        chosen: the `id` of the modules that may change.
    """
    run, trial = record(model, example), _OfGains(model, example)
    parameters = trial.parameters
    modules = modules_at(model)
    found: dict[str, list[Normed]] = {}
    stay: dict[str, str] = {}
    for call in run.gained:
        if call.gains and call.path in modules and id(modules[call.path]) in chosen:
            found.setdefault(call.gains[0], []).append(call)
    try:
        read = _reads(run, [call for each in found.values() for call in each])
    except RuntimeError as error:  # a function of the model's own
        why = f"derivatives cannot be computed: {first_line(error, 80)}"
        return Confirmed((), parameters, {call.path: why for each in found.values() for call in each})
    options: list[list[Gain]] = []
    for normed in found.values():
        whole = _gain(run, parameters, modules[normed[0].path], normed, read)
        if isinstance(whole, str):
            stay.update(dict.fromkeys((each.path for each in normed), whole))
        elif whole:
            options.append(whole)
    eps, random = trial.coarsest(), generator(1, "gains")
    trial.least = min(10 * eps, _ROUNDING)
    for gain, *_ in options:
        powers = _powers(parameters[gain.gain], random)
        trial.start[gain.gain] = (powers - gain.added).to(parameters[gain.gain].dtype)
    if options and trial.why_not:
        return Confirmed((), parameters, stay | {gain.path: trial.why_not for gain, *_ in options})
    for (gain, *_), held in zip(options, tried := confirmed(trial, options), strict=True):
        if held is None:
            readers = listing(list(dict.fromkeys(r.tensor for r in gain.readers)))
            stay[gain.path] = f"the outputs change if it moves into {readers}"
    return Confirmed(tuple(each for each in tried if each is not None), parameters, stay, eps)


# --- what reads a norm ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Read:
    """What a layer, or None for the outputs, takes, in a random sum, and the part of each norm in it, by its `id`."""

    call: Call | None
    sum: Tensor
    scale: float
    parts: Mapping[int, Tensor]

    def is_of(self, normed: Sequence[Normed]) -> bool:
        """Whether it is the result of the norm alone."""
        own = sum(self.parts[id(each)] for each in normed if id(each) in self.parts)
        return float((self.sum - own).abs()) <= _EQUAL * self.scale


def _reads(run: Recording, normed: Sequence[Normed]) -> list[_Read]:
    given: list[tuple[Call | None, Tensor]] = [(None, x) for x in floats_in(run.outputs)]
    found = []
    for call, x in [*given, *((call, call.x) for call in run.calls)]:
        if not x.requires_grad or not normed:
            continue
        noise = noise_like(x, "gains", 2)
        seen = [each.out for each in normed]
        gradients = derivatives(x, seen, noise, retain_graph=True, allow_unused=True)
        parts = {
            id(each): (g.double() * each.out.detach().double()).sum()
            for each, g in zip(normed, gradients, strict=True)
            if g is not None and bool((g != 0).any())
        }
        terms = noise.double() * x.detach().double()
        found.append(_Read(call, terms.sum(), float(terms.norm()), parts))
    return found


def _gain(
    run: Recording, parameters: Mapping[str, nn.Parameter], module: nn.Module, normed: list[Normed], read: list[_Read]
) -> list[Gain] | str:
    """What to try, the most first; why nothing, if a gain cannot be merged, and nothing if it is neutral."""
    keys, name = {id(each) for each in normed}, normed[0].gains[0]
    mine = [each for each in read if keys & set(each.parts)]
    calls = {Reader.of(each.call): each.call for each in mine if each.call is not None}
    local = {id(p): n for n, p in module._parameters.items()}
    facts = None if len(normed[0].gains) > 1 else facts_of_norm(module, normed[0].x, local[id(parameters[name])])
    if facts is None:
        return "it computes something else than its gain, or 1 + its gain, times the normalised input, plus a shift"
    added, shift = facts[0], next((n for n, p in parameters.items() if local.get(id(p)) == facts[1] != ""), "")
    gain = Gain(normed[0].path, name, shift, added, tuple(calls))
    neutral = bool((parameters[name] == gain.neutral).all())
    if neutral and not (shift and bool(parameters[shift].any())):
        return []
    why = _why_not(run, parameters, gain, mine, normed)
    if why := why or _why_not_alone(run, parameters, gain, mine, normed[0].over):
        return why
    moves = shift != "" and all(
        call.bias and call.plain and call.pointwise and reader.fits(parameters[call.bias])
        for reader, call in calls.items()
    )
    divides = not neutral and (not shift or bool((parameters[name] != -added).all()))
    able = [replace(gain, moves_shift=True)] * moves + [gain] * divides
    what = "its gain has nothing to give" if neutral else "its shift cannot be divided by a gain of 0"
    return able or f"{what}, and a layer that reads it has no bias for its shift"


def _why_not(
    run: Recording, parameters: Mapping[str, nn.Parameter], gain: Gain, read: list[_Read], normed: list[Normed]
) -> str:
    """Why the layers in which its result is found are not what alone reads it."""
    if not all(each.is_of(normed) for each in read if each.call is not None):
        return "not only linear layers read its result, but a residual connection, a product or an activation, too"
    if not gain.readers or any(each.call is None for each in read):
        return "its result is an output of the model, or read by other means than a layer with a weight of its own"
    channels = parameters[gain.gain].numel()
    odd = [r.tensor for r in gain.readers if run.parameters[r.tensor].shape[r.in_dim] != channels]
    return f"{odd[0]} does not read its channels one by one" if odd else ""


def _why_not_alone(
    run: Recording, parameters: Mapping[str, nn.Parameter], gain: Gain, read: list[_Read], over: Collection[str]
) -> str:
    """Why what would change with the gain has other uses."""
    names = [gain.gain, gain.shift, *(name for r in gain.readers for name in (r.tensor, r.bias))]
    count = Counter(map(id, run.parameters.values()))
    for name in filter(None, names):
        if count[id(run.parameters[name])] > 1:
            return f"{name} is shared with another layer"
        if (why := why_not_dense(parameters[name])) is not None:
            return f"{name}: {why}"
    mine = {id(each.call) for each in read}
    others = [Reader.of(call) for call in run.calls if id(call) not in mine]
    for r in [r for r in gain.readers if any(r.overlaps(other) for other in others)]:
        return f"{r.tensor} reads something else, too"
    idle = not_run(run, parameters, parameters[gain.gain].numel(), over)
    return f"{listing(idle)} had no part in the run, and may read it" if idle else ""


def not_run(run: Recording, parameters: Mapping[str, nn.Parameter], channels: int, over: Collection[str]) -> list[str]:
    """Weights of so many channels that no function took, but of modules whose only call was over before."""
    return [n for n, p in parameters.items() if p.ndim > 1 and channels in p.shape and n not in run.used
            and (n.rpartition(".")[0] not in over or run.began[n.rpartition(".")[0]] > 1)]  # fmt: skip
