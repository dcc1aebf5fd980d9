"""Decoupled layers equal their definition by explicit patches, and the torch layer where the paper says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gonio
from catalog import seeded
from catalog.decoupled import decoupled
from gonio import nn as gnn
from gonio.errors import InvalidArgumentError
from gonio.nn import angular, magnitude
from laws.support import differentiate
from networks import ResNet18, images, train
from nn.operators import MAGNITUDES, OPERATORS, conversions, is_bounded, shapes
from tolerances import close, exact

CLOSE, EXACT = close(torch.float64), exact(torch.float64)
SAMPLES = (
    (gnn.DecoupledLinear, (5, 4), (3, 2, 5)),
    (gnn.DecoupledConv2d, (4, 6, 3, 2, 1, 2, 2), (2, 4, 7, 8)),
    (gnn.DecoupledConvTranspose2d, (4, 6, 3, 2, 1, 1, 2, True, 2), (2, 4, 4, 3)),
)
# torch itself warns of the copy that an uneven "same" needs
uneven = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


def assert_is_defined(layer: nn.Module, shape: tuple[int, ...]) -> None:
    layer = layer.double()
    x = seeded(*shape, dtype=torch.float64).requires_grad_()
    tensors = [x, *layer.parameters()]
    output, expected = layer(x), decoupled(layer, x)
    torch.testing.assert_close(output, expected, **CLOSE)
    for found, wanted in zip(differentiate(output, tensors), differentiate(expected, tensors), strict=True):
        torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.grid(3)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("kind", "arguments", "shape"), SAMPLES, ids=lambda v: getattr(v, "__name__", ""))
def test_every_operator(kind: Any, arguments: tuple[Any, ...], shape: tuple[int, ...], training: bool) -> None:
    for options in OPERATORS:
        assert_is_defined(kind(*arguments, **options).train(training), shape)


def test_every_shape() -> None:
    for _, kind, arguments, shape in shapes():
        assert_is_defined(kind(*arguments), shape)


def test_a_wrong_padding_is_found() -> None:
    """Negative control: the reference is not blind to the border."""
    layer = gnn.DecoupledConv2d(4, 6, 3, padding=1).double().eval()
    x = seeded(2, 4, 5, 5, dtype=torch.float64)
    layer.padding_mode = "reflect"
    expected = decoupled(layer, x)
    layer.padding_mode = "zeros"
    assert float((layer(x) - expected).detach().abs().max()) > 1e-3


@uneven
@pytest.mark.parametrize("g", [angular.Cosine(), angular.RectifiedCosine()], ids=repr)
def test_one_choice_is_the_torch_layer_and_another_its_relu_without_a_bias(g: angular.Angular) -> None:
    """Weighted linear magnitude with the (rectified) cosine: equal to 1e-12, and so are the gradients."""
    for name, plain, convert, x in conversions():
        if g != angular.Cosine():
            plain.bias = None
        layer = convert(plain, magnitude=magnitude.Linear(), angular=g, weighted="linear")
        x.requires_grad_()
        output, expected = layer(x), plain(x) if g == angular.Cosine() else plain(x).relu()
        torch.testing.assert_close(output, expected, msg=lambda text, name=name: f"{name}: {text}", **EXACT)
        tensors = [x, *plain.parameters()]
        for found, wanted in zip(differentiate(output, tensors), differentiate(expected, tensors), strict=True):
            torch.testing.assert_close(found, wanted, **EXACT)


def test_with_a_bias_a_relu_is_not_part_of_the_operator() -> None:
    """Negative control: relu(⟨w, x⟩ + b) is not relu(⟨w, x⟩) + b."""
    plain = torch.nn.Conv2d(3, 4, 3).double()
    x = seeded(2, 3, 5, 5, dtype=torch.float64)
    layer = gnn.DecoupledConv2d.from_conv(
        plain, magnitude=magnitude.Linear(), angular=angular.RectifiedCosine(), weighted="linear"
    )
    assert float((layer(x) - plain(x).relu()).detach().abs().max()) > 1e-2


@pytest.mark.parametrize("h", [h for h in MAGNITUDES if is_bounded(h)], ids=repr)
@pytest.mark.parametrize("weighted", [None, "tanh_product", "tanh_each"])
def test_bounded_outputs(h: magnitude.Magnitude, weighted: Any) -> None:
    if weighted is not None and not isinstance(h, magnitude.Tanh):
        pytest.skip("defined for Tanh")
    for g in (angular.Cosine(), angular.Linear(), angular.Sigmoid(), angular.SquaredCosine()):
        layer = gnn.DecoupledConv2d(3, 8, 3, bias=False, magnitude=h, angular=g, weighted=weighted)
        for scale in (1e-3, 1.0, 1e3):
            output = layer(scale * seeded(2, 3, 6, 6)).detach()
            assert float(output.abs().max()) <= h.alpha * (1 + 1e-5)


def test_a_filter_that_equals_its_patch() -> None:
    """Parallel and antiparallel vectors reach the ends of every g, in each dtype, with finite gradients."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for g in (angular.Cosine(), angular.Linear(), angular.Sigmoid(), angular.SquaredCosine()):
            layer = gnn.DecoupledLinear(
                6, 2, bias=False, magnitude=magnitude.Sphere(), angular=g, device="cpu", dtype=dtype
            )
            row = seeded(6, dtype=dtype)
            layer.weight.data.copy_(torch.stack([row, -row]))
            x = row.clone().requires_grad_()
            output = layer(x[None])
            ends = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
            slack = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}[dtype]
            torch.testing.assert_close(output.double(), ends, rtol=0, atol=slack)
            grads = torch.autograd.grad(output.sum(), [x, layer.weight])
            assert all(bool(grad.isfinite().all()) for grad in grads)


def test_unbatched_images() -> None:
    x = seeded(3, 6, 5)
    for layer in (gnn.DecoupledConv2d(3, 4, 3), gnn.DecoupledConvTranspose2d(3, 4, 3)):
        layer.eval()
        torch.testing.assert_close(layer(x), layer(x[None])[0])


def test_the_output_size_of_a_transposed_convolution() -> None:
    plain = nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1).double()
    layer = gnn.DecoupledConvTranspose2d.from_conv(plain, magnitude=magnitude.Linear(), weighted="linear")
    x = seeded(2, 3, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(layer(x, output_size=[8, 8]), plain(x, output_size=[8, 8]), **EXACT)


@pytest.mark.parametrize(
    ("options", "size"),
    [({"dilation": 2, "output_padding": 1}, 4), ({"stride": 2, "padding": 1, "dilation": 3, "output_padding": 2}, 3)],
    ids=str,
)
def test_an_output_padding_of_a_stride_or_more(options: dict[str, int], size: int) -> None:
    """Where stride <= output_padding < dilation, the last outputs lie beyond all windows of the input."""
    layer = gnn.DecoupledConvTranspose2d(2, 3, 3, **options)
    assert_is_defined(layer, (1, 2, size, size))


def test_an_empty_output_of_a_transposed_convolution() -> None:
    plain = nn.ConvTranspose1d(2, 2, 1, padding=1, output_padding=1, dilation=2)
    layer, x = gnn.DecoupledConvTranspose1d.from_conv(plain), torch.ones(0, 2, 1, requires_grad=True)
    assert layer(x).shape == plain(x).shape == (0, 2, 0)
    assert all(bool(grad.isfinite().all()) for grad in differentiate(layer(x), [x, *layer.parameters()]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"magnitude": "Tanh"}, "invalid magnitude; found 'Tanh'. Pass an object of gonio.nn.magnitude"),
        ({"angular": magnitude.Linear()}, "invalid angular; found Linear"),
        ({"weighted": "squared"}, "invalid weighted; found 'squared'. Pass None or one of linear, tanh_product"),
        (
            {"weighted": "tanh_each", "magnitude": magnitude.Ball()},
            "not defined for the magnitude Ball; found Ball.*Pass weighted=None or 'linear'",
        ),
        ({"gradient": "none"}, "invalid gradient; found 'none'. Pass one of exact, weighted"),
        ({"gradient": "weighted", "weighted": "linear"}, "defined for weighted=None only; found weighted='linear'"),
    ],
)
def test_options_without_a_meaning(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        gnn.DecoupledLinear(3, 2, **options)


def test_the_radius_is_told() -> None:
    layer = gnn.DecoupledLinear(3, 2, magnitude=magnitude.Tanh(radius=2.0, learn_radius=True))
    torch.testing.assert_close(layer.radius, torch.tensor([2.0, 2.0]))
    with torch.no_grad():
        layer.log_radius.copy_(torch.tensor([-1e4, 1e4]))
    assert bool((layer.radius > 0).all() and layer.radius.isfinite().all())
    assert gnn.DecoupledLinear(3, 2, magnitude=magnitude.Sphere()).radius is None
    fixed = gnn.DecoupledLinear(3, 2, magnitude=magnitude.Ball(radius=0.5)).radius
    torch.testing.assert_close(fixed, torch.tensor([0.5, 0.5]))


def test_a_network_is_converted_trains_and_comes_back() -> None:
    model, plain = ResNet18(), ResNet18()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    edited = gonio.swap_(model, gnn.DecoupledConv2d.from_conv, where=nn.Conv2d)
    assert sum(isinstance(layer, gnn.DecoupledConv2d) for layer in model.modules()) == 20
    losses = [train(model, optimizer, batches=1)[0] for _ in range(8)]
    assert losses[-1] < 0.5 * losses[0]
    edited.undo_()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(images()), plain.eval()(images()))  # what was trained is in the plain network
