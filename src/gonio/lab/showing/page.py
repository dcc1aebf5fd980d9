"""The results as one HTML file that needs no network and no other file, and its pictures."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from gonio import pages
from gonio.escaping import plain, shorten, write_text
from gonio.lab.judging.results import Results
from gonio.lab.record import RunRecord
from gonio.lab.showing import tables
from gonio.lab.showing.tables import Scale, attacks, costs, evidence, further, hidden_gradients, tuning, verdicts
from gonio.messages import fixed, joined, say
from gonio.pages.picture import svg
from gonio.pages.pictures import Floats, Interval, angles, effects, intervals, learning_curves
from gonio.pages.pictures import colors as colors_of
from gonio.pages.tables import TextTable, number
from gonio.recipes import BASELINE

if TYPE_CHECKING:
    from jinja2 import Environment

_SHOWN_LAYERS = 16  # with 6 recipes about 25 kB each
_EQUAL_TIME = say(
    "The same curves with each epoch as long as its measured time per step; the baseline's line ends at the time that "
    "the baseline took. Each run keeps its own schedule: a shorter training of a slower recipe would not follow this "
    "curve."
)


def html(results: Results) -> str:
    """The comparison as one self-contained page.

    Verdicts, effects, costs, learning curves, angles and norms of the layers, the changes of each recipe, and
    everything that is needed to repeat the study. The page loads nothing, runs only its own script (with a content
    security policy), is complete without it, and follows the reader's light or dark setting. The same results give
    the same bytes.

    Names, errors and notes come from other people's files: every value is escaped, without control and
    bidirectional characters, home directories and credentials in URLs.

    Example:
        >>> page = gonio.lab.showing.html(gonio.lab.showing.example())
        >>> "decoupled-tanh helps" in page, "http:" in page, len(page) < 200_000
        (True, False, True)
    """
    colors = colors_of([BASELINE, *(effect.recipe for effect in results.effects)])
    table, found = verdicts(results), layers(results.runs)
    both = zip(table.rows, results.effects, strict=True)
    notes = [joined([row[1], fixed(effect.verdict)], "  ") for row, effect in both]
    page = {
        "results": results,
        "plan": results.plan,
        "scale": Scale.of(results),
        "colors": colors,
        "verdicts": list(zip(results.effects, table.rows, strict=True)),
        "evidence": evidence(results),
        "further": further(results),
        "costs": costs(results),
        "tuning": tuning(results),
        "attacks": attacks(results),
        "hidden_gradients": hidden_gradients(results),
        "forests": [forest(results, notes, narrow=narrow) for narrow in (False, True)],
        "time_chart": cost_chart(results, colors, "step_time"),
        "memory_chart": cost_chart(results, colors, "memory"),
        "curves": curves(results, colors),
        "layers": list(layer_pictures(found, colors)),
        "all_layers": len(found),
    }
    return environment().get_template("page.html.j2").render(page, whole=True)


def write_html(results: Results, path: str | os.PathLike[str]) -> Path:
    """Write the page of :func:`html` to a file, atomically.

    Returns:
        The path.

    Example:
        >>> import tempfile, pathlib
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> gonio.lab.showing.write_html(gonio.lab.showing.example(), folder / "page.html").name
        'page.html'
        >>> [path.name for path in folder.iterdir()]
        ['page.html']
    """
    return write_text(html(results), path)


@cache
def environment() -> Environment:
    """The templates of all pages, with the words, colours and recipes that pages of studies show."""
    from markupsafe import Markup

    def key(color: str, *, dashed: bool = False) -> Markup:
        """The line with the colour of a recipe; decoration, the name stands beside it."""
        dash = Markup(' stroke-dasharray="4 3"') if dashed else ""
        return Markup(
            '<svg class="key" viewBox="0 0 24 10" aria-hidden="true"><line x1="1" y1="5" x2="23" y2="5" '
            'stroke="var(--{})" stroke-width="{}"{}/></svg>'
        ).format(plain(color), "2" if dashed else "4.5", dash)

    made = pages.environment("gonio.lab.showing")
    made.globals.update(key=key, tables=tables, asdict=asdict, BASELINE=BASELINE, yaml_of=_yaml_of)
    return made


def _yaml_of(content: Any) -> str:
    """The content as YAML, keys in their own order; by way of JSON, so that it is plain data."""
    data = json.loads(json.dumps(content, default=str))
    return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100)).rstrip()


# --- pictures --------------------------------------------------------------------------------------------------------


def forest(results: Results, notes: Sequence[str], *, narrow: bool) -> Any:
    """The effects with their intervals, and the band of effects too small to matter; empty without effects."""
    if not results.effects:
        return ""
    plan, scale = results.plan, Scale.of(results)
    said = say("too small to matter: ±{least}", least=scale.score(plan.sesoi)) if plan.sesoi else ""
    picture = effects(results.effects, unit=scale.unit, band=plan.sesoi, band_label=said, notes=notes,
                      better=plan.direction, inside=narrow)  # fmt: skip
    told = [joined([effect.recipe, note], " ") for effect, note in zip(results.effects, notes, strict=True)]
    numbers = joined(told, "; ")
    width, css = (343, "narrow fill") if narrow else (920, "wide fill")
    return svg(replace(picture, description=numbers), width=width, css=css)


def cost_chart(results: Results, colors: Mapping[str, str], which: str) -> Any:
    """The `step_time` or `memory` of each recipe relative to the baseline; empty if none was measured."""
    costs = [(e.recipe, cost) for e in results.effects if (cost := getattr(e, which)) is not None]
    rows = [Interval(name, colors[name], c.median, (c.low, c.high), note=f"×{c.median:.2f}") for name, c in costs]
    what = say("Time per training step") if which == "step_time" else say("Memory")
    told = {"what": what, "numbers": "; ".join(f"{row.label} {row.note}" for row in rows)}
    title, label = say("{what} relative to the baseline: {numbers}", **told), say("relative to the baseline")
    picture = intervals(rows, label, title=title, reference=1.0, log=True, form="×{}", inside=True)
    return svg(picture, width=350) if rows else ""


@dataclass(frozen=True)
class Curves:
    """The curves of one quantity: an SVG per recipe."""

    title: str
    note: str
    charts: Mapping[str, Any]


def curves(results: Results, colors: Mapping[str, str]) -> list[Curves]:
    """Score and loss over epochs, and the score over measured times; the baseline in each chart.

    Args:
        colors: of each recipe and the baseline.
    """
    plan, runs = results.plan, results.runs
    recipes = [name for name in colors if name != BASELINE]
    paces = {e.recipe: e.step_time.median for e in results.effects if e.step_time is not None}
    score = say("validation score, {unit}", unit=fixed(plan.unit)) if plan.unit else say("validation score")
    loss = say("training loss")

    def charts(names: Sequence[str], key: str, label: str, pace: Mapping[str, float] | None = None) -> dict[str, Any]:
        made = {
            name: learning_curves(runs, {BASELINE: colors[BASELINE], name: colors[name]}, key=key, label=label,
                                  among=names, paces=pace)
            for name in names
        }  # fmt: skip
        return {name: svg(picture, width=330) for name, picture in made.items() if picture is not None}

    timed = [name for name in recipes if name in paces]
    groups = [
        Curves(score, "", charts(recipes, "val_score", score)),
        Curves(loss, "", charts(recipes, "train_loss", loss)),
        Curves(say("{score}, at equal time", score=score), _EQUAL_TIME, charts(timed, "val_score", score, paces)),
    ]
    return [group for group in groups if group.charts]


# --- filters of each layer -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Pooled:
    """One layer under one recipe, over the recipe's seeds: angle density per degree and norm quantiles."""

    density: Floats
    norms: tuple[float, ...]
    angle_mean: float
    angle_std: float
    pairs: int


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer under every recipe that has it; `edges` in degrees."""

    path: str
    shape: tuple[int, ...]
    dim: int
    edges: Floats
    recipes: Mapping[str, Pooled]

    @property
    def moved(self) -> float:
        """Largest change of the layer's angles and norms by any recipe."""
        base = self.recipes.get(BASELINE)
        others = [pooled for name, pooled in self.recipes.items() if name != BASELINE]
        if base is None:
            return math.inf
        return max((_distance(base, other, self.edges) for other in others), default=0.0)

    @property
    def numbers(self) -> TextTable:
        """The numbers of both pictures."""
        rows = [
            (name, *((f"{p.angle_mean:.1f}°", f"{p.angle_std:.1f}°") if p.pairs else ("–", "–")), *_norms(p.norms))
            for name, p in self.recipes.items()
        ]
        angles_, norms_ = (
            (say("mean angle"), say("sd of angles")),
            (say("median norm"), say("smallest and largest norm")),
        )
        head = (say("recipe"), *angles_, *norms_)
        return TextTable(say("Numbers"), head, tuple(rows))


def _norms(norms: Sequence[float]) -> tuple[str, str]:
    if not norms:
        return "–", "–"
    return number(norms[len(norms) // 2]), say("{low} to {high}", low=number(norms[0]), high=number(norms[-1]))


def _distance(a: Pooled, b: Pooled, edges: Floats) -> float:
    variation = 0.5 * float((np.abs(a.density - b.density) * np.diff(edges)).sum())
    middles = [p.norms[len(p.norms) // 2] if p.norms else 0.0 for p in (a, b)]
    return variation + (abs(math.log(middles[0] / middles[1])) if min(middles) > 0 else 0.0)


def layers(runs: Sequence[RunRecord]) -> list[Layer]:
    """The layers of all finished runs in the order of the model, pooled over seeds."""
    found: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    edges: Floats = np.zeros(0)
    for run in runs:
        own = np.asarray(run.geometry.get("angle_edges", ()), dtype=float)
        edges = edges if len(edges) else own
        if len(own) and np.array_equal(own, edges):
            for path, record in run.geometry.get("layers", {}).items():
                found.setdefault(path, {}).setdefault(run.recipe, []).append(record)
    made = []
    for path, recipes in found.items():
        first = next(iter(recipes.values()))[0]
        pooled = {name: _pool(records, edges) for name, records in recipes.items()}
        made.append(Layer(path, tuple(first["shape"]), int(first["dim"]), edges, pooled))
    return made


def _pool(records: Sequence[Mapping[str, Any]], edges: Floats) -> Pooled:
    counts = np.sum([np.asarray(r["angle_counts"], dtype=float) for r in records], axis=0)
    total = counts.sum()
    middle = (edges[1:] + edges[:-1]) / 2
    mean = float((counts * middle).sum() / total) if total else math.nan
    spread = float((counts * (middle - mean) ** 2).sum() / total) if total else math.nan
    norms = np.median([r["norms"] for r in records if r["norms"]] or [[]], axis=0)
    return Pooled(
        density(counts, edges),
        tuple(float(v) for v in norms),
        mean,
        math.sqrt(spread) if total else math.nan,
        int(total),
    )


def density(counts: Floats, edges: Floats) -> Floats:
    """The share of the pairs per degree in each bin; 0 without pairs."""
    return np.asarray(counts / (max(counts.sum(), 1) * np.diff(edges)))


def layer_pictures(found: Sequence[Layer], colors: Mapping[str, str]) -> Iterator[tuple[Layer, Any, Any]]:
    """The layers that a recipe changed most, in the order of the model, each with its angles and its norms."""
    kept = {layer.path for layer in sorted(found, key=lambda layer: -layer.moved)[:_SHOWN_LAYERS]}
    for layer in found:
        if layer.path not in kept:
            continue
        path, shown = shorten(layer.path, longest=60), [name for name in colors if name in layer.recipes]
        densities = {name: (colors[name], layer.recipes[name].density.tolist()) for name in shown}
        title = say("Angles between the filters of {path}, each recipe against random directions", path=path)
        histogram = angles(layer.edges.tolist(), densities, dim=layer.dim, title=title)
        rows = [_norm_row(name, colors[name], layer.recipes[name].norms) for name in shown]
        title = say("Filter norms of {path} by recipe: least to largest, quartiles and median", path=path)
        norms = intervals(rows, say("norm of a filter"), title=title, inside=True)
        yield layer, svg(histogram, width=350), svg(norms, width=350)


def _norm_row(recipe: str, color: str, norms: Sequence[float]) -> Interval:
    if len(norms) < 5:
        return Interval(recipe, color, norms[len(norms) // 2] if norms else None)
    note = number(norms[2])
    return Interval(recipe, color, norms[2], (norms[0], norms[-1]), (norms[1], norms[3]), note=note)
