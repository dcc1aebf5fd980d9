"""The figures of a step, and the rotation that an optimizer's settings predict: against simulations and trainings."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from catalog import seeded
from foreign import TORCHS_MUON
from gonio.errors import InvalidArgumentError
from gonio.measuring import Equilibrium, equilibrium, register_equilibrium, step_rotation

Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


class Lion(torch.optim.Optimizer):
    """Chen et al., arXiv 2302.06675, algorithm 2, written for these tests."""

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            β1, β2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                update = torch.sign(β1 * m + (1 - β1) * p.grad)
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update)
                m.lerp_(p.grad, 1 - β2)


register_equilibrium(Lion, "lion")


# --- the figures --------------------------------------------------------------------------------------------------


def turned(w: Tensor, angle: float, factor: float) -> Tensor:
    """w turned by an angle towards a fixed orthogonal direction, and lengthened."""
    other = torch.zeros_like(w)
    other[0], other[1] = -w[1], w[0]  # ⟂ w if the rest of w is 0
    return factor * (math.cos(angle) * w + math.sin(angle) * other * w.norm() / other.norm())


@pytest.mark.parametrize("angle", [1e-12, 1e-6, 0.1, 1.0, 3.0])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.3])
def test_a_known_rotation(angle: float, factor: float) -> None:
    w = torch.zeros(5, dtype=torch.float64)
    w[:2] = torch.tensor([0.6, -2.0])
    found = step_rotation(w, turned(w, angle, factor))
    n, dx, dy = 1.0, factor * math.cos(angle) - 1, factor * math.sin(angle)
    # a radial change of size r hides a tangential one below √ε r: q² is a difference of squares
    tolerance = 1e-9 if factor == 1 or angle > 1e-3 else 1e-7
    assert float(found.rotation) == pytest.approx(angle, rel=1e-4 if angle < 1e-9 else 1e-9, abs=tolerance)
    assert float(found.relative_update) == pytest.approx(math.hypot(dx, dy) / n, rel=1e-9)
    assert float(found.norm) == pytest.approx(math.hypot(0.6, 2.0))
    if factor != 1:
        assert float(found.radial_share) == pytest.approx(dx**2 / (dx**2 + dy**2), rel=1e-9)


def test_rounding_is_no_rotation() -> None:
    """Where a large change is along the weight, a tangential part that is lost in rounding counts as 0."""
    w, p = seeded(1000, dtype=torch.float64), seeded(1000, seed=1, dtype=torch.float64)
    p -= (p @ w) / (w @ w) * w
    p *= w.norm() / p.norm()
    assert float(step_rotation(w, 1.7 * w).rotation) == 0
    assert float(step_rotation(w, 3 * w + 3e-9 * p).rotation) == 0
    assert float(step_rotation(w, 3 * w + 3e-5 * p).rotation) == pytest.approx(1e-5, rel=1e-5)
    assert float(step_rotation(w, w + 1e-12 * p).rotation) == pytest.approx(1e-12, rel=1e-3)
    rows = step_rotation(torch.stack([w, w]), torch.stack([1.7 * w, -w]), by_row=True)
    assert rows.rotation.tolist() == pytest.approx([0, math.pi])
    assert math.isnan(step_rotation(w, w * math.inf).rotation)


def test_rows_are_turned_each_by_itself() -> None:
    draw = torch.Generator().manual_seed(0)
    before, after = torch.randn(4, 7, generator=draw), torch.randn(4, 7, generator=draw)
    rows = step_rotation(before, after, by_row=True)
    for name in ("norm", "rotation", "relative_update", "radial_share"):
        alone = [getattr(step_rotation(b, a), name) for b, a in zip(before, after, strict=True)]
        assert torch.allclose(getattr(rows, name), torch.stack(alone), rtol=1e-12)
    cosines = torch.cosine_similarity(before.double(), after.double())
    assert torch.allclose(rows.rotation, torch.arccos(cosines), rtol=1e-9)


def test_the_radial_share_of_a_random_direction_is_one_over_d() -> None:
    """Mean 1/d and standard deviation √2/d, over 2,000 draws: the mean within 4 standard errors."""
    draw, d = torch.Generator().manual_seed(0), 50
    before = torch.randn(2000, d, generator=draw)
    share = step_rotation(before, before + torch.randn(2000, d, generator=draw), by_row=True).radial_share
    assert abs(float(share.mean()) * d - 1) < 4 * math.sqrt(2 / 2000)
    assert float(share.std()) * d == pytest.approx(math.sqrt(2), rel=0.15)


def test_a_step_that_changes_nothing_and_a_weight_of_zeros() -> None:
    w = torch.ones(3)
    still = step_rotation(w, w)
    assert (float(still.rotation), float(still.relative_update)) == (0, 0)
    assert still.radial_share.isnan()
    assert step_rotation(0 * w, w).rotation.isnan()
    with pytest.raises(InvalidArgumentError, match=r"same weight before and after .* \(3,\) and \(2,\)"):
        step_rotation(w, w[:2])


# --- predictions --------------------------------------------------------------------------------------------------

SIMULATED: dict[str, tuple[Make, float]] = {
    # by how much the seen rotation may differ: 3,000 steps average to 0.5 %
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.1), 0.01),
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.05), 0.01),
    "Nesterov": (lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.05, nesterov=True), 0.01),
    "dampening": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.05, dampening=0.5), 0.01),
    "AdamW": (lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.5, betas=(0.9, 0.99)), 0.02),
    # β₂ remembers the larger gradients of earlier, smaller norms
    "AdamW β₂": (lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.5), 0.08),
    "Adam with L2": (lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.5, betas=(0.9, 0.99)), 0.03),
    "Lion": (lambda p: Lion(p, lr=0.005, weight_decay=1.0), 0.01),
    # the cubic law of the correlation of polar factors is an approximation
    "Muon": (lambda p: torch.optim.Muon(p, lr=0.02, weight_decay=0.25), 0.06),
    "Muon without Nesterov": (lambda p: torch.optim.Muon(p, lr=0.02, weight_decay=0.25, nesterov=False), 0.06),
}


def simulate(make: Make, steps: int = 3000, size: tuple[int, int] = (32, 32)) -> tuple[float, float]:
    """The root mean square of the rotation over the second half, and of the predictions, for noise as gradients that
    are orthogonal to the weight and proportional to one over its norm."""
    draw = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(size, generator=draw))
    optimizer = make([weight])
    seen = predicted = 0.0
    for step in range(steps):
        before = weight.detach().clone()
        noise = torch.randn(size, generator=draw)
        noise -= (noise * before).sum() / before.square().sum() * before
        weight.grad = noise * math.sqrt(before.numel()) / before.norm()
        optimizer.step()
        if 2 * step >= steps:
            seen += float(step_rotation(before, weight).rotation) ** 2
            predicted += (equilibrium(optimizer, weight).rotation or 0) ** 2
    return math.sqrt(2 * seen / steps), math.sqrt(2 * predicted / steps)


def _marks(name: str) -> list[pytest.MarkDecorator]:
    slow = [] if name in ("momentum", "AdamW") else [pytest.mark.slow]
    return [*slow, TORCHS_MUON] if name.startswith("Muon") else slow


@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(name)) for name in SIMULATED])
def test_the_prediction_holds_in_simulation(name: str) -> None:
    make, tolerance = SIMULATED[name]
    seen, predicted = simulate(make)
    assert seen == pytest.approx(predicted, rel=tolerance)


def test_the_simulation_tells_a_wrong_formula() -> None:
    """Negative control: the formula without momentum is off by a factor of √1.9."""
    seen, predicted = simulate(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.02))
    without_momentum = predicted * math.sqrt(1.9)
    assert abs(seen / predicted - 1) < 0.02 < 0.2 < abs(seen / without_momentum - 1)


def test_the_closed_forms() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    sgd = torch.optim.SGD([weight], lr=0.1, momentum=0.9, weight_decay=0.01)
    adamw = torch.optim.AdamW([weight], lr=0.01, weight_decay=0.1)
    assert equilibrium(sgd, weight).rotation == pytest.approx(math.sqrt(2 * 0.1 * 0.01 / 1.9))
    assert equilibrium(sgd, weight).steps == pytest.approx(1 / (0.1 * 0.01 / 0.1))
    assert equilibrium(adamw, weight).rotation == pytest.approx(math.sqrt(2 * 0.01 * 0.1 * 0.1 / 1.9))
    assert equilibrium(adamw, weight).steps == pytest.approx(1000)
    tensor_rate = torch.optim.AdamW([weight], lr=torch.tensor(0.01), weight_decay=0.1)
    assert equilibrium(tensor_rate, weight).rotation == pytest.approx(equilibrium(adamw, weight).rotation)


@pytest.mark.skipif(
    "decoupled_weight_decay" not in inspect.signature(torch.optim.Adam).parameters, reason="torch 2.6 has AdamW alone"
)
def test_adam_with_decoupled_decay_is_adamw() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    decoupled = torch.optim.Adam([weight], lr=0.01, weight_decay=0.1, decoupled_weight_decay=True)
    assert equilibrium(decoupled, weight) == equilibrium(torch.optim.AdamW([weight], lr=0.01, weight_decay=0.1), weight)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), "no weight decay"),
        (lambda p: torch.optim.SGD(p, lr=0.0, weight_decay=0.1), "the learning rate is 0"),
        (lambda p: torch.optim.RMSprop(p, lr=0.1, weight_decay=0.1), "the equilibrium of RMSprop is not known"),
        (lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1), "Adam with L2 has taken no step yet"),
    ],
)
def test_no_prediction_says_why(make: Make, reason: str) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    assert equilibrium(make([weight]), weight) == Equilibrium(None, reason=reason)


def test_a_parameter_of_another_optimizer_is_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(InvalidArgumentError, match=r"needs a parameter of the optimizer; found one of shape \(3,\)"):
        equilibrium(optimizer, nn.Parameter(torch.ones(3)))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.02),
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.5, betas=(0.9, 0.99)),
        lambda p: Lion(p, lr=0.003, weight_decay=1.0),
    ],
    ids=["SGD", "AdamW", "Lion"],
)
def test_a_layer_before_batch_norm_rotates_as_predicted(make: Make) -> None:
    """Random targets, so that noise dominates: within 10 %."""
    draw = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    layer = nn.Linear(64, 8, bias=False)
    model = nn.Sequential(layer, nn.BatchNorm1d(8))
    optimizer = make([layer.weight])
    seen = []
    for _ in range(1500):
        before = layer.weight.detach().clone()
        optimizer.zero_grad()
        (model(torch.randn(16, 64, generator=draw)) * torch.randn(16, 8, generator=draw)).sum().backward()
        optimizer.step()
        seen.append(float(step_rotation(before, layer.weight).rotation))
    rms = math.sqrt(sum(x * x for x in seen[-700:]) / 700)
    assert rms == pytest.approx(equilibrium(optimizer, layer.weight).rotation, rel=0.1)
