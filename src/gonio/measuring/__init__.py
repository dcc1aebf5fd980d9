"""Measure the norms, angles and spectra of a model's weights, each beside its value for random weights."""

from __future__ import annotations

from gonio.measuring.difference import Differences, TensorDifference, difference
from gonio.measuring.figures.tensor import TensorMeasurement
from gonio.measuring.findings.finding import Finding, Suppressed
from gonio.measuring.findings.rules import explain
from gonio.measuring.findings.suppression import Suppression
from gonio.measuring.measure import measure
from gonio.measuring.measurements import Measurements
from gonio.measuring.outline import Outline, TensorHeader, outline
from gonio.measuring.tracker import Tracker
from gonio.measuring.training.equilibrium import Equilibrium, equilibrium
from gonio.measuring.training.rotation import StepRotation, step_rotation

__all__ = [
    "Differences",
    "Equilibrium",
    "Finding",
    "Measurements",
    "Outline",
    "StepRotation",
    "Suppressed",
    "Suppression",
    "TensorDifference",
    "TensorHeader",
    "TensorMeasurement",
    "Tracker",
    "difference",
    "equilibrium",
    "explain",
    "measure",
    "outline",
    "step_rotation",
]


def __dir__() -> list[str]:
    return sorted(__all__)
