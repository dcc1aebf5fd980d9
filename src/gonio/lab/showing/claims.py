"""The verdicts on claims: one offline page with a picture of each, lines for a terminal, JSON, and markdown."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from gonio.escaping import plain, redact, shorten
from gonio.lab.claims import SEEDS, ClaimResult, ClaimResults, as_data
from gonio.lab.claims.claim import Claim
from gonio.lab.judging.statistics import counted, points
from gonio.lab.running.filter_summary import ANGLE_EDGES
from gonio.lab.showing import figures
from gonio.lab.showing.page import environment, write_text
from gonio.lab.showing.tables import TONES, Table, rich_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Symbol and tone of each verdict, as the page of a comparison has them.
_MARKS = {
    "reproduced": ("✓", "good"),
    "contradicted": ("✗", "bad"),
    "no useful effect": ("=", "even"),
    "undecided": ("?", "even"),
    "not a fair test": ("!", "even"),
    "not tried": ("–", "even"),
}


def claims_html(found: ClaimResults) -> str:
    """The claims as one self-contained page, which loads nothing.

    The headline counts the verdicts. Each claim has its sentence, verdict, effect with interval, picture, cost, what
    the source measured, what differs from it, and the command that repeats it.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    shown = [
        {
            "found": one,
            "mark": _MARKS[one.verdict],
            "effect": effect_text(one),
            "tested": contrast_text(one.setting.decisive) if one.setting else "",
            "picture": claim_picture(one, name=f"p{at}"),
            "arms": arm_rows(one),
            "cost": cost_text(one),
            "claimed": claimed_text(one.claim),
        }
        for at, one in enumerate(found.results)
    ]
    page = {"found": found, "shown": shown, "seeds": SEEDS, "marks": _MARKS}
    return environment().get_template("claims.html.j2").render(page, whole=True)


def write_claims_html(found: ClaimResults, path: str | os.PathLike[str]) -> Path:
    """Write the page of :func:`claims_html` to a file, atomically."""
    return write_text(claims_html(found), path)


def claims_json(found: ClaimResults) -> str:
    """Every claim with its verdict, statistics and the score of each run, as JSON."""
    return json.dumps(as_data(found), indent=1, ensure_ascii=False, allow_nan=False)


def claims_table(found: ClaimResults) -> Table:
    """One row per claim: name, verdict, effect, p, runs, seconds."""
    rows = tuple(
        (one.claim.name, one.verdict, effect_text(one) or "–", _p(one), str(one.evidence.n), f"{one.seconds:.0f} s")
        for one in found.results
    )
    return Table("Claims", ("claim", "verdict", "effect", "Holm p", "seeds", "CPU time"), rows, texts=(0, 1, 2))


def claims_text(found: ClaimResults) -> RenderableType:
    """The headline, and a line per claim with the reason of its verdict."""
    return Group(*_lines(found))


def _lines(found: ClaimResults) -> Iterator[RenderableType]:
    yield Text(found.headline, style="bold")
    yield Text("")
    table = claims_table(found)
    tones = [Text(f"{_MARKS[f.verdict][0]} {f.verdict}", style=TONES[_MARKS[f.verdict][1]]) for f in found.results]
    yield rich_table(table, head=table.head, verdicts=tones)
    yield Text("")
    for one in found.results:
        yield Text.assemble((plain(one.claim.name), "bold"), f": {plain(one.claim.claim)}")
        yield Text(f"  {_MARKS[one.verdict][0]} {one.verdict}. {plain(one.evidence.reason)}")


def effect_text(found: ClaimResult) -> str:
    """The mean of the contrast with its unit and interval, e.g. `+2.5 points (+1.9 to +3.1)`; empty without one."""
    seen = found.evidence
    if seen.mean is None or seen.low is None or seen.high is None:
        return ""
    weights = found.setting.decisive.values() if found.setting else ()
    difference = math.isclose(sum(weights), 0.0, abs_tol=1e-9)  # of percentages; one arm's own number is a percentage
    unit = "points" if difference and found.unit in ("%", "% of runs") else found.unit
    text = f"{seen.mean:+.3g} {unit}".strip() + f" ({seen.low:+.3g} to {seen.high:+.3g})"
    return text.replace("-", "−").replace("e−", "e-")


def contrast_text(contrast: Mapping[str, float]) -> str:
    """The number that is tested.

    Example:
        >>> from gonio.lab.showing.claims import contrast_text
        >>> contrast_text({"sphere": 0.5, "ball": 0.5, "plain": -1})
        '1/2 · sphere + 1/2 · ball − plain'
    """
    text = ""
    for arm, weight in contrast.items():
        size = Fraction(abs(weight)).limit_denominator(100)
        text += f" {'+' if weight > 0 else '−'} {arm if size == 1 else f'{size} · {arm}'}"
    return text.removeprefix(" + ").strip()


def claimed_text(claim: Claim) -> str:
    """What would confirm the claim, in one sentence."""
    least = points(claim.sesoi, "%" if claim.measure == "trains" else "")
    if claim.direction == "same":
        return f"Confirmed by a difference within ±{least}."
    return f"Confirmed by a {'positive' if claim.direction == 'larger' else 'negative'} effect of at least {least}."


def arm_rows(found: ClaimResult) -> list[tuple[str, str, str]]:
    """Name, mean and range of each arm's scores."""
    rows = []
    for arm, values in found.scores.items():
        if values:
            mean, low, high = found.mean(arm), min(values.values()), max(values.values())
            rows.append((arm, f"{mean:.4g}", f"{low:.4g} to {high:.4g}"))
    return rows


def cost_text(found: ClaimResult) -> str:
    """How much was run, and what is missing."""
    if not found.plan:
        return ""
    runs = found.runs - found.missing
    lost = [f"{counted(count, 'run')} {word}" for count, word in
            ((found.failed, "failed"), (found.diverged, "diverged"), (found.missing, "to do")) if count]  # fmt: skip
    return ", ".join([f"{counted(runs, 'run')}, {found.seconds:.0f} s of CPU time", *lost])


def _p(found: ClaimResult) -> str:
    p = found.evidence.p_holm
    return "–" if p is None else f"{p:.3f}" if p >= 0.001 else "< 0.001"


def claim_explanation(claim: Claim) -> str:
    """Everything that a claim says about itself, for a terminal."""
    lines = [
        f"{claim.name}: {claim.claim}",
        f"source: {claim.source} ({claim.seed}: {SEEDS[claim.seed]})",
    ]
    for title, text in (("reported", claim.reported), ("differs", claim.differs), ("not tried", claim.not_tried)):
        lines += [f"{title}: {text}"] if text else []
    for title, setting in (("quick", claim.quick), ("full", claim.full)):
        if setting is not None:
            arms = ", ".join(arm.name for arm in setting.arms)
            terms = " ".join(f"{weight:+g}·{arm}" for arm, weight in setting.decisive.items())
            size = f"task {setting.task}, {counted(setting.seeds, 'seed')}"
            lines.append(f"{title}: {size}, arms {arms}; tested: {terms}")
    if not claim.not_tried:
        lines.append(f"measured: {claim.measure}; {claimed_text(claim)}")
        lines.append(f"try it: gonio reproduce {claim.name}")
    return redact("\n".join(lines))


# --- pictures ----------------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT = 420, 230
_COLUMNS, _LINE = 3, 17  # entries in a line of the legend; its height
_MANY = 6  # arms whose names stand on two lines
_COLORS = ("base", "c1", "c2", "c3", "c4", "c5", "c6", "c7")
_LOG = 8.0  # ratio of the largest to the smallest level from which their axis is logarithmic


def claim_picture(found: ClaimResult, *, name: str) -> Any:
    """The picture of a claim as an SVG element; empty if it was not tried.

    Args:
        name: prefix of the ids in the picture, unique on the page.
    """
    if not any(found.scores.values()):
        return ""
    draw = {"pairs": _pairs, "levels": _levels, "angles": _angles}[found.claim.picture]
    extra = _LINE * (math.ceil(_legends(found) / _COLUMNS) - 1) if _legends(found) else 0
    with figures.drawing():
        made = figures.figure(_WIDTH, _HEIGHT + extra)
        axes = figures.panel(made, 58, 44, 12, 22 + extra)
        draw(axes, found)
        return figures.inline(made, name=name, label=_label(found), css="fill")


def _legends(found: ClaimResult) -> int:
    """Number of entries of the picture's legend."""
    if found.claim.picture == "angles":
        return len(found.histograms)
    return len({arm.series or arm.name for arm in found.setting.arms if arm.level is not None}) if found.setting else 0


def _label(found: ClaimResult) -> str:
    means = ", ".join(f"{arm} {found.mean(arm):.3g}" for arm in found.scores or {} if found.mean(arm) is not None)
    return plain(f"{found.claim.measure} of each arm, mean over seeds in {found.unit or 'its own unit'}: {means}")


def _pairs(axes: Axes, found: ClaimResult) -> None:
    """A column of dots per arm; the dots of one seed are joined."""
    arms = {arm: values for arm, values in found.scores.items() if values}
    lines = 1 if len(arms) < _MANY else 2
    for at, (arm, values) in enumerate(arms.items()):
        color = figures.COLORS[_COLORS[at % len(_COLORS)]]
        axes.plot([at] * len(values), list(values.values()), "o", color=color, markersize=4.5, alpha=0.65, zorder=3)
        axes.plot([at - 0.16, at + 0.16], [statistics.fmean(values.values())] * 2, color=color, linewidth=3, zorder=4)
        last = lines > 1 and at == len(arms) - 1
        axes.annotate(shorten(plain(arm), longest=22), (at, 0), (22 if last else 0, -6 - 13 * (at % lines)),
                      xycoords=("data", "axes fraction"), textcoords="offset points", ha="right" if last else "center",
                      va="top", fontsize=10.5, color=figures.COLORS["muted"])  # fmt: skip
    for (at, first), second in zip(enumerate(arms.values()), list(arms.values())[1:], strict=False):
        for seed in first.keys() & second.keys():
            axes.plot([at, at + 1], [first[seed], second[seed]], color=figures.COLORS["rule"], linewidth=0.8, zorder=1)
    axes.set_xlim(-0.5, len(arms) - 0.5)
    axes.set_xticks([])
    axes.margins(y=0.12)
    if len({value for values in arms.values() for value in values.values()}) == 1:
        axes.set_ylim(axes.dataLim.y0 - 1, axes.dataLim.y0 + 1)
    if len(arms) == 1:
        axes.axhline(0.0, color=figures.COLORS["muted"], linewidth=1)
    _unit(axes, found)


def _levels(axes: Axes, found: ClaimResult) -> None:
    """A curve per series over the levels: the mean, and the range of the seeds."""
    from matplotlib.ticker import FixedLocator, NullLocator

    arms = found.setting.arms if found.setting else ()
    series: dict[str, list[tuple[float, Mapping[int, float]]]] = {}
    for arm in arms:
        values = found.scores.get(arm.name)
        if arm.level is not None and values:
            series.setdefault(arm.series or arm.name, []).append((arm.level, values))
    levels = sorted({level for curve in series.values() for level, _ in curve})
    for at, (label, curve) in enumerate(series.items()):
        color = figures.COLORS[_COLORS[at % len(_COLORS)]]
        curve.sort(key=lambda place: place[0])
        xs = [level for level, _ in curve]
        means = [statistics.fmean(values.values()) for _, values in curve]
        lows, highs = ([edge(values.values()) for _, values in curve] for edge in (min, max))
        axes.fill_between(xs, lows, highs, color=color, alpha=0.15, linewidth=0)
        axes.plot(xs, means, "o-", color=color, linewidth=2, markersize=5, label=shorten(plain(label), longest=28))
    if levels and levels[0] > 0 and levels[-1] / levels[0] >= _LOG:
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(FixedLocator(levels))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.set_xlabel(plain(found.claim.axis))
    axes.margins(y=0.12)
    _legend(axes)
    _unit(axes, found)


def _angles(axes: Axes, found: ClaimResult) -> None:
    """The angles between filters of each arm, pooled over layers and seeds, with the first arm filled."""
    histograms: Mapping[str, Sequence[int]] = found.histograms
    held = np.zeros(len(ANGLE_EDGES) - 1, dtype=bool)
    for at, (arm, counts) in enumerate(histograms.items()):
        density = np.asarray(counts, dtype=float)
        density /= max(density.sum(), 1.0) * np.diff(ANGLE_EDGES)
        held |= density > 0.001
        color = figures.COLORS[_COLORS[at % len(_COLORS)]]
        label = shorten(plain(arm), longest=28)
        if at == 0:
            axes.stairs(density, ANGLE_EDGES, fill=True, color=figures.COLORS["band"], linewidth=0)
        axes.stairs(density, ANGLE_EDGES, color=color, linewidth=1.8, label=label, baseline=None if at else 0)
    edges = [(low, high) for (low, high), shown in zip(pairwise(ANGLE_EDGES), held, strict=True) if shown]
    if edges:
        axes.set_xlim(edges[0][0] - 2, edges[-1][1] + 2)
    figures.angle_axis(axes, "angle between two filters of a layer")
    _legend(axes)


def _legend(axes: Axes) -> None:
    axes.legend(frameon=False, fontsize=10.5, loc="lower left", bbox_to_anchor=(0, 0.98), ncols=_COLUMNS,
                borderaxespad=0, handlelength=1.4, columnspacing=1.2, labelcolor=figures.COLORS["ink"])  # fmt: skip


def _unit(axes: Axes, found: ClaimResult) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.grid(axis="y", color=figures.COLORS["band"], linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_ylabel(f"{found.claim.measure.replace('_', ' ')}{f', {found.unit}' if found.unit else ''}")
