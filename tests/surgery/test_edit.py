from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from gonio.surgery import Edit, UndoError, sites


def site(model, path):
    return next(s for s in sites(model) if s.path == path)


def change_and_fail(model):
    with Edit(model, "demo_") as edit:
        edit.set_data_(model[0].weight, torch.zeros(2, 2))
        edit.replace_(site(model, "0"), nn.Tanh(), what="Tanh")
        raise RuntimeError("in the middle")


def test_an_exception_rolls_everything_back_in_reverse_order():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    first, weight = model[0], model[0].weight.detach().clone()
    with pytest.raises(RuntimeError, match="in the middle"):
        change_and_fail(model)
    assert model[0] is first
    assert torch.equal(model[0].weight, weight)


def test_a_rolled_back_edit_does_not_stand_in_the_way_of_others():
    model = nn.Sequential(nn.Linear(2, 2))
    with Edit(model, "first_") as edit:
        edit.replace_(site(model, "0"), nn.Tanh(), what="Tanh")
    first = edit.done()
    with pytest.raises(RuntimeError, match="stop"), Edit(model, "second_"):
        raise RuntimeError("stop")
    first.undo_()
    assert isinstance(model[0], nn.Linear)


def test_a_tied_module_is_replaced_and_restored_under_each_name():
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    with Edit(model, "demo_") as edit:
        edit.replace_(site(model, "0"), nn.Tanh(), what="Tanh")
    assert model[0] is model[2]
    assert isinstance(model[0], nn.Tanh)
    edit.done().undo_()
    assert model[0] is model[2] is shared


def test_undo_twice_is_refused():
    model = nn.Sequential(nn.Linear(2, 2))
    edited = Edit(model, "demo_").done()
    edited.undo_()
    with pytest.raises(UndoError, match=r"undo_: cannot undo demo_; it was undone before"):
        edited.undo_()


def test_edits_are_undone_latest_first():
    model = nn.Sequential(nn.Linear(2, 2))
    first, second = Edit(model, "first_").done(), Edit(model, "second_").done()
    with pytest.raises(UndoError, match="the later edit second_ still is in force"):
        first.undo_()
    second.undo_()
    first.undo_()


def test_the_registry_of_edits_keeps_no_model_alive():
    model = nn.Sequential(nn.Linear(2, 2))
    with Edit(model, "demo_") as edit:
        edit.set_data_(model[0].weight, torch.zeros(2, 2))
    edited = edit.done()
    gone = weakref.ref(model)
    del model, edit, edited
    gc.collect()
    assert gone() is None


def test_the_table_lists_changes_and_notes():
    model = nn.Sequential(nn.Linear(2, 2))
    edit = Edit(model, "demo_")
    edit.changed("layer1.conv", "something")
    edit.changed("fc", "another thing")
    edit.note("an assumption")
    text = str(edit.done())
    assert text.splitlines() == [
        "demo_: 2 modules",
        "  layer1.conv  something",
        "  fc           another thing",
        "  note: an assumption",
    ]
