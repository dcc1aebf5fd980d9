"""Keep an optimizer valid when parameters appear and disappear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from gonio.errors import InvalidArgumentError
from gonio.surgery.edit import Edit

__all__ = ["follow_parameters_"]


def follow_parameters_(
    edit: Edit,
    optimizer: torch.optim.Optimizer,
    before: Sequence[nn.Parameter],
    after: Sequence[nn.Parameter],
) -> None:
    """Give new parameters to the optimizer, in the group of the layer's old ones, and take gone ones out.

    State of the parameters that stay is untouched. Undoing the edit restores groups and state.
    """
    kept = {id(p) for p in before} & {id(p) for p in after}
    added = [p for p in after if id(p) not in kept]
    gone = {id(p) for p in before} - kept
    group = _group_of(optimizer, before)
    edit.on_undo(_restorer(optimizer))
    for each in optimizer.param_groups:
        each["params"] = [p for p in each["params"] if id(p) not in gone]
    for parameter in before:
        if id(parameter) in gone:
            optimizer.state.pop(parameter, None)
    group["params"].extend(added)


def _group_of(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> dict[str, Any]:
    wanted = {id(p) for p in parameters}
    for group in optimizer.param_groups:
        if any(id(p) in wanted for p in group["params"]):
            return group
    raise InvalidArgumentError(
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
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for parameter in [p for p in optimizer.state if id(p) not in known]:
            del optimizer.state[parameter]

    return restore
