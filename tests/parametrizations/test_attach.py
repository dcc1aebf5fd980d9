"""Attaching and detaching: identity, order, keys, optimizers, refusals."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from catalog import seeded
from gonio import parametrizations as P
from gonio.errors import AlreadyAppliedError, InvalidArgumentError, NotApplicableError
from parametrizations.layers import LAYERS, MEMBERS, make, sample


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("name", LAYERS)
def test_parameters_keep_identity_order_and_keys(member: str, name: str) -> None:
    layer = make(name)
    before = list(layer.named_parameters())
    P.attach(layer, "weight", MEMBERS[member].make())
    after = list(layer.named_parameters())
    assert [(key, id(p)) for key, p in after[: len(before)]] == [(key, id(p)) for key, p in before]
    assert isinstance(layer, type(LAYERS[name]()))
    layer(sample(layer)).sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in layer.parameters())


@pytest.mark.parametrize("member", MEMBERS)
def test_an_optimizer_built_before_trains_the_layer(member: str) -> None:
    layer = make("conv2d")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    P.attach(layer, "weight", MEMBERS[member].make())
    x, before = sample(layer), layer.weight.detach().clone()
    target = seeded(*layer(x).shape, seed=5)
    losses = []
    for _ in range(5):
        loss = (layer(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert not torch.allclose(layer.weight, before)


def test_class_is_shared_by_copies_and_never_changed() -> None:
    first, second = make("linear"), make("linear")
    for layer in (first, second):
        P.attach(layer, "weight", P.Sphere())
    assert type(first) is type(second) is type(copy.deepcopy(first))
    assert repr(first).startswith("ParametrizedLinear(")
    attributes = dict(vars(type(first)))
    P.detach(second, "weight", keep="weight")
    assert dict(vars(type(first))) == attributes
    assert type(second) is nn.Linear
    assert P.is_parametrized(first)


def test_two_tensors_of_one_layer() -> None:
    layer = nn.LSTM(3, 4)
    P.attach(layer, "weight_ih_l0", P.Sphere())
    P.attach(layer, "weight_hh_l0", P.WeightNorm())
    assert P.is_parametrized(layer, "weight_ih_l0")
    assert P.is_parametrized(layer, "weight_hh_l0")
    P.detach(layer, "weight_ih_l0")
    assert not P.is_parametrized(layer, "weight_ih_l0")
    assert isinstance(P.parametrization_of(layer, "weight_hh_l0"), P.WeightNorm)
    P.detach(layer, "weight_hh_l0")
    assert type(layer) is nn.LSTM


def test_one_parametrization_for_tied_layers() -> None:
    embedding, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = embedding.weight
    norm = P.WeightNorm()
    P.attach(embedding, "weight", norm)
    P.attach(head, "weight", norm)
    model = nn.Sequential(embedding, head)
    assert len(list(model.parameters())) == 2
    assert torch.equal(embedding.weight, head.weight)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight_parametrization.magnitude.mul_(2)
    assert torch.equal(twin[0].weight, twin[1].weight)
    assert torch.allclose(twin[0].weight, 2 * embedding.weight)
    for layer in model:
        P.detach(layer, "weight", keep="weight")
    assert head.weight is embedding.weight
    assert torch.allclose(2 * head.weight, twin[1].weight)


@pytest.mark.parametrize("value", [True, False])
def test_added_parameters_are_frozen_with_the_weight(value: bool) -> None:
    layer = make("linear").requires_grad_(value)
    P.attach(layer, "weight", P.WeightNorm())
    assert [p.requires_grad for p in layer.parameters()] == [value] * 3


def test_refusals() -> None:
    layer = make("linear")
    P.attach(layer, "weight", P.Sphere())
    with pytest.raises(AlreadyAppliedError, match="found Sphere there already"):
        P.attach(layer, "weight", P.WeightNorm())
    with pytest.raises(NotApplicableError, match="not a weight that this library knows how to read"):
        P.attach(make("linear"), "bias", P.Sphere())
    with pytest.raises(NotApplicableError, match="not a Parameter of that layer"):
        P.attach(make("linear"), "scale", P.Sphere())
    with pytest.raises(NotApplicableError, match="max_norm renormalises it in place"):
        P.attach(nn.Embedding(3, 2, max_norm=1.0), "weight", P.Sphere())
    with pytest.raises(NotApplicableError, match="gradients are sparse"):
        P.attach(nn.Embedding(3, 2, sparse=True), "weight", P.Sphere())
    with pytest.raises(NotApplicableError, match="no shape yet"):
        P.attach(nn.LazyLinear(3), "weight", P.Sphere())
    with pytest.raises(InvalidArgumentError, match="bound to another tensor"):
        P.attach(make("linear"), "weight", P.parametrization_of(layer))
    with pytest.raises(InvalidArgumentError, match='keep="raw" or "weight"; found'):
        P.detach(layer, "weight", keep="both")
    with pytest.raises(NotApplicableError, match="it is not parametrized"):
        P.detach(make("linear"), "weight")


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
@pytest.mark.parametrize("package", [nn.utils, nn.utils.parametrizations], ids=["old", "new"])
def test_a_weight_that_torch_parametrizes_is_refused(norm: str, package: object) -> None:
    layer = getattr(package, norm)(make("linear"))
    with pytest.raises(AlreadyAppliedError, match="torch's own"):
        P.attach(layer, "weight", P.Sphere())


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_scripted_layer_is_refused() -> None:
    with pytest.raises(NotApplicableError, match="compiled forward"):
        P.attach(torch.jit.script(nn.Linear(2, 2)), "weight", P.Sphere())


def test_a_failing_map_does_not_show_the_raw_tensor() -> None:
    """nn.Module answers an AttributeError of a property with what `_parameters` holds."""
    layer = make("linear")
    P.attach(layer, "weight", P.Sphere())
    del layer.weight_parametrization.radius
    with pytest.raises(RuntimeError, match=r"'weight' cannot be computed: .*radius"):
        _ = layer.weight


def test_a_class_changed_later_is_not_detached() -> None:
    layer = make("linear")
    P.attach(layer, "weight", P.Sphere())
    layer.__class__ = type("Sharded", (type(layer),), {})
    with pytest.raises(NotApplicableError, match="became a Sharded after"):
        P.detach(layer, "weight")
