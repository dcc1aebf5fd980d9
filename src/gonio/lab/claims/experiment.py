"""Try claims: each is a study of the comparison engine, so it resumes, survives kills and can be exported."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gonio.errors import InvalidArgumentError
from gonio.lab.claims.claim import Arm, Claim, Setting, read_claim
from gonio.lab.judging.results import RunRecord, scores_of
from gonio.lab.judging.statistics import counted
from gonio.lab.judging.verdict import VERDICTS, Evidence, Judgement, contrasts, judge
from gonio.lab.planning.plan import Measure, Plan, RecipeEntry, Tuning, installed_versions
from gonio.lab.planning.planner import code_of, seeds_of
from gonio.lab.running.measures import kind_of
from gonio.lab.running.scheduler import Quiet, Watcher, run
from gonio.lab.running.study import Study
from gonio.lab.running.training import build
from gonio.lab.tasks import resolve as resolve_task
from gonio.lab.tasks.images import FASHION_FOLDER

_FOLDER_TASK = "fashion-mnist"
# A run of all full experiments takes at least so many seeds: with fewer, the smallest p of a paired test, 2 / 2^seeds,
# would not pass Holm over the catalogue.
FULL_SEEDS = 12
# measures for which models at chance level say nothing
_SCORES = ("accuracy", "accuracy_after", "calibrated_accuracy", "trains")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a command decides about every claim that it tries.

    Attributes:
        full: the full experiment, not the quick one.
        seeds: number of seeds; None: the claim's own, at least 12 in the full experiment.
        first_seed: the first of them.
        task, model: in place of the claim's own. data: folder of the files of Fashion-MNIST.
    """

    full: bool = False
    seeds: int | None = None
    first_seed: int = 0
    task: str | None = None
    model: str | None = None
    data: str | None = None

    def seeds_of(self, setting: Setting) -> tuple[int, ...]:
        """The seeds that the setting is tried with."""
        own = max(setting.seeds, FULL_SEEDS) if self.full else setting.seeds
        return seeds_of(range(self.first_seed, self.first_seed + (own if self.seeds is None else self.seeds)))

    def task_of(self, setting: Setting) -> str:
        """The task's name, with the folder of its data if it needs one."""
        spec = self.task or setting.task
        return f"{_FOLDER_TASK}:{self.data or FASHION_FOLDER}" if spec == _FOLDER_TASK else spec


@dataclass(frozen=True)
class Finding:
    """One claim as it was tried.

    Attributes:
        full: whether it was the full experiment. plan: hash of the study's plan; empty if it was not tried.
        scores: of each arm, by seed; a diverged run has the worst score.
        values: the decisive contrast, by seed.
        seconds: CPU seconds of all runs. runs: how many there are. missing, failed, diverged: of these.
        unit, measured: of the scores.
        histograms: angles of each arm between filters, pooled over layers and seeds, in bins of 2 degrees.
        command: repeats the claim.
    """

    claim: Claim
    judgement: Judgement
    full: bool = False
    plan: str = ""
    task: str = ""
    model: str = ""
    scores: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    values: Mapping[int, float] = field(default_factory=dict)
    seconds: float = 0.0
    runs: int = 0
    missing: int = 0
    failed: int = 0
    diverged: int = 0
    unit: str = ""
    measured: str = ""
    histograms: Mapping[str, Sequence[int]] = field(default_factory=dict)
    command: str = ""

    @property
    def verdict(self) -> str:
        """One of :data:`gonio.lab.claims.VERDICTS`."""
        return self.judgement.verdict

    @property
    def setting(self) -> Setting | None:
        """The experiment; None if the claim was not tried."""
        return self.claim.setting(full=self.full) if self.plan else None

    def mean(self, arm: str) -> float | None:
        """Mean score of an arm."""
        found = self.scores.get(arm)
        return statistics.fmean(found.values()) if found else None


@dataclass(frozen=True)
class Findings:
    """All claims of one run.

    Attributes:
        versions: of the packages. command: repeats the run.
    """

    findings: tuple[Finding, ...]
    versions: Mapping[str, str]
    command: str

    @property
    def tried(self) -> tuple[Finding, ...]:
        """The claims with an experiment."""
        return tuple(found for found in self.findings if found.verdict != "not tried")

    @property
    def headline(self) -> str:
        """How many claims ended with each verdict, in one sentence."""
        counts = {name: sum(f.verdict == name for f in self.tried) for name in VERDICTS}
        told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        tried = counted(len(self.tried), "claim")
        return f"{tried} tried on this machine: {told}" if told else "No claim was tried."


# --- the plan ---------------------------------------------------------------------------------------------


def plan_claim(claim: Claim, choice: Choice | None = None) -> Plan:
    """The plan of a claim's study; every mistake is found here, before the first run.

    Raises:
        InvalidArgumentError: the claim is not tried; or another model is chosen, and its arms differ in arguments of
            the claim's own model.
        UnmatchedRuleError: a rule of a recipe matches no layer of the model.

    Example:
        >>> plan = gonio.lab.claims.plan_claim(gonio.lab.claims.load_claim("som-spread"))
        >>> plan.measure.name, [entry.name for entry in plan.recipes], len(plan.seeds)
        ('angle_spread', ['plain', 'self-orthogonality'], 10)
    """
    choice = choice or Choice()
    setting = claim.setting(full=choice.full)
    spec = choice.task_of(setting)
    task = resolve_task(spec)
    model = choice.model or setting.model.get("name", task.model)
    _check_model(claim, setting, choice.model)
    training = setting.training.over(task.training)
    measure = Measure(claim.measure, dict(claim.options))
    kind = kind_of(measure)
    plan = Plan(
        task=spec,
        model=model,
        recipes=tuple(_entry(arm, setting, own=choice.model is None) for arm in setting.arms),
        seeds=choice.seeds_of(setting),
        training=training,
        metric=claim.measure,
        # the better scores are those of the measure where it says so, else those that confirm the claim
        direction=kind.better or ("min" if claim.direction == "smaller" else "max"),
        unit=kind.unit,
        splits={name: len(split) for name, split in task.splits.items()},
        data=task.digest(),
        sesoi=claim.sesoi,
        worst=training.epochs + 1.0 if claim.measure == "epochs_to" else kind.worst,
        code=code_of(spec, model),
        versions=installed_versions(),
        command=f"gonio reproduce {claim.name}",
        tuning=Tuning(trials=setting.tune) if setting.tune else None,
        threat=task.threat if kind.attacked else None,
        measure=measure,
    )
    with torch.random.fork_rng(devices=[]):
        for entry in plan.recipes:  # so that a rule without a layer is an error now
            build(plan, task, entry, plan.seeds[0])
    return plan


def _entry(arm: Arm, setting: Setting, *, own: bool) -> RecipeEntry:
    """The arm with everything in which it differs from the plan; `own`: the model is the claim's."""
    arguments = {**{key: value for key, value in setting.model.items() if key != "name"}, **arm.model}
    parts = {
        "model": arguments if own else {},
        "training": arm.training.model_dump(exclude_none=True),
        "measure": arm.measure,
        "lsuv": {"examples": arm.lsuv} if arm.lsuv else {},
        "draw": {"name": arm.name} if arm.redraw else {},
    }
    return RecipeEntry.of(arm.made, {"arm": {"name": arm.name}, **{key: part for key, part in parts.items() if part}})


def _check_model(claim: Claim, setting: Setting, model: str | None) -> None:
    if model is not None and any(arm.model for arm in setting.arms):
        raise InvalidArgumentError(
            f"the arms of {claim.name} differ in arguments of {setting.model.get('name')}", f"--model {model}",
            "Leave --model out, or choose a claim whose arms are recipes.",
        )  # fmt: skip


# --- the runs ---------------------------------------------------------------------------------------------


def try_claims(
    claims: Sequence[Claim],
    folder: str | Path,
    *,
    choice: Choice | None = None,
    jobs: int | None = None,
    watcher: Watcher | None = None,
    command: str = "gonio reproduce",
) -> Findings:
    """Run the study of each claim, in the folder of its name in `folder`, and judge them together.

    A study that was killed goes on where it stopped; one that is complete runs nothing.

    Args:
        jobs: runs at a time; None is one per core.

    Raises:
        PlanChangedError: the folder holds another study of the claim.
        StudyLockedError: another process is running it.
        Interrupted: SIGTERM arrived; the finished runs are kept.

    Example:
        >>> import tempfile
        >>> claims = [gonio.lab.claims.load_claim("weight-norm-grows")]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found = gonio.lab.claims.try_claims(claims, folder, choice=gonio.lab.claims.Choice(seeds=3), jobs=2)
        >>> found.headline
        '1 claim tried on this machine: 1 reproduced'
    """
    choice, watcher = choice or Choice(), watcher or Quiet()
    plans = {claim.name: plan_claim(claim, choice) for claim in claims if claim.budget != "none"}
    for claim in claims:
        if claim.name in plans:
            watcher.stage(f"{claim.name}: {claim.claim}")
            run(plans[claim.name], Path(folder) / claim.name, jobs=jobs, watcher=watcher)
    return findings(claims, folder, choice=choice, command=command)


def findings(
    claims: Sequence[Claim], folder: str | Path, *, choice: Choice | None = None, command: str = "gonio reproduce"
) -> Findings:
    """The verdicts of the studies in a folder, as far as they have run; nothing is trained.

    Example:
        >>> gonio.lab.claims.findings([gonio.lab.claims.load_claim("bn-imagenet")], "no-folder").headline
        'No claim was tried.'
    """
    choice = choice or Choice()
    seen = [_seen(claim, Path(folder) / claim.name, full=choice.full) for claim in claims]
    judged = iter(judge([evidence for _, evidence in seen if evidence is not None]))
    found = tuple(
        finding if evidence is None else replace(finding, judgement=next(judged)) for finding, evidence in seen
    )
    return Findings(found, installed_versions(), command)


def _seen(claim: Claim, path: Path, *, full: bool) -> tuple[Finding, Evidence | None]:
    """A claim's finding before it is judged, and its evidence if there is a study of it."""
    untried = Finding(claim, Judgement("not tried", claim.not_tried or "It is not part of this run."))
    if claim.budget == "none" or not path.is_dir():
        return untried, None
    study, setting = Study.open(path), claim.setting(full=full)
    plan, runs = study.plan, study.runs()
    scores = scores_of(plan, runs)
    values = contrasts(scores, setting.decisive, plan.seeds)
    statuses = [record.status for record in runs]
    evidence = Evidence(
        values=tuple(values.values()),
        direction=claim.direction,
        sesoi=claim.sesoi,
        unit=plan.unit,
        obstacle=_obstacle(claim, setting, plan, scores),
    )
    by_arm = {
        arm.name: {seed: scores[arm.name, seed] for seed in plan.seeds if (arm.name, seed) in scores}
        for arm in setting.arms
    }
    finding = replace(
        untried,
        full=full,
        plan=plan.hash,
        task=plan.task.partition(":")[0] if plan.task.startswith(_FOLDER_TASK) else plan.task,
        model=plan.model,
        runs=len(plan.grid),
        scores=by_arm,
        values=values,
        seconds=sum(record.seconds or 0.0 for record in runs),
        missing=len(plan.grid) - len(runs),
        failed=statuses.count("failed"),
        diverged=statuses.count("diverged"),
        unit=plan.unit,
        measured=kind_of(Measure(claim.measure)).summary,
        histograms=_histograms(setting, runs) if claim.picture == "angles" else {},
        command=plan.command,
    )
    return finding, evidence


def _obstacle(claim: Claim, setting: Setting, plan: Plan, scores: Mapping[tuple[str, int], float]) -> str:
    """If no arm of the contrast is better than guessing, their difference says nothing about the claim."""
    if claim.measure not in _SCORES:
        return ""
    guess = 100.0 / max(2, resolve_task(plan.task).sizes.get("num_classes", 2))
    best = max((score for (arm, _), score in scores.items() if arm in setting.decisive), default=guess)
    if best > 1.5 * guess:
        return ""
    return "No arm trains." if claim.measure == "trains" else f"No arm trains: the best accuracy is {best:.3g} %."


def _histograms(setting: Setting, runs: Sequence[RunRecord]) -> dict[str, list[int]]:
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


def as_data(found: Findings) -> dict[str, Any]:
    """The findings as JSON-able data, each number of a run included.

    Example:
        >>> found = gonio.lab.claims.findings([gonio.lab.claims.load_claim("bn-imagenet")], "no-folder")
        >>> gonio.lab.claims.as_data(found)["claims"][0]["judgement"]["verdict"]
        'not tried'
    """
    claims = []
    for one in found.findings:
        content = one.claim.model_dump(mode="json", exclude_defaults=True)
        claims.append({**asdict(replace(one, claim=None)), "claim": content})  # type: ignore[arg-type]
    return {"command": found.command, "versions": dict(found.versions), "claims": claims}


def from_data(data: Mapping[str, Any]) -> Findings:
    """The inverse of :func:`as_data`, also after JSON has made text of the seeds.

    Example:
        >>> found = gonio.lab.claims.findings([gonio.lab.claims.load_claim("bn-imagenet")], "no-folder")
        >>> gonio.lab.claims.from_data(gonio.lab.claims.as_data(found)) == found
        True
    """
    return Findings(tuple(_finding(row) for row in data["claims"]), data["versions"], data["command"])


def _finding(row: Mapping[str, Any]) -> Finding:
    by_seed = {arm: {int(seed): score for seed, score in of.items()} for arm, of in row["scores"].items()}
    values = {int(seed): value for seed, value in row["values"].items()}
    read = {
        "claim": read_claim(row["claim"], origin=str(row["claim"].get("name"))),
        "judgement": Judgement(**row["judgement"]),
        "scores": by_seed,
        "values": values,
    }
    return Finding(**{**row, **read})
