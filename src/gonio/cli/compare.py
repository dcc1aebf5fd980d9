"""`gonio compare`: does it help, and what does it cost?"""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gonio.cli import options
from gonio.cli.group import ExitCode
from gonio.cli.output import print_err, print_out, show
from gonio.errors import InvalidArgumentError, MissingExtraError, UnknownNameError

if TYPE_CHECKING:
    from gonio.compare import Plan, Results
    from gonio.compare.engines import Engine

__all__ = ["compare"]

_TASK, _SEEDS, _STUDY = "digits", 8, Path("gonio-study")

_Recipes = Annotated[
    list[str] | None,
    typer.Argument(help="Built-in recipes or recipe files; default: one per method family.", metavar="RECIPE"),
]
_Task = Annotated[
    str,
    typer.Option(
        "--task",
        help="bytes, digits, points, torchvision:NAME:FOLDER, imagefolder:FOLDER, or file.py:factory.",
        metavar="TASK",
    ),
]
_Model = Annotated[
    str | None, typer.Option("--model", help=f"{options.MODEL_HELP}; default: the task's own.", metavar="MODEL")
]
_Seeds = Annotated[int, typer.Option("--seeds", help="Runs per recipe.", min=1, max=10**6, metavar="N")]
_FirstSeed = Annotated[
    int,
    typer.Option(
        "--first-seed", help="First seed. Choose new seeds to repeat the study independently.", min=0, max=2**62
    ),
]
_Jobs = Annotated[
    int | None, typer.Option("--jobs", help="Runs at the same time; default: one per core.", min=1, metavar="J")
]
_Engine = Annotated[
    str, typer.Option("--engine", help="local, or ray for an already running Ray cluster.", metavar="ENGINE")
]
_Cpus = Annotated[float, typer.Option("--cpus", help="CPUs per run on a cluster.")]
_Gpus = Annotated[float, typer.Option("--gpus", help="GPUs per run on a cluster.")]
_Tune = Annotated[
    int,
    typer.Option(
        "--tune",
        help="Trials to tune the learning rate and the strengths of every recipe and the baseline before the runs.",
        min=0,
        max=10**6,
        metavar="N",
    ),
]
_Robust = Annotated[bool, typer.Option("--robust", help="Attack the trained models and show their accuracy.")]
_SelfTest = Annotated[
    bool, typer.Option("--self-test", help="Compare the baseline with itself: how often is a verdict wrong?")
]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan and its estimated time, and stop.")]
_Script = Annotated[
    str | None,
    typer.Option("--script", help="Your own training, instead of TASK and MODEL.", metavar="FILE.py:FUNCTION"),
]
_Metric = Annotated[str, typer.Option("--metric", help="Name of a script's score.")]
_Unit = Annotated[str, typer.Option("--unit", help="Unit of a script's score, for example %.")]
_Direction = Annotated[
    str, typer.Option("--direction", help="Whether a larger (max) or smaller (min) score of a script is better.")
]
_Sesoi = Annotated[float, typer.Option("--sesoi", help="Smallest effect of interest on a script's score.", min=0)]
_RunTimeout = Annotated[
    float | None,
    typer.Option(
        "--run-timeout",
        help="Stop a run after this many seconds; it counts as failed. Default: never.",
        min=1,
        metavar="SECONDS",
    ),
]
_Study = Annotated[Path, typer.Option("-o", "--output", help="The study's folder.", metavar="STUDY")]


@dataclass(frozen=True)
class _Score:
    """The score of a script."""

    metric: str = "score"
    unit: str = ""
    direction: str = "max"
    sesoi: float = 0.0


@dataclass(frozen=True)
class _Extra:
    """The work of a study beside the runs that it compares."""

    tune: int = 0
    robust: bool = False


@dataclass(frozen=True)
class _Request:
    """The options that decide the results of a study."""

    recipes: tuple[str, ...]
    task: str
    model: str | None
    script: str | None
    seeds: range
    self_test: bool
    score: _Score
    extra: _Extra

    def check(self) -> None:
        """Refuse options that cannot be combined, and missing packages, before the first run."""
        if self.self_test and self.recipes:
            named = ", ".join(self.recipes)
            raise InvalidArgumentError("--self-test compares the baseline with itself", named, "Name no recipe.")
        if self.script is None and self.score != _Score():
            what = "--metric, --unit, --direction and --sesoi describe the score of a script"
            raise InvalidArgumentError(what, "no --script", "A task has its own; leave them out.")
        if self.script is not None and self.extra != _Extra():
            what = "--tune and --robust need a training by gonio"
            raise InvalidArgumentError(what, "--script beside them", "Leave them out.")
        if self.script is not None and (self.task != _TASK or self.model is not None):
            raise InvalidArgumentError(
                "--script trains its own model", "--task or --model beside it", "Leave them out."
            )

    def command(self, study: Path) -> str:
        """The command that reproduces the study: everything but defaults and settings of this machine."""
        words = ["gonio", "compare", *self.recipes, *(["--self-test"] if self.self_test else [])]
        words += ["--task", self.task] if self.task != _TASK else []
        words += ["--model", self.model] if self.model is not None else []
        words += ["--script", self.script] if self.script is not None else []
        for name, value in asdict(self.score).items():
            words += [f"--{name}", str(value)] if value != getattr(_Score, name) else []
        count = self.seeds.stop - self.seeds.start  # len() of a huge range overflows
        words += ["--seeds", str(count)] if count != _SEEDS else []
        words += ["--first-seed", str(self.seeds.start)] if self.seeds.start else []
        words += ["--tune", str(self.extra.tune)] if self.extra.tune else []
        words += ["--robust"] if self.extra.robust else []
        words += ["-o", str(study)] if study != _STUDY else []
        return shlex.join(words)


def compare(
    recipes: _Recipes = None,
    *,
    task: _Task = _TASK,
    model: _Model = None,
    seeds: _Seeds = _SEEDS,
    first_seed: _FirstSeed = 0,
    jobs: _Jobs = None,
    engine: _Engine = "local",
    cpus: _Cpus = 1.0,
    gpus: _Gpus = 0.0,
    tune: _Tune = 0,
    robust: _Robust = False,
    self_test: _SelfTest = False,
    dry_run: _DryRun = False,
    script: _Script = None,
    metric: _Metric = _Score.metric,
    unit: _Unit = _Score.unit,
    direction: _Direction = _Score.direction,
    sesoi: _Sesoi = _Score.sesoi,
    run_timeout: _RunTimeout = None,
    study: _Study = _STUDY,
) -> None:
    """Train recipes and the unchanged model with equal budgets, and test the differences.

    Without arguments: the built-in study, on handwritten digits. Rerun the same command to resume a study; more
    seeds or recipes are added to it.
    """
    score, extra = _Score(metric, unit, direction, sesoi), _Extra(tune, robust)
    drawn = range(first_seed, first_seed + seeds)
    request = _Request(tuple(recipes or ()), task, model, script, drawn, self_test, score, extra)
    request.check()
    plan = _plan(request, study)
    if dry_run:
        _show_plan(plan, study, jobs)
    else:
        _run(plan, study, _engine(engine, jobs, cpus, gpus), run_timeout=run_timeout, self_test=self_test)


def _plan(request: _Request, study: Path) -> Plan:
    from gonio import compare as comparing
    from gonio.cli.inputs import users_code

    recipes = [] if request.self_test else list(request.recipes) or None
    seeds, command = request.seeds, request.command(study)
    with users_code(request.task, request.model):
        if request.script is not None:
            plan = comparing.make_script_plan(
                recipes, script=request.script, seeds=seeds, command=command, **asdict(request.score)
            )
        else:
            plan = comparing.make_plan(
                recipes, task=request.task, model=request.model, seeds=seeds, command=command, **asdict(request.extra)
            )
    return comparing.self_test_plan(plan, size=len(seeds)) if request.self_test else plan


def _show_plan(plan: Plan, study: Path, jobs: int | None) -> None:
    """What would be run, and the changes that each recipe would make to the model."""
    from gonio import compare as comparing
    from gonio.cli.inputs import build_model
    from gonio.compare.planning.plan import extended
    from gonio.recipes import Recipe

    if (study / "plan.json").exists():
        extended(comparing.Study.open(study).plan, plan, path=str(study), finished=0)  # refuses another plan
    print_out(f"study {study}\n{comparing.dry_run(plan, jobs=jobs or comparing.default_jobs())}\n")
    if not plan.scripted:
        model = build_model(plan.model, **comparing.tasks.resolve(plan.task).sizes)
        print_out("\n\n".join(str(Recipe.from_dict(entry.content).plan(model)) for entry in plan.recipes[1:]))


def _engine(name: str, jobs: int | None, cpus: float, gpus: float) -> Engine:
    from gonio.compare.engines import Local, Ray

    if name == "ray":
        return Ray(cpus=cpus, gpus=gpus, jobs=jobs)
    if name != "local":
        raise UnknownNameError("engine", name, ["local", "ray"])
    if (cpus, gpus) != (1.0, 0.0):
        raise InvalidArgumentError("--cpus and --gpus need --engine ray", "--engine local", "Leave them out.")
    return Local(jobs)


def _run(plan: Plan, study: Path, engine: Engine, *, run_timeout: float | None, self_test: bool) -> None:
    """Run the study, show the verdicts and write the page."""
    from gonio import compare as comparing
    from gonio.report import text, write_html

    if find_spec("matplotlib") is None:
        raise MissingExtraError("the page of a study", "matplotlib", "lab")
    size = f"{len(plan.recipes)} recipes (with the baseline) × {len(plan.seeds)} seeds"
    print_err(f"study {study}: {size} = {len(plan.grid)} runs; --dry-run estimates the time")
    watcher = comparing.watcher_for(sys.stderr)
    results = comparing.run(plan, study, engine=engine, watcher=watcher, run_timeout=run_timeout).results()
    show(text(results))
    print_out(f"\npage: {write_html(results, study / 'report.html')}")
    if self_test:
        tested = comparing.self_test(results)
        print_out(f"\n{tested}")
        if not tested.passed:
            raise typer.Exit(ExitCode.FINDING)
    _check_complete(results)


def _check_complete(results: Results) -> None:
    """Exit with 4 if runs failed or are missing."""
    failed = sum(run.status == "failed" for run in results.runs)
    if failed:
        print_err(f"{failed} of {len(results.runs)} runs failed; rerun the same command to try them again")
    if failed or results.missing:
        raise typer.Exit(ExitCode.PARTIAL)
