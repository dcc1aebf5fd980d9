"""The transaction, and undo after what people do between an edit and its undo."""

from __future__ import annotations

import copy
import gc
import weakref

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
from laws.support import over, perturbed
from laws.test_verbs import model_of


def zeroed(model: nn.Module) -> Edit:
    edit = Edit(model, "demo_")
    edit.set_data_(model[0].weight, torch.zeros(2, 2))
    return edit


def test_a_rolled_back_edit_does_not_stand_in_the_way_of_others() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    weight = model[0].weight.detach().clone()
    first = zeroed(model).done()
    with pytest.raises(RuntimeError, match="stop"), Edit(model, "second_"):
        raise RuntimeError("stop")
    first.undo_()
    assert torch.equal(model[0].weight, weight)


def test_undo_twice_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    edited = Edit(model, "demo_").done()
    edited.undo_()
    with pytest.raises(UndoError, match=r"undo_: cannot undo demo_; it was undone before"):
        edited.undo_()


def test_the_registry_of_edits_keeps_no_model_alive() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    edited, gone = zeroed(model).done(), weakref.ref(model)
    del model, edited
    gc.collect()
    assert gone() is None


def test_the_table_lists_changes_and_notes() -> None:
    edit = Edit(nn.Sequential(nn.Linear(2, 2)), "demo_")
    edit.changed("layer1.conv", "something")
    edit.changed("fc", "another thing")
    edit.note("an assumption")
    assert str(edit.done()).splitlines() == [
        "demo_: 2 modules",
        "  layer1.conv  something",
        "  fc           another thing",
        "  note: an assumption",
    ]


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


def test_parameters_that_moved_by_becoming_others_are_said() -> None:
    """`.to("meta")` makes new Parameter objects: the replaced layer holds the old ones."""
    model = network()
    edited = gonio.swap_(model, gnn.SwitchableNorm2d.from_batch_norm)
    model.to("meta")
    with pytest.raises(UndoError, match="is another object now"):
        edited.undo_()


def test_edits_of_a_part_and_of_the_whole_are_undone_latest_first() -> None:
    model = nn.Sequential(network(), nn.ReLU())
    part = gonio.init_(model[0], init.orthogonal_, gain=1.0)
    whole = gonio.init_(model, init.orthogonal_, gain=2.0, seed=1)
    with pytest.raises(UndoError, match="the later edit init_ still is in force"):
        part.undo_()
    part_again = gonio.parametrize_(model[0], P.Sphere())
    with pytest.raises(UndoError, match="the later edit parametrize_ still is in force"):
        whole.undo_()
    part_again.undo_()
    whole.undo_()
    part.undo_()


def test_edits_of_models_that_share_a_layer_count_as_one() -> None:
    shared = nn.Linear(3, 3)
    one, other = nn.Sequential(shared, nn.ReLU()), nn.Sequential(nn.Tanh(), shared)
    first, second = gonio.init_(one, init.xavier_), gonio.parametrize_(other, P.Sphere())
    with pytest.raises(UndoError, match="the later edit parametrize_"):
        first.undo_()
    second.undo_()
    first.undo_()


def test_edits_of_unrelated_models_do_not_know_of_each_other() -> None:
    one, other = network(), network()
    before = one(X)
    first, _ = gonio.init_(one, init.xavier_), gonio.init_(other, init.xavier_)
    changed = other(X)
    first.undo_()
    assert torch.equal(one(X), before)
    assert torch.equal(other(X), changed)


def test_a_module_that_was_put_there_by_hand_is_not_overwritten() -> None:
    model = network()
    edited = gonio.swap_(model, gnn.SwitchableNorm2d.from_batch_norm)
    model[1] = nn.Identity()
    with pytest.raises(UndoError, match="another module was put in the place of '1' of a Sequential since"):
        edited.undo_()
    assert type(model[1]) is nn.Identity


def test_a_class_that_was_changed_by_others_is_not_overwritten() -> None:
    class Wrapped(nn.Linear):
        pass

    model = network()
    edited = gonio.parametrize_(model, P.Sphere())
    kind = type(model[4])
    model[4].__class__ = Wrapped
    with pytest.raises(UndoError, match="a ParametrizedLinear became a Wrapped since"):
        edited.undo_()
    model[4].__class__ = kind
    edited.undo_()


def test_parameters_that_were_exchanged_are_not_missed_silently() -> None:
    model = network()
    edited = gonio.init_(model, init.xavier_)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    with pytest.raises(UndoError, match="a Parameter of the layers it changed is another object now"):
        edited.undo_()
    assert torch.equal(model[0].weight, state["0.weight"])


@pytest.mark.parametrize("inverse", ["works", "fails"])
def test_an_exception_rolls_back_in_reverse_order_even_if_an_inverse_fails(inverse: str) -> None:
    model = network()
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
    assert undone == [True]
    assert torch.equal(model[0].weight, weight)
    assert model[4] is first


def test_modes_inside_a_wrapped_layer_stay() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
    model[0][1].eval()
    edited = gonio.swap_(model, lambda block: nn.Sequential(block), where="0")
    assert [m.training for m in model[0].modules()] == [True, True, True, False]
    edited.undo_()
    assert [m.training for m in model.modules()] == [True, True, True, False]


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


def test_a_copy_is_not_touched_by_the_undo_of_the_original() -> None:
    model = network()
    edited = gonio.parametrize_(model, P.Sphere())
    twin = copy.deepcopy(model)
    expected = twin(X)
    edited.undo_()
    assert torch.equal(twin(X), expected)
    assert P.is_parametrized(twin[0])
