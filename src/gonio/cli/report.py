"""`gonio report`: a study's results as a page, a table or data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gonio.cli.screen import deliver, show

__all__ = ["command"]


def _output(flag: str, what: str) -> Any:
    return typer.Option(flag, help=f"Write {what} there; - is stdout.", metavar="FILE")


def command(
    study: Annotated[Path, typer.Argument(help="The study's folder.", metavar="STUDY")],
    html: Annotated[str | None, _output("--html", "one self-contained page")] = None,
    json: Annotated[str | None, _output("--json", "everything as JSON")] = None,
    csv: Annotated[str | None, _output("--csv", "one line per recipe")] = None,
    md: Annotated[str | None, _output("--md", "the verdict table as markdown")] = None,
) -> None:
    """Write a study's results; without an option, show the verdict table.

    Works on a study that is still running, with what it has so far.
    """
    from gonio import report
    from gonio.compare import Study

    results = Study.open(study).results()
    formats = (
        (html, report.html, "page"),
        (json, report.to_json, "JSON"),
        (csv, report.to_csv, "CSV"),
        (md, report.to_markdown, "markdown"),
    )
    for target, convert, what in formats:
        if target is not None:
            deliver(convert(results), target, what)
    if not any(target for target, _, _ in formats):
        show(report.text(results))
