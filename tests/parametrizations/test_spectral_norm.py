"""Spectral norm: which norm, when its vectors move, and how batches of layers are ticked."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from catalog import seeded
from gonio import geometry
from gonio import parametrizations as P
from gonio.errors import InvalidArgumentError, NoMatchError
from gonio.measuring import measure
from gonio.parametrizations import spectral_norm, spectral_views
from parametrizations.layers import LAYERS, make, sample
from tolerances import close

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
    margin = P.parametrization_of(layer).how.margin
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


def test_a_tick_is_one_power_iteration() -> None:
    layer = attached(make("grouped conv2d").double())
    norm, raw = layer.weight_parametrization, layer._parameters["weight"]
    u, v = norm.u.clone(), norm.v.clone()
    with torch.no_grad():
        raw.add_(0.3 * seeded(*raw.shape, seed=4))
    matrices = raw.detach().view(2, 3, 18)
    for _ in range(3):
        P.tick_(layer)
        for group, matrix in enumerate(matrices):
            v[group, 0] = u[group, 0] @ matrix
            v[group, 0] /= v[group, 0].norm()
            u[group, 0] = matrix @ v[group, 0]
            u[group, 0] /= u[group, 0].norm()
        torch.testing.assert_close((norm.u, norm.v), (u, v))
    largest = (u * (v @ matrices.mT)).sum((1, 2)).max()
    torch.testing.assert_close(layer.weight, raw / largest)


@pytest.mark.parametrize("size", [0.0, 1e-25, 1e-11, 1.0, 1e13, 1e18])
@pytest.mark.parametrize("name", ["linear", "transposed conv2d", "grouped conv2d"])
def test_a_tick_of_one_layer_is_that_of_its_stack(name: str, size: float) -> None:
    """In place and in a stack, for weights of any size; those of a zero weight stay."""
    layer = attached(make(name))
    norm, raw = layer.weight_parametrization, layer._parameters["weight"]
    with torch.no_grad():
        raw.copy_(size * seeded(*raw.shape, seed=4))
    state = {"u": norm.u.clone(), "v": norm.v.clone()}
    expected = norm.how.step(norm.how.matrices(raw.detach()), state)
    P.tick_(layer)
    for key, value in expected.items():
        torch.testing.assert_close(norm._buffers[key], value, **close(raw.dtype))
        assert torch.equal(value, state[key]) == (size < geometry.norms.least_norm(raw.dtype))


@pytest.mark.parametrize("view", ["filters", "conv"])
def test_ticks_follow_a_changing_weight(view: str) -> None:
    layer = attached(make("grouped conv2d"), view=view)
    handle_free = copy.deepcopy(layer)
    for step in range(60):
        for one in (layer, handle_free):
            with torch.no_grad():
                one._parameters["weight"].add_(0.05 * seeded(*one.weight.shape, seed=100 + step))
        P.tick_(layer)
    P.tick_(layer, iterations=20)
    assert P.parametrization_of(layer).holds(layer.weight)
    assert not P.parametrization_of(handle_free).holds(handle_free.weight)


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


def test_layers_of_one_shape_are_ticked_as_one() -> None:
    """Stacked or alone, the vectors come out the same; layers of other shapes are separate."""
    names = ["linear", "linear", "conv2d", "grouped conv2d", "conv2d", "linear"]
    model = nn.ModuleList(
        attached(make(name, seed=i), view=view) for view in ("filters", "conv") for i, name in enumerate(names)
    )
    with torch.no_grad():
        for layer in model:
            layer._parameters["weight"].add_(0.5 * seeded(*layer.weight.shape, seed=8))
    alone = copy.deepcopy(model)
    assert P.tick_(model, iterations=2) == len(model)
    for layer in alone:
        P.tick_(layer, iterations=2)
    for layer, other in zip(model, alone, strict=True):
        for (name, a), (_, b) in zip(layer.named_buffers(), other.named_buffers(), strict=True):
            torch.testing.assert_close(a, b, msg=name, **close(torch.float32))


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


def test_tick_on_step() -> None:
    layer = attached(make("linear"))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    handle = P.tick_on_step(optimizer, layer)
    twin, state = copy.deepcopy(layer), optimizer.state_dict()
    layer(sample(layer)).square().sum().backward()
    optimizer.step()
    moved = layer.weight_parametrization.v.clone()
    assert not torch.equal(moved, twin.weight_parametrization.v)
    assert optimizer.state_dict().keys() == state.keys()
    handle.undo_()
    optimizer.step()
    assert torch.equal(layer.weight_parametrization.v, moved)
    with pytest.raises(NoMatchError, match="tick_on_step"):
        P.tick_on_step(optimizer, make("linear"))
    with pytest.raises(InvalidArgumentError, match=r"iterations >= 1; found 0"):
        P.tick_(layer, iterations=0)
    assert P.tick_(make("linear")) == 0


def test_a_shared_parametrization_is_ticked_once() -> None:
    embedding, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = embedding.weight
    norm = P.SpectralNorm()
    for layer in (embedding, head):
        P.attach(layer, "weight", norm)
    assert P.tick_(nn.Sequential(embedding, head)) == 1


def test_training_without_ticks_is_noticed() -> None:
    layer = attached(make("linear"))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)

    def steps(count: int) -> None:
        for _ in range(count):
            layer(sample(layer)).sum().backward()
            optimizer.step()

    with pytest.warns(UserWarning, match="saw its weight change 100 times without a tick"):
        steps(101)
    handle = P.tick_on_step(optimizer, layer)
    steps(120)
    handle.undo_()


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
            with torch.no_grad():
                layer._parameters["weight"].copy_(seeded(*layer.weight.shape, seed=5, dtype=torch.float64))
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
    raw, how = layer._parameters["weight"], norm.how
    plain = spectral_norm._divided(raw, norm.u, norm.v, norm.length, how, norm.norm / how.margin)
    for weight in (layer.weight, plain):
        (grad,) = torch.autograd.grad(weight.sum(), raw)
        assert torch.equal(weight, raw)
        assert torch.equal(grad, torch.ones_like(raw))
