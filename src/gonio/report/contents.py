"""What stands on the page, as plain values: everything but the markup."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import resources
from types import SimpleNamespace
from typing import Any

import yaml

from gonio.compare.plan import Plan, RecipeEntry
from gonio.compare.results import BASELINE, Effect, Ratio, Results, RunRecord
from gonio.escaping import plain
from gonio.report.charts import cost_chart, curve_groups, forest, layer_cards
from gonio.report.sections import attacks_of, badge, cost_rows, robust_rows, threat_words, tuning_rows, tuning_words
from gonio.report.shown import evidence
from gonio.report.words import Scale, count, headline, mark, others, p_value, partial, ratio, seen

__all__ = ["colors_of", "page_of"]

HUES = 7


def colors_of(results: Results) -> dict[str, str]:
    """A CSS variable for each recipe, the baseline left out; after seven they come round again."""
    return {effect.recipe: f"c{i % HUES + 1}" for i, effect in enumerate(results.effects)}


def page_of(results: Results) -> SimpleNamespace:
    """All values of the page, by the names that the template uses."""
    colors, scale, plan = colors_of(results), Scale.of(results), results.plan
    page = SimpleNamespace(
        headline=headline(results),
        style=_style(),
        task=plan.task,
        model=plan.model,
        metric=plan.metric,
        unit=scale.unit,
        sesoi=scale.score(plan.sesoi),
        better=f"{'More' if plan.direction == 'max' else 'Less'} is better.",
        others=others(results),
        lead=_lead(results),
        facts=_facts(results, scale),
        partial=partial(results),
        broken=[_broken(run) for run in results.runs if run.status != "finished"],
        notes=[*plan.notes, *(note for note in results.notes if note not in plan.notes)],
        rows=[_row(effect, scale, colors[effect.recipe]) for effect in results.effects],
        legend=[SimpleNamespace(recipe=r, color=c) for r, c in ({BASELINE: "base"} | colors).items()],
        recipes=[_recipe(entry, results, colors) for entry in plan.recipes if entry.name != BASELINE],
        study=_study(results, scale),
        command=results.command,
        versions=list(results.versions.items()),
        gonio=results.versions.get("gonio", ""),
        history=yaml_of([dict(entry) for entry in plan.history]) if plan.history else "",
        runs=[_run(run, scale) for run in results.runs],
        costs=cost_rows(results, colors),
        tuning=tuning_rows(results, colors),
        robust=robust_rows(results, colors),
        attacks=[title for _, title in attacks_of(results)],
        threat=threat_words(results),
        evidence=evidence(results),
    )
    _draw(page, results, colors, scale)
    page.contents = _contents(page)
    return page


def _draw(page: SimpleNamespace, results: Results, colors: dict[str, str], scale: Scale) -> None:
    page.forest_wide = forest(results, colors, scale, narrow=False)
    page.forest_narrow = forest(results, colors, scale, narrow=True)
    page.time_chart = cost_chart(results, colors, "step_time")
    page.memory_chart = cost_chart(results, colors, "memory")
    page.curves = curve_groups(results, colors)
    page.layers, page.layers_left_out = layer_cards(results, colors)


def _contents(page: SimpleNamespace) -> list[tuple[str, str]]:
    shown = [("verdict", "Verdict"), ("effects", "Effects")] if page.rows else []
    shown += [("costs", "Costs")] if page.time_chart or page.memory_chart or page.costs else []
    shown += [("tuning", "Tuning")] if page.tuning else []
    shown += [("robustness", "Robustness")] if page.robust else []
    shown += [("curves", "Learning curves")] if page.curves else []
    shown += [("layers", "Angles and norms")] if page.layers else []
    return [*shown, ("recipes", "Recipes"), ("study", "The study")]


def _style() -> Any:
    from markupsafe import Markup

    # Our own file, not foreign text: no "<" in it, so that it cannot close its element.
    return Markup((resources.files("gonio.report") / "templates" / "style.css").read_text(encoding="utf-8"))


def _lead(results: Results) -> str:
    plan = results.plan
    return (
        f"{count(len(results.effects), 'recipe')} against the unchanged model, "
        f"{count(len(plan.seeds), 'seed')} each, paired by seed, equal budget."
    )


def _facts(results: Results, scale: Scale) -> list[tuple[str, str]]:
    plan = results.plan
    base = scale.score(results.baseline_mean)
    finished = sum(run.status == "finished" for run in results.runs)
    spread = f" ± {scale.score(results.baseline_sd)}" if results.baseline_sd is not None else ""
    return [
        (f"Baseline, {plain(plan.metric)}", f"{base}{spread} {plain(plan.unit)}"),
        ("Smallest effect of interest", f"±{scale.score(plan.sesoi)} {scale.unit}" if plan.sesoi else "none named"),
        ("Training", f"{count(plan.training.epochs, 'epoch')}, {plain(plan.training.optimizer)}")
        if plan.training
        else ("Training", "a script's own"),
        ("Runs", f"{finished} of {len(results.runs) + results.missing} finished"),
        *([("Study", seen(results))] if seen(results) else []),
    ]


def _row(effect: Effect, scale: Scale, color: str) -> SimpleNamespace:
    shown = mark(effect.verdict)
    lost = [f"{count(n, 'run')} {word}" for n, word in ((effect.failed, "failed"), (effect.diverged, "diverged")) if n]
    return SimpleNamespace(
        recipe=effect.recipe, color=color, verdict=effect.verdict, symbol=shown.symbol, tone=shown.tone,
        mean=scale.signed(effect.mean), interval=scale.interval(effect.low, effect.high),
        p=p_value(effect.p_holm),
        time=ratio(effect.step_time), time_range=_range(effect.step_time),
        memory=ratio(effect.memory), memory_range=_range(effect.memory),
        reason=effect.reason, lost=", ".join(lost), confounded=badge(effect),
    )  # fmt: skip


def _range(cost: Ratio | None) -> str:
    return "" if cost is None or f"{cost.low:.2f}" == f"{cost.high:.2f}" else f"{cost.low:.2f} to {cost.high:.2f}"


def _broken(run: RunRecord) -> SimpleNamespace:
    lines = plain(run.error or "").strip().splitlines()
    rest = "\n".join(lines) if len(lines) > 1 else ""
    return SimpleNamespace(
        recipe=run.recipe, seed=run.seed, status=run.status, first=lines[0] if lines else "", rest=rest
    )


def _run(run: RunRecord, scale: Scale) -> SimpleNamespace:
    epoch = "–" if run.best_epoch is None else str(run.best_epoch + 1)
    return SimpleNamespace(
        recipe=run.recipe, seed=run.seed, status=run.status, score=scale.score(run.score), epoch=epoch
    )


def _recipe(entry: RecipeEntry, results: Results, colors: dict[str, str]) -> SimpleNamespace:
    plans = [run.plan for run in results.runs if run.recipe == entry.name and run.plan]
    varied = "Seeds differ in what was done; this is the first seed's." if len(set(plans)) > 1 else ""
    return SimpleNamespace(
        name=entry.name, color=colors.get(entry.name, "base"), hash=entry.hash[:12], varied=varied,
        did=plans[0].rstrip() if plans else "", yaml=yaml_of(dict(entry.content)),
    )  # fmt: skip


def yaml_of(content: Any) -> str:
    """The content as YAML, keys in their own order; the way through JSON leaves plain data only."""
    data = json.loads(json.dumps(content, default=str))
    return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100)).rstrip()


def _training(plan: Plan) -> list[tuple[str, str]]:
    if plan.training is None:
        return [("Training and score", "the script's own")]
    words = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in asdict(plan.training).items())
    return [("Epoch chosen by", "the validation split; the score is of the test split"), ("Training", words)]


def _study(results: Results, scale: Scale) -> list[tuple[str, str]]:
    plan = results.plan
    rows = [
        ("Task", plan.task),
        ("Model", plan.model),
        ("Examples", ", ".join(f"{name} {n}" for name, n in plan.splits.items())),
        (
            "Metric",
            f"{plan.metric} ({'more' if plan.direction == 'max' else 'less'} is better), in {plan.unit}",
        ),
        ("Seeds", ", ".join(str(seed) for seed in plan.seeds)),
        *_training(plan),
        ("Smallest effect of interest", f"±{scale.score(plan.sesoi)} {scale.unit}" if plan.sesoi else "none named"),
        *([("Tuning", tuning_words(results))] if plan.tuning else []),
        *([("Attacks", threat_words(results))] if plan.threat else []),
        ("Data", plan.data),
        ("Plan", plan.hash),
    ]
    return rows + [(f"Code of {name}", value) for name, value in plan.code.items()]
