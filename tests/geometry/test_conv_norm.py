"""Norms of convolutions against dense matrices: exact, from below, and certified from above."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from catalog import seeded
from geometry.examples import REPEATABLE
from gonio.errors import InvalidArgumentError
from gonio.geometry import (
    Layout,
    conv_norm,
    conv_spectral_norm,
    conv_spectral_norm_bound,
    conv_spectral_norm_certificate,
    conv_spectral_norm_estimate,
    layout_of,
    operator_matrix,
    unview_operator,
)
from gonio.init import delta_orthogonal_
from references import geometry as reference
from tolerances import close, exact

# name: (weight shape, layout, grid of the fine side)
CONVS: dict[str, tuple[tuple[int, ...], Layout, tuple[int, ...]]] = {
    "3x3": ((5, 3, 3, 3), Layout(), (6, 6)),
    "more in than out": ((2, 4, 3, 3), Layout(), (5, 7)),
    "1d": ((3, 2, 5), Layout(), (9,)),
    "3d": ((2, 2, 2, 3, 1), Layout(), (3, 4, 2)),
    "1x1": ((4, 3, 1, 1), Layout(), (3, 3)),
    "strided": ((5, 3, 3, 3), Layout(stride=(2, 2)), (6, 8)),
    "stride beyond the kernel": ((3, 2, 1, 2), Layout(stride=(2, 3)), (4, 6)),
    "dilated": ((3, 2, 3, 3), Layout(dilation=(2, 1)), (7, 5)),
    "dilation that divides the grid": ((3, 2, 3), Layout(dilation=(3,)), (6,)),
    "strided and dilated": ((3, 2, 3, 2), Layout(stride=(2, 1), dilation=(3, 2)), (8, 5)),
    "wider than the grid": ((2, 2, 5, 5), Layout(), (3, 3)),
}
EACH_CONV = pytest.mark.parametrize("name", CONVS)


ON_A_GRID_OF_FOUR = (
    partial(conv_spectral_norm, size=(4, 4)),
    partial(conv_spectral_norm_estimate, size=(4, 4)),
    conv_spectral_norm_bound,
    conv_spectral_norm_certificate,
)
SMALL = conv_norm.SMALL


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels as small as most of these would be handed to the exact search."""
    monkeypatch.setattr(conv_norm, "SMALL", 0)


def case(name: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Layout, tuple[int, ...], float]:
    """Weight, layout, grid, and the norm of the dense periodic operator."""
    shape, layout, size = CONVS[name]
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64).to(dtype)
    ones = (1,) * len(size)
    dense = reference.circular_conv_matrix(
        weight.double().numpy(), size, layout.stride or ones, layout.dilation or ones
    )
    return weight, layout, size, reference.top_singular_value(dense)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    weight, layout, size, top = case("3x3", dtype)
    assert float(conv_spectral_norm(weight, size, layout=layout)) == pytest.approx(top, rel=1e-6)
    assert float(conv_spectral_norm_estimate(weight, size, layout=layout)) == pytest.approx(top, rel=1e-5)
    assert top <= float(conv_spectral_norm_bound(weight, size=size, layout=layout))


@EACH_CONV
def test_norm_estimate_and_bounds_of_the_dense_periodic_operator(name: str) -> None:
    """Exact; from below and near; from above, in the right order."""
    weight, layout, size, top = case(name)
    torch.testing.assert_close(float(conv_spectral_norm(weight, size, layout=layout)), top, **close(torch.float64))
    ratio = float(conv_spectral_norm_estimate(weight, size, layout=layout)) / top
    assert 1 - 1e-5 < ratio < 1 + 1e-10
    on_grid = float(conv_spectral_norm_bound(weight, size=size, layout=layout))
    anywhere = float(conv_spectral_norm_bound(weight, layout=layout))
    assert top <= on_grid <= top * 1.02
    assert on_grid <= anywhere * (1 + 1e-9)
    assert top <= float(conv_spectral_norm_certificate(weight, layout=layout))


def test_small_ones_are_handed_to_the_exact_search(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, layout, size, _ = case("strided", torch.float32)
    exact_norm = conv_spectral_norm(weight, size, layout=layout)
    walked = conv_spectral_norm_estimate(weight, size, layout=layout)
    monkeypatch.setattr(conv_norm, "SMALL", SMALL)
    assert torch.equal(conv_spectral_norm_estimate(weight, size, layout=layout), exact_norm)
    torch.testing.assert_close(walked, exact_norm)


def test_frequencies_taken_in_parts_give_the_same_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(12, 12, 3, 3, generator=torch.Generator().manual_seed(0))
    at_once = conv_spectral_norm_estimate(weight, (20, 20))
    monkeypatch.setattr(conv_norm, "STEP_ENTRIES", 9 * 12 * 40)
    torch.testing.assert_close(conv_spectral_norm_estimate(weight, (20, 20)), at_once, **close(torch.float32))


def test_the_estimate_goes_on_until_the_top_value_has_converged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two values 1e-4 apart at the top of many: 24 steps do not tell them apart."""
    g = torch.Generator().manual_seed(0)
    values = torch.linspace(0, 1, 200, dtype=torch.float64)
    values[-2:] = torch.tensor([1.02, 1.0201])
    left, right = (torch.linalg.qr(torch.randn(200, 200, generator=g, dtype=torch.float64))[0] for _ in range(2))
    weight = (left * values) @ right
    assert float(conv_spectral_norm_estimate(weight[..., None], (1,))) == pytest.approx(1.0201, rel=1e-5)
    monkeypatch.setattr(conv_norm, "MOST", 24)
    assert float(conv_spectral_norm_estimate(weight[..., None], (1,))) < 1.0201 * (1 - 1e-6)


@EACH_CONV
@pytest.mark.parametrize("padding", [0, 1, 2])
def test_zero_padding_is_below_every_certificate(name: str, padding: int) -> None:
    weight, layout, size, _ = case(name)
    padded = Layout(stride=layout.stride, dilation=layout.dilation, padding=(padding,) * len(size))
    try:
        dense = operator_matrix(weight, [2 * n for n in size], padded)
    except RuntimeError:  # torch: the kernel does not fit the padded grid
        return
    top = reference.top_singular_value(dense.numpy())
    assert top <= float(conv_spectral_norm_bound(weight, layout=layout))
    assert top <= float(conv_spectral_norm_certificate(weight, layout=layout))


def test_gram_bound_falls_with_every_iteration_and_stays_above() -> None:
    weight, layout, size, top = case("3x3")
    bounds = [float(conv_spectral_norm_bound(weight, size=size, iterations=i, layout=layout)) for i in range(7)]
    assert bounds == sorted(bounds, reverse=True)
    assert all(b >= top for b in bounds)
    out = min(weight.shape[:2])
    assert bounds[0] <= top * out**0.25 * (1 + 1e-9)  # rank^(2^-(i+2))


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_groups_take_the_maximum(kind: type[nn.Module]) -> None:
    conv = kind(4, 6, 3, groups=2).double()
    weight, layout = conv.weight.detach(), layout_of(conv)
    for function in (
        partial(conv_spectral_norm, size=(6, 6)),
        partial(conv_spectral_norm_estimate, size=(6, 6)),
        partial(conv_spectral_norm_bound, size=(6, 6)),
        conv_spectral_norm_certificate,
    ):
        singles = [float(function(p, layout=Layout(transposed=layout.transposed))) for p in weight.chunk(2)]
        assert float(function(weight, layout=layout)) == pytest.approx(max(singles), rel=1e-9)


def test_transposed_convolution_is_the_adjoint() -> None:
    conv = nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, padding=1, output_padding=1, bias=False).double()
    weight, layout = conv.weight.detach(), layout_of(conv)
    value = conv_spectral_norm(weight, (8, 8), layout=layout)
    adjoint = conv_spectral_norm(weight, (8, 8), layout=Layout(groups=2, stride=(2, 2)))
    torch.testing.assert_close(value, adjoint, **exact(torch.float64))
    top = reference.top_singular_value(operator_matrix(weight, (4, 4), layout).numpy())
    for bound in (conv_spectral_norm_bound, conv_spectral_norm_certificate):
        assert top <= float(bound(weight, layout=layout))


@pytest.mark.parametrize("shape", [(3, 2, 3, 3), (2, 3, 3)])
def test_gradients_are_those_of_the_formula(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    size = (5,) * (len(shape) - 2)
    for function in (
        partial(conv_spectral_norm, size=size),
        partial(conv_spectral_norm_bound, size=size),
        conv_spectral_norm_certificate,
    ):
        assert torch.autograd.gradcheck(function, weight)


def test_zero_kernels() -> None:
    zero = torch.zeros(2, 3, 3, 3, requires_grad=True)
    for function in ON_A_GRID_OF_FOUR:
        assert float(function(zero).detach()) == 0
    (gradient,) = torch.autograd.grad(conv_spectral_norm(zero, (4, 4)), zero)
    assert gradient.isfinite().all()


@pytest.mark.parametrize(("scale", "dtype"), [(1e-30, torch.float32), (1e30, torch.float32), (1e200, torch.float64)])
@pytest.mark.parametrize("power", [1, -1])
def test_scale_plays_no_part(scale: float, dtype: torch.dtype, power: int) -> None:
    """The square of such a kernel is no number of its dtype."""
    weight = torch.randn(2, 3, 3, 3, dtype=dtype)
    for function in ON_A_GRID_OF_FOUR:
        assert float(function(scale**power * weight)) / scale**power == pytest.approx(float(function(weight)), rel=1e-5)


def fourier_norm(weight: Tensor, size: tuple[int, int]) -> float:
    """The textbook way: transform, decompose at every frequency."""
    symbol = torch.fft.fft2(weight.double(), s=size).permute(2, 3, 0, 1)
    return float(torch.linalg.svdvals(symbol)[..., 0].amax())


GAUSSIAN = seeded(24, 16, 3, 3, dtype=torch.float64)
KINDS = {
    "gaussian": GAUSSIAN,
    "low rank": (seeded(24, 2, dtype=torch.float64) @ GAUSSIAN[:2].flatten(1)).reshape(24, 16, 3, 3),
    "sparse": GAUSSIAN * (seeded(24, 16, 3, 3, seed=1) > 1.6),
    "all frequencies alike": delta_orthogonal_(GAUSSIAN.clone()),
    "1x1": GAUSSIAN[..., :1, :1],
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_frequency_is_ruled_out_wrongly(kind: str) -> None:
    expected = fourier_norm(KINDS[kind], (12, 10))
    assert float(conv_spectral_norm(KINDS[kind], (12, 10))) == pytest.approx(expected, rel=1e-12)


def test_float64_decides_between_near_equals() -> None:
    """Two groups that differ by less than float32 tells."""
    weight = torch.randn(4, 3, 3, 3, dtype=torch.float64)
    both = torch.cat([weight, weight * (1 + 1e-10), weight * (1 - 1e-10)])
    value = conv_spectral_norm(both, (9, 9), layout=Layout(groups=3))
    assert float(value) == pytest.approx(fourier_norm(weight * (1 + 1e-10), (9, 9)), rel=1e-12)


@REPEATABLE
@given(
    channels=st.tuples(*[st.integers(1, 4)] * 3),
    steps=st.tuples(*[st.integers(1, 3)] * 2),
    grid=st.integers(1, 4),
    seed=st.integers(0, 10**6),
)
def test_any_one_dimensional_convolution(
    channels: tuple[int, ...], steps: tuple[int, ...], grid: int, seed: int
) -> None:
    weight = seeded(*channels, seed=seed, dtype=torch.float64)
    (stride, dilation), size = steps, (grid * steps[0],)
    layout = Layout(stride=(stride,), dilation=(dilation,))
    dense = reference.circular_conv_matrix(weight.numpy(), size, (stride,), (dilation,))
    top = reference.top_singular_value(dense)
    assert float(conv_spectral_norm(weight, size, layout=layout)) == pytest.approx(top, rel=1e-9)
    assert float(conv_spectral_norm_estimate(weight, size, layout=layout)) == pytest.approx(top, rel=1e-6)
    assert top <= float(conv_spectral_norm_bound(weight, layout=layout))
    assert top <= float(conv_spectral_norm_certificate(weight, layout=layout))


SWEEP = [(64, 8), (64, 16), (64, 32), (128, 8), (128, 16), (128, 32), (256, 8), (256, 16), (512, 8)]


@pytest.mark.slow
@pytest.mark.parametrize(("channels", "n"), SWEEP)
def test_error_of_the_norms_over_seeds_and_shapes(channels: int, n: int) -> None:
    """The promise: 1e-5 for 3×3 kernels of 64 to 512 channels on grids of 8 to 32."""
    for seed in range(max(2, 1280 // channels)):
        weight = torch.randn(channels, channels, 3, 3, generator=torch.Generator().manual_seed(seed))
        truth = fourier_norm(weight, (n, n)) if seed == 0 else float(conv_spectral_norm(weight.double(), (n, n)))
        assert float(conv_spectral_norm(weight, (n, n))) == pytest.approx(truth, rel=1e-6)
        assert float(conv_spectral_norm_estimate(weight, (n, n))) == pytest.approx(truth, rel=1e-5), f"seed {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_estimate_on_many_kinds_of_convolution(seed: int) -> None:
    """Where a coarse walk could choose the wrong frequency."""
    g = torch.Generator().manual_seed(seed)
    for shape, size, layout in [
        ((32, 32, 3, 3), (14, 14), Layout()),
        ((24, 12, 5, 5), (12, 12), Layout(groups=2)),
        ((16, 16, 3, 3), (64, 64), Layout(stride=(2, 2))),
        ((16, 3, 7, 7), (112, 112), Layout(stride=(2, 2))),
        ((64, 1, 3, 3), (28, 28), Layout(groups=64)),
        ((16, 16, 3, 3), (100, 100), Layout()),
        ((64, 64, 3, 3), (56, 56), Layout()),
        ((96, 32, 3, 3), (48, 48), Layout(stride=(2, 2))),
    ]:
        weight = torch.randn(shape, generator=g)
        exact_norm = float(conv_spectral_norm(weight, size, layout=layout))
        ratio = float(conv_spectral_norm_estimate(weight, size, layout=layout)) / exact_norm
        assert 1 - 1e-5 < ratio < 1 + 1e-6


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "Conv1d": (nn.Conv1d(3, 2, 3, padding=1), (6,)),
    "Conv2d": (nn.Conv2d(2, 4, (3, 2), stride=2, padding=1, dilation=(1, 2), groups=2), (6, 5)),
    "Conv2d same": (nn.Conv2d(2, 3, (4, 3), padding="same"), (5, 5)),
    "Conv2d circular": (nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (4, 5)),
    "Conv2d circular same": (nn.Conv2d(2, 3, (2, 3), padding="same", padding_mode="circular"), (4, 5)),
    "Conv3d": (nn.Conv3d(2, 3, 2, padding=(1, 0, 1)), (3, 2, 3)),
    "ConvTranspose1d": (nn.ConvTranspose1d(4, 2, 3, stride=2, padding=1, output_padding=1, groups=2), (4,)),
    "ConvTranspose2d": (nn.ConvTranspose2d(2, 3, 3, dilation=2, padding=1), (3, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_operator_matrix_is_the_layer_and_its_inverse_gives_the_weight(name: str) -> None:
    layer, size = LAYERS[name]
    layer = layer.double()
    weight, layout = layer.weight.detach(), layout_of(layer)
    matrix = operator_matrix(weight, size, layout)
    x = torch.randn(2, layer.in_channels, *size, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using padding='same' with even kernel")  # torch's own
        output = layer(x)
    expected = output - layer.bias.reshape(1, -1, *[1] * len(size))
    torch.testing.assert_close(x.flatten(1) @ matrix.T, expected.flatten(1).detach(), **exact(torch.float64))
    torch.testing.assert_close(unview_operator(matrix, weight.shape, size, layout), weight, **exact(torch.float64))


def test_unviewing_sums_no_half_precision() -> None:
    """Each tap is the mean of many entries, whose sum is beyond float16."""
    weight = torch.tensor([[[6e4, 1.0, -6e4]]], dtype=torch.float16)
    matrix = operator_matrix(weight, (40,))
    back = unview_operator(matrix, weight.shape, (40,))
    assert back.dtype == torch.float16
    assert torch.equal(back, weight)


def test_operator_of_reflected_padding_has_no_inverse_but_a_norm() -> None:
    layer = nn.Conv1d(1, 1, 3, padding=1, padding_mode="replicate", bias=False).double()
    with torch.no_grad():
        layer.weight.fill_(1.0)
    matrix = operator_matrix(layer.weight.detach(), (4,), layout_of(layer))
    assert torch.equal(matrix[0], torch.tensor([2.0, 1, 0, 0], dtype=torch.float64))
    with pytest.raises(InvalidArgumentError, match="every entry of the operator to come from one tap"):
        unview_operator(matrix, (1, 1, 3), (4,), layout_of(layer))
    with pytest.raises(InvalidArgumentError, match="padding_mode='replicate', which repeats pixels"):
        conv_spectral_norm(layer.weight, (4,), layout=layout_of(layer))


WEIGHT, EMPTY = torch.ones(4, 3, 3, 3), torch.zeros(4, 0, 3, 3)
STRIDED = Layout(padding=(0, 0), stride=(2, 2))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (
            lambda: conv_spectral_norm(WEIGHT, (5, 6), layout=STRIDED),
            r"of the stride \(2, 2\); found \(5, 6\)",
        ),
        (lambda: conv_spectral_norm_certificate(torch.randn(4, 3)), r"for a Linear use spectral_norm"),
        (lambda: conv_spectral_norm_bound(WEIGHT, iterations=-1), "iterations >= 0; found -1"),
        (lambda: conv_spectral_norm_bound(EMPTY), r"a weight with entries; found shape \("),
        (lambda: conv_spectral_norm_certificate(EMPTY), r"a weight with entries; found shape \("),
        (lambda: operator_matrix(EMPTY, (4, 4)), r"operator_matrix\(\) needs .* found shape \("),
        (lambda: operator_matrix(WEIGHT, (4,)), r"one grid size per kernel dimension; found shape"),
        (lambda: conv_spectral_norm(WEIGHT / 0, (4, 4)), "finite entries; found NaN or infinity"),
        (lambda: conv_spectral_norm_estimate(WEIGHT / 0, (4, 4)), "finite entries; found NaN or infinity"),
        (
            lambda: unview_operator(torch.zeros(3, 3), WEIGHT.shape, (4, 4), STRIDED),
            r"needs a matrix of \(4, 48\); found \(3, 3\)",
        ),
    ],
)
def test_refusals(call: Callable[[], Tensor], match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        call()
