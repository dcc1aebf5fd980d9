"""Penalties on the norms and angles of weights, as frozen data; :class:`gonio.Penalty` binds them to a model."""

from gonio.regularizers.base import (
    Evaluation,
    IterativeRegularizer,
    OutputRegularizer,
    Regularizer,
    WeightRegularizer,
)
from gonio.regularizers.orthogonality import Orthogonality
from gonio.regularizers.scale_shift import ScaleShift
from gonio.regularizers.schedules import Milestones, Schedule, Warmup
from gonio.regularizers.self_orthogonality import SelfOrthogonality

__all__ = [
    "Evaluation",
    "IterativeRegularizer",
    "Milestones",
    "Orthogonality",
    "OutputRegularizer",
    "Regularizer",
    "ScaleShift",
    "Schedule",
    "SelfOrthogonality",
    "Warmup",
    "WeightRegularizer",
]
