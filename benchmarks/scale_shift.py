"""The scale-shift penalty of all weights of a network: its gradient against autograd through the formula."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

import gonio
from benchmarks.harness import Candidate, Operation, Row
from benchmarks.shapes import TINY, resnet50, resnet152, weights
from gonio.regularizers import ScaleShift

TITLE = "Scale-shift penalty of a whole network"
FLOOR = "one read of every weight and one update of its gradient"
PENALTY = ScaleShift.paper(1.0, 1.0)
Shapes = Sequence[tuple[int, ...]]


def naive(parameters: Sequence[Tensor]) -> Tensor:
    """log‖W‖ + ‖W‖₁/‖W‖, summed over the layers."""
    terms = [w.norm().log() + w.abs().sum() / w.norm() for w in parameters]
    return torch.stack(terms).sum()


def ours(parameters: Sequence[Tensor]) -> Tensor:
    return torch.stack([PENALTY.value(w) for w in parameters]).sum()


def _candidate(name: str, function: Callable[[Sequence[Tensor]], Tensor], shapes: Shapes) -> Candidate:
    def make() -> Operation:
        parameters = weights(shapes)
        call = torch.compile(function, dynamic=False) if "compiled" in name else function
        return lambda: torch.autograd.grad(call(parameters), parameters)

    return Candidate(name, make, compiled="compiled" in name)


def _in_place(shapes: Shapes, name: str, *, flat: bool = False) -> Candidate:
    """Gradients added to `.grad` without a graph, by `Penalty.add_grads_`."""

    def make() -> Operation:
        layers = _flat_layers(shapes) if flat else _layers(shapes)
        penalty = gonio.Penalty(layers, [(None, PENALTY)])
        if "compiled" in name:
            penalty.compile_()

        def operation() -> Sequence[Tensor]:
            penalty.add_grads_()
            return [layer.weight.grad.view(shape) for layer, shape in zip(layers, shapes, strict=True)]

        return operation

    return Candidate(name, make, compiled="compiled" in name)


def _layers(shapes: Shapes) -> nn.ModuleList:
    with torch.device("meta"):
        layers = nn.ModuleList(nn.Linear(math.prod(shape[1:]), shape[0], bias=False) for shape in shapes)
    for layer, weight in zip(layers, weights(shapes), strict=True):
        layer.weight = nn.Parameter(weight.detach().flatten(1))
        layer.weight.grad = torch.zeros_like(layer.weight)
    return layers


def _flat_layers(shapes: Shapes) -> nn.ModuleList:
    """The same with all parameters in one buffer and all gradients in another."""
    layers = _layers(shapes)
    sizes = [layer.weight.numel() for layer in layers]
    values = torch.cat([layer.weight.detach().flatten() for layer in layers]).split(sizes)
    gradients = torch.zeros(sum(sizes)).split(sizes)
    for layer, value, gradient in zip(layers, values, gradients, strict=True):
        shape = layer.weight.shape
        layer.weight = nn.Parameter(value.view(shape))
        layer.weight.grad = gradient.view(shape)
    return layers


def _floor(shapes: Shapes) -> Candidate:
    def make() -> Operation:
        parameters = [w.detach() for w in weights(shapes)]
        gradients = [torch.zeros_like(w) for w in parameters]

        def operation() -> Sequence[Tensor]:
            for weight, gradient in zip(parameters, gradients, strict=True):
                weight.sum()
                gradient.add_(weight, alpha=1e-6)
            return gradients

        return operation

    return Candidate("read and axpy", make)


def rows(*, quick: bool) -> Iterator[Row]:
    models = {"tiny": TINY} if quick else {"ResNet-50": resnet50(), "ResNet-152": resnet152()}
    for name, shapes in models.items():
        candidates = [
            _candidate("naive", naive, shapes),
            _candidate("gonio", ours, shapes),
            _in_place(shapes, "gonio, in place"),
            _in_place(shapes, "gonio, in place, compiled"),
        ]
        if name != "ResNet-152":  # unrolled over 156 layers it takes the compiler a minute
            candidates.insert(1, _candidate("naive, compiled", naive, shapes))
        yield Row(name, "FB", _floor(shapes), tuple(candidates))
    for name, shapes in models.items():
        ways = (
            _in_place(shapes, "gonio, in place", flat=True),
            _in_place(shapes, "gonio, in place, compiled", flat=True),
        )
        yield Row(name, "FB", _floor(shapes), ways, "flat")
