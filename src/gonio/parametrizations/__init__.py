"""Weights as functions of what is trained: on a sphere, orthogonal, of bounded gain; purely, and undoably."""

from gonio.parametrizations.base import (
    Parametrization,
    attach,
    detach,
    is_parametrized,
    parametrization_of,
)
from gonio.parametrizations.checkpoints import plain_state_dict
from gonio.parametrizations.orthogonal import Orthogonal
from gonio.parametrizations.spectral_norm import SpectralNorm
from gonio.parametrizations.sphere import Sphere
from gonio.parametrizations.ticking import tick_, tick_on_step
from gonio.parametrizations.weight_norm import WeightNorm
from gonio.parametrizations.weight_standardization import WeightStandardization

__all__ = [
    "Orthogonal",
    "Parametrization",
    "SpectralNorm",
    "Sphere",
    "WeightNorm",
    "WeightStandardization",
    "attach",
    "detach",
    "is_parametrized",
    "parametrization_of",
    "plain_state_dict",
    "tick_",
    "tick_on_step",
]
