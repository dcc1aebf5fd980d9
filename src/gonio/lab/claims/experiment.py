"""Try claims: each is a study, and all that are tried together are judged together."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gonio.errors import (
    ClaimError,
    GonioError,
    InvalidArgumentError,
    MissingExtraError,
    NotApplicableError,
    PlanChangedError,
    StudyError,
    UnreadableFileError,
    first_line,
)
from gonio.escaping import write_text
from gonio.lab.claims.claim import CHOICE_SEEDS, Arm, Claim, Experiment, read_claim
from gonio.lab.claims.fairness import Runs, better_side, controlled, planned_obstacle
from gonio.lab.claims.result import ClaimResult, ClaimResults, judged, not_tried
from gonio.lab.judging.results import scores_of
from gonio.lab.plan import Measure, RecipeEntry, StudyPlan, Tuning, extended, installed_versions, seeds_of
from gonio.lab.planning.planner import check_training
from gonio.lab.record import RunRecord
from gonio.lab.running.engines import Devices, Local
from gonio.lab.running.measures import MeasureSpec, spec_of
from gonio.lab.running.scheduler import Watcher, run
from gonio.lab.running.study import Study, made
from gonio.lab.running.tuning import space_of
from gonio.lab.tasks.built_in import resolve as resolve_task
from gonio.lab.tasks.images import FASHION_FOLDER
from gonio.lab.tasks.task import Task
from gonio.messages import say
from gonio.models import BUILT_IN
from gonio.models.by_name import code_digests
from gonio.recipes.document import parse, read
from gonio.seeding import state_kept

# Where the data of a task lie that is no part of the package, unless --data says so.
_WHERE = {
    "cifar10": "data/cifar-10-batches-bin",
    "fashion-mnist": FASHION_FOLDER,
    "fashion-mnist-full": FASHION_FOLDER,
    "text": "data/shakespeare.txt",
}
# A run of all full experiments takes at least so many seeds: the smallest p of a paired test, 2 / 2^seeds, then passes
# Holm within every family of the catalogue.
FULL_SEEDS = 12
_MOST_WEIGHTS = 10**8  # of the model of a claim; with its optimizer they take 1.2 GB in each run
CLAIM_FILE, CLAIM_SCHEMA = "claim.json", "gonio.claim/1"  # beside the study of a claim


@dataclass(frozen=True, kw_only=True)
class ClaimOptions:
    """What a command decides about every claim that it tries.

    Attributes:
        full: the full experiment, not the quick one.
        seeds: number of seeds; None: the claim's own, at least 12 in the full experiment.
        first_seed: the first of them.
        device: what the runs compute on: `cpu`, `cuda`, `cuda:N` or `mps`.
        task, model: in place of the claim's own. data: folder or file of the task's data, where it is no built-in one.
        sources: by the name of a claim, what a command calls it: its file, or PACKAGE:NAME.
    """

    full: bool = False
    seeds: int | None = None
    first_seed: int = 0
    device: str = "cpu"
    task: str | None = None
    model: str | None = None
    data: str | None = None
    sources: Mapping[str, str] = field(default_factory=dict)


# --- the plan ---------------------------------------------------------------------------------------------


def plan_claim(claim: Claim, options: ClaimOptions | None = None) -> StudyPlan:
    """The plan of a claim's study.

    Raises:
        InvalidArgumentError: the claim is not tried; another model is chosen, and its arms differ in arguments of
            the claim's own model; or the claim is about another score than the task's.
        ClaimError: the claim's own task or model cannot be built, the model does not run on the task's inputs, or an
            arm cannot be trained on them as the claim says.
        UnmatchedRuleError: a rule of a recipe matches no layer of the model.

    Example:
        >>> plan = gonio.lab.claims.plan_claim(gonio.lab.claims.load_claim("som-spread"))
        >>> plan.measure.name, [entry.name for entry in plan.recipes][-3:], len(plan.seeds)
        ('angle_spread', ['self-orthogonality-1', 'again', 'longer'], 14)
    """
    options = options or ClaimOptions()
    setting = claim.setting(full=options.full)
    if options.model is not None and any(arm.model for arm in setting.arms):
        raise InvalidArgumentError(
            f"the arms of {claim.name} differ in arguments of {setting.model.get('name')}", f"--model {options.model}",
            "Leave --model out, or choose a claim whose arms are recipes.",
        )  # fmt: skip
    named = options.task or setting.task
    spec = f"{named}:{options.data or _WHERE[named]}" if named in _WHERE else named
    own_task, own_model = options.task is None and named not in _WHERE, options.model is None  # --data is missing there
    with _of_claim(say("the claim {claim} must name a task", claim=claim.name), "task", own=own_task):
        task = resolve_task(spec)
    model = options.model or setting.model.get("name", task.model)
    own = max(setting.seeds, FULL_SEEDS) if options.full else setting.seeds
    judged_seeds = range(options.first_seed, options.first_seed + (own if options.seeds is None else options.seeds))
    if taken := [seed for seed in CHOICE_SEEDS if seed in judged_seeds]:
        needs = f"the seeds of {claim.name} must not be those that choose a dose, which are not judged"
        raise InvalidArgumentError(needs, str(taken[0]), "Choose another --first-seed.")
    arms = controlled(claim, setting, epochs=task.training.epochs)
    measure = Measure(claim.measure, dict(claim.options))
    measured = spec_of(measure)
    _check_score(claim, setting, measured, task)
    plan = StudyPlan(
        task=spec,
        model=model,
        recipes=tuple(_entry(arm, setting, own=own_model) for arm in arms),
        seeds=seeds_of([*(CHOICE_SEEDS if setting.dosed else ()), *judged_seeds]),
        training=setting.training.override(task.training),
        metric=claim.measure,
        direction=better_side(claim, measured),
        unit=measured.unit,
        device=options.device.partition(":")[0],
        splits={name: len(split) for name, split in task.splits.items()},
        data=task.digest(),
        sesoi=claim.sesoi,
        worst=measured.worst,
        code=code_digests(spec, model),
        versions=installed_versions(),
        command=command_of([options.sources.get(claim.name, claim.name)], options),
        tuning=Tuning(trials=setting.tune, repeats=2) if setting.tune else None,
        threat=task.threat if measured.attacked else None,
        measure=measure,
        metrics={} if measured.start else {task.metric.name: task.metric.unit},
    )
    told = {"claim": claim.name, "model": model}
    with state_kept():
        for arm, entry in zip(arms, plan.recipes, strict=True):  # a rule without a layer is an error now
            asked = say("the arm {arm} of {claim} must train as it says", arm=arm.name, claim=claim.name)
            with _of_claim(asked, "training", own=options.task is None):
                check_training(plan.training_of(entry), task, device=options.device)
            asked = say("the arm {arm} of {claim} must build and run the model {model}", arm=arm.name, **told)
            with _of_claim(asked, "model", own=own_model, given=entry.setting.get("model", {})):
                built = _built(plan, entry, task, own=own_model)
            arm.built_recipe.plan(built)
    return plan


def check_data(claims: Sequence[Claim], options: ClaimOptions) -> None:
    """Refuse --data where no claim that is tried has a task whose data lie outside of the package.

    Raises:
        InvalidArgumentError: nothing would read them.
    """
    tried = [claim.setting(full=options.full).task for claim in claims if claim.budget != "none"]
    used = dict.fromkeys([options.task] if options.task else tried)
    if options.data is not None and not any(task in _WHERE for task in used):
        found = f"--data {options.data} for {', '.join(map(str, used)) or 'no task'}"
        raise InvalidArgumentError(f"--data is for tasks on {', '.join(_WHERE)}", found, "Leave --data out.")


def _check_score(claim: Claim, setting: Experiment, measured: MeasureSpec, task: Task) -> None:
    """Whether the task's score is the one that the measure, the bound and the tuning of the claim are about."""
    sides, metric = {"max": "larger", "min": "smaller"}, task.metric
    has = f"the score of {task.name}, {metric.name}, {f'in {metric.unit}' if metric.unit else 'without a unit'}, "
    has += f"of which {sides[metric.direction]} is better"
    unit, side = measured.scored or (None, metric.direction)
    if side != metric.direction or unit not in (None, metric.unit):
        needs = (
            f"{claim.measure} is computed from a score{f' in {unit}' if unit else ''} of which {sides[side]} is better"
        )
        raise InvalidArgumentError(f"{claim.name}: {needs}", has, "Choose a measure or a task that fits the other.")
    bound, where = ("floor", "max") if claim.fair.floor is not None else ("ceiling", "min")
    if getattr(claim.fair, bound) is not None and where != metric.direction:
        needs = f"{claim.name}: fair.{bound} is a bound of scores of which {sides[where]} is better"
        raise InvalidArgumentError(needs, has, "Choose another task, or the other bound.")
    if setting.tune and measured.better != metric.direction:
        needs = f"{claim.name}: tune takes the best validation score, which must be on the better side of the measure"
        raise InvalidArgumentError(needs, has, "Leave tune out, or choose another task.")


def unfair_plan(claim: Claim, plan: StudyPlan, *, full: bool) -> str:
    """Why no runs of the plan could be a fair test of the claim, in one line; empty if they may be one."""
    reason = planned_obstacle(claim, claim.setting(full=full), examples=plan.splits["train"])
    return reason and say("{name} cannot be a fair test as it is planned: {reason}", name=claim.name, reason=reason)


def _built(plan: StudyPlan, entry: RecipeEntry, task: Task, *, own: bool) -> nn.Module:
    """The model of an arm; the claim's own must be of a size that can be trained, and run on the task's inputs."""
    if not own:
        return plan.fresh_model(entry, task.sizes)
    decided = sorted(set(entry.setting.get("model", {})) & set(task.sizes))
    if decided:
        raise InvalidArgumentError("the task decides the sizes", ", ".join(decided), "Leave them out.")
    if plan.model in BUILT_IN:
        with torch.device("meta"):
            count = sum(weight.numel() for weight in plan.fresh_model(entry, task.sizes).parameters())
        if count > _MOST_WEIGHTS:
            most = f"a model has at most {_MOST_WEIGHTS:,} parameters"
            raise InvalidArgumentError(most, f"{count:,}", "Make it smaller.")
    model = plan.fresh_model(entry, task.sizes).eval()
    inputs, targets = task.train.take(range(2))
    with torch.no_grad():
        task.loss(task.outputs(model, inputs), targets)
    return model.train()


@contextmanager
def _of_claim(asked: str, part: str, *, own: bool, given: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Inside, whatever the task or the model that a claim names provokes becomes an error of the claim.

    Args:
        part: the key of the claim that names it. own: whether the claim does, and not the command.
    """
    try:
        yield
    except (MissingExtraError, NotApplicableError, UnreadableFileError, OSError):  # of this machine
        raise
    except Exception as error:
        if not own:
            raise
        named = ", ".join(f"{name}={value!r:.40}" for name, value in (given or {}).items())
        found = str(error) if isinstance(error, GonioError) else first_line(error, kind=True)
        found, _, hint = found.rstrip(".").partition(" Did you mean ")
        found = f"{found.rstrip('.')} (did you mean {hint})" if hint else found
        do = say("Correct `{part}` in the claim.", part=part)
        raise ClaimError(asked, f"{found}{f' ({named})' if named else ''}", do) from error


def command_of(names: Sequence[str], options: ClaimOptions, others: Mapping[str, object] | None = None) -> str:
    """The command that tries these claims again: what differs from the defaults, without settings of this machine."""
    named = {"--device": None if options.device == "cpu" else options.device}
    named |= {"--task": options.task, "--model": options.model}
    numbers = {"--seeds": options.seeds, "--first-seed": options.first_seed}
    given = {**named, **numbers, **(others or {})}
    words = [word for option, value in given.items() if value for word in (option, str(value))]
    return shlex.join(["gonio", "reproduce", *names, *(["--full"] if options.full else []), *words])


def _entry(arm: Arm, setting: Experiment, *, own: bool) -> RecipeEntry:
    """The arm with everything in which it differs from the plan; `own`: the model is the claim's."""
    arguments = {**{key: value for key, value in setting.model.items() if key != "name"}, **arm.model}
    parts = {
        "model": arguments if own else {},
        "training": arm.training.model_dump(exclude_none=True),
        "measure": arm.measure,
        "lsuv": {"examples": arm.lsuv} if arm.lsuv else {},
        "draw": {"name": arm.name} if arm.redraw else {},
    }
    return RecipeEntry.of(
        arm.built_recipe, {"arm": {"name": arm.name}, **{key: part for key, part in parts.items() if part}}
    )


# --- the runs ---------------------------------------------------------------------------------------------


def try_claims(
    claims: Sequence[Claim],
    folder: str | Path,
    *,
    options: ClaimOptions | None = None,
    jobs: int | None = None,
    watcher: Watcher | None = None,
    command: str = "gonio reproduce",
    each: Callable[[ClaimResult], object] | None = None,
) -> ClaimResults:
    """Run the study of each claim, in the folder of its name in `folder`, and judge them together.

    Identities, which take seconds, are run first. A study that was killed goes on where it stopped; one that is
    complete runs nothing.

    Args:
        jobs: runs at a time; None is one per core, or one per GPU.
        each: called with the result of a claim as soon as it has run.

    Raises:
        InvalidArgumentError: there is no such device on this machine, or two claims have one name.
        PlanChangedError: the folder holds another study of the claim, or the claim was changed after its runs.
        StudyLockedError: another process is running it.
        Interrupted: SIGTERM arrived; the finished runs are kept.

    Example:
        >>> import tempfile
        >>> claims = [gonio.lab.claims.load_claim("weight-norm-grows")]
        >>> options = gonio.lab.claims.ClaimOptions(seeds=3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found = gonio.lab.claims.try_claims(claims, folder, options=options, jobs=2)
        >>> found.headline
        '1 claim tried on this machine: identities: 1 holds'
    """
    options, watcher = options or ClaimOptions(), watcher or Watcher()
    devices = Devices.named(options.device)
    claims = [claim for at, claim in enumerate(claims) if claim not in claims[:at]]
    names = [claim.name for claim in claims]
    if twice := next((name for name in names if names.count(name) > 1), None):
        needs, do = "each claim needs its own name, which is that of its folder", "Try them in different folders (-o)."
        raise InvalidArgumentError(needs, f"two claims with the name {twice}", do)
    check_data(claims, options)
    plans = {claim.name: plan_claim(claim, options) for claim in claims if claim.budget != "none"}
    for claim in (claim for claim in claims if claim.name in plans):
        _check_unchanged(claim, plans[claim.name], Path(folder) / claim.name, full=options.full)

    def judge(claims: Sequence[Claim]) -> ClaimResults:
        found, own = judge_claims(claims, folder, full=options.full, command=command), _own(options)
        return replace(found, results=tuple(replace(one, own=own) if one.plan else one for one in found.results))

    for claim in sorted(claims, key=lambda claim: claim.scope != "identity"):
        if claim.name in plans:
            watcher.stage(f"{claim.name}: {claim.claim}")
            if unfair := unfair_plan(claim, plans[claim.name], full=options.full):
                watcher.said(unfair)
            _remember(claim, Path(folder) / claim.name, options)
            run(plans[claim.name], Path(folder) / claim.name, engine=Local(jobs, devices), watcher=watcher)
            if each is not None:
                each(judge([claim]).results[0])
    return judge(claims)


def _check_unchanged(claim: Claim, plan: StudyPlan, folder: Path, *, full: bool) -> None:
    """Refuse another plan, and other terms of the verdict, than those with which the runs of the folder were made."""
    try:
        study = Study.open(folder)
        count = len(study.runs())
    except StudyError:  # there is none yet, or its run will say what is wrong with it
        return
    extended(study.plan, plan, path=str(folder), finished=count)
    try:
        known = _recalled(folder / CLAIM_FILE) if count else None
    except StudyError:  # what cannot be read is written again
        return
    if known is None or known.setting is None or known.full != full:
        return
    was, now = _terms(known.claim, known.setting), _terms(claim, claim.setting(full=full))
    if changes := [(key, was[key], now[key]) for key in now if was[key] != now[key]]:
        raise PlanChangedError(str(folder), changes)


def _terms(claim: Claim, setting: Experiment) -> dict[str, str]:
    """What decides the verdict and is no part of the plan of the runs."""
    fair = {f"fair.{key}": str(value) for key, value in claim.fair.model_dump().items()}
    terms = {"direction": claim.direction, "scope": claim.scope, "choose": setting.choose, **fair}
    contrast = ", ".join(f"{weight:+g} {arm}" for arm, weight in sorted(setting.decisive.items()))
    return {**terms, "contrast": contrast}


def _own(options: ClaimOptions) -> dict[str, str]:
    """What the user put in place of the claims' own."""
    return {name: value for name in ("task", "model") if (value := getattr(options, name)) is not None}


def _remember(claim: Claim, folder: Path, options: ClaimOptions) -> None:
    """Write the claim beside its study, so that the folder alone says what it is about."""
    content = {
        "schema": CLAIM_SCHEMA,
        "claim": claim.model_dump(mode="json", exclude_defaults=True),
        "full": options.full,
        "own": _own(options),
    }
    write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", made(folder) / CLAIM_FILE)


def claims_in(folder: str | Path) -> ClaimResults | None:
    """The verdicts of a claim's study, or of all studies of claims in a folder; None if it holds no claim.

    Raises:
        StudyError: what is written there is not a claim.

    Example:
        >>> gonio.lab.claims.claims_in("no-folder") is None
        True
    """
    root = Path(folder)
    files = [root / CLAIM_FILE] if (root / CLAIM_FILE).is_file() else sorted(root.glob(f"*/{CLAIM_FILE}"))
    found = [_recalled(file) for file in files]
    return ClaimResults(judged(found), installed_versions(), f"gonio report {root}") if found else None


def _recalled(file: Path) -> ClaimResult:
    try:
        content = parse(read(file), origin=file.name).data
        claim, full, own = read_claim(content["claim"], origin=file.name), content["full"], content.get("own", {})
        if not isinstance(full, bool) or not isinstance(own, dict):
            raise TypeError("full is true or false, and own an object")
    except (GonioError, TypeError, KeyError) as error:
        raise StudyError(str(file.parent), f"its {CLAIM_FILE} is not a claim", "Run gonio reproduce again.") from error
    return replace(_seen(claim, file.parent, full=full), own={str(key): str(value) for key, value in own.items()})


def judge_claims(
    claims: Sequence[Claim], folder: str | Path, *, full: bool = False, command: str = "gonio reproduce"
) -> ClaimResults:
    """The verdicts of the studies in a folder, as far as they have run; nothing is trained.

    Example:
        >>> gonio.lab.claims.judge_claims([gonio.lab.claims.load_claim("bn-imagenet")], "no-folder").headline
        'No claim was tried.'
    """
    seen = [_seen(claim, Path(folder) / claim.name, full=full) for claim in claims]
    return ClaimResults(judged(seen), installed_versions(), command)


def _seen(claim: Claim, path: Path, *, full: bool) -> ClaimResult:
    """A claim's result before it is judged."""
    if claim.budget == "none" or not path.is_dir():
        return not_tried(claim, claim.not_tried or "Not run.")
    study, setting = Study.open(path), claim.setting(full=full)
    plan, runs = study.plan, study.runs()
    if plan.measure is None or plan.measure.name != claim.measure:
        raise StudyError(str(path), f"it is not a study of the claim {claim.name}", "Name another folder.")
    statuses = [record.status for record in runs]
    return replace(
        not_tried(claim, ""),
        full=full,
        plan=plan.hash,
        task=named if (named := plan.task.partition(":")[0]) in _WHERE else plan.task,
        model=plan.model,
        runs=_numbers(plan, runs),
        seconds=sum(record.seconds or 0.0 for record in runs),
        planned=len(plan.grid),
        missing=len(plan.grid) - len(runs),
        failed=statuses.count("failed"),
        refused=sum(record.refused for record in runs),
        diverged=statuses.count("diverged"),
        histograms=_histograms(setting, runs) if claim.picture == "angles" else {},
        versions=_joined(study.used()),
        command=plan.command,
        history=plan.history,
    )


def _joined(used: Sequence[dict[str, str]]) -> dict[str, str]:
    """The versions of all runs, by package."""
    names = dict.fromkeys(name for versions in used for name in versions)
    return {name: " and ".join(dict.fromkeys(of[name] for of in used if name in of)) for name in names}


def _numbers(plan: StudyPlan, runs: Sequence[RunRecord]) -> Runs:
    """What the verdict depends on, arm by arm in the order of the plan."""
    scores = scores_of(plan, runs)
    name, unit = next(iter(plan.metrics.items()), ("", ""))  # of the task
    reached: dict[str, dict[int, float]] = {entry.name: {} for entry in plan.recipes}
    for record in runs:
        if (value := record.metrics.get(name)) is not None and record.status == "finished":
            reached[record.recipe][record.seed] = value
    return Runs(
        scores={
            entry.name: {seed: scores[entry.name, seed] for seed in plan.seeds if (entry.name, seed) in scores}
            for entry in plan.recipes
        },
        unit=plan.unit,
        reached={arm: of for arm, of in reached.items() if of},
        reached_unit=unit,
        examples=plan.splits.get("train", 0),
        searched=_searched(plan, runs),
        failures={record.recipe: record.error or "" for record in reversed(runs) if record.status == "failed"},
    )


def _searched(plan: StudyPlan, runs: Sequence[RunRecord]) -> dict[str, dict[str, float]]:
    """Where in its range each tuned value lies, from −1 to 1."""
    settings = {record.recipe: record.settings for record in runs if record.settings}
    return {
        entry.name: {
            each.name: 2 * math.log(settings[entry.name][each.name] / each.low) / math.log(each.high / each.low) - 1
            for each in space_of(plan, entry)
        }
        for entry in plan.recipes
        if entry.name in settings
    }


def _histograms(setting: Experiment, runs: Sequence[RunRecord]) -> dict[str, list[int]]:
    """The counts of angles between the filters of all layers but the first and the last, pooled over the seeds."""
    found: dict[str, list[int]] = {}
    for arm in setting.arms:
        rows = [
            layer["angle_counts"]
            for record in runs
            if record.recipe == arm.name and record.geometry
            for layer in list(record.geometry["layers"].values())[1:-1]
        ]
        if rows:
            found[arm.name] = [sum(column) for column in zip(*rows, strict=True)]
    return found
