"""`param_groups`: parameter groups by weight decay, for matrices or for μP, under one name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, overload

from torch import nn

from gonio.editing.where import require_model
from gonio.errors import InvalidArgumentError
from gonio.init.mup import Rule
from gonio.penalty.decay import ParamGroups, decay_groups
from gonio.penalty.matrices import MatrixGroups, matrix_groups
from gonio.penalty.mup_groups import MupGroups, mup_groups
from gonio.penalty.penalty import Penalty
from gonio.surgery.blocks import Anatomy


@overload
def param_groups(
    model: nn.Module,
    weight_decay: float,
    *,
    penalty: Penalty | None = None,
    matrices: Literal[False] = False,
    mup: Literal[False] = False,
) -> ParamGroups: ...
@overload
def param_groups(
    model: nn.Module,
    weight_decay: float | None = None,
    *,
    penalty: Penalty | None = None,
    matrices: Literal[True],
    heads: Mapping[str, int] | Anatomy | None = None,
) -> MatrixGroups: ...
@overload
def param_groups(
    model: nn.Module,
    weight_decay: float | None = None,
    *,
    penalty: Penalty | None = None,
    mup: Literal[True],
    base: nn.Module,
    lr: float,
    rule: Rule = "adam",
) -> MupGroups: ...
def param_groups(
    model: nn.Module,
    weight_decay: float | None = None,
    *,
    penalty: Penalty | None = None,
    matrices: bool = False,
    heads: Mapping[str, int] | Anatomy | None = None,
    mup: bool = False,
    base: nn.Module | None = None,
    lr: float | None = None,
    rule: Rule | None = None,
) -> ParamGroups | MatrixGroups | MupGroups:
    """The model's trainable parameters in groups for an optimizer.

    ================== ==================================== ======================================================
    call               function                             groups
    ================== ==================================== ======================================================
    plain              :func:`gonio.penalty.decay_groups`   weights decay, and nothing else does
    ``matrices=True``  :func:`gonio.penalty.matrix_groups`  matrices and their blocks for :class:`gonio.optim.Muon`
    ``mup=True``       :func:`gonio.penalty.mup_groups`     the learning rates of μP
    ================== ==================================== ======================================================

    The other arguments are those of the functions.

    Args:
        model: as it will be trained; edits and parametrizations first.

    Raises:
        InvalidArgumentError: as the functions; for a missing weight_decay, base or lr, and for an argument of another
            call.

    Example:
        >>> groups = gonio.param_groups(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), 5e-4)
        >>> groups.decayed, len(groups.spared)
        (('0.weight',), 3)
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> dict(gonio.param_groups(model, matrices=True).matrices)
        {'0.weight': 'matrix 16×8'}
    """
    require_model(model, "param_groups")
    _check_mup(mup, matrices, {"base": base, "lr": lr}, {"rule": rule})
    if heads and not matrices:
        raise InvalidArgumentError("param_groups(heads=) cuts matrices", "matrices=False", "Pass matrices=True.")
    if mup and base is not None and lr is not None:
        return mup_groups(model, base, lr, rule=rule or "adam", weight_decay=weight_decay, penalty=penalty)
    if matrices:
        return matrix_groups(model, weight_decay, penalty=penalty, heads=heads)
    if weight_decay is None:
        do = "Pass the decay of the first group; 0 decays nothing."
        raise InvalidArgumentError("param_groups() needs weight_decay", "none", do)
    return decay_groups(model, weight_decay, penalty=penalty)


def _check_mup(mup: bool, matrices: bool, needed: Mapping[str, object], more: Mapping[str, object]) -> None:
    """Raise unless all needed arguments of μP are given, or none."""
    if mup and matrices:
        do = "Build the groups of one of them; rates of Muon follow other rules."
        raise InvalidArgumentError("param_groups() takes mup=True or matrices=True", "both", do)
    for name, value in {**needed, **more}.items():
        if mup and value is None and name in needed:
            do = "Pass the model at the width at which lr was tuned, and lr."
            raise InvalidArgumentError(f"param_groups(mup=True) needs {name}=", "none", do)
        if not mup and value is not None:
            raise InvalidArgumentError(f"param_groups({name}=) belongs to μP", "mup=False", "Pass mup=True.")
