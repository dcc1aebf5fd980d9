"""The rules on tensors: each with its reason, its source and its false-alarm rate.

A finding does not mean that a network is broken. It means that a figure is very unlikely for random weights, and why
that can matter. The false-alarm rates were measured on randomly initialised and on trained models by
`benchmarks/false_alarms.py`; every rule has a measured rate, or a reason why it has no false alarms.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from gonio.errors import UnknownNameError
from gonio.geometry.chance import expected_pairs_above
from gonio.geometry.duplicates import NEAR
from gonio.measuring.figures.tensor import NEGATIVE, TensorMeasurement
from gonio.measuring.findings.advice import ADVICE, Setting
from gonio.measuring.findings.finding import LEVELS, Finding, Rule, rule
from gonio.measuring.reading.entry import PADDING


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
    """The result of `benchmarks/false_alarms.py`."""
    text = (resources.files("gonio.measuring.findings") / "false_alarms.json").read_text(encoding="utf-8")
    rates: dict[str, Any] = json.loads(text)
    return rates


def _rate(code: str) -> str:
    """On random and on trained models, each with the upper end of its interval."""
    said = []
    for name, models in (("random", "randomly initialised models"), ("trained", "trained networks")):
        rates = measured_rates()[name]
        seen = rates["rules"][code]
        said.append(
            f"{seen['tensors']} of {rates['tensors']} tensors in {seen['models']} of {rates['models']} {models}; "
            f"the true rate per model is below {100 * seen['models_upper']:.2g} % (95 %)."
        )
    return " ".join(said)


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


_RULES = (
    *(_nonfinite, _zero, _dead, _weak, _dominant, _negative_variance),
    *(_shared, _alike, _equal, _one_direction),
)
WEIGHT_RULES: Mapping[str, Rule[TensorMeasurement]] = {found.code: found for found in _RULES}

RULES: Mapping[str, Rule[Any]] = MappingProxyType({**WEIGHT_RULES, **ADVICE})
