"""Layers that run with other tensors in the place of their own, and layers inside of transforms of torch.func."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

import gonio
from catalog import seeded
from gonio import nn as gnn
from gonio.errors import GonioError, NotApplicableError
from laws.snapshot import Snapshot, assert_restored
from surgery.net import trained

EXCHANGED = "other tensors in the place of (its|their) own"


def inner() -> nn.Sequential:
    layers = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for layer in (model[0], model[3]):
            layer.weight[1], layer.bias[1] = 0, 0
    return model


class Averaged(nn.Module):
    """Evaluates an average of its parameters, which are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = trained(inner())
        for n, parameter in enumerate(self.inner.parameters()):
            self.register_buffer(f"average_{n}", 0.4 * seeded(*parameter.shape, seed=n))

    def forward(self, x: Tensor) -> Any:
        names = [name for name, _ in self.inner.named_parameters()]
        return functional_call(self.inner, {name: self.get_buffer(f"average_{n}") for n, name in enumerate(names)}, x)


class Exchanging(nn.Module):
    """Puts a multiple of a weight in its place by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = trained(inner())

    def forward(self, x: Tensor) -> Any:
        own = self.inner[0]._parameters["weight"]
        self.inner[0]._parameters["weight"] = own.detach() + 1
        try:
            return self.inner(x)
        finally:
            self.inner[0]._parameters["weight"] = own


class Ensemble(nn.Module):
    """Runs several networks as one."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(trained(inner()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        stacked = stack_module_state(list(self.members))
        return vmap(lambda *state: functional_call(self.members[0], state, x))(*stacked).mean(0)


class Adapting(nn.Module):
    """Takes a step of gradient descent in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Any:
        own = {name: p.detach() for name, p in self.inner.named_parameters()}
        step = grad(lambda values: functional_call(self.inner, values, x).square().mean())(own)
        return functional_call(self.inner, {name: own[name] - 0.1 * step[name] for name in own}, x)


def batch() -> Tensor:
    return seeded(6, 8)


def refused(act: Callable[[nn.Module, Tensor], Any], model: nn.Module, match: str) -> None:
    """The verb says the true reason and leaves the model as it was."""
    before = Snapshot.of(model, batch())
    with pytest.raises(NotApplicableError, match=match) as error:
        act(model, batch())
    assert "please report" not in str(error.value)
    assert_restored(before, Snapshot.of(model, batch()))


@pytest.mark.parametrize("make", [Averaged, Exchanging])
def test_a_norm_stays_where_it_or_its_layer_runs_with_other_tensors(make: Callable[[], nn.Module]) -> None:
    model = make().eval()
    before = model(batch()).detach()
    text = str(gonio.fold_(model, example=batch()))
    assert "inner.1 stays: " in text
    assert "gets other tensors in the place of its own when it runs" in text
    assert torch.equal(model(batch()), before)


@pytest.mark.parametrize(
    "act",
    [lambda m, x: gonio.recycle_(m, example=x), lambda m, x: gonio.balance_(m), gonio.match_statistics_],
    ids=["recycle_", "balance_", "match_statistics_"],
)
def test_weights_that_do_not_run_are_left_alone(act: Callable[..., Any]) -> None:
    batches = act is gonio.match_statistics_
    refused(lambda m, x: act(m, [x] if batches else x), Averaged().eval(), EXCHANGED)


def test_layers_with_their_own_tensors_are_balanced_as_ever() -> None:
    class Called(Averaged):
        def forward(self, x: Tensor) -> Any:
            return functional_call(self.inner, dict(self.inner.named_parameters()), x)

    model = Called().eval().double()
    before = model(batch().double()).detach()
    gonio.balance_(model, example=batch().double())
    torch.testing.assert_close(model(batch().double()), before)


def test_a_weight_without_an_effect_on_its_output_is_not_scaled() -> None:
    model = Averaged().eval()
    weights = [layer.weight.detach().clone() for layer in model.inner if isinstance(layer, nn.Linear)]
    edited = gonio.lsuv_(model, batch(), function=None)
    assert "inner.0  not scaled" in str(edited)
    assert "the scale of the weight of inner.0 has no effect on its output" in str(edited)
    after = [layer.weight for layer in model.inner if isinstance(layer, nn.Linear)]
    assert all(map(torch.equal, weights, after))


class Normalised(nn.Sequential):
    """Writes to its weights when it runs."""

    def forward(self, x: Tensor) -> Any:
        for layer in self[::2]:
            layer.weight.data = nn.functional.normalize(layer.weight.data)
        return super().forward(x)


def test_the_undo_of_a_scaling_gives_the_values_before_the_forward_wrote_to_them() -> None:
    model = Normalised(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    before = [p.detach().clone() for p in model.parameters()]
    gonio.lsuv_(model, batch()).undo_()
    assert all(map(torch.equal, before, model.parameters()))


ACTS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "balance_": lambda m, x: gonio.balance_(m, example=x),
    "rotate_": lambda m, x: gonio.rotate_(m, example=x),
    "lsuv_": gonio.lsuv_,
    "measure": lambda m, x: gonio.measure(m, batch=x),
    "fold_ gains": lambda m, x: gonio.fold_(m, example=x, gains=True),
}


@pytest.mark.parametrize("name", ACTS)
def test_layers_in_a_transform_are_said_not_to_be_read(name: str) -> None:
    match = r"cannot read the layers of the model: it runs, but not while they are read \(RuntimeError: "
    refused(ACTS[name], Ensemble().eval(), match)


@pytest.mark.parametrize("name", ["balance_", "rotate_", "fold_ gains"])
def test_a_forward_that_learns_is_refused_in_words(name: str) -> None:
    model, x = Adapting().eval(), batch()
    before = Snapshot.of(model, x)
    with pytest.raises(GonioError, match=r"^(?!.*please report)"):
        ACTS[name](model, x)
    assert_restored(before, Snapshot.of(model, x))


def test_statistics_in_a_transform_are_not_averaged() -> None:
    match = "cannot calibrate layer 'members.0.1' .*it runs in a transform of torch.func"
    refused(lambda m, x: gonio.calibrate_(m, [x]), Ensemble().eval(), match)


class Learning(Adapting):
    """The same by autograd, which a forward may turn on where it was off."""

    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            own = {name: p.detach().requires_grad_() for name, p in self.inner.named_parameters()}
            loss = functional_call(self.inner, own, x).square().mean()
            step = dict(zip(own, torch.autograd.grad(loss, list(own.values())), strict=True))
        return functional_call(self.inner, {name: own[name].detach() - 0.1 * step[name] for name in own}, x)


def test_outputs_of_a_forward_that_turns_gradients_on_are_measured() -> None:
    found = gonio.measure(Learning(), batch=batch())
    assert [signal.path for signal in found.signals] == ["inner.0", "inner.1", "inner.2"]


def test_a_bias_that_a_hook_computes_is_not_handed_on() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    nn.utils.prune.random_unstructured(model[0], "bias", 0.5)
    with pytest.raises(NotApplicableError, match="'Conv2d'; its bias is computed by a parametrization"):
        gonio.swap_(model, gnn.DecoupledConv2d.from_conv)
    assert type(model[0]) is nn.Conv2d
