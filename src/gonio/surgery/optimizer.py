"""Keep an optimizer valid when parameters appear and disappear."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gonio.errors import InvalidArgumentError
from gonio.surgery.awaiting import await_optimizer, held_by
from gonio.surgery.edit import Edit

__all__ = ["check_holds", "note_added", "tell_"]


def check_holds(optimizer: torch.optim.Optimizer | None, model: nn.Module) -> None:
    """Raise unless the optimizer holds parameters of the model.

    Raises:
        InvalidArgumentError: for an optimizer of another model.
    """
    if optimizer is not None and not held_by(optimizer) & {id(p) for p in model.parameters()}:
        raise _holds_none()


def tell_(
    edit: Edit,
    path: str,
    optimizer: torch.optim.Optimizer | None,
    before: Sequence[nn.Parameter],
    after: Mapping[str, nn.Parameter],
    *,
    present: Sequence[nn.Parameter],
) -> None:
    """Give a layer's new parameters to the optimizer that was passed; without one, wait for one that has them.

    Args:
        edit: records the inverse.
        path: of the layer.
        optimizer: the one that was passed.
        before: the parameters that the layer had.
        after: those that it has, by name.
        present: those that the model had.
    """
    if optimizer is not None:
        _follow_(edit, optimizer, before, list(after.values()))
        return
    known = {id(parameter) for parameter in present}
    added = {name: parameter for name, parameter in after.items() if id(parameter) not in known}
    await_optimizer(edit, path, before, added, present)


def _follow_(
    edit: Edit,
    optimizer: torch.optim.Optimizer,
    before: Sequence[nn.Parameter],
    after: Sequence[nn.Parameter],
) -> None:
    """Give new parameters to the optimizer, in the group of the layer's old ones, and take gone ones out.

    A Parameter that the model still uses elsewhere is not gone, and one that the optimizer has already is
    not new. State of the parameters that stay is untouched. Undoing the edit restores groups and state.
    """
    held = held_by(optimizer)
    used = {id(p) for p in edit.model.parameters()}
    added = [p for p in dict.fromkeys(after) if id(p) not in held and not any(p is b for b in before)]
    gone = {id(p) for p in before} - used
    trained = any(id(p) in held for p in before) or any(p.requires_grad for p in added)
    if not (added or gone) or not trained:  # nothing came or went, or all of the layer is frozen
        return
    group = _group_of(optimizer, before, used)
    edit.on_undo(_restorer(optimizer))
    for each in optimizer.param_groups:
        each["params"] = [p for p in each["params"] if id(p) not in gone]
    for parameter in before:
        if id(parameter) in gone:
            optimizer.state.pop(parameter, None)
    group["params"].extend(added)


def note_added(edit: Edit, present: Sequence[nn.Parameter]) -> None:
    """Say how many parameters the model has that it had not; an optimizer does not find them by itself."""
    known = {id(parameter) for parameter in present}
    count = sum(id(p) not in known for p in edit.model.parameters())
    if count:
        edit.note(f"{count} new parameter{'s' * (count > 1)}: build the optimizer after this edit, or pass optimizer=")


def _group_of(optimizer: torch.optim.Optimizer, layer: Sequence[nn.Parameter], model: set[int]) -> dict[str, Any]:
    """The group of the layer's parameters; of any of the model's for a layer that had none."""
    wanted = {id(p) for p in layer} or model
    for group in optimizer.param_groups:
        if any(id(p) in wanted for p in group["params"]):
            return group
    raise _holds_none()


def _holds_none() -> InvalidArgumentError:
    return InvalidArgumentError(
        "optimizer= must hold the parameters of the layers that change",
        "an optimizer that holds none of them",
        "Pass the optimizer built from this model's parameters.",
    )


def _restorer(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    params = [list(group["params"]) for group in optimizer.param_groups]
    state = dict(optimizer.state)

    def restore() -> None:
        for group, before in zip(optimizer.param_groups, params, strict=False):  # later groups stay
            group["params"] = before
        for parameter, value in state.items():
            optimizer.state.setdefault(parameter, value)
        known = held_by(optimizer)
        for parameter in [p for p in optimizer.state if id(p) not in known]:
            del optimizer.state[parameter]

    return restore
