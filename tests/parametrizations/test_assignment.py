"""`layer.weight = W`, resets, and models that begin on the meta device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from catalog import seeded
from gonio import parametrizations as P
from gonio.errors import InvalidArgumentError, UnsetStateError
from parametrizations.layers import LAYERS, MEMBERS, make, sample

ONE = pytest.mark.parametrize("member", MEMBERS)


@ONE
@pytest.mark.parametrize("name", LAYERS)
def test_a_reachable_weight_is_assigned_exactly(member: str, name: str) -> None:
    layer, other = make(name).double(), make(name, seed=4).double()
    for one in (layer, other):
        P.attach(one, "weight", MEMBERS[member].make())
    raw, target = layer._parameters["weight"], other.weight.detach()
    layer.weight = target
    assert layer._parameters["weight"] is raw
    torch.testing.assert_close(layer.weight, target)
    assert P.parametrization_of(layer).holds(layer.weight)


@ONE
def test_an_assigned_parameter_is_the_one_that_is_trained(member: str) -> None:
    layer = make("linear")
    P.attach(layer, "weight", MEMBERS[member].make())
    given = nn.Parameter(seeded(4, 6, seed=6))
    tensor = make("linear")
    P.attach(tensor, "weight", MEMBERS[member].make())
    tensor.weight = given.detach().clone()
    layer.weight = given
    assert layer._parameters["weight"] is given
    assert torch.equal(layer.weight, tensor.weight)


def test_another_shape_is_refused() -> None:
    layer = make("linear")
    P.attach(layer, "weight", P.Sphere())
    with pytest.raises(InvalidArgumentError, match=r"tensor of its shape; found \(1, 6\) for \(4, 6\)"):
        layer.weight = torch.ones(1, 6)


@ONE
@pytest.mark.parametrize("name", ["linear", "conv2d", "grouped transposed conv2d"])
def test_reset_equals_a_new_layer(member: str, name: str) -> None:
    layer = make(name)
    P.attach(layer, "weight", MEMBERS[member].make())
    torch.manual_seed(3)
    layer.reset_parameters()
    torch.manual_seed(3)
    fresh = LAYERS[name]()
    fresh.reset_parameters()
    torch.manual_seed(3)
    fresh.reset_parameters()
    P.attach(fresh, "weight", MEMBERS[member].make())
    x = sample(layer)
    assert torch.equal(layer(x), fresh(x))
    for key, value in fresh.state_dict().items():
        assert torch.equal(layer.state_dict()[key], value), key


def on_meta(member: str) -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2))
    for layer in (model[0], model[2]):
        P.attach(layer, "weight", MEMBERS[member].make())
    return model


def real(member: str) -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2))
    for layer in (model[0], model[2]):
        P.attach(layer, "weight", MEMBERS[member].make())
    return model


def has_state(model: nn.Module) -> bool:
    p = P.parametrization_of(model[0])
    return bool([*p.parameters(), *p.buffers()])


@ONE
def test_meta_then_reset_equals_direct(member: str) -> None:
    model = on_meta(member)
    assert model[0].weight.is_meta
    model.to_empty(device="cpu")
    torch.manual_seed(1)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    torch.manual_seed(1)
    expected = real(member)
    x = seeded(2, 3, 8, 8)
    assert torch.equal(model(x), expected(x))


@ONE
def test_children_reset_first(member: str) -> None:
    """`model.apply` visits a parametrization before its layer."""
    model = on_meta(member).to_empty(device="cpu")
    model.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)
    assert P.parametrization_of(model[0]).holds(model[0].weight)


@ONE
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_an_unset_model_raises(member: str, how: str) -> None:
    model = on_meta(member).to_empty(device="cpu")
    if not has_state(model):
        return
    if how == "compiled":
        torch._dynamo.reset()
        model = torch.compile(model, backend="aot_eager")
    with pytest.raises(UnsetStateError, match=r"allocated by to_empty\(\) and never set"):
        model(seeded(2, 3, 8, 8))


@ONE
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("source", ["own", "plain"])
def test_meta_then_load(member: str, assign: bool, source: str) -> None:
    expected = real(member)
    state = expected.state_dict() if source == "own" else P.plain_state_dict(expected.state_dict())
    model = on_meta(member)
    if not assign:
        model.to_empty(device="cpu")
    model.load_state_dict(state, assign=assign)
    x = seeded(2, 3, 8, 8)
    torch.testing.assert_close(model(x), expected(x))
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in model.parameters())
