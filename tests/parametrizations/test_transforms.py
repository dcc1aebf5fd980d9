"""Precision, derivatives of higher order, and transforms of programs: functional_call, vmap, compile, fx, trace."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from catalog import seeded
from gonio import parametrizations as P
from parametrizations.layers import MEMBERS, make, parametrized, sample
from tolerances import close, exact

ONE = pytest.mark.parametrize("member", MEMBERS)

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@HALVES
@ONE
@pytest.mark.parametrize("name", ["linear", "grouped conv2d", "grouped transposed conv2d"])
def test_half_precision_is_float32_rounded(member: str, name: str, dtype: torch.dtype) -> None:
    """Whether the layer was cast before or after."""
    cast_before = make(name).to(dtype)
    P.attach(cast_before, "weight", MEMBERS[member].make())
    reference = make(name).to(dtype).float()
    P.attach(reference, "weight", MEMBERS[member].make())
    cast_after = parametrized(member, name).to(dtype)
    if isinstance(cast_after.weight_parametrization, P.OrthogonalConv):
        # Its nearest kernel comes from a search, which may end elsewhere for a weight that was rounded before.
        reference = parametrized(member, name)
        cast_before = cast_after
    for layer in (cast_before, cast_after):
        assert layer.weight.dtype is dtype
        torch.testing.assert_close(layer.weight.float(), reference.weight, **close(dtype))
        layer(sample(layer).to(dtype)).sum().backward()
        assert all(bool(p.grad.isfinite().all()) for p in layer.parameters())
    P.tick_(cast_after, iterations=3)
    torch.testing.assert_close(cast_after.weight.float(), reference.weight, **close(dtype))


@ONE
def test_several_forwards_and_backwards(member: str) -> None:
    """D(real) − D(fake), retained graphs, and a gradient penalty (a second derivative of the layer)."""
    layer = parametrized(member, "grouped conv2d")
    x, y = sample(layer).requires_grad_(), seeded(*sample(layer).shape, seed=4).requires_grad_()
    (layer(x) - layer(y)).square().sum().backward(retain_graph=True)
    loss = layer(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    (slope,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    slope.norm().backward()
    assert all(bool(p.grad.isfinite().all()) for p in layer.parameters())


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@ONE
def test_functional_call_replaces_the_raw_tensor(member: str) -> None:
    layer, other = parametrized(member, "grouped conv2d"), parametrized(member, "grouped conv2d", seed=5)
    x = sample(layer)
    tensors = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    assert torch.equal(functional_call(layer, tensors, (x,)), other(x))
    assert not torch.equal(layer(x), other(x))


@ONE
def test_ensembles(member: str) -> None:
    layers = [parametrized(member, "grouped conv2d", seed=seed) for seed in range(3)]
    parameters, buffers = stack_module_state(layers)
    base = copy.deepcopy(layers[0]).to("meta")
    x = sample(layers[0])

    def call(p: dict, b: dict) -> torch.Tensor:
        return functional_call(base, (p, b), (x,))

    together = vmap(call)(parameters, buffers)
    torch.testing.assert_close(together, torch.stack([layer(x) for layer in layers]))


@pytest.mark.slow
@ONE
@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_with_assignment_and_loading(member: str) -> None:
    layer, other = parametrized(member, "grouped conv2d"), parametrized(member, "grouped conv2d", seed=3)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = sample(layer)
    torch.testing.assert_close(compiled(x), layer(x), **exact(torch.float32))
    layer.load_state_dict(other.state_dict())
    torch.testing.assert_close(compiled(x), other(x), **exact(torch.float32))
    layer.weight = seeded(*layer.weight.shape, seed=8)
    torch.testing.assert_close(compiled(x), layer(x), **exact(torch.float32))


def network(member: str) -> nn.Module:
    name, between = ("conv2d", nn.Conv2d(6, 4, 1)) if "conv" in member else ("linear", nn.Linear(4, 6))
    return nn.Sequential(parametrized(member, name), nn.Tanh(), between, nn.Tanh(), parametrized(member, name, seed=2))


def losses(step: nn.Module, model: nn.Module) -> list[float]:
    """Of a training."""
    shape = (8, *sample(model[0]).shape[1:])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found = []
    for seed in range(6):
        optimizer.zero_grad()
        loss = step(seeded(*shape, seed=seed)).square().mean()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


@pytest.mark.grid(3)
@ONE
@pytest.mark.usefixtures("_fresh_compiler")
def test_training_is_one_graph_compiled_once(member: str) -> None:
    """Power iterations move buffers between the steps; the graph reads them and is never made again."""
    model = network(member)
    twin = copy.deepcopy(model)
    expected = losses(twin, twin)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = losses(compiled, model)
    assert found == pytest.approx(expected, rel=1e-5)
    for (name, mine), other in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, other, msg=name, **close(torch.float32))


@pytest.mark.parametrize("view", ["filters", "conv"])
@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiled_training_advances_the_vectors_in_its_graph(view: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Tanh(), nn.ConvTranspose2d(6, 4, 3, groups=2))
    for layer in (model[0], model[2]):
        P.attach(layer, "weight", P.SpectralNorm(view=view))
    twin, start = copy.deepcopy(model), model[0].weight_parametrization.u.clone()

    def trained(model: nn.Module, how: Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]) -> None:
        def forward(x: Tensor) -> Tensor:
            return model(x)

        call, optimizer = how(forward), torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(4):
            optimizer.zero_grad()
            call(seeded(5, 3, 6, 6, seed=seed)).square().mean().backward()
            optimizer.step()

    with torch._dynamo.config.patch(error_on_recompile=True):
        trained(model, lambda forward: torch.compile(forward, fullgraph=True, backend="aot_eager"))
    trained(twin, lambda forward: forward)
    for (name, mine), other in zip(model.named_buffers(), twin.named_buffers(), strict=True):
        torch.testing.assert_close(mine, other[1], msg=name, **close(torch.float32))
    assert not torch.allclose(model[0].weight_parametrization.u, start, **close(torch.float32)), "it moves"


def test_fx_sees_one_layer() -> None:
    model = nn.Sequential(parametrized("WeightNorm", "grouped conv2d"), nn.ReLU())
    graph = torch.fx.symbolic_trace(model)
    assert [node.target for node in graph.graph.nodes if node.op == "call_module"] == ["0", "1"]
    x = sample(model[0])
    assert torch.equal(graph(x), model(x))


@pytest.mark.filterwarnings("ignore:.*deprecated.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@ONE
def test_trace_works_and_script_fails_loudly(member: str) -> None:
    layer = parametrized(member, "grouped conv2d").eval()
    x = sample(layer)
    traced = torch.jit.trace(layer, (x,))
    outputs = layer(x)
    torch.testing.assert_close(traced(x), outputs)
    with pytest.raises(torch.jit.frontend.NotSupportedError, match="try blocks aren't supported"):
        torch.jit.script(layer)
    P.detach(layer, "weight", keep="weight")
    torch.testing.assert_close(torch.jit.script(layer)(x), outputs)
