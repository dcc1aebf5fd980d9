"""What happens to a layer in its life: half precision, autocast, checkpointing, zero weights, double backward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from catalog import seeded
from gonio import parametrizations as P
from parametrizations.layers import LAYERS, MEMBERS, make, sample
from tolerances import close

ONE = pytest.mark.parametrize("member", MEMBERS)
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def layer_of(member: str, name: str = "conv2d", seed: int = 0) -> nn.Module:
    layer = make(name, seed)
    P.attach(layer, "weight", MEMBERS[member].make())
    return layer


@HALVES
@ONE
@pytest.mark.parametrize("name", ["linear", "grouped conv2d", "grouped transposed conv2d"])
def test_half_precision_is_float32_rounded(member: str, name: str, dtype: torch.dtype) -> None:
    """Whether the layer was cast before or after."""
    cast_before = make(name).to(dtype)
    P.attach(cast_before, "weight", MEMBERS[member].make())
    reference = make(name).to(dtype).float()
    P.attach(reference, "weight", MEMBERS[member].make())
    cast_after = layer_of(member, name).to(dtype)
    for layer in (cast_before, cast_after):
        assert layer.weight.dtype is dtype
        torch.testing.assert_close(layer.weight.float(), reference.weight, **close(dtype))
        layer(sample(layer).to(dtype)).sum().backward()
        assert all(bool(p.grad.isfinite().all()) for p in layer.parameters())
    P.tick_(cast_after, iterations=3)
    torch.testing.assert_close(cast_after.weight.float(), reference.weight, **close(dtype))


@HALVES
@ONE
def test_autocast_computes_the_weight_in_float32(member: str, dtype: torch.dtype) -> None:
    layer = layer_of(member)
    expected = layer.weight
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(layer.weight, expected)
        P.tick_(layer)
        assert layer(sample(layer)).dtype is dtype
    torch.testing.assert_close(layer.weight, expected)


class Checkpointed(nn.Module):
    def __init__(self, layer: nn.Module, reentrant: bool | None) -> None:
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.layer(x)
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)


def trajectory(member: str, reentrant: bool | None, steps: int) -> list[Tensor]:
    layer = layer_of(member, "conv2d" if "conv" in member else "linear")
    model = Checkpointed(nn.Sequential(layer, nn.Tanh()), reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    if any(True for b in model.buffers()):
        P.tick_on_step(optimizer, model)
    for step in range(steps):
        x = seeded(4, *sample(layer).shape[1:], seed=step).requires_grad_()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    grads = [p.grad for p in model.parameters()]
    return [*(t.detach() for t in (*model.parameters(), *model.buffers())), *grads]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("steps", [20, pytest.param(200, marks=pytest.mark.slow)])
@ONE
def test_checkpointing_changes_no_bit(member: str, steps: int, reentrant: bool) -> None:
    plain, again = trajectory(member, None, steps), trajectory(member, reentrant, steps)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_torchs_spectral_norm_fails_the_same_test() -> None:
    """The negative control: its vectors move again in the recomputation."""

    def run(reentrant: bool | None) -> list[Tensor]:
        model = Checkpointed(nn.utils.parametrizations.spectral_norm(make("linear")), reentrant)
        model(seeded(4, 6).requires_grad_()).square().mean().backward()
        return [p.grad for p in model.parameters()]

    assert not all(torch.equal(a, b) for a, b in zip(run(None), run(False), strict=True))


@ONE
@pytest.mark.parametrize("name", LAYERS)
def test_zero_weights_are_finite_and_stay_so(member: str, name: str) -> None:
    layer = make(name)
    with torch.no_grad():
        layer.weight.zero_()
    P.attach(layer, "weight", MEMBERS[member].make())
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        layer(sample(layer)).sum().backward()
        optimizer.step()
        P.tick_(layer)
    assert all(bool(t.isfinite().all()) for t in (*layer.parameters(), *layer.buffers(), layer.weight))
    with torch.no_grad():
        layer._parameters["weight"].copy_(make(name, seed=3).weight)
    assert bool(layer.weight.isfinite().all())


@ONE
def test_several_forwards_and_backwards(member: str) -> None:
    """D(real) − D(fake), retained graphs, and a gradient penalty (a second derivative of the layer)."""
    layer = layer_of(member)
    x, y = sample(layer).requires_grad_(), seeded(*sample(layer).shape, seed=4).requires_grad_()
    (layer(x) - layer(y)).square().sum().backward(retain_graph=True)
    loss = layer(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    (slope,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    slope.norm().backward()
    assert all(bool(p.grad.isfinite().all()) for p in layer.parameters())


@ONE
def test_hessian_of_the_layer(member: str) -> None:
    layer = layer_of(member, "linear").double()
    x = sample(layer).double()
    raw = layer._parameters["weight"].detach()

    def loss(weight: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"weight": weight}, (x,)).square().sum()

    hessian = torch.func.hessian(loss)(raw)
    step, direction = 1e-5, seeded(*raw.shape, seed=6, dtype=torch.float64)
    slope = torch.func.grad(loss)
    expected = (slope(raw + step * direction) - slope(raw - step * direction)) / (2 * step)
    torch.testing.assert_close((hessian * direction).sum((-2, -1)), expected, rtol=1e-5, atol=1e-5)


@ONE
def test_folding_is_the_same_in_both_modes(member: str) -> None:
    """torch's spectral norm folds another weight in training than evaluation used."""
    layer = layer_of(member).double()
    with torch.no_grad():
        layer._parameters["weight"].add_(0.1 * seeded(*layer.weight.shape, seed=4, dtype=torch.float64))
    x = sample(layer).double()
    for training in (True, False):
        folded = copy.deepcopy(layer).train(training)
        expected = layer.eval()(x)
        P.detach(folded, "weight", keep="weight")
        torch.testing.assert_close(folded(x), expected, rtol=1e-12, atol=1e-12)


@ONE
def test_no_read_is_stale(member: str) -> None:
    """Nothing is cached between reads: a step, a tick, a load and a hand-made change all show at once."""
    layer = layer_of(member, "linear")
    seen = [layer.weight.detach().clone()]
    for change in (
        lambda raw: raw.add_(0.3 * seeded(*raw.shape, seed=5)),
        lambda raw: raw.copy_(seeded(*raw.shape, seed=6)),
        lambda raw: raw.data.neg_(),
    ):
        with torch.no_grad():
            change(layer._parameters["weight"])
        weight = layer.weight.detach()
        assert not any(torch.equal(weight, old) for old in seen)
        assert torch.equal(weight, layer.weight)
        seen.append(weight.clone())


@ONE
def test_channels_last_survives(member: str) -> None:
    layer = layer_of(member).to(memory_format=torch.channels_last)
    x = sample(layer).contiguous(memory_format=torch.channels_last)
    assert layer(x).is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(layer(x), layer_of(member)(x.contiguous()))


@ONE
def test_no_global_random_numbers(member: str) -> None:
    layer, x = make("conv2d"), sample(make("conv2d"))
    state = torch.get_rng_state()
    P.attach(layer, "weight", MEMBERS[member].make())
    layer(x).sum().backward()
    P.tick_(layer)
    P.detach(layer, "weight", keep="weight")
    assert torch.equal(torch.get_rng_state(), state)
