"""Rounding to integers: against entry by entry arithmetic and torchao, invariances, what is refused."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from catalog import seeded
from foreign import torchvision
from geometry.examples import REPEATABLE, awkward_matrices
from gonio.errors import InvalidArgumentError
from gonio.geometry import fake_quantize, quantization_error
from references import geometry as reference

PER: tuple[Any, ...] = ("tensor", "channel", 32, 128)


def heavy(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Entries of any size, with a few large ones."""
    return (seeded(*shape, dtype=torch.float64) * seeded(*shape, seed=1, dtype=torch.float64).exp()).to(dtype)


@REPEATABLE
@given(weight=awkward_matrices(groups=False), bits=st.sampled_from([2, 3, 4, 8]), which=st.integers(0, 2))
def test_the_error_equals_the_reference(weight: Tensor, bits: int, which: int) -> None:
    per = ("tensor", "channel", weight.shape[1])[which]
    exact = weight.to(torch.float64 if weight.dtype == torch.float64 else torch.float32).double().numpy()
    assume(exact.max(initial=0) > 1e-30)  # steps of numbers below have few digits in float32
    expected = reference.quantization_error(exact, bits, per)
    assert quantization_error(weight, bits=bits, per=per) == pytest.approx(expected, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("bits", [4, 8])
def test_values_equal_the_reference(per: Any, bits: int) -> None:
    weight = heavy(6, 256)
    found = fake_quantize(weight, bits=bits, per=per)
    size = {"tensor": weight.numel(), "channel": 256}.get(per, per)
    parts = weight.reshape(-1, size)
    expected = [reference.quantized(part.tolist(), bits, float(part.abs().max())) for part in parts]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64).view(6, 256), rtol=1e-14, atol=0)
    assert len(set(found.flatten().tolist())) <= 2**bits * (weight.numel() // size)
    error = float((found - weight).norm() / weight.norm())
    assert quantization_error(weight, bits=bits, per=per) == pytest.approx(error, rel=1e-12)


@pytest.mark.parametrize("shift", [-1.0, 0.0, 0.3, 40.0])
@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("bits", [4, 8])
def test_values_from_the_least_entry_to_the_largest_equal_the_reference(per: Any, bits: int, shift: float) -> None:
    weight = heavy(6, 256) + shift
    found = fake_quantize(weight, bits=bits, per=per, mapping="asymmetric")
    size = {"tensor": weight.numel(), "channel": 256}.get(per, per)
    parts = weight.reshape(-1, size).tolist()
    expected = [reference.quantized_from_least_to_largest(part, bits) for part in parts]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64).view(6, 256), rtol=1e-13, atol=1e-13)
    error = float((found - weight).norm() / weight.norm())
    assert quantization_error(weight, bits=bits, per=per, mapping="asymmetric") == pytest.approx(error, rel=1e-12)


def test_an_asymmetric_scale_uses_all_integers_of_entries_of_one_sign() -> None:
    weight = heavy(6, 256).abs()
    errors = [quantization_error(weight, bits=4, mapping=mapping) for mapping in ("symmetric", "asymmetric")]
    assert errors[1] < 0.6 * errors[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtype_shape_and_zeros_stay(dtype: torch.dtype) -> None:
    weight = heavy(2, 3, 8, dtype=dtype)
    weight[0, 1] = 0
    for per in ("tensor", "channel", 4):
        found = fake_quantize(weight, bits=4, per=per)
        assert (found.shape, found.dtype) == (weight.shape, dtype)
        assert bool((found[0, 1] == 0).all())
        assert 0 < quantization_error(weight, bits=4, per=per) < 1
    assert quantization_error(torch.zeros(3, 4)) == 0 == quantization_error(torch.zeros(0, 4))
    assert fake_quantize(torch.zeros(0, 4)).shape == (0, 4)


def test_a_factor_of_what_shares_a_scale_has_no_effect_and_of_less_has_one() -> None:
    weight = heavy(8, 64)
    scaled = weight * torch.tensor([2.0, 16.0], dtype=torch.float64).repeat(4)[:, None]
    relative = (fake_quantize(scaled) - scaled).norm(dim=1) / scaled.norm(dim=1)
    torch.testing.assert_close(relative, (fake_quantize(weight) - weight).norm(dim=1) / weight.norm(dim=1))
    assert quantization_error(scaled, bits=4, per="tensor") != pytest.approx(
        quantization_error(weight, bits=4, per="tensor"), rel=0.01
    )
    finer = [quantization_error(weight, bits=4, per=per) for per in ("tensor", "channel", 16, 4)]
    assert finer == sorted(finer, reverse=True)


def test_the_error_in_blocks_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = heavy(2, 40, 64)
    whole = [quantization_error(weight, bits=4, per=per) for per in ("tensor", "channel", 32)]
    monkeypatch.setattr("gonio.geometry.blocks.BLOCK", 128)
    assert [quantization_error(weight, bits=4, per=per) for per in ("tensor", "channel", 32)] == pytest.approx(whole)
    assert quantization_error(weight[0, 0], bits=4, per="tensor") > 0


@pytest.mark.parametrize(
    ("options", "shape", "message"),
    [
        ({"bits": 1}, (2, 4), r"\(bits=\) is a whole number from 2 to 8; found 1\. Pass 4 or 8"),
        ({"bits": True}, (2, 4), r"\(bits=\) is a whole number from 2 to 8; found True"),
        ({"per": "row"}, (2, 4), r"\(per=\) says what shares a scale; found 'row'"),
        ({"per": 0}, (2, 4), r"\(per=\) says what shares a scale; found 0"),
        ({"per": 3}, (2, 4), "divides the length of a row; found groups of 3 in rows of 4"),
        ({"mapping": "affine"}, (2, 4), r"\(mapping=\) is 'symmetric' or 'asymmetric'; found 'affine'"),
        ({}, (4,), r"takes rows \(…, n, d\); found shape \(4,\)"),
    ],
)
def test_other_arguments_are_refused(options: dict[str, Any], shape: tuple[int, ...], message: str) -> None:
    for function in (fake_quantize, quantization_error):
        with pytest.raises(InvalidArgumentError, match=message):
            function(torch.ones(shape), **options)


@pytest.mark.parametrize("mapping", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("per", PER)
def test_figures_are_those_of_torchao(bits: int, per: Any, mapping: Any) -> None:
    """By its primitives, and by its configurations where these have the format."""
    torchvision()
    pytest.importorskip("torchao", reason="torchao is not installed")
    api, primitives, granularity = (
        importlib.import_module(f"torchao.quantization{name}") for name in ("", ".quant_primitives", ".granularity")
    )
    kind = getattr(primitives.MappingType, mapping.upper())
    weight = heavy(48, 256, dtype=torch.float32) + 0.2
    block = {"tensor": (48, 256), "channel": (1, 256)}.get(per) or (1, per)
    ends = (torch.int8, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    scale, zero = primitives.choose_qparams_affine(weight, kind, block, *ends)
    counts = primitives.quantize_affine(weight, block, scale, zero, *ends)
    assert_equal(weight, primitives.dequantize_affine(counts, block, scale, zero, *ends), bits, per, mapping)
    if per == "tensor" and (bits == 4 or mapping == "asymmetric"):
        return  # no configuration has them
    layer = torch.nn.Linear(256, 48, bias=False)
    layer.weight = torch.nn.Parameter(weight.clone())
    if bits == 8 and mapping == "symmetric":
        kinds = {"tensor": granularity.PerTensor(), "channel": granularity.PerRow()}
        config = api.Int8WeightOnlyConfig(granularity=kinds.get(per) or granularity.PerGroup(per))
    else:
        cut = granularity.PerAxis(0) if per == "channel" else granularity.PerGroup(per)
        dtype = {4: torch.int4, 8: torch.int8}[bits]
        config = api.IntxWeightOnlyConfig(weight_dtype=dtype, granularity=cut, mapping_type=kind)
    api.quantize_(layer, config)
    assert_equal(weight, layer.weight.dequantize(), bits, per, mapping)


def assert_equal(weight: Tensor, theirs: Tensor, bits: int, per: Any, mapping: Any) -> None:
    """Equal errors; and equal values but where an entry lies halfway, which rounding may move to either side."""
    error = float((theirs - weight).double().norm() / weight.double().norm())
    assert quantization_error(weight, bits=bits, per=per, mapping=mapping) == pytest.approx(error, rel=1e-5)
    ours = fake_quantize(weight, bits=bits, per=per, mapping=mapping)
    other = (ours - theirs).abs() > 1e-5 * weight.abs().max()
    torch.testing.assert_close((ours - weight)[other].abs(), (theirs - weight)[other].abs(), rtol=1e-3, atol=1e-6)
    assert int(other.sum()) <= 2 * len(weight) * max(1, weight.shape[1] // (per if isinstance(per, int) else 256))


def test_a_weight_that_is_not_finite_is_refused() -> None:
    for value in (math.nan, math.inf):
        weight = torch.tensor([[1.0, value], [0.5, 0.25]])
        with pytest.raises(InvalidArgumentError, match=r"quantization_error\(\) needs finite entries; found 1 of 4"):
            quantization_error(weight)
        with pytest.raises(InvalidArgumentError, match=r"fake_quantize\(\) needs finite entries; found 1 of 4"):
            fake_quantize(weight)


def test_a_single_number_and_a_vector_are_rounded_as_a_whole() -> None:
    for weight in (torch.tensor(3.0), torch.tensor([3.0, 0.4])):
        lost = fake_quantize(weight, bits=4, per="tensor") - weight
        error = quantization_error(weight, bits=4, per="tensor")
        assert error == pytest.approx(float(lost.norm() / weight.norm()), rel=1e-5)


@pytest.mark.parametrize("size", [1e200, 1e-200])
def test_the_error_of_weights_whose_squares_leave_the_range_of_float64(size: float) -> None:
    weight = heavy(4, 6)
    assert quantization_error(weight * size) == pytest.approx(quantization_error(weight), rel=1e-9)
