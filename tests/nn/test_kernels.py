"""Kernels of group and batch normalisation as sums over rows and as their scaling."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from catalog import seeded
from gonio.nn.kernels import LONG, Rows, has_rows
from tolerances import close

SHAPES = ((2, 3), (2, 3, 7), (4, 6, 5, 3), (1, 2, 2, 3, 4), (2, 2, 2 * LONG), (1, 2, 75, 75))
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


@dtypes
@shapes
def test_sums(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    grad, x = 2 + seeded(*shape, dtype=dtype), seeded(*shape, seed=1, dtype=dtype) - 1
    found = Rows.of(x).sums(grad, x)
    flat = [t.double().reshape(*shape[:2], -1) for t in (grad, x)]
    expected = torch.stack([flat[0].sum(2), (flat[0] * flat[1]).sum(2)])
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), expected, **close(dtype))


@dtypes
@shapes
def test_scaling(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, line = seeded(*shape, dtype=dtype), seeded(2, *shape[:2], seed=1, dtype=torch.float64)
    shift, scale = (t.reshape(*shape[:2], *(1 for _ in shape[2:])) for t in line)
    found = Rows.of(x).scale(x, line)
    assert found.dtype is dtype
    assert not found._is_view()
    torch.testing.assert_close(found.double(), shift + scale * x.double(), **close(dtype))


def transposed() -> Tensor:
    return seeded(2, 4, 3).transpose(1, 2)


@pytest.mark.parametrize("x", [transposed(), torch.zeros(0, 3, 2), torch.zeros(2, 3, 2, device="meta")], ids=str)
def test_where_the_kernels_do_not_apply(x: Tensor) -> None:
    assert has_rows(seeded(2, 3, 4))
    assert not has_rows(seeded(2, 3, 4), x)
