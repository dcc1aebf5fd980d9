"""Norms, unit vectors and products with vectors: right values, finite values and gradients everywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from catalog import seeded
from geometry.examples import REPEATABLE
from gonio.errors import InvalidArgumentError
from gonio.geometry import filter_norms, normalize, norms, safe_norm
from gonio.geometry.norms import matrix_vector
from tolerances import close, exact

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
EACH_DTYPE = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def corner_rows(dtype: torch.dtype) -> Tensor:
    """Zero, denormal, tiny, plain and large rows."""
    tiny = torch.finfo(dtype).smallest_normal
    sizes = torch.tensor([0.0, tiny / 4, tiny * 4, 1e-17, 2e-17, 1e-12, 4e4], dtype=torch.float64)
    mixed = torch.tensor([[1.0, -2.0, 0.0, 3.0], [6e4, -6e4, 6e4, 6e4]], dtype=torch.float64)
    return torch.cat([sizes[:, None].expand(-1, 4), mixed]).to(dtype)


@EACH_DTYPE
@pytest.mark.parametrize("function", [lambda x: safe_norm(x, -1), lambda x: normalize(x, -1), filter_norms])
def test_finite_value_and_two_finite_derivatives(function, dtype: torch.dtype) -> None:
    x = corner_rows(dtype).requires_grad_()
    value = function(x)
    (first,) = torch.autograd.grad(value.float().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.float().sum(), x)
    assert value.isfinite().all()
    assert first.isfinite().all()
    if dtype in (torch.float32, torch.float64):  # half precision cannot hold 1/|x|² of a tiny row
        assert second.isfinite().all()


@EACH_DTYPE
def test_norms_equal_numpys(dtype: torch.dtype) -> None:
    x = torch.randn(5, 300, dtype=torch.float64).to(dtype)
    expected = torch.from_numpy(np.linalg.norm(x.double().numpy(), axis=-1))
    assert filter_norms(x).dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(filter_norms(x).double(), expected, **close(filter_norms(x).dtype))


def test_where_a_norm_overflows_the_direction_is_zero() -> None:
    """As documented, and as with torch's own."""
    half = torch.full((1, 1_000_000), 300.0, dtype=torch.float16)  # the norm exceeds float16, but not float32
    torch.testing.assert_close(filter_norms(half), torch.tensor([3e5]), **exact(torch.float32))
    x = torch.full((4,), 1e20)
    assert safe_norm(x, 0) == float("inf")
    assert torch.equal(normalize(x), torch.zeros(4))
    assert torch.equal(torch.nn.functional.normalize(x, dim=0), torch.zeros(4))
    assert normalize(x.double()).norm() == 1


def test_normalize_keeps_dtype_and_zero() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.bfloat16, requires_grad=True)
    unit = normalize(x)
    assert unit.dtype == torch.bfloat16
    assert torch.equal(unit[1], x[1])
    torch.testing.assert_close(unit[0].float(), torch.tensor([0.6, 0.8]), **exact(torch.bfloat16))
    for value in (unit, safe_norm(x, -1)):
        (gradient,) = torch.autograd.grad(value.sum(), x)
        assert torch.equal(gradient[1], torch.zeros_like(x[1]))


def test_gradients_are_those_of_the_formula() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    functions = [lambda v: safe_norm(v, (0, 1), keepdim=True), lambda v: safe_norm(v, -1), lambda v: normalize(v, 0)]
    assert functions[0](x).shape == (1, 1)
    for function in (*functions, normalize):
        assert torch.autograd.gradcheck(function, x)
        assert torch.autograd.gradgradcheck(function, x)


@REPEATABLE
@given(st.lists(st.lists(st.floats(-(2.0**50), 2.0**50, width=32), min_size=3, max_size=3), min_size=1, max_size=4))
def test_unit_vectors_are_unit_or_zero(rows: list[list[float]]) -> None:
    x = torch.tensor(rows, dtype=torch.float32, requires_grad=True)
    unit = normalize(x)
    (gradient,) = torch.autograd.grad(unit.sum(), x)
    sizes = unit.detach().double().square().sum(-1).sqrt()
    assert gradient.isfinite().all()
    assert (((sizes - 1).abs() < 1e-6) | (sizes == 0)).all()


def test_refusals() -> None:
    with pytest.raises(InvalidArgumentError, match=r"filter_norms\(\) takes a matrix.*matrix_view"):
        filter_norms(torch.zeros(2, 3, 4, 5, 6, 7))
    with pytest.raises(InvalidArgumentError, match=r"floating-point tensors; found dtype torch\.int64"):
        safe_norm(torch.ones(3, dtype=torch.int64), 0)


@pytest.mark.parametrize("shape", [(512, 640), (513, 640), (1021, 300), (2, 200_000)], ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_every_layout_gives_the_product(shape: tuple[int, int], threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that divide by the threads or do not, transposes, and rows that lie apart in memory."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    whole = seeded(shape[0], shape[1] + 3)
    for matrix in (whole[:, : shape[1]], whole[:, : shape[1]].contiguous(), whole[:, 3:].T):
        vector = seeded(matrix.shape[1])
        expected = matrix.double() @ vector.double()
        found = matrix_vector(matrix, vector)
        assert found.shape == expected.shape
        assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_only_large_matrices_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    bmm, calls = torch.bmm, []
    monkeypatch.setattr(torch, "bmm", lambda *a: calls.append(1) or bmm(*a))
    side = int(norms.SHARED_FROM**0.5)
    for columns, shared in ((side - 1, False), (side, True)):
        matrix_vector(seeded(side, columns), seeded(columns))
        assert bool(calls) == shared
