"""`gonio apply`: a recipe on a checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from gonio.cli.screen import put, say

__all__ = ["command"]


def command(
    recipe: Annotated[str, typer.Argument(help="A built-in recipe or a recipe file.", metavar="RECIPE")],
    checkpoint: Annotated[
        str, typer.Argument(help="State dict of the model (.safetensors, .pt, .pth).", metavar="CKPT")
    ],
    *,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            help="timm:NAME, torchvision:NAME, transformers:NAME, a built-in name, or file.py:factory.",
            metavar="MODEL",
        ),
    ],
    output: Annotated[
        str, typer.Option("-o", "--output", help="Where to write (.safetensors, .pt, .pth).", metavar="OUT")
    ],
    seed: Annotated[int, typer.Option("--seed", help="Of what the recipe draws at random.", metavar="N")] = 0,
) -> None:
    """Apply a recipe to a checkpoint: initialise, swap and parametrise; write the new state dict.

    The recipe is stored in the result, so that `gonio fold` finds it. Penalties act on training and leave no
    trace in a checkpoint.
    """
    from gonio.cli.checkpoint import Checkpoint, check_target, load_into_, read, write
    from gonio.cli.inputs import build_model
    from gonio.errors import NotApplicableError
    from gonio.recipes import Recipe

    check_target(output)
    chosen, found = Recipe.load(recipe), read(checkpoint)
    if found.recipe is not None:
        why = f"the recipe {found.recipe.name!r} was applied to it before"
        raise NotApplicableError(f"the recipe {chosen.name!r}", checkpoint, why, "Start from a plain checkpoint.")
    built = build_model(model)
    load_into_(built, found)
    applied = chosen.apply_(built, seed=seed)
    if applied.penalty is not None:
        applied.penalty.remove()
        say("the recipe's penalty acts on training alone; the checkpoint does not hold it")
    write(Checkpoint(output, built.state_dict(), chosen, seed))
    put(str(applied))
    say(f"checkpoint written to {output}")
