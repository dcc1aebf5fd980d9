"""Law: a verb is undone exactly, is not applied twice unnoticed, and leaves what is not its business."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from catalog import PARAMETRIZATIONS, VERBS, ParametrizationCase, VerbCase, seeded
from gonio import parametrizations as P
from gonio.errors import AlreadyAppliedError, GonioWarning, NoMatchError, NotApplicableError
from laws.snapshot import Snapshot, assert_restored
from laws.support import assert_near, clone, input_shape, law, perturbed
from tolerances import exact


def model_of(case: VerbCase) -> nn.Module:
    return perturbed(case.model()).eval()


def check_undo(case: VerbCase) -> None:
    model, x = model_of(case), case.inputs()
    before = Snapshot.of(model, x)
    edited = case.apply(model)
    assert edited.changes, f"{case.name} changed nothing"
    assert str(edited), "an Edited describes itself"
    edited.undo_()
    assert_restored(before, Snapshot.of(model, x))


def check_trained_undo(case: VerbCase) -> None:
    """Undo after training steps restores the structure; the optimizer still drives the same Parameters."""
    model, x = model_of(case).train(), case.inputs()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = Snapshot.of(model, x)
    edited = case.apply(model)
    held = {id(p) for p in optimizer.param_groups[0]["params"]}
    added = [p for p in model.parameters() if id(p) not in held]
    if added:  # a step without them raises
        optimizer.add_param_group({"params": added})
    output = model(x)
    (output * seeded(*output.shape, dtype=output.dtype)).sum().backward()
    optimizer.step()
    with warnings.catch_warnings():  # the steps are those of another optimizer than the one that an edit waits for
        warnings.filterwarnings("ignore", message=".* had no effect: no step of the ", category=GonioWarning)
        edited.undo_()
    after = Snapshot.of(model, x)
    unchanged = {"state": before.state, "outputs": before.outputs}
    assert_restored(before, dataclasses.replace(after, **unchanged))


def check_function_kept(case: VerbCase) -> None:
    for dtype in (torch.float64, torch.float32):
        model, x = model_of(case).to(dtype), case.inputs().to(dtype)
        expected = model(x)
        case.apply(model)
        assert_near(model(x), expected, dtype, kind=exact, what=f"output after {case.name}")


def check_twice(case: VerbCase) -> None:
    model, x = model_of(case), case.inputs()
    case.apply(model)
    first = model(x)
    if case.idempotent:
        case.apply(model)
        assert_near(model(x), first, torch.float32, kind=exact, what="output after the second application")
        return
    refusals = (AlreadyAppliedError, NoMatchError, NotApplicableError)
    with pytest.raises(refusals, match=r"found .* already|selects|can act|plain already|is suitable"):
        case.apply(model)
    assert torch.equal(model(x), first), "the refused second application changed the model"


def check_frozen(case: VerbCase) -> None:
    model = model_of(case).requires_grad_(False)
    kept = {id(p): p for p in model.parameters()}
    case.apply(model)
    thawed = [name for name, p in model.named_parameters() if id(p) in kept and p.requires_grad]
    assert not thawed, f"{case.name} set requires_grad on frozen {thawed}"


class _Tied(nn.Module):
    """The same model under two names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.first = model
        self.second = model

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


def check_tied(case: VerbCase) -> None:
    alone, tied = model_of(case), _Tied(model_of(case))
    before = Snapshot.of(tied, case.inputs())
    try:
        edited = case.apply(tied)
    except (NoMatchError, NotApplicableError) as error:
        assert_restored(before, Snapshot.of(tied, case.inputs()))
        pytest.skip(f"refused: {error}")  # paths of the wrapped model are others; not every verb can act on ties
    assert tied.first is tied.second, f"{case.name} untied a module"
    if not edited.changes:
        assert edited.notes, f"{case.name} left everything alone without a word"
        pytest.skip(f"left alone: {edited.notes[0]}")
    expected = len(case.apply(alone).changes)
    assert len(edited.changes) == expected, f"{len(edited.changes)} changes, {expected} expected"
    edited.undo_()
    assert_restored(before, Snapshot.of(tied, case.inputs()))


def check_detach(case: ParametrizationCase, attach: Callable[..., None], detach: Callable[..., None]) -> None:
    layer = perturbed(case.layer())
    x = seeded(*input_shape(layer))
    before = Snapshot.of(layer, x)
    attach(layer, "weight", case.make())
    assert [id(p) for p in layer.parameters()][: len(before.parameters)] == [p[1] for p in before.parameters]
    detach(layer, "weight")
    structures = [dataclasses.replace(each, state=[], outputs=[]) for each in (before, Snapshot.of(layer, x))]
    assert_restored(*structures)


def check_detached_weight(case: ParametrizationCase) -> None:
    """keep="weight" folds: the plain layer computes what the parametrized one did."""
    for dtype in (torch.float64, torch.float32):
        layer = perturbed(case.layer()).to(dtype).eval()
        x = seeded(*input_shape(layer), dtype=dtype)
        P.attach(layer, "weight", case.make())
        expected = clone(layer)(x)
        P.detach(layer, "weight", keep="weight")
        assert_near(layer(x), expected, dtype, kind=exact, what="output after the fold")


def check_attached_weight(case: ParametrizationCase) -> None:
    layer = perturbed(case.layer()).double()
    weight = layer.weight.detach().clone()
    P.attach(layer, "weight", case.make())
    template = P.parametrization_of(layer, "weight")
    assert bool(template.holds(layer.weight)), f"the weight of {case.name} breaks its own law"
    if case.keeps_weight:
        assert_near(layer.weight, weight, torch.float64, what="weight after attach")
    held = layer.weight.detach()
    again = template.forward(template.right_inverse(held))
    assert_near(again, held, torch.float64, what="forward(right_inverse(weight))")


test_undo_restores_everything = law(check_undo, VERBS)
test_undo_after_training = law(check_trained_undo, VERBS)
test_function_is_kept = law(check_function_kept, [case for case in VERBS if case.keeps_function])
test_second_application = law(check_twice, VERBS)
test_frozen_stays_frozen = law(check_frozen, VERBS)
test_tied_modules_count_once = law(check_tied, VERBS)
test_detach_restores_the_layer = law(lambda case: check_detach(case, P.attach, P.detach), PARAMETRIZATIONS)
test_detach_can_keep_the_weight = law(check_detached_weight, PARAMETRIZATIONS)
test_attached_weight_obeys = law(check_attached_weight, PARAMETRIZATIONS)
