"""Findings, and the rules that report them; the text of each, with its reason and source, is in `rules.yaml`.

A finding does not mean that a network is broken. Of a tensor it means that a figure is very unlikely for random
weights, and why that can matter; the false-alarm rates were measured on randomly initialised and on trained models by
`benchmarks/false_alarms.py`. Rules on a whole model read facts, judge no figure and have no false alarms.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Generic, TypeVar

from rich.text import Text

from gonio.errors import InvalidArgumentError, UnknownNameError, listing
from gonio.escaping import markdown_cell, plain
from gonio.geometry.chance import expected_pairs_above
from gonio.geometry.duplicates import NEAR, ROUNDING
from gonio.measuring.figures.attention import HeadLogits
from gonio.measuring.figures.heads import HeadMeasurement
from gonio.measuring.figures.structure import ModelFacts
from gonio.measuring.figures.tensor import TensorMeasurement
from gonio.measuring.findings.remedies import Prescription
from gonio.measuring.findings.siblings import AmongSiblings
from gonio.measuring.reading.entry import (
    FACTOR,
    LOW_RANK,
    NOTES,
    negative_variances,
)
from gonio.messages import Message, are, counted, fixed, joined, local, say

PLACES = 8  # findings of one rule that a terminal shows
NAMED = 10  # filters that a finding names; a row has more of them
_IN_HEADLINE = 3  # layers, at most
LEVELS = ("info", "warn", "error")
_TONES = {"error": "bold red", "warn": "bold dark_orange3", "info": "bold blue"}

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
class RuleText:
    """What `rules.yaml` says of a rule.

    Attributes:
        means: the meaning of the figure, and when it is harmless.
        do: the recommended action.
        source: a reference.
        chance: the value for random weights.
        exact: why the rule has no false alarms, for one that reads facts instead of judging a figure; the rate of
            the others is measured.
        calibrated: whether the rate of false alarms was measured.
        treatment: the names of the remedies in the order in which they are tried, or why there are none.
        batch: `seen` for a rule on the outputs of a batch; `compared` if it compares them with what the model stores of
            its training data, of which random numbers tell nothing.
    """

    level: str
    title: str
    means: str
    do: str
    treatment: str | Sequence[str]
    source: str
    chance: str = ""
    exact: str = ""
    calibrated: bool = True
    batch: str = ""

    @property
    def prescription(self) -> Prescription:
        """What `gonio.doctor` does about a finding."""
        return Prescription.of(self.treatment)


@cache
def rule_texts() -> Mapping[str, RuleText]:
    """The texts of all rules, by code."""
    import yaml  # only a finding or an explanation needs it

    content = (resources.files("gonio.measuring.findings") / "rules.yaml").read_text(encoding="utf-8")
    plainly = ("level", "calibrated", "treatment", "source", "batch")  # what code reads, and a reference
    texts: dict[str, dict[str, Any]] = yaml.safe_load(content)
    for text in texts.values():
        text.update({name: fixed(said) for name, said in text.items() if name not in plainly})
    return {code: RuleText(**text) for code, text in texts.items()}


Check = Callable[[Subject], str | None]


@dataclass(frozen=True)
class FindingRule(Generic[Subject]):
    """One rule: a code, and what it finds in its subject (a tensor, or the facts of a training); None for nothing.

    Attributes:
        harmless: whether a finding on this subject is a remark, whatever the level of the rule.
    """

    code: str
    check: Check[Subject]
    harmless: Callable[[Subject], bool] = lambda _: False

    @property
    def text(self) -> RuleText:
        """The rule in words."""
        return rule_texts()[self.code]

    def finding(self, subject: Subject, path: str) -> Finding | None:
        """The finding on this subject, if there is one."""
        found = self.check(subject)
        if found is None:
            return None
        text = self.text
        level = "info" if self.harmless(subject) else text.level
        return Finding(self.code, level, path, found, text.chance or text.exact, text.do)


WEIGHT_RULES: dict[str, FindingRule[TensorMeasurement]] = {}
SIBLING_RULES: dict[str, FindingRule[AmongSiblings]] = {}
HEAD_RULES: dict[str, FindingRule[Sequence[HeadLogits | HeadMeasurement]]] = {}  # of one attention
ADVICE: dict[str, FindingRule[ModelFacts]] = {}
RULES: dict[str, FindingRule[Any]] = {}  # on all subjects, those of other files too


def rule(
    code: str, among: dict[str, FindingRule[Subject]], *, harmless: Callable[[Subject], bool] = lambda _: False
) -> Callable[[Check[Subject]], Check[Subject]]:
    """A decorator that adds a check to the rules on one subject; the rule's text is in `rules.yaml`."""

    def add(check: Check[Subject]) -> Check[Subject]:
        among[code] = FindingRule(code, check, harmless)
        RULES.setdefault(code, among[code])  # a code may have checks of several subjects
        return check

    return add


def findings_by(rules: Mapping[str, FindingRule[Subject]], subjects: Iterable[tuple[Subject, str]]) -> list[Finding]:
    """What the rules find in each (subject, path)."""
    made = (rule.finding(subject, path) for subject, path in subjects for rule in rules.values())
    return [finding for finding in made if finding is not None]


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Errors, then warnings, then remarks, each in the given order."""
    return tuple(sorted(findings, key=lambda finding: -LEVELS.index(finding.level)))


def at_least(findings: Iterable[Finding], level: str) -> list[Finding]:
    """Those of this level or above.

    Raises: InvalidArgumentError for another word.
    """
    if level not in LEVELS:
        raise InvalidArgumentError("a finding has the level info, warn or error", repr(level), "Pass one of them.")
    return [finding for finding in findings if LEVELS.index(finding.level) >= LEVELS.index(level)]


def verdict(
    findings: Sequence[Finding], paths: Collection[str], noun: str = "layer", *, tensors: Collection[str] | None = None
) -> Message:
    """How many findings there are of each level, and in how many layers.

    Args:
        paths: of the layers (or tensors) that have a row.
        tensors: the paths of all tensors, where findings may be of files and modules too.

    Example:
        >>> from gonio.measuring.findings.rules import Finding, verdict
        >>> verdict([], ["a", "b"])
        'No findings in 2 layers.'
        >>> verdict([Finding("G102", "warn", "a", "", "", ""), Finding("G405", "info", "", "", "", "")], ["a", "b"])
        '1 warning and 1 remark in 1 of 2 layers and the model as a whole.'
    """
    if not findings:
        return say("No findings in {places}.", places=counted(len(paths), noun))
    levels = Counter(finding.level for finding in findings)
    words = {
        "error": counted(levels["error"], "error"),
        "warn": counted(levels["warn"], "warning"),
        "info": counted(levels["info"], "remark"),
    }
    said = [word for level, word in words.items() if levels[level]]
    named = {finding.path for finding in findings}
    inside, others = named & set(paths), named - set(paths) - {""}
    places = []
    if inside:
        places.append(say("{n} of {every}", n=len(inside), every=counted(len(paths), noun)))
    further = set() if tensors is None else others - set(tensors)
    if others - further:
        places.append(counted(len(others - further), "other tensor" if paths else "tensor"))
    if further:
        places.append(counted(len(further), "other place" if paths or others - further else "place"))
    if "" in named:
        places.append(say("the model as a whole"))
    found, where = joined(said, last=" and "), joined(places, last=" and ")
    return say("{found} in {places}.", found=found, places=where)


def first_of(findings: Sequence[Finding]) -> Message:
    """Where the findings are and what the first of them is, as a sentence; findings are worst first.

    Example:
        >>> from gonio.measuring.findings.rules import Finding, first_of
        >>> first_of([Finding("G102", "warn", "conv2", "", "", ""), Finding("G203", "warn", "fc", "", "", "")])
        'In conv2, fc; the first is G102: filters that are exactly 0 beside others that are not.'
    """
    first = say("{code}: {title}", code=findings[0].code, title=fixed(RULES[findings[0].code].text.title))
    paths = list(dict.fromkeys(finding.path for finding in findings if finding.path))
    if not paths:
        return say("The first is {first}.", first=first)
    return say("In {paths}; the first is {first}.", paths=listing(paths, limit=_IN_HEADLINE), first=first)


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
        said = [say("{findings} suppressed by {by}", findings=counted(count, "finding"), by=self.by)] if count else []
        if self.unmatched:
            said.append(say("Not found, though {by} suppresses it: {names}.", by=self.by, names=joined(self.unmatched)))
        return tuple(said)


def render_findings(findings: Sequence[Finding], more: Iterable[Text] = ()) -> Iterator[Text]:
    """Findings on a terminal, one line each, and further lines; then a blank line, if there is any line.

    Of a rule with more than :data:`PLACES` findings the first ones are shown, and the number of the others.
    """
    places = Counter((f.level, f.code) for f in findings)
    seen: Counter[tuple[str, str]] = Counter()
    lines: list[Text] = []
    for f in findings:
        kind = (f.level, f.code)
        seen[kind] += 1
        said = f"{plain(f.path) or local('the model')}: {plain(local(f.found))}"
        if seen[kind] == PLACES + 1 < places[kind]:
            said = local(
                say("{more}, which the page and the JSON list", more=counted(places[kind] - PLACES, "more place"))
            )
        elif seen[kind] > PLACES and places[kind] > PLACES + 1:
            continue
        lines.append(Text.assemble((f"{local(f.level):5} {f.code}", _TONES[f.level]), f"  {said}"))
    if lines:
        said = local(say("Run `gonio explain CODE` for the meaning of a finding and what to do."))
        lines.append(Text(said, style="dim"))
    lines += more
    yield from [*lines, Text("")] if lines else ()


def markdown_findings(findings: Sequence[Finding], whole: str = "the model") -> list[str]:
    """Findings as a markdown list, then a blank line; nothing without findings. `whole`: what the path "" means."""
    said = [f"- **{f.level} {f.code}** {markdown_cell(f.path or whole)}: {markdown_cell(f.found)}" for f in findings]
    return [*said, ""] if said else []


def unknown_rule(name: str, kind: str = "rule", also: Iterable[str] = ()) -> UnknownNameError:
    """The error for a name that no rule has; a code of the right form is near to no other code."""
    do = say("`gonio list rules` shows all codes.") if re.fullmatch(r"[A-Za-z]\d{3}", name.strip()) else ""
    return UnknownNameError(kind, name, [*RULES, *also], do=do)


@cache
def measured_rates() -> dict[str, Any]:
    """The results of `false_alarms.py`, `change_alarms.py` and `planted_damage.py` in `benchmarks/`."""
    text = (resources.files("gonio.measuring.findings") / "false_alarms.json").read_text(encoding="utf-8")
    rates: dict[str, Any] = json.loads(text)
    return rates


# --- tensors ---------------------------------------------------------------------------------------------------------


@rule("G001", WEIGHT_RULES)
def _nonfinite(t: TensorMeasurement) -> str | None:
    return nonfinite_values(t.nonfinite, t.entries, t.first_nonfinite)


def nonfinite_values(count: int, entries: int, first: Sequence[int] | None) -> str | None:
    """How many of a tensor's values are NaN or infinite, and the index of the first; None if there are none."""
    if not count:
        return None
    return say(
        "{nonfinite:,} of {entries:,} values {are} NaN or infinite, the first at [{place}]",
        nonfinite=count,
        entries=entries,
        are=are(count),
        place=", ".join(map(str, first or ())),
    )


@rule("G101", WEIGHT_RULES)
def _zero(t: TensorMeasurement) -> str | None:
    return say("every value is 0") if t.total_filters and t.zero_filters == t.total_filters else None


def _of_adapter(t: TensorMeasurement) -> bool:
    """Whether it is a part or product of an adapter: B begins at 0, and rows that no gradient reaches stay there."""
    return t.kind in (LOW_RANK, FACTOR)


@rule("G102", WEIGHT_RULES, harmless=lambda t: "filled" in t.marks)
def _dead(t: TensorMeasurement) -> str | None:
    padding = t.zero_filters == 1 and not {"padding", "maybe padding"}.isdisjoint(t.marks)
    if not t.zero_filters or t.zero_filters == t.total_filters or padding or _of_adapter(t):
        return None
    return zero_filters(t.zero_filters, t.total_filters, t.zero_indices, t.dim or 0)


def zero_filters(count: int, total: int, first: Sequence[int], length: int) -> str | None:
    """How many of a tensor's filters are 0, and which; None of a Fourier transform.

    The sine of the frequency 0 and that of the highest one are 0 at each sample: of N samples the transform has N + 2
    rows, N/2 + 1 cosines and as many sines.

    Args:
        first: the first ones of them. `length`: of a filter.
    """
    if total == length + 2 and tuple(first) == (length // 2 + 1, length + 1):
        return None
    return say(
        "{zero_filters} of {total_filters} filters {are} 0: {named}",
        zero_filters=count,
        total_filters=total,
        are=are(count),
        named=named([str(i) for i in first], count),
    )


def named(first: Sequence[str], count: int) -> Message:
    """The first of so many filters, and the number of the others."""
    shown = joined(first[:NAMED])
    more = count - min(len(first), NAMED)
    return say("{shown} and {more} more", shown=shown, more=more) if more > 0 else shown


@rule("G103", WEIGHT_RULES)
def _weak(t: TensorMeasurement) -> str | None:
    if t.norm_quantiles is None or not t.norm_nonzero_min or (t.dim or 0) < 4 or _of_adapter(t):
        return None
    least, middle = t.norm_nonzero_min, t.norm_quantiles[2]
    if least >= 1e-3 * middle:
        return None
    return say("the weakest filter's norm is {least:.2g}, the median {middle:.2g}", least=least, middle=middle)


@rule("G104", WEIGHT_RULES)
def _dominant(t: TensorMeasurement) -> str | None:
    if t.norm_quantiles is None or t.total_filters < 8 or _of_adapter(t):
        return None
    middle, most = t.norm_quantiles[2], t.norm_quantiles[-1]
    if not 0 < 10 * middle < most:
        return None
    return say("the strongest filter's norm is {most:.3g}, the median {middle:.3g}", most=most, middle=middle)


@rule("G105", WEIGHT_RULES)
def _negative_variance(t: TensorMeasurement) -> str | None:
    return negative_variances(t.negative_variances) if t.negative_variances else None


@rule("G107", WEIGHT_RULES)
def _no_variance(t: TensorMeasurement) -> str | None:
    return NOTES["no variance"] if "no variance" in t.marks else None


def _alike_on_purpose(t: TensorMeasurement) -> bool:
    """Whether its rows share directions by what it is: a fixed or constant table, a part or product of an adapter."""
    return "fixed" in t.marks or "constant" in t.marks or _of_adapter(t)


def _not_like_random(t: TensorMeasurement) -> bool:
    """Whether its rows share directions on purpose, or in their order, as positions do."""
    return "ordered" in t.marks or _alike_on_purpose(t)


@rule("G201", WEIGHT_RULES)
def _shared(t: TensorMeasurement) -> str | None:
    if _not_like_random(t) or t.alignment is None or t.alignment_z is None or not t.dim or (t.pairs or 0) < 28:
        return None
    share = t.alignment / t.dim
    if share < 0.25 or t.alignment_z < 6:
        return None
    return say(
        "the mean squared cosine between its filters is {share:.2f}, {alignment:.3g} times that of random ones",
        share=share,
        alignment=t.alignment,
    )


@rule("G202", WEIGHT_RULES)
def _alike(t: TensorMeasurement) -> str | None:
    total = t.total_filters * ((t.filters or 0) - 1) // 2
    if _not_like_random(t) or not t.near_duplicates or not t.closest or not t.dim:
        return None
    if expected_pairs_above(NEAR, total, t.dim) > 1e-4:
        return None
    copies = _pairs_of_copies(t) if _equal(t) else 0  # which G203 names
    left = t.near_duplicates - copies
    have = "has" if left == 1 else "have"
    if copies and left < 1:
        return None
    if copies:
        return say(
            "{left:,} of {total:,} pairs of filters {have} an absolute cosine of {NEAR} or more, beside the "
            "proportional ones",
            left=left,
            total=total,
            have=have,
            NEAR=NEAR,
        )
    first, second = t.closest
    return say(
        "{near_duplicates:,} of {total:,} pairs of filters {have} an absolute cosine of {NEAR} "
        "or more; the largest is {coherence:.3f}, of filters {first} and {second}",
        near_duplicates=t.near_duplicates,
        total=total,
        have=have,
        NEAR=NEAR,
        coherence=t.coherence,
        first=first,
        second=second,
    )


def _pairs_of_copies(t: TensorMeasurement) -> int:
    """The pairs of filters that are proportional: of k filters with one direction k(k − 1)/2."""
    alike = Counter(earlier for _, earlier in t.proportional).values()
    return sum(copies * (copies + 1) // 2 for copies in alike)


@rule("G203", WEIGHT_RULES, harmless=lambda t: "table" in t.marks)
def _equal(t: TensorMeasurement) -> str | None:
    if not t.proportional or not t.dim or _alike_on_purpose(t):
        return None
    return equal_filters(t.proportional, len(t.proportional), t.total_filters, (t.filters or 0, t.dim))


def equal_filters(copies: Sequence[tuple[int, int]], count: int, total: int, size: tuple[int, int]) -> str | None:
    """How many filters are proportional to an earlier one, and which to which.

    Args:
        copies: the first of so many, each with the earlier one.
        size: filters that are compared with each other, and their length: None is returned where random ones of this
            size are proportional within the rounding of float32.
    """
    if not copies or expected_pairs_above(1 - ROUNDING, total * (size[0] - 1) // 2, size[1]) > 1e-4:
        return None
    return say(
        "{count} of {total} filters {are} proportional to an earlier one: {named}",
        count=count,
        total=total,
        are=are(count),
        named=named([say("{filter} to {earlier}", filter=one, earlier=other) for one, other in copies], count),
    )


@rule("G301", WEIGHT_RULES)
def _one_direction(t: TensorMeasurement) -> str | None:
    if _not_like_random(t) or t.stable_rank is None or t.stable_rank_random is None or t.stable_rank_random < 6:
        return None
    return say("its stable rank is {stable_rank:.2f}", stable_rank=t.stable_rank) if 0 < t.stable_rank < 2 else None
