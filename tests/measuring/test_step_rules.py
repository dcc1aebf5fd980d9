"""Rules on steps: those large beside the weight, weights that none turns, and those without an optimizer."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gonio
from catalog import seeded
from gonio.measuring.findings.state_rules import STEP_RULES, STILL, StepFacts

Tracker = gonio.Tracker


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
    return nn.Sequential(*layers).to(dtype)


class Cut(nn.Module):
    """The first layers get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.net[:3](x)
        return self.net[3:](x)


class Sparing(nn.Module):
    """Runs its middle layer in every third forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.count = network(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        x = self.net[:3](x)
        return self.net[4:](self.net[3](x) if self.count % 3 == 0 else x)


class Adapted(nn.Module):
    """A frozen layer, and beside it two factors of which the second begins at 0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base, self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 2, bias=False), nn.Linear(2, 3, bias=False)
        self.base.requires_grad_(False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def dead() -> nn.Module:
    model = network()
    nn.init.constant_(model[3].bias, -100.0)
    return model


def partly_frozen() -> nn.Module:
    model = network()
    model[0].requires_grad_(False)
    return model


def train(model: nn.Module, optimizer: Any, steps: int, *, scale: float = 1.0, spike: int = -1) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        optimizer.zero_grad()
        x = seeded(9, 6, seed=step).to(dtype)
        loss = nn.functional.cross_entropy(model(x), (3 * x[:, 0].sigmoid()).long().clamp(0, 2))
        (loss * scale * (1e4 if step == spike else 1)).backward()
        optimizer.step()


def found(model: nn.Module, optimizer: Any, steps: int = STILL + 5, **options: float) -> dict[tuple[str, str], str]:
    tracker = Tracker(model, optimizer=optimizer, every=1, figures="training")
    train(model, optimizer, steps, **options)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a training that changes nothing has no row, which undo_ says
        tracker.undo_()
    return {(one.code, one.path): one.found for _, one in tracker.findings}


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01, **options})


STEPS = f"{STILL} measured steps in a row did not turn it"


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_layers_behind_and_before_dead_units_are_named(optimizer: Any) -> None:
    model = dead()
    zeros = dict.fromkeys([("G807", "0"), ("G807", "3"), ("G807", "5")], f"{STEPS}: its gradients were 0")
    assert found(model, optimizer(model)) == zeros


def test_layers_that_no_gradient_reaches_are_named() -> None:
    model = Cut()
    assert found(model, adamw(model)) == {("G807", "net.0"): f"{STEPS}: it had no gradient"}


def test_changes_that_rounding_takes_are_named() -> None:
    model = network(torch.bfloat16)
    said = f"{STEPS}, although its gradients were not 0: its changes are below the rounding of bfloat16"
    assert found(model, sgd(model, lr=1e-6)) == {("G807", path): said for path in "035"}


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        (network(), sgd),
        (network(), adamw),
        (network(torch.bfloat16), adamw),
        (Sparing(), adamw),
        (Adapted(), adamw),
        (partly_frozen(), lambda m: adamw(m, weight_decay=0.1)),
        (network(), lambda m: sgd(m, lr=0.0)),
        (network(), lambda m: sgd(m, lr=1e-9)),  # a remark, as at the end of a training
        (network(), lambda m: gonio.optim.Muon(gonio.param_groups(m, matrices=True), lr=0.02)),
    ],
)
def test_trainings_that_go_on_have_no_finding(model: nn.Module, optimizer: Any) -> None:
    assert found(model, optimizer(model), 40) == {}


@pytest.mark.parametrize("options", [{"lr": 100.0}, {"scale": 1e4}, {"spike": 10}])
def test_steps_beyond_the_weight_are_named(options: dict[str, Any]) -> None:
    model = network()
    optimizer = sgd(model, lr=options.pop("lr", 0.1))
    named = found(model, optimizer, **options)
    assert ("G805", "5") in named
    assert "the step changed it by" in named["G805", "5"]


def test_a_skipped_step_is_no_step_that_turns_nothing() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    tracker = Tracker(model, optimizer=optimizer, every=1, figures="training")
    for step in range(2 * STILL):
        optimizer.zero_grad()
        loss = model(seeded(9, 6)).square().mean() * (float("inf") if step < STILL + 3 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert tracker.rows
    assert tracker.findings == []


def test_the_allowance_is_that_of_a_weight_that_began_at_0() -> None:
    (rule,) = [one for code, one in STEP_RULES.items() if code == "G805"]
    for size, begun, is_found in ((2.9, 1, False), (3.1, 1, True), (0.29, 100, False), (0.11, 10_000, True)):
        facts = StepFacts("a", size, begun, 0, None, "float32")
        assert (rule.finding(facts, "a") is not None) is is_found


def test_a_weight_is_counted_from_when_it_is_first_trained() -> None:
    model = Adapted()
    optimizer = torch.optim.AdamW(model.a.parameters(), lr=0.01)
    tracker = Tracker(model, optimizer=optimizer, every=1, figures="training")
    train(model, optimizer, 200)
    optimizer.add_param_group({"params": list(model.b.parameters())})
    train(model, optimizer, 20)
    assert [one.code for _, one in tracker.findings if one.path == "b"] == []


def test_weights_that_no_optimizer_has_are_named() -> None:
    model = network()
    optimizer = sgd(model)
    model[5] = nn.Linear(16, 3)
    tracker = Tracker(model, optimizer=optimizer, every=1, figures="training")
    ((step, one),) = tracker.findings
    assert (step, one.code, one.level) == (0, "G418", "warn")
    assert tracker.left_out == {"5": "no optimizer that was given steps its parameters"}
    optimizer.add_param_group({"params": list(model[5].parameters())})
    train(model, optimizer, 1)
    assert tracker.left_out == {}
    assert {row["layer"] for row in tracker.rows} == {"0", "3", "5"}


def test_an_optimizer_of_a_part_leaves_the_rest_out_without_a_finding() -> None:
    model = network()
    model[0].requires_grad_(False)
    tracker = Tracker(model, optimizer=sgd(model[5]), every=1, figures="training")
    assert tracker.left_out == {"3": "no optimizer that was given steps its parameters"}
    assert tracker.findings == []
