"""What a training step with each recipe costs on a model of the user's own: time, memory and parameters."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from gonio.errors import GonioError, InvalidArgumentError
from gonio.execution import one_thread
from gonio.lab.running.cost import peak_bytes, silent_stderr, time_blocks
from gonio.messages import fixed, said_by
from gonio.optim.named import OPTIMIZERS
from gonio.recipes import BASELINE, Recipe
from gonio.surgery.equivalent import call, fitting

AGAIN = fixed("the same again")
_RATE = 1e-4  # of learning: small, so that no step diverges and the work of a step stays the same
_LEAST = 3  # blocks, however long they take
_SECONDS = 20.0  # for all blocks


@dataclass(frozen=True)
class StepCost:
    """The cost of a training step.

    Attributes:
        name: of the recipe; `baseline` is the model without one, `the same again` a second copy of it, whose distance
            from 1 is the noise of the measurement.
        milliseconds: the median over the blocks.
        time: the ratio to the baseline: its median and quartiles over the blocks.
        memory: peak of the allocator during a step, above its level before, as a ratio to the baseline; None where the
            device does not count.
        mebibytes: the same in MiB.
        parameters: the number of trained numbers.
        reason: why the recipe was not measured; empty if it was.
    """

    name: str
    milliseconds: float | None = None
    time: tuple[float, float, float] | None = None
    memory: float | None = None
    mebibytes: float | None = None
    parameters: int | None = None
    reason: str = ""


def step_costs(
    build: Callable[[], nn.Module],
    example: Any,
    recipes: Sequence[Recipe],
    *,
    optimizer: str = "adamw",
    device: str = "cpu",
    seconds: float = _SECONDS,
) -> tuple[StepCost, ...]:
    """The cost of one training step of a model, and of the same model with each recipe.

    A step is forward, the mean square of the outputs and the recipe's penalty, backward, and the optimizer. The models
    alternate in one process, block by block, and each block gives one ratio; on the CPU time is that of the process on
    one thread, so that other programs do not count.

    Args:
        build: makes a new model; it is called once for each recipe.
        example: a batch of the model, as :func:`gonio.equivalent` takes it.
        optimizer: by name, for recipes that name none.
        seconds: for all blocks; at least 3 are made.

    Returns:
        The baseline, the baseline again, and the recipes in their order. A recipe that does not fit the model has the
        reason in place of figures.

    Raises:
        InvalidArgumentError: if the model cannot be trained on the example; for an unknown optimizer.

    Example:
        >>> from gonio.lab.running.step_cost import step_costs
        >>> recipe = gonio.Recipe.load("orthogonal-init")
        >>> model = lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> [row.name for row in step_costs(model, torch.ones(4, 8), [recipe], seconds=0.1)]
        ['baseline', 'the same again', 'orthogonal-init']
    """
    moved = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, example)
    names, steps, sizes, unfit = list[str](), list[Callable[[], None]](), list[int](), dict[str, str]()
    plain = Recipe(BASELINE)
    with one_thread():
        for name, recipe in [(BASELINE, plain), (AGAIN, plain), *((recipe.name, recipe) for recipe in recipes)]:
            try:
                step, size = _step(build().to(device), moved, recipe, optimizer)
            except GonioError as error:
                if recipe is plain:
                    raise
                unfit[name] = said_by(error)
                continue
            names, steps, sizes = [*names, name], [*steps, step], [*sizes, size]
        where = torch.device(device)
        blocks = time_blocks(steps, where, least=_LEAST, until=time.monotonic() + seconds)
        with silent_stderr():
            peaks = [peak_bytes(step, where) for step in steps]
    found = dict(zip(names, _rows(names, blocks, peaks, sizes), strict=True))
    asked = [BASELINE, AGAIN, *(recipe.name for recipe in recipes)]
    return tuple(found[name] if name in found else StepCost(name, reason=unfit[name]) for name in asked)


def _rows(
    names: Sequence[str], blocks: Sequence[Sequence[float]], peaks: Sequence[int], sizes: Sequence[int]
) -> Iterator[StepCost]:
    """From the seconds of each block, the peaks and the sizes to one row per name."""
    for index, name in enumerate(names):
        ratios = [block[index] / block[0] for block in blocks]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        yield StepCost(
            name,
            milliseconds=1e3 * statistics.median(block[index] for block in blocks),
            time=(middle, low, high),
            memory=peaks[index] / peaks[0] if peaks[0] else None,
            mebibytes=peaks[index] / 2**20 if peaks[0] else None,
            parameters=sizes[index],
        )


def _step(model: nn.Module, example: Any, recipe: Recipe, optimizer: str) -> tuple[Callable[[], None], int]:
    """A function that takes one step of training, after two of them, and the number of trained numbers."""
    if not any(p.requires_grad for p in model.parameters()):
        raise InvalidArgumentError("a step of training needs parameters", "none", "Build a model that can be trained.")
    applied = recipe.apply_(model.train())
    if optimizer not in OPTIMIZERS:
        raise InvalidArgumentError(f"an optimizer is one of {', '.join(OPTIMIZERS)}", repr(optimizer), "Name one.")
    if recipe.optimizer is None:
        used = OPTIMIZERS[optimizer](model, lr=_RATE)
        applied.hold_(used)
    else:
        used = applied.make_optimizer(lr=_RATE)

    def step() -> None:
        used.zero_grad()
        loss = _mean_square(call(model, example))
        (loss if applied.penalty is None else loss + applied.penalty()).backward()
        used.step()

    with fitting(model, example, "the batch of a step of training", always=True):
        step()
        step()
    return step, sum(p.numel() for p in model.parameters() if p.requires_grad)


def _mean_square(outputs: Any) -> Tensor:
    """A loss that any outputs have: the sum of the mean squares of those that have a derivative."""
    if isinstance(outputs, Mapping):
        outputs = dict(outputs)
    leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not leaves:
        raise InvalidArgumentError(
            "a step of training needs outputs that depend on the parameters",
            "none",
            "Build a model that can be trained.",
        )
    return torch.stack([leaf.float().square().mean() for leaf in leaves]).sum()
