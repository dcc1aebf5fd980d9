"""The rules on a whole model: on its norms and their channels, its training, its signal, a matrix among siblings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isclose, isfinite, prod, sqrt
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gonio.errors import listing
from gonio.measuring.figures.attention import ONE_TOKEN, HeadLogits
from gonio.measuring.figures.heads import HeadMeasurement
from gonio.measuring.figures.signals import Signal, are_unseen
from gonio.measuring.figures.structure import ModelFacts, NormUse, Outside
from gonio.measuring.figures.tensor import LISTED, TensorMeasurement
from gonio.measuring.findings.rules import (
    ADVICE,
    HEAD_RULES,
    SIBLING_RULES,
    WEIGHT_RULES,
    Finding,
    FindingRule,
    findings_by,
    named,
    rule,
    worst_first,
)
from gonio.measuring.findings.siblings import AmongSiblings, places
from gonio.measuring.reading.entry import LOW_RANK, TensorEntry, numbers_of
from gonio.messages import are, counted, say


def findings_of(
    tensors: Sequence[TensorMeasurement],
    facts: ModelFacts | None = None,
    heads: Iterable[HeadLogits | HeadMeasurement] = (),
) -> tuple[Finding, ...]:
    """All findings: errors first, then warnings, in the order of the tensors; those on the whole model last."""
    judged = [t for t in tensors if t.frobenius is not None and t.kind != LOW_RANK]
    placed = places((t.name, t.shape, t.frobenius or 0.0) for t in judged)
    alone = {t.path for t in judged if t.name in placed and placed[t.name].ratio == 0}  # for them G709 says it
    of_each = findings_by(WEIGHT_RULES, ((tensor, tensor.path) for tensor in tensors))
    made = [finding for finding in of_each if finding.code != "G101" or finding.path not in alone]
    made += findings_by(SIBLING_RULES, ((placed[t.name], t.path) for t in judged if t.name in placed))
    made += findings_by(HEAD_RULES, ((each, path) for path, each in by_attention(heads).items()))
    return worst_first([*made, *(findings_by(ADVICE, [(facts, "")]) if facts is not None else ())])


SMALL = 8  # samples, below which [Wu and He 2018, table 2] sees batch normalisation fail


@rule("G709", SIBLING_RULES)
def _unlike_siblings(place: AmongSiblings) -> str | None:
    return place.found


def _called(path: str) -> str:
    return path or say("the model")


def _listed(paths: Iterable[str]) -> str:
    return listing(list(map(_called, paths)), limit=3)


def _those(norms: Iterable[NormUse]) -> str:
    return _listed(norm.path for norm in norms)


@rule("G401", ADVICE)
def _small_batches(facts: ModelFacts) -> str | None:
    batch = facts.training.batch
    norms = [norm for norm in facts.norms if norm.averages_over_batches and norm.samples(batch) < SMALL]
    if not norms:
        return None
    return say("batch norms compute statistics over {batch} samples: {norms}", batch=batch, norms=_those(norms))


@rule("G402", ADVICE)
def _last_batch(facts: ModelFacts) -> str | None:
    norms = [norm for norm in facts.norms if norm.averages_over_batches and norm.samples(facts.training.last) < 2]
    if not norms:
        return None
    raising = [norm for norm in norms if norm.positions == 1]
    unknown = [norm for norm in norms if norm.positions is None and isinstance(norm.module, nn.BatchNorm1d)]
    said = say("the last batch of an epoch has a single sample; batch norms: {norms}", norms=_those(norms))
    if raising:
        return say(
            "{said}; training will raise an error there: {raising} get one value per channel",
            said=said,
            raising=_those(raising),
        )
    if unknown:
        return say(
            "{said}; training will raise an error if the inputs of {unknown} are (N, C)",
            said=said,
            unknown=_those(unknown),
        )
    return said


@rule("G403", ADVICE)
def _single_values(facts: ModelFacts) -> str | None:
    norms = [norm for norm in facts.norms if norm.values == 1]
    if not norms:
        return None
    return say("each statistic is over one value, so that the input is lost: {norms}", norms=_those(norms))


@rule("G404", ADVICE)
def _several_uses(facts: ModelFacts) -> str | None:
    reused = [norm for norm in facts.norms if norm.calls > 1 and not norm.frozen and norm.has_statistics]
    uses = [say("{value} ({calls} times)", value=_called(norm.path), calls=norm.calls) for norm in reused]
    if not uses:
        return None
    return say("several calls per forward share running statistics: {uses}", uses=listing(uses, limit=3))


@rule("G405", ADVICE)
def _decayed(facts: ModelFacts) -> str | None:
    if not facts.decayed:
        return None
    weights, paths = counted(len(facts.decayed), "weight"), _listed(facts.decayed)
    return say("weight decay acts on {weights} whose scale has no effect: {list}", weights=weights, list=paths)


@rule("G418", ADVICE, harmless=lambda facts: facts.outside is not None and facts.outside.harmless)
def _outside(facts: ModelFacts) -> str | None:
    return None if facts.outside is None else outside_optimizer(facts.outside)


def outside_optimizer(outside: Outside) -> str | None:
    """The sentence on parameters that require a gradient and are in no optimizer."""
    if not outside.names:
        return None
    names, others = listing(list(outside.names), limit=3), counted(outside.others, "parameter")
    told = {"n": counted(len(outside.names), "parameter"), "names": names, "others": others}
    if not outside.shared:
        return say("none of the optimizer's {others} is in the model: {names}", **told)
    said = say("{n} of the model that require a gradient are not in the optimizer: {names}", **told)
    return said if outside.harmless else say("{said}; the optimizer has {others} of no layer", said=said, **told)


@rule("G406", ADVICE)
def _recomputed(facts: ModelFacts) -> str | None:
    norms = [norm for norm in facts.norms if norm.recomputed and norm.averages_over_batches and norm.has_statistics]
    return say("activation checkpointing runs them twice per batch: {norms}", norms=_those(norms)) if norms else None


@rule("G407", ADVICE)
def _constant(facts: ModelFacts) -> str | None:
    if not facts.constant:
        return None
    return say("the output is the same for every input: the weight of {paths} is 0", paths=_listed(facts.constant))


@rule("G408", ADVICE)
def _dead_units(facts: ModelFacts) -> str | None:
    found = [
        say("{path} ({dead} of {units})", path=_called(s.path), dead=s.dead_units, units=s.units)
        for s in dead_layers(facts.signals)
    ]
    return say("units whose output is 0 on the whole batch: {found}", found=listing(found, limit=3)) if found else None


_FACTOR = 30  # far above healthy networks (benchmarks/planted_damage.py)


def dead_layers(signals: Iterable[Signal]) -> list[Signal]:
    """The layers most of whose units are 0 on the whole batch."""
    found, before = [], 0.0
    for signal in signals:
        if signal.units is None or signal.dead_units is None:
            continue
        share = signal.dead_units / max(1, signal.units)
        many = signal.dead_units >= signal.units / 2 + 2 * sqrt(signal.units) or (share == 1 and signal.units >= 8)
        if many and share != before and signal.branch == "":  # an equal share is that of the layer before
            found.append(signal)
        before = share
    return found


def _out_of_scale_in(facts: ModelFacts, *, carried: bool) -> list[str]:
    """The layers whose outputs are far from those of healthy networks and, or not, of a usual size behind them."""
    norms = {norm.path for norm in facts.norms}
    found: list[str] = []
    for place, signal in enumerate(facts.signals):
        size = out_of_scale(signal, norm=signal.path in norms, weighted=signal.path in facts.weighted)
        if size is not None and carried == _is_carried(facts, place, norms):
            found.append(say("{path} (× {size:.3g})", path=_called(signal.path), size=size))
    return found


@rule("G409", ADVICE, harmless=lambda facts: not _out_of_scale_in(facts, carried=False))
def _out_of_scale(facts: ModelFacts) -> str | None:
    if found := _out_of_scale_in(facts, carried=False):
        return say("the output is far larger or smaller than the input: {found}", found=listing(found, limit=3))
    if found := _out_of_scale_in(facts, carried=True):
        return say(
            "the output is far larger or smaller than the input, and what the next layers get is not: {found}",
            found=listing(found, limit=3),
        )
    return None


def _is_carried(facts: ModelFacts, place: int, norms: set[str]) -> bool:
    """Whether the size of a layer's output is not that of the signal behind it.

    A norm of the output sets it anew, unless its running statistics are those of another size. And beside a small
    output, as of a residual branch or of an adapter that began at 0, there is a larger one to which it is added.
    """
    signal = facts.signals[place]
    if signal.path in norms or not signal.gain:
        return False
    fed = signal.rms / signal.gain
    for after in facts.signals[place + 1 :]:
        if not after.gain or (after.path not in norms and after.path not in facts.weighted):
            continue
        next_fed = after.rms / after.gain
        added = signal.gain < 1 and next_fed > fed / _FACTOR
        of_it = after.path in norms and isclose(next_fed, signal.rms, rel_tol=1e-6)
        return added or (of_it and not stale(after) and 1 / _FACTOR < after.rms < _FACTOR)
    return False


def out_of_scale(signal: Signal, *, norm: bool, weighted: bool) -> float | None:
    """The output of a norm, or that of a weighted layer over its input, if it is far from those of healthy networks."""
    size = signal.rms if norm else signal.gain if weighted else None  # a norm's input counts as of unit size
    far = size is not None and (size > _FACTOR or (not norm and 0 < size < 1 / _FACTOR))
    return size if far else None


_COMPOUNDED = 1e6  # in several layers, each of which may be within _FACTOR


@rule("G412", ADVICE)
def _vanishing(facts: ModelFacts) -> str | None:
    found, most, norms = None, 1.0, {norm.path for norm in facts.norms}
    first: tuple[str, float] | None = None  # weighted layer since the last norm, and the size of its input
    for signal in facts.signals:
        if signal.path in norms:
            first = None
        if signal.path in norms or signal.path not in facts.weighted or not signal.gain or not isfinite(signal.rms):
            continue
        size = signal.rms / signal.gain
        if size == 0:  # dead, or the end of a branch that starts at 0
            continue
        first = first or (signal.path, size)
        factor = size / first[1]
        if max(factor, 1 / factor) > max(_COMPOUNDED, most):
            most = max(factor, 1 / factor)
            found = say(
                "the input of {path} has {factor:.2g} times the size of that of {first}, and no norm lies between them",
                path=signal.path,
                factor=factor,
                first=first[0],
            )
    return found


def stale(signal: Signal) -> bool:
    """Whether a norm's running statistics are not those of the batch."""
    values = prod(signal.shape) / max(1, signal.units or 1)
    least = max(0.5, 4 * sqrt(1.5 / max(1.0, values)))
    return signal.train_eval_gap is not None and signal.train_eval_gap > least


@rule("G410", ADVICE)
def _stale(facts: ModelFacts) -> str | None:
    gaps = [(signal, signal.train_eval_gap) for signal in facts.signals if stale(signal)]
    found = [
        say("{value} ({gap:.2g} standard deviations)", value=_called(signal.path), gap=gap) for signal, gap in gaps
    ]
    if not found:
        return None
    return say("the output differs from that in training mode on this batch: {found}", found=listing(found, limit=3))


@rule("G411", ADVICE)
def _forgotten(facts: ModelFacts) -> str | None:
    fresh = {id(module) for module in without_statistics(norm.module for norm in facts.norms)}
    norms = [norm for norm in facts.norms if id(norm.module) in fresh]
    return say("running statistics are at their initial values: {norms}", norms=_those(norms)) if norms else None


def without_statistics(norms: Iterable[nn.Module]) -> list[nn.Module]:
    """The norms whose running statistics are those of the start, although they, or other norms of the model, have run.

    That a norm was trained is seen from its gains and shifts, if both differ between channels: initialisations draw
    gains (DCGAN: N(1, 0.02)), but leave shifts alike. Where both are drawn (RepVGG: N(0.1, 0.1) and N(0, 0.1)), they
    are those of one distribution in all norms; training moves the norms of each depth in its own way.
    """
    tensors = [
        (norm, dict(norm.named_buffers(recurse=False)) | dict(norm.named_parameters(recurse=False))) for norm in norms
    ]
    known = [
        (norm, state)
        for norm, state in tensors
        if "running_mean" in state and not any(map(_has_no_values, state.values()))
    ]
    fresh = [(norm, state) for norm, state in known if are_unseen(state["running_mean"], state["running_var"])]
    if len(fresh) < len(known):
        return [norm for norm, _ in fresh]
    unequal = [(norm, state) for norm, state in fresh if _are_unequal(state.get("weight"), state.get("bias"))]
    if all(_are_drawn_alike([state[name] for _, state in unequal]) for name in ("weight", "bias")):
        return []
    return [norm for norm, _ in unequal]


def _has_no_values(tensor: Tensor) -> bool:
    return is_lazy(tensor) or tensor.is_meta or type(tensor).__module__.startswith("torch._subclasses")  # fake


def _are_unequal(*vectors: Tensor | None) -> bool:
    return all(vector is not None and bool((vector != vector.flatten()[0]).any()) for vector in vectors)


def _are_drawn_alike(vectors: Sequence[Tensor]) -> bool:
    """Whether three or more vectors may be draws of one normal distribution; of two, training can leave that look.

    Their means agree (between their squares and those within) and their variances do (Bartlett): each statistic is that
    of a chi-squared distribution, with a chance of 0.001 to be above its limit.
    """
    values = [vector.detach().to("cpu", torch.float64).flatten() for vector in vectors]
    values = [vector for vector in values if vector.numel() > 1]
    if len(values) < 3:
        return False
    free = torch.tensor([vector.numel() - 1.0 for vector in values], dtype=torch.float64, device="cpu")
    means, variances = (torch.stack([each(vector) for vector in values]) for each in (torch.mean, torch.var))
    within, centre = (free * variances).sum() / free.sum(), ((free + 1) * means).sum() / (free + 1).sum()
    between = ((free + 1) * (means - centre).square()).sum() / within
    correction = 1 + ((1 / free).sum() - 1 / free.sum()) / (3 * (len(values) - 1))
    spread = (free.sum() * within.log() - (free * variances.log()).sum()) / correction
    half = torch.full((2,), (len(values) - 1) / 2, dtype=torch.float64, device="cpu")
    chances = torch.special.gammaincc(half, torch.stack([between, spread]).clamp(min=0) / 2)
    return bool((chances > 0.001).all())  # not of NaN


@rule("G415", ADVICE)
def _as_built(facts: ModelFacts) -> str | None:
    if not facts.as_built:
        return None
    return say("weights are those of the initialisation: {paths}", paths=_listed(facts.as_built))


@rule("G416", ADVICE)
def _cut_off(facts: ModelFacts) -> str | None:
    if all(signal.gradient_rms is None for signal in facts.signals):  # gradients were not measured
        return None
    cut = [s.path for s in facts.signals if s.gradient_rms is None and s.path in facts.learning]
    if not cut:
        return None
    return say(
        "no gradient of the model's output reaches {layers} that {are} to be trained: {paths}",
        layers=counted(len(cut), "layer"),
        are=are(len(cut)),
        paths=_listed(cut),
    )


@rule("G417", ADVICE, harmless=lambda facts: not facts.signals[-1].nonfinite)
def _not_finite(facts: ModelFacts) -> str | None:
    broken = [_called(signal.path) for signal in facts.signals if signal.nonfinite]
    if not broken:
        return None
    return say(
        "{count} of {of} layers gave NaN or infinity on this batch; the first: {path}",
        count=len(broken),
        of=len(facts.signals),
        path=broken[0],
    )


@rule("G101", ADVICE)
def _zero_gains(facts: ModelFacts) -> str | None:
    norms = [norm for norm in facts.norms if _is_zero(dict(norm.module._parameters.items()).get("weight"))]
    return say("every gain is 0: {norms}", norms=_those(norms)) if norms else None


def _is_zero(gain: Tensor | None) -> bool:
    return gain is not None and not _has_no_values(gain) and gain.numel() > 0 and not bool(gain.any())


# --- attention -------------------------------------------------------------------------------------------------------

LARGE = 100.0  # a logit; the usual limit of QK-Clip
_Head = TypeVar("_Head", bound=HeadLogits | HeadMeasurement)
COLLAPSED = 0.9  # of the queries of a head that attends to one token


def by_attention(heads: Iterable[_Head]) -> dict[str, list[_Head]]:
    """The heads of each attention, by its path."""
    found: dict[str, list[_Head]] = {}
    for head in heads:
        found.setdefault(head.path, []).append(head)
    return found


@rule("G413", HEAD_RULES)
def _large_logits(heads: Sequence[HeadLogits | HeadMeasurement]) -> str | None:
    large = [(head.largest_logit, head.head) for head in heads if (head.largest_logit or 0.0) > LARGE]
    if not large:
        return None
    most, head = max(large)
    counts = {"count": len(large), "heads": counted(len(heads), "head")}
    return say("the largest logit is {most:.3g}, in head {head}; {count} of {heads} exceed {LARGE:g}", most=most,
               head=head, LARGE=LARGE, **counts)  # fmt: skip


@rule("G414", HEAD_RULES)
def _one_token(heads: Sequence[HeadLogits | HeadMeasurement]) -> str | None:
    single = one_token_heads(heads)
    if 2 * single <= len(heads):
        return None
    return say(
        "{count} of {heads} attend to one token: at {share:.0%} or more of the queries it has a probability of "
        "{least} or more",
        count=single,
        heads=counted(len(heads), "head"),
        share=COLLAPSED,
        least=ONE_TOKEN,
    )


def one_token_heads(heads: Iterable[HeadLogits | HeadMeasurement]) -> int:
    """How many heads attend to one token."""
    return sum(head.one_token is not None and head.one_token >= COLLAPSED for head in heads)


# --- gains of norms that are 0 beside others, so that an output is constant -------------------------------------------

NEGLIGIBLE = 1e-6  # of the mean gain: the channel adds less than the rounding of float32 to its shift

Read = Callable[[], Tensor | None]
Vectors = Mapping[str, tuple[tuple[int, ...] | None, Read]]


@dataclass(frozen=True)
class ConstantChannels:
    """The channels of one norm whose output is their shift.

    Attributes:
        channels: the first thousand of their indices. `count`, `total`: of them, and of all channels.
        zero: whether gains and shifts of all of them are exactly 0.
    """

    path: str
    channels: tuple[int, ...]
    count: int
    total: int
    zero: bool


CHANNEL_RULES: dict[str, FindingRule[ConstantChannels]] = {}


@rule("G106", CHANNEL_RULES, harmless=lambda norm: not norm.zero)
def _constant_channels(norm: ConstantChannels) -> str | None:
    told = {
        "count": norm.count,
        "total": norm.total,
        "channels": named([str(channel) for channel in norm.channels], norm.count),
    }
    if norm.zero:
        return say(
            "gain and shift of {count} of {total} channels are 0, unlike those of the others: {channels}", **told
        )
    return say(
        "the gain of {count} of {total} channels is 0 or below {NEGLIGIBLE:g} of the mean one, so that their output is "
        "their shift: {channels}",
        NEGLIGIBLE=NEGLIGIBLE,
        **told,
    )


def of_entries(entries: Iterable[TensorEntry]) -> list[Finding]:
    """The findings on the norms of a model or checkpoint."""
    own = (entry for entry in entries if entry.role not in ("unknown", "part"))
    return of_norms({entry.name: (entry.shape, entry.read) for entry in own})


def of_norms(tensors: Vectors) -> list[Finding]:
    """The findings on the norms among some tensors: on each vector `weight` beside a vector `bias` of its length.

    Gains without a shift are not judged: RMS norms of some families store a gain minus 1.

    Args:
        tensors: the shape of each by its name, and a function that reads it.
    """
    return findings_by(CHANNEL_RULES, ((norm, norm.path) for norm in _constant_in(tensors)))


def _constant_in(tensors: Vectors) -> Iterator[ConstantChannels]:
    for name, (shape, read) in tensors.items():
        path, _, last = name.rpartition(".")
        held = tensors.get(f"{path}.bias" if path else "bias")
        if last != "weight" or shape is None or len(shape) != 1 or shape[0] < 2 or held is None or held[0] != shape:
            continue
        gains, shifts = _numbers(read), _numbers(held[1])
        if gains is None or shifts is None:
            continue
        small = gains.abs() <= NEGLIGIBLE * gains.abs().mean()
        if bool(small.all()) or not bool(torch.isfinite(gains.sum())):  # all are 0: training may start there
            continue
        zero = (gains == 0) & (shifts == 0)
        for found, exactly in ((zero, True), (small & ~zero, False)):
            if count := int(found.sum()):
                channels = tuple(found.nonzero().flatten()[:LISTED].tolist())
                yield ConstantChannels(path, channels, count, len(gains), exactly)


def _numbers(read: Read) -> Tensor | None:
    """The values in float64; None for those that are not read, which the tensor's own row says."""
    try:
        tensor = read()
        found = None if tensor is None else numbers_of(tensor).tensor
        return None if found is None else found.double().cpu()
    except Exception:  # reading a weight runs the model's own code, which may raise anything
        return None
