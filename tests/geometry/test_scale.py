"""Wasted L2: against direct minimisation over all ways to move scale."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from catalog import seeded
from geometry.examples import REPEATABLE
from gonio.errors import InvalidArgumentError
from gonio.geometry import least_scale, scale_imbalance
from references import geometry as reference
from tolerances import close


def weights(seed: int, layers: int) -> list[Tensor]:
    return [seeded(3 + k, 4, seed=seed, dtype=torch.float64) * 3.0 ** (k - 1) for k in range(layers)]


@REPEATABLE
@given(seed=st.integers(0, 10**6), layers=st.integers(1, 5))
def test_least_scale_is_the_minimum_over_all_shifts(seed: int, layers: int) -> None:
    chain = weights(seed, layers)
    squares = [float((w**2).sum()) for w in chain]
    least = reference.least_scale(squares)
    torch.testing.assert_close(float(least_scale(chain)), least, **close(torch.float64))
    torch.testing.assert_close(float(scale_imbalance(chain)), sum(squares) - least, rtol=1e-9, atol=1e-9 * sum(squares))


def test_balanced_layers_waste_nothing_and_shifts_show_up() -> None:
    chain = [w / w.norm() * 2 for w in weights(0, 4)]
    assert float(scale_imbalance(chain)) == pytest.approx(0, abs=1e-12)
    shifted = [chain[0] * 3, chain[1] / 3, *chain[2:]]
    assert float(least_scale(shifted)) == pytest.approx(float(least_scale(chain)))
    assert float(scale_imbalance(shifted)) == pytest.approx(4 * (9 + 1 / 9 - 2))


def test_gradients() -> None:
    a, b = torch.randn(2, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64) * 5
    assert torch.autograd.gradcheck(lambda x, y: scale_imbalance([x, y]), (a.requires_grad_(), b.requires_grad_()))


def test_a_zero_layer_makes_everything_waste_and_stays_finite() -> None:
    zero, one = torch.zeros(3, requires_grad=True), torch.ones(3, requires_grad=True)
    waste = scale_imbalance([zero, one])
    waste.backward()
    assert float(waste.detach()) == 3
    assert zero.grad.isfinite().all()
    assert one.grad.isfinite().all()


def test_neither_size_nor_cancellation_spoils_the_difference() -> None:
    """Squares of 1e25 and 1e-25 are no float32, and 1e-4 is lost beside 1e8 in it."""
    far = [torch.full((3,), 1e25), torch.full((3,), 1e-25)]
    assert float(least_scale(far)) == pytest.approx(6)
    near = [torch.full((100_000,), 30.0), torch.full((100_000,), 30.0 + 2e-5)]
    apart = 100_000**0.5 * float(near[1][0].double() - near[0][0].double())
    assert scale_imbalance([torch.full((10**5,), 300.0).half(), torch.ones(1).half()]).isfinite()
    assert float(scale_imbalance(near)) == pytest.approx(apart**2, rel=1e-6)
    assert scale_imbalance(near).dtype == torch.float32


def test_no_weight_is_refused() -> None:
    for function in (least_scale, scale_imbalance):
        with pytest.raises(InvalidArgumentError, match=rf"{function.__name__}\(\) needs .* one weight; found none"):
            function([])


@pytest.mark.parametrize("size", [1e200, 1e30, 1e-30, 1e-200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_norms_of_any_size_waste_nothing(size: float, dtype: torch.dtype) -> None:
    """Squares of 1e200 are no float64, and the rounding of those of 1e30 is no float32."""
    size = size if dtype == torch.float64 else size**0.15
    unit = seeded(4, 3, dtype=torch.float64)
    layer = (unit * size).to(dtype)
    assert float(scale_imbalance([layer])) == 0
    assert float(scale_imbalance([layer, layer.mT, layer.flatten()])) == 0
    assert float(least_scale([layer, (unit / size).to(dtype)])) == pytest.approx(2 * float(unit.square().sum()))


def test_the_waste_of_nearly_equal_norms_keeps_its_digits_and_its_curvature() -> None:
    pair = [torch.ones(1, dtype=torch.float64), torch.full((1,), 1 + 1e-7, dtype=torch.float64)]
    assert float(scale_imbalance(pair)) == pytest.approx((pair[1].item() - 1) ** 2, rel=1e-6)
    balanced = torch.tensor([2.0, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    other = torch.tensor([3.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x, y: scale_imbalance([x, y]), (balanced, other))
