"""The tracker at steps of every kind: with a closure, with a gradient scaler, of a class that calls its base class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gonio
from gonio.measuring.training.steps import Also

Norms = list[float]
GRADIENT: Also = ["gradient"]


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def gradient_norms(tracker: gonio.Tracker) -> Norms:
    return [row["gradient_norm"] for row in tracker.rows]


@pytest.mark.parametrize("to_none", [True, False])
def test_the_gradient_of_a_closure_is_that_of_the_same_step(to_none: bool) -> None:
    """As in Lightning: the closure computes the gradient after the step has begun."""
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = gonio.Tracker(model, optimizer=optimizer, every=1, also=GRADIENT, figures="training")
    expected: Norms = []

    def closure() -> float:
        optimizer.zero_grad(set_to_none=to_none)
        loss = model(torch.randn(5, 4)).square().sum()
        loss.backward()
        assert model.weight.grad is not None
        expected.append(float(model.weight.grad.double().norm()))
        return loss.item()

    for _ in range(3):
        optimizer.step(closure)
    assert gradient_norms(tracker) == pytest.approx(expected)


class Centralising(torch.optim.SGD):
    """Changes the gradient itself, as some optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.sub_(p.grad.mean())
        return super().step(closure)


def test_the_gradient_is_that_with_which_an_optimizer_begins() -> None:
    model = layer()
    optimizer = Centralising(model.parameters(), lr=0.1)
    tracker = gonio.Tracker(model, optimizer=optimizer, every=1, also=GRADIENT, figures="training")
    model(torch.randn(5, 4)).square().sum().backward()
    assert model.weight.grad is not None
    expected = float(model.weight.grad.double().norm())
    optimizer.step()
    assert gradient_norms(tracker) == pytest.approx([expected])


@pytest.mark.parametrize("unscale", [True, False])
def test_the_gradient_of_a_fused_step_is_without_the_scale(unscale: bool) -> None:
    model = layer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    tracker = gonio.Tracker(model, optimizer=optimizer, every=1, also=GRADIENT, figures="training")
    scaler.scale(model(torch.randn(5, 4)).square().sum()).backward()
    assert model.weight.grad is not None
    expected = float(model.weight.grad.double().norm()) / 1024
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert gradient_norms(tracker) == pytest.approx([expected])


@pytest.mark.parametrize("tracked", [False, True])
def test_a_compiled_step_is_measured_and_the_measuring_is_not_compiled(tracked: bool) -> None:
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = gonio.Tracker(model, optimizer=optimizer, every=1) if tracked else None
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    step = torch.compile(optimizer.step, backend=backend)
    for number in range(1, 3):
        optimizer.zero_grad()
        model(torch.ones(5, 4)).square().sum().backward()
        before = model.weight.detach().clone()
        step()
        if tracker is not None:
            update = float((model.weight.detach() - before).norm() / before.norm())
            assert tracker.rows[-1] == {**tracker.rows[-1], "step": number, "relative_update": pytest.approx(update)}
    assert len(graphs) <= 3


class Renamed(torch.optim.SGD):
    """Calls the step of its base class, around which torch calls the hooks of a step once more."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_a_schedule_does_not_warn_that_a_step_is_replaced() -> None:
    model = layer()
    torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = Renamed(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    tracker = gonio.Tracker(model, optimizer=optimizer, every=1, figures="training")
    for _ in range(3):
        model(torch.ones(5, 4)).square().sum().backward()
        optimizer.step()
        schedule.step()  # warnings are errors
    assert [row["learning_rate"] for row in tracker.rows] == pytest.approx([0.1, 0.01, 0.001])


@pytest.mark.parametrize("schedule", ["none", "before", "after"])
def test_the_step_of_a_class_that_calls_that_of_its_base_is_one_step(schedule: str) -> None:
    model = layer()
    torch.optim.SGD(model.parameters(), lr=0.1)  # from the first one on, torch reports the steps of its class
    optimizer = Renamed(model.parameters(), lr=0.1)
    if schedule == "before":
        torch.optim.lr_scheduler.StepLR(optimizer, 10)
    tracker = gonio.Tracker(model, optimizer=optimizer, every=1, figures="training")
    held = gonio.hold_(model, optimizer, step="fixed")
    norm = float(model.weight.detach().norm())

    def interrupted() -> float:
        raise KeyboardInterrupt("by hand")

    for number in range(4):
        if number == 1 and schedule == "after":
            torch.optim.lr_scheduler.StepLR(optimizer, 10)
        if number == 2:
            with pytest.raises(KeyboardInterrupt, match="by hand"):
                optimizer.step(interrupted)
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
    assert [row["step"] for row in tracker.rows] == [1, 2, 3, 4]  # without the one that was interrupted
    assert all(0 < row["rotation"] < 0.11 for row in tracker.rows)
    assert float(model.weight.detach().norm()) == pytest.approx(norm)
    held.undo_()


@pytest.mark.parametrize("apart", [False, True])
def test_a_weight_whose_parameters_several_optimizers_step_is_named(apart: bool) -> None:
    model = nn.Sequential(layer(), nn.Linear(3, 2))
    gonio.parametrize_(model, gonio.parametrizations.WeightNorm(), where="0")
    gains = list(model[0].weight_parametrization.parameters())
    rest = [p for p in model.parameters() if not any(p is gain for gain in gains)]
    optimizers = [torch.optim.SGD(each, lr=0.1) for each in ([gains, rest] if apart else [gains + rest[:2], rest[2:]])]
    if not apart:
        assert gonio.Tracker(model, optimizer=optimizers).left_out == {}  # warnings are errors
        return
    with pytest.warns(gonio.errors.GonioWarning, match="Tracker: 0: several optimizers step parameters of its weight"):
        tracker = gonio.Tracker(model, optimizer=optimizers)
    assert [*tracker.left_out] == ["0"]


@pytest.mark.parametrize("nested", [False, True])
def test_the_gradient_is_that_which_hooks_of_the_optimizer_leave(nested: bool) -> None:
    class Nested(torch.optim.SGD):  # torch calls the optimizer's hooks twice
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.mul_(3.0)
            return super().step(closure)

    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = (Nested if nested else torch.optim.SGD)(model.parameters(), lr=0.1)

    def clip(_: Any, args: Any, named: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    tracker = gonio.Tracker(model, optimizer=optimizer, every=1, figures="training", also=("gradient",))
    handle = optimizer.register_step_pre_hook(clip)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().sum().backward()
        before = {path: model.get_submodule(path).weight.detach().clone() for path in "02"}
        optimizer.step()
        for row in tracker.rows[2 * step :]:
            update = float((model.get_submodule(row["layer"]).weight.detach() - before[row["layer"]]).norm())
            assert row["gradient_norm"] <= 0.01 * (1 + 1e-5)
            if not nested:
                assert row["gradient_norm"] == pytest.approx(update / 0.1, rel=1e-4)
    handle.remove()
    tracker.undo_()
    assert not optimizer._optimizer_step_pre_hooks, "no hook is left"


class Codes(Tensor):
    """A state in codes, as 8-bit optimizers have it: operations of torch are refused."""

    @staticmethod
    def __new__(cls, values: Tensor) -> Codes:
        made = Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)  # type: ignore[attr-defined]
        made.values_, made.readable = values, True
        return made

    def dequantize(self) -> Tensor:
        if not self.readable:
            raise NotImplementedError
        return self.values_

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} of codes")


class Coded(torch.optim.AdamW):
    """Keeps its moments as codes between steps."""

    readable, rounds = True, False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for state in self.state.values():
            state.update({n: t.values_ for n, t in state.items() if isinstance(t, Codes)})
        torch.optim.AdamW.step.__wrapped__(self)
        for state in self.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                v = state[name]
                state[name] = Codes(v * (v > v.mean()) if name == "exp_avg_sq" and self.rounds else v)
                state[name].readable = self.readable


@pytest.mark.parametrize("readable", [True, False])
def test_states_in_codes_are_dequantised_or_left_out(readable: bool) -> None:
    rows = []
    for kind in (torch.optim.AdamW, Coded):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
        optimizer = kind(model.parameters(), lr=0.01)
        optimizer.readable = readable
        tracker = gonio.Tracker(model, optimizer=optimizer, every=1, figures="training", also=("state",))
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(8, 6)).square().sum().backward()
            optimizer.step()
        rows.append(tracker.rows)
    plain, coded = rows
    assert len(plain) == len(coded) == 6
    assert all(("gradient_rms" in row) is readable for row in coded)
    for a, b in zip(plain, coded, strict=True):
        assert all(b[name] == pytest.approx(value) for name, value in a.items() if name in b and name != "layer")


def test_moments_whose_small_numbers_were_rounded_are_not_compared() -> None:
    model = nn.Linear(6, 5)
    optimizer = Coded(model.parameters(), lr=0.01)
    optimizer.rounds = True
    tracker = gonio.Tracker(model, optimizer=optimizer, every=1, figures="training", also=("state",))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().sum().backward()
        optimizer.step()
    assert len(tracker.rows) == 3
    assert [one.code for _, one in tracker.findings if one.code == "G804"] == []


class Turned(torch.optim.Optimizer):
    """As SOAP: the first moment is of the gradient, the second of the gradient in another basis."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "precondition_frequency": 10})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["basis"] = torch.linalg.qr(torch.randn(len(p), len(p)))[0]
            state["step"] += 1
            state["exp_avg"].lerp_(p.grad, 0.1)
            state["exp_avg_sq"].lerp_((state["basis"] @ p.grad).square(), 0.01)
            p.add_(state["exp_avg"], alpha=-0.001)


def test_moments_of_different_numbers_are_not_compared() -> None:
    torch.manual_seed(0)
    model = nn.Linear(20, 30, bias=False)
    optimizer = Turned(model.parameters())
    tracker = gonio.Tracker(model, optimizer=optimizer, every=1, figures="training", also=("state",))
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(8, 20)).relu().square().sum().backward()
        optimizer.step()
    assert [one.code for _, one in tracker.findings if one.code == "G804"] == []
