"""Edits on models that were compiled, replicated or sharded before: right, or refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import gonio
from catalog import VERBS, VerbCase
from gonio import nn as gnn
from gonio.editing.where import unwrapped
from gonio.errors import GonioError, NotApplicableError
from gonio.surgery import calibrate_
from laws.support import assert_near, over
from laws.test_verbs import model_of
from ranks import WORLD, spawned
from surgery.net import compiled_in_place
from surgery.processes import EDITS, X, edited, network


def wrapper(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


@pytest.mark.grid(3)
@pytest.mark.parametrize("compiled", [wrapper, compiled_in_place])
@over([case for case in VERBS if case.name != "release_"])  # a copy of a held model is not held
def test_an_edit_of_a_compiled_model_acts_on_its_next_call(case: VerbCase, compiled) -> None:
    torch._dynamo.reset()
    model, x = model_of(case), case.inputs()
    plain = copy.deepcopy(model)
    model = compiled(model)
    with torch.no_grad():
        before = model(x).clone()
        edited = case.apply(model)
        assert {c.path for c in edited.changes} == {c.path for c in case.apply(plain).changes}
        assert_near(model(x), plain(x), torch.float32, what="output of the compiled model")
        edited.undo_()
        assert_near(model(x), before, torch.float32, what="output after the undo")


def replicated(model: nn.Module) -> nn.Module:
    return nn.DataParallel(model)


def averaged(model: nn.Module) -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(model)


@pytest.mark.parametrize("wrap", [replicated, averaged])
@over([case for case in VERBS if case.name != "release_"])
def test_an_edit_of_a_model_with_a_wrapped_part_is_that_without_the_wrapper(case: VerbCase, wrap) -> None:
    part, x = model_of(case), case.inputs()
    plain, model = nn.Sequential(copy.deepcopy(part)).eval(), nn.Sequential(wrap(part)).eval()
    found = []
    for each in (plain, model):
        with torch.no_grad():
            before = each(x).clone()
        try:
            edited = case.apply(each)
        except GonioError as error:
            found.append((str(error), before, before))
            continue
        with torch.no_grad():
            found.append(({c.path for c in edited.changes}, each(x).clone(), before))
            edited.undo_()
            assert_near(each(x), before, torch.float32, what="output after the undo")
    assert found[0][0] == found[1][0]
    assert_near(found[1][1], found[0][1], torch.float32, what="output of the model with a wrapped part")


def test_a_scale_that_a_norm_removes_is_known_inside_a_wrapped_part() -> None:
    model = nn.Sequential(nn.DataParallel(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(NotApplicableError, match=r"removes the learned gain \(here of 0\.0\)"):
        gonio.hold_(model, optimizer, norm="filters", magnitude="learned")


def test_a_filter_inside_a_layer_that_the_graph_does_not_open_stays_for_this_reason() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].linear1.weight[2].zero_()
    with pytest.raises(NotApplicableError, match="linear1 2: it is inside 0, which the graph shows as one"):
        gonio.recycle_(model)


def test_a_wrapper_with_hooks_is_not_looked_through() -> None:
    part = nn.DataParallel(nn.Sequential(nn.Linear(4, 3), nn.ReLU()))
    model = nn.Sequential(part, nn.Linear(3, 2))
    assert gonio.surgery.activation_after(model) == {"0.0": "relu", "1": "linear"}
    part.register_forward_hook(lambda module, inputs, output: -output)
    assert gonio.surgery.activation_after(model) == {"1": "linear"}


def test_a_compiled_layer_is_not_replaced_under_its_wrapper() -> None:
    model = nn.Sequential(torch.compile(nn.Conv2d(2, 2, 1), backend="eager"), nn.ReLU())
    with pytest.raises(NotApplicableError, match="the OptimizedModule around it would go on calling it"):
        gonio.swap_(model, gnn.DecoupledConv2d.from_conv)
    alone = torch.compile(nn.Conv2d(2, 2, 1), backend="eager")
    with pytest.raises(NotApplicableError, match="Swap it before you compile it"):
        gonio.swap_(alone, gnn.DecoupledConv2d.from_conv)


def test_wrappers_in_wrappers_are_looked_through() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    averaged = torch.optim.swa_utils.AveragedModel(model)
    assert unwrapped(nn.DataParallel(torch.compile(model, backend="eager"))) is model
    assert unwrapped(averaged) is averaged.module
    assert unwrapped(nn.ModuleDict({"module": model}))["module"] is model


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Tensor] | str]]:
    return spawned(edited, tmp_path_factory.mktemp("gloo"))


STRUCTURAL = set(EDITS) - {"init_", "calibrate_"}
REFUSED = {
    "DDP": {
        "swap_ with new parameters": "it adds or removes parameters",
        "parametrize_ with new parameters": "it adds or removes parameters",
        "fold_": "it adds or removes parameters",
    },
    "FSDP 2": dict.fromkeys(STRUCTURAL, "its parameters are sharded. Edit the model before it is sharded"),
    "tensor parallelism": dict.fromkeys(STRUCTURAL, "by tensor parallelism. Edit the model before; parallelize_module"),
    "FSDP 1": dict.fromkeys(EDITS, "its parameters are slices of one flat tensor"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("wrapped", REFUSED)
def test_an_edit_after_wrapping_is_right_or_refused(ranks, name: str, wrapped: str) -> None:
    found = ranks[0][f"{wrapped} {name}"]
    reason = REFUSED[wrapped].get(name)
    if reason is not None:
        assert isinstance(found, str), f"it was not refused: {found}"
        assert found.startswith("NotApplicableError")
        assert reason in found
        return
    assert not isinstance(found, str), found
    model = network()
    with torch.no_grad():
        before = model(X)
        edit = EDITS[name] if name != "calibrate_" else lambda m: calibrate_(m, [X + 3] * WORLD)  # of both processes
        edit(model)
        assert_near(found[0], model(X), torch.float32, what="output after the edit")
    assert_near(found[1], before, torch.float32, what="output after the undo")


@pytest.mark.slow
@pytest.mark.parametrize("name", EDITS)
def test_an_undo_after_sharding_is_refused(ranks, name: str) -> None:
    found = ranks[0][f"sharded since {name}"]
    assert isinstance(found, str), "it was not refused"
    assert found.startswith("UndoError: ")
    assert "the model was sharded since" in found
