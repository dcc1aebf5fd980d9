"""Measure the norms, angles and spectra of a model's weights, and hold each against chance."""

from __future__ import annotations

from gonio.measuring.difference import difference
from gonio.measuring.differences import Differences, TensorDifference
from gonio.measuring.findings import Finding
from gonio.measuring.measure import measure
from gonio.measuring.measurements import Measurements
from gonio.measuring.outline import Outline, TensorHeader, outline
from gonio.measuring.rules import explain
from gonio.measuring.suppressed import Suppressed
from gonio.measuring.suppression import Suppression
from gonio.measuring.tensor import TensorMeasurement
from gonio.measuring.tracker import Tracker

__all__ = [
    "Differences",
    "Finding",
    "Measurements",
    "Outline",
    "Suppressed",
    "Suppression",
    "TensorDifference",
    "TensorHeader",
    "TensorMeasurement",
    "Tracker",
    "difference",
    "explain",
    "measure",
    "outline",
]
