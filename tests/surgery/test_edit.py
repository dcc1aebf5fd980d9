"""The transaction, and undo after what people do between an edit and its undo."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import nn

import gonio
from catalog import VERBS, VerbCase, seeded
from gonio import init
from gonio import nn as gnn
from gonio import parametrizations as P
from gonio.surgery import Edit, UndoError, fold_, sites
from laws.snapshot import Snapshot, assert_restored
from laws.support import over, perturbed, reloaded
from laws.test_verbs import model_of


def zeroed(model: nn.Module) -> Edit:
    edit = Edit(model, "demo_")
    edit.set_data_(model[0].weight, torch.zeros(2, 2))
    return edit


def test_the_registry_of_edits_keeps_no_model_alive() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    edited, gone = zeroed(model).done(), weakref.ref(model)
    del model, edited
    gc.collect()
    assert gone() is None


def test_undo_does_not_read_other_models() -> None:
    """Another thread may be changing them: their modules are then not to be iterated."""

    class Changing(nn.Sequential):
        def named_modules(self, *arguments: object, **options: object) -> Iterator[tuple[str, nn.Module]]:
            if changing:
                raise RuntimeError("dictionary changed size during iteration")
            return super().named_modules(*arguments, **options)

    changing = False
    other, model = Changing(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    weight = model[0].weight.detach().clone()
    edits = [zeroed(other).done(), zeroed(model).done()]
    changing = True
    edits[1].undo_()
    assert torch.equal(model[0].weight, weight)


network, X = VERBS[0].model, VERBS[0].inputs()


@over(VERBS)
def test_a_model_that_was_moved_meanwhile(case: VerbCase) -> None:
    """What an edit took out of the model follows where the model went."""
    model, x = model_of(case), case.inputs().double()
    twin = copy.deepcopy(model).double()
    before = Snapshot.of(twin, x)
    edited = case.apply(model)
    model.double()
    edited.undo_()
    after = Snapshot.of(model, x)
    assert {tensor.dtype for _, tensor in after.state} <= {torch.float64, torch.int64}
    assert [type(m) for m in model.modules()] == [kind for _, kind in before.classes]
    for (key, old), (_, new) in zip(before.state, after.state, strict=True):
        torch.testing.assert_close(new, old, rtol=1e-6, atol=1e-7, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("trip", [copy.deepcopy, partial(reloaded, weights_only=False)], ids=["deepcopy", "torch.save"])
@over(VERBS)
def test_a_copy_of_a_model_with_its_handle_is_complete_and_cannot_undo(case: VerbCase, trip: Callable) -> None:
    """As a module has it that edits itself, and of which an average, a checkpoint or another process gets a copy."""
    model, x = model_of(case), case.inputs()
    before = Snapshot.of(model, x)
    model.edited = case.apply(model)
    twin = trip(model)
    assert str(twin.edited) == str(model.edited)
    assert list(twin.state_dict()) == list(model.state_dict())
    assert all(torch.equal(mine, own) for mine, own in zip(twin.parameters(), model.parameters(), strict=True))
    with pytest.raises(UndoError, match="this is a copy of its record"):
        twin.edited.undo_()
    model.edited.undo_()
    del model.edited
    assert_restored(before, Snapshot.of(model, x))


@over(VERBS)
def test_hooks_that_were_set_meanwhile_stay(case: VerbCase) -> None:
    model = model_of(case)
    edited = case.apply(model)
    seen = []
    classifier = model[-1]
    handle = classifier.register_forward_hook(lambda module, inputs, output: seen.append(1))
    edited.undo_()
    model(case.inputs())
    assert (len(seen) == 1) == (model[-1] is classifier), "the hook is gone"
    handle.remove()


def part_and_whole() -> tuple[nn.Module, nn.Module]:
    whole = nn.Sequential(network(), nn.ReLU())
    return whole[0], whole


def sharing() -> tuple[nn.Module, nn.Module]:
    shared = nn.Linear(3, 3)
    return nn.Sequential(shared, nn.ReLU()), nn.Sequential(nn.Tanh(), shared)


@pytest.mark.parametrize("make", [part_and_whole, lambda: part_and_whole()[::-1], sharing])
def test_edits_that_meet_in_a_layer_are_undone_latest_first_and_once(make) -> None:
    one, other = make()
    first, second = gonio.init_(one, init.xavier_, gain=1.0), gonio.parametrize_(other, P.Sphere())
    with pytest.raises(UndoError, match="the later edit parametrize_ still is in force"):
        first.undo_()
    second.undo_()
    with pytest.raises(UndoError, match=r"undo_: cannot undo parametrize_; it was undone before"):
        second.undo_()
    first.undo_()


class Wrapped(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("edit", "change", "message"),
    [
        (
            lambda m: gonio.swap_(m, gnn.SwitchableNorm2d.from_batch_norm),
            lambda m: m.__setitem__(1, nn.Identity()),
            "another module was put in the place of '1' of a Sequential since",
        ),
        (
            lambda m: gonio.parametrize_(m, P.Sphere()),
            lambda m: setattr(m[4], "__class__", Wrapped),
            "a ParametrizedLinear became a Wrapped since",
        ),
        (
            lambda m: gonio.init_(m, init.xavier_),
            lambda m: m.load_state_dict({k: t.clone() for k, t in m.state_dict().items()}, assign=True),
            "a Parameter of the layers it changed is another object now",
        ),
        (  # .to("meta") makes new Parameter objects: the replaced layer holds the old ones
            lambda m: gonio.swap_(m, gnn.SwitchableNorm2d.from_batch_norm),
            lambda m: m.to("meta"),
            "is another object now",
        ),
    ],
    ids=["module", "class", "Parameters", "meta"],
)
def test_what_others_changed_since_is_not_overwritten(edit, change, message: str) -> None:
    model = network()
    edited = edit(model)
    change(model)
    before = list(model.named_modules()), list(map(type, model.modules())), list(map(id, model.parameters()))
    with pytest.raises(UndoError, match=message):
        edited.undo_()
    assert before == (list(model.named_modules()), list(map(type, model.modules())), list(map(id, model.parameters())))


def test_edits_of_unrelated_models_do_not_know_of_each_other() -> None:
    one, other = network(), network()
    before = one(X)
    first, _ = gonio.init_(one, init.xavier_), gonio.init_(other, init.xavier_)
    changed = other(X)
    first.undo_()
    assert torch.equal(one(X), before)
    assert torch.equal(other(X), changed)


@pytest.mark.parametrize("inverse", ["works", "fails"])
def test_an_exception_rolls_back_in_reverse_order_even_if_an_inverse_fails(inverse: str) -> None:
    model = network()
    earlier = gonio.init_(model, init.xavier_, gain=1.0)
    first, weight, undone = model[4], model[0].weight.detach().clone(), []

    def undo() -> None:
        undone.append(type(model[4]) is nn.Linear)  # the later change was undone before
        if inverse == "fails":
            raise OSError("disk")

    def change(edit: Edit) -> None:
        edit.set_data_(model[0].weight, torch.zeros_like(weight))
        edit.on_undo(undo)
        edit.replace_(sites(model)[5], nn.Tanh(), what="Tanh")
        raise RuntimeError("in the middle")

    kind, message = (OSError, "disk") if inverse == "fails" else (RuntimeError, "in the middle")
    with pytest.raises(kind, match=message), Edit(model, "demo_") as edit:
        change(edit)
    assert undone == ([True, True] if inverse == "fails" else [True])  # it runs once more before the next one
    assert torch.equal(model[0].weight, weight)
    assert model[4] is first
    earlier.undo_()  # the failed edit does not count as a later one


def test_edits_of_edits_taken_back_restore_everything() -> None:
    model = perturbed(network()).eval()
    before = Snapshot.of(model, X)
    done = [
        gonio.init_(model, init.orthogonal_, gain=1.0),
        gonio.parametrize_(model, P.WeightNorm()),
        fold_(model, example=X),
        gonio.swap_(model, gnn.DecoupledConv2d.from_conv),
    ]
    for edited in reversed(done):
        edited.undo_()
    assert_restored(before, Snapshot.of(model, X))


def test_a_module_dict_with_nothing_in_a_slot() -> None:
    block = nn.Module()
    block.register_module("proj", None)
    block.conv = nn.Conv2d(2, 2, 1)
    model = nn.ModuleDict({"a": block})
    edited = gonio.swap_(model, gnn.DecoupledConv2d.from_conv)
    assert [site.path for site in sites(model)] == ["", "a", "a.conv"]
    edited.undo_()
    assert list(block._modules) == ["proj", "conv"]
    assert block.proj is None


@pytest.mark.parametrize(
    "edits",
    [
        [lambda m: gonio.init_(m, init.orthogonal_, gain=1.0)],
        [lambda m: gonio.parametrize_(m, P.WeightNorm())],
        [lambda m: gonio.parametrize_(m, P.WeightNorm()), lambda m: fold_(m, example=seeded(4, 3))],
    ],
    ids=["init_", "parametrize_", "fold_"],
)
def test_a_model_that_is_itself_one_layer(edits) -> None:
    model = nn.Linear(3, 2)
    before = Snapshot.of(model, seeded(4, 3))
    for edited in reversed([edit(model) for edit in edits]):
        edited.undo_()
    assert_restored(before, Snapshot.of(model, seeded(4, 3)))


def test_an_undo_does_not_bring_back_parameters_that_a_load_has_replaced() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    edited = gonio.parametrize_(model, gonio.parametrizations.Sphere())
    state = {name: value + 1 if name == "0.weight" else value for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    loaded = model[0].weight.detach().clone()
    with pytest.raises(UndoError, match="is another object now"):
        edited.undo_()
    assert torch.equal(model[0].weight, loaded)


def test_an_undo_of_a_tensor_of_another_shape_is_refused_before_it_changes_others() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    edited = gonio.init_(model, gonio.init.orthogonal_)
    model[0].weight.data = model[0].weight.data[:2].clone()
    now = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UndoError, match="a tensor that it changed has another shape now"):
        edited.undo_()
    assert all(torch.equal(value, now[name]) for name, value in model.state_dict().items())
