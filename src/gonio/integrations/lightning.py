"""A penalty in the loss of a LightningModule, and a tracker of its weights as a callback."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from gonio.errors import InvalidArgumentError, MissingExtraError, NotApplicableError
from gonio.integrations.added import AddedPenalty, replaced_
from gonio.measuring import Tracker

__all__ = ["add_penalty_", "tracker_callback"]


def add_penalty_(module: nn.Module, penalty: Callable[[], Tensor]) -> AddedPenalty:
    """Add `penalty()` to the loss that `training_step` returns, in place; `undo_()` of the result takes it out.

    Lightning then does with the sum what it does with the loss: precision, strategies, accumulation of gradients
    (the whole loss is divided, so the penalty counts once per optimizer step). Validation is as it was. Logged
    values are the module's own: what it logs inside `training_step` is without the penalty.

    Args:
        module: a LightningModule with automatic optimization.
        penalty: a :class:`gonio.Penalty`, or `run.penalty` of a comparison.

    Raises:
        NotApplicableError: there is no `training_step`, or the module optimizes by hand: then it adds
            `penalty()` to its own loss.
        AlreadyAppliedError: it has one already.

    Example:
        >>> class Module(nn.Linear):  # a LightningModule has these two and more
        ...     automatic_optimization = True
        ...     def training_step(self, batch, batch_idx):
        ...         return self(batch).square().mean()
        >>> module = Module(2, 2)
        >>> added = gonio.integrations.lightning.add_penalty_(module, lambda: torch.tensor(100.0))
        >>> module.training_step(torch.ones(1, 2), 0).item() > 100
        True
        >>> added.undo_()
        >>> module.training_step(torch.ones(1, 2), 0).item() < 100
        True
    """
    name = type(module).__name__
    if not hasattr(module, "training_step"):
        raise NotApplicableError("add_penalty_", name, "it has no training_step", "Give a LightningModule.")
    if not getattr(module, "automatic_optimization", True):
        why = "it optimizes by hand, and its training_step returns no loss to Lightning"
        raise NotApplicableError("add_penalty_", name, why, "Add penalty() to the loss in its training_step.")
    original: Callable[..., Any] = module.training_step  # type: ignore[assignment]

    @functools.wraps(original)
    def training_step(*batch: Any, **named: Any) -> Any:
        return _with(original(*batch, **named), penalty)

    return replaced_(module, "training_step", training_step)


def _with(output: Any, penalty: Callable[[], Tensor]) -> Any:
    """The step's output with the penalty in its loss; a step that is skipped stays skipped."""
    if output is None:
        return None
    if isinstance(output, Tensor):
        return output + penalty()
    if isinstance(output, Mapping) and "loss" in output:
        return {**output, "loss": output["loss"] + penalty()}
    raise InvalidArgumentError(
        "training_step returns the loss, a dict with 'loss', or None",
        f"a {type(output).__name__}",
        "Return one of them.",
    )


def tracker_callback(tracker: Tracker) -> Any:
    """A `lightning.pytorch.Callback` that measures as the optimizer steps: `Trainer(callbacks=[…])`.

    Steps are the trainer's `global_step`: with accumulated gradients one for several batches.

    Args:
        tracker: a :class:`gonio.Tracker` of the module or a part of it.

    Raises:
        MissingExtraError: neither `lightning` nor `pytorch_lightning` is installed.
    """
    base: Any = _library().Callback

    class TrackerCallback(base):
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            if trainer.global_step:  # 0 until the first accumulated step
                tracker.step(trainer.global_step)

    return TrackerCallback()


def _library() -> Any:
    """Lightning under the name by which it is in use: callbacks of one are no callbacks of the other."""
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise MissingExtraError("tracker_callback()", "lightning", "dev")
