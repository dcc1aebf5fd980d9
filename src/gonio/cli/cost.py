"""`gonio cost`: what a training step with each method costs on one's own model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from json import dumps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gonio.cli import options
from gonio.cli.app import check_folders, print_err, print_out, save, users_code
from gonio.escaping import aligned
from gonio.messages import local, say

if TYPE_CHECKING:
    from gonio.lab.running.step_cost import StepCost

_Recipes = Annotated[
    list[str] | None,
    typer.Argument(help="Built-in recipes or recipe files; default: one of each method.", metavar="RECIPE"),
]
_Batch = Annotated[str, options.BATCH]
_Optimizer = Annotated[str, typer.Option(help="Of recipes that name none, e.g. sgd, adamw or muon.", metavar="NAME")]
_Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:N or mps.", metavar="DEVICE")]
_Seconds = Annotated[float, typer.Option(help="Time for the measurement; three rounds are made anyway.", min=0.0)]
_HEAD = (say("recipe"), say("time"), say("quartiles"), say("ms"), say("memory"), "MiB", say("parameters"))


def cost(
    recipes: _Recipes = None,
    *,
    model: options.Model,
    batch: _Batch,
    optimizer: _Optimizer = "adamw",
    device: _Device = "cpu",
    seconds: _Seconds = 20.0,
    seed: options.Seed = 0,
    json: options.Json = None,
) -> None:
    """What does a training step with each method cost on my model, in time and memory?

    The plain model, the same again and the model with each recipe take turns; time and memory are ratios to the plain
    step. The row `the same again` shows the noise. Nothing is trained to the end, and no data are needed.
    """
    from gonio.cli.inputs import build_model, check_runs, read_batch
    from gonio.lab.planning.planner import BUILT_IN_RECIPES
    from gonio.lab.running.step_cost import step_costs
    from gonio.recipes import Recipe

    check_folders({"json": json}, [*(recipes or []), model, batch])
    chosen = [Recipe.load(name) for name in recipes or BUILT_IN_RECIPES]
    example = read_batch(batch)
    check_runs(build_model(model, seed=seed), example)
    with users_code(model):
        rows = step_costs(
            lambda: build_model(model, seed=seed), example, chosen, optimizer=optimizer, device=device, seconds=seconds
        )
    if json is None:
        print_out(_table(rows))
        how = say("CPU time on one thread") if device == "cpu" else say("time on {device}", device=device)
        print_err(
            say(
                "{model}, batch {batch}, {optimizer}: {how}; medians and quartiles of ratios to the baseline",
                model=model,
                batch=batch,
                optimizer=optimizer,
                how=how,
            )
        )
    else:
        given: dict[str, Any] = {"model": model, "batch": batch, "optimizer": optimizer, "device": device}
        made = {"schema": "gonio.cost/1", **given, "rows": [asdict(row) for row in rows]}
        save(dumps(made, ensure_ascii=False, allow_nan=False, indent=1), json, "JSON")


def _table(rows: Sequence[StepCost]) -> str:
    """One line per recipe, in columns; a recipe that was not measured has its reason."""
    measured, others = ([row for row in rows if bool(row.reason) is lacking] for lacking in (False, True))
    lines = aligned([[*map(local, _HEAD)], *map(_cells, measured)], right=range(1, len(_HEAD)))
    reasons = [(row.name, local(say("not measured: {reason}", reason=row.reason))) for row in others]
    return "\n".join([*lines, *aligned(reasons)])


def _cells(row: StepCost) -> tuple[str, ...]:
    middle, low, high = row.time or (1.0, 1.0, 1.0)
    return (
        local(row.name),
        f"×{middle:.2f}",
        f"{low:.2f}–{high:.2f}",
        f"{row.milliseconds:.3g}",
        "–" if row.memory is None else f"×{row.memory:.2f}",
        "–" if row.mebibytes is None else f"{row.mebibytes:.3g}",
        f"{row.parameters:,}",
    )
