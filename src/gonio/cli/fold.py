"""`gonio fold`: a checkpoint of plain layers that computes the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gonio.cli.screen import put, say

if TYPE_CHECKING:
    from torch import nn

__all__ = ["command"]


def command(
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
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", help="What was applied to the model, if CKPT does not say.", metavar="RECIPE"),
    ] = None,
    where: Annotated[
        str | None, typer.Option("--where", help="Which modules, e.g. 'layer1.*'; none: all that can.")
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(
            "--batch", help="Compare on this input: a shape such as 2x3x224x224, or a file.", metavar="SHAPE|FILE"
        ),
    ] = None,
) -> None:
    """Fold parametrizations, norms and linear decoupled layers of a checkpoint into plain layers.

    The result computes what the model computes in evaluation mode. With `--batch` this is checked, and
    the largest deviation is shown.
    """
    from gonio.cli.batch import check_runs, read_batch
    from gonio.cli.checkpoint import Checkpoint, check_target, load_into_, read, write
    from gonio.cli.inputs import build_model
    from gonio.recipes import Recipe
    from gonio.surgery import fold_

    check_target(output)
    example = None if batch is None else read_batch(batch, option="--batch")
    found = read(checkpoint)
    used = Recipe.load(recipe) if recipe is not None else found.recipe
    built = build_model(model)
    if used is not None:
        penalty = used.apply_(built, seed=found.seed).penalty
        if penalty is not None:
            penalty.remove()
    load_into_(built, found)
    if example is not None:
        check_runs(built, example, option="--batch")
    edited = fold_(built, example=example, where=where)
    write(Checkpoint(output, built.state_dict(), folded=used.hash if used is not None else found.folded))
    put(str(edited))
    if example is None:
        say("the outputs were not compared: give --batch")
    say(f"checkpoint written to {output}; {_fits(build_model(model), built)}")


def _fits(plain: nn.Module, folded: nn.Module) -> str:
    """Whether the folded state dict loads into the model as it is built."""
    before, after = set(plain.state_dict()), set(folded.state_dict())
    if before == after:
        return "it loads into the model"
    return f"it has {len(after - before)} tensors that the model lacks and lacks {len(before - after)} that it has"
