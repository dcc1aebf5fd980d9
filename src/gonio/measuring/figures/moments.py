r"""What the state of an optimizer says: the size of its last update, dead and impossible moments, outliers.

Note [What gradients can leave behind]
    Averages :math:`m = (1-\beta_1) \sum_k \beta_1^k g_k` and :math:`v = (1-\beta_2) \sum_k \beta_2^k g_k^2` of the same
    t gradients satisfy, entry by entry and by the inequality of Cauchy and Schwarz,

    .. math:: m^2 \le B\,v, \quad B = \frac{(1-\beta_1)^2}{1-\beta_2} \sum_{k<t} (\beta_1^2/\beta_2)^k,

    for any gradients, learning rates, clipping and schedules; B is 53 for betas of 0.9 and 0.999. Entries that exceed
    twice the root of that come from no training: one of the two was changed, lost, or belongs to another parameter.
    The factor of two leaves room for betas that a schedule changed. Moments in 16 bits are rounded at each step, so
    they are not judged, and neither are values near the smallest ones of float32, whose squares are 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from itertools import repeat
from math import isfinite, prod, sqrt
from typing import Any

import torch
from torch import Tensor

from gonio.editing.optimizer_states import state_powers
from gonio.execution import one_thread
from gonio.geometry.blocks import count_nonfinite, row_norms
from gonio.geometry.norms import widen
from gonio.measuring.reading.optimizers import ParameterState
from gonio.messages import say

CHUNK = 1 << 17  # entries; the pieces of two moments stay in the cache
_SMALL = 1e-30  # ε below which squares of updates may leave float32
ROOM = 2.0  # times the largest |m|/√v
LEAST = 1e-35  # second moments below it may have lost squares to underflow
_SWITCHES = ("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay", "amsgrad")
_OF_SCHEDULES = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "step", "lr_scale", "betas", "lr")
_KNOWN = {*_SWITCHES, *_OF_SCHEDULES, "eps", "weight_decay", "bias_correction", "momentum", "dampening", "nesterov"}
# options of NAdam, of RAdam and of gonio's Muon, whose moments are Adam's although their updates differ
_OF_SAME_MOMENTS = {"momentum_decay", "decoupled_weight_decay", "matrices", "blocks", "others_lr", "ns_coefficients"}
_OF_SAME_MOMENTS |= {"ns_steps", "adjust_lr_fn"}


@dataclass(frozen=True, kw_only=True)
class StateMeasurement:
    r"""The state that an optimizer keeps of one parameter, and how far its last step moved the weight.

    Attributes:
        name: of the weight, "" where it is not known. `place`: of the state in the checkpoint.
        path: of the layer, or the place.
        step: number of steps. `learning_rate`: that of the parameter's group. None where they are not stored.
        gradient_rms: root mean square of the second moment without its bias, √(mean v̂): the size of gradients.
        update_rms: root mean square of an update with these moments, in units of the learning rate: m̂/(√v̂ + ε) of Adam
            and AdamW, the momentum of SGD; weight decay is not a part of it.
        relative_update: η‖update‖/‖w‖, as :class:`gonio.Tracker` measures it at a step (there with weight decay); η is
            the stored rate, which is that of the next step where a schedule has set it. Where
            the weight is not known, beside the largest of its shape: it is at least so large.
        effective_rate: η/‖w‖², which counts for a weight before a normalisation.
        nonfinite, negative, beyond: entries that are NaN or infinite; second moments below 0; entries whose moments no
            gradients can have left (Note [What gradients can leave behind] in the source).
        dead: whether the second moment is 0 everywhere, so that no gradient has reached the parameter. `dead_rows`: the
            rows of which it is 0.
        largest_share: that of the largest entry in the sum of the second moments.
        siblings, ratio, distance: `gradient_rms` beside that of the same weight in other layers, as in `check`.
        reason: why there is no `update_rms`, or which weight it is is not known.
    """

    name: str
    place: str
    path: str
    shape: tuple[int, ...]
    step: float | None = None
    learning_rate: float | None = None
    gradient_rms: float | None = None
    update_rms: float | None = None
    relative_update: float | None = None
    effective_rate: float | None = None
    nonfinite: int = 0
    negative: int = 0
    beyond: int = 0
    dead: bool = False
    dead_rows: int = 0
    largest_share: float | None = None
    siblings: int = 0
    ratio: float | None = None
    distance: float | None = None
    reason: str = ""

    @property
    def entries(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Moments:
    """Which tensors of a state are moments, and how the update follows from them.

    Attributes:
        first, second: names of the averages of gradients and of their squares; "" where there is none. `under`: of the
            one below the root, which is the largest so far with AMSGrad.
        decays: of the two. `correct`: whether their bias is removed. `eps`: beside the root.
        other: an option that no known optimizer has. Then the two may be of different numbers, as in SOAP, whose
            squares are those of the gradient in a basis that turns.
        reason: why the update is not known.
    """

    first: str = ""
    second: str = ""
    under: str = ""
    decays: tuple[float, float] | None = None
    correct: bool = True
    eps: float = 0.0
    other: str = ""
    reason: str = ""

    @classmethod
    def of(cls, names: Mapping[str, Any], options: Mapping[str, Any]) -> Moments:
        """The moments among the tensors of a state with these names."""
        powers = state_powers(names)
        first = next((name for name, power in powers.items() if power == 1), "")
        squares = [name for name, power in powers.items() if power == 2]
        second = next((name for name in squares if not name.startswith("max_")), "")
        under = next((name for name in squares if name.startswith("max_")), second)
        betas = options.get("betas")
        decays = betas if isinstance(betas, tuple) and len(betas) == 2 and all(0 <= b < 1 for b in betas) else None
        eps = options.get("eps", 0.0)
        eps = eps if isinstance(eps, float) else 0.0
        strange = _strange(options)
        other = next((name for name in strange if name not in _OF_SAME_MOMENTS), "")
        correct = bool(options.get("bias_correction", True))
        known = cls(first, second, under, decays, correct=correct, eps=eps, other=other)
        return replace(known, reason=known._why(options))

    def _why(self, options: Mapping[str, Any]) -> str:
        if not options:
            return say("the options of its group, such as the learning rate, are not stored")
        if strange := _strange(options):
            return say("the update of an optimizer with the option {name} is not known", name=strange[0])
        if self.first and self.second:
            told = self.decays is not None and isinstance(options.get("eps"), float)
            return "" if told and {"amsgrad", "bias_correction"} & options.keys() else _UNKNOWN
        if self.first and not self.second and "dampening" in options:
            nesterov = bool(options.get("nesterov"))
            return say("with Nesterov's momentum the update needs the gradient") if nesterov else ""
        return _UNKNOWN

    def bound(self, step: float | None) -> float | None:
        """B of Note [What gradients can leave behind]; None where it is not known."""
        if self.other or not (self.first and self.second and self.decays) or step is None or not 1 <= step < 1e12:
            return None
        b1, b2 = self.decays
        ratio = b1 * b1 / b2 if b2 else 0.0
        if not b2 or (ratio >= 1 and step > 1e6):
            return None
        total = step if ratio == 1 else (1 - ratio**step) / (1 - ratio)
        return (1 - b1) ** 2 / (1 - b2) * total

    def bias(self, step: float | None) -> tuple[float, float]:
        """The betas whose powers are removed; 0 where nothing is."""
        known = self.correct and self.second and self.decays is not None and step is not None
        return self.decays if known and self.decays is not None else (0.0, 0.0)


_UNKNOWN = say("the update of this optimizer is not known")


def _strange(options: Mapping[str, Any]) -> list[str]:
    """The options with which the update is not known."""
    return [name for name, value in options.items() if name not in _KNOWN and value not in (0, "")]


@dataclass(frozen=True)
class StateSums:
    """Sums over the entries of a state, which are those of all its shards added.

    Attributes:
        update: of squares of the update. `second`: of v̂. `zeros`: entries of v that are 0.
        nonfinite, negative, beyond: as in :class:`StateMeasurement`.
    """

    update: float = 0.0
    second: float = 0.0
    zeros: float = 0.0
    nonfinite: float = 0.0
    negative: float = 0.0
    beyond: float = 0.0


@torch.no_grad()
def state_sums(moments: Moments, state: Mapping[str, Tensor], step: float | None) -> Tensor:
    """The sums of a piece of a state, in the order of the fields of :class:`StateSums`, as a float64 tensor."""
    names = [name for name in dict.fromkeys((moments.first, moments.second, moments.under)) if name]
    flat = [state[name].detach().reshape(-1) for name in names]
    total = torch.zeros(len(fields(StateSums)), dtype=torch.float64, device=flat[0].device)
    narrow = any(value.dtype not in (torch.float32, torch.float64) for value in flat)
    limit = None if narrow else moments.bound(step)
    for parts in zip(*(value.split(CHUNK if value.is_cpu else 32 * CHUNK) for value in flat), strict=True):
        if not len(parts[0]):  # of a process that has no rows
            continue
        pieces = [widen(part) for part in parts]
        if not pieces[0].is_cpu or not isfinite(sum(float(piece.sum()) for piece in pieces)):
            bad = ~torch.stack(pieces).isfinite().all(0)
            total[3] += bad.sum()
            pieces = [piece.masked_fill(bad, 0.0) for piece in pieces]
        held = dict(zip(names, pieces, strict=True))
        m, v = held.get(moments.first), held.get(moments.second)
        if v is not None:
            total[2] += v.numel() - v.count_nonzero()
            if not v.is_cpu or float(v.min()) < 0:
                total[4] += (v < 0).sum()
                v = v.clamp(min=0)
            total[1] += v.sum(dtype=torch.float64)
            if m is not None and limit is not None:  # squares that underflow are not beyond
                total[5] += torch.gt(m * m, (v + LEAST).mul_(ROOM**2 * limit)).sum()
        if m is not None and not moments.reason:
            update = m
            if v is not None:
                update = m / denominator(
                    held[moments.under].clamp(min=0), moments.bias(step)[1], step or 1.0, moments.eps
                )
            update = update.nan_to_num(0.0, 0.0, 0.0) if v is not None and not moments.eps else update
            total[0] += update.double().square().sum() if moments.eps < _SMALL else torch.dot(update, update)
    first, second = moments.bias(step)
    total[0] /= (1 - first ** (step or 1.0)) ** 2
    total[1] /= 1 - second ** (step or 1.0)
    return total


def denominator(second: Tensor, decay: float, step: float, eps: float) -> Tensor:
    """By which Adam divides: √(v/(1 − β₂^t)) + ε."""
    return (second / (1 - decay**step)).sqrt() + eps


def measure_states(states: Sequence[ParameterState], jobs: int = 1) -> list[StateMeasurement]:
    """The figures of each, by `jobs` threads; one that cannot be read has the reason."""
    norms: dict[int, float] = {}
    if jobs == 1 or len(states) < 2:
        return [_measured(state, norms) for state in states]
    with one_thread(), ThreadPoolExecutor(jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return list(pool.map(_measured, states, repeat(norms)))


def _measured(state: ParameterState, norms: dict[int, float]) -> StateMeasurement:
    row: dict[str, Any] = {name: getattr(state, name) for name in ("name", "place", "path", "shape", "step")}
    rate = state.options.get("lr")
    row["learning_rate"] = rate if isinstance(rate, float) and isfinite(rate) else None
    try:
        return StateMeasurement(**row, **_figures(state, row["learning_rate"], norms))
    except Exception as error:  # of a damaged file, or of a tensor of another layout
        return StateMeasurement(**row, reason=say("cannot be read: {error}", error=str(error)[:200]))


def _figures(state: ParameterState, rate: float | None, norms: dict[int, float]) -> dict[str, Any]:
    """The figures; beside the largest norm of the weights that it may be, so that an update is at least so large."""
    held = {name: t for name, t in state.tensors.items() if t.shape == state.shape and t.floating}
    moments = Moments.of(held, state.options)
    names = {moments.first, moments.second, moments.under} - {""}
    others = sum(count_nonfinite(t.load())[0] for name, t in state.tensors.items() if name not in names and t.floating)
    if not names:
        return {"nonfinite": others, "reason": say("its tensors are not known as moments of gradients")}
    tensors = {name: held[name].load() for name in sorted(names)}
    sums = StateSums(*state_sums(moments, tensors, state.step).tolist())
    entries = prod(state.shape)
    made = state_row(moments, sums, entries) | {"reason": moments.reason or state.unknown}
    made["nonfinite"] += others
    if moments.second:
        made |= _of_second(tensors[moments.second], sums, moments, state.step)
    weights = [weight for weight in state.weights if weight.floating]
    if weights and rate is not None:
        for weight in weights:
            if id(weight) not in norms:
                norms[id(weight)] = float(row_norms(weight.load().reshape(1, -1)))
        norm = max(norms[id(weight)] for weight in weights)
        if norm and isfinite(norm):
            made |= {"effective_rate": rate / norm / norm} if state.name else {}
            made |= {} if moments.reason else {"relative_update": rate * sqrt(sums.update) / norm}
    return made


def state_row(moments: Moments, sums: StateSums, entries: int) -> dict[str, Any]:
    """The fields of :class:`StateMeasurement` that follow from sums alone."""
    made: dict[str, Any] = {name: int(getattr(sums, name)) for name in ("nonfinite", "negative", "beyond")}
    if moments.second:
        made |= {"gradient_rms": sqrt(sums.second / entries), "dead": sums.zeros == entries}
    if not moments.reason:
        made["update_rms"] = sqrt(sums.update / entries)
    return made


def _of_second(second: Tensor, sums: StateSums, moments: Moments, step: float | None) -> dict[str, Any]:
    """Rows that no gradient has reached, and the share of the largest entry."""
    made: dict[str, Any] = {}
    if second.ndim > 1 and 0 < sums.zeros < second.numel():
        made["dead_rows"] = int((second.reshape(len(second), -1) == 0).all(1).sum())
    if sums.second > 0:
        largest = float((second.nan_to_num(0.0, 0.0, 0.0) if sums.nonfinite else second).max())
        made["largest_share"] = largest / (1 - moments.bias(step)[1] ** (step or 1.0)) / sums.second
    return made
