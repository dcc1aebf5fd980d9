"""Soft orthogonality of all weights of a network: value and gradient against snippets in use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

import gonio
from benchmarks.harness import Candidate, Operation, Row
from benchmarks.shapes import MODELS, TINY, weights
from gonio.regularizers import SRIP, Orthogonality, Regularizer
from gonio.regularizers.srip import GOLDEN

TITLE = "Soft orthogonality of a whole network"
FLOOR = (
    "two matrix products per layer on its smaller side; for SRIP three products of its matrix with a vector and a "
    "write of its size"
)
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
        return lambda: torch.autograd.grad(torch.stack([function(w) for w in parameters]).sum(), parameters)

    return Candidate(name, make)


def gram_srip(weight: Tensor) -> Tensor:
    """Two products with the Gram matrix of the smaller side, from gonio's vector, which is held fixed."""
    w = weight.flatten(1)
    w = w if w.shape[0] <= w.shape[1] else w.T
    residual = w @ w.T - torch.eye(min(w.shape))
    vector = (torch.arange(1, len(w) + 1) * GOLDEN) % 1 - 0.5 + 1e-3
    vector = (residual.detach() @ vector).detach()
    return (residual @ (vector / vector.norm())).norm()


def _in_place(shapes: Shapes, regularizer: Regularizer) -> Candidate:
    """Gradients added to `.grad` without a graph, as `Penalty.add_grads_` does."""

    def make() -> Operation:
        layers = nn.ModuleList(nn.Linear(w[0].numel(), len(w), bias=False) for w in weights(shapes))
        for layer, weight in zip(layers, weights(shapes), strict=True):
            layer.weight = nn.Parameter(weight.detach().flatten(1))
            layer.weight.grad = torch.zeros_like(layer.weight)
        penalty = gonio.Penalty(layers, [(None, regularizer)])

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


def _vectors(shapes: Shapes) -> Candidate:
    def make() -> Operation:
        matrices = [w.detach().flatten(1) for w in weights(shapes)]
        small = [m if m.shape[0] <= m.shape[1] else m.T for m in matrices]
        starts = [torch.randn(len(m), generator=torch.Generator().manual_seed(0)) for m in small]
        written = [torch.empty_like(m) for m in matrices]

        def operation() -> Sequence[Tensor]:
            for matrix, vector, out in zip(small, starts, written, strict=True):
                inner = matrix.T @ vector
                matrix.T @ (matrix @ inner)
                out.fill_(1.0)
            return written

        return operation

    return Candidate("3 products, 1 write", make)


def rows(*, quick: bool) -> Iterator[Row]:
    for name, shapes in {"tiny": TINY}.items() if quick else ((n, f()) for n, f in MODELS.items()):
        candidates = (
            _candidate("columns", columns, shapes),
            _candidate("smaller side", small_side, shapes),
            _candidate("gonio", Orthogonality(1.0).value, shapes),
            _in_place(shapes, Orthogonality(1.0)),
        )
        yield Row(name, "FB", _floor(shapes), candidates)
        candidates = (
            _candidate("Gram matrix", gram_srip, shapes),
            _candidate("gonio", SRIP(1.0).value, shapes),
            _in_place(shapes, SRIP(1.0)),
        )
        yield Row(name, "FB", _vectors(shapes), candidates, "srip")
