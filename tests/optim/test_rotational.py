"""Held norms against the papers' own optimizers: Hyperball, and the rotational variants of Kosson et al.

Both keep norms, and set how far a step turns a weight. A fixed step turns it by arctan η through the whole update; a
rotational variant turns it by η_r on average, through the part of the update that is orthogonal to it, with the η_r at
which the plain optimizer settles. So they are one step where the update is orthogonal to the weight and its size is not
averaged, and the same rotation and memory over many steps with noise as gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gonio
from catalog import seeded
from gonio.measuring import equilibrium
from references.optim import Adam, Momentum, Rotational, equilibrium_rotation, hyperball, norm

Formula = Callable[..., Tensor]


def held_layer(norm_by: str, lr: float, **options: Any) -> tuple[nn.Linear, torch.optim.Optimizer]:
    layer = nn.Linear(12, 7, bias=False, dtype=torch.float64)
    layer.weight.data = seeded(7, 12, dtype=torch.float64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=lr, **options)
    gonio.hold_(layer, optimizer, norm=norm_by, step="fixed")
    return layer, optimizer


def orthogonal(g: Tensor, w: Tensor, by_row: bool) -> Tensor:
    """The gradient of a function that does not depend on the norm of w."""
    inner = (g * w).sum(1, keepdim=True) if by_row else (g * w).sum()
    return (g - w * inner / norm(w, by_row) ** 2) / norm(w, by_row)


def largest_deviation(formula: Formula, *, by_row: bool) -> float:
    """Of ten steps by `hold_` from a formula that is given the weight before each step and SGD's update."""
    layer, optimizer = held_layer("filters" if by_row else "matrix", 0.05, momentum=0.8)
    radius, direction, found = norm(layer.weight.detach(), by_row), Momentum(0.8), 0.0
    for seed in range(10):
        before = layer.weight.detach().clone()
        layer.weight.grad = seeded(7, 12, seed=seed, dtype=torch.float64)
        u = direction.update(layer.weight.grad)
        optimizer.step()
        found = max(found, float((layer.weight.detach() - formula(before, u, 0.05, radius, by_row=by_row)).abs().max()))
    return found


@pytest.mark.parametrize("by_row", [False, True])
def test_hyperball_is_a_fixed_step(by_row: bool) -> None:
    assert largest_deviation(hyperball, by_row=by_row) < 1e-14


def without_projection(w: Tensor, u: Tensor, rate: float, radius: Tensor, *, by_row: bool) -> Tensor:
    return w - rate * radius * u / norm(u, by_row)


def without_radius(w: Tensor, u: Tensor, rate: float, radius: Tensor, *, by_row: bool) -> Tensor:
    return hyperball(w, u, rate / float(radius.mean()), radius, by_row=by_row)


def of_the_other_vectors(w: Tensor, u: Tensor, rate: float, radius: Tensor, *, by_row: bool) -> Tensor:
    return hyperball(w, u, rate, norm(w, not by_row), by_row=not by_row)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("formula", [without_projection, without_radius, of_the_other_vectors])
def test_other_formulas_are_told_from_it(formula: Formula, by_row: bool) -> None:
    """Negative controls."""
    assert largest_deviation(formula, by_row=by_row) > 1e-3


# --- rotational variants ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_row", [False, True])
def test_one_step_is_that_of_the_rotational_variant_where_updates_are_orthogonal(by_row: bool) -> None:
    rate = equilibrium_rotation("sgd", 0.1, 0.02, 0.0)
    layer, optimizer = held_layer("filters" if by_row else "matrix", rate)
    variant = Rotational(norm(layer.weight.detach(), by_row), rate, share=1.0, by_row=by_row)
    w = layer.weight.detach().clone()
    for seed in range(10):
        layer.weight.grad = orthogonal(seeded(7, 12, seed=seed + 1, dtype=torch.float64), w, by_row)
        w = variant.step(w, layer.weight.grad)
        optimizer.step()
        assert torch.allclose(layer.weight, w, rtol=0, atol=1e-13)


def test_a_radial_part_of_the_update_is_removed_by_the_variant_alone() -> None:
    """Where they differ: a fixed step spends a part of its length on the radial direction."""
    layer, optimizer = held_layer("matrix", 0.1)
    w = layer.weight.detach().clone()
    u = orthogonal(seeded(7, 12, seed=1, dtype=torch.float64), w, False)
    layer.weight.grad = u + w * float(norm(u, False) / norm(w, False))  # at 45 degrees to w
    variant = Rotational(norm(w, False), 0.1, share=1.0).step(w, layer.weight.grad)
    optimizer.step()

    def turned(after: Tensor) -> float:
        return math.acos(float((w * after).sum() / norm(w, False) / norm(after, False)))

    part = math.sqrt(0.5)
    assert turned(variant) == pytest.approx(math.atan(0.1), rel=1e-9)
    assert turned(layer.weight.detach()) == pytest.approx(math.atan(0.1 * part / (1 - 0.1 * part)), rel=1e-9)


LR, DECAY, MOMENTUM, STEPS = 0.02, 0.25, 0.9, 2400
LAG = round(1 / (LR * DECAY))  # the direction's memory by AdamW, in steps


def walk(step: Callable[[Tensor, Tensor], Tensor], steps: int = STEPS) -> tuple[float, float]:
    """The root mean square of the rotation per step, and the cosine over the memory's length, in the second half.

    Gradients are noise, orthogonal to the weight and proportional to one over its norm.
    """
    draw = torch.Generator().manual_seed(0)
    w = torch.randn(32, 32, generator=draw, dtype=torch.float64)
    path, squares = [], []
    for t in range(steps):
        after = step(w, orthogonal(torch.randn(32, 32, generator=draw, dtype=torch.float64), w, False))
        cosine = float((w * after).sum() / norm(w, False) / norm(after, False))
        w = after
        if 2 * t >= steps:
            squares.append(math.acos(min(1.0, cosine)) ** 2)
            path.append((w / norm(w, False)).flatten())
    kept = torch.stack(path)
    return math.sqrt(sum(squares) / len(squares)), float((kept[LAG:] * kept[:-LAG]).sum(1).mean())


def by_optimizer(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], *, rate: float | None = None) -> Any:
    """A step of one of torch's optimizers; with a rate through `hold_`, whose learning rate it is."""
    layer = nn.Linear(32, 32, bias=False, dtype=torch.float64)
    optimizer = make([layer.weight])
    started = False

    def step(w: Tensor, g: Tensor) -> Tensor:
        nonlocal started
        if not started:
            layer.weight.data = w.clone()
            started = True
            if rate is not None:
                optimizer.param_groups[0]["lr"] = rate
                gonio.hold_(layer, optimizer, step="fixed")
        layer.weight.grad = g
        optimizer.step()
        return layer.weight.detach().clone()

    return step


def by_variant(direction: Adam | Momentum, rate: float) -> Callable[[Tensor, Tensor], Tensor]:
    made: list[Rotational] = []

    def step(w: Tensor, g: Tensor) -> Tensor:
        made[:] = made or [Rotational(norm(w, False), rate)]
        return made[0].step(w, direction.update(g))

    return step


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in ("sgd", "adamw")])
def test_plain_held_and_rotational_training_turn_alike(name: str) -> None:
    """The rotation per step that the settings predict, and the same memory of the direction, three ways."""
    lr = LR * (1 - MOMENTUM) if name == "sgd" else LR  # the memory of SGD is (1−α)/(ηλ)
    rate = equilibrium_rotation(name, lr, DECAY, MOMENTUM)

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if name == "sgd":
            return torch.optim.SGD(parameters, lr=lr, weight_decay=DECAY, momentum=MOMENTUM)
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=DECAY, betas=(MOMENTUM, 0.99))

    weight = nn.Parameter(torch.ones(2, 2))
    assert equilibrium(make([weight]), weight).rotation == pytest.approx(rate, rel=1e-12)
    direction = Momentum(MOMENTUM) if name == "sgd" else Adam((MOMENTUM, 0.99))
    plain, held, variant = (
        walk(by_optimizer(make)),
        walk(by_optimizer(make, rate=rate)),
        walk(by_variant(direction, rate)),
    )
    # 1,200 steps of correlated noise average to 1 %; Adam's second moments remember other norms
    assert [plain[0], held[0], variant[0]] == pytest.approx([rate] * 3, rel=0.03)
    # a walk of six memories: 0.1 is two standard deviations of its mean cosine
    assert [plain[1], held[1], variant[1]] == pytest.approx([math.exp(-1)] * 3, abs=0.1)


def test_the_walk_tells_a_wrong_rate() -> None:
    """Negative control: the rate without momentum is off by a factor of √19 for AdamW."""
    right = equilibrium_rotation("adamw", LR, DECAY, MOMENTUM)
    wrong = equilibrium_rotation("adamw", LR, DECAY, 0.0)
    turned, cosine = walk(by_variant(Adam((MOMENTUM, 0.99)), wrong), steps=800)
    assert turned / right == pytest.approx(math.sqrt(19), rel=0.1)
    assert abs(cosine - math.exp(-1)) > 0.2
