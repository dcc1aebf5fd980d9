"""Weight parametrizations: pure and reversible."""

from gonio.parametrizations.checkpoints import plain_state_dict, weight_by_hook
from gonio.parametrizations.filters import Sphere, WeightNorm
from gonio.parametrizations.mechanism import attach, detach, is_parametrized, parametrization_of
from gonio.parametrizations.orthogonal import Orthogonal
from gonio.parametrizations.orthogonal_conv import OrthogonalConv
from gonio.parametrizations.parametrization import Parametrization
from gonio.parametrizations.spectral_norm import SpectralNorm, tick_, tick_on_step
from gonio.parametrizations.weight_standardization import WeightStandardization

__all__ = [
    "Orthogonal",
    "OrthogonalConv",
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
    "weight_by_hook",
]

__dir__ = __all__.copy  # the public names alone
