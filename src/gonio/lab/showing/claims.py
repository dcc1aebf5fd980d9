"""The verdicts on claims: one offline page with a picture of each, lines for a terminal, JSON, and markdown."""

from __future__ import annotations

import json
import math
import re
import shlex
import statistics
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from gonio.escaping import csv_table, markdown_cell, plain, redact, tex_cell
from gonio.lab.claims import SCOPES, SEEDS, ClaimResult, ClaimResults, as_data, recorded
from gonio.lab.claims.claim import Claim
from gonio.lab.judging.statistics import signed, sized
from gonio.lab.record import ANGLE_EDGES
from gonio.lab.running.measures import measures
from gonio.lab.showing.page import density, environment
from gonio.lab.showing.tables import TONES, p_value
from gonio.messages import Message, counted, fixed, joined, local, say, tag
from gonio.pages.picture import Picture, svg
from gonio.pages.pictures import angles, colors, over_levels, pairs
from gonio.pages.tables import TextTable, unit_of_difference

# Symbol and tone of each verdict, as the page of a comparison has them.
_MARKS = {
    "reproduced": ("✓", "good"),
    "contradicted": ("✗", "bad"),
    "no useful effect": ("=", "even"),
    "undecided": ("?", "even"),
    "too noisy": ("~", "even"),
    "not a fair test": ("!", "even"),
    "not tried": ("–", "even"),
}


def claims_html(found: ClaimResults) -> str:
    """The claims as one self-contained page, which loads nothing.

    The headline counts the verdicts. Each claim has its sentence, verdict, effect with interval, picture, cost, what
    the source measured, what differs from it, and the command that repeats it.
    """
    shown = [
        {
            "found": one,
            "mark": _MARKS[one.evidence.verdict],
            "effect": effect_text(one),
            "tested": contrast_text(one.contrast),
            "picture": claim_picture(one),
            "task_picture": task_picture(one),
            "arms": arm_table(one),
            "cost": cost_text(one),
            "claimed": claimed_text(one.claim),
        }
        for one in found.results
    ]
    page = {"found": found, "shown": shown, "seeds": SEEDS, "scopes": SCOPES, "sentence_of": sentence_of}
    page["measured_text"] = measured_text
    return environment().get_template("claims.html.j2").render(page, whole=True)


def claims_json(found: ClaimResults) -> str:
    """Every claim with its verdict, statistics and the score of each run, as JSON."""
    return json.dumps(as_data(found), indent=1, ensure_ascii=False, allow_nan=False)


_COLUMNS = (
    "claim", "scope", "verdict", "effect", "low", "high", "unit", "p", "p_holm", "seeds", "sesoi", "direction", "noise",
    "task", "model", "own", "reason", "sentence", "command",
)  # fmt: skip


def claims_csv(found: ClaimResults) -> str:
    """One line per claim; no cell runs as a formula in a spreadsheet."""
    rows = [
        [
            one.claim.name, one.claim.scope, one.verdict, e.mean, e.low, e.high, unit_of_difference(one.unit),
            e.p, e.p_holm, e.n, e.sesoi, e.direction, e.noise, one.task, one.model, " ".join(one.own), e.reason,
            one.claim.claim, one.command,
        ]
        for one in found.results
        for e in (one.evidence,)
    ]  # fmt: skip
    return csv_table(_COLUMNS, rows)


def claims_markdown(found: ClaimResults) -> str:
    """The verdicts with their reasons, and the scores of the arms of each claim."""
    lines = [f"**{markdown_cell(found.headline)}**", "", *claims_table(found).markdown()[2:]]
    for one in found.tried:
        lines += ["", f"**{one.claim.name}**: {markdown_cell(one.claim.claim)}", "", markdown_cell(_sentence(one)), ""]
        lines += arm_table(one).markdown()[2:]
    return "\n".join(lines).rstrip("\n") + "\n"


_FLOATS = 16  # LaTeX keeps no more than 18 tables (52 since 2015) that have no place yet


def claims_latex(found: ClaimResults) -> str:
    r"""The verdicts, and the scores of the arms of each claim with a caption, as LaTeX with booktabs."""
    lines = claims_table(found).latex()
    for place, one in enumerate(found.tried):
        if place and place % _FLOATS == 0:
            lines += ["", r"\clearpage"]
        caption = f"{one.claim.name}: {one.claim.claim} Verdict: {_sentence(one)}"
        table = "\n".join(line for line in arm_table(one).latex() if not line.startswith("%"))
        lines += ["", r"\begin{table}", r"\centering", table, rf"\caption{{{tex_cell(caption)}}}", r"\end{table}"]
    return "\n".join([*lines, f"% {tex_cell(found.headline)}"]) + "\n"


CLAIM_FORMATS = {
    "html": claims_html, "json": claims_json, "csv": claims_csv, "md": claims_markdown, "tex": claims_latex,
}  # fmt: skip


def _sentence(one: ClaimResult) -> Message:
    """Verdict and reason, as every output has them."""
    own = [say("{name} of your own: {value}", name=fixed(name), value=value) for name, value in one.own.items()]
    told = {
        "verdict": fixed(one.verdict),
        "scope": joined([fixed(one.claim.scope), *own], "; "),
        "reason": one.evidence.reason,
    }
    effect = effect_text(one)
    if not effect:
        return say("{verdict} ({scope}). {reason}", **told)
    return say("{verdict} ({scope}): {effect}. {reason}", effect=effect, **told)


_HEAD = (say("claim"), say("scope"), say("verdict"), say("effect"), say("Holm p"), say("seeds"), say("CPU time"))


def claims_table(found: ClaimResults) -> TextTable:
    """One row per claim: name, scope, verdict, effect, p, runs, seconds."""
    rows = tuple(
        (
            one.claim.name,
            fixed(one.claim.scope),
            one.verdict,
            effect_text(one) or "–",
            p_value(one.evidence.p_holm),
            str(one.evidence.n),
            f"{one.seconds:.0f} s",
        )
        for one in found.results
    )
    return TextTable(say("Claims"), _HEAD, rows, texts=(0, 1, 2, 3))


def sentence_of(claim: Claim) -> str:
    """The sentence of a claim in the language of the reader."""
    return claim.claim if tag() == "en" else claim.claim_zh or claim.claim


def claim_line(one: ClaimResult) -> str:
    """The verdict of a claim with its reason, as one line of a terminal."""
    return f"  {_MARKS[one.evidence.verdict][0]} {plain(local(_sentence(one)))}"


def claims_text(found: ClaimResults) -> RenderableType:
    """The headline, and a line per claim with the reason of its verdict."""
    table = claims_table(found)
    tones = [
        Text(f"{_MARKS[f.evidence.verdict][0]} {local(f.verdict)}", style=TONES[_MARKS[f.evidence.verdict][1]])
        for f in found.results
    ]
    lines: list[RenderableType] = [Text(local(found.headline), style="bold"), Text("")]
    lines += [table.rich(head=table.head, verdicts=tones), Text("")]
    for one in found.results:
        lines.append(Text.assemble((plain(one.claim.name), "bold"), f": {plain(sentence_of(one.claim))}"))
        lines.append(Text(claim_line(one)))
    return Group(*lines)


_ROUNDING = 1e-9


def effect_text(found: ClaimResult) -> Message:
    """The mean of the contrast with its unit and interval, e.g. `+2.5 points (+1.9 to +3.1)`; empty without one.

    What lies within rounding of 0 is shown as 0.
    """
    seen = found.evidence
    if seen.mean is None or seen.low is None or seen.high is None:
        return fixed("")
    difference = math.isclose(
        sum(found.contrast.values()), 0.0, abs_tol=1e-9
    )  # of percentages; one arm's own number is a percentage
    unit = unit_of_difference(found.unit) if difference else found.unit
    if max(abs(seen.mean), abs(seen.low), abs(seen.high)) < _ROUNDING:
        margin = f"{_ROUNDING:g}".replace("e-09", "e-9")
        return say("{effect} (within ±{margin})", effect=sized("0", unit), margin=margin)
    mean, low, high = map(signed, (seen.mean, seen.low, seen.high))
    return say("{effect} ({low} to {high})", effect=sized(mean, unit), low=low, high=high)


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
    unit, setting = measures()[claim.measure].unit, claim.full or claim.quick
    alone = setting is not None and not math.isclose(sum(setting.decisive.values()), 0.0, abs_tol=1e-9)
    least = sized(f"{claim.sesoi:.3g}", unit if alone else unit_of_difference(unit))
    if claim.direction == "same":
        return say("Confirmed by a difference within ±{least}.", least=least)
    if claim.direction == "larger":
        return say("Confirmed by a positive effect of at least {least}.", least=least)
    return say("Confirmed by a negative effect of at least {least}.", least=least)


def arm_table(found: ClaimResult) -> TextTable:
    """Mean and range of each arm's scores, and the task's score beside another quantity; judged arms are marked."""
    judged = found.judged_seeds.runs
    aside = {} if judged.reached == judged.scores else judged.reached
    rows = [
        (
            say("{arm} (judged)", arm=arm) if arm in found.contrast and len(found.scores) > 2 else arm,
            f"{found.mean(arm):.4g}",
            *((f"{statistics.fmean(aside[arm].values()):.4g}" if aside.get(arm) else "–",) if aside else ()),
            say("{low} to {high}", low=f"{min(values.values()):.4g}", high=f"{max(values.values()):.4g}"),
        )
        for arm, values in judged.scores.items()
        if values
    ]
    mean = say("mean, {unit}", unit=fixed(found.unit)) if found.unit else say("mean")
    score = say("task score, {unit}", unit=fixed(found.runs.reached_unit)) if found.runs.reached_unit else None
    task = (score or say("task score"),) if aside else ()
    seeds = say("range of {seeds}", seeds=counted(found.evidence.n, "seed"))
    return TextTable(say("Scores"), (say("arm"), mean, *task, seeds), tuple(rows))


def measured_text(summary: str) -> Message:
    """What a measure is, by the first sentence of its docstring, without the marks of its source."""
    return fixed(_ROLE.sub("", summary).replace("`", ""))


_ROLE = re.compile(r":\w+:(?=`)")


def cost_text(found: ClaimResult) -> str:
    """How much was run, and what is missing."""
    if not found.plan:
        return ""
    runs = found.planned - found.missing
    said = [say("{runs}, {seconds:.0f} s of CPU time", runs=counted(runs, "run"), seconds=found.seconds)]
    said += [say("{runs} failed", runs=counted(found.failed, "run"))] if found.failed else []
    said += [say("{runs} diverged", runs=counted(found.diverged, "run"))] if found.diverged else []
    said += [say("{runs} to do", runs=counted(found.missing, "run"))] if found.missing else []
    return joined(said)


def claim_explanation(claim: Claim, called: str = "") -> str:
    """Everything that a claim says about itself, for a terminal; `called`: its file or PACKAGE:NAME, if it has one."""
    verdict, effect = recorded(called or claim.name)
    document = "" if claim.seed == "other" else f" ({claim.seed}: {local(SEEDS[claim.seed])})"
    lines = [
        say("{name}: {text}", name=claim.name, text=sentence_of(claim)),
        say("source: {text}", text=f"{claim.source}{document}"),
        say("scope: {scope}, {meaning}", scope=fixed(claim.scope), meaning=fixed(SCOPES[claim.scope])),
        say("verdict here: {verdict}", verdict=joined([fixed(verdict), *([effect] if effect else [])], "; ")),
    ]
    lines += [say("reported: {text}", text=claim.reported)] if claim.reported else []
    lines += [say("differs: {text}", text=fixed(claim.differs))] if claim.differs else []
    lines += [say("not tried: {text}", text=claim.not_tried)] if claim.not_tried else []
    for title, setting in ((say("quick"), claim.quick), (say("full"), claim.full)):
        if setting is not None:
            told = {"title": title, "task": setting.task, "seeds": counted(setting.seeds, "seed")}
            told["arms"] = ", ".join(arm.name for arm in setting.arms)
            told["terms"] = " ".join(f"{weight:+g}·{arm}" for arm, weight in setting.decisive.items())
            lines += [say("{title}: task {task}, {seeds}, arms {arms}; tested: {terms}", **told)]
    if fair := claim.fair.model_dump(exclude_defaults=True):
        lines += [say("fair test: {rules}", rules="; ".join(f"{key}: {value}" for key, value in fair.items()))]
    if not claim.not_tried:
        lines += [say("measured: {measure}; {confirmed}", measure=claim.measure, confirmed=claimed_text(claim))]
        lines += [say("try it: {command}", command=f"gonio reproduce {shlex.quote(called or claim.name)}")]
    return redact("\n".join(map(local, lines)))


# --- pictures ----------------------------------------------------------------------------------------------------


def claim_picture(found: ClaimResult) -> Any:
    """The picture of a claim as an SVG element; empty if it was not tried."""
    scores = {arm: values for arm, values in found.scores.items() if values}
    if not scores:
        return ""
    means = ", ".join(f"{arm} {found.mean(arm):.3g}" for arm in scores)
    measured = fixed(found.claim.measure.replace("_", " "))
    label = joined([measured, *([fixed(found.unit)] if found.unit else [])])
    title = say("{label}: mean over the seeds of {means}", label=label, means=means)
    if found.claim.picture == "angles":
        shown = {arm: counts for arm, counts in found.histograms.items() if arm in found.contrast}
        hues = colors(shown)
        densities = {
            arm: (hues[arm], density(np.asarray(counts), np.asarray(ANGLE_EDGES)).tolist())
            for arm, counts in shown.items()
        }
        picture = angles(ANGLE_EDGES, densities, title=title)
    elif found.setting is not None and found.setting.dosed:
        picture = _over_doses(found, found.scores, label)
    elif found.claim.picture == "levels":
        series: dict[str, list[tuple[float, Sequence[float]]]] = {}
        for arm in found.setting.arms if found.setting else ():
            if arm.level is not None and arm.name in scores:
                series.setdefault(arm.series or arm.name, []).append((arm.level, [*scores[arm.name].values()]))
        picture = over_levels(series, axis=fixed(found.claim.axis), label=label, title=title)
    else:
        picture = pairs(scores, label=label, title=title)
    return svg(picture, width=420, legend=True)


def task_picture(found: ClaimResult) -> Any:
    """The task's score over the doses of a claim on another quantity; empty for other claims."""
    if found.setting is None or not found.setting.dosed or not found.runs.reached or not found.scores:
        return ""
    unit = found.runs.reached_unit
    label = say("task score, {unit}", unit=fixed(unit)) if unit else say("task score")
    return svg(_over_doses(found, found.runs.reached, label), width=420, legend=True)


def _over_doses(found: ClaimResult, scores: Mapping[str, Mapping[int, float]], label: str) -> Picture:
    """A curve for each arm with doses, and a line at the score of each other arm."""
    arms = found.setting.arms if found.setting else ()
    curves: dict[str, list[tuple[float, Sequence[float]]]] = {}
    doses = sorted(arm.level or 0.0 for arm in arms if arm.of)
    for arm in (arm for arm in arms if scores.get(arm.name)):
        values = [*scores[arm.name].values()]
        places = [arm.level or 0.0] if arm.of else [doses[0], doses[-1]]
        curves.setdefault(arm.side, []).extend((place, values) for place in places)
    title = say("{label} over the dose of {sides}", label=fixed(label), sides=", ".join(side for side in curves))
    axis = fixed(found.claim.axis) if found.claim.axis else say("dose")
    return over_levels(curves, axis=axis, label=label, title=title)
