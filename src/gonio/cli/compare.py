"""`gonio compare`: does it help, and what does it cost?"""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gonio.cli.exits import ExitCode
from gonio.cli.screen import put, say, show
from gonio.errors import InvalidArgumentError, MissingExtraError, UnknownNameError

if TYPE_CHECKING:
    from gonio.compare import Plan, Results
    from gonio.compare.engines import Engine

__all__ = ["command"]

_TASK, _SEEDS, _STUDY = "digits", 8, Path("gonio-study")
_METRIC, _DIRECTION = "score", "max"


def command(
    recipes: Annotated[
        list[str] | None,
        typer.Argument(help="Built-in recipes or recipe files; none: one per method family.", metavar="RECIPE"),
    ] = None,
    *,
    task: Annotated[
        str,
        typer.Option(
            "--task",
            help="bytes, digits, points, torchvision:NAME:FOLDER, imagefolder:FOLDER, or file.py:factory.",
            metavar="TASK",
        ),
    ] = _TASK,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="timm:NAME, torchvision:NAME, transformers:NAME, a built-in name, or file.py:factory; "
            "none: the task's own.",
            metavar="MODEL",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", help="Runs per recipe.", min=1, metavar="N")] = _SEEDS,
    first_seed: Annotated[
        int,
        typer.Option("--first-seed", help="The first of them; others than before ask the question anew.", min=0),
    ] = 0,
    jobs: Annotated[
        int | None, typer.Option("--jobs", help="Runs at a time; none: one per core.", min=1, metavar="J")
    ] = None,
    engine: Annotated[
        str, typer.Option("--engine", help="local, or ray: a Ray cluster that exists.", metavar="ENGINE")
    ] = "local",
    cpus: Annotated[float, typer.Option("--cpus", help="CPUs that one run occupies on a cluster.")] = 1.0,
    gpus: Annotated[float, typer.Option("--gpus", help="GPUs that one run occupies on a cluster.")] = 0.0,
    tune: Annotated[
        int,
        typer.Option(
            "--tune",
            help="Trials for the learning rate and the strengths of every recipe and the baseline, before the runs.",
            min=0,
            metavar="N",
        ),
    ] = 0,
    robust: Annotated[
        bool, typer.Option("--robust", help="Attack the trained models, and show what they still get right.")
    ] = False,
    self_test: Annotated[
        bool,
        typer.Option("--self-test", help="The baseline against itself: how often is a verdict wrong?"),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be run, and stop.")] = False,
    script: Annotated[
        str | None,
        typer.Option("--script", help="Your own training, instead of TASK and MODEL.", metavar="FILE.py:FUNCTION"),
    ] = None,
    metric: Annotated[str, typer.Option("--metric", help="What a script's score is called.")] = _METRIC,
    unit: Annotated[str, typer.Option("--unit", help="The unit of a script's score, for example %.")] = "",
    direction: Annotated[
        str, typer.Option("--direction", help="Whether a larger (max) or smaller (min) score of a script is better.")
    ] = _DIRECTION,
    sesoi: Annotated[
        float, typer.Option("--sesoi", help="Smallest effect of interest on a script's score; 0: none.", min=0)
    ] = 0.0,
    study: Annotated[Path, typer.Option("-o", "--output", help="The study's folder.", metavar="STUDY")] = _STUDY,
) -> None:
    """Train recipes against the unchanged model on equal terms, and judge the differences.

    Without arguments: the built-in study, on handwritten digits. The same command again goes on where it
    was; more seeds or recipes are added to what is there.
    """
    from gonio.cli.inputs import users_code
    from gonio.compare import default_jobs, make_plan, make_script_plan, run, self_test_plan, watcher_for
    from gonio.compare import dry_run as describe

    scored = _Scored(metric, unit, direction, sesoi)
    more = _Extra(tune=tune, robust=robust)
    drawn = range(first_seed, first_seed + seeds)
    named = [*(recipes or []), *(["--self-test"] if self_test else [])]
    words = _command_line(
        named, task=task, model=model, seeds=drawn, study=study, script=script, scored=scored, more=more
    )
    _check_script(script, task, model, scored, more)
    chosen = _recipes(recipes, self_test=self_test)
    with users_code(task, model):
        if script is None:
            plan = make_plan(chosen, task=task, model=model, seeds=drawn, command=words, **asdict(more))
        else:
            plan = make_script_plan(chosen, script=script, seeds=drawn, command=words, **asdict(scored))
    plan = self_test_plan(plan, size=seeds) if self_test else plan
    if dry_run:
        put(f"study {study}\n{describe(plan, jobs=jobs or default_jobs())}\n{'' if plan.scripted else _plans(plan)}")
        return
    _require_page()
    made = _engine(engine, jobs, cpus, gpus)
    results = run(plan, study, engine=made, watcher=watcher_for(sys.stderr)).results()
    _deliver(results, study)
    if self_test:
        _say_self_test(results)
    if _partial(results):
        raise typer.Exit(ExitCode.PARTIAL)


def _engine(name: str, jobs: int | None, cpus: float, gpus: float) -> Engine:
    from gonio.compare.engines import Local, Ray

    if name == "ray":
        return Ray(cpus=cpus, gpus=gpus, jobs=jobs)
    if name != "local":
        raise UnknownNameError("engine", name, ["local", "ray"])
    if (cpus, gpus) != (1.0, 0.0):
        raise InvalidArgumentError("--cpus and --gpus are for --engine ray", "--engine local", "Leave them out.")
    return Local(jobs)


def _recipes(recipes: list[str] | None, *, self_test: bool) -> list[str] | None:
    """Those that were named; a self-test has none."""
    if self_test and recipes:
        raise InvalidArgumentError(
            "--self-test compares the baseline with itself", ", ".join(recipes), "Name no recipe."
        )
    return [] if self_test else recipes or None


def _say_self_test(results: Results) -> None:
    from gonio.compare import self_test

    found = self_test(results)
    put(f"\n{found}")
    if not found.passed:
        raise typer.Exit(ExitCode.FINDING)


@dataclass(frozen=True)
class _Scored:
    """What a script's score means."""

    metric: str = _METRIC
    unit: str = ""
    direction: str = _DIRECTION
    sesoi: float = 0.0


@dataclass(frozen=True)
class _Extra:
    """What a study does beside the runs that it compares."""

    tune: int = 0
    robust: bool = False


def _check_script(script: str | None, task: str, model: str | None, scored: _Scored, more: _Extra) -> None:
    """A script brings its own task and model, and nothing but a script needs its score explained."""
    if script is not None and more != _Extra():
        raise InvalidArgumentError(
            "--tune and --robust are for training that gonio does", "--script beside them", "Leave them out."
        )
    if script is not None and (task != _TASK or model is not None):
        raise InvalidArgumentError("--script trains its own model", "--task or --model beside it", "Leave them out.")
    if script is None and scored != _Scored():
        raise InvalidArgumentError(
            "--metric, --unit, --direction and --sesoi describe the score of a script",
            "no --script",
            "A task has its own; leave them out.",
        )


def _command_line(
    recipes: list[str],
    *,
    task: str,
    model: str | None,
    seeds: range,
    study: Path,
    script: str | None = None,
    scored: _Scored = _Scored(),
    more: _Extra = _Extra(),
) -> str:
    """The command that reproduces the study: what is not a default, and nothing about this machine."""
    words = ["gonio", "compare", *recipes]
    words += ["--task", task] if task != _TASK else []
    words += ["--model", model] if model is not None else []
    words += ["--script", script] if script is not None else []
    for name, value in asdict(scored).items():
        words += [f"--{name}", str(value)] if value != getattr(_Scored, name) else []
    words += ["--seeds", str(len(seeds))] if len(seeds) != _SEEDS else []
    words += ["--first-seed", str(seeds.start)] if seeds.start else []
    words += ["--tune", str(more.tune)] if more.tune else []
    words += ["--robust"] if more.robust else []
    words += ["-o", str(study)] if study != _STUDY else []
    return shlex.join(words)


def _plans(plan: Plan) -> str:
    """What each recipe would do to the model."""
    from gonio.cli.inputs import build_model
    from gonio.compare.tasks import resolve
    from gonio.recipes import Recipe

    model = build_model(plan.model, **resolve(plan.task).sizes)
    return "".join(f"\n{Recipe.from_dict(entry.content).plan(model)}\n" for entry in plan.recipes[1:])


def _require_page() -> None:
    """Missing packages are found before the first run and not after the last."""
    for package in ("jinja2", "matplotlib"):
        if find_spec(package) is None:
            raise MissingExtraError("the page of a study", package, "lab")


def _deliver(results: Results, study: Path) -> None:
    from gonio.report import text, write_html

    show(text(results))
    page = write_html(results, study / "report.html")
    put(f"\n{page}")


def _partial(results: Results) -> bool:
    lost = sum(run.status == "failed" for run in results.runs)
    if lost:
        say(f"{lost} of {len(results.runs)} runs failed; the same command tries them again")
    return lost > 0 or results.missing > 0
