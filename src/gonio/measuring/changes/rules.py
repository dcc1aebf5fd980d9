"""The rules on changes: intruders, changes that cancel or dwarf their base, layers untouched, moved or pruned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod, sqrt

from gonio.errors import listing
from gonio.measuring.changes.pair import FIRST, TensorDifference
from gonio.measuring.findings.rules import Finding, FindingRule, findings_by, rule, worst_first
from gonio.messages import are, say

MORE = 2  # intruders than a random change of the same norm makes, of all top directions or of the largest
DWARFED = 1.0  # relative change of a weight by an adapter
UNTOUCHED = 0.5  # share of the weights that may be equal without a finding, at least
CANCELLED = 0.1  # by which a cosine of two changes lies below 0, at least
ZEROED = 1e-4  # share of the entries that may become 0 without a finding: half precision underflows
SIGMAS = 6.0  # standard deviations of chance below 0


@dataclass(frozen=True)
class WholeChange:
    """All tensors of one change.

    Attributes:
        adapters: whether the model is given as adapters.
    """

    rows: tuple[TensorDifference, ...]
    adapters: bool

    @property
    def weights(self) -> tuple[TensorDifference, ...]:
        """The matrices that could be compared."""
        return tuple(t for t in self.rows if t.status != "not compared" and len(t.shape) > 1)


@dataclass(frozen=True)
class Pairing:
    """The changes of two models as one vector each.

    Attributes:
        first, second: the names of the models.
        cosine: of the two changes. `chance`: its standard deviation for changes with independent entries.
        kept: norm of their mean over the mean of their norms.
    """

    first: str
    second: str
    cosine: float
    chance: float
    kept: float


TENSOR_RULES: dict[str, FindingRule[TensorDifference]] = {}
MODEL_RULES: dict[str, FindingRule[WholeChange]] = {}
PAIR_RULES: dict[str, FindingRule[Pairing]] = {}


@rule("G001", TENSOR_RULES)
def _nonfinite(t: TensorDifference) -> str | None:
    return t.reason if t.cause == "nonfinite" else None


@rule("G501", TENSOR_RULES)
def _intruders(t: TensorDifference) -> str | None:
    if t.moved_from:  # all directions are those of another weight
        return None
    top = len(t.intruder_cosines)
    for found, by_chance, among in (
        (t.intruders, t.intruders_random, top),
        (t.intruders_first, t.intruders_first_random, FIRST),
    ):
        if found is not None and found >= (by_chance or 0) + MORE:
            return say(
                "{found} of the {among} largest directions {are} like none of the base; {value} after a random "
                "change of the same norm",
                found=found,
                among=among,
                are=are(found),
                value=by_chance or 0,
            )
    return None


@rule("G713", TENSOR_RULES)
def _misfit(t: TensorDifference) -> str | None:
    return t.reason if t.cause == "adapter" else None


@rule("G502", TENSOR_RULES)
def _dwarfed(t: TensorDifference) -> str | None:
    explained = t.moved_from or t.reordered or t.reordered_inputs or t.transposed  # by another finding
    if t.relative is None or t.relative <= DWARFED or len(t.shape) < 2 or explained:
        return None
    return say("the change has {relative:.3g} times the norm of the base", relative=t.relative)


@rule("G505", TENSOR_RULES)
def _reordered(t: TensorDifference) -> str | None:
    if t.reordered:
        told = {"reordered": t.reordered, "are": are(t.reordered)}
        return say("{reordered} of its filters {are} at other places: those of the base in another order", **told)
    if t.reordered_inputs:
        told = {"reordered": t.reordered_inputs, "are": are(t.reordered_inputs)}
        return say("{reordered} of its inputs {are} at other places: those of the base in another order", **told)
    return None


@rule("G507", TENSOR_RULES)
def _transposed(t: TensorDifference) -> str | None:
    return say("it is the transpose of the square matrix in the base") if t.transposed else None


@rule("G508", TENSOR_RULES)
def _moved(t: TensorDifference) -> str | None:
    if not t.moved_from or t.status == "not compared":  # the base has no weight in its place
        return None
    return say("it has the values of {name} in the base", name=t.moved_from)


@rule("G506", TENSOR_RULES)
def _zeroed(t: TensorDifference) -> str | None:
    zeroed, entries = t.entries_zeroed or 0, prod(t.shape)
    if len(t.shape) < 2 or zeroed < 2 or zeroed <= ZEROED * entries:
        return None
    rest = say("no other entry changed")
    if zeroed != t.entries_changed:
        rest = say("{entries_changed:,} entries changed", entries_changed=t.entries_changed)
    return say(
        "{zeroed:,} of {entries:,} entries became 0 ({value:.2g}); {rest}",
        zeroed=zeroed,
        entries=entries,
        value=zeroed / entries,
        rest=rest,
    )


@rule("G503", MODEL_RULES)
def _untouched(change: WholeChange) -> str | None:
    equal = [t.path for t in change.weights if t.status == "equal"]
    few = len(equal) < len(change.weights) or not change.weights
    if change.adapters or not equal or not few or len(equal) > UNTOUCHED * len(change.weights):
        return None
    return say(
        "{count} of {count_2} weights {are} equal to the base: {equal}",
        count=len(equal),
        count_2=len(change.weights),
        are=are(len(equal)),
        equal=listing(equal, limit=4),
    )


@rule("G504", PAIR_RULES)
def _cancel(pair: Pairing) -> str | None:
    if pair.cosine > -max(CANCELLED, SIGMAS * pair.chance):
        return None
    return say(
        "the changes of {first} and {second} have a cosine of {cosine:.2f} (by chance 0 ± "
        "{chance:.2g}): their mean keeps {kept:.0%} of their norm, {value:.0%} for unrelated "
        "changes",
        first=pair.first,
        second=pair.second,
        cosine=pair.cosine,
        chance=pair.chance,
        kept=pair.kept,
        value=1 / sqrt(2),
    )


def findings_of_change(rows: Sequence[TensorDifference], adapters: bool) -> tuple[Finding, ...]:
    """All findings on the change of one model, warnings first."""
    made = findings_by(TENSOR_RULES, ((row, row.path) for row in rows))
    made = [replace(f, level="info") if adapters and f.code == "G501" else f for f in made]  # usual for adapters
    return worst_first([*made, *findings_by(MODEL_RULES, [(WholeChange(tuple(rows), adapters), "")])])
