"""Orthogonal initialisation: exact spectra per group, uniform law, isometric convolutions, all dtypes."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import pytest
import torch
from torch import Tensor, nn

from gonio.errors import InvalidArgumentError
from gonio.geometry import Layout, layout_of, matrix_view, operator_matrix, singular_values
from gonio.init import delta_orthogonal_, orthogonal_
from gonio.init.orthogonal import BLOCK, haar_columns
from init.layers import LAYERS, fresh, signal
from tolerances import exact

PLAIN = Layout()
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def gram_error(weight: Tensor, layout: Layout = PLAIN) -> float:
    matrices = matrix_view(weight, layout).double()
    gram = matrices @ matrices.mT if matrices.shape[1] <= matrices.shape[2] else matrices.mT @ matrices
    return float((gram - torch.eye(gram.shape[-1], dtype=torch.float64)).abs().max())


@pytest.mark.parametrize("name", LAYERS)
def test_every_matrix_of_every_layer_has_equal_singular_values(name: str) -> None:
    layer = LAYERS[name]
    orthogonal_(layer.weight, gain=2.0, layout=layout_of(layer), generator=fresh())
    values = singular_values(matrix_view(layer.weight.detach(), layout_of(layer)))
    torch.testing.assert_close(values, torch.full_like(values, 2.0))


@pytest.mark.parametrize("name", LAYERS)
def test_norm_and_rms_are_preserved_by_real_layers(name: str) -> None:
    layer = LAYERS[name]
    layout = layout_of(layer)
    orthogonal_(layer.weight, preserve="norm", layout=layout, generator=fresh())
    assert signal(layer)[0] == pytest.approx(1, abs=0.04)
    orthogonal_(layer.weight, preserve="rms", layout=layout, generator=fresh())
    assert signal(layer)[1] == pytest.approx(1, abs=0.04)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(40, 40), (30, 70), (70, 30), (16, 3, 3, 3), (1, 5), (5, 1), (1, 1)])
def test_error_is_ten_ulps_of_the_dtype(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = orthogonal_(torch.empty(shape, dtype=dtype), generator=fresh())
    smaller = min(shape[0], torch.Size(shape[1:]).numel())
    assert gram_error(weight) <= 10 * max(smaller, 4) * torch.finfo(dtype).eps


def test_large_matrices_keep_their_accuracy_in_float32() -> None:
    assert gram_error(orthogonal_(torch.empty(1024, 1024), generator=fresh())) < 1e-6


@pytest.mark.parametrize("view", ["filters", "taps", "last_two"])
def test_the_view_says_what_is_orthogonal(view: str) -> None:
    weight = orthogonal_(torch.empty(6, 6, 3, 3), view=view, generator=fresh())
    values = singular_values(matrix_view(weight, view=view))
    torch.testing.assert_close(values, torch.ones_like(values))
    # orthogonal taps sum up to orthogonal filters (of norm 3); single kernels say nothing about either
    other = {"filters": "taps", "taps": "last_two", "last_two": "filters"}[view]
    assert float(singular_values(matrix_view(weight, view=other)).std()) > 0.1


@pytest.mark.parametrize("n", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 7])
@pytest.mark.parametrize("extra", [0, 1, 40])
def test_blocks_of_reflectors_fit_together(n: int, extra: int) -> None:
    pair, single = (haar_columns(count, n + extra, n, fresh(), torch.float64) for count in (2, 1))
    for q in (pair, single):
        assert float((q.mT @ q - torch.eye(n, dtype=torch.float64)).abs().max()) < 1e-13
    assert not torch.equal(pair[0], pair[1])
    by_columns = haar_columns(2, n + extra, n, fresh(), torch.float64, by_rows=False)
    assert by_columns.mT.is_contiguous()
    torch.testing.assert_close(by_columns, pair, **exact(torch.float64))


def test_the_law_is_haars() -> None:
    """Moments of uniform orthogonal matrices: E Q₁₁² = 1/n, E Q₁₁⁴ = 3/(n(n+2)), E tr² = 1, E det = 0."""
    n, count = 6, 20_000
    q = haar_columns(count, n, n, fresh(), torch.float64)
    entries = q.flatten(1)
    assert float(entries.mean(0).abs().max()) < 5 / sqrt(count * n)
    torch.testing.assert_close(entries.square().mean(0), torch.full((n * n,), 1 / n).double(), rtol=0, atol=0.01)
    fourth = entries.pow(4).mean(0)
    torch.testing.assert_close(fourth, torch.full((n * n,), 3 / (n * (n + 2))).double(), rtol=0, atol=0.006)
    trace = q.diagonal(dim1=1, dim2=2).sum(1)
    assert abs(float(trace.square().mean()) - 1) < 5 * sqrt(2 / count)
    assert abs(float(torch.linalg.det(q).mean())) < 5 / sqrt(count)
    # E Q₁₁² Q₂₂² = (n+1)/(n(n−1)(n+2)): a joint moment that rows drawn one by one would miss
    joint = (q[:, 0, 0].square() * q[:, 1, 1].square()).mean()
    assert float(joint) == pytest.approx((n + 1) / (n * (n - 1) * (n + 2)), rel=0.06)


@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (nn.Conv2d(3, 5, 3, padding=1), (5, 4)),
        (nn.Conv1d(4, 4, 5, padding=2, groups=2), (7,)),
        (nn.Conv3d(2, 3, (1, 3, 1), padding=(0, 1, 0)), (2, 3, 2)),
        (nn.ConvTranspose2d(2, 4, 3, padding=1), (4, 4)),
        (nn.Conv2d(2, 2, 1), (3, 3)),
    ],
    ids=str,
)
def test_delta_orthogonal_makes_the_operator_an_isometry(layer: nn.Module, size: tuple[int, ...]) -> None:
    layer = layer.double()
    delta_orthogonal_(layer.weight, gain=3.0, layout=layout_of(layer), generator=fresh())
    operator = operator_matrix(layer.weight.detach(), size, layout_of(layer))
    identity = 9 * torch.eye(operator.shape[1], dtype=torch.float64)
    torch.testing.assert_close(operator.T @ operator, identity, rtol=0, atol=1e-12)


def test_orthogonal_filters_alone_are_no_isometry() -> None:
    """Negative control: what delta-orthogonal adds."""
    weight = orthogonal_(torch.empty(5, 3, 3, 3), generator=fresh())
    operator = operator_matrix(weight, (5, 5), Layout(padding=(1, 1)))
    assert float(singular_values(operator).std()) > 0.1


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: orthogonal_(torch.empty(3, 3, device="meta")), r"on the meta device.*to_empty"),
        (lambda: delta_orthogonal_(torch.empty(3, 0, 3)), "which has no entries"),
        (lambda: orthogonal_(torch.empty(3, 3), preserve="both"), "preserve=None, 'norm' or 'rms'; found 'both'"),
        (lambda: orthogonal_(torch.empty(3)), r"at least 2 dimensions; found shape \(3,\)"),
        (lambda: delta_orthogonal_(torch.empty(3, 3)), r"convolution's weight; found shape \(3, 3\). Use orthogonal_"),
        (lambda: delta_orthogonal_(torch.empty(2, 3, 3)), "found 2 outputs for 3 inputs per group"),
    ],
)
def test_refusals(call: Callable[[], Tensor], match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        call()
