"""`gonio explain`: the meaning of a finding."""

from __future__ import annotations

from typing import Annotated

import typer

from gonio.cli.output import print_out

__all__ = ["explain"]


def explain(
    rule: Annotated[
        str | None, typer.Argument(help="The code of a finding, e.g. G001; without one, list all.", metavar="RULE")
    ] = None,
) -> None:
    """Explain a finding of `gonio measure`: its meaning, what to do, and how often it is a false alarm."""
    from gonio.measuring.rules import RULES
    from gonio.measuring.rules import explain as explained

    if rule is not None:
        print_out(explained(rule))
        return
    for known in RULES.values():
        print_out(f"{known.code}  {known.level:<5}  {known.title}")
