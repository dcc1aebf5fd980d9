"""Try claims: each is a study, and all that are tried together are judged together."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from gonio.errors import InvalidArgumentError
from gonio.lab.claims.claim import Arm, Claim, Experiment, read_claim
from gonio.lab.judging.results import scores_of
from gonio.lab.judging.statistics import VERDICTS, Evidence, contrasts, judge
from gonio.lab.plan import Measure, RecipeEntry, StudyPlan, Tuning, counted, installed_versions, seeds_of
from gonio.lab.record import RunRecord
from gonio.lab.running.measures import spec_of
from gonio.lab.running.scheduler import Quiet, Watcher, run
from gonio.lab.running.study import Study
from gonio.lab.tasks.built_in import resolve as resolve_task
from gonio.lab.tasks.images import FASHION_FOLDER
from gonio.models.by_name import code_digests

_FOLDER_TASK = "fashion-mnist"
# A run of all full experiments takes at least so many seeds: with fewer, the smallest p of a paired test, 2 / 2^seeds,
# would not pass Holm over the catalogue.
FULL_SEEDS = 12
# measures for which models at chance level say nothing
_SCORES = ("accuracy", "accuracy_after", "calibrated_accuracy", "trains")


@dataclass(frozen=True, kw_only=True)
class ClaimOptions:
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


@dataclass(frozen=True)
class ClaimResult:
    """One claim as it was tried.

    Attributes:
        evidence: the decisive contrast of each seed, judged among all claims that were tried together.
        full: whether it was the full experiment. plan: hash of the study's plan; empty if it was not tried.
        scores: of each arm, by seed; a diverged run has the worst score.
        seconds: CPU seconds of all runs. runs: how many there are. missing, failed, diverged: of these.
        histograms: angles of each arm between filters, pooled over layers and seeds, in bins of 2 degrees.
        command: repeats the claim.
    """

    claim: Claim
    evidence: Evidence
    full: bool = False
    plan: str = ""
    task: str = ""
    model: str = ""
    scores: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    seconds: float = 0.0
    runs: int = 0
    missing: int = 0
    failed: int = 0
    diverged: int = 0
    histograms: Mapping[str, Sequence[int]] = field(default_factory=dict)
    command: str = ""

    @property
    def verdict(self) -> str:
        """One of :data:`gonio.lab.claims.VERDICTS`."""
        return self.evidence.verdict

    @property
    def setting(self) -> Experiment | None:
        """The experiment; None if the claim was not tried."""
        return self.claim.setting(full=self.full) if self.plan else None

    @property
    def unit(self) -> str:
        """Of the scores."""
        return self.evidence.unit

    @property
    def measured(self) -> str:
        """What the scores are, in one sentence; empty if the claim was not tried."""
        return spec_of(Measure(self.claim.measure)).summary if self.plan else ""

    @property
    def values(self) -> Mapping[int, float]:
        """The decisive contrast, by seed."""
        scores = {(arm, seed): score for arm, of in self.scores.items() for seed, score in of.items()}
        seeds = sorted({seed for _, seed in scores})
        return contrasts(scores, self.setting.decisive, seeds) if self.setting else {}

    def mean(self, arm: str) -> float | None:
        """Mean score of an arm."""
        found = self.scores.get(arm)
        return statistics.fmean(found.values()) if found else None


@dataclass(frozen=True)
class ClaimResults:
    """All claims of one run.

    Attributes:
        versions: of the packages. command: repeats the run.
    """

    results: tuple[ClaimResult, ...]
    versions: Mapping[str, str]
    command: str

    @property
    def tried(self) -> tuple[ClaimResult, ...]:
        """The claims with an experiment."""
        return tuple(found for found in self.results if found.verdict != "not tried")

    @property
    def headline(self) -> str:
        """How many claims ended with each verdict, in one sentence."""
        counts = {name: sum(f.verdict == name for f in self.tried) for name in VERDICTS}
        listed = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        tried = counted(len(self.tried), "claim")
        return f"{tried} tried on this machine: {listed}" if listed else "No claim was tried."


# --- the plan ---------------------------------------------------------------------------------------------


def plan_claim(claim: Claim, options: ClaimOptions | None = None) -> StudyPlan:
    """The plan of a claim's study.

    Raises:
        InvalidArgumentError: the claim is not tried; or another model is chosen, and its arms differ in arguments of
            the claim's own model.
        UnmatchedRuleError: a rule of a recipe matches no layer of the model.

    Example:
        >>> plan = gonio.lab.claims.plan_claim(gonio.lab.claims.load_claim("som-spread"))
        >>> plan.measure.name, [entry.name for entry in plan.recipes], len(plan.seeds)
        ('angle_spread', ['plain', 'self-orthogonality'], 10)
    """
    options = options or ClaimOptions()
    setting = claim.setting(full=options.full)
    if options.model is not None and any(arm.model for arm in setting.arms):
        raise InvalidArgumentError(
            f"the arms of {claim.name} differ in arguments of {setting.model.get('name')}", f"--model {options.model}",
            "Leave --model out, or choose a claim whose arms are recipes.",
        )  # fmt: skip
    named = options.task or setting.task
    spec = f"{_FOLDER_TASK}:{options.data or FASHION_FOLDER}" if named == _FOLDER_TASK else named
    task = resolve_task(spec)
    model = options.model or setting.model.get("name", task.model)
    own = max(setting.seeds, FULL_SEEDS) if options.full else setting.seeds
    seeds = range(options.first_seed, options.first_seed + (own if options.seeds is None else options.seeds))
    measure = Measure(claim.measure, dict(claim.options))
    measured = spec_of(measure)
    plan = StudyPlan(
        task=spec,
        model=model,
        recipes=tuple(_entry(arm, setting, own=options.model is None) for arm in setting.arms),
        seeds=seeds_of(seeds),
        training=setting.training.override(task.training),
        metric=claim.measure,
        # the better scores are those of the measure where it says so, else those that confirm the claim
        direction=measured.better or ("min" if claim.direction == "smaller" else "max"),
        unit=measured.unit,
        splits={name: len(split) for name, split in task.splits.items()},
        data=task.digest(),
        sesoi=claim.sesoi,
        worst=measured.worst,
        code=code_digests(spec, model),
        versions=installed_versions(),
        command=f"gonio reproduce {claim.name}",
        tuning=Tuning(trials=setting.tune) if setting.tune else None,
        threat=task.threat if measured.attacked else None,
        measure=measure,
    )
    with torch.random.fork_rng(devices=[]):
        for arm, entry in zip(setting.arms, plan.recipes, strict=True):  # a rule without a layer is an error now
            arm.built_recipe.plan(plan.fresh_model(entry, task.sizes))
    return plan


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
) -> ClaimResults:
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
        >>> options = gonio.lab.claims.ClaimOptions(seeds=3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found = gonio.lab.claims.try_claims(claims, folder, options=options, jobs=2)
        >>> found.headline
        '1 claim tried on this machine: 1 reproduced'
    """
    options, watcher = options or ClaimOptions(), watcher or Quiet()
    plans = {claim.name: plan_claim(claim, options) for claim in claims if claim.budget != "none"}
    for claim in claims:
        if claim.name in plans:
            watcher.stage(f"{claim.name}: {claim.claim}")
            run(plans[claim.name], Path(folder) / claim.name, jobs=jobs, watcher=watcher)
    return judge_claims(claims, folder, full=options.full, command=command)


def judge_claims(
    claims: Sequence[Claim], folder: str | Path, *, full: bool = False, command: str = "gonio reproduce"
) -> ClaimResults:
    """The verdicts of the studies in a folder, as far as they have run; nothing is trained.

    Example:
        >>> gonio.lab.claims.judge_claims([gonio.lab.claims.load_claim("bn-imagenet")], "no-folder").headline
        'No claim was tried.'
    """
    seen = [_seen(claim, Path(folder) / claim.name, full=full) for claim in claims]
    return ClaimResults(_judged(seen), installed_versions(), command)


def _judged(found: Sequence[ClaimResult]) -> tuple[ClaimResult, ...]:
    """The results with the verdicts of one family; a claim that was not tried is no part of it."""
    verdicts = iter(judge([one.evidence for one in found if one.plan]))
    return tuple(replace(one, evidence=next(verdicts)) if one.plan else one for one in found)


def _seen(claim: Claim, path: Path, *, full: bool) -> ClaimResult:
    """A claim's result before it is judged."""
    if claim.budget == "none" or not path.is_dir():
        return ClaimResult(claim, _not_tried(claim, claim.not_tried or "Not run."))
    study, setting = Study.open(path), claim.setting(full=full)
    plan, runs = study.plan, study.runs()
    scores = scores_of(plan, runs)
    statuses = [record.status for record in runs]
    return ClaimResult(
        claim,
        _evidence(
            claim, [*contrasts(scores, setting.decisive, plan.seeds).values()], plan.unit,
            _obstacle(claim, setting, plan, scores),
        ),
        full=full,
        plan=plan.hash,
        task=plan.task.partition(":")[0] if plan.task.startswith(_FOLDER_TASK) else plan.task,
        model=plan.model,
        scores={
            arm.name: {seed: scores[arm.name, seed] for seed in plan.seeds if (arm.name, seed) in scores}
            for arm in setting.arms
        },
        seconds=sum(record.seconds or 0.0 for record in runs),
        runs=len(plan.grid),
        missing=len(plan.grid) - len(runs),
        failed=statuses.count("failed"),
        diverged=statuses.count("diverged"),
        histograms=_histograms(setting, runs) if claim.picture == "angles" else {},
        command=plan.command,
    )  # fmt: skip


def _evidence(claim: Claim, values: Sequence[float], unit: str, obstacle: str) -> Evidence:
    return Evidence(
        values=tuple(values), direction=claim.direction, sesoi=claim.sesoi, unit=unit, obstacle=obstacle
    )  # fmt: skip


def _not_tried(claim: Claim, reason: str) -> Evidence:
    return replace(_evidence(claim, (), "", ""), verdict="not tried", reason=reason)


def _obstacle(claim: Claim, setting: Experiment, plan: StudyPlan, scores: Mapping[tuple[str, int], float]) -> str:
    """If no arm of the contrast is better than guessing, their difference says nothing about the claim."""
    reached = [score for (arm, _), score in scores.items() if arm in setting.decisive]
    if claim.measure not in _SCORES or not reached:
        return ""
    guess = 100.0 / max(2, resolve_task(plan.task).sizes.get("num_classes", 2))
    if max(reached) > 1.5 * guess:
        return ""
    return (
        "No arm trains." if claim.measure == "trains" else f"No arm trains: the best accuracy is {max(reached):.3g} %."
    )


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


# --- as data ----------------------------------------------------------------------------------------------


def as_data(found: ClaimResults) -> dict[str, Any]:
    """The results as JSON-able data, each number of a run included.

    Example:
        >>> found = gonio.lab.claims.judge_claims([gonio.lab.claims.load_claim("bn-imagenet")], "no-folder")
        >>> gonio.lab.claims.as_data(found)["claims"][0]["evidence"]["verdict"]
        'not tried'
    """
    claims = []
    for one in found.results:
        content = one.claim.model_dump(mode="json", exclude_defaults=True)
        claims.append({**asdict(replace(one, claim=None)), "claim": content})  # type: ignore[arg-type]
    return {"command": found.command, "versions": dict(found.versions), "claims": claims}


def from_data(data: Mapping[str, Any]) -> ClaimResults:
    """The inverse of :func:`as_data`, also after JSON has made text of the seeds; judged anew by the rules of now.

    Example:
        >>> found = gonio.lab.claims.judge_claims([gonio.lab.claims.load_claim("bn-imagenet")], "no-folder")
        >>> gonio.lab.claims.from_data(gonio.lab.claims.as_data(found)) == found
        True
    """
    return ClaimResults(_judged([_result(row) for row in data["claims"]]), data["versions"], data["command"])


def _result(row: Mapping[str, Any]) -> ClaimResult:
    """One stored claim before it is judged; a row of gonio 0.1 has `judgement`, `unit` and `values` for `evidence`."""
    claim = read_claim(row["claim"], origin=str(row["claim"].get("name")))
    known = {each.name: row[each.name] for each in fields(ClaimResult) if each.name in row}
    known["scores"] = {arm: {int(seed): score for seed, score in of.items()} for arm, of in row["scores"].items()}
    if not row["plan"]:
        reason = row.get("evidence", row.get("judgement"))["reason"]
        return ClaimResult(**{**known, "claim": claim, "evidence": _not_tried(claim, reason)})
    if "evidence" in row:
        stored = row["evidence"]
        values, unit, obstacle = stored["values"], stored["unit"], stored["obstacle"]
    else:
        values, unit, reason = row["values"].values(), row["unit"], row["judgement"]["reason"]
        obstacle = reason if reason.startswith("No arm trains") else ""
    evidence = _evidence(claim, values, unit, obstacle)
    return ClaimResult(**{**known, "claim": claim, "evidence": evidence})
