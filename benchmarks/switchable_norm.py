"""Switchable normalisation in training mode against the published formulation and F.batch_norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Candidate, Operation, Row, operation_of
from gonio import nn as gnn

TITLE = "Switchable normalisation, training"
FLOOR = "`F.batch_norm` in training"
EPS = 1e-5
SHAPES = ((32, 64, 32, 32), (32, 256, 14, 14), (8, 64, 112, 112))


def reference(x: Tensor, mean_logits: Tensor, var_logits: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Moments of moments: those of layer and batch from those of every image and channel."""
    flat = x.flatten(2)
    mean_in, var_in = flat.mean(2, keepdim=True), flat.var(2, keepdim=True, unbiased=False)
    square = var_in + mean_in**2
    mean_ln, mean_bn = mean_in.mean(1, keepdim=True), mean_in.mean(0, keepdim=True)
    var_ln = square.mean(1, keepdim=True) - mean_ln**2
    var_bn = square.mean(0, keepdim=True) - mean_bn**2
    p, q = mean_logits.softmax(0), var_logits.softmax(0)
    mean = p[0] * mean_in + p[1] * mean_ln + p[2] * mean_bn
    var = q[0] * var_in + q[1] * var_ln + q[2] * var_bn
    out = (flat - mean) / (var + EPS).sqrt()
    return (out * weight[:, None] + bias[:, None]).view_as(x)


def _input(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()


def _reference(name: str, shape: tuple[int, ...], mode: str) -> Candidate:
    def make() -> Operation:
        x, layer = _input(shape), gnn.SwitchableNorm2d(shape[1])
        inputs = [x, layer.mean_logits, layer.var_logits, layer.weight, layer.bias]
        call: Callable[..., Tensor] = torch.compile(reference, dynamic=False) if "compiled" in name else reference
        return operation_of(lambda: call(*inputs), inputs, mode)

    return Candidate(name, make, compiled="compiled" in name)


def _ours(name: str, shape: tuple[int, ...], mode: str) -> Candidate:
    def make() -> Operation:
        x, layer = _input(shape), gnn.SwitchableNorm2d(shape[1])
        inputs = [x, layer.mean_logits, layer.var_logits, layer.weight, layer.bias]
        call = torch.compile(layer, dynamic=False) if "compiled" in name else layer
        return operation_of(lambda: call(x), inputs, mode)

    return Candidate(name, make, compiled="compiled" in name)


def _floor(shape: tuple[int, ...], mode: str) -> Candidate:
    def make() -> Operation:
        x = _input(shape)
        weight, bias = torch.ones(shape[1], requires_grad=True), torch.zeros(shape[1], requires_grad=True)
        mean, var = torch.zeros(shape[1]), torch.ones(shape[1])

        def forward() -> Tensor:
            return F.batch_norm(x, mean, var, weight, bias, training=True)

        return operation_of(forward, [x, weight, bias], mode)

    return Candidate("batch_norm", make)


def rows(*, quick: bool) -> Iterator[Row]:
    for mode in ("F", "FB"):
        for shape in ((2, 4, 5, 5),) if quick else SHAPES:
            candidates = (
                _reference("published form", shape, mode),
                _reference("published form, compiled", shape, mode),
                _ours("gonio", shape, mode),
                _ours("gonio, compiled", shape, mode),
            )
            yield Row("×".join(map(str, shape)), mode, _floor(shape, mode), candidates)
