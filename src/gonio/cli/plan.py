"""`gonio plan`: which rule takes which layer, before anything happens."""

from __future__ import annotations

from typing import Annotated

import typer

from gonio.cli.screen import put

__all__ = ["command"]


def command(
    recipe: Annotated[str, typer.Argument(help="A built-in recipe or a recipe file.", metavar="RECIPE")],
    model: Annotated[
        str,
        typer.Option(
            "--model",
            help="timm:NAME, torchvision:NAME, transformers:NAME, a built-in name, or file.py:factory.",
            metavar="MODEL",
        ),
    ],
) -> None:
    """Show which rule of a recipe would take which layer of a model, and what would stay untouched."""
    from gonio.cli.inputs import build_model
    from gonio.recipes import Recipe

    found = Recipe.load(recipe)
    put(str(found.plan(build_model(model))))
