"""μP by the shapes of two widths: kinds of weights, their variances and learning rates."""

from __future__ import annotations

import pytest
import torch

from gonio.errors import InvalidArgumentError
from gonio.geometry import Layout
from gonio.init import lecun_, mup_
from gonio.init.mup import entry_growth, growth
from init.layers import fresh


@pytest.mark.parametrize(
    ("shape", "base", "layouts", "kind", "rates"),
    [
        ((64, 3), (16, 3), (), "input", (1, 4)),
        ((64, 32), (16, 8), (), "hidden", (1 / 4, 1)),
        ((5, 64), (5, 16), (), "output", (1 / 4, 1 / 4)),
        ((5, 16), (5, 16), (), "input", (1, 1)),
        ((64, 1, 3, 3), (16, 1, 3, 3), (Layout(groups=64), Layout(groups=16)), "input", (1, 4)),
        ((64, 8, 3, 3), (16, 2, 3, 3), (Layout(groups=8),), "hidden", (1 / 4, 1)),
        ((64, 32), (16, 16), (Layout(transposed=True),), "hidden", (1 / 4, 1 / 2)),
        ((64, 1, 2), (16, 1, 2), (Layout(transposed=True, groups=64), Layout(transposed=True, groups=16)), "input",
         (1, 4)),
    ],
)  # fmt: skip
def test_the_kind_and_the_rates_by_two_shapes(
    shape: tuple[int, ...], base: tuple[int, ...], layouts: tuple[Layout, ...], kind: str, rates: tuple[float, float]
) -> None:
    grown = growth(shape, base, *layouts)
    assert grown.kind == kind
    assert (grown.rate("adam"), grown.rate("sgd")) == pytest.approx(rates)


def test_entries_over_which_nothing_is_summed_are_inputs() -> None:
    assert entry_growth((32, 64), (32, 16)).rate("sgd") == 4
    assert entry_growth((5,), (5,)).rate("sgd") == entry_growth((64,), (16,)).rate("adam") == 1
    with pytest.raises(InvalidArgumentError, match=r"found shapes \(8, 8\) and \(4, 4\)"):
        entry_growth((8, 8), (4, 4))


def test_at_the_width_of_the_base_nothing_changes() -> None:
    first, second = (torch.empty(30, 40) for _ in range(2))
    mup_(first, base=(30, 40), generator=fresh())
    lecun_(second, generator=fresh())
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("shape", "base", "variance"),
    [
        ((400, 300), (400, 300), 1 / 300),
        ((800, 100), (200, 100), 1 / 100),
        ((800, 400), (200, 100), 1 / 400),
        ((200, 800), (200, 100), 100 / 800**2),
        ((64, 128, 3, 3), (64, 32, 3, 3), 32 * 9 / (128 * 9) ** 2),
    ],
)
def test_the_variance_of_each_kind(shape: tuple[int, ...], base: tuple[int, ...], variance: float) -> None:
    weight = mup_(torch.empty(shape, dtype=torch.float64), base=base, generator=fresh())
    assert float(weight.var()) == pytest.approx(variance, rel=0.03)


def test_refusals() -> None:
    with pytest.raises(InvalidArgumentError, match=r"at another width; found shapes \(3, 4\) and \(3, 4, 1\)"):
        mup_(torch.empty(3, 4), base=(3, 4, 1))
    with pytest.raises(InvalidArgumentError, match=r"at least 2 dimensions; found shape \(3,\)"):
        mup_(torch.empty(3), base=(3,))
