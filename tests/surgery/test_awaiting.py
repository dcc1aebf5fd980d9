"""An optimizer that was built before an edit is told of what it added, or its next step raises."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import Tensor, nn

import gonio
from catalog import seeded
from gonio import nn as gnn
from gonio import parametrizations as P
from gonio.errors import UntrainedParametersError

X = seeded(4, 3, 5, 5)
EDITS = {
    "switchable norm": lambda model, **o: gonio.swap_(model, gnn.SwitchableNorm2d.from_batch_norm, **o),
    "weight norm": lambda model, **o: gonio.parametrize_(model, P.WeightNorm(), where="0", **o),
    "learned gains": lambda m, **o: gonio.parametrize_(m, P.WeightStandardization(learn_gain=True), where="0", **o),
}


def network(**options: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, **options), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2))


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def backward(model: nn.Module) -> None:
    model(X).square().sum().backward()


def trains(*optimizers: torch.optim.Optimizer) -> bool:
    """Whether a step of each moves what it holds; an optimizer of what is frozen or undone would raise before."""
    held = [p for o in optimizers for group in o.param_groups for p in group["params"] if p.grad is not None]
    before = values(held)
    for optimizer in optimizers:
        optimizer.step()
    return bool(held) and not any(torch.equal(a, b) for a, b in zip(values(held), before, strict=True))


def added(model: nn.Module, before: list[nn.Parameter]) -> list[nn.Parameter]:
    return [p for p in model.parameters() if not any(p is b for b in before)]


def values(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [p.detach().clone() for p in parameters]


@pytest.mark.parametrize("name", EDITS)
class TestAStepWithoutWhatWasAdded:
    def test_it_raises_and_trains_nothing(self, name: str) -> None:
        model = network()
        optimizer = sgd(model)
        EDITS[name](model)
        backward(model)
        before = values(list(model.parameters()))
        for _ in range(2):  # at every step, until the cause is gone
            with pytest.raises(UntrainedParametersError, match=r"in no optimizer and would never be trained\. Pass"):
                optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(values(list(model.parameters())), before, strict=True))

    def test_an_optimizer_that_is_told_trains_them(self, name: str) -> None:
        model = network()
        old, optimizer = list(model.parameters()), sgd(model)
        EDITS[name](model, optimizer=optimizer)
        new = added(model, old)
        before = values(new)
        backward(model)
        optimizer.step()
        assert new
        assert not any(torch.equal(a, b) for a, b in zip(values(new), before, strict=True))

    def test_an_optimizer_built_afterwards_is_right(self, name: str) -> None:
        model = network()
        EDITS[name](model)
        optimizer = sgd(model)
        backward(model)
        assert trains(optimizer)

    def test_a_group_added_by_hand_is_right(self, name: str) -> None:
        model = network()
        old, optimizer = list(model.parameters()), sgd(model)
        EDITS[name](model)
        optimizer.add_param_group({"params": added(model, old)})
        backward(model)
        assert trains(optimizer)

    def test_a_second_optimizer_may_have_them(self, name: str) -> None:
        model = network()
        old, optimizer = list(model.parameters()), sgd(model)
        EDITS[name](model)
        second = torch.optim.Adam(added(model, old))
        backward(model)
        assert trains(second, optimizer)

    def test_an_optimizer_that_is_gone_has_nothing(self, name: str) -> None:
        model = network()
        old, optimizer = list(model.parameters()), sgd(model)
        EDITS[name](model)
        second = torch.optim.Adam(added(model, old))
        del second
        gc.collect()
        backward(model)
        with pytest.raises(UntrainedParametersError, match="in no optimizer"):
            optimizer.step()

    def test_what_is_frozen_waits_for_none(self, name: str) -> None:
        model = network()
        old, optimizer = list(model.parameters()), sgd(model)
        EDITS[name](model)
        for parameter in added(model, old):
            parameter.requires_grad_(False)
        backward(model)
        assert trains(optimizer)

    def test_an_undone_edit_added_nothing(self, name: str) -> None:
        model = network()
        optimizer = sgd(model)
        EDITS[name](model).undo_()
        backward(model)
        assert trains(optimizer)

    def test_an_optimizer_of_another_layer_or_model_is_not_meant(self, name: str) -> None:
        model, other = network(), network()
        head = sgd(model[4])
        EDITS[name](model)
        backward(model)
        assert trains(head)
        backward(other)
        assert trains(sgd(other))

    def test_a_copy_waits_for_nothing(self, name: str) -> None:
        model = network()
        EDITS[name](model)
        twin = copy.deepcopy(model)
        backward(twin)
        assert trains(sgd(twin))


def test_the_message_names_the_parameters() -> None:
    model = network()
    optimizer = sgd(model)
    gonio.swap_(model, gnn.SwitchableNorm2d.from_batch_norm)
    with pytest.raises(UntrainedParametersError, match=r"1\.mean_logits, 1\.var_logits, which swap_ added, are in no"):
        optimizer.step()


def test_a_layer_that_had_no_parameters() -> None:
    """Its optimizer is that of everything else in the model; one of a part of the model is none."""
    model = network(affine=False)
    everything, part = sgd(model), sgd(model[0])
    gonio.swap_(model, gnn.SwitchableNorm2d.from_batch_norm)
    backward(model)
    part.step()
    with pytest.raises(UntrainedParametersError, match=r"1\.mean_logits"):
        everything.step()


def test_parameters_that_replace_others() -> None:
    """The optimizer goes on with what the model no longer uses."""

    def fresh(norm: nn.BatchNorm2d) -> nn.Module:
        return nn.GroupNorm(2, norm.num_features)

    model = network()
    optimizer = sgd(model)
    gonio.swap_(model, fresh)
    backward(model)
    with pytest.raises(UntrainedParametersError, match=r"1\.weight, 1\.bias, which swap_ added"):
        optimizer.step()


def test_an_edit_without_new_parameters_leaves_the_optimizer_alone() -> None:
    model = network()
    optimizer = sgd(model)
    gonio.parametrize_(model, P.Sphere(), where="0")
    gonio.swap_(model, gnn.to_group_norm, groups=2)
    backward(model)
    assert trains(optimizer)


def test_a_compiled_step() -> None:
    """It is compiled with the check in force, and raises or trains as any other."""
    model = network()
    old, optimizer = list(model.parameters()), sgd(model)
    gonio.parametrize_(model, P.WeightNorm(), where="0")
    backward(model)

    @torch.compile(backend="aot_eager")
    def step() -> None:
        optimizer.step()

    with pytest.raises(
        UntrainedParametersError, match=r"0\.weight_parametrization\.magnitude, which parametrize_ added"
    ):
        step()
    new = added(model, old)
    before = values(new)
    optimizer.add_param_group({"params": new})
    step()
    assert not any(torch.equal(a, b) for a, b in zip(values(new), before, strict=True))
