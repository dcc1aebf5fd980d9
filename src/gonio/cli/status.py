"""`gonio status`: which runs of a study are done."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gonio.cli.screen import put

if TYPE_CHECKING:
    from gonio.compare import Plan, RunRecord

__all__ = ["command"]

_SIGNS = {"finished": "+", "diverged": "!", "failed": "x", None: "."}


def command(study: Annotated[Path, typer.Argument(help="The study's folder.", metavar="STUDY")]) -> None:
    """Show which runs of a study are done, one line per recipe and one sign per seed."""
    from gonio.compare import Study

    opened = Study.open(study)
    put(_grid(opened.plan, opened.runs()))


def _grid(plan: Plan, runs: tuple[RunRecord, ...]) -> str:
    from gonio.escaping import plain

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
    trouble = [f"{names[r.recipe]}, seed {r.seed}: {r.status}: {plain(r.error or '')}" for r in runs if r.error]
    return "\n".join([*lines, "", f"{len(plan.grid)} runs: {counts}, {missing} to do (.)", *trouble])
