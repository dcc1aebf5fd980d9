"""Weights as functions of what is trained: on a sphere, orthogonal, of bounded gain; purely, and undoably."""

from gonio.parametrizations.base import (
    Parametrization,
    attach,
    detach,
    is_parametrized,
    parametrization_of,
)
from gonio.parametrizations.checkpoints import plain_state_dict
from gonio.parametrizations.sphere import Sphere
from gonio.parametrizations.weight_norm import WeightNorm

__all__ = [
    "Parametrization",
    "Sphere",
    "WeightNorm",
    "attach",
    "detach",
    "is_parametrized",
    "parametrization_of",
    "plain_state_dict",
]
