"""`gonio report`: a study's results as a page, a table or data; several studies as one table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gonio.cli.screen import deliver, show
from gonio.errors import InvalidArgumentError

if TYPE_CHECKING:
    from gonio.compare import Results

__all__ = ["command"]

_WORDS = {"html": "page", "json": "JSON", "csv": "CSV", "md": "markdown", "tex": "LaTeX"}


def _output(flag: str, what: str) -> Any:
    return typer.Option(flag, help=f"Write {what} there; - is stdout.", metavar="FILE")


def command(
    studies: Annotated[list[Path], typer.Argument(help="The folder of a study, or of several.", metavar="STUDY")],
    html: Annotated[str | None, _output("--html", "one self-contained page")] = None,
    json: Annotated[str | None, _output("--json", "everything as JSON")] = None,
    csv: Annotated[str | None, _output("--csv", "one line per recipe")] = None,
    md: Annotated[str | None, _output("--md", "the verdict table as markdown")] = None,
    tex: Annotated[str | None, _output("--tex", "the verdict table as LaTeX")] = None,
) -> None:
    """Write a study's results; without an option, show the verdict table.

    Works on a study that is still running, with what it has so far. Several studies, of different tasks, give
    what each of their common recipes does over all tasks.
    """
    from gonio.compare import Study

    targets = {"html": html, "json": json, "csv": csv, "md": md, "tex": tex}
    found = [Study.open(study).results() for study in studies]
    if len(found) == 1:
        _one(found[0], targets)
    else:
        _several(found, targets)


def _one(results: Results, targets: Mapping[str, str | None]) -> None:
    from gonio import report

    formats = {
        "html": report.html,
        "json": report.to_json,
        "csv": report.to_csv,
        "md": report.to_markdown,
        "tex": report.to_latex,
    }
    for name, target in targets.items():
        if target is not None:
            deliver(formats[name](results), target, _WORDS[name])
    if not any(targets.values()):
        show(report.text(results))


def _several(found: list[Results], targets: Mapping[str, str | None]) -> None:
    from gonio.compare import across
    from gonio.report.several import SEVERAL_FORMATS, several_text

    if targets["html"] is not None:
        raise InvalidArgumentError(
            "a page is of one study", f"{len(found)} studies", "Name one, or use another format."
        )
    for name, target in targets.items():
        if target is not None:
            deliver(SEVERAL_FORMATS[name](across(found)), target, _WORDS[name])
    if not any(targets.values()):
        show(several_text(found))
