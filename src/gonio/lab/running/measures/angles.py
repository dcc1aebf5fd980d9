"""Angles between filters, sizes of signals, and the mixtures of switchable norms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gonio.errors import InvalidArgumentError
from gonio.geometry import angles, layout_of, matrix_view
from gonio.lab.running.measures import FinishedRun, measure
from gonio.lab.running.measures.scale import PROBES, weights_of
from gonio.surgery.facts import facts_of

Read = Literal["weights", "outputs"]
Layers = Literal["conv", "linear"]


@measure("degrees")
def angle_bias(run: FinishedRun, *, read: Read = "weights", layers: Layers = "conv", skip: int = 1) -> float:
    """Distance of the mean angle between filters from 90 degrees, averaged over the layers.

    Args:
        read: the angles from the `weights`, or from the signs of the layers' `outputs` for test examples.
        layers: `conv` or `linear`. skip: number of first layers that are left out, e.g. a stem of few dimensions.
    """
    found = _layer_angles(run, read, layers, skip)
    return sum(abs(float(angle.mean()) - 90) for angle in found) / len(found)


@measure("degrees")
def angle_spread(run: FinishedRun, *, read: Read = "weights", layers: Layers = "conv", skip: int = 1) -> float:
    """Standard deviation of the angles between the filters of a layer, averaged over the layers."""
    found = _layer_angles(run, read, layers, skip)
    return sum(float(angle.std()) for angle in found) / len(found)


@measure("degrees")
def angle_error(run: FinishedRun, *, layers: Layers = "conv", skip: int = 1) -> float:
    """Mean distance of the angles read from outputs to those of the weights: 0 for inputs of all directions alike."""
    seen, exact = _layer_angles(run, "outputs", layers, skip), _layer_angles(run, "weights", layers, skip)
    return sum(float((a - b).abs().mean()) for a, b in zip(seen, exact, strict=True)) / len(exact)


@torch.no_grad()
def _layer_angles(run: FinishedRun, read: Read, layers: Layers, skip: int) -> list[Tensor]:
    """The pairwise angles of each chosen layer in degrees; the classifier, the last linear layer, is left out."""
    modules = [module for module, _ in weights_of(run.model)]
    convs = [module for module in modules if isinstance(module, nn.modules.conv._ConvNd)]
    linears = [module for module in modules if isinstance(module, nn.Linear)][:-1]
    chosen = (convs if layers == "conv" else linears)[skip:]
    if not chosen:
        raise InvalidArgumentError("the angles of a model need layers", f"no {layers} layer", "Use another model.")
    if read == "outputs":
        return _angles_of_outputs(run, chosen)
    return [_pairs(angles(matrix_view(m.weight.double(), layout_of(m)))) for m in chosen]


def _angles_of_outputs(run: FinishedRun, chosen: Sequence[nn.Module]) -> list[Tensor]:
    """Angles by the lemma E[sgn⟨u, x⟩ sgn⟨v, x⟩] = 1 − 2θ/π, with the layer's own inputs as x and its bias left out."""
    found: dict[nn.Module, Tensor] = {}

    def keep(module: nn.Module, _: Any, output: Tensor) -> None:
        bias = getattr(module, "bias", None)
        flat = output.flatten(2).transpose(0, 1).flatten(1) if output.ndim > 2 else output.T
        found[module] = (flat if bias is None else flat - bias[:, None]).sign().double()

    handles = [module.register_forward_hook(keep) for module in chosen]
    run.task.outputs(run.model.eval(), run.task.test.inputs[:PROBES])
    for handle in handles:
        handle.remove()
    signs = [found[module] for module in chosen]
    return [_pairs(torch.deg2rad(90 * (1 - sign @ sign.T / sign.shape[1])[None])) for sign in signs]


def _pairs(radians: Tensor) -> Tensor:
    """The angles above the diagonal, in degrees."""
    first, second = torch.triu_indices(radians.shape[-2], radians.shape[-1], offset=1)
    return torch.rad2deg(radians)[:, first, second].flatten()


@measure("decades", start=True)
@torch.no_grad()
def signal_gain(run: FinishedRun) -> float:
    """Decades by which the RMS of the signal grows from the first to the last layer in front of the classifier."""
    sizes: list[float] = []
    modules = [module for module, _ in weights_of(run.model)]

    def keep(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        sizes.append(float(given[0].double().square().mean().sqrt()))

    handles = [module.register_forward_pre_hook(keep) for module in modules[1:]]
    run.task.outputs(run.model.eval(), run.task.test.inputs[:PROBES])
    for handle in handles:
        handle.remove()
    return math.log10(max(sizes[-1], 1e-300) / max(sizes[0], 1e-300))


@measure("%")
def batch_share(run: FinishedRun) -> float:
    """Share of the batch statistics in the mixtures of all switchable norms, mean and variance together."""
    mixtures = [mixture(m) for m in run.model.modules() if (mixture := facts_of(m).mixture) is not None]
    shares = [share["batch"] for mixture in mixtures for share in mixture.values()]
    if not shares:
        raise InvalidArgumentError("batch_share needs switchable norms", "none in the model", "Swap them in.")
    return 100 * sum(shares) / len(shares)
