"""Measure the norms, angles and spectra of a model's weights, each beside its value for random weights."""

from gonio.measuring.certificate import Certificate, Factor, certify
from gonio.measuring.changes.difference import DepthChange, Differences, difference
from gonio.measuring.changes.pair import TensorDifference
from gonio.measuring.changes.several import Agreement, Changes, changes
from gonio.measuring.checking.check import CheckpointContents, CheckResult, check, check_before_save
from gonio.measuring.checking.scan import TensorCheck
from gonio.measuring.explaining import explain
from gonio.measuring.figures.tensor import TensorMeasurement
from gonio.measuring.findings.rules import Finding, Suppressed
from gonio.measuring.findings.suppression import Suppression
from gonio.measuring.measure import measure
from gonio.measuring.measurements import Measurements
from gonio.measuring.outline import Outline, TensorHeader, outline
from gonio.measuring.tracker import Tracker
from gonio.measuring.training.equilibrium import Equilibrium, equilibrium, register_equilibrium
from gonio.measuring.training.rotation import StepRotation, step_rotation
from gonio.measuring.widths import Widths, WidthScaling, widths

__all__ = [
    "Agreement",
    "Certificate",
    "Changes",
    "CheckResult",
    "CheckpointContents",
    "DepthChange",
    "Differences",
    "Equilibrium",
    "Factor",
    "Finding",
    "Measurements",
    "Outline",
    "StepRotation",
    "Suppressed",
    "Suppression",
    "TensorCheck",
    "TensorDifference",
    "TensorHeader",
    "TensorMeasurement",
    "Tracker",
    "WidthScaling",
    "Widths",
    "certify",
    "changes",
    "check",
    "check_before_save",
    "difference",
    "equilibrium",
    "explain",
    "measure",
    "outline",
    "register_equilibrium",
    "step_rotation",
    "widths",
]
__dir__ = __all__.copy  # the public names alone
