"""Regularizers bound to a model, to be added to the loss, and what an optimizer should decay beside them."""

from gonio.penalty.matrices import MatrixGroups
from gonio.penalty.mup_groups import MupGroups
from gonio.penalty.param_groups import ParamGroups, param_groups
from gonio.penalty.penalty import Penalty

__all__ = ["MatrixGroups", "MupGroups", "ParamGroups", "Penalty", "param_groups"]
__dir__ = __all__.copy  # the public names alone
