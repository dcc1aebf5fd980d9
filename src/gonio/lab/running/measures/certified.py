"""What no attack can change: certified accuracy, and the constant that it rests on."""

from __future__ import annotations

import math

from torch import nn

from gonio.lab.running.measures import FinishedRun, measure
from gonio.lab.running.measures.scale import PROBES
from gonio.measuring.certificate import Certificate, certify


@measure("%", worst=0.0, better="max")
def certified_accuracy(run: FinishedRun, *, eps: float) -> float:
    """Share of test examples that are classified rightly, and whose class no change of l2 norm `eps` can alter.

    By :func:`gonio.certify`; of several channels that are standardised the smallest deviation counts.

    Args:
        eps: in the unit of the task's inputs.
    """
    found, inputs = _certificate(run), run.task.outputs(nn.Identity(), run.task.test.inputs)
    unit = min(run.task.standardize[1]) if run.task.standardize else 1.0
    return 100 * found.certified_accuracy(inputs, run.task.test.targets, eps / unit)


@measure("decades")
def certified_constant(run: FinishedRun) -> float:
    """Decades of the upper bound of the network's Lipschitz constant, on standardised inputs."""
    return math.log10(max(_certificate(run).upper, 1e-300))


def _certificate(run: FinishedRun) -> Certificate:
    return certify(run.model, run.task.outputs(nn.Identity(), run.task.test.inputs[:PROBES]), steps=1)
