"""The page's charts: which results go into which figure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from gonio.compare.results import BASELINE, Effect, Results
from gonio.escaping import plain
from gonio.report.curves import curve_charts
from gonio.report.intervals import Axis, Row, intervals
from gonio.report.layers import Layer, angle_chart, layers, norm_chart
from gonio.report.words import Scale, count

__all__ = ["cost_chart", "curve_groups", "forest", "layer_cards"]

_EQUAL_TIME = (
    "The same curves, each epoch as long as its measured time per step makes it: the end of the baseline's line is the "
    "time that it took. Each run keeps its own schedule, so what a slower recipe has there is not what a shorter "
    "training of it would reach."
)
SHOWN_LAYERS = 16  # with 6 recipes about 25 kB each


def forest(results: Results, colors: dict[str, str], scale: Scale, *, narrow: bool) -> Any:
    """The effects with their intervals, and the band of effects too small to matter; empty without effects."""
    if not results.effects:
        return ""
    plan = results.plan
    rows = [_effect_row(e, colors[e.recipe], scale) for e in results.effects]
    worse, better = ("← worse", "better →") if plan.direction == "max" else ("← better", "worse →")
    axis = Axis(
        f"difference from the baseline, {scale.unit}", reference=0.0, band=(-plan.sesoi, plan.sesoi),
        band_label=f"too small to matter: ±{scale.score(plan.sesoi)}", ends=(worse, better),
    )  # fmt: skip
    label = "Effect of each recipe with its 95 % interval: " + "; ".join(
        f"{plain(e.recipe)} {scale.signed(e.mean)} ({scale.interval(e.low, e.high) or 'no interval'})"
        for e in results.effects
    )
    css, width, name = ("narrow fill", 343, "fn") if narrow else ("wide fill", 920, "fw")
    return _markup(intervals(rows, axis, width=width, name=name, label=label, css=css))


def _effect_row(effect: Effect, color: str, scale: Scale) -> Row:
    outer = (effect.low, effect.high) if effect.low is not None and effect.high is not None else None
    note = f"{scale.signed(effect.mean)}  {effect.verdict}" if effect.mean is not None else effect.verdict
    return Row(effect.recipe, color, effect.mean, outer=outer, dots=effect.differences, note=plain(note))


def cost_chart(results: Results, colors: dict[str, str], which: str) -> Any:
    """Step time or memory of each recipe relative to the baseline; empty if none was measured."""
    rows = []
    for effect in results.effects:
        cost = effect.step_time if which == "step_time" else effect.memory
        if cost is not None:
            note = f"×{cost.median:.2f}"
            rows.append(Row(effect.recipe, colors[effect.recipe], cost.median, (cost.low, cost.high), note=note))
    if not rows:
        return ""
    what = "Time per training step" if which == "step_time" else "Memory"
    label = f"{what} relative to the baseline: " + "; ".join(f"{plain(r.label)} {r.note}" for r in rows)
    axis = Axis("relative to the baseline", reference=1.0, log=True)
    return _markup(intervals(rows, axis, width=350, name=which[0] + "c", label=label, css="fill"))


def curve_groups(results: Results, colors: dict[str, str]) -> list[SimpleNamespace]:
    """The charts of validation scores and training losses over epochs, and of the scores over time."""
    score = f"Validation score, {plain(results.plan.unit)}"
    paces = {e.recipe: e.step_time.median for e in results.effects if e.step_time is not None}
    groups = [
        _curves(results, colors, "val_score", score),
        _curves(results, colors, "train_loss", "Training loss (without penalty)"),
        _curves(results, colors, "val_score", score, paces) if paces else None,
    ]
    return [group for group in groups if group is not None]


def _curves(
    results: Results, colors: dict[str, str], key: str, axis: str, paces: dict[str, float] | None = None
) -> SimpleNamespace | None:
    """One group of charts; None without a curve."""
    charts = curve_charts(results.runs, colors, key=key, axis=axis, paces=paces)
    if not charts:
        return None
    return SimpleNamespace(
        title=axis if paces is None else f"{axis}, at equal time",
        note="" if paces is None else _EQUAL_TIME,
        charts=[SimpleNamespace(recipe=r, color=colors[r], svg=_markup(text)) for r, text in charts.items()],
    )


def layer_cards(results: Results, colors: dict[str, str]) -> tuple[list[SimpleNamespace], str]:
    """One card per layer, and the note on layers that are not shown."""
    found = layers(results.runs)
    kept = {layer.path for layer in sorted(found, key=lambda layer: -layer.moved)[:SHOWN_LAYERS]}
    note = f"{len(kept)} of {count(len(found), 'layer')} are shown: those that a recipe moved most. "
    note = f"{note}All are in the JSON." if len(kept) < len(found) else ""
    every = {BASELINE: "base"} | colors
    cards = [_card(layer, every, i) for i, layer in enumerate(layer for layer in found if layer.path in kept)]
    return cards, note


def _card(layer: Layer, colors: dict[str, str], index: int) -> SimpleNamespace:
    named = {recipe: color for recipe, color in colors.items() if recipe in layer.recipes}
    recipes = {recipe: color for recipe, color in named.items() if recipe != BASELINE}
    return SimpleNamespace(
        path=layer.path,
        shape=f"{' × '.join(map(str, layer.shape))}, filters in {count(layer.dim, 'dimension')}",
        angles=_markup(angle_chart(layer, recipes, name=f"a{index}")),
        norms=_markup(norm_chart(layer, named, name=f"n{index}")),
        rows=[_numbers(recipe, layer) for recipe in named],
    )


def _numbers(recipe: str, layer: Layer) -> SimpleNamespace:
    pooled = layer.recipes[recipe]
    norms = pooled.norms
    return SimpleNamespace(
        recipe=recipe,
        mean=f"{pooled.angle_mean:.1f}°" if pooled.pairs else "–",
        std=f"{pooled.angle_std:.1f}°" if pooled.pairs else "–",
        norm=f"{norms[len(norms) // 2]:.3g}" if norms else "–",
        range=f"{norms[0]:.3g} to {norms[-1]:.3g}" if norms else "–",
    )


def _markup(svg: str) -> Any:
    """Figures are drawn by this package, with every label cleaned and escaped on the way in."""
    from markupsafe import Markup

    return Markup(svg)
