"""Initialisation of weights: in-place functions `f_(weight, *, layout=…, generator=…)`."""

from gonio.init.gain import gain
from gonio.init.mup import mup_
from gonio.init.orthogonal import delta_orthogonal_, orthogonal_
from gonio.init.variance import Fans, fans, he_, lecun_, variance_scaling_, xavier_

__all__ = [
    "Fans",
    "delta_orthogonal_",
    "fans",
    "gain",
    "he_",
    "lecun_",
    "mup_",
    "orthogonal_",
    "variance_scaling_",
    "xavier_",
]
__dir__ = __all__.copy  # the public names alone
