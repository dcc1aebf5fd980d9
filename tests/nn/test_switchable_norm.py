"""Switchable normalisation: its special cases, its statistics, and its state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from catalog import seeded
from catalog.norms import switchable_norm
from gonio import nn as gnn
from gonio.errors import InvalidArgumentError, NotApplicableError
from gonio.nn import switchable_norm as module
from gonio.nn.switchable_function import switchable_norm as plain
from laws.support import differentiate
from surgery.net import Activated
from tolerances import close, exact

CASES = {
    "1d": (gnn.SwitchableNorm1d, (5, 6)),
    "1d sequence": (gnn.SwitchableNorm1d, (5, 6, 7)),
    "2d": (gnn.SwitchableNorm2d, (4, 6, 5, 3)),
    "2d one sample": (gnn.SwitchableNorm2d, (1, 6, 5, 3)),
    "2d one pixel": (gnn.SwitchableNorm2d, (4, 6, 1, 1)),
    "2d one pixel of one sample": (gnn.SwitchableNorm2d, (1, 6, 1, 1)),
    "2d one channel": (gnn.SwitchableNorm2d, (3, 1, 4, 4)),
    "2d many rows": (gnn.SwitchableNorm2d, (2, 3, 33, 18)),
    "3d": (gnn.SwitchableNorm3d, (2, 6, 2, 3, 4)),
}
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"use_batch": False}, {"affine": False}, {"track_running_stats": False})
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def norm(kind: Any, channels: int, **options: Any) -> nn.Module:
    """A norm without special values in any parameter or buffer."""
    layer = kind(channels, **options)
    with torch.no_grad():
        for index, tensor in enumerate([*layer.parameters(), *layer.buffers()]):
            if tensor.is_floating_point():
                tensor.add_(0.3 * seeded(*tensor.shape, seed=index).abs())
    return layer


def assert_is_defined(layer: nn.Module, x: Tensor) -> None:
    oracle = copy.deepcopy(layer).double()
    x, x64 = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    output, expected = layer(x), switchable_norm(oracle, x64)
    limits = close(x.dtype)
    torch.testing.assert_close(output.double(), expected, **limits)
    found = differentiate(output, [x, *layer.parameters()])
    wanted = differentiate(expected, [x64, *oracle.parameters()])
    for a, b in zip(found, wanted, strict=True):
        scale = max(1.0, float(b.abs().max()))
        torch.testing.assert_close(a.double(), b, rtol=limits["rtol"], atol=limits["atol"] * scale)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("training", [True, False])
@cases
def test_values_and_gradients(case: Any, training: bool, dtype: torch.dtype) -> None:
    kind, shape = case
    for options in OPTIONS:
        assert_is_defined(norm(kind, shape[1], **options).to(dtype).train(training), seeded(*shape, dtype=dtype))


@pytest.mark.parametrize("training", [True, False])
def test_channels_last(training: bool) -> None:
    x = seeded(4, 6, 5, 3).contiguous(memory_format=torch.channels_last)
    layer = norm(gnn.SwitchableNorm2d, 6).train(training)
    assert_is_defined(layer, x)
    y = x.clone(memory_format=torch.preserve_format).requires_grad_()
    output = layer(y)
    (grad,) = differentiate(output, [y])
    assert output.is_contiguous(memory_format=torch.channels_last)
    assert grad.is_contiguous(memory_format=torch.channels_last)


def only(layer: nn.Module, kind: str) -> nn.Module:
    """All weight on one statistic."""
    with torch.no_grad():
        for logits in (layer.mean_logits, layer.var_logits):
            logits.zero_()
            logits[module.KINDS.index(kind)] = 1e3
    return layer


def test_one_weight_at_one_is_a_torch_norm() -> None:
    x = seeded(4, 6, 5, 3, dtype=torch.float64)
    for kind, expected in (
        ("instance", F.instance_norm(x)),
        ("layer", F.layer_norm(x, x.shape[1:])),
        ("batch", F.batch_norm(x, None, None, training=True)),
    ):
        layer = only(gnn.SwitchableNorm2d(6).double(), kind)
        torch.testing.assert_close(layer(x), expected, **exact(torch.float64))
        assert layer.mixture()["var"][kind] == 1.0


@pytest.mark.parametrize("mean", [0.0, 0.3, 0.5, 1e2, 1e4, 1e5])  # 4 spreads are where centring begins
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_mean_far_above_the_spread_costs_no_digits(mean: float, layout: torch.memory_format) -> None:
    """E[x²] − E[x]² has no digits left at 1e5, and a mean rounded to float32 is off by 4 % of the spread."""
    x = (mean + 0.1 * seeded(4, 6, 8, 8)).contiguous(memory_format=layout)
    assert_is_defined(norm(gnn.SwitchableNorm2d, 6), x)
    reduced = norm(gnn.SwitchableNorm2d, 6)
    torch.testing.assert_close(plain(x, *_arguments(reduced))[0], reduced(x), rtol=1e-4, atol=1e-4)


def _arguments(layer: nn.Module) -> tuple[Any, ...]:
    settings = module.Settings(layer.eps, join=False, defined=(True, True, True))
    return (layer.mean_logits, layer.var_logits), (layer.weight, layer.bias), None, settings


@pytest.mark.parametrize("mean", [0.0, 1.0, 1e5])
@pytest.mark.parametrize("size", [(128, 128), (75, 75)], ids=str)
def test_large_maps(size: tuple[int, int], mean: float) -> None:
    """Sums over thousands of positions are taken in pieces, where these can be cut evenly."""
    assert_is_defined(norm(gnn.SwitchableNorm2d, 3), mean + seeded(2, 3, *size))


@pytest.mark.parametrize("mean", [0.0, 1e3])
def test_an_activation_in_place_may_follow(mean: float) -> None:
    layer, x = norm(gnn.SwitchableNorm2d, 6), mean + seeded(4, 6, 5, 3)
    found = differentiate(nn.ReLU(inplace=True)(layer(x)), list(layer.parameters()))
    for a, b in zip(found, differentiate(layer(x).relu(), list(layer.parameters())), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("mean", [0.0, 1e3])
@pytest.mark.parametrize("training", [True, False])
def test_second_derivatives_in_float32(training: bool, mean: float) -> None:
    """Those of float64 are checked by differences; statistics near zero are kept in the dtype of the input."""
    layer, x = norm(gnn.SwitchableNorm2d, 3).train(training), mean + seeded(3, 3, 4, 2)
    seconds = []
    for kind in (torch.float32, torch.float64):
        module, y = copy.deepcopy(layer).to(kind), x.to(kind).requires_grad_()
        (grad,) = torch.autograd.grad(module(y).pow(3).sum(), y, create_graph=True)
        seconds.append(torch.autograd.grad(grad.pow(2).sum(), [y, *module.parameters()], allow_unused=True))
    for a, b in zip(*seconds, strict=True):
        scale = float(b.abs().max())
        torch.testing.assert_close(a.double() / scale, b / scale, rtol=0, atol=100 * close(torch.float32)["atol"])


@pytest.mark.parametrize(("dtype", "mean"), [(torch.bfloat16, 100.0), (torch.float16, 100.0)], ids=str)
def test_halves_are_normalised_in_float32(dtype: torch.dtype, mean: float) -> None:
    """The spread of the output is 1 within 2 %, where the official code gives 34 and 1.7."""
    x = (mean + seeded(8, 4, 16, 16)).to(dtype)
    layer = gnn.SwitchableNorm2d(4)
    for weights in (layer, layer.to(dtype)):
        output = weights(x)
        assert output.dtype is dtype
        expected = switchable_norm(copy.deepcopy(weights).double(), x.double())
        assert float((output.double().std() / expected.std() - 1).abs().detach()) < 0.02
    assert layer.running_mean.dtype is torch.float32


def test_half_precision_does_not_overflow() -> None:
    """Squares of 6e4 are beyond float16; torch's batch norm in float16 is left with NaN in its running variance."""
    x = (seeded(8, 4, 6, 6).sign() * 6e4).half()
    torchs = nn.BatchNorm2d(4).half()
    torchs(x)
    assert not bool(torchs.running_var.isfinite().all())
    layer = gnn.SwitchableNorm2d(4).half()
    y = x.clone().requires_grad_()
    output = layer(y)
    output.float().square().sum().backward()
    for tensor in (output, y.grad, layer.running_mean, layer.running_var, *(p.grad for p in layer.parameters())):
        assert bool(tensor.isfinite().all())
    expected = switchable_norm(copy.deepcopy(layer).double(), x.double())
    torch.testing.assert_close(output.double(), expected, **exact(torch.float16))


def test_running_statistics_follow_torchs_convention() -> None:
    """new = 0.9·old + 0.1·batch, from mean 0 and variance 1; the variance is biased."""
    x = 3 + 2 * seeded(4, 6, 5, 3)
    layer, torchs = gnn.SwitchableNorm2d(6), nn.BatchNorm2d(6)
    layer(x), torchs(x)
    torch.testing.assert_close(layer.running_mean, torchs.running_mean, **exact(torch.float32))
    variance = x.var((0, 2, 3), correction=0)
    torch.testing.assert_close(layer.running_var, 0.9 + 0.1 * variance, **exact(torch.float32))
    assert int(layer.num_batches_tracked) == 1
    layer.reset_running_stats()
    assert torch.equal(layer.running_var, torch.ones(6))


def test_without_momentum_evaluation_equals_training_on_the_one_batch() -> None:
    x = 3 + 2 * seeded(4, 6, 5, 3, dtype=torch.float64)
    layer = norm(gnn.SwitchableNorm2d, 6, momentum=None).double()
    layer.reset_running_stats()
    training = layer(x)
    torch.testing.assert_close(layer.eval()(x), training, **close(torch.float64))


def test_a_fresh_norm_evaluates_with_unit_variance() -> None:
    layer = only(gnn.SwitchableNorm2d(6).eval(), "batch")
    x = seeded(4, 6, 5, 3)
    torch.testing.assert_close(layer(x), x, rtol=1e-4, atol=1e-5)


def test_an_empty_batch_moves_nothing() -> None:
    for layer in (gnn.SwitchableNorm2d(3), gnn.SwitchableNorm2d(3, use_batch=False)):
        x = torch.zeros(0, 3, 4, 4, requires_grad=True)
        output = layer(x)
        output.sum().backward()
        assert output.shape == x.shape == x.grad.shape
        assert all(bool(p.grad.isfinite().all()) for p in layer.parameters())
    assert torch.equal(gnn.SwitchableNorm2d(3).running_mean, torch.zeros(3))


@pytest.mark.parametrize("training", [True, False])
def test_fake_tensors(training: bool) -> None:
    """They have shapes alone, which the kernels of group and batch norm check in another way."""
    with torch._subclasses.FakeTensorMode():
        layer = gnn.SwitchableNorm2d(4).train(training)
        assert layer(torch.empty(2, 4, 5, 5)).shape == (2, 4, 5, 5)


def test_a_single_value_is_refused() -> None:
    layer = gnn.SwitchableNorm2d(1)
    message = r"SwitchableNorm2d: cannot normalise a single value; found shape \(1, 1, 1, 1\) in training. .*drop_last"
    with pytest.raises(InvalidArgumentError, match=message):
        layer(torch.ones(1, 1, 1, 1))
    assert bool(layer.eval()(torch.ones(1, 1, 1, 1)).isfinite().all())


@pytest.mark.parametrize("shape", [(4, 6, 5), (4, 5, 3, 3)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"must have 4 dimensions and 6 channels; found shape \(4"):
        gnn.SwitchableNorm2d(6)(torch.zeros(shape))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_conversion_from_batch_norm(dims: int) -> None:
    kind, torchs = getattr(gnn, f"SwitchableNorm{dims}d"), getattr(nn, f"BatchNorm{dims}d")
    old = torchs(6, eps=1e-3, momentum=0.2).double()
    old(seeded(8, 6, *[3] * dims, dtype=torch.float64))
    state = torch.random.get_rng_state()
    new = kind.from_batch_norm(old.eval())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert new.weight is old.weight
    assert new.bias is old.bias
    assert (new.eps, new.momentum, new.training) == (1e-3, 0.2, False)
    assert torch.equal(new.running_mean, old.running_mean)
    new.train()(seeded(8, 6, *[3] * dims, dtype=torch.float64))
    assert not torch.equal(new.running_mean, old.running_mean)  # its own copy
    x = seeded(4, 6, *[3] * dims, seed=3, dtype=torch.float64)
    fresh = kind.from_batch_norm(old)
    torch.testing.assert_close(only(fresh, "batch")(x), old(x), **exact(torch.float64))


def test_conversion_of_a_synchronised_batch_norm() -> None:
    old = nn.SyncBatchNorm(6, eps=1e-3)
    old.running_var.fill_(2.0)
    new = gnn.SwitchableNorm2d.from_batch_norm(old)
    assert new.weight is old.weight
    assert (new.eps, new.synchronize) == (1e-3, True)
    x = seeded(4, 6, 5, 3)
    torch.testing.assert_close(only(new, "batch").eval()(x), old.eval()(x))


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_norm_stays_frozen_with_its_mixture(frozen: bool) -> None:
    new = gnn.SwitchableNorm2d.from_batch_norm(nn.BatchNorm2d(3).requires_grad_(not frozen))
    assert [p.requires_grad for p in new.parameters()] == [not frozen] * 4
    half = nn.BatchNorm2d(3)
    half.weight.requires_grad_(False)
    assert gnn.SwitchableNorm2d.from_batch_norm(half).mean_logits.requires_grad
    assert gnn.SwitchableNorm2d.from_batch_norm(nn.BatchNorm2d(3, affine=False)).mean_logits.requires_grad


def test_conversion_of_the_odd_batch_norms() -> None:
    bare = gnn.SwitchableNorm2d.from_batch_norm(nn.BatchNorm2d(3, affine=False, track_running_stats=False))
    assert bare.weight is None
    assert bare.running_mean is None
    alone = gnn.SwitchableNorm2d.from_batch_norm(nn.BatchNorm2d(3), use_batch=False)
    assert list(alone.state_dict()) == ["weight", "bias", "mean_logits", "var_logits"]

    with pytest.raises(NotApplicableError, match="this subclass of BatchNorm2d computes something else"):
        gnn.SwitchableNorm2d.from_batch_norm(Activated(3))


@pytest.mark.parametrize("missing", ["weight", "bias"])
def test_a_scale_or_a_shift_alone(missing: str) -> None:
    """torch's batch norm may have one without the other."""
    old = nn.BatchNorm2d(3)
    for parameter in old.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    setattr(old, missing, None)
    x = seeded(4, 3, 5, 5)
    layer = only(gnn.SwitchableNorm2d.from_batch_norm(old), "batch")
    torch.testing.assert_close(layer(x), old(x))
    whole = {"weight": 1.0, "bias": 0.0}[missing]
    found = differentiate(layer(x), list(layer.parameters()))
    layer.register_parameter(missing, nn.Parameter(torch.full((3,), whole), requires_grad=False))
    for a, b in zip(found, differentiate(layer(x), [p for p in layer.parameters() if p.requires_grad]), strict=True):
        torch.testing.assert_close(a, b)
    layer.reset_parameters()
    assert torch.equal(layer.weight, torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_several_forwards_before_one_backward(dtype: torch.dtype) -> None:
    """Of both modes in turn, so that the buffers of one forward have moved when its gradient is taken."""
    layer = norm(gnn.SwitchableNorm2d, 3).to(dtype)
    x, y = seeded(4, 3, 5, 5, dtype=dtype), seeded(4, 3, 5, 5, seed=1, dtype=dtype)
    alone = [torch.zeros_like(p) for p in layer.parameters()]
    outputs = []
    for training, batch in ((False, x), (True, y), (False, x), (True, x)):
        layer.train(training)
        twin = copy.deepcopy(layer)
        outputs.append(layer(batch).pow(3).sum())
        for total, grad in zip(alone, torch.autograd.grad(twin(batch).pow(3).sum(), twin.parameters()), strict=True):
            total += grad
    sum(outputs).backward()
    for parameter, expected in zip(layer.parameters(), alone, strict=True):
        torch.testing.assert_close(parameter.grad, expected)


def test_what_the_mixture_tells() -> None:
    layer = gnn.SwitchableNorm2d(3)
    assert layer.mixture()["mean"] == pytest.approx(dict.fromkeys(module.KINDS, 1 / 3))
    assert list(gnn.SwitchableNorm2d(3, use_batch=False).mixture()["var"]) == ["instance", "layer"]
    assert not layer.is_batch_only()
    assert only(layer, "batch").is_batch_only()
    layer.var_logits.data.zero_()
    assert not layer.is_batch_only()
    assert not gnn.SwitchableNorm2d(3, use_batch=False).is_batch_only()
    assert "use_batch=False" in repr(gnn.SwitchableNorm2d(3, use_batch=False))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_derivatives(options: dict[str, Any], training: bool) -> None:
    layer = norm(gnn.SwitchableNorm2d, 3, **options).double().train(training)
    names = [name for name, _ in layer.named_parameters()]
    point = [p.detach().clone().requires_grad_() for p in layer.parameters()]

    def function(x: Tensor, *values: Tensor) -> Tensor:
        given = dict(zip(names, values, strict=True))
        return torch.func.functional_call(copy.deepcopy(layer), given, (x,))

    x = seeded(3, 3, 3, 2, dtype=torch.float64).requires_grad_()
    assert gradcheck(function, (x, *point), fast_mode=True)
    assert gradgradcheck(function, (x, *point), fast_mode=True)
