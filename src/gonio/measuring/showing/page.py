"""Measurements, differences and trainings as HTML: a page of its own, or the part that a notebook shows.

The markup is in the templates; this file arranges what they show: the map of layers over the depth of the model, and
findings by rule with links to their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from gonio.measuring.figures.tensor import TensorMeasurement
from gonio.measuring.figures.usual import FIGURES
from gonio.measuring.findings.rules import LEVELS, RULES, Finding
from gonio.measuring.reading.order import tells_depth
from gonio.measuring.showing.table import Column
from gonio.messages import Message, fixed, joined, say
from gonio.pages import render as rendered
from gonio.pages.charts import DrawnLane, Lane, depth_lane, marks, runs, stages
from gonio.pages.picture import spark
from gonio.pages.pictures import layer_angles, layer_norms, layer_spectrum

More = tuple[str, str, str, Callable[[Any], Any]]  # title, explanation, class and cell of a column that only a page has


@dataclass(frozen=True)
class Occurrence:
    """One finding on the page: its id, the id of the row that it is about (empty for none), and what was found."""

    id: str
    row: str
    path: str
    found: str


@dataclass(frozen=True)
class RuleFindings:
    """All findings of one rule: what is the same for all of them once, and where they are."""

    code: str
    level: str
    title: str
    do: str
    chance: str
    places: tuple[Occurrence, ...]


@dataclass(frozen=True)
class LayerMap:
    """What a page shows of all layers together.

    Attributes:
        order: the place of each tensor in the model, by name.
        rules: the findings, by rule. `codes`: of each path (code, level, id of the finding).
        undrawn: findings on what has no bar: (path, code, level, id of the finding).
        heading: over the depth, or over the tensors where their order in the model is not known.
        lanes, marks: charts over it. `stages`: the parts of the model below them.
    """

    order: Mapping[str, int]
    rules: tuple[RuleFindings, ...]
    codes: Mapping[str, list[tuple[str, str, str]]]
    undrawn: Sequence[tuple[str, str, str, str]]
    heading: Message
    lanes: tuple[DrawnLane, ...]
    marks: Any
    stages: Sequence[tuple[str, int]]


def render(template: str, *, whole: bool, **values: Any) -> str:
    """A template of this folder with these values: one self-contained page, or a fragment with its own style."""
    return rendered("gonio.measuring.showing", template, whole=whole, **values)


def layer_map(
    tensors: Sequence[Any],
    findings: Sequence[Finding],
    lanes: Sequence[Lane],
    shown: Sequence[Any] | None = None,
    *,
    every: Sequence[Any] = (),
) -> LayerMap:
    """The map of these tensors.

    Args:
        tensors: rows with a `name` and a `path`. `shown`: those that have a row on the page; None for all.
        lanes: figures with one entry per tensor.
        every: of a file, all its tensors, those without figures too: whether their order is that of the model.
    """
    on_page = {tensor.path for tensor in (tensors if shown is None else shown)}
    rows = {tensor.path: f"t{i}" for i, tensor in enumerate(tensors) if tensor.path in on_page}
    rules = _by_rule(findings, rows)
    codes: dict[str, list[tuple[str, str, str]]] = {}
    for rule in rules:
        for place in rule.places:
            codes.setdefault(place.path, []).append((rule.code, rule.level, place.id))
    barred = {tensor.path for tensor in tensors}
    levels = [max((level for _, level, _ in codes.get(t.path, ())), key=LEVELS.index, default="") for t in tensors]
    bars = runs(len(tensors))
    if len(bars) < len(tensors):
        lanes = [lane.binned(bars) for lane in lanes]
        levels = [max((levels[i] for i in run), key=lambda level: (level != "", LEVELS.index(level) if level else 0))
                  for run in bars]  # fmt: skip
    by_depth = tells_depth([tensor.name for tensor in every])
    over = say("depth") if by_depth else say("the tensors")
    said = say("{n} layers", n=len(tensors))
    if len(bars) < len(tensors):
        said = say("{layers}, {n} to a bar", layers=said, n=len(bars[0]))
    counts = [(levels.count(level), level) for level in reversed(LEVELS)]
    flagged = joined([say("{n} {level}", n=n, level=fixed(level)) for n, level in counts if n])
    title = say("findings over {over}: {said}, worst level of each: {flagged}", over=over, said=said, flagged=flagged)
    return LayerMap(
        order={tensor.name: i for i, tensor in enumerate(tensors)},
        rules=rules,
        codes=codes,
        undrawn=[(path, *one) for path, found in codes.items() if path and path not in barred for one in found],
        heading=say("Over depth") if by_depth else say("Over the tensors"),
        lanes=tuple(drawn for lane in lanes if (drawn := depth_lane(lane, levels, over)) is not None) if levels else (),
        marks=marks(levels, title) if flagged else "",
        stages=stages([tensor.path for tensor in tensors]),
    )


def _by_rule(findings: Sequence[Finding], rows: Mapping[str, str]) -> tuple[RuleFindings, ...]:
    places: dict[tuple[str, str, str, str], list[Occurrence]] = {}
    for i, one in enumerate(findings):
        key = (one.code, one.level, one.do, one.chance)
        places.setdefault(key, []).append(Occurrence(f"f{i}", rows.get(one.path, ""), one.path, one.found))
    return tuple(
        RuleFindings(
            code, level, RULES[code].text.title if code in RULES else "", do, _by_chance(code, chance), tuple(found)
        )
        for (code, level, do, chance), found in places.items()
    )


def _by_chance(code: str, chance: str) -> Message:
    """What random weights have, or why a rule that reads facts finds nothing by chance."""
    if code in RULES and not RULES[code].text.chance:
        return say("Never by chance: {why}", why=chance)
    return say("By chance: {chance}", chance=chance)


def measured_lanes(tensors: Sequence[TensorMeasurement]) -> list[Lane]:
    """Norms, angles and spectra along the depth of a model."""
    norms, quantiles = ([getattr(t, name) for t in tensors] for name in ("norm_quantiles", "spectrum_quantiles"))
    spread = [
        None
        if t.angle_mean is None or t.angle_std is None
        else (max(t.angle_mean - t.angle_std, 0.0), min(t.angle_mean + t.angle_std, 180.0))
        for t in tensors
    ]
    sigmas = [
        (five[0] / t.sigma_random, five[-1] / t.sigma_random) if five and t.sigma_random else None
        for t, five in zip(tensors, quantiles, strict=True)
    ]
    medians = [five[len(five) // 2] / t.sigma_random if five and t.sigma_random else None for t, five in
               zip(tensors, quantiles, strict=True)]  # fmt: skip
    ranks = [FIGURES["effective_rank_share"](t) for t in tensors]
    return [
        Lane("norm", "of a filter: smallest, median, largest",
             [five[2] if five else None for five in norms], [(five[0], five[-1]) if five else None for five in norms],
             every=True),
        Lane("angle", "between filters, degrees: mean ± standard deviation", [t.angle_mean for t in tensors], spread,
             scale="linear"),
        Lane("alignment", "d · mean cos², dashed: random weights", [t.alignment for t in tensors],
             chance=[None if t.alignment is None else 1.0 for t in tensors]),
        Lane("spectrum", "singular values over the largest of random weights (dashed)", medians, sigmas,
             [None if one is None else 1.0 for one in sigmas]),
        Lane("rank", "effective rank over the full rank", ranks, scale="linear"),
    ]  # fmt: skip


@dataclass(frozen=True)
class SideBySide:
    """Several models in one table: their names, the columns as (title, explanation), and a row of cells per layer."""

    names: tuple[str, ...]
    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]


def lanes_beside(tensors: Sequence[TensorMeasurement], others: Sequence[Sequence[TensorMeasurement]]) -> list[Lane]:
    """The lanes of :func:`measured_lanes` with the values of the same layers in other models."""
    lanes = measured_lanes(tensors)
    for other in others:
        for at, lane in enumerate(measured_lanes(other)):
            known = dict(zip((t.path for t in other), lane.middles, strict=True))
            lanes[at] = replace(lanes[at], others=(*lanes[at].others, [known.get(t.path) for t in tensors]))
    return lanes


def side_by_side(measured: Sequence[Any], columns: Sequence[Column[TensorMeasurement]]) -> SideBySide:
    """Each column of every model beside that of the others, and the codes of their findings; layers of any model.

    Args:
        measured: the :class:`gonio.measuring.Measurements` of each model.
    """
    models = [{layer.path: layer for layer in one.layers} for one in measured]
    numbers = range(1, len(models) + 1)
    heads = [
        (joined([c.title, f" {i}"], ""), say("{explanation}; model {n}", explanation=c.explanation, n=i))
        for c in columns
        for i in numbers
    ]
    heads += [(joined([say("findings"), f" {i}"], ""), say("codes; model {n}", n=i)) for i in numbers]
    rows = []
    for path in dict.fromkeys(path for model in models for path in model):
        cells = [c.cell(model[path]) if path in model else "–" for c in columns for model in models]
        codes = [" ".join(sorted({f.code for f in one.findings if f.path == path})) or "–" for one in measured]
        rows.append((path, (*cells, *codes)))
    return SideBySide(tuple(one.source for one in measured), tuple(heads), tuple(rows))


def changed_lanes(tensors: Sequence[Any]) -> list[Lane]:
    """The change of every tensor along the depth of a model."""
    return [
        Lane("change", "norm of the difference over the norm before", [t.relative for t in tensors], every=True),
        Lane("angle", "of the filters before and after, degrees: mean", [t.angle_mean for t in tensors]),
        Lane("norm ratio", "norm after over before; dashed: 1", [t.norm_ratio for t in tensors],
             chance=[None if t.norm_ratio is None else 1.0 for t in tensors]),
    ]  # fmt: skip


def agreement_lanes(tensors: Sequence[Any]) -> list[Lane]:
    """How far several changes agree along the depth of a model."""
    sizes = [[value for value in t.relative if value is not None] for t in tensors]
    ranges = [(min(known), max(known)) if known else None for known in sizes]
    return [
        Lane("change", "over the norm of the base: smallest, median, largest of the models",
             [median(known) if known else None for known in sizes], ranges, every=True),
        Lane("cosine", "of two changes, mean; dashed: by chance", [t.cosine_mean for t in tensors],
             chance=[None if t.cosine_mean is None else 0.0 for t in tensors]),
    ]  # fmt: skip


def angle_columns(tensors: Sequence[TensorMeasurement]) -> tuple[More, ...]:
    """The columns of norms and angles that only a page has."""
    norms = [value for t in tensors for value in t.norm_quantiles or () if value > 0]

    def box(t: TensorMeasurement) -> Any:
        if t.norm_quantiles and not t.norm_quantiles[-1]:
            return "0"  # which has no place on a logarithmic axis
        return spark(layer_norms(t.norm_quantiles, min(norms), max(norms)) if norms and t.norm_quantiles else None)

    def closest(t: TensorMeasurement) -> str:
        return "–" if t.closest is None else "{}, {}".format(*t.closest)

    boxes = say("minimum, quartiles and maximum of the norms, all layers on one scale")
    histogram = say(
        "histogram on ±4 standard deviations of chance, wider where the layer is; the line: random directions"
    )
    return (
        (say("closest"), say("the two filters with the largest |cos|"), "", closest),
        (say("norms"), boxes, "spark", box),
        (say("angles"), histogram, "spark", lambda t: spark(layer_angles(t))),
        (say("type"), say("of the layer"), "text", lambda t: t.kind),
    )


_EXPLAINED = say("all singular values in increasing order; the line: those of a random matrix (Marchenko–Pastur)")
SPECTRUM_COLUMNS: tuple[More, ...] = ((say("spectrum"), _EXPLAINED, "spark", lambda t: spark(layer_spectrum(t))),)
