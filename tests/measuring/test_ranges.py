"""Weights of 8-bit floats, and of very small and very large ones, have the figures of the same values in the middle."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from catalog import seeded
from gonio.geometry.blocks import frobenius_norm, have_direction, row_norms
from gonio.measuring import TensorMeasurement, difference, measure
from tolerances import close

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


def measured(weight: Tensor, extra: tuple[str, ...] = ()) -> TensorMeasurement:
    return measure({"a.weight": weight}, extra_figures=extra)["a"]  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
@pytest.mark.parametrize("shape", [(40, 60), (1100, 1050), (1100, 300), (32, 48, 3, 3)], ids=str)
def test_a_weight_in_8_bits_has_the_figures_of_its_values(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    weight = seeded(*shape, dtype=torch.float32)
    weight[3] = 2 * weight[1]  # so that duplicates are looked for
    stored = weight.to(dtype)
    extra = ("operator_norm", "quantisation")
    found, exact = measured(stored, extra), measured(stored.float(), extra)
    assert (found.status, found.proportional) == ("measured", exact.proportional)
    for name in ("frobenius", "sigma_max", "stable_rank", "alignment", "operator_norm", "int8_channel_error"):
        assert getattr(found, name) == pytest.approx(getattr(exact, name), rel=close(torch.float32)["rtol"]), name


def test_running_variances_in_8_bits_are_looked_at() -> None:
    variances = torch.tensor([1.0, -2.0, 0.5]).to(torch.float8_e4m3fn)
    assert [f.code for f in measure({"n.running_var": variances}).findings] == ["G105"]


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_two_weights_in_8_bits_are_compared(dtype: torch.dtype) -> None:
    before = seeded(1100, 1050, dtype=torch.float32).to(dtype)
    after = (1.5 * before.float()).to(dtype)
    found = difference({"a.weight": before}, {"a.weight": after})["a"]
    exact = difference({"a.weight": before.float()}, {"a.weight": after.float()})["a"]
    assert found.status == "compared"
    for name in ("relative", "stable_rank", "gram_change"):
        assert getattr(found, name) == pytest.approx(getattr(exact, name), rel=close(torch.float32)["rtol"]), name


def test_small_numbers_are_not_called_zeros() -> None:
    """A filter below the norm that has a direction is weak, and exact zeros alone are zero filters."""
    weight = seeded(20, 30, dtype=torch.float32)
    weight[3] *= 1e-16
    found = measure({"a.weight": weight})
    assert [f.code for f in found.findings] == ["G103"]
    assert (found["a"].zero_filters, found["a"].pairs) == (0, 19 * 18 // 2)
    assert found["a"].norm_nonzero_min == pytest.approx(float(weight[3].double().norm()))
    weight[3] = 0
    assert [f.code for f in measure({"a.weight": weight}).findings] == ["G102"]


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1e-15), (torch.float64, 1e-170)], ids=str)
def test_a_weight_of_small_numbers_is_not_one_of_zeros(dtype: torch.dtype, scale: float) -> None:
    weight = seeded(20, 30, dtype=dtype)
    found = measure({"a.weight": weight * scale})
    assert not found.findings
    assert found["a"].frobenius == pytest.approx(float(weight.norm()) * scale)
    assert [f.code for f in measure({"a.weight": weight * 0}).findings] == ["G101"]


@pytest.mark.parametrize("scale", [1e-200, 1e-12, 1.0, 1e200])
def test_norms_at_every_scale_of_float64(scale: float) -> None:
    rows = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    assert (row_norms(rows * scale) / scale).tolist() == pytest.approx([5.0, 0.0, 1.0])
    assert frobenius_norm(rows * scale) / scale == pytest.approx(math.sqrt(26))
    assert frobenius_norm(rows * 0) == 0
    assert have_direction(row_norms(rows * scale), rows.dtype).tolist() == [scale > 1e-100, False, scale > 1e-100]
    assert math.isnan(frobenius_norm(rows * math.nan))
    assert frobenius_norm(rows.clamp(min=math.inf)) == math.inf


@pytest.mark.parametrize("scale", [1e100, 1e300])
def test_duplicates_among_large_numbers_are_found(scale: float) -> None:
    weight = seeded(3000, 64, dtype=torch.float64) * 0.1
    weight[2999] = 2 * weight[5]
    found = measured(weight * scale)
    assert (found.near_duplicates, found.proportional) == (1, ((2999, 5),))
    assert found.coherence == pytest.approx(1.0)


@pytest.mark.parametrize("scale", [1e-170, 1e300])
def test_a_change_at_every_scale_of_float64(scale: float) -> None:
    before = seeded(40, 30, dtype=torch.float64)
    for after in (2 * before, before + 0.1 * seeded(40, 30, seed=1, dtype=torch.float64)):
        exact = difference({"a.weight": before}, {"a.weight": after})["a"]
        found = difference({"a.weight": before * scale}, {"a.weight": after * scale})["a"]
        assert (found.form, found.rank_99) == (exact.form, exact.rank_99)
        for name in ("relative", "norm_ratio", "angle_mean", "stable_rank", "gram_change"):
            assert getattr(found, name) == pytest.approx(getattr(exact, name), rel=1e-9, abs=1e-9), name
        assert found.change_norm == pytest.approx(exact.change_norm * scale)


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1e25), (torch.float32, 1e35), (torch.float64, 1e200)])
def test_a_change_far_larger_than_its_base(dtype: torch.dtype, factor: float) -> None:
    """As of an adapter whose factor is wrong: products with the square of the factor are not numbers of the dtype."""
    before, moved = seeded(40, 30, dtype=dtype), seeded(40, 30, seed=1, dtype=dtype)
    found = difference({"a.weight": before}, {"a.weight": before + factor * moved})["a"]
    old, new = before.double(), moved.double()
    relative = factor * float(new.norm() / old.norm())
    assert found.relative == pytest.approx(relative, rel=close(dtype)["rtol"])
    products = factor * factor * float((new @ new.T).norm() / (old @ old.T).norm())
    assert found.gram_change == pytest.approx(products, rel=close(dtype)["rtol"])  # infinite for 1e200
