"""Bounds of gradients by the layers' norms, what they certify, and gradients along plain gradient steps."""

from __future__ import annotations

import copy
import math
from itertools import islice
from typing import Literal

import torch
from torch import Tensor, nn

from gonio.geometry import Layout, conv_spectral_norm_bound, filter_norms, layout_of, singular_values
from gonio.lab.running.measures import FinishedRun, measure
from gonio.lab.running.measures.scale import PROBES
from gonio.lab.running.measures.scores import first_epoch
from gonio.lab.tasks.task import Batch
from gonio.measuring.certificate import Certificate, certify
from gonio.models.built_in import Residual


@measure("decades")
@torch.no_grad()
def lipschitz_bound(run: FinishedRun, *, norm: Literal["spectral", "frobenius"] = "spectral") -> float:
    """Decades of the product of all layers' norms, which bounds the gradient of the logits by the input.

    A residual block counts with 1 + the product of its branch. For chains of linear and convolutional layers, such
    blocks, and activations of slope at most 1, without normalisation.

    Args:
        norm: `spectral`, the operator norm; or `frobenius`, which is never smaller, the one of a scale-shift-invariant
            penalty, whose sum of logarithms is the logarithm of this bound.
    """
    return math.log10(_bound(run.model, norm))


def _bound(module: nn.Module, norm: str) -> float:
    if isinstance(module, Residual):
        return 1 + _bound(module.branch, norm)
    if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
        return _operator_norm(module.weight.detach().double(), layout_of(module), norm)
    return math.prod(_bound(child, norm) for child in module.children())


def _operator_norm(weight: Tensor, layout: Layout, norm: str) -> float:
    if norm == "frobenius":  # a patch holds each input at most once per tap, so the map's norm is that much larger
        return float(weight.norm()) * math.sqrt(math.prod(weight.shape[2:]))
    if weight.ndim == 2:
        return float(singular_values(weight).max())
    return float(conv_spectral_norm_bound(weight, layout=layout))


@measure("decades")
def input_gradient(run: FinishedRun) -> float:
    """Decades of the largest spectral norm of the gradient of the logits by the input, over test examples."""
    inputs = run.task.test.inputs[:PROBES]
    model = copy.deepcopy(run.model).eval()
    jacobians = torch.func.vmap(torch.func.jacrev(lambda x: run.task.outputs(model, x[None])[0]))(inputs)
    flat = jacobians.detach().flatten(2).double()
    return math.log10(max(float(torch.linalg.matrix_norm(flat, 2).max()), 1e-300))


@measure("decades")
def lipschitz_slack(run: FinishedRun, *, norm: Literal["spectral", "frobenius"] = "spectral") -> float:
    """Decades by which the product of the layers' norms exceeds the largest gradient over test examples."""
    return lipschitz_bound(run, norm=norm) - input_gradient(run)


@measure("%", worst=0.0, better="max")
def certified_accuracy(run: FinishedRun, *, eps: float) -> float:
    """Share of test examples that are classified correctly, and whose class no change of l2 norm `eps` can alter.

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


@measure("%", start=True)
def gradient_change(run: FinishedRun, *, steps: int = 20) -> float:
    """Mean change of the gradient by a step, in percent: ‖∇L(w − η∇L) − ∇L(w)‖ / ‖∇L(w)‖ on the batch of the step.

    The steps are plain gradient steps from the start with the plan's learning rate.
    """
    run.model.train()
    found = []
    for batch in islice(first_epoch(run), steps):
        before = _flat_gradient(run, batch)
        _descend(run)
        after = _flat_gradient(run, batch)
        found.append(float((after - before).norm() / before.norm().clamp_min(1e-300)))
    return 100 * sum(found) / len(found)


@torch.no_grad()
def _descend(run: FinishedRun) -> None:
    """A plain gradient step with the plan's learning rate."""
    for parameter in run.model.parameters():
        parameter.sub_(run.training.lr * _grad(parameter))


def _flat_gradient(run: FinishedRun, batch: Batch) -> Tensor:
    """The gradient of the loss on one batch by all parameters, which stays in their `.grad`."""
    run.model.zero_grad()
    run.task.loss(run.task.outputs(run.model, batch[0]), batch[1]).backward()
    return torch.cat([_grad(parameter).double().flatten() for parameter in run.model.parameters()])


@measure("%", start=True)
def norm_growth_error(run: FinishedRun, *, steps: int = 20) -> float:
    r"""Largest deviation in percent of the growth of ‖v‖ per step from √(1 + c²), c = η‖∇v‖ / ‖v‖, by filter.

    The model, parametrised with weight norm, takes plain gradient steps with the plan's learning rate.
    """
    raws, worst = [p for p in run.model.train().parameters() if p.ndim > 1], 0.0
    for batch in islice(first_epoch(run), steps):
        _flat_gradient(run, batch)
        before = [filter_norms(raw.detach().double().flatten(1)) for raw in raws]
        pulls = [run.training.lr * filter_norms(_grad(raw).double().flatten(1)) for raw in raws]
        _descend(run)
        after = [filter_norms(raw.detach().double().flatten(1)) for raw in raws]
        for was, pull, now in zip(before, pulls, after, strict=True):
            worst = max(worst, float((now / was / (1 + (pull / was).square()).sqrt() - 1).abs().max()))
    return 100 * worst


def _grad(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
