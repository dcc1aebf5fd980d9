"""`gonio report` and `gonio status`: the results and the progress of studies."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gonio.cli import options
from gonio.cli.app import check_folders, print_out, save_formats, show
from gonio.errors import InvalidArgumentError, StudyError
from gonio.escaping import plain
from gonio.messages import counted, say

if TYPE_CHECKING:
    from gonio.lab import RunRecord, StudyPlan

_SIGNS = {"finished": "+", "diverged": "!", "failed": "x", None: "."}


def report(
    studies: Annotated[list[Path], typer.Argument(help="The folders of one or several studies.", metavar="STUDY")],
    html: options.Html = None,
    json: options.Json = None,
    csv: options.Csv = None,
    md: options.Md = None,
    tex: options.Tex = None,
) -> None:
    """Show the verdicts of a study, or write them as a page, JSON, CSV, markdown or LaTeX.

    A study that is still running is reported with its results so far. Several studies of different tasks give the
    effects of their common recipes over all tasks. The study of a claim, or the folder of gonio reproduce, gives the
    verdicts of its claims.
    """
    from gonio.lab import Study, across, showing
    from gonio.lab.claims import claims_in
    from gonio.lab.showing.claims import CLAIM_FORMATS, claims_text
    from gonio.lab.showing.exports import MULTI_TASK_FORMATS, multi_task_text

    targets = {"html": html, "json": json, "csv": csv, "md": md, "tex": tex}
    check_folders(targets, [str(study / own) for study in studies for own in ("plan.json", "study.db")])
    for study in studies:
        _check_folder(study)
    if len(studies) == 1 and (claims := claims_in(studies[0])) is not None:
        if not save_formats(targets, {name: partial(make, claims) for name, make in CLAIM_FORMATS.items()}):
            show(claims_text(claims))
        return
    opened = [Study.open(study) for study in studies]
    found = [study.results() for study in opened]
    if len(found) == 1:
        if not save_formats(targets, {name: partial(make, found[0]) for name, make in showing.FORMATS.items()}):
            show(showing.text(found[0]))
            _print_damage(opened[0].damaged())
        return
    if html is not None:
        message = f"{len(found)} studies"
        raise InvalidArgumentError("a page is of one study", message, "Name one study, or use another format.")
    together = across(found)
    if not save_formats(targets, {name: partial(make, together) for name, make in MULTI_TASK_FORMATS.items()}):
        show(multi_task_text(found))


def status(study: Annotated[Path, typer.Argument(help="The study's folder.", metavar="STUDY")]) -> None:
    """Show which runs of a study are done: one line per recipe, one character per seed."""
    from gonio.lab import Study

    _check_folder(study)
    opened = Study.open(study)
    print_out(_grid(opened.plan, opened.runs()))
    for tuned in opened.trials.summary():
        lost = f", {tuned.failed} failed" if tuned.failed else ""
        trials = opened.plan.tuning.trials if opened.plan.tuning else 0
        print_out(
            say(
                "tuning of {recipe}: {trials} of {trials_2} trials{lost}",
                recipe=plain(tuned.recipe),
                trials=tuned.trials,
                trials_2=trials,
                lost=lost,
            )
        )
    _print_damage(opened.damaged())


def _print_damage(names: list[str]) -> None:
    """The rows of the database that are damaged; they count as absent."""
    for name in names:
        print_out(say("damaged in study.db and left out: {name}", name=name))


def _check_folder(study: Path) -> None:
    if not study.exists():
        raise StudyError(str(study), "there is no such folder", "Check the path.")
    if not study.is_dir():
        raise StudyError(str(study), "it is not a folder", "Check the path.")


def _grid(plan: StudyPlan, runs: tuple[RunRecord, ...]) -> str:
    from gonio.lab.record import trouble

    status = {(run.recipe, run.seed): run.status for run in runs}
    names = {recipe.name: plain(recipe.name) for recipe in plan.recipes}
    width = max(map(len, names.values()))
    lines = [
        f"{shown:<{width}}  {''.join(_SIGNS[status.get((name, seed))] for seed in plan.seeds)}"
        for name, shown in names.items()
    ]
    found = list(status.values())
    counts = ", ".join(f"{found.count(kind)} {kind} ({_SIGNS[kind]})" for kind in ("finished", "diverged", "failed"))
    missing = len(plan.grid) - len(found)
    errors = [plain(said) for said in map(trouble, runs) if said]
    return "\n".join([*lines, "", f"{counted(len(plan.grid), 'run')}: {counts}, {missing} to do (.)", *errors])
