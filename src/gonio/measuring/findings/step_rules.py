"""The rules on the steps of a training: one that is large beside its weight, and weights that no step turns."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Literal

from gonio.measuring.figures.structure import Outside
from gonio.measuring.findings.model_rules import outside_optimizer
from gonio.measuring.findings.rules import FindingRule, rule
from gonio.measuring.findings.state_rules import FROM_ZERO, LARGE
from gonio.messages import say

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
def _large(facts: StepFacts) -> str | None:
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
