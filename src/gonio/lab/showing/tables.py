"""How results are written: numbers and sentences, tables, and both on a terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from gonio.escaping import plain
from gonio.lab.judging.results import Amount, Effect, Ratio, RecipeTuning, Results, Robust, SecondaryMetric, TimeToScore
from gonio.messages import Message, counted, fixed, joined, local, say
from gonio.pages.tables import TextTable, duration, unit_of_difference
from gonio.recipes import BASELINE

# Symbol and tone: a verdict is never shown by colour alone.
_MARKS = {
    "helps": ("▲", "good"),
    "hurts": ("▼", "bad"),
    "no useful effect": ("=", "even"),
    "undecided": ("?", "even"),
    "not a fair test": ("!", "bad"),
}


def mark(verdict: str) -> tuple[str, str]:
    """The symbol and the tone (good, bad, even) of a verdict; neutral ones for an unknown verdict."""
    return _MARKS.get(verdict, ("·", "even"))


@dataclass(frozen=True)
class Scale:
    """How scores and their differences are written.

    Example:
        >>> from gonio.lab.showing.tables import Scale
        >>> scale = Scale(unit="points", decimals=2)
        >>> scale.signed(0.618), scale.interval(-0.1, 1.0)
        ('+0.62', '−0.10 to +1.00')
    """

    unit: str
    decimals: int

    @classmethod
    def of(cls, results: Results) -> Scale:
        """The scale of a study: differences of percentages are points; half of its smallest effect has two digits."""
        unit = plain(results.plan.unit)
        grain = abs(results.plan.sesoi) or results.baseline_sd or 0.0  # a script may have no effect of interest
        decimals = 1 - math.floor(math.log10(grain / 2)) if grain > 0 and math.isfinite(grain) else 2
        return cls(unit_of_difference(unit), min(max(decimals, 0), 6))

    def score(self, value: float | None) -> str:
        """A score or a width, without a sign for positive values."""
        return "–" if value is None else f"{value:.{self.decimals}f}".replace("-", "−")

    def signed(self, value: float | None) -> str:
        """A difference, with its sign."""
        return "–" if value is None else f"{value:+.{self.decimals}f}".replace("-", "−")

    def interval(self, low: float | None, high: float | None) -> str:
        """An interval of differences; empty if there is none."""
        both = None if low is None or high is None else {"low": self.signed(low), "high": self.signed(high)}
        return "" if both is None else say("{low} to {high}", **both)


def p_value(p: float | None) -> str:
    """A p value with its significant digits."""
    if p is None:
        return "–"
    return "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def ratio(value: Ratio | None) -> str:
    """A cost as a factor."""
    return "–" if value is None else f"×{value.median:.2f}"


def rho(effect: Effect) -> str:
    """The correlation of the pairs."""
    return "–" if effect.rho is None else f"{effect.rho:.2f}".replace("-", "−")


def lost(runs: Effect | RecipeTuning) -> list[str]:
    """The numbers of failed and of diverged runs, where there are any."""
    failed = [say("{n} failed", n=runs.failed)] if runs.failed else []
    return [*failed, *([say("{n} diverged", n=runs.diverged)] if runs.diverged else [])]


def verdict_text(effect: Effect, word: Callable[[str], str] = str) -> str:
    """The verdict with its limits: lost runs, and more than one change; `word` translates."""
    limits = [*lost(effect), *(["confounded"] if effect.confounded else [])]
    return f"{word(effect.verdict)} ({', '.join(map(word, limits))})" if limits else word(effect.verdict)


def won(effect: Effect) -> str:
    """The pairs in which the recipe is better, of those that differ; ties are counted apart."""
    if effect.improvement is None:
        return "–"
    tied = [counted(effect.ties, "tie")] if effect.ties else []
    return joined([say("{n} of {every}", n=effect.wins, every=effect.n), *tied])


def added(amount: Amount | None) -> str:
    """The parameters or operations that a recipe adds, as a number and as a share of the baseline's."""
    if amount is None:
        return "–"
    more = amount.recipe - amount.baseline
    if more == 0:
        return "none"
    rounded = float(f"{more:.3g}")  # so that 999,999 are 1 M, not 1000 k
    power = min(max(int(math.log10(abs(rounded)) // 3), 0), 4)
    share = f" ({100 * (amount.ratio - 1):+.1f} %)" if amount.baseline else ""
    number = f"{rounded / 1000**power:+.3g} {('', 'k', 'M', 'G', 'T')[power]}".rstrip()
    return f"{number}{share}".replace("-", "−")


def reached(reach: TimeToScore | None) -> str:
    """Time to the baseline's last validation score."""
    if reach is None:
        return "–"
    outcome = say("reached") if 2 * reach.reached > reach.n else say("not reached")
    said = outcome if reach.ratio is None else fixed(f"×{reach.ratio:.2f}")
    return say("{said} (in {n} of {seeds})", said=said, n=reach.reached, seeds=counted(reach.n, "seed"))


def threat_text(results: Results) -> str:
    """How inputs were disturbed; empty if they were not."""
    threat = results.plan.threat
    if threat is None:
        return ""
    bounds = [f"{b:g}" for b in (threat.low, threat.high) if b is not None]
    inside = say(", within {bounds}", bounds=joined(bounds, last=" to ")) if len(bounds) == 2 else ""
    return say(
        "each input value changed by at most {epsilon:.3g}{inside}; {examples}; PGD with {steps} and {restarts}",
        epsilon=threat.epsilon,
        inside=inside,
        examples=counted(threat.examples, "example"),
        steps=counted(threat.steps, "step"),
        restarts=counted(threat.restarts, "restart"),
    )


def tuning_text(results: Results) -> str:
    """Budget and space of tuning; empty without tuning."""
    tuning = results.plan.tuning
    if tuning is None:
        return ""
    return say(
        "{trials} per recipe on seed {seed}, sampler {sampler}; learning rate within a factor of {rate:g} of its "
        "default, strengths within {strength:g}",
        trials=counted(tuning.trials, "trial"),
        seed=tuning.seed,
        sampler=tuning.sampler,
        rate=tuning.rate_factor,
        strength=tuning.strength_factor,
    )


def seen(results: Results) -> str:
    """How often the results were looked at, if more than once, and how often the study was extended afterwards."""
    looks, extended = len(results.looks), len(results.plan.history)
    found = [say("looked at {n} times", n=looks)] if looks > 1 else []
    found += [say("extended {times} after a look", times=counted(extended, "time"))] if extended else []
    return joined(found, last=" and ")


def headline(results: Results) -> str:
    """The outcome in one sentence: the strongest statement that the results allow."""
    effects, scale = results.effects, Scale.of(results)
    if not effects:
        return say("There are no results yet.")
    if any(effect.verdict == "not a fair test" for effect in effects):
        return next(effect.reason for effect in effects if effect.verdict == "not a fair test")
    if len(effects) == 1:
        return _single(effects[0], scale)
    helps, hurts = ([e for e in effects if e.verdict == verdict] for verdict in ("helps", "hurts"))
    lead, told = helps or hurts, {"n": len(effects)}
    if not lead:
        return say("None of the {n} recipes is shown to help or to hurt: {tally}.", tally=_tally(effects), **told)
    best = max(lead, key=lambda e: abs(e.mean or 0.0))
    if len(lead) == 1:
        return _single(best, scale)
    of = {"lead": len(lead), **told, "name": plain(best.recipe), "estimate": _estimate(best, scale)}
    if helps:
        return say("{lead} of {n} recipes help, most {name}: {estimate}.", **of)
    return say("{lead} of {n} recipes hurt, most {name}: {estimate}.", **of)


def others(results: Results) -> str:
    """The verdicts of the recipes that the headline does not mention."""
    verdicts = [e.verdict for e in results.effects]
    lead = "helps" if "helps" in verdicts else "hurts"
    rest = [e for e in results.effects if e.verdict != lead]
    if lead not in verdicts or not rest:
        return ""
    if len(rest) == 1:
        return say("{name}: {verdict}.", name=plain(rest[0].recipe), verdict=fixed(plain(rest[0].verdict)))
    return say("Of the other {n}: {tally}.", n=len(rest), tally=_tally(rest))


_SHORT = {"hurts": say("hurting"), "helps": say("helping"), "undecided": fixed("undecided")}


def _tally(effects: Sequence[Effect]) -> Message:
    words = Counter(e.verdict for e in effects)
    parts = [
        say("{n} {what}", n=n, what=_SHORT.get(verdict) or say("with {verdict}", verdict=fixed(verdict)))
        for verdict, n in words.items()
    ]
    return joined(parts, last=" and ")


def _single(effect: Effect, scale: Scale) -> str:
    name, estimate = plain(effect.recipe), _estimate(effect, scale)
    match effect.verdict:
        case "helps":
            return say("{name} helps: {estimate}.", name=name, estimate=estimate)
        case "hurts":
            return say("{name} hurts: {estimate}.", name=name, estimate=estimate)
        case "no useful effect":
            return say("{name} has no useful effect: {estimate}.", name=name, estimate=estimate)
        case _:
            return say("Undecided whether {name} helps or hurts: {estimate}.", name=name, estimate=estimate)


def _estimate(effect: Effect, scale: Scale) -> str:
    if effect.mean is None:
        return say("no estimate")
    told = {"mean": scale.signed(effect.mean), "unit": fixed(scale.unit)}
    if interval := scale.interval(effect.low, effect.high):
        return say("{mean} {unit} (95 % interval {interval})", interval=interval, **told)
    return say("{mean} {unit}", **told)


def partial(results: Results) -> str:
    """The runs without a score, in one sentence; empty if there are none."""
    statuses = Counter(run.status for run in results.runs)
    total = counted(len(results.runs) + results.missing, "run")
    fates = {
        say("diverged and counted as the worst score"): statuses["diverged"],
        say("failed and left no score"): statuses["failed"],
        say("have not ended yet"): results.missing,
    }
    parts = [say("{n} of {total} {fate}", n=n, total=total, fate=fate) for fate, n in fates.items() if n]
    return say("{parts}.", parts=joined(parts, "; ")) if parts else ""


# --- tables ----------------------------------------------------------------------------------------------------------

ATTACKS = {
    "clean": "undisturbed",
    "noise": "noise",
    "transfer": "transfer",
    "fgsm": "FGSM",
    "pgd": "PGD",
    "smoothed": "smoothed PGD",
    "worst": "worst of all",
}


def tables(results: Results) -> tuple[TextTable, ...]:
    """The tables of every export, the verdicts first; without those that have no row."""
    optional = (further(results), attacks(results))
    return (verdicts(results), evidence(results), *(table for table in optional if table.rows))


def verdicts(results: Results) -> TextTable:
    """Effect, interval, p, verdict and cost of each recipe."""
    scale = Scale.of(results)

    def row(e: Effect) -> tuple[str, ...]:
        numbers = (scale.signed(e.mean), scale.interval(e.low, e.high), p_value(e.p_holm))
        return (e.recipe, *numbers, verdict_text(e), ratio(e.step_time), ratio(e.memory))

    head = (
        say("recipe"),
        say("effect in {unit}", unit=fixed(scale.unit)),
        say("95 % interval"),
        say("Holm p"),
        say("verdict"),
        say("step time"),
        say("memory"),
    )
    return TextTable(say("Verdicts"), head, tuple(map(row, results.effects)), (0, 4))


def evidence(results: Results) -> TextTable:
    """The evidence of each verdict: pairs, lost runs, correlation of the pairs and minimum detectable effect."""
    scale = Scale.of(results)

    def row(e: Effect) -> tuple[str, ...]:
        return (e.recipe, str(e.n), str(e.failed), str(e.diverged), rho(e), scale.score(e.mde), won(e))

    detectable = say("detectable effect, {unit}", unit=fixed(scale.unit))
    head = (
        say("recipe"),
        say("pairs"),
        say("failed"),
        say("diverged"),
        say("pair correlation"),
        detectable,
        say("seeds won"),
    )
    return TextTable(say("Evidence"), head, tuple(map(row, results.effects)))


def further(results: Results) -> TextTable:
    """The metrics that decide nothing, each with the baseline first; without rows if there are none."""

    def row(one: SecondaryMetric) -> tuple[str, ...]:
        largest = max(abs(other.score or 0.0) for other in results.further if other.metric == one.metric)
        digits = 3 - math.floor(math.log10(largest)) if largest > 0 else 3  # four of the largest mean
        shown = Scale(one.unit, min(max(digits, 0), 6))
        name = plain(f"{one.metric}, {one.unit}" if one.unit else one.metric)
        mean = "" if one.recipe == BASELINE else shown.signed(one.mean)
        return (one.recipe, name, shown.score(one.score), mean, shown.interval(one.low, one.high))

    head = (say("recipe"), say("metric"), say("mean"), say("difference"), say("95 % interval"))
    remark = "Differences are paired by seed and not corrected for the number of recipes: no verdict."
    return TextTable(say("Further metrics"), head, tuple(map(row, results.further)), (0, 1), (remark,))


def attacks(results: Results) -> TextTable:
    """Accuracy on disturbed inputs, the baseline first; without rows if no model was attacked."""
    made = [name for name in ATTACKS if any(name in robust.means for robust in results.robustness)]
    points = Scale("points", 1)

    def row(robust: Robust) -> tuple[str, ...]:
        cells = [f"{robust.means[name]:.1f}" if name in robust.means else "–" for name in made]
        mean = "" if robust.recipe == BASELINE else points.signed(robust.mean)
        return (robust.recipe, *cells, mean, points.interval(robust.low, robust.high))

    head = (say("recipe"), *(ATTACKS[name] for name in made), say("difference in the worst"), say("95 % interval"))
    remark = "The difference is in points, paired by seed and not corrected for the number of recipes: no verdict."
    signs = [f"{recipe}: {sign}" for recipe, found in hidden_gradients(results).items() for sign in found]
    rows = tuple(map(row, results.robustness)) if made else ()
    return TextTable(say("Accuracy under attack, %"), head, rows, notes=(f"{threat_text(results)}. {remark}", *signs))


def hidden_gradients(results: Results) -> dict[str, list[str]]:
    """By recipe, the signs that gradients hide a weakness."""
    return {
        robust.recipe: [f"{sign} (in {n} of {counted(robust.n, 'run')})" for sign, n in robust.signs.items()]
        for robust in results.robustness
        if robust.signs
    }


def costs(results: Results) -> TextTable:
    """Parameters, FLOPs, time to the baseline's score and CPU time; without rows if nothing was measured."""

    def row(e: Effect) -> tuple[str, ...]:
        trials = sum(tuned.seconds for tuned in results.tuning if tuned.recipe == e.recipe)
        whole = trials + sum(run.seconds or 0.0 for run in results.runs if run.recipe == e.recipe)
        cpu = f"{duration(whole)}, {duration(trials)} of it tuning" if trials else duration(whole)
        return (e.recipe, added(e.parameters), added(e.flops), reached(e.reach), cpu)

    head = (
        say("recipe"),
        say("parameters added"),
        say("FLOPs added per step"),
        say("time to the baseline's last validation score"),
    )
    measured = any(e.parameters or e.flops or e.reach for e in results.effects)
    return TextTable(
        say("Costs"), (*head, say("CPU time of the study")), tuple(map(row, results.effects)) if measured else ()
    )


def tuning(results: Results) -> TextTable:
    """The settings that tuning chose, the baseline first; without rows if there was no tuning."""
    scale, rows = Scale.of(results), []
    for t in results.tuning:
        limits = ", ".join(lost(t))
        trials = f"{t.trials} ({limits})" if limits else f"{t.trials}"
        scores = (scale.score(t.default_score), scale.score(t.score))
        values = (_values(t.defaults), _values(t.chosen) or "not yet")
        rows.append((t.recipe, trials, *values, *scores, duration(t.seconds)))
    head = (
        say("recipe"),
        say("trials"),
        say("defaults"),
        say("chosen"),
        say("validation, defaults"),
        say("validation, chosen"),
        say("CPU time"),
    )
    return TextTable(say("Tuning"), head, tuple(rows), (0, 2, 3))


def _values(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in values.items())


# --- terminal --------------------------------------------------------------------------------------------------------

TONES = {"good": "bold blue", "bad": "bold dark_orange3", "even": "default"}
TABLE_WIDTH = 92  # columns below which a table would break words


def text(results: Results) -> RenderableType:
    """The headline, missing runs and every recipe; print it with a rich Console or `rich.print`.

    A table if the terminal is wide enough, otherwise a paragraph per recipe. Nothing in a name acts as markup or as
    an escape sequence.

    Example:
        >>> import io
        >>> from rich.console import Console
        >>> console = Console(file=io.StringIO(), width=100)
        >>> console.print(gonio.lab.showing.text(gonio.lab.showing.example()))
        >>> print(console.file.getvalue().splitlines()[0])
        decoupled-tanh helps: +0.90 points (95 % interval +0.80 to +1.00).
    """
    return _Verdicts(results)


@dataclass(frozen=True)
class _Verdicts:
    results: Results

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        results, scale = self.results, Scale.of(self.results)
        sentences = ((headline, "bold"), (others, ""), (partial, "dark_orange3"))
        yield from (Text(local(said), style=style) for sentence, style in sentences if (said := sentence(results)))
        yield Text("")
        table, seen_ = verdicts(results), evidence(results)
        marks = ((mark(e.verdict), plain(verdict_text(e, local))) for e in results.effects)
        marked = [Text(f"{symbol} {verdict}", style=TONES[tone]) for (symbol, tone), verdict in marks]
        if options.max_width >= TABLE_WIDTH:
            head = (table.head[0], scale.unit, *table.head[2:5], say("time"), say("memory"))
            yield from (table.rich(head=head, verdicts=marked), Text(""), seen_.rich())
        else:
            for verdict, row, evident in zip(marked, table.rows, seen_.rows, strict=True):
                yield Text.assemble((plain(row[0]), "bold"), "  ", verdict)
                cells = [*zip(table.head, row, strict=True), *zip(seen_.head, evident, strict=True)]
                shown = [(title, cell) for title, cell in cells if cell not in ("", "–")]
                told = [f"{local(title)} {cell}" for title, cell in shown if title not in ("recipe", "verdict")]
                yield Text(f"  {', '.join(told)}")
        for table in (further(results), attacks(results)):
            if table.rows:
                yield from (Text(""), Text(local(table.title), style="dim"), table.rich())
        for recipe, signs in hidden_gradients(results).items():
            yield from (Text(f"{plain(recipe)}: {plain(sign)}", style=TONES["bad"]) for sign in signs)
        yield Text("")
        yield Text(local(_baseline(results, scale)), style="dim")


def _baseline(results: Results, scale: Scale) -> str:
    plan = results.plan
    mean, sd = scale.score(results.baseline_mean), scale.score(results.baseline_sd)
    sesoi = say("±{size} {unit}", size=scale.score(plan.sesoi), unit=fixed(scale.unit)) if plan.sesoi else say("none")
    said = say(
        "baseline {mean} ± {sd} {unit} (mean ± sd over seeds) · smallest effect of interest {sesoi} · {seeds}",
        mean=mean,
        sd=sd,
        unit=fixed(plain(plan.unit)),
        sesoi=sesoi,
        seeds=counted(len(plan.seeds), "seed"),
    )
    return joined([said, *([seen(results)] if seen(results) else [])], " · ")
