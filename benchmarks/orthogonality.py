"""Soft orthogonality of all weights of a network: value and gradient against snippets in use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

import gonio
from benchmarks.harness import Candidate, Operation, Row
from benchmarks.shapes import MODELS, TINY, weights
from gonio.regularizers import Orthogonality

TITLE = "Soft orthogonality of a whole network"
FLOOR = "two matrix products per layer on its smaller side"
Shapes = Sequence[tuple[int, ...]]


def columns(weight: Tensor) -> Tensor:
    """The public snippet: ‖WᵀW − I‖² whatever the shape, less the constant by which it exceeds the smaller side."""
    w = weight.flatten(1)
    gram = w.T @ w
    surplus = max(0, w.shape[1] - w.shape[0])
    return (gram - torch.eye(len(gram))).square().sum() - surplus


def small_side(weight: Tensor) -> Tensor:
    w = weight.flatten(1)
    w = w if w.shape[0] <= w.shape[1] else w.T
    gram = w @ w.T
    return (gram - torch.eye(len(gram))).square().sum()


def _candidate(name: str, function: Callable[[Tensor], Tensor], shapes: Shapes) -> Candidate:
    def make() -> Operation:
        parameters = weights(shapes)
        call = torch.compile(function, dynamic=False) if "compiled" in name else function
        return lambda: torch.autograd.grad(torch.stack([call(w) for w in parameters]).sum(), parameters)

    return Candidate(name, make, compiled="compiled" in name)


def _in_place(shapes: Shapes) -> Candidate:
    """Gradients added to `.grad` without a graph, as `Penalty.add_grads_` does."""

    def make() -> Operation:
        layers = nn.ModuleList(nn.Linear(w[0].numel(), len(w), bias=False) for w in weights(shapes))
        for layer, weight in zip(layers, weights(shapes), strict=True):
            layer.weight = nn.Parameter(weight.detach().flatten(1))
            layer.weight.grad = torch.zeros_like(layer.weight)
        penalty = gonio.Penalty(layers, [(None, Orthogonality(1.0))])

        def operation() -> Sequence[Tensor]:
            penalty.add_grads_()
            return [layer.weight.grad.view(shape) for layer, shape in zip(layers, shapes, strict=True)]

        return operation

    return Candidate("gonio, in place", make)


def _floor(shapes: Shapes) -> Candidate:
    def make() -> Operation:
        matrices = [w.detach().flatten(1) for w in weights(shapes)]
        small = [m if m.shape[0] <= m.shape[1] else m.T for m in matrices]
        return lambda: [(m @ m.T) @ m for m in small]

    return Candidate("2 GEMMs", make)


def rows(*, quick: bool) -> Iterator[Row]:
    for name, shapes in {"tiny": TINY}.items() if quick else ((n, f()) for n, f in MODELS.items()):
        candidates = (
            _candidate("columns", columns, shapes),
            _candidate("smaller side", small_side, shapes),
            _candidate("smaller side, compiled", small_side, shapes),
            _candidate("gonio", Orthogonality(1.0).value, shapes),
            _in_place(shapes),
        )
        yield Row(name, "FB", _floor(shapes), candidates)
