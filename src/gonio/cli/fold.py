"""`gonio fold`: a checkpoint of plain layers that computes the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gonio.cli.screen import put, say

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["command"]


def command(
    checkpoint: Annotated[
        str, typer.Argument(help="State dict of the model (.safetensors, .pt, .pth).", metavar="CKPT")
    ],
    *,
    model: Annotated[
        str,
        typer.Option(
            "--model", help="timm:NAME, torchvision:NAME, a built-in name, or file.py:factory.", metavar="MODEL"
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
    shape: Annotated[
        str | None,
        typer.Option("--input", help="Shape of an input on which to compare, e.g. 2x3x224x224.", metavar="SHAPE"),
    ] = None,
) -> None:
    """Fold parametrizations, norms and linear decoupled layers of a checkpoint into plain layers.

    The result computes what the model computes in evaluation mode. With `--input` this is checked on random
    numbers, and the largest deviation is shown.
    """
    from gonio.cli.checkpoint import Checkpoint, check_target, load_into_, read, write
    from gonio.cli.inputs import build_model
    from gonio.recipes import Recipe
    from gonio.surgery import fold_

    check_target(output)
    example = None if shape is None else _example(shape)
    found = read(checkpoint)
    used = Recipe.load(recipe) if recipe is not None else found.recipe
    built = build_model(model)
    if used is not None:
        penalty = used.apply_(built, seed=found.seed).penalty
        if penalty is not None:
            penalty.remove()
    load_into_(built, found)
    _check_runs(built, example)
    edited = fold_(built, example=example, where=where)
    write(Checkpoint(output, built.state_dict()))
    put(str(edited))
    if example is None:
        say("the outputs were not compared: give --input")
    say(f"checkpoint written to {output}; {_fits(build_model(model), built)}")


def _example(shape: str) -> Tensor:
    """Standard normal numbers, the same in every call."""
    import torch

    from gonio.errors import InvalidArgumentError
    from gonio.seeding import generator

    sizes = shape.split("x")
    if not all(size.isdigit() and int(size) > 0 for size in sizes):
        raise InvalidArgumentError("--input takes positive sizes joined by x", repr(shape), "Write e.g. 2x3x224x224.")
    return torch.randn([int(size) for size in sizes], generator=generator(0, "input"))


def _check_runs(model: nn.Module, example: Tensor | None) -> None:
    """A shape that the model cannot take is the user's mistake, and is said so."""
    from gonio.errors import GonioError, InvalidArgumentError
    from gonio.surgery.equivalent import outputs

    if example is None:
        return
    try:
        outputs(model, example)
    except GonioError:
        raise
    except Exception as error:  # whatever a user's model raises
        found = f"{tuple(example.shape)} ({str(error).splitlines()[0]})"
        raise InvalidArgumentError("--input must be a shape that the model takes", found, "Correct it.") from error


def _fits(plain: nn.Module, folded: nn.Module) -> str:
    """Whether the folded state dict loads into the model as it is built."""
    before, after = set(plain.state_dict()), set(folded.state_dict())
    if before == after:
        return "it loads into the model"
    return f"it has {len(after - before)} tensors that the model lacks and lacks {len(before - after)} that it has"
