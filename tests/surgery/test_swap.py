"""`swap_`: what is replaced, what is refused, and layers that are read instead of called."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gonio
from catalog import VERBS, seeded
from foreign import timm
from gonio import nn as gnn
from gonio import parametrizations as P
from gonio.errors import AlreadyAppliedError, InvalidArgumentError, NoMatchError, NotApplicableError
from laws.snapshot import Snapshot, assert_restored
from surgery.net import Doubled, Net, batch_only

TOKENS = seeded(2, 5, 8)
SPHERE = {"magnitude": gnn.magnitude.Sphere()}
network = VERBS[0].model


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: gonio.swap_(m, gnn.DecoupledConv2d.from_conv), "swap_: cannot be applied twice to '0'; found a Dec"),
        (
            lambda m: gonio.parametrize_(m, P.Sphere(), where="4"),
            "twice to '4'; found Sphere on 'weight' there already",
        ),
    ],
)
def test_twice_is_refused(edit, message: str) -> None:
    model = network()
    edit(model)
    with pytest.raises(AlreadyAppliedError, match=message):
        edit(model)


CONVERT = gnn.DecoupledConv2d.from_conv
OTHER = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("make", "factory", "options", "error", "message"),
    [
        (network, CONVERT, {"where": nn.Linear}, NoMatchError, r"it is a Linear, not a Conv2d.*Suitable modules: 0"),
        (lambda: nn.Conv2d(1, 1, 1), CONVERT, {}, NotApplicableError, r"cannot replace the model: .* Wrap the model"),
        (
            network,
            lambda layer: None,
            {"where": "0"},
            InvalidArgumentError,
            r"makes modules \(.*found a NoneType for '0'",
        ),
        (
            network,
            lambda layer: layer,
            {"where": "0"},
            InvalidArgumentError,
            r"makes another layer \(.*found the layer that it was given, for 0\. Return one",
        ),
        (network, gnn.DecoupledConv2d, {}, InvalidArgumentError, r"is a layer class, .* Use DecoupledConv2d.from_conv"),
        (network, nn.ReLU, {}, InvalidArgumentError, r"found ReLU, .* Pass a function, .* lambda layer: ReLU"),
        (network, CONVERT, {"optimizer": OTHER}, InvalidArgumentError, "an optimizer that holds none of them"),
    ],
    ids=["another kind", "the model", "no module", "the same", "a class with from_", "a class", "optimizer"],
)
def test_what_cannot_be_swapped_is_refused_and_nothing_changes(make, factory, options, error, message: str) -> None:
    model = make()
    before = list(model.named_modules())
    with pytest.raises(error, match=message):
        gonio.swap_(model, factory, **options)
    assert list(model.named_modules()) == before


def test_a_layer_that_the_factory_returns_stays() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    wide = model[1]
    done = gonio.swap_(model, lambda old: nn.Linear(3, 4) if old.in_features == 3 else old, where=nn.Linear)
    assert [change.path for change in done.changes] == ["0"]
    assert "1 stays: the factory returns it as it is" in str(done)
    assert model[1] is wide
    done.undo_()


def test_what_an_edit_does_not_reach_is_said() -> None:
    model = Net(lambda m, x: m.stages[0](x), first=nn.Conv2d(1, 1, 1))
    model.stages = [model.first]
    model.first.register_forward_hook(lambda module, inputs, output: None)
    text = str(gonio.swap_(model, CONVERT))
    assert "stages still holds the module that was first: no edit reaches it there" in text
    assert "first: its forward hooks stayed with the replaced layer" in text


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_that_stay_with_the_replaced_layer_are_named(register: str) -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1))
    getattr(model[1], register)(lambda *_: None)
    notes = gonio.swap_(model, CONVERT).notes
    assert [note for note in notes if "hooks" in note] == ["1: its backward hooks stayed with the replaced layer"]


def test_modes_inside_a_wrapped_layer_stay() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
    model[0][1].eval()
    gonio.swap_(model, lambda block: nn.Sequential(block), where="0")
    assert [m.training for m in model[0].modules()] == [True, True, True, False]


@pytest.mark.parametrize("annotation", [nn.Linear, nn.Linear | None, nn.Module, Any, Callable[..., Any], object, None])
def test_a_class_that_takes_a_layer_is_a_converter(annotation):
    class Around(nn.Module):
        def __init__(self, inner) -> None:
            super().__init__()
            self.inner = inner

    if annotation is not None:
        Around.__init__.__annotations__["inner"] = annotation
    model = network()
    gonio.swap_(model, Around, where=nn.Linear)
    assert [path for path, m in model.named_modules() if isinstance(m, Around)] == ["4", "6"]


def encoder(layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=True).eval()


def slow_and_fast(model: nn.Module, **arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """The output with the fast path forbidden, and as torch chooses."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            slow = model(TOKENS, **arguments)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        return slow, model(TOKENS, **arguments)


def test_an_attention_output_projection_is_left_out() -> None:
    model = encoder()
    text = str(gonio.swap_(model, gnn.DecoupledLinear.from_linear, **SPHERE))
    assert (
        "self_attn.out_proj, layers.1.self_attn.out_proj stay: its parent reads its weight and does not call it" in text
    )
    assert isinstance(model.layers[0].linear1, gnn.DecoupledLinear)
    with pytest.raises(NoMatchError, match=r"out_proj \(its parent reads its weight"):
        gonio.swap_(encoder(), gnn.DecoupledLinear.from_linear, where="*.out_proj")


@pytest.mark.parametrize(
    "arguments", [{}, {"src_key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2])}]
)
def test_the_fast_path_of_a_transformer_does_not_pass_by_what_was_put_in(arguments) -> None:
    model = encoder()
    before = Snapshot.of(model, TOKENS)
    plain, _ = slow_and_fast(model, **arguments)
    edited = gonio.swap_(model, gnn.DecoupledLinear.from_linear, where="*.linear1", **SPHERE)
    slow, fast = slow_and_fast(model, **arguments)
    assert (slow - plain).abs().max() > 1e-3
    torch.testing.assert_close(fast, slow)
    assert "the fast path of TransformerEncoderLayer is off" in str(edited)
    edited.undo_()
    assert_restored(before, Snapshot.of(model, TOKENS))


def test_a_subclass_that_the_factory_refuses_stays_or_is_an_error_where_it_was_asked_for() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 1), Doubled(1, 1, 1))
    with pytest.raises(NotApplicableError, match="this subclass of Conv2d computes something else") as caught:
        gonio.swap_(model, gnn.DecoupledConv2d.from_conv, where="type:Conv2d")
    assert caught.value.__notes__ == ["at 1"]
    assert type(model[0]) is nn.Conv2d
    text = str(gonio.swap_(model, gnn.DecoupledConv2d.from_conv))
    assert "1 stays: from_conv: cannot be applied to 'Doubled'; this subclass of Conv2d computes something else" in text
    with pytest.raises(NotApplicableError, match="computes something else"):
        gonio.swap_(nn.Sequential(Doubled(1, 1, 1)), gnn.DecoupledConv2d.from_conv)


@pytest.mark.parametrize("where", ["0", "1"])
def test_a_parametrized_layer_is_not_replaced_without_its_parametrization(where: str) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Conv2d(2, 2, 1))
    gonio.parametrize_(model, P.Sphere(), where="0")
    torch.nn.utils.parametrizations.weight_norm(model[1])
    with pytest.raises(NotApplicableError, match="its weight is computed by a parametrization"):
        gonio.swap_(model, gnn.DecoupledConv2d.from_conv, where=where)


def test_a_layer_inside_one_that_is_dropped_is_an_error() -> None:
    def either(module: nn.Sequential | nn.Linear) -> nn.Module:
        return nn.Sequential(nn.ReLU()) if isinstance(module, nn.Sequential) else nn.Linear(2, 2)

    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    message = r"cannot replace layer '0\.0' \(Linear\): a selected layer around it was replaced by one that does not"
    with pytest.raises(NotApplicableError, match=message):
        gonio.swap_(model, either, where=r"re:0.*")
    assert type(model[0][0]) is nn.Linear


def norm_act(**options: Any) -> nn.Module:
    timm()
    from timm.layers import BatchNormAct2d

    layer = BatchNormAct2d(4, eps=1e-3, **options)
    layer.running_mean.copy_(seeded(4))
    layer.running_var.copy_(seeded(4, seed=1).exp())
    return layer


def timm_network() -> nn.Sequential:
    """Norms of timm with their activation inside."""
    first, second = norm_act(act_layer=nn.SiLU), norm_act(apply_act=False)
    return nn.Sequential(nn.Conv2d(3, 4, 1), first, nn.Conv2d(4, 4, 1), second).eval()


X = seeded(2, 3, 5, 5)


@pytest.mark.parametrize(
    ("factory", "options", "made"),
    [(gnn.SwitchableNorm2d.from_batch_norm, {}, "SwitchableNorm2d"), (gnn.to_group_norm, {"groups": 2}, "GroupNorm")],
)
def test_each_becomes_a_norm_and_its_activation_and_comes_back(factory, options, made: str) -> None:
    model = timm_network()
    before, weight = Snapshot.of(model, X), model[1].weight
    edited = gonio.swap_(model, factory, where=nn.BatchNorm2d, **options)
    assert f"1  BatchNormAct2d → {made} + SiLU" in str(edited)
    assert [type(part).__name__ for part in (*model[1], model[3])] == [made, "SiLU", made]
    assert (model[1][0].weight is weight, model[1][0].eps) == (True, 1e-3)
    model(X)
    edited.undo_()
    assert_restored(before, Snapshot.of(model, X))


@torch.no_grad()
def test_a_mixture_of_batch_statistics_alone_is_the_same_function() -> None:
    model, x = timm_network().double(), X.double()
    expected = model(x)
    gonio.swap_(model, gnn.SwitchableNorm2d.from_batch_norm)
    for layer in (model[1][0], model[3]):
        batch_only(layer)
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)


def test_a_factory_of_ones_own_gets_the_layer_as_it_is() -> None:
    model = timm_network()
    taken = []
    gonio.swap_(model, lambda layer: taken.append(layer) or copy.deepcopy(layer), where="1")
    assert type(taken[0]).__name__ == type(model[1]).__name__ == "BatchNormAct2d"


@pytest.mark.parametrize("training", [False, True])
def test_modes_and_gradients_stay(training: bool) -> None:
    model = timm_network().requires_grad_(training).train(training)
    gonio.swap_(model, gnn.SwitchableNorm2d.from_batch_norm)
    assert all(module.training is training for module in model.modules())
    assert all(parameter.requires_grad is training for parameter in model.parameters())


def sparse_layer() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(torch.eye(4).to_sparse(), requires_grad=False)
    return layer


@pytest.mark.parametrize(
    ("make", "why"),
    [(lambda: nn.Linear(4, 4, dtype=torch.complex64), "its weight is complex"),
     (lambda: nn.LazyLinear(4), "it is lazy; run one batch first"),
     (sparse_layer, "its weight is stored as sparse_coo")],
)  # fmt: skip
def test_a_layer_whose_weight_cannot_be_shared_stays(make: Callable[[], nn.Module], why: str) -> None:
    model = nn.Sequential(make(), nn.Linear(4, 4))
    assert f"0 stays: {why}" in str(gonio.swap_(model, gnn.DecoupledLinear.from_linear))
    with pytest.raises(NoMatchError, match=why):
        gonio.swap_(model, gnn.DecoupledLinear.from_linear, where="0")


@pytest.mark.parametrize("factory", [gnn.to_group_norm, gnn.SwitchableNorm2d.from_batch_norm])
def test_the_same_swap_twice_says_so(factory: Callable[..., nn.Module]) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    edit = gonio.swap_(model, factory)
    with pytest.raises(
        AlreadyAppliedError, match=r"^swap_: cannot be applied twice to '1'; found a \w+ of the same factory"
    ):
        gonio.swap_(model, factory)
    with pytest.raises(NoMatchError, match="matches no suitable module"):
        gonio.swap_(model, factory, where="2")
    edit.undo_()
    gonio.swap_(model, factory)


def test_a_layer_of_the_same_name_is_told_from_that_of_torch() -> None:
    class Linear(nn.Module):
        pass

    with pytest.raises(NoMatchError, match=r"it is an? [\w.]*test_swap.Linear, not a Linear"):
        gonio.swap_(nn.Sequential(Linear()), gnn.DecoupledLinear.from_linear)


def test_a_layer_is_no_factory() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    with pytest.raises(InvalidArgumentError, match=r"found an Identity, which is a layer\. .* lambda layer: Identity"):
        gonio.swap_(model, nn.Identity(), where=nn.BatchNorm2d)
    assert type(model[1]) is nn.BatchNorm2d
    gonio.swap_(model, lambda layer: nn.Identity(), where=nn.BatchNorm2d)
    assert type(model[1]) is nn.Identity
