"""The rules on optimizers: states and weights that do not fit, dead and impossible moments, outliers; single steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from math import sqrt
from typing import Literal

from gonio.errors import listing
from gonio.escaping import plain
from gonio.measuring.figures.moments import StateMeasurement, measure_states
from gonio.measuring.figures.structure import Outside
from gonio.measuring.findings.model_rules import outside_optimizer
from gonio.measuring.findings.rules import Finding, FindingRule, findings_by, nonfinite_values, rule
from gonio.measuring.findings.siblings import AmongSiblings, places
from gonio.measuring.reading.optimizers import OptimizerContents
from gonio.measuring.reading.order import is_matrix
from gonio.messages import Message, counted, say

STATE_RULES: dict[str, FindingRule[StateMeasurement]] = {}
FIT_RULES: dict[str, FindingRule[OptimizerContents]] = {}
MISFIT_RULES: dict[str, FindingRule[tuple[str, str]]] = {}
LARGE = 0.1  # of a weight's norm that one update may change
FROM_ZERO = 3.0  # divided by √t: a weight that began at 0 is √t uncorrelated updates long after t steps
MATTERS = 1 << 8  # entries below which one of them may carry all of the second moment
ALONE = 0.9  # share of one entry in the sum of the second moments


def among_states(rows: Iterable[StateMeasurement]) -> tuple[StateMeasurement, ...]:
    """The rows, those of matrices with their places among the same weight of other layers."""
    made = list(rows)
    matrices = (row for row in made if row.name and is_matrix(row.shape))
    placed = places((row.name, row.shape, row.gradient_rms) for row in matrices if row.gradient_rms is not None)
    return tuple(replace(row, **asdict(placed[row.name])) if row.name in placed else row for row in made)


def updates_of(rows: Iterable[StateMeasurement]) -> tuple[Message, ...]:
    """How far an update moves matrices, in one sentence; none where that is not known."""
    known = sorted((row.relative_update, row.path) for row in rows if row.relative_update and len(row.shape) > 1)
    if not known:
        return ()
    middle, (most, path) = known[len(known) // 2][0], known[-1]
    return (
        say(
            "with these moments and learning rates an update of {n} is {middle:.3g} times the weight's norm at the "
            "median, {most:.3g} at most ({path})",
            n=counted(len(known), "weight"),
            middle=middle,
            most=most,
            path=plain(path),
        ),
    )


def judged_states(
    contents: OptimizerContents, *, jobs: int = 1, values: bool = True
) -> tuple[tuple[StateMeasurement, ...], list[Finding], tuple[Message, ...]]:
    """The rows of an optimizer's states, the findings on them, and how far an update moves weights.

    Args:
        jobs: number of threads. `values`: as in :func:`of_optimizer`.
    """
    rows = among_states(measure_states(contents.parameters, jobs))
    return rows, of_optimizer(contents, rows, values=values), updates_of(rows)


def of_optimizer(
    contents: OptimizerContents, rows: Iterable[StateMeasurement], *, values: bool = True
) -> list[Finding]:
    """The findings of an optimizer's state.

    Args:
        values: whether NaN and infinity are reported, which `check` finds in the tensors themselves.
    """
    rules = {code: one for code, one in STATE_RULES.items() if values or code != "G001"}
    return [
        *findings_by(MISFIT_RULES, ((misfit, misfit[0]) for misfit in contents.misfits)),
        *findings_by(rules, ((row, row.path) for row in rows)),
        *findings_by(FIT_RULES, [(contents, "")]),
    ]


@rule("G001", STATE_RULES)
def _nonfinite(row: StateMeasurement) -> str | None:
    return nonfinite_values(row.nonfinite, row.entries, None)


@rule("G801", MISFIT_RULES)
def _misfit(misfit: tuple[str, str]) -> str | None:
    return misfit[1]


@rule("G802", FIT_RULES)
def _without(contents: OptimizerContents) -> str | None:
    if not contents.without:
        return None
    number, names = len(contents.without), listing([plain(name, longest=200) for name in contents.without], limit=4)
    return say("{n} in the optimizer's groups without state: {names}", n=counted(number, "parameter"), names=names)


@rule("G803", STATE_RULES)
def _dead(row: StateMeasurement) -> str | None:
    if not row.dead or (row.step or 0) < 2:  # the first factor of an adapter has no gradient while the other is 0
        return None
    return say("its second moment is 0 after {step:.0f} steps", step=row.step)


@rule("G804", STATE_RULES)
def _impossible(row: StateMeasurement) -> str | None:
    if row.negative:
        return say("{n:,} of {entries:,} second moments are negative", n=row.negative, entries=row.entries)
    if not row.beyond:
        return None
    return say(
        "{n:,} of {entries:,} first moments are larger than any gradients with these second moments leave",
        n=row.beyond,
        entries=row.entries,
    )


@rule("G805", STATE_RULES)
def _large(row: StateMeasurement) -> str | None:
    size = row.relative_update
    if size is None or len(row.shape) < 2 or size <= max(LARGE, FROM_ZERO / sqrt(max(row.step or 1.0, 1.0))):
        return None
    return say(
        "an update with these moments is {size:.3g} times as long as the weight (learning rate {rate:g})",
        size=size,
        rate=row.learning_rate,
    )


@rule("G806", STATE_RULES)
def _outlier(row: StateMeasurement) -> str | None:
    if row.entries >= MATTERS and (row.largest_share or 0.0) > ALONE:
        return say("one entry has {share:.1%} of the sum of the second moments", share=row.largest_share)
    place = AmongSiblings(row.siblings, row.ratio, row.distance)
    if not row.ratio or place.found is None:  # a state of 0 is G803
        return None
    return say(
        "its gradients, by the second moment, are {ratio:.3g} times the median of those of its {n} siblings, "
        "{distance:.3g} times their spread away",
        ratio=row.ratio,
        n=row.siblings,
        distance=row.distance,
    )


# --- steps of a training ----------------------------------------------------------------------------------------------

STEP_RULES: dict[str, FindingRule[StepFacts]] = {}
OUTSIDE_RULES: dict[str, FindingRule[Outside]] = {}
STILL = 10  # measured steps in a row: of a layer that runs in half of all steps, one of a thousand such rows
WIDE = ("float32", "float64")  # whose rounding hides no change that matters: the training has converged
TURNED = 1e-7  # radians: less is the rounding of a weight in float32 that decays
Gradient = Literal["none", "zeros", "others", "unknown"]


@dataclass(frozen=True)
class StepFacts:
    """What the rules on steps judge of one weight at a measured step.

    Attributes:
        relative_update: norm of the change over the norm of the weight; None for a weight of norm 0.
        begun: steps since the weight was first seen to be other than 0.
        still: measured steps in a row that did not turn it, although it requires a gradient and has a learning rate.
        gradient: what it had in these steps, the first of which is not looked at; None for a weight that turned.
        dtype: of the weight.
    """

    path: str
    relative_update: float | None
    begun: int
    still: int
    gradient: Gradient | None
    dtype: str


@rule("G805", STEP_RULES)
def _large_step(facts: StepFacts) -> str | None:
    size = facts.relative_update
    if size is None or size <= max(LARGE, FROM_ZERO / sqrt(max(facts.begun, 1))):
        return None
    return say("the step changed it by {size:.3g} times its norm", size=size)


@rule("G807", STEP_RULES, harmless=lambda facts: facts.gradient == "others" and facts.dtype in WIDE)
def _still(facts: StepFacts) -> str | None:
    if facts.still < STILL:
        return None
    if facts.gradient == "none":
        return say("{n} measured steps in a row did not turn it: it had no gradient", n=facts.still)
    if facts.gradient == "zeros":
        return say("{n} measured steps in a row did not turn it: its gradients were 0", n=facts.still)
    if facts.gradient == "unknown":
        return say("{n} measured steps in a row did not turn it", n=facts.still)
    return say(
        "{n} measured steps in a row did not turn it, although its gradients were not 0: its changes are below the "
        "rounding of {dtype}",
        n=facts.still,
        dtype=facts.dtype,
    )


@rule("G418", OUTSIDE_RULES, harmless=lambda outside: outside.harmless)
def _outside(outside: Outside) -> str | None:
    return outside_optimizer(outside)
