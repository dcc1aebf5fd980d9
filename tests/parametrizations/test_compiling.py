"""Transforms of programs: functional_call, vmap, compile, export, fx, trace; script is refused by torch."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap

from catalog import seeded
from gonio import parametrizations as P
from parametrizations.layers import MEMBERS, make, sample
from tolerances import close, exact

ONE = pytest.mark.parametrize("member", MEMBERS)


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def layer_of(member: str, name: str = "grouped conv2d", seed: int = 0) -> nn.Module:
    layer = make(name, seed)
    P.attach(layer, "weight", MEMBERS[member].make())
    return layer


@ONE
def test_functional_call_replaces_the_raw_tensor(member: str) -> None:
    layer, other = layer_of(member), layer_of(member, seed=5)
    x = sample(layer)
    tensors = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    assert torch.equal(functional_call(layer, tensors, (x,)), other(x))
    assert not torch.equal(layer(x), other(x))


@ONE
def test_gradient_transform(member: str) -> None:
    layer = layer_of(member).double()
    x = sample(layer).double()
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    found = grad(lambda p: functional_call(layer, p, (x,)).square().sum())(parameters)
    layer(x).square().sum().backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


@ONE
def test_ensembles(member: str) -> None:
    layers = [layer_of(member, seed=seed) for seed in range(3)]
    parameters, buffers = stack_module_state(layers)
    base = copy.deepcopy(layers[0]).to("meta")
    x = sample(layers[0])

    def call(p: dict, b: dict) -> torch.Tensor:
        return functional_call(base, (p, b), (x,))

    together = vmap(call)(parameters, buffers)
    torch.testing.assert_close(together, torch.stack([layer(x) for layer in layers]))


@ONE
@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_with_assignment_and_loading(member: str) -> None:
    layer, other = layer_of(member), layer_of(member, seed=3)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = sample(layer)
    torch.testing.assert_close(compiled(x), layer(x), **exact(torch.float32))
    layer.load_state_dict(other.state_dict())
    torch.testing.assert_close(compiled(x), other(x), **exact(torch.float32))
    layer.weight = seeded(*layer.weight.shape, seed=8)
    torch.testing.assert_close(compiled(x), layer(x), **exact(torch.float32))


def network(member: str) -> nn.Module:
    name, between = ("conv2d", nn.Conv2d(6, 4, 1)) if "conv" in member else ("linear", nn.Linear(4, 6))
    return nn.Sequential(layer_of(member, name), nn.Tanh(), between, nn.Tanh(), layer_of(member, name, seed=2))


def losses(step: nn.Module, model: nn.Module) -> list[float]:
    """Of a training with a tick after each step."""
    shape = (8, *sample(model[0]).shape[1:])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if any("SpectralNorm" in type(module).__name__ for module in model.modules()):
        P.tick_on_step(optimizer, model)
    found = []
    for seed in range(6):
        optimizer.zero_grad()
        loss = step(seeded(*shape, seed=seed)).square().mean()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


@ONE
@pytest.mark.usefixtures("_fresh_compiler")
def test_training_with_ticks_is_one_graph_compiled_once(member: str) -> None:
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


@pytest.mark.slow
@ONE
@pytest.mark.usefixtures("_fresh_compiler")
def test_inductor(member: str) -> None:
    layer = layer_of(member)
    compiled = torch.compile(layer, fullgraph=True)
    x = sample(layer)
    torch.testing.assert_close(compiled(x), layer(x))
    compiled(x).square().sum().backward()
    found = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    layer(x).square().sum().backward()
    for mine, p in zip(found, layer.parameters(), strict=True):
        torch.testing.assert_close(mine, p.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("strict", [False, True])
@ONE
def test_export_in_both_modes(member: str, strict: bool) -> None:
    layer = layer_of(member)
    x = sample(layer)
    for training in (False, True):
        program = torch.export.export(layer.train(training), (x,), strict=strict)
        torch.testing.assert_close(program.module()(x), layer(x), **exact(torch.float32))


def test_fx_sees_one_layer() -> None:
    model = nn.Sequential(layer_of(next(iter(MEMBERS))), nn.ReLU())
    graph = torch.fx.symbolic_trace(model)
    assert [node.target for node in graph.graph.nodes if node.op == "call_module"] == ["0", "1"]
    x = sample(model[0])
    assert torch.equal(graph(x), model(x))


@pytest.mark.filterwarnings("ignore:.*deprecated.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@ONE
def test_trace_works_and_script_fails_loudly(member: str) -> None:
    layer = layer_of(member).eval()
    x = sample(layer)
    traced = torch.jit.trace(layer, (x,))
    torch.testing.assert_close(traced(x), layer(x))
    with pytest.raises(torch.jit.frontend.NotSupportedError, match="try blocks aren't supported"):
        torch.jit.script(layer)
    P.detach(layer, "weight", keep="weight")
    torch.testing.assert_close(torch.jit.script(layer)(x), traced(x))
