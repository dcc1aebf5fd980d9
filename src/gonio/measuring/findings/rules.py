"""Findings, and the rules that report them: each with its reason, its source and its false-alarm rate.

A finding does not mean that a network is broken. Of a tensor it means that a figure is very unlikely for random
weights, and why that can matter; the false-alarm rates were measured on randomly initialised and on trained models by
`benchmarks/false_alarms.py`. Rules on a whole model read facts, judge no figure and have no false alarms.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import prod, sqrt
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gonio.errors import UnknownNameError, listing
from gonio.geometry.chance import expected_pairs_above
from gonio.geometry.duplicates import NEAR
from gonio.measuring.figures.structure import NormUse, Setting
from gonio.measuring.figures.tensor import NEGATIVE, TensorMeasurement
from gonio.measuring.reading.entry import PADDING

LEVELS = ("info", "warn", "error")

Subject = TypeVar("Subject")


@dataclass(frozen=True)
class Finding:
    """One unusual property of a tensor, or of the whole model (path "").

    Attributes:
        code: of the rule; :func:`gonio.measuring.explain` prints the details.
        level: `error` (the model cannot work), `warn` (it probably does not work as intended), `info`.
        found: what was found. `chance`: the value for random weights. `do`: the recommended action.
    """

    code: str
    level: str
    path: str
    found: str
    chance: str
    do: str


@dataclass(frozen=True)
class Rule(Generic[Subject]):
    """One rule.

    Attributes:
        check: what it found in its subject (a tensor, or the setting of a training), in words; None for nothing.
        means: the meaning of the figure, and when it is harmless.
        do: the recommended action.
        source: a reference.
        chance: the value for random weights.
        exact: why the rule has no false alarms, for one that reads facts instead of judging a figure; the rate of
            the others is measured.
    """

    code: str
    level: str
    title: str
    check: Callable[[Subject], str | None]
    means: str
    do: str
    source: str
    chance: str = ""
    exact: str = ""

    def finding(self, subject: Subject, path: str) -> Finding | None:
        """The finding on this subject, if there is one."""
        found = self.check(subject)
        chance = self.chance or self.exact
        return None if found is None else Finding(self.code, self.level, path, found, chance, self.do)


def rule(
    code: str, level: str, title: str, *, means: str, do: str, source: str, chance: str = "", exact: str = ""
) -> Callable[[Callable[[Subject], str | None]], Rule[Subject]]:
    """A decorator that makes a :class:`Rule` of its check."""
    return lambda check: Rule(code, level, title, check, means, do, source, chance, exact)


@dataclass(frozen=True)
class Suppressed:
    """Findings that were suppressed.

    Attributes:
        by: the file or option that suppressed them.
        findings: worst first.
        unmatched: parts of the suppression that matched no finding.
    """

    by: str
    findings: tuple[Finding, ...]
    unmatched: tuple[str, ...] = ()

    @property
    def sentences(self) -> tuple[str, ...]:
        """The number of suppressed findings, and the unmatched parts.

        Example:
            >>> from gonio.measuring import Suppressed
            >>> Suppressed("gonio.toml", (), ("G405", "G101 for head.*")).sentences
            ('Not found, though gonio.toml suppresses it: G405, G101 for head.*.',)
        """
        count = len(self.findings)
        said = [f"{count} finding{'s' if count > 1 else ''} suppressed by {self.by}"] if count else []
        if self.unmatched:
            said.append(f"Not found, though {self.by} suppresses it: {', '.join(self.unmatched)}.")
        return tuple(said)


def findings_of(tensors: Sequence[TensorMeasurement], setting: Setting | None = None) -> tuple[Finding, ...]:
    """All findings: errors first, then warnings, in the order of the tensors; those on the whole model last."""
    made = [rule.finding(tensor, tensor.path) for tensor in tensors for rule in WEIGHT_RULES.values()]
    made += [] if setting is None else [rule.finding(setting, "") for rule in ADVICE.values()]
    found = [finding for finding in made if finding is not None]
    return tuple(sorted(found, key=lambda finding: -LEVELS.index(finding.level)))


def explain(code: str) -> str:
    """A rule in words: what it finds, its meaning, the value for random weights, what to do, its false-alarm rate.

    Raises:
        UnknownNameError: if there is no such rule.

    Example:
        >>> print(gonio.measuring.explain("G001").splitlines()[0])
        G001 (error): values that are NaN or infinite
    """
    rule = RULES.get(code.strip().upper())
    if rule is None:
        raise UnknownNameError("rule", code, RULES)
    chance = [f"Random weights: {rule.chance}"] if rule.chance else []
    alarms = f"none by construction: {rule.exact}" if rule.exact else _rate(rule.code)
    rest = [f"What to do: {rule.do}", f"False alarms: {alarms}", f"Source: {rule.source}"]
    return "\n".join([f"{rule.code} ({rule.level}): {rule.title}", "", rule.means, *chance, *rest])


@cache
def measured_rates() -> dict[str, Any]:
    """The results of `false_alarms.py`, `change_alarms.py` and `planted_damage.py` in `benchmarks/`."""
    text = (resources.files("gonio.measuring.findings") / "false_alarms.json").read_text(encoding="utf-8")
    rates: dict[str, Any] = json.loads(text)
    return rates


def _rate(code: str) -> str:
    """On random and on trained models, or on cases that are in order, each with the upper end of its interval."""
    seen = measured_rates()["cases"].get(code)
    if seen is not None:
        rate = f"the true rate is below {100 * seen['upper']:.2g} % (95 %)."
        return f"{seen['alarms']} of {seen['cases']} {seen['of']}; {rate}"
    if code not in measured_rates()["random"]["rules"]:
        return "not measured; the threshold is a choice."
    said = []
    for name, models in (("random", "randomly initialised models"), ("trained", "trained networks")):
        rates = measured_rates()[name]
        seen = rates["rules"][code]
        said.append(
            f"{seen['tensors']} of {rates['tensors']} tensors in {seen['models']} of {rates['models']} {models}; "
            f"the true rate per model is below {100 * seen['models_upper']:.2g} % (95 %)."
        )
    return " ".join(said)


# --- tensors ---------------------------------------------------------------------------------------------------------


@rule(
    "G001",
    "error",
    "values that are NaN or infinite",
    means="One such value reaches every output of the layer, and training cannot recover from it. In a running "
    "statistic it affects evaluation only, permanently.",
    chance="none.",
    do="Restore the last checkpoint without them; look for an overflow in half precision or a learning rate "
    "that is too high. A running statistic can be recalibrated.",
    source="IEEE 754; pytorch issue 115500 (running statistics under mixed precision).",
)
def _nonfinite(t: TensorMeasurement) -> str | None:
    if not t.nonfinite:
        return None
    place = ", ".join(map(str, t.first_nonfinite or ()))
    return f"{t.nonfinite} of {t.entries} values are NaN or infinite, the first at [{place}]"


@rule(
    "G101",
    "info",
    "a weight that is entirely 0",
    means="The output of the layer is its bias, for every input. This is normal where training starts from the "
    "identity: the last layer of a residual branch, the B matrix of a low-rank adapter.",
    chance="none, unless initialised to 0 on purpose.",
    do="Nothing at the start of training; later check whether the layer ever received a gradient.",
    source="H. Zhang, Y. Dauphin, T. Ma, 'Fixup initialization', 2019, arXiv 1901.09321, for the use on purpose.",
)
def _zero(t: TensorMeasurement) -> str | None:
    return "every value is 0" if t.total_filters and t.zero_filters == t.total_filters else None


@rule(
    "G102",
    "warn",
    "filters that are exactly 0 beside others that are not",
    means="A dead filter has a constant output, costs as much as any other, and often never recovers. This is normal "
    "after structured pruning and for the padding row of an embedding.",
    chance="none.",
    do="Remove them (pruning), or lower the weight decay or learning rate under which they died.",
    source="D. Mehta, K. Kim, C. Theobalt, 'On implicit filter level sparsity in convolutional neural "
    "networks', 2019, arXiv 1811.12495.",
)
def _dead(t: TensorMeasurement) -> str | None:
    if not t.zero_filters or t.zero_filters == t.total_filters or (t.zero_filters == 1 and PADDING in t.notes):
        return None
    return f"{t.zero_filters} of {t.total_filters} filters are 0"


@rule(
    "G103",
    "warn",
    "a filter whose norm is below a thousandth of the median",
    means="The filter is dying: weight decay shrinks it and no gradient opposes this. In a scale-invariant layer "
    "(followed by a normalisation) the function does not show it, but its steps become erratic.",
    chance="a norm concentrates about its mean as 1/√(2d); for d ≥ 4 this does not happen.",
    do="As for dead filters; before a normalisation consider weight decay 0 for it.",
    source="T. van Laarhoven, 'L2 regularization versus batch and weight normalization', 2017, arXiv 1706.05350.",
)
def _weak(t: TensorMeasurement) -> str | None:
    if t.norm_quantiles is None or not t.norm_nonzero_min or (t.dim or 0) < 4:
        return None
    least, middle = t.norm_nonzero_min, t.norm_quantiles[2]
    return f"the weakest filter's norm is {least:.2g}, the median {middle:.2g}" if least < 1e-3 * middle else None


@rule(
    "G104",
    "warn",
    "a filter whose norm is above ten times the median",
    means="One output dominates the input of the next layer. It also takes most of the range of a quantisation "
    "per tensor.",
    chance="a norm concentrates about its mean as 1/√(2d); this does not happen.",
    do="Balance neighbouring layers (gonio.balance_), or regularise the norm.",
    source="M. Nagel et al., 'Data-free quantization through weight equalization and bias correction', 2019, "
    "arXiv 1906.04721.",
)
def _dominant(t: TensorMeasurement) -> str | None:
    if t.norm_quantiles is None or t.total_filters < 8:
        return None
    middle, most = t.norm_quantiles[2], t.norm_quantiles[-1]
    return f"the strongest filter's norm is {most:.3g}, the median {middle:.3g}" if 0 < 10 * middle < most else None


@rule(
    "G105",
    "error",
    "a running variance that is negative",
    means="In evaluation a normalisation divides by the square root of the running variance plus ε: its output is NaN.",
    exact="a variance is a mean of squares, and never negative.",
    do="Recalibrate the statistics (gonio.calibrate_), and find what changed them: averaging checkpoints, a negative "
    "momentum, or arithmetic on a state dict.",
    source="S. Ioffe, C. Szegedy, 'Batch normalization', 2015, arXiv 1502.03167, algorithm 2.",
)
def _negative_variance(t: TensorMeasurement) -> str | None:
    return next((note for note in t.notes if note.endswith(NEGATIVE)), None)


@rule(
    "G201",
    "warn",
    "filters that share one direction",
    means="At least a quarter of the filters' energy lies along one shared direction: they are largely redundant.",
    chance="mean squared cosine 1/d; the z-score is in its standard deviations.",
    do="Centre the weights (weight standardisation), or penalise alignment (SelfOrthogonality, Orthogonality).",
    source="T. T. Cai, J. Fan, T. Jiang, 'Distributions of angles in random packing on spheres', 2013, "
    "arXiv 1306.0256, for random directions; the threshold of a quarter is a choice.",
)
def _shared(t: TensorMeasurement) -> str | None:
    if t.alignment is None or t.alignment_z is None or not t.dim or (t.pairs or 0) < 28:
        return None
    share = t.alignment / t.dim
    if share < 0.25 or t.alignment_z < 6:
        return None
    return f"the mean squared cosine between its filters is {share:.2f}, {t.alignment:.3g} times that of random ones"


@rule(
    "G202",
    "info",
    "filters that are nearly equal or nearly opposite",
    means="Two such filters compute one feature twice (opposite ones too, under an odd activation).",
    chance="fewer than 0.0001 such pairs expected.",
    do="Prune one of each pair, or penalise coherence (MutualCoherence, SelfOrthogonality).",
    source="M. Charikar, 'Similarity estimation techniques from rounding algorithms', 2002, for angles and "
    "similarity; the threshold 0.95 is a choice.",
)
def _alike(t: TensorMeasurement) -> str | None:
    total = t.total_filters * ((t.filters or 0) - 1) // 2
    if not t.near_duplicates or not t.closest or not t.dim or expected_pairs_above(NEAR, total, t.dim) > 1e-4:
        return None
    first, second = t.closest
    return (
        f"{t.near_duplicates} of {total} pairs of filters have an absolute cosine of {NEAR} or more; "
        f"the largest is {t.coherence:.3f}, of filters {first} and {second}"
    )


@rule(
    "G203",
    "warn",
    "filters that are equal or opposite up to a factor",
    means="Two such filters compute one feature twice. Training does not lead there from different weights: one was "
    "copied, or both were initialised alike and always got the same gradient. Rows of an embedding for tokens that "
    "never occur can be equal and harmless.",
    exact="two filters that were drawn independently are proportional with probability 0; the rule applies where fewer "
    "than 0.0001 pairs are expected within the rounding of float32.",
    do="Initialise one of each pair anew, or prune it; look for a copy in the code that made the weights.",
    source="I. Goodfellow, Y. Bengio, A. Courville, 'Deep learning', 2016, section 8.4, on breaking symmetry.",
)
def _equal(t: TensorMeasurement) -> str | None:
    total = t.total_filters * ((t.filters or 0) - 1) // 2
    least = 1 - 1e-6  # cosines are computed in float32
    if not t.closest or not t.dim or (t.coherence or 0) < least or expected_pairs_above(least, total, t.dim) > 1e-4:
        return None
    return f"filters {t.closest[0]} and {t.closest[1]} are proportional: their absolute cosine is 1"


@rule(
    "G301",
    "warn",
    "a weight that is nearly of rank 1",
    means="More than half of the squared norm lies in one singular direction.",
    chance="stable rank near nd/(√n + √d)²; the rule applies only where that is 6 or more.",
    do="Look for a constant offset in its input (normalise it), or restart from an orthogonal initialisation.",
    source="M. Rudelson, R. Vershynin, 'Sampling from large matrices', 2007, arXiv math/0503442, §1.",
)
def _one_direction(t: TensorMeasurement) -> str | None:
    if t.stable_rank is None or t.stable_rank_random is None or t.stable_rank_random < 6:
        return None
    return f"its stable rank is {t.stable_rank:.2f}" if 0 < t.stable_rank < 2 else None


# --- a model and its training ----------------------------------------------------------------------------------------

SMALL = 8  # samples, below which [Wu and He 2018, table 2] sees batch normalisation fail


def _listed(norms: list[NormUse]) -> str:
    return listing([norm.path or "the model" for norm in norms], limit=3)


@rule(
    "G401",
    "warn",
    "batch normalisation over fewer than 8 samples",
    means="Statistics over few samples are noisy and differ from those used in evaluation. Harmless for "
    "frozen norms (in evaluation mode while the rest trains), which the rule leaves out.",
    exact="the batch size is read from the loader.",
    do="Use larger batches; SyncBatchNorm over several processes; or a norm without batch statistics "
    "(gonio.swap_ with gonio.nn.to_group_norm, or SwitchableNorm with use_batch=False).",
    source="Y. Wu, K. He, 'Group normalization', 2018, arXiv 1803.08494, table 2: top-1 error of a ResNet-50 "
    "with batch norm 23.6 % at 32 images per process, 24.8 % at 8, 27.3 % at 4, 34.7 % at 2; with group norm "
    "24.1 to 24.2 %.",
)
def _small_batches(setting: Setting) -> str | None:
    batch = setting.training.batch
    norms = [norm for norm in setting.norms if norm.averages_over_batches and norm.samples(batch) < SMALL]
    return f"batch norms compute statistics over {batch} samples: {_listed(norms)}" if norms else None


@rule(
    "G402",
    "warn",
    "a last batch of one sample under batch normalisation",
    means="With one value per channel torch raises an error, at the end of the first epoch. With more (a map "
    "of one image) the variance of a single image enters the running statistics.",
    exact="the number of samples and the batch size are read from the loader.",
    do="Use drop_last=True, a batch size with another remainder, or a norm without batch statistics.",
    source="pytorch issue 7716 ('Expected more than 1 value per channel when training').",
)
def _last_batch(setting: Setting) -> str | None:
    norms = [norm for norm in setting.norms if norm.averages_over_batches and norm.samples(setting.training.last) < 2]
    if not norms:
        return None
    raising = [norm for norm in norms if norm.positions == 1]
    unknown = [norm for norm in norms if norm.positions is None and isinstance(norm.module, nn.BatchNorm1d)]
    said = f"the last batch of an epoch has a single sample; batch norms: {_listed(norms)}"
    if raising:
        return f"{said}; training will raise an error there: {_listed(raising)} get one value per channel"
    return f"{said}; training will raise an error if the inputs of {_listed(unknown)} are (N, C)" if unknown else said


@rule(
    "G403",
    "warn",
    "a normalisation over single values",
    means="A value minus itself is 0: the output of the layer is its shift, for every input, and no gradient "
    "passes. A group norm with one channel per group does this on 1×1 maps, a layer norm on one feature.",
    exact="for one value x the output is (x − x)/√(0 + ε)·γ + β = β; the group's size is read from the layer "
    "and from the measured batch.",
    do="Use fewer groups, so that each has several values; or remove the norm.",
    source="Y. Wu, K. He, 'Group normalization', 2018, arXiv 1803.08494, equation (7).",
)
def _single_values(setting: Setting) -> str | None:
    norms = [norm for norm in setting.norms if norm.values == 1]
    return f"each statistic is over one value, so that the input is lost: {_listed(norms)}" if norms else None


@rule(
    "G404",
    "warn",
    "batch statistics shared by several calls",
    means="A batch norm that runs more than once per forward (at each time step of a recurrent net, or in each "
    "branch of a shared one) normalises each call by its own statistics in training and all of them by "
    "one running average in evaluation. Harmless if all inputs have the same distribution.",
    exact="the calls are counted in the model's graph, or in the measured batch.",
    do="Use layer norm in recurrent nets, or one batch norm per call, with shared weights around it.",
    source="T. Cooijmans et al., 'Recurrent batch normalization', 2017, arXiv 1603.09025, section 3; J. L. Ba "
    "et al., 'Layer normalization', 2016, arXiv 1607.06450, section 2.",
)
def _several_uses(setting: Setting) -> str | None:
    reused = [norm for norm in setting.norms if norm.calls > 1 and not norm.frozen and norm.has_statistics]
    uses = [f"{norm.path or 'the model'} ({norm.calls} times)" for norm in reused]
    return f"several calls per forward share running statistics: {listing(uses, limit=3)}" if uses else None


@rule(
    "G406",
    "warn",
    "batch normalisation inside activation checkpointing",
    means="The forward pass is repeated during the backward pass and updates the running statistics a second "
    "time: their momentum is larger than configured, and batches are counted twice.",
    exact="torch's batch norm updates its buffers in every forward in training mode, the repeated one too.",
    do="Use the momentum 1 − √(1 − m) instead of m, or a layer that handles this (SwitchableNorm), or call "
    "calibrate_ before evaluating.",
    source="pytorch issue 96136.",
)
def _recomputed(setting: Setting) -> str | None:
    norms = [norm for norm in setting.norms if norm.recomputed and norm.averages_over_batches and norm.has_statistics]
    return f"activation checkpointing runs them twice per batch: {_listed(norms)}" if norms else None


@rule(
    "G405",
    "info",
    "weight decay on weights whose scale has no effect",
    means="Such a weight is followed by a normalisation, or parametrized by its direction: decay cannot make "
    "the function simpler. It does keep the effective learning rate lr/‖w‖² high, which is often intended.",
    exact="the function is the same for every positive multiple of such a weight, up to the norm's ε.",
    do="Keep it as a schedule of the effective learning rate, or set it to 0 there; do not rely on it as "
    "regularisation, and do not add a penalty on the scale.",
    source="T. van Laarhoven, 'L2 regularization versus batch and weight normalization', 2017, "
    "arXiv 1706.05350, sections 2 and 3.",
)
def _decayed(setting: Setting) -> str | None:
    free = setting.decayed
    if not free:
        return None
    return f"weight decay acts on {len(free)} weights whose scale has no effect: {listing(list(free), limit=3)}"


@rule(
    "G407",
    "warn",
    "an output that does not depend on the input",
    means="Every path from the input to the output leads through a layer whose weight is 0. This is normal only at "
    "the start of training, for a last layer that is initialised to 0.",
    exact="the weight is 0, and the graph of the model has no path around the layer.",
    do="If the model is trained, restore an earlier checkpoint; otherwise initialise the layer (gonio.init_).",
    source="H. Zhang, Y. Dauphin, T. Ma, 'Fixup initialization', 2019, arXiv 1901.09321, for last layers initialised "
    "to 0 on purpose.",
)
def _constant(setting: Setting) -> str | None:
    paths = [path or "the model" for path in setting.constant]
    return f"the output is the same for every input: the weight of {listing(paths, limit=3)} is 0" if paths else None


@rule(
    "G408",
    "warn",
    "a layer most of whose units are dead",
    means="The output of these units is 0 on the whole batch, and no gradient passes through them. After a ReLU, "
    "inputs that are all alike leave about half of the units dead; the rule needs four standard deviations more.",
    exact="the units are counted on the given batch; with other inputs some may be active.",
    do="Check the biases and the learning rate before this layer; use a smaller learning rate, an activation with a "
    "gradient below 0 (LeakyReLU, GELU), or a normalisation.",
    source="L. Lu et al., 'Dying ReLU and initialization: theory and numerical examples', 2019, arXiv 1903.06733.",
)
def _dead_units(setting: Setting) -> str | None:
    found, before = [], 0.0
    for signal in setting.signals:
        share = signal.dead_units / max(1, signal.units)
        many = signal.dead_units >= signal.units / 2 + 2 * sqrt(signal.units) or (share == 1 and signal.units >= 8)
        if many and share != before and signal.branch == "":  # an equal share is that of the layer before
            found.append(f"{signal.path or 'the model'} ({signal.dead_units} of {signal.units})")
        before = share
    return f"units whose output is 0 on the whole batch: {listing(found, limit=3)}" if found else None


_FACTOR = 30  # far above healthy networks (benchmarks/planted_damage.py)


@rule(
    "G409",
    "warn",
    "a layer that changes the size of its input more than thirtyfold",
    means="Activations saturate or vanish. In 24 healthy trained networks the factors were 0.36 to 5.9.",
    chance="a factor near 1 after an initialisation that keeps norms.",
    do="Compare with an earlier checkpoint; move the scale back (gonio.balance_), or initialise anew (gonio.lsuv_).",
    source="D. Mishkin, J. Matas, 'All you need is a good init', 2016, arXiv 1511.06422; the threshold is a choice.",
)
def _out_of_scale(setting: Setting) -> str | None:
    found = []
    for signal in setting.signals:
        norm = "Norm" in signal.kind  # its input counts as of unit size
        weighted = "Linear" in signal.kind or "Conv" in signal.kind
        size = signal.rms if norm else signal.gain if weighted else None
        if size is not None and (size > _FACTOR or (not norm and 0 < size < 1 / _FACTOR)):
            found.append(f"{signal.path or 'the model'} (× {size:.3g})")
    return f"the output is far larger or smaller than the input: {listing(found, limit=3)}" if found else None


@rule(
    "G410",
    "info",
    "running statistics that are not those of the batch",
    means="In evaluation the layer normalises by statistics far from those of this batch, so that it computes another "
    "function than in training: the weights before it have changed since, or the statistics were damaged, or the batch "
    "is not like the training data. Harmless for random numbers. In 24 healthy trained networks it was at most 0.21.",
    chance="about √(1.5/N) for N values per channel.",
    do="Pass a batch of the training data; if the finding stays, recalibrate the statistics (gonio.calibrate_).",
    source="Y. Wu, J. Johnson, 'Rethinking \"batch\" in batch norm', 2021, arXiv 2105.07576, section 3; the threshold "
    "is a choice.",
)
def _stale(setting: Setting) -> str | None:
    found = []
    for signal in setting.signals:
        values = prod(signal.shape) / max(1, signal.units)
        least = max(0.5, 4 * sqrt(1.5 / max(1.0, values)))
        if signal.train_eval_gap is not None and signal.train_eval_gap > least:
            found.append(f"{signal.path or 'the model'} ({signal.train_eval_gap:.2g} standard deviations)")
    if not found:
        return None
    return f"the output differs from that in training mode on this batch: {listing(found, limit=3)}"


@rule(
    "G411",
    "warn",
    "running statistics at their initial values in a trained norm",
    means="The gains of the norm's channels differ, so it was trained; its running mean is still 0 and its running "
    "variance 1, so that it does not normalise in evaluation.",
    exact="the values are read from the layer.",
    do="Restore the statistics from the checkpoint, or recalibrate them (gonio.calibrate_).",
    source="torch.optim.swa_utils.update_bn, which exists because averaged weights need new statistics.",
)
def _forgotten(setting: Setting) -> str | None:
    norms = [norm for norm in setting.norms if norm.has_statistics and _trained_without_statistics(norm.module)]
    return f"running statistics are at their initial values: {_listed(norms)}" if norms else None


def _trained_without_statistics(norm: nn.Module) -> bool:
    found = (norm._buffers.get("running_mean"), norm._buffers.get("running_var"), norm._parameters.get("weight"))
    mean, var, gain = (t if t is not None and not is_lazy(t) and not t.is_meta else torch.ones(1) for t in found)
    return not bool(mean.any()) and not bool((var != 1).any()) and bool((gain != gain.flatten()[0]).any())


_TENSOR_RULES = (
    _nonfinite,
    _zero,
    _dead,
    _weak,
    _dominant,
    _negative_variance,
    _shared,
    _alike,
    _equal,
    _one_direction,
)
_MODEL_RULES = (
    *(_small_batches, _last_batch, _single_values, _several_uses, _decayed, _recomputed, _constant),
    *(_dead_units, _out_of_scale, _stale, _forgotten),
)
WEIGHT_RULES: Mapping[str, Rule[TensorMeasurement]] = {rule.code: rule for rule in _TENSOR_RULES}
ADVICE: Mapping[str, Rule[Setting]] = {rule.code: rule for rule in _MODEL_RULES}
_KNOWN: dict[str, Rule[Any]] = {**WEIGHT_RULES, **ADVICE}
RULES: Mapping[str, Rule[Any]] = MappingProxyType(_KNOWN)


def register(rules: Mapping[str, Rule[Any]]) -> None:
    """Add rules on other subjects, so that they can be explained."""
    _KNOWN.update(rules)
