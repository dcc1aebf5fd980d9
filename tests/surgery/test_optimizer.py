"""An optimizer that was built before an edit is given the added parameters, or its next step raises."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import gonio
from catalog import seeded
from gonio import nn as gnn
from gonio import parametrizations as P
from gonio.errors import InvalidArgumentError, UntrainedParametersError

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
    """Whether a step of each changes all parameters that it holds and that have gradients."""
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
class TestAStepWithoutTheAddedParameters:
    def test_it_raises_and_trains_nothing(self, name: str) -> None:
        model = network()
        optimizer = sgd(model)
        EDITS[name](model)
        backward(model)
        before = values(list(model.parameters()))
        for _ in range(2):  # at every step, until the cause is gone
            with pytest.raises(UntrainedParametersError, match=r"in no optimizer that has taken a step, .* Pass optim"):
                optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(values(list(model.parameters())), before, strict=True))

    @pytest.mark.parametrize("how", ["optimizer=", "built afterwards", "add_param_group", "frozen", "undone"])
    def test_what_makes_it_right(self, name: str, how: str) -> None:
        model = network()
        old, optimizer = list(model.parameters()), sgd(model)
        edited = EDITS[name](model, **({"optimizer": optimizer} if how == "optimizer=" else {}))
        if how == "undone":
            edited.undo_()
        elif how == "built afterwards":
            optimizer = sgd(model)
        elif how == "add_param_group":
            optimizer.add_param_group({"params": added(model, old)})
        elif how == "frozen":
            for parameter in added(model, old):
                parameter.requires_grad_(False)
        backward(model)
        assert trains(optimizer)
        new = {id(p) for p in added(model, old)}
        assert new <= {id(p) for g in optimizer.param_groups for p in g["params"]} or how == "frozen"

    def test_a_second_optimizer_that_has_them_steps_first(self, name: str) -> None:
        """That one has them is not known before its first step; afterwards the order is free."""
        model = network()
        old, optimizer = list(model.parameters()), sgd(model)
        EDITS[name](model)
        second = torch.optim.Adam(added(model, old))
        backward(model)
        with pytest.raises(UntrainedParametersError, match="If another optimizer has them, let it step first"):
            optimizer.step()
        assert trains(second, optimizer)
        assert trains(optimizer, second)

    @pytest.mark.parametrize("order", [1, -1])
    def test_optimizers_that_share_the_model_step_in_any_order(self, name: str, order: int) -> None:
        model = network()
        EDITS[name](model)
        matrices = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() < 2]
        both = [torch.optim.SGD(matrices, lr=0.1), torch.optim.SGD(rest, lr=0.1)][::order]
        for _ in range(3):
            model.zero_grad()
            backward(model)
            assert trains(*both)

    def test_optimizers_that_share_the_model_without_them_raise_at_a_second_step(self, name: str) -> None:
        model = network()
        both = [sgd(model[:2]), sgd(model[2:])]
        EDITS[name](model)
        backward(model)
        assert trains(*both)
        with pytest.raises(UntrainedParametersError, match=r"which .* added"):
            both[0].step()
        both[1].step()  # it trains other layers

    def test_an_optimizer_of_another_layer_or_model_is_not_meant(self, name: str) -> None:
        model, other = network(), network()
        head = sgd(model[4])
        EDITS[name](model)
        backward(model)
        assert trains(head)
        assert trains(head)
        backward(other)
        assert trains(sgd(other))

    def test_a_copy_waits_for_nothing(self, name: str) -> None:
        model = network()
        EDITS[name](model)
        twin = copy.deepcopy(model)
        backward(twin)
        assert trains(sgd(twin))


def test_a_layer_that_had_no_parameters() -> None:
    """Its optimizer is that of everything else in the model; one of a part of the model is none."""
    model = network(affine=False)
    everything, part = sgd(model), sgd(model[0])
    gonio.swap_(model, gnn.SwitchableNorm2d.from_batch_norm)
    backward(model)
    part.step()
    with pytest.raises(UntrainedParametersError, match=r"1\.mean_logits, 1\.var_logits, which swap_ added, are in no"):
        everything.step()


def test_parameters_that_replace_others() -> None:
    """The optimizer holds parameters that the model no longer uses."""
    model = network()
    optimizer = sgd(model)
    gonio.swap_(model, lambda norm: nn.GroupNorm(2, norm.num_features), where="1")
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


def test_the_hook_is_registered_once_and_stays() -> None:
    """Torch iterates over its hooks during a step: one that another thread removed would end the step with an error."""
    model = network()
    edited = gonio.parametrize_(model, P.WeightNorm())
    hooks = dict(_global_optimizer_pre_hooks)
    edited.undo_()
    gonio.parametrize_(model, P.WeightNorm()).undo_()
    assert dict(_global_optimizer_pre_hooks) == hooks


def test_a_compiled_step() -> None:
    """It is compiled with the check in force, and raises or trains as any other."""
    model = network()
    old, optimizer = list(model.parameters()), sgd(model)
    gonio.parametrize_(model, P.WeightNorm(), where="0")
    backward(model)

    @torch.compile(backend="aot_eager")
    def step() -> None:
        optimizer.step()

    message = r"0\.weight_parametrization\.magnitude, which parametrize_ added"
    with pytest.raises(UntrainedParametersError, match=message):
        step()
    new = added(model, old)
    before = values(new)
    optimizer.add_param_group({"params": new})
    step()
    assert not any(torch.equal(a, b) for a, b in zip(values(new), before, strict=True))


def test_an_optimizer_that_is_passed_follows_and_returns() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    backward(model)
    optimizer.step()
    group, state = list(optimizer.param_groups[0]["params"]), set(optimizer.state)
    edits = [
        gonio.swap_(model, gnn.SwitchableNorm2d.from_batch_norm, optimizer=optimizer),
        gonio.parametrize_(model, P.WeightNorm(), optimizer=optimizer),
    ]
    assert {id(p) for p in model.parameters()} == {id(p) for p in optimizer.param_groups[0]["params"]}
    backward(model)
    optimizer.step()
    for edited in reversed(edits):
        edited.undo_()
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], group, strict=True))
    assert set(optimizer.state) == state


class Wrapper:
    """No Optimizer: it has neither state nor hooks of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups


@pytest.mark.parametrize("name", EDITS)
def test_the_optimizer_in_a_wrapper_follows(name: str) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    backward(model)
    optimizer.step()
    before, state = list(model.parameters()), set(optimizer.state)
    edited = EDITS[name](model, optimizer=Wrapper(optimizer))
    backward(model)
    assert {id(p) for p in added(model, before)} <= {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert trains(optimizer)
    edited.undo_()
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in before]
    assert set(optimizer.state) == state


@pytest.mark.parametrize("name", EDITS)
def test_an_optimizer_that_keeps_its_list_of_parameters_is_refused(name: str) -> None:
    """Added parameters would stand in its groups, and never be trained."""
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters())
    before = list(model.parameters())
    with pytest.raises(InvalidArgumentError, match=r"found LBFGS, which keeps a list .* Build it after this edit"):
        EDITS[name](model, optimizer=optimizer)
    assert [id(p) for p in model.parameters()] == [id(p) for p in before]
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in before]
    with pytest.raises(InvalidArgumentError, match="hold_ needs an optimizer that reads its parameter groups"):
        gonio.hold_(model, optimizer, norm="filters", magnitude="learned", where="4")
    gonio.hold_(model, optimizer, where="4")  # adds none
