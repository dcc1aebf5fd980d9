"""Hugging Face transformers: a penalty in the loss of a Trainer, and a tracker as a callback.

Fold a parametrized model with :func:`gonio.fold_` before `save_pretrained`. `from_pretrained` builds a plain model:
it loads the trained tensors, reports the keys of the parametrizations as unexpected, and computes another function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from gonio.errors import MissingExtraError, NotApplicableError
from gonio.integrations.lightning import AddedPenalty
from gonio.measuring import Tracker

__all__ = ["add_penalty_", "tracker_callback"]


def add_penalty_(trainer: Any, penalty: Callable[[], Tensor]) -> AddedPenalty:
    """Add `penalty()` to the training loss of a `transformers.Trainer`; `undo_()` of the result removes it.

    The penalty counts once per optimizer step for any number of micro-batches: if the Trainer does not divide the
    loss of a micro-batch by their number (because it is normalised over the whole batch), this function divides the
    penalty. The evaluation loss does not change; the training loss that the Trainer logs includes the penalty. The
    Trainer's checkpoints do not contain the state of the penalty; save `penalty.state_dict()` beside them.

    Args:
        trainer: a Trainer, or a subclass with its own `compute_loss`.
        penalty: a :class:`gonio.Penalty`, or `run.penalty` of a comparison.

    Raises:
        NotApplicableError: if the trainer has no `compute_loss`.
        AlreadyAppliedError: if the trainer has a penalty already.

    Example:
        >>> class Trainer:  # transformers.Trainer has these and more
        ...     model_accepts_loss_kwargs, compute_loss_func = False, None
        ...     def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ...         return model(inputs["x"]).square().mean()
        >>> trainer, model = Trainer(), nn.Linear(2, 2)
        >>> added = gonio.integrations.transformers.add_penalty_(trainer, lambda: torch.tensor(100.0))
        >>> trainer.compute_loss(model, {"x": torch.ones(1, 2)}).item() > 100
        True
        >>> trainer.compute_loss(model.eval(), {"x": torch.ones(1, 2)}).item() < 100
        True
    """
    if not hasattr(trainer, "compute_loss"):
        name = type(trainer).__name__
        raise NotApplicableError("add_penalty_", name, "it has no compute_loss", "Pass a transformers.Trainer.")
    original = trainer.compute_loss

    @functools.wraps(original)
    def _with_penalty(
        model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Tensor | int | None = None
    ) -> Any:
        found = original(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        if not model.training:
            return found
        extra = penalty() / _share(trainer, num_items_in_batch)
        return (found[0] + extra, *found[1:]) if return_outputs else found + extra

    return AddedPenalty(trainer, compute_loss=_with_penalty)


def _share(trainer: Any, num_items_in_batch: Tensor | int | None) -> int:
    """The divisor of the penalty of one micro-batch, in addition to the Trainer's own division."""
    scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    if scaled is None:
        by_model = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
        scaled = by_model or trainer.compute_loss_func is not None
    if not scaled:
        return 1
    steps: int = getattr(trainer, "current_gradient_accumulation_steps", trainer.args.gradient_accumulation_steps)
    return steps


def tracker_callback(tracker: Tracker) -> Any:
    """A `transformers.TrainerCallback` that measures after optimizer steps: `Trainer(callbacks=[…])`.

    Steps are the trainer's `global_step`, which counts optimizer steps also if gradients are accumulated.
    Raises: MissingExtraError if `transformers` is not installed.
    """
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise MissingExtraError("tracker_callback()", "transformers", "models") from error
    base: Any = TrainerCallback

    class TrackerCallback(base):
        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            tracker.step(state.global_step)

    return TrackerCallback()
