"""The mechanism: attach, detach, read, assign, reset, the meta device, and layers with several weights."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from catalog import seeded
from gonio import parametrizations as P
from gonio.errors import AlreadyAppliedError, InvalidArgumentError, NotApplicableError, UnsetStateError
from parametrizations.layers import LAYERS, MEMBERS, make, parametrized, sample

ONE = pytest.mark.parametrize("member", MEMBERS)


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


@pytest.mark.parametrize("name", LAYERS)
def test_the_class_of_a_parametrized_layer_makes_no_layer(name: str) -> None:
    layer = make(name)
    own = type(layer).__name__
    P.attach(layer, "weight", P.Sphere())
    with pytest.raises(NotApplicableError, match=f"the class of a parametrized {own}, .*Make a {own}, and parametrize"):
        type(layer)(4, 6, 3)


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


REFUSED: dict[str, Callable[[nn.Module], object]] = {
    "it is not a weight with filters of a known layer": lambda _: P.attach(make("linear"), "bias", P.Sphere()),
    "not a Parameter of that layer": lambda _: P.attach(make("linear"), "scale", P.Sphere()),
    "renormalises it in place": lambda _: P.attach(nn.Embedding(3, 2, max_norm=1.0), "weight", P.Sphere()),
    "gradients are sparse": lambda _: P.attach(nn.Embedding(3, 2, sparse=True), "weight", P.Sphere()),
    "no shape yet": lambda _: P.attach(nn.LazyLinear(3), "weight", P.Sphere()),
    "it is not parametrized": lambda _: P.detach(make("linear"), "weight"),
    "found Sphere there already": lambda layer: P.attach(layer, "weight", P.WeightNorm()),
    "bound to another tensor": lambda layer: P.attach(make("linear"), "weight", P.parametrization_of(layer)),
    'keep="raw" or "weight"; found': lambda layer: P.detach(layer, "weight", keep="both"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message: str) -> None:
    layer = make("linear")
    P.attach(layer, "weight", P.Sphere())
    with pytest.raises((AlreadyAppliedError, InvalidArgumentError, NotApplicableError), match=message):
        REFUSED[message](layer)


@ONE
@pytest.mark.parametrize("shape", [(4, 0), (0, 4), (2, 0, 3, 3)], ids=str)
def test_a_weight_without_entries_is_refused(member: str, shape: tuple[int, ...]) -> None:
    """torch's kernel of weight norm divides by the number of filters, which ends the process."""
    layer = nn.Linear(1, 1) if len(shape) == 2 else nn.Conv2d(1, 1, 3)
    layer.weight = nn.Parameter(torch.empty(shape))
    with pytest.raises(NotApplicableError, match=r"it has no entries \(shape .*\)\. Exclude the layer"):
        P.attach(layer, "weight", MEMBERS[member].make())
    assert not P.is_parametrized(layer)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
@pytest.mark.parametrize("package", [nn.utils, nn.utils.parametrizations], ids=["old", "new"])
def test_a_weight_that_torch_parametrizes_is_refused(norm: str, package: object) -> None:
    layer = getattr(package, norm)(make("linear"))
    with pytest.raises(AlreadyAppliedError, match="torch's own"):
        P.attach(layer, "weight", P.Sphere())


TORCHS = {
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
    "register_parametrization": lambda layer: parametrize.register_parametrization(layer, "weight", nn.Tanh()),
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "pruning": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
    "delattr": lambda layer: delattr(layer, "weight"),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.parametrize("kind", ["linear", "conv2d"])
@pytest.mark.parametrize("how", ["itself", "copied", "loaded"])
def test_torch_cannot_replace_a_parametrized_tensor(name: str, kind: str, how: str) -> None:
    layer = make(kind)
    P.attach(layer, "weight", P.Sphere())
    if how == "copied":
        layer = copy.deepcopy(layer)
    elif how == "loaded":
        layer.load_state_dict(copy.deepcopy(layer.state_dict()), assign=True)
    before = [(key, id(p)) for key, p in layer.named_parameters()]
    state = {key: value.clone() for key, value in layer.state_dict().items()}
    own, attributes, x = type(layer), set(vars(layer)), sample(layer)
    expected = layer(x)
    with pytest.raises(NotApplicableError, match=r"parametrizes it, and torch's .* cannot be added. Fold it first"):
        TORCHS[name](layer)
    assert type(layer) is own
    assert set(vars(layer)) == attributes
    assert [(key, id(p)) for key, p in layer.named_parameters()] == before
    assert all(torch.equal(value, state[key]) for key, value in layer.state_dict().items())
    assert torch.equal(layer(x), expected)
    assert not layer._forward_pre_hooks


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


# --- read and assign --------------------------------------------------------------------------------


@ONE
def test_no_read_is_stale(member: str) -> None:
    """Nothing is cached between reads: a step, a tick, a load and a hand-made change all show at once."""
    layer = parametrized(member, "linear")
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


@pytest.mark.grid(3)
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
    layer, other = parametrized(member, "linear"), parametrized(member, "linear", seed=6)
    given = nn.Parameter(other.weight.detach().clone())
    layer.weight = given
    assert layer._parameters["weight"] is given
    torch.testing.assert_close(layer.weight, other.weight)


@ONE
def test_a_parameter_that_cannot_be_reached_is_refused(member: str) -> None:
    """torch.nn.utils.fuse_conv_bn_eval assigns one; the nearest weight would be another function."""
    layer, norm = parametrized(member, "conv2d").eval(), nn.BatchNorm2d(6).eval()
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 3, 6))
    x, state = sample(layer), copy.deepcopy(layer.state_dict())
    expected = norm(layer(x))
    if member.startswith("WeightNorm") or "learn_gain=True" in member or "at_most=50" in member:
        torch.testing.assert_close(nn.utils.fuse_conv_bn_eval(layer, norm)(x), expected, rtol=1e-4, atol=1e-5)
    else:
        with pytest.raises(InvalidArgumentError, match=r"found values that .* would change. Fold the layer first"):
            nn.utils.fuse_conv_bn_eval(layer, norm)
    assert all(torch.equal(value, state[key]) for key, value in layer.state_dict().items())


def test_another_shape_is_refused() -> None:
    layer = make("linear")
    P.attach(layer, "weight", P.Sphere())
    with pytest.raises(InvalidArgumentError, match=r"tensor of its shape; found \(1, 6\) for \(4, 6\)"):
        layer.weight = torch.ones(1, 6)


@ONE
@pytest.mark.parametrize("name", ["linear", "conv2d", "grouped transposed conv2d"])
def test_reset_equals_a_new_layer(member: str, name: str) -> None:
    layer = parametrized(member, name)
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


def two_layers(member: str, device: str = "cpu") -> nn.Module:
    with torch.device(device):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2))
    for layer in (model[0], model[2]):
        P.attach(layer, "weight", MEMBERS[member].make())
    return model


@ONE
def test_meta_then_reset_equals_direct(member: str) -> None:
    model = two_layers(member, "meta")
    assert model[0].weight.is_meta
    model.to_empty(device="cpu")
    torch.manual_seed(1)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    torch.manual_seed(1)
    expected = two_layers(member)
    x = seeded(2, 3, 8, 8)
    assert torch.equal(model(x), expected(x))


@ONE
def test_children_reset_first(member: str) -> None:
    """`model.apply` visits a parametrization before its layer."""
    model = two_layers(member, "meta").to_empty(device="cpu")
    model.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)
    assert P.parametrization_of(model[0]).holds(model[0].weight)


@ONE
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_an_unset_model_raises(member: str, how: str) -> None:
    model = two_layers(member, "meta").to_empty(device="cpu")
    parametrization = P.parametrization_of(model[0])
    if not [*parametrization.parameters(), *parametrization.buffers()]:
        return
    if how == "compiled":
        torch._dynamo.reset()
        model = torch.compile(model, backend="aot_eager")
    with pytest.raises(UnsetStateError, match=r"allocated by to_empty\(\) and is uninitialised"):
        model(seeded(2, 3, 8, 8))


@pytest.mark.grid(3)
@ONE
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("source", ["own", "plain"])
def test_meta_then_load(member: str, assign: bool, source: str) -> None:
    expected = two_layers(member)
    state = expected.state_dict() if source == "own" else P.plain_state_dict(expected.state_dict())
    model = two_layers(member, "meta")
    if not assign:
        model.to_empty(device="cpu")
    model.load_state_dict(state, assign=assign)
    x = seeded(2, 3, 8, 8)
    torch.testing.assert_close(model(x), expected(x))
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in model.parameters())


# --- recurrent layers and attention, whose forwards do more than read an attribute ------------------


RECURRENT = {"RNN": nn.RNN, "LSTM": nn.LSTM, "GRU": nn.GRU}


def plain_twin(layer: nn.Module, names: list[str]) -> nn.Module:
    twin = copy.deepcopy(layer)
    for name in names:
        P.detach(twin, name, keep="weight")
    return twin


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_use_the_effective_weight(kind: str) -> None:
    layer = RECURRENT[kind](3, 5, num_layers=2, bidirectional=True)
    names = [name for name, _ in layer.named_parameters() if name.startswith("weight")]
    plain = copy.deepcopy(layer)
    for name in names:
        P.attach(layer, name, P.Sphere(radius=0.5))
    x = seeded(7, 2, 3)
    expected = plain_twin(layer, names)(x)[0]
    assert torch.equal(layer(x)[0], expected)
    assert not torch.allclose(layer(x)[0], plain(x)[0])
    layer(x)[0].sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    with torch.no_grad():
        layer.weight_hh_l0_raw = layer._parameters["weight_hh_l0"].add_(1.0)
    assert not torch.allclose(layer(x)[0], expected)


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_copy_move_and_come_back(kind: str) -> None:
    layer = RECURRENT[kind](3, 5)
    P.attach(layer, "weight_hh_l0", P.WeightNorm())
    x = seeded(7, 2, 3)
    layer(x)[0].sum().backward()
    expected = layer(x)[0]
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x)[0], expected)
    layer.double()
    torch.testing.assert_close(layer(x.double())[0].float(), expected)
    P.detach(layer, "weight_hh_l0", keep="weight")
    assert type(layer) is RECURRENT[kind]
    assert all(a is b for a, b in zip(layer._flat_weights, layer.parameters(), strict=True))
    torch.testing.assert_close(layer(x.double())[0].float(), expected)


def test_recurrent_cells() -> None:
    cell = nn.LSTMCell(3, 4)
    P.attach(cell, "weight_hh", P.Sphere())
    x = seeded(2, 3)
    state = (seeded(2, 4), seeded(2, 4, seed=1))
    assert torch.equal(cell(x, state)[0], plain_twin(cell, ["weight_hh"])(x, state)[0])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_attention_on_both_paths(training: bool, grad: bool) -> None:
    """In evaluation without gradients a fused kernel takes the weights; it reads the attributes."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).train(training)
    plain = copy.deepcopy(layer)
    P.attach(layer.self_attn, "in_proj_weight", P.Sphere(radius=2.0))
    for part in (layer.self_attn.out_proj, layer.linear1, layer.linear2):
        P.attach(part, "weight", P.Sphere(radius=2.0))
    folded = copy.deepcopy(layer)
    P.detach(folded.self_attn, "in_proj_weight", keep="weight")
    for part in (folded.self_attn.out_proj, folded.linear1, folded.linear2):
        P.detach(part, "weight", keep="weight")
    x = seeded(3, 4, 8)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(layer(x), folded(x))
        assert not torch.allclose(layer(x), plain(x))


def test_attention_resets_as_its_class_does() -> None:
    layer = nn.MultiheadAttention(8, 2)
    P.attach(layer, "in_proj_weight", P.Sphere())
    layer.reset_parameters()
    assert P.parametrization_of(layer, "in_proj_weight").holds(layer.in_proj_weight)
    assert layer(seeded(3, 2, 8), seeded(3, 2, 8), seeded(3, 2, 8))[0].shape == (3, 2, 8)
