"""The second form for eager execution, the plain form, and transforms of either give the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from catalog import seeded
from gonio import nn as gnn
from gonio.nn import angular, kernels, magnitude
from laws.support import differentiate
from nn.operators import OPERATORS
from tolerances import close, exact

KINDS = (
    (gnn.DecoupledLinear, (4, 6), (3, 4)),
    (gnn.DecoupledConv2d, (4, 6, 3, 2, 1, 1, 2), (2, 4, 5, 6)),
    (gnn.DecoupledConvTranspose1d, (4, 6, 3, 2), (2, 4, 5)),
)
kinds = pytest.mark.parametrize(("kind", "arguments", "shape"), KINDS, ids=["linear", "conv", "transposed"])


def results(layer: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    output = layer(x)
    return [output.detach(), *differentiate(output, [x, *layer.parameters()])]


@pytest.mark.grid(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@kinds
def test_second_and_plain_forms_agree(
    kind: Any, arguments: Any, shape: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "LARGE", 0)  # the product is scaled in place
    for options in OPERATORS:
        layer = kind(*arguments, **options).to(dtype).eval()
        x = seeded(*shape, dtype=dtype)
        expected = results(layer, x)
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            for second in ("bounded_asin", "scale_"):
                patch.delattr(kernels, second)  # a control: the plain form uses none of them
            found = results(layer, x)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, **close(dtype))


def test_only_what_needs_a_gradient_gets_one() -> None:
    x = seeded(2, 4, 5, 5)
    layer = gnn.DecoupledConv2d(4, 6, 3, magnitude=magnitude.Tanh(learn_radius=True))
    full = results(layer, x)
    layer.weight.requires_grad_(False)
    radius = layer.log_radius
    output = layer(x)
    (grad,) = differentiate(output, [radius])
    torch.testing.assert_close(grad, full[2 + [n for n, _ in layer.named_parameters()].index("log_radius")])
    layer.requires_grad_(False)
    assert not layer(x).requires_grad
    y = x.clone().requires_grad_()
    torch.testing.assert_close(differentiate(layer(y), [y])[0], full[1], **close(torch.float32))


@pytest.mark.parametrize("large", [0, kernels.LARGE])
@kinds
def test_second_derivatives(kind: Any, arguments: Any, shape: Any, large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "LARGE", large)
    for options in (
        {},
        {"magnitude": magnitude.Tanh(learn_radius=True)},
        {"magnitude": magnitude.Ball(learn_radius=True)},
        {"magnitude": magnitude.Sphere(), "angular": angular.Sigmoid()},
        {"magnitude": magnitude.Mixed(learn_beta=True), "angular": angular.SquaredCosine(), "weighted": "linear"},
    ):
        layer = kind(*arguments, **options).double().eval()
        names = [name for name, _ in layer.named_parameters()]
        point = [p.detach().clone().requires_grad_() for p in layer.parameters()]

        def function(x: Tensor, *values: Tensor, layer: nn.Module = layer, names: list[str] = names) -> Tensor:
            return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

        x = seeded(*shape, dtype=torch.float64).requires_grad_()
        assert gradcheck(function, (x, *point), fast_mode=True)
        assert gradgradcheck(function, (x, *point), fast_mode=True)


@kinds
def test_function_transforms_and_forward_mode(kind: Any, arguments: Any, shape: Any) -> None:
    layer = kind(*arguments, angular=angular.Linear()).double().eval()
    x, direction = seeded(*shape, dtype=torch.float64), seeded(*shape, seed=5, dtype=torch.float64)
    parameters = dict(layer.named_parameters())

    def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, values, (x,)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x.unsqueeze(1))
    whole = torch.autograd.grad(loss(parameters, x), list(parameters.values()))
    for found, expected in zip(each.values(), whole, strict=True):
        torch.testing.assert_close(found.sum(0), expected, **close(torch.float64))
    y = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(parameters, y), y)
    _, slope = torch.func.jvp(lambda x: loss(parameters, x), (x,), (direction,))
    torch.testing.assert_close(slope, (grad * direction).sum(), **close(torch.float64))
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(loss(parameters, forward_ad.make_dual(x, direction))).tangent
    torch.testing.assert_close(dual, slope, **exact(torch.float64))


def test_export_with_a_free_batch_size() -> None:
    layer = gnn.DecoupledConv2d(4, 6, 3, padding="same", angular=angular.SquaredCosine()).eval()
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(layer, (seeded(2, 4, 5, 5),), dynamic_shapes=({0: batch},))
    x = seeded(7, 4, 5, 5)
    torch.testing.assert_close(program.module()(x), layer(x), **exact(torch.float32))


def test_autocast_normalises_in_float32() -> None:
    """Inputs of size 300 overflow a float16 square and lose the norm's digits in bfloat16."""
    layer = gnn.DecoupledConv2d(64, 8, 3, bias=False, magnitude=magnitude.Sphere()).eval()
    x = 300 * seeded(1, 64, 5, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(x)
    assert output.dtype is torch.bfloat16
    torch.testing.assert_close(output.float(), layer(x), **close(torch.bfloat16))
