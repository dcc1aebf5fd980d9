"""Lightning: a penalty in the loss of a LightningModule, and a tracker as a callback."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from gonio.errors import (
    AlreadyAppliedError,
    InvalidArgumentError,
    MissingExtraError,
    NotApplicableError,
    imported,
    with_article,
)
from gonio.measuring import Tracker, check_before_save
from gonio.measuring.checking.check import Level
from gonio.penalty import Penalty
from gonio.surgery import Change, Edited, UndoError

_MARK = "_gonio_penalty"
_STATE = "gonio_penalty"  # the key in a checkpoint


@dataclass
class _Methods:
    """Methods of a trainer itself, which take precedence over those of its class, until they are removed."""

    owner: Any
    added: Mapping[str, Any]
    before: Mapping[str, Any]  # those that the object had itself
    also: Callable[[], object]
    ended: bool = False

    def run_(self) -> None:
        """Restore the methods that the object had itself, and those of its class."""
        if self.ended:
            raise UndoError("add_penalty_", "it was undone before")
        own = vars(self.owner)
        if replaced := [name for name, method in self.added.items() if own.get(name) is not method]:
            raise UndoError("add_penalty_", f"{replaced[0]} was replaced since")
        for name in self.added:
            del own[name]
        own.update(self.before)
        self.also()
        self.ended = True


def with_methods_(owner: Any, *, also: Callable[[], object] = lambda: None, **methods: Any) -> Edited:
    """Give an object its own methods for a penalty; the undo restores those that it had, and calls `also`.

    Example:
        >>> layer = nn.Identity()
        >>> edited = gonio.integrations.lightning.with_methods_(layer, forward=lambda x: x + 1)
        >>> before = layer(torch.zeros(1)); edited.undo_(); before, layer(torch.zeros(1))
        (tensor([1.]), tensor([0.]))
    """
    if any(hasattr(getattr(owner, name, None), _MARK) for name in methods):
        raise AlreadyAppliedError("add_penalty_", type(owner).__name__, "a penalty")
    before = {name: vars(owner)[name] for name in methods if name in vars(owner)}
    for name, new in methods.items():
        setattr(new, _MARK, True)
        setattr(owner, name, new)
    changes = tuple(Change(type(owner).__name__, f"{name} with the penalty") for name in methods)
    return Edited("add_penalty_", changes, (), _Methods(owner, methods, before, also))


def add_penalty_(module: nn.Module, penalty: Callable[[], Tensor]) -> Edited:
    """Add `penalty()` to the loss that `training_step` returns, in place; `undo_()` of the result removes it.

    Lightning treats the sum as the loss: precision, strategies, accumulation of gradients (the whole loss is
    divided, so the penalty counts once per optimizer step). Validation does not change. Values that the module
    logs inside `training_step` are without the penalty, which is logged beside them as `gonio.penalty`. The state of a
    :class:`gonio.Penalty` (its step, on which schedules and `every` depend: that of the optimizer, however many batches
    it accumulates) is saved in Lightning's checkpoints and restored when a training resumes.

    Args:
        module: a LightningModule with automatic optimization.
        penalty: a :class:`gonio.Penalty`, or `run.penalty` of a comparison.

    Raises:
        NotApplicableError: if the module has no `training_step`, or uses manual optimization: add
            `penalty()` to its loss there.
        AlreadyAppliedError: if the module has a penalty already.
        InvalidArgumentError: for a penalty with `accumulate=`, by which it would be divided twice.

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
        raise NotApplicableError("add_penalty_", name, "it has no training_step", "Pass a LightningModule.")
    if not getattr(module, "automatic_optimization", True):
        why = "it uses manual optimization, and its training_step returns no loss to Lightning"
        raise NotApplicableError("add_penalty_", name, why, "Add penalty() to the loss in its training_step.")
    original: Callable[..., Any] = module.training_step  # type: ignore[assignment]
    by_step = once_per_step(penalty, partial(_global_step, module))

    @functools.wraps(original)
    def training_step(*batch: Any, **named: Any) -> Any:
        return _with(original(*batch, **named), partial(_logged, module, by_step))

    return with_methods_(module, training_step=training_step, **_state_hooks(module, penalty))


def once_per_step(penalty: Callable[[], Tensor], number: Callable[[], int | None]) -> Callable[[], Tensor]:
    """A penalty whose step goes on with that of a trainer: calls at one number of it are calls of one step.

    Raises: InvalidArgumentError: for a penalty that divides itself by the number of calls, as the trainer does.

    Example:
        >>> from gonio.integrations.lightning import once_per_step
        >>> penalty, numbers = gonio.Penalty(nn.Linear(2, 2), [(None, gonio.regularizers.L2(1.0))]), iter([5, 5, 6])
        >>> by_step = once_per_step(penalty, lambda: next(numbers))
        >>> values = [by_step() for _ in range(3)]; penalty.step
        2
    """
    if not isinstance(penalty, Penalty):
        return penalty
    if penalty.accumulate > 1:
        needs = "add_penalty_ needs a penalty with accumulate=1, because the trainer divides the loss of micro-batches"
        raise InvalidArgumentError(needs, f"accumulate={penalty.accumulate}", "Build the penalty without accumulate=.")
    last: tuple[int | None, int] = None, 0  # the trainer's step, and the penalty's

    def by_step() -> Tensor:
        nonlocal last
        now = number()
        if now is not None and now == last[0]:
            penalty.step = last[1]
        last = now, penalty.step
        return penalty()

    return by_step


def _trainer_of(module: Any) -> Any:
    """The Trainer that trains a module; None without one, and for another object than a LightningModule."""
    with suppress(AttributeError, RuntimeError):
        return module.trainer
    return None


def _global_step(module: Any) -> int | None:
    trainer = _trainer_of(module)
    return None if trainer is None else int(trainer.global_step)


def _state_hooks(module: Any, penalty: Any) -> dict[str, Callable[..., None]]:
    """Lightning's hooks for checkpoints, with the state of the penalty; none for a function without state."""
    if not hasattr(penalty, "state_dict"):
        return {}
    save, load = (getattr(module, name, None) for name in ("on_save_checkpoint", "on_load_checkpoint"))

    def on_save_checkpoint(checkpoint: dict[str, Any]) -> None:
        checkpoint[_STATE] = penalty.state_dict()
        if save is not None:
            save(checkpoint)

    def on_load_checkpoint(checkpoint: dict[str, Any]) -> None:
        if _STATE in checkpoint:  # older checkpoints, and those of a training without the penalty, have none
            penalty.load_state_dict(checkpoint[_STATE])
        if load is not None:
            load(checkpoint)

    return {"on_save_checkpoint": on_save_checkpoint, "on_load_checkpoint": on_load_checkpoint}


def _logged(module: Any, penalty: Callable[[], Tensor]) -> Tensor:
    """The penalty, which a module that a Trainer trains also logs."""
    value = penalty()
    if _trainer_of(module) is not None and hasattr(module, "log"):
        module.log("gonio.penalty", value.detach())
    return value


def _with(output: Any, penalty: Callable[[], Tensor]) -> Any:
    """The output of a step with the penalty in its loss; None, which skips the step, is returned unchanged."""
    if output is None:
        return None
    if isinstance(output, Tensor):
        return output + penalty()
    if isinstance(output, Mapping) and "loss" in output:
        return {**output, "loss": output["loss"] + penalty()}
    problem = "training_step returns the loss, a dict with 'loss', or None"
    raise InvalidArgumentError(problem, with_article(type(output).__name__), "Return one of them.")


def tracker_callback(tracker: Tracker) -> Any:
    """A `lightning.pytorch.Callback` that measures after optimizer steps: `Trainer(callbacks=[…])`.

    Steps are the trainer's `global_step`, which counts optimizer steps also if gradients are accumulated.
    Raises: MissingExtraError if neither `lightning` nor `pytorch_lightning` is installed.
    """
    base: Any = _library().Callback

    class LightningTracker(base):
        def on_train_start(self, trainer: Any, *rest: Any) -> None:
            if tracker.training is not None:  # the optimizer of a resumed training counts on
                tracker.step(trainer.global_step)

        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            if trainer.global_step:  # 0 until the first accumulated step
                tracker.step(trainer.global_step)

        def on_train_end(self, trainer: Any, *rest: Any) -> None:
            tracker.warn_if_empty()

    return LightningTracker()


def _library() -> Any:
    """The package of Lightning that is imported already, or else installed; their callbacks are not compatible."""
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return imported(name)
        except ImportError:
            continue
    raise MissingExtraError("tracker_callback()", "lightning", "lightning")


def check_callback(*, fail_on: Level = "error", action: Literal["raise", "warn"] = "raise") -> Any:
    """A `lightning.pytorch.Callback` that checks the state dict of each checkpoint before it is written.

    Arguments as of :func:`gonio.measuring.check_before_save`.
    Raises: MissingExtraError if neither `lightning` nor `pytorch_lightning` is installed.
    """
    base: Any = _library().Callback

    class LightningCheck(base):
        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Mapping[str, Any]) -> None:
            check_before_save(checkpoint["state_dict"], fail_on=fail_on, action=action)

    return LightningCheck()


def report_callback(report: Callable[[nn.Module], object]) -> Any:
    """A `lightning.pytorch.Callback` that gives the module to a function whenever a checkpoint is saved.

    For example `report_callback(lambda module: print(gonio.doctor(module.net, batch=x)))`, which treats a copy.
    Raises: MissingExtraError if neither `lightning` nor `pytorch_lightning` is installed.
    """
    base: Any = _library().Callback

    class LightningReport(base):
        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Mapping[str, Any]) -> None:
            report(module)

    return LightningReport()
