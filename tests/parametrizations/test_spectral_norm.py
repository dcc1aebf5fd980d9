"""Spectral norm: which norm, how its vectors are found, and what is reported."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

from catalog import seeded
from gonio import geometry
from gonio import parametrizations as P
from gonio.errors import InvalidArgumentError
from gonio.geometry.views import Layout
from gonio.measuring import measure
from gonio.parametrizations import kernels, spectral_norm, spectral_views
from gonio.parametrizations.parametrization import describe
from parametrizations.layers import LAYERS, make, sample

CONVS = [name for name in LAYERS if "conv" in name]


def attached(layer: nn.Module, **options: object) -> nn.Module:
    P.attach(layer, "weight", P.SpectralNorm(**options))
    return layer


def dense_norm(layer: nn.Module, size: int, mode: str = "zeros") -> float:
    """Of the layer as torch computes it on a small grid, column by column."""
    plain = copy.deepcopy(layer)
    P.detach(plain, "weight", keep="weight")
    plain.bias = None
    plain.padding_mode = mode
    shape = (plain.in_channels, *[size] * len(plain.kernel_size))
    with torch.no_grad():
        basis = torch.eye(torch.Size(shape).numel(), dtype=torch.float64).view(-1, *shape)
        return float(torch.linalg.matrix_norm(plain.double()(basis).flatten(1), 2))


@pytest.mark.parametrize("norm", [1.0, 0.3])
@pytest.mark.parametrize("name", LAYERS)
def test_filters_have_the_norm(name: str, norm: float) -> None:
    layer = attached(make(name), norm=norm)
    matrices = geometry.matrix_view(layer.weight.detach(), geometry.layout_of(layer))
    top = torch.linalg.matrix_norm(matrices, 2).max()
    torch.testing.assert_close(top, torch.tensor(norm))
    # torch divides by the norm of all groups together, which leaves each of them below 1
    assert P.parametrization_of(layer).holds(layer.weight)


@pytest.mark.parametrize("name", CONVS)
def test_convolutions_are_bounded_on_every_grid(name: str) -> None:
    layer = attached(make(name), view="conv")
    norms = [dense_norm(layer, size) for size in (5, 8)]
    assert max(norms) <= 1 + 1e-5
    stride = layer.stride[0]
    layout = geometry.layout_of(layer)
    margin = P.parametrization_of(layer).view_impl.margin
    for size in (8, 11, 32, 37) if layer.weight.dim() < 5 else (8, 9):
        circular = geometry.conv_spectral_norm(
            layer.weight.detach(), [size * stride] * (layer.weight.dim() - 2), layout=layout
        )
        assert circular <= 1 + 1e-5
    assert circular >= 0.99 / margin


def test_padded_layers_too() -> None:
    layer = nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular").double()
    attached(layer, view="conv")
    assert 0.95 < dense_norm(layer, 16, "circular") <= 1 + 1e-9
    with pytest.raises(InvalidArgumentError, match=r"padding_mode='reflect', which repeats pixels"):
        attached(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), view="conv")


def test_the_filter_view_does_not_bound_a_convolution() -> None:
    """The negative control: a box filter has gain 9 and a flattened norm of 3."""
    layer = nn.Conv2d(1, 1, 3, bias=False).double()
    with torch.no_grad():
        layer.weight.fill_(1.0)
    assert dense_norm(attached(copy.deepcopy(layer)), 8) > 2.5
    assert dense_norm(attached(copy.deepcopy(layer), view="conv"), 8) <= 1


@pytest.mark.parametrize("dilation", [(1, 1), (2, 1), (2, 3)])
@pytest.mark.parametrize("stride", [(1, 1), (2, 2), (3, 1), (2, 3)])
@pytest.mark.parametrize("kernel", [(3, 3), (1, 2), (4, 5)])
def test_stride_and_dilation(kernel: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int]) -> None:
    layer = nn.Conv2d(2, 3, kernel, stride=stride, dilation=dilation, bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(seeded(3, 2, *kernel, dtype=torch.float64))
    attached(layer, view="conv")
    layout = geometry.layout_of(layer)
    norms = [
        float(geometry.conv_spectral_norm(layer.weight.detach(), [n * s for s in stride], layout=layout))
        for n in (8, 15, 24)
    ]
    assert 0.93 < max(norms) <= 1 + 1e-9


@pytest.mark.parametrize("view", ["filters", "conv"])
@pytest.mark.parametrize("name", ["conv2d", "grouped transposed conv2d"])
def test_large_weights_start_by_iteration(view: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = attached(make(name), view=view)
    monkeypatch.setattr(spectral_views, "EXACT", 0)
    iterated = attached(make(name), view=view)
    torch.testing.assert_close(iterated.weight, exact.weight, rtol=5e-3, atol=1e-4)
    P.tick_(iterated, iterations=200)
    torch.testing.assert_close(iterated.weight, exact.weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(6, 40), (40, 6), (80, 90), (90, 70)])
def test_the_top_vectors_are_found_after_any_change(shape: tuple[int, int]) -> None:
    """At once up to a smaller side of 64, else within a few steps, also where another value becomes the largest."""
    weight = seeded(*shape, dtype=torch.float64)
    layer = nn.Linear(*reversed(shape), bias=False).double()
    attached(layer)
    raw, norm = layer._parameters["weight"], P.parametrization_of(layer)
    with torch.no_grad():
        raw.copy_(weight)
        raw.add_(100 * torch.outer(weight[:, 1], weight[2]))  # far above all others, in another direction
    P.tick_(layer, iterations=1 if min(shape) <= spectral_views.WHOLE else 4)
    left, values, right = torch.linalg.svd(raw.detach())
    torch.testing.assert_close(norm.sigma(raw), values[0], rtol=1e-6, atol=0)
    for found, expected in ((norm.u, left[:, 0]), (norm.v, right[0])):
        torch.testing.assert_close((found.view(-1) @ expected).abs(), torch.ones_like(values[0]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("view", ["filters", "conv"])
@pytest.mark.parametrize("belong", [True, False])
def test_vectors_that_are_written_in_place_advance_only_if_they_are_old(view: str, belong: bool) -> None:
    """As `torch.distributed.checkpoint` loads: weight and vectors in place, and then each weight is read."""
    saved, model = (attached(nn.Conv2d(3, 5, 3), view=view).train() for _ in range(2))
    with torch.no_grad():
        saved._parameters["weight"].add_(0.3 * seeded(5, 3, 3, 3, seed=8))
    if belong:
        _ = saved.weight  # advances its vectors
    state = {name: value.clone() for name, value in saved.weight_parametrization._stored().items()}
    with torch.no_grad():
        model._parameters["weight"].copy_(saved._parameters["weight"])
        for name, value in model.weight_parametrization._stored().items():
            value.copy_(state[name])
    _ = model.weight
    same = all(torch.equal(value, state[name]) for name, value in model.weight_parametrization._stored().items())
    assert same == belong


@pytest.mark.parametrize("size", [0.0, 1e-25, 1e-11, 1.0, 1e13, 1e18])
@pytest.mark.parametrize("name", ["linear", "transposed conv2d", "grouped conv2d"])
def test_weights_of_any_size(name: str, size: float) -> None:
    """The vectors of a zero weight stay; all others have length 1."""
    layer = attached(make(name))
    norm, raw = layer.weight_parametrization, layer._parameters["weight"]
    before = norm.u.clone(), norm.v.clone()
    with torch.no_grad():
        raw.copy_(size * seeded(*raw.shape, seed=4))
    P.tick_(layer)
    assert all(torch.equal(a, b) for a, b in zip(before, (norm.u, norm.v), strict=True)) == (
        size < geometry.norms.least_norm(raw.dtype)
    )
    for vectors in (norm.u, norm.v):
        torch.testing.assert_close(torch.linalg.vector_norm(vectors, dim=(1, 2)), torch.ones(len(vectors)))


@pytest.mark.parametrize("view", ["filters", "conv"])
@pytest.mark.parametrize("name", ["linear", "grouped conv2d"])
def test_buffers_can_be_saved(view: str, name: str, tmp_path: Path) -> None:
    """safetensors refuses tensors that are not contiguous or are a part of another."""
    save_model = pytest.importorskip("safetensors.torch", reason="safetensors is not installed").save_model
    layer = attached(make(name), view=view)
    for buffer in layer.buffers():
        assert buffer.is_contiguous()
        assert buffer.untyped_storage().nbytes() == buffer.nbytes
    save_model(layer, str(tmp_path / "model.safetensors"))


def test_a_tick_between_forward_and_backward_is_harmless() -> None:
    layer = attached(make("conv2d"))
    x = sample(layer)
    layer(x).square().sum().backward()
    expected = layer._parameters["weight"].grad.clone()
    layer.zero_grad()
    outputs = layer(x), layer(x)
    with torch.no_grad():
        layer.weight_parametrization.v.mul_(-1)
    P.tick_(layer)
    sum(y.square().sum() for y in outputs).backward()
    torch.testing.assert_close(layer._parameters["weight"].grad, 2 * expected)


def test_tick() -> None:
    with pytest.raises(InvalidArgumentError, match=r"iterations >= 1; found 0"):
        P.tick_(attached(make("linear")), iterations=0)
    assert P.tick_(make("linear")) == 0


def test_a_shared_parametrization_is_ticked_once() -> None:
    embedding, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = embedding.weight
    norm = P.SpectralNorm()
    for layer in (embedding, head):
        P.attach(layer, "weight", norm)
    assert P.tick_(nn.Sequential(embedding, head)) == 1


def test_sigma_is_what_the_vectors_show() -> None:
    layer = attached(make("conv2d"), norm=2.0)
    norm = P.parametrization_of(layer)
    raw = layer._parameters["weight"]
    torch.testing.assert_close(norm.sigma(raw), torch.linalg.matrix_norm(raw.detach().flatten(1), 2))
    conv = attached(make("conv2d"), view="conv")
    circular = geometry.conv_spectral_norm(raw.detach(), (16, 16), layout=geometry.layout_of(layer))
    torch.testing.assert_close(P.parametrization_of(conv).sigma(raw), circular)
    with pytest.raises(InvalidArgumentError, match="found a template"):
        P.SpectralNorm().sigma(raw)


@pytest.mark.parametrize("view", ["filters", "conv"])
def test_what_is_reported_is_measured(view: str) -> None:
    """The norm that is kept, beside the one that was asked for, also where old vectors promise too much."""
    layer = attached(make("conv2d").double(), view=view)
    norm = P.parametrization_of(layer)
    of = {"filters": "of the filters' matrix", "conv": "of the convolution"}[view]
    for promised in (True, False):
        if not promised:
            layer._parameters["weight"].data.copy_(seeded(*layer.weight.shape, seed=5, dtype=torch.float64))
        weight = layer.weight.detach()
        expected = (
            torch.linalg.matrix_norm(weight.flatten(1), 2)
            if view == "filters"
            else geometry.conv_spectral_norm(weight, (96, 96), layout=geometry.layout_of(layer))
        )
        assert norm.measured(weight) == pytest.approx(float(expected), rel=5e-3)
        assert norm.holds(weight) is promised
        note = f"its largest gain, {of}, is {norm.measured(weight):.4g} for a norm of 1"
        assert note in measure(nn.Sequential(layer))["0"].notes


@pytest.mark.parametrize("view", ["filters", "conv"])
@pytest.mark.parametrize("name", ["linear", "conv2d"])
def test_a_bound_scales_only_what_exceeds_it(name: str, view: str) -> None:
    """Below, the weight and its gradient are those of the plain layer, to the bit; above, those of the norm."""
    raw = make(name).weight.detach()
    top = attached(make(name), view=view).weight_parametrization.sigma(raw)
    cotangent = seeded(*raw.shape, seed=5)
    for factor in (0.5, 2.0):
        bound = float(top) * factor
        layer = attached(make(name), view=view, at_most=bound)
        (gradient,) = torch.autograd.grad((layer.weight * cotangent).sum(), layer._parameters["weight"])
        assert layer.weight_parametrization.holds(layer.weight)
        if factor > 1:
            assert torch.equal(layer.weight, raw)
            assert torch.equal(gradient, cotangent)
        else:
            normed = attached(make(name), view=view, norm=bound)
            (expected,) = torch.autograd.grad((normed.weight * cotangent).sum(), normed._parameters["weight"])
            torch.testing.assert_close(layer.weight, normed.weight)
            torch.testing.assert_close(gradient, expected)
            assert not layer.weight_parametrization.holds(1.1 * layer.weight)


def test_a_bound_holds_after_each_step() -> None:
    """A critic with two forwards per step, whose weights grow until the bound stops their norms, and stay below it."""
    torch.manual_seed(0)
    layer = attached(nn.Linear(6, 4), at_most=2.0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    norms = []
    for step in range(40):
        optimizer.zero_grad()
        real, false = layer(seeded(8, 6, seed=step)), layer(seeded(8, 6, seed=100 + step))
        (false - real).square().mean().neg().backward()
        optimizer.step()
        norms.append(float(torch.linalg.matrix_norm(layer.weight.detach(), 2)))
    assert norms[0] < 1.9, "the bound was in force from the start"
    assert norms[-1] == pytest.approx(2, rel=0.01)
    assert max(norms) < 2.02


def test_the_bound_is_in_the_checkpoint_and_older_ones_load() -> None:
    capped, plain = attached(nn.Linear(6, 4), at_most=0.2), attached(nn.Linear(6, 4))
    assert str(capped.weight_parametrization) == "SpectralNorm(view='filters', at_most=0.2)"
    described = describe(plain.weight_parametrization.get_extra_state())
    assert described["options"] == {"view": "filters", "norm": 1.0}, "as it was before there was a bound"
    other = attached(nn.Linear(6, 4), at_most=0.2)
    other.load_state_dict(capped.state_dict())
    assert torch.equal(other.weight, capped.weight)
    effective = plain.weight.detach().clone()
    large = attached(nn.Linear(6, 4), at_most=2.0)
    large.load_state_dict(plain.state_dict())
    torch.testing.assert_close(large.weight, effective)


def test_vectors_of_another_weight_do_not_explode() -> None:
    """uᵀWv of stale vectors can be near 0 or negative; what is divided by never is."""
    layer = attached(make("linear"))
    for seed in range(20):
        with torch.no_grad():
            layer._parameters["weight"].copy_(seeded(4, 6, seed=seed) * (-1) ** seed)
        assert float(layer.weight.detach().norm()) < 10


def test_a_template_works_without_a_layer() -> None:
    weight = seeded(4, 6)
    assert torch.allclose(torch.linalg.matrix_norm(P.SpectralNorm(norm=3.0)(weight), 2), torch.tensor(3.0))


def test_wrong_options() -> None:
    with pytest.raises(InvalidArgumentError, match='view="filters" or "conv"; found \'taps\''):
        P.SpectralNorm(view="taps")
    for norm in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidArgumentError, match="finite norm > 0"):
            P.SpectralNorm(norm=norm)
        with pytest.raises(InvalidArgumentError, match="finite at_most > 0"):
            P.SpectralNorm(at_most=norm)
    with pytest.raises(InvalidArgumentError, match="one of norm= and at_most=; found norm=2 and at_most=3"):
        P.SpectralNorm(norm=2.0, at_most=3.0)


@pytest.mark.parametrize("name", ["linear", "conv2d", "transposed conv2d"])
@pytest.mark.parametrize("form", ["old", "new"])
def test_torchs_vectors_are_taken_over(form: str, name: str) -> None:
    """Not only the effective weight: after another step both still compute the same."""
    package = nn.utils if form == "old" else nn.utils.parametrizations
    source = package.spectral_norm(make(name))
    optimizer = torch.optim.SGD(source.parameters(), lr=0.05)
    source(sample(source)).square().sum().backward()
    optimizer.step()
    target = attached(make(name, seed=9))
    target.load_state_dict(source.state_dict())
    original = source.weight_orig if form == "old" else source.parametrizations.weight.original
    assert torch.equal(target._parameters["weight"], original)
    x = sample(source)
    torch.testing.assert_close(target(x), source.eval()(x))


@pytest.mark.parametrize("view", ["filters", "conv"])
@pytest.mark.parametrize("size", [3, 5])
def test_vectors_of_zeros_leave_the_weight_as_it_is(view: str, size: int) -> None:
    """Also in plain operations, where two factors of 1e19 and a length of 5 would overflow."""
    layer = nn.Conv2d(3, 4, size)
    norm = P.attach(layer, "weight", P.SpectralNorm(view=view))
    norm.v.zero_()
    raw, how = layer._parameters["weight"], norm.view_impl
    plain = spectral_norm._divided(raw, norm.u, norm.v, norm.length, how, norm.norm / how.margin, False)
    for weight in (layer.weight, plain):
        (grad,) = torch.autograd.grad(weight.sum(), raw)
        assert torch.equal(weight, raw)
        assert torch.equal(grad, torch.ones_like(raw))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (16, 9), (32, 288), (64, 64), (288, 32)])
@pytest.mark.parametrize("scale", [1e-7, 1.0, 1e12])
def test_the_fast_form_finds_the_vectors_of_a_decomposition(
    shape: tuple[int, int], scale: float, dtype: torch.dtype
) -> None:
    matrix, last = scale * seeded(*shape, dtype=dtype), seeded(shape[1], seed=1, dtype=dtype)
    found = kernels.top_vectors(matrix.numpy(), last.numpy())
    assert found is not None
    u, v = (torch.from_numpy(vector) for vector in found)
    sigma = float(u @ matrix @ v)
    exact = torch.linalg.svdvals(matrix.double())[0]
    # Of the 512th power of the Gram matrix: singular values within 1/512 of the largest are not told apart.
    assert sigma == pytest.approx(float(exact), rel=2e-3)
    assert sigma <= float(exact) * (1 + 4 * torch.finfo(dtype).eps * max(shape))
    assert float(u.norm()) == pytest.approx(1, rel=1e-6)
    assert float(v.norm()) == pytest.approx(1, rel=1e-6)
    assert float(v @ last) >= 0
    torch.testing.assert_close(u, matrix @ v / sigma)
    view = spectral_views.FilterView(Layout(), matrix.shape, 1.0)
    step = view.step(matrix[None], {"u": u[None, None], "v": last[None, None] / last.norm()})
    torch.testing.assert_close(step["v"][0, 0], v, rtol=1e-3, atol=1e-4)  # two orders of rounding, raised to the 512th


def test_the_fast_form_keeps_equal_singular_values_finite() -> None:
    for side in (2, 9, 64):
        found = kernels.top_vectors(3 * numpy.eye(side, dtype=numpy.float32), numpy.ones(side, numpy.float32))
        assert found is not None
        assert float(found[0] @ found[1]) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("value", [0.0, 1e-13, 1e18, numpy.nan, numpy.inf])
def test_the_fast_form_leaves_what_it_cannot_square(value: float) -> None:
    assert kernels.top_vectors(numpy.full((4, 6), value, numpy.float32), numpy.ones(6, numpy.float32)) is None


def test_the_storage_of_the_weight_can_still_be_resized() -> None:
    """As FSDP does to free a weight; that of a tensor that NumPy has seen cannot."""
    layer = nn.Linear(8, 8)
    P.attach(layer, "weight", P.SpectralNorm())
    raw = next(layer.parameters())
    with torch.no_grad():
        raw.mul_(2)
    layer(torch.ones(1, 8))
    assert raw.untyped_storage().resizable()
