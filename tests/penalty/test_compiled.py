"""Gradients of scale shifts added in eager mode and compiled, in flat buffers and apart."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from catalog import seeded
from gonio import Penalty
from gonio import regularizers as R
from gonio.errors import InvalidArgumentError
from tolerances import close

SHAPES = ((512, 64), (64, 128), (7, 5), (1024, 32))
PENALTY = R.ScaleShift(0.5, direction_strength=0.25, floor=0.1)
BACKENDS = (None, "aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.inductor]))


def layers_of(dtype: torch.dtype, *, flat: bool) -> nn.ModuleList:
    """Weights with gradients, apart or in one buffer each; the third fills no block."""
    sizes = [a * b for a, b in SHAPES]
    values, gradients = (seeded(sum(sizes), seed=seed, dtype=dtype).split(sizes) for seed in (0, 1))
    layers = nn.ModuleList(nn.Linear(shape[1], shape[0], bias=False).to(dtype) for shape in SHAPES)
    for layer, value, gradient, shape in zip(layers, values, gradients, SHAPES, strict=True):
        layer.weight = nn.Parameter((value if flat else value.clone()).view(shape))
        layer.weight.grad = (gradient if flat else gradient.clone()).view(shape)
    layers[0].weight.data[3] = 0.0  # where the sign is 0
    return layers


def expected(weight: Tensor, grad: Tensor) -> Tensor:
    """The derivative of 0.5 log‖W‖ + 0.25 ‖W‖₁/‖W‖ from its definition, in float64."""
    w = weight.detach().double()
    norm = math.sqrt(float((w * w).sum()))
    on_weight = 0.5 / norm**2 - 0.25 * float(w.abs().sum()) / norm**3
    return grad.double() + on_weight * w + 0.25 / norm * w.sign()


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_added_gradients_are_the_derivative(flat: bool, backend: str | None, dtype: torch.dtype) -> None:
    layers = layers_of(dtype, flat=flat)
    wanted = [expected(layer.weight, layer.weight.grad) for layer in layers]
    buffers = [layer.weight.grad for layer in layers]
    penalty = Penalty(layers, [(None, PENALTY)])
    if backend is not None:
        penalty.compile_(backend=backend)
    penalty.add_grads_()
    for layer, want, buffer in zip(layers, wanted, buffers, strict=True):
        assert layer.weight.grad is buffer
        torch.testing.assert_close(buffer.double(), want, **close(dtype))
    again = penalty.values()
    penalty()
    assert again == pytest.approx(penalty.values(), rel=close(dtype)["rtol"])


@pytest.mark.parametrize("backend", ["aot_eager", None])
def test_floors_zeros_and_stacked_blocks(backend: str | None) -> None:
    """A weight under its floor is let go, a zero weight stays, the blocks of a projection have norms of their own."""
    small, none = nn.Linear(256, 256, bias=False).double(), nn.Linear(256, 256, bias=False).double()
    packed = nn.MultiheadAttention(128, 2, bias=False).double()
    model = nn.ModuleList([small, none, packed])
    with torch.no_grad():
        small.weight.mul_(1e-3)
        packed.in_proj_weight[:128] *= 3
    direct, through = Penalty(model, [(None, PENALTY)]), Penalty(model, [(None, PENALTY)])
    none.weight.data.zero_()
    if backend is not None:
        direct.compile_(backend=backend)
    direct.add_grads_()
    added = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    through().backward()
    for a, p in zip(added, model.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, **close(torch.float64))
    assert not added[1].any()


@pytest.mark.parametrize("layout", ["channels_last", "half", "transposed"])
def test_weights_that_cannot_be_read_in_place(layout: str) -> None:
    """Mixed with one that can: each takes its own way."""
    conv, plain = nn.Conv2d(16, 64, 3, bias=False), nn.Linear(256, 256, bias=False)
    if layout == "channels_last":
        conv = conv.to(memory_format=torch.channels_last)
    if layout == "half":
        conv = conv.half()
    if layout == "transposed":
        conv.weight = nn.Parameter(
            torch.randn(16, 64, 3, 3, generator=torch.Generator().manual_seed(0)).transpose(0, 1)
        )
    model = nn.ModuleList([conv, plain])
    penalty = Penalty(model, [(None, PENALTY)])
    penalty.compile_(backend="aot_eager")
    penalty.add_grads_()
    added = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    Penalty(model, [(None, PENALTY)])().backward()
    for a, p in zip(added, model.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, **close(p.dtype))


def test_nothing_to_compile_is_said() -> None:
    penalty = Penalty(nn.Linear(4, 4), [(None, R.Orthogonality(1.0))])
    with pytest.raises(
        InvalidArgumentError,
        match=r"needs a regularizer with a compiled form, such as ScaleShift; found only Orthogonality",
    ):
        penalty.compile_()
