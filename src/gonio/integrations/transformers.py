"""Hugging Face transformers: a penalty in the loss of a Trainer, and a tracker as a callback.

Fold a parametrized model with :func:`gonio.fold_` before `save_pretrained`. `from_pretrained` builds a plain model:
it loads the trained tensors, reports the keys of the parametrizations as unexpected, and computes another function.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gonio.errors import GonioWarning, NotApplicableError, import_extra
from gonio.integrations.lightning import once_per_step, with_methods_
from gonio.measuring import Tracker, check_before_save
from gonio.measuring.checking.check import Level
from gonio.surgery import Edited


def add_penalty_(trainer: Any, penalty: Callable[[], Tensor]) -> Edited:
    """Add `penalty()` to the training loss of a `transformers.Trainer`; `undo_()` of the result removes it.

    The penalty counts once per optimizer step for any number of micro-batches: if the Trainer does not divide the
    loss of a micro-batch by their number (because it is normalised over the whole batch), this function divides the
    penalty. The evaluation loss does not change; the training loss that the Trainer logs includes the penalty, whose
    mean since the last log stands beside it as `gonio_penalty`. The state of a :class:`gonio.Penalty` (its step, on
    which schedules and `every` depend: that of the optimizer, however many micro-batches it has) is saved in the
    Trainer's checkpoints as `gonio_penalty.pt`, and restored when a training resumes from one in its `output_dir`.

    Args:
        trainer: a Trainer, or a subclass with its own `compute_loss`.
        penalty: a :class:`gonio.Penalty`, or `run.penalty` of a comparison.

    Raises:
        NotApplicableError: if the trainer has no `compute_loss`.
        AlreadyAppliedError: if the trainer has a penalty already.
        InvalidArgumentError: for a penalty with `accumulate=`, by which it would be divided twice.

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
    values: list[Tensor] = []  # since the last log
    by_step = once_per_step(penalty, lambda: getattr(getattr(trainer, "state", None), "global_step", None))

    @functools.wraps(original)
    def _with_penalty(
        model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Tensor | int | None = None
    ) -> Any:
        found = original(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        if not model.training:
            return found
        value = by_step()
        values.append(value.detach())
        extra = value / _share(trainer, num_items_in_batch)
        return (found[0] + extra, *found[1:]) if return_outputs else found + extra

    methods: dict[str, Any] = {"compute_loss": _with_penalty, **_logging(trainer, values)}
    if not hasattr(penalty, "state_dict") or not hasattr(trainer, "add_callback"):
        return with_methods_(trainer, **methods)
    state = _state_callback(penalty)
    added = with_methods_(trainer, also=lambda: trainer.remove_callback(state), **methods)
    trainer.add_callback(state)
    return added


def _logging(trainer: Any, values: list[Tensor]) -> dict[str, Callable[..., None]]:
    """The Trainer's `log` with the mean of the values beside the training loss; none for an object without it."""
    if not hasattr(trainer, "log"):
        return {}
    original = trainer.log

    @functools.wraps(original)
    def log(logs: dict[str, float], *rest: Any, **named: Any) -> None:
        if "loss" in logs and values:
            logs = {**logs, "gonio_penalty": float(torch.stack(values).mean())}
            values.clear()
        original(logs, *rest, **named)

    return {"log": log}


def _state_callback(penalty: Any) -> Any:
    """Saves the state of a penalty in the Trainer's checkpoints and restores it."""
    base: Any = _callback_class("add_penalty_()")

    def path(args: Any, state: Any) -> Path:
        return Path(args.output_dir, f"checkpoint-{state.global_step}", "gonio_penalty.pt")

    class PenaltyState(base):
        def on_save(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if state.is_world_process_zero and path(args, state).parent.is_dir():
                torch.save(penalty.state_dict(), path(args, state))

        def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if not state.global_step:
                return
            if path(args, state).is_file():
                penalty.load_state_dict(torch.load(path(args, state), weights_only=True))
                return
            text = f"the training resumes at step {state.global_step}, but the penalty at step {penalty.step}, because "
            text += f"{path(args, state)} does not exist. Call penalty.load_state_dict() with its state."
            warnings.warn(text, GonioWarning, stacklevel=2)

    return PenaltyState()


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
    base: Any = _callback_class("tracker_callback()")

    class TransformersTracker(base):
        def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if tracker.training is not None:  # the optimizer of a resumed training counts on
                tracker.step(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            tracker.step(state.global_step)

        def on_train_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            tracker.warn_if_empty()

    return TransformersTracker()


def _callback_class(what: str) -> type:
    """`transformers.TrainerCallback`, or a MissingExtraError."""
    found: type = import_extra("transformers", what, package="transformers", extra="models").TrainerCallback
    return found


def check_callback(*, fail_on: Level = "error", action: Literal["raise", "warn"] = "raise") -> Any:
    """A `transformers.TrainerCallback` that checks the model's state dict before each checkpoint is written.

    Arguments as of :func:`gonio.measuring.check_before_save`.
    Raises: MissingExtraError if `transformers` is not installed.
    """
    base: Any = _callback_class("check_callback()")

    class TransformersCheck(base):
        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if control.should_save:  # the Trainer's own callback decides before this one
                check_before_save(named["model"].state_dict(), fail_on=fail_on, action=action)

        on_epoch_end = on_step_end

    return TransformersCheck()


def report_callback(report: Callable[[nn.Module], object]) -> Any:
    """A `transformers.TrainerCallback` that gives the model to a function whenever a checkpoint was saved.

    For example `report_callback(lambda model: print(gonio.doctor(model, batch=batch)))`, which treats a copy.
    Raises: MissingExtraError if `transformers` is not installed.
    """
    base: Any = _callback_class("report_callback()")

    class TransformersReport(base):
        def on_save(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            report(named["model"])

    return TransformersReport()
