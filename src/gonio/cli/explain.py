"""`gonio explain`: what a finding means."""

from __future__ import annotations

from typing import Annotated

import typer

from gonio.cli.screen import put

__all__ = ["command"]


def command(
    rule: Annotated[
        str | None, typer.Argument(help="The code of a finding, e.g. G001; none: list them.", metavar="RULE")
    ] = None,
) -> None:
    """Explain a finding of `gonio measure`: what it means, what chance shows, what to do, how often it errs."""
    from gonio.measuring.rules import RULES, explain

    if rule is not None:
        put(explain(rule))
        return
    for known in RULES.values():
        put(f"{known.code}  {known.level:<5}  {known.title}")
