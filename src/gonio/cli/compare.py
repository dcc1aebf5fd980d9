"""`gonio compare`: does it help, and what does it cost?"""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gonio.cli.exits import ExitCode
from gonio.cli.screen import put, say, show
from gonio.errors import MissingExtraError

if TYPE_CHECKING:
    from gonio.compare import Plan, Results

__all__ = ["command"]

_TASK, _SEEDS, _STUDY = "digits", 8, Path("gonio-study")


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
    jobs: Annotated[
        int | None, typer.Option("--jobs", help="Runs at a time; none: one per core.", min=1, metavar="J")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be run, and stop.")] = False,
    study: Annotated[Path, typer.Option("-o", "--output", help="The study's folder.", metavar="STUDY")] = _STUDY,
) -> None:
    """Train recipes against the unchanged model on equal terms, and judge the differences.

    Without arguments: the built-in study, on handwritten digits. The same command again goes on where it
    was; more seeds or recipes are added to what is there.
    """
    from gonio.cli.inputs import users_code
    from gonio.compare import default_jobs, make_plan, run, watcher_for
    from gonio.compare import dry_run as describe

    words = _command_line(recipes or [], task=task, model=model, seeds=seeds, study=study)
    with users_code(task, model):
        plan = make_plan(recipes or None, task=task, model=model, seeds=seeds, command=words)
    jobs = default_jobs() if jobs is None else jobs
    if dry_run:
        put(f"study {study}\n{describe(plan, jobs=jobs)}\n{_plans(plan)}")
        return
    _require_page()
    results = run(plan, study, jobs=jobs, watcher=watcher_for(sys.stderr)).results()
    _deliver(results, study)
    if _partial(results):
        raise typer.Exit(ExitCode.PARTIAL)


def _command_line(recipes: list[str], *, task: str, model: str | None, seeds: int, study: Path) -> str:
    """The command that reproduces the study: what is not a default, and nothing about this machine."""
    words = ["gonio", "compare", *recipes]
    words += ["--task", task] if task != _TASK else []
    words += ["--model", model] if model is not None else []
    words += ["--seeds", str(seeds)] if seeds != _SEEDS else []
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
