"""Spectral and weight normalisation of all weights of a network, as one training step uses them.

Forward reads every effective weight once and advances the singular vectors once. In training both libraries do so
by themselves; here no weight changes, and gonio's are advanced by a call. Backward takes the gradient of every
trained tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations as torchs

from benchmarks.harness import Candidate, Operation, Row
from benchmarks.shapes import MODELS, TINY, weights
from gonio import parametrizations as P

TITLE = "Spectral and weight normalisation of a whole network"
FLOOR = (
    "spectral: two products with a vector, one scaling, in the backward one inner and one outer product per weight; "
    "weight: one scaling, in the backward one inner product and one update"
)
SETTLED = 300  # power iterations after which torch's randomly started vectors agree with exact ones
Shapes = Sequence[tuple[int, ...]]


def layers(shapes: Shapes) -> nn.ModuleList:
    """Plain layers that hold the weights."""
    found = nn.ModuleList()
    for weight in weights(shapes):
        out, fan, *kernel = weight.shape
        layer = nn.Conv2d(fan, out, kernel, bias=False) if kernel else nn.Linear(fan, out, bias=False)
        layer.weight = nn.Parameter(weight.detach())
        found.append(layer)
    return found


def _operation(model: nn.ModuleList, advance: Callable[[], object], mode: str) -> Operation:
    def read() -> list[Tensor]:
        advance()
        return [layer.weight for layer in model]

    def forward() -> Sequence[Tensor]:
        with torch.no_grad():
            return read()

    cotangents = [torch.randn(w.shape, generator=torch.Generator().manual_seed(1)) for w in forward()]
    trained = list(model.parameters())

    def both() -> Sequence[Tensor]:
        outputs = read()
        torch.autograd.grad(outputs, trained, cotangents)  # in which order they come is each library's own
        return outputs

    return forward if mode == "F" else both


def _torch_spectral(shapes: Shapes, mode: str) -> Candidate:
    def make() -> Operation:
        model = layers(shapes)
        for layer in model:
            torchs.spectral_norm(layer)
            with torch.no_grad():
                for _ in range(SETTLED):
                    layer.parametrizations.weight[0]._power_method(layer.parametrizations.weight.original.flatten(1), 1)
        return _operation(model, lambda: None, mode)

    return Candidate("torch", make)


def _ours(make_template: Callable[[], P.Parametrization], shapes: Shapes, mode: str) -> Candidate:
    def make() -> Operation:
        model = layers(shapes)
        for layer in model:
            P.attach(layer, "weight", make_template())
        steps = isinstance(make_template(), P.SpectralNorm)
        return _operation(model, (lambda: P.tick_(model)) if steps else (lambda: None), mode)

    return Candidate("gonio", make)


def _torch_weight(shapes: Shapes, mode: str) -> Candidate:
    def make() -> Operation:
        model = layers(shapes)
        for layer in model:
            torchs.weight_norm(layer)
        return _operation(model, lambda: None, mode)

    return Candidate("torch", make)


def _floor(shapes: Shapes, mode: str, *, spectral: bool) -> Candidate:
    def make() -> Operation:
        matrices = [w.detach().flatten(1) for w in weights(shapes)]
        lefts, rights = [torch.ones(len(m)) for m in matrices], [torch.ones(m.shape[1]) for m in matrices]

        def operation() -> Sequence[Tensor]:
            for matrix, left, right in zip(matrices, lefts, rights, strict=True):
                if spectral:
                    torch.mv(matrix.T, left)
                    torch.mv(matrix, right)
                scaled = matrix * 2.0
                if mode == "FB":
                    torch.vdot(scaled.flatten(), matrix.flatten())
                    torch.addr(matrix, left, right) if spectral else torch.add(matrix, scaled, alpha=0.5)
            return matrices

        return operation

    return Candidate("least work", make)


def rows(*, quick: bool) -> Iterator[Row]:
    for name, shapes in {"tiny": TINY}.items() if quick else ((n, f()) for n, f in MODELS.items()):
        for mode in ("F", "FB"):
            spectral = (_torch_spectral(shapes, mode), _ours(P.SpectralNorm, shapes, mode))
            yield Row(name, mode, _floor(shapes, mode, spectral=True), spectral, "spectral")
            weight = (_torch_weight(shapes, mode), _ours(P.WeightNorm, shapes, mode))
            yield Row(name, mode, _floor(shapes, mode, spectral=False), weight, "weight")
