"""Decoupled linear layers against other ways of writing them: tanh(‖x‖)·g(θ), fixed radius 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import Candidate, Operation, Row, operation_of
from gonio import nn as gnn
from gonio.nn import angular as angles
from gonio.nn import magnitude

TITLE = "Decoupled linear layer, tanh magnitude"
FLOOR = "`F.linear` of the same shape"
EPS = 1e-12
ANGULAR = {"cosine": angles.Cosine, "linear": angles.Linear}
Function = Callable[[Tensor, Tensor, str], Tensor]


def _bend(angular: str, cosine: Tensor) -> Tensor:
    return cosine if angular == "cosine" else 1 - (2 / math.pi) * torch.acos(cosine.clamp(-1 + 1e-6, 1 - 1e-6))


def normalize_both(x: Tensor, weight: Tensor, angular: str) -> Tensor:
    norm = x.square().sum(1, keepdim=True).add(EPS).sqrt()
    return torch.tanh(norm) * _bend(angular, F.linear(x / norm, F.normalize(weight, dim=1)))


def divide_after(x: Tensor, weight: Tensor, angular: str) -> Tensor:
    norm = x.square().sum(1, keepdim=True).add(EPS).sqrt()
    lengths = weight.square().sum(1).add(EPS).sqrt()
    return torch.tanh(norm) * _bend(angular, F.linear(x, weight) / (norm * lengths))


def _tensors(samples: int, width: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(samples, width, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(width, width, generator=torch.Generator().manual_seed(1)) / math.sqrt(width)
    return x.requires_grad_(), weight.requires_grad_()


def _peer(name: str, function: Function, size: tuple[int, int], mode: str, angular: str) -> Candidate:
    def make() -> Operation:
        x, weight = _tensors(*size)
        call = torch.compile(function, dynamic=False) if "compiled" in name else function
        return operation_of(lambda: call(x, weight, angular), [x, weight], mode)

    return Candidate(name, make, compiled="compiled" in name)


def _ours(name: str, size: tuple[int, int], mode: str, angular: str) -> Candidate:
    def make() -> Operation:
        x, weight = _tensors(*size)
        linear = nn.Linear(size[1], size[1], bias=False)
        linear.weight = nn.Parameter(weight.detach())
        options = {"magnitude": magnitude.Tanh(radius=1.0, radius_in="absolute"), "angular": ANGULAR[angular]()}
        module = gnn.DecoupledLinear.from_linear(linear, **options)
        call = torch.compile(module, dynamic=False) if "compiled" in name else module
        return operation_of(lambda: call(x), [x, module.weight], mode)

    return Candidate(name, make, compiled="compiled" in name)


def _floor(size: tuple[int, int], mode: str) -> Candidate:
    def make() -> Operation:
        x, weight = _tensors(*size)
        return operation_of(lambda: F.linear(x, weight), [x, weight], mode)

    return Candidate("linear", make)


def rows(*, quick: bool) -> Iterator[Row]:
    """Both angular parts that differ in cost."""
    size = (16, 32) if quick else (4096, 1024)
    for mode in ("F", "FB"):
        for angular in ("cosine",) if quick else ("cosine", "linear"):
            candidates = (
                _peer("normalize both", normalize_both, size, mode, angular),
                _peer("divide after", divide_after, size, mode, angular),
                _peer("divide after, compiled", divide_after, size, mode, angular),
                _ours("gonio", size, mode, angular),
                _ours("gonio, compiled", size, mode, angular),
            )
            yield Row(f"{size[0]}×{size[1]} → {size[1]}, {angular}", mode, _floor(size, mode), candidates)
