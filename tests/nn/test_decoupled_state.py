"""The running mean norm, and what conversions keep."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import gonio
from catalog import seeded
from gonio import nn as gnn
from gonio.errors import NotApplicableError
from gonio.nn import angular, magnitude
from nn.operators import conversions
from surgery.net import Doubled
from tolerances import exact


def mean_norm(x: torch.Tensor) -> float:
    return float(x.norm(dim=-1).mean())


def test_the_first_batch_replaces_the_initial_value() -> None:
    layer = gnn.DecoupledLinear(4, 3, momentum=0.1)
    assert float(layer.mean_norm) == math.sqrt(4)
    first, second = seeded(6, 4, seed=1), 3 * seeded(6, 4, seed=2)
    layer(first)
    assert float(layer.mean_norm) == pytest.approx(mean_norm(first), rel=1e-6)
    layer(second)
    expected = 0.9 * mean_norm(first) + 0.1 * mean_norm(second)
    assert float(layer.mean_norm) == pytest.approx(expected, rel=1e-6)
    assert int(layer.num_batches_tracked) == 2


def test_float64_statistics_move_in_float64() -> None:
    """0.1 in float32 is off by 1.5e-9."""
    layer = gnn.DecoupledLinear(4, 3, momentum=0.1).double()
    first, second = seeded(6, 4, dtype=torch.float64), 30 * seeded(6, 4, seed=2, dtype=torch.float64)
    layer(first), layer(second)
    assert float(layer.mean_norm) == pytest.approx(0.9 * mean_norm(first) + 0.1 * mean_norm(second), rel=1e-14)


def test_without_momentum_all_batches_count_alike() -> None:
    layer = gnn.DecoupledLinear(4, 3, momentum=None)
    batches = [seeded(6, 4, seed=s) * (s + 1) for s in range(4)]
    for x in batches:
        layer(x)
    assert float(layer.mean_norm) == pytest.approx(sum(map(mean_norm, batches)) / 4, rel=1e-5)


def test_evaluation_uses_the_stored_norm_and_leaves_it() -> None:
    layer = gnn.DecoupledLinear(4, 3, bias=False)
    layer(seeded(6, 4))
    layer.eval()
    stored = float(layer.mean_norm)
    x = 7 * seeded(5, 4, seed=3)
    absolute = gnn.DecoupledLinear.from_linear(
        layer.to_linear(), magnitude=magnitude.Tanh(radius=stored, radius_in="absolute")
    )
    torch.testing.assert_close(layer(x), absolute(x), **exact(torch.float32))
    assert float(layer.mean_norm) == stored


def test_each_group_has_its_own_norm() -> None:
    layer = gnn.DecoupledConv2d(4, 6, 1, groups=2)
    layer(torch.cat([torch.ones(1, 2, 3, 3), 5 * torch.ones(1, 2, 3, 3)], 1))
    torch.testing.assert_close(layer.mean_norm, torch.tensor([2**0.5, 5 * 2**0.5]))


@pytest.mark.parametrize("cast", [nn.Module.half, nn.Module.bfloat16])
def test_the_norm_stays_in_float32(cast: Callable[[nn.Module], nn.Module]) -> None:
    """A norm beyond the range of float16 survives, digits and all."""
    layer = gnn.DecoupledLinear(4, 3)
    layer.mean_norm.fill_(123456.789)
    before = layer.mean_norm.clone()
    cast(layer)
    assert layer.weight.dtype in (torch.float16, torch.bfloat16)
    assert torch.equal(layer.mean_norm, before)
    assert layer.double().mean_norm.dtype is torch.float64


def test_meta_tensors_pass() -> None:
    """A forward that computes shapes alone."""
    x = torch.empty(2, 4, 6, 6, device="meta")
    for layer, shape in (
        (gnn.DecoupledConv2d(4, 3, 3, device="meta"), (2, 3, 4, 4)),
        (gnn.DecoupledConvTranspose2d(4, 3, 3, device="meta"), (2, 3, 8, 8)),
        (gnn.DecoupledLinear(6, 3, device="meta"), (2, 4, 6, 3)),
    ):
        assert layer(x).shape == shape


def test_no_statistics_where_none_are_needed() -> None:
    for h in (magnitude.Sphere(), magnitude.Linear(), magnitude.Tanh(radius_in="absolute")):
        layer = gnn.DecoupledLinear(4, 3, magnitude=h)
        assert list(layer.state_dict()) == ["weight", "bias"]


def test_conversion_shares_parameters_and_draws_nothing() -> None:
    for name, plain, convert, x in conversions():
        plain.eval()
        state = torch.random.get_rng_state()
        layer = convert(plain)
        assert torch.equal(torch.random.get_rng_state(), state), name
        assert layer.weight is plain.weight
        assert layer.bias is plain.bias
        assert not layer.training
        assert layer.mean_norm.dtype is torch.float64
        back = layer.to_linear() if isinstance(plain, nn.Linear) else layer.to_conv()
        assert type(back) is type(plain)
        assert back.weight is plain.weight
        assert repr(back) == repr(plain)
        layer(x)


def test_layers_that_are_not_what_they_seem_are_refused() -> None:
    parametrized = torch.nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 4, 3))
    for layer, message in (
        (Doubled(3, 4, 3), "this subclass of Conv2d computes something else"),
        (parametrized, "cannot be applied to 'Conv2d'; its weight is computed by a parametrization"),
        (nn.Conv1d(3, 4, 3), "from_conv: cannot be applied to 'Conv1d'; it takes a Conv2d"),
        (gnn.DecoupledConv2d(3, 4, 3), "this subclass of Conv2d computes something else"),
    ):
        with pytest.raises(NotApplicableError, match=message):
            gnn.DecoupledConv2d.from_conv(layer)
    own = nn.Sequential(nn.Linear(4, 4))
    gonio.parametrize_(own, gonio.parametrizations.WeightNorm())
    with pytest.raises(NotApplicableError, match="cannot be applied to 'Linear'; its weight is computed"):
        gnn.DecoupledLinear.from_linear(own[0])


@pytest.mark.parametrize("weighted", [None, "linear"])
@pytest.mark.parametrize("h", [magnitude.Linear(alpha=0.6), magnitude.Linear(learn_alpha=True)], ids=repr)
def test_folding_a_linear_operator_is_exact(h: magnitude.Magnitude, weighted: str | None) -> None:
    for name, plain, convert, x in conversions():
        if "Transpose" in name and weighted is None:
            continue
        layer = convert(plain, magnitude=h, weighted=weighted)
        if h.learn_alpha:
            layer.alpha.data.copy_(torch.linspace(0.5, 2, len(layer.alpha)))
        folded = layer.to_plain()
        assert type(folded) is type(plain)
        assert folded.weight is not plain.weight
        torch.testing.assert_close(folded(x), layer(x), **exact(torch.float64))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (gnn.DecoupledLinear(3, 2), "DecoupledLinear'; its output is not linear in its input"),
        (gnn.DecoupledLinear(3, 2, magnitude=magnitude.Linear(), angular=angular.Linear()), "not linear"),
        (gnn.DecoupledConvTranspose1d(3, 2, 3, magnitude=magnitude.Linear()), "norm of its filters differs between"),
    ],
)
def test_what_no_torch_layer_computes_is_not_folded(layer: nn.Module, message: str) -> None:
    with pytest.raises(NotApplicableError, match=message):
        layer.to_plain()
