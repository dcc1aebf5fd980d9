"""Penalties on the norms and angles of weights, as frozen data; :class:`gonio.Penalty` binds them to a model."""

from gonio.regularizers.base import Evaluation, OutputRegularizer, Regularizer, WeightRegularizer
from gonio.regularizers.conv_orthogonality import ConvOrthogonality
from gonio.regularizers.hyperspherical_energy import HypersphericalEnergy
from gonio.regularizers.l2 import L2, NormPower
from gonio.regularizers.orthogonality import DoubleOrthogonality, MutualCoherence, Orthogonality
from gonio.regularizers.scale_shift import ScaleShift
from gonio.regularizers.schedules import Milestones, Schedule, Warmup
from gonio.regularizers.self_orthogonality import SelfOrthogonality
from gonio.regularizers.srip import SRIP

__all__ = [
    "L2",
    "SRIP",
    "ConvOrthogonality",
    "DoubleOrthogonality",
    "Evaluation",
    "HypersphericalEnergy",
    "Milestones",
    "MutualCoherence",
    "NormPower",
    "Orthogonality",
    "OutputRegularizer",
    "Regularizer",
    "ScaleShift",
    "Schedule",
    "SelfOrthogonality",
    "Warmup",
    "WeightRegularizer",
]
__dir__ = __all__.copy  # the public names alone
