"""`gonio plan`, `gonio apply` and `gonio fold`: recipes on models and checkpoints."""

from __future__ import annotations

from typing import Annotated

import typer

from gonio.cli import options
from gonio.cli.app import print_err, print_out
from gonio.messages import counted, say


def plan(recipe: options.Recipe, model: options.Model) -> None:
    """Show which rule of a recipe applies to which layer of a model.

    Also shows the layers that no rule changes. Nothing is changed.
    """
    from gonio.cli.inputs import build_model
    from gonio.recipes import Recipe

    found = Recipe.load(recipe)
    print_out(str(found.plan(build_model(model))))


def apply(
    recipe: options.Recipe,
    checkpoint: options.Checkpoint,
    *,
    model: options.Model,
    output: options.Output,
    key: options.Key = None,
    seed: options.Seed = 0,
) -> None:
    """Apply a recipe to a checkpoint and write the new state dict.

    The recipe is stored in the result, where `gonio fold` finds it. Penalties, optimizers and holds act during training
    only and do not change a checkpoint.
    """
    from gonio.cli.checkpoint import Checkpoint, check_target, load_into_, read, write
    from gonio.cli.inputs import build_model
    from gonio.errors import NotApplicableError
    from gonio.recipes import Recipe
    from gonio.recipes.catalogue import TRAINING

    check_target(output, [recipe, checkpoint, model])
    chosen, found = Recipe.load(recipe), read(checkpoint, key=key)
    if found.recipe is not None:
        why = f"the recipe {found.recipe.name!r} was applied to it before"
        raise NotApplicableError(
            say("the recipe {name!r}", name=chosen.name), checkpoint, why, "Start from a plain checkpoint."
        )
    built = build_model(model)
    load_into_(built, found)
    applied = chosen.apply_(built, seed=seed)
    if applied.penalty is not None:
        applied.penalty.undo_()
        print_err(
            say("the recipe's {part} acts during training only; the checkpoint does not contain it", part="penalty")
        )
    for part in (part for part in TRAINING if getattr(chosen, part) is not None):
        print_err(say("the recipe's {part} acts during training only; the checkpoint does not contain it", part=part))
    write(Checkpoint(output, built.state_dict(), chosen, seed), found)
    print_out(str(applied))
    print_err(say("checkpoint written to {output}", output=output))


def fold(
    checkpoint: options.Checkpoint,
    *,
    model: options.Model,
    output: options.Output,
    recipe: Annotated[
        str | None, typer.Option(help="The recipe of the checkpoint, if CKPT does not contain it.", metavar="RECIPE")
    ] = None,
    where: Annotated[
        str | None, typer.Option(help="Fold these modules only, e.g. 'layer1.*'.", metavar="WHERE")
    ] = None,
    batch: options.Batch = None,
    key: options.Key = None,
) -> None:
    """Fold parametrizations, norms and linear decoupled layers of a checkpoint into plain layers.

    The result computes the same function in evaluation mode. `--batch` compares the outputs on this input and shows
    the largest deviation.
    """
    from gonio.cli.checkpoint import Checkpoint, check_target, read, restored_model, write
    from gonio.cli.inputs import build_model, check_runs, read_batch, read_where
    from gonio.recipes import Recipe
    from gonio.surgery import fold_

    check_target(output, [checkpoint, model, recipe, batch])
    selector = read_where(where)
    example = None if batch is None else read_batch(batch)
    found = read(checkpoint, key=key)
    used = Recipe.load(recipe) if recipe is not None else found.recipe
    built = restored_model(found, model, recipe=used)
    if example is not None:
        check_runs(built, example)
    edited = fold_(built, example=example, where=selector)
    folded_by = used.hash if used is not None else found.folded
    write(Checkpoint(output, built.state_dict(), folded=folded_by), found)
    print_out(str(edited))
    if example is None:
        print_err(say("the outputs were not compared; --batch compares them"))
    plain, folded = set(build_model(model).state_dict()), set(built.state_dict())
    counts = {"more": counted(len(folded - plain), "tensor"), "fewer": len(plain - folded)}
    fits = say("it has {more} that the model lacks, and lacks {fewer} that the model has", **counts)
    loads = say("it loads into the model") if plain == folded else fits
    print_err(say("checkpoint written to {output}; {loads}", output=output, loads=loads))
