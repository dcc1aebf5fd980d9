"""Weight parametrizations: pure and reversible."""

import sys

from gonio.parametrizations import filters, mechanism, spectral_views
from gonio.parametrizations.checkpoints import plain_state_dict
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
]

# Pickles of version 0.1 name these modules.
sys.modules.update(
    {
        f"{__name__}.covering": mechanism,
        f"{__name__}.spectral_convolution": spectral_views,
        f"{__name__}.sphere": filters,
        f"{__name__}.weight_norm": filters,
    }
)
__dir__ = __all__.copy  # the public names alone
