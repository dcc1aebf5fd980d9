"""Weight parametrizations: pure and reversible."""

import sys

from gonio.parametrizations import mechanism, spectral_views
from gonio.parametrizations.checkpoints import plain_state_dict
from gonio.parametrizations.mechanism import attach, detach, is_parametrized, parametrization_of
from gonio.parametrizations.orthogonal import Orthogonal
from gonio.parametrizations.parametrization import Parametrization
from gonio.parametrizations.spectral_norm import SpectralNorm, tick_, tick_on_step
from gonio.parametrizations.sphere import Sphere
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

# Pickles of version 0.1 name these modules.
sys.modules[f"{__name__}.covering"] = mechanism
sys.modules[f"{__name__}.spectral_convolution"] = spectral_views


def __dir__() -> list[str]:
    return sorted(__all__)
