"""Regularizers bound to a model, to be added to the loss, and what an optimizer should decay beside them."""

from gonio.penalty.decay import ParamGroups, decay_groups
from gonio.penalty.matrices import MatrixGroups, matrix_groups
from gonio.penalty.mup_groups import MupGroups, mup_groups
from gonio.penalty.param_groups import param_groups
from gonio.penalty.penalty import Penalty

__all__ = [
    "MatrixGroups",
    "MupGroups",
    "ParamGroups",
    "Penalty",
    "decay_groups",
    "matrix_groups",
    "mup_groups",
    "param_groups",
]
__dir__ = __all__.copy  # the public names alone
