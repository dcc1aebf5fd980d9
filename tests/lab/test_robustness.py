"""Attacks against analytic optima of linear models, and signs of gradient masking."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gonio.lab import AttackConfig, Split, Task, TrainingConfig
from gonio.lab.running.robustness import (
    attacked_split,
    fgsm,
    from_text,
    input_gradient,
    log_odds,
    margin,
    noisy,
    pgd,
    robustness,
    survive,
    to_text,
    transferable,
)
from tolerances import exact

EPSILON = 0.3


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def linear(classes: int = 2, dim: int = 6) -> tuple[nn.Linear, Tensor, Tensor]:
    """A linear model with examples that it classifies right."""
    model = nn.Linear(dim, classes).double()
    with torch.no_grad():
        model.weight.copy_(torch.randn(classes, dim, generator=draw(1), dtype=torch.float64))
        model.bias.copy_(torch.randn(classes, generator=draw(2), dtype=torch.float64))
    inputs = torch.randn(400, dim, generator=draw(3), dtype=torch.float64)
    return model, inputs, model(inputs).argmax(1)


def least_margin(model: nn.Linear, inputs: Tensor, targets: Tensor, epsilon: float) -> Tensor:
    """By how much the right class can be kept below every other: Hölder's inequality, class by class.

    min over the ball of (w_y − w_j)·x' + b_y − b_j is its value at x less ε‖w_y − w_j‖₁.
    """
    weight, bias = model.weight.detach(), model.bias.detach()
    gaps = []
    for x, y in zip(inputs, targets.tolist(), strict=True):
        others = [j for j in range(len(weight)) if j != y]
        gaps.append(
            min(
                float((weight[y] - weight[j]) @ x + bias[y] - bias[j] - epsilon * (weight[y] - weight[j]).abs().sum())
                for j in others
            )
        )
    return torch.tensor(gaps, dtype=torch.float64)


def test_fgsm_and_pgd_reach_the_analytic_optimum_of_a_linear_model() -> None:
    model, inputs, targets = linear()
    ball = AttackConfig(epsilon=EPSILON, steps=10, restarts=2)
    best = least_margin(model, inputs, targets, EPSILON)
    stepped = fgsm(model, inputs, targets, ball)
    torch.testing.assert_close(-margin(model(stepped), targets).detach(), best, **exact(torch.float64))
    assert torch.equal(survive(model, stepped, targets), best > 0)
    assert 20 < int((best > 0).sum()) < 380  # neither all nor none: the comparison says something
    moved = pgd(model, inputs, targets, ball, generator=draw())
    assert torch.equal(survive(model, moved, targets), best > 0)
    # where PGD fails to mislead it has gone on to the end, and that is the optimum
    kept = best > 0
    torch.testing.assert_close(-margin(model(moved), targets).detach()[kept], best[kept], **exact(torch.float64))


def test_pgd_with_restarts_finds_what_can_be_found_among_many_classes() -> None:
    model, inputs, targets = linear(classes=5)
    best = least_margin(model, inputs, targets, EPSILON)
    moved = pgd(model, inputs, targets, AttackConfig(epsilon=EPSILON, steps=40, restarts=6), generator=draw())
    standing = survive(model, moved, targets)
    assert bool((standing[best > 0]).all())  # nobody does better than the optimum
    missed = int((standing & (best < 0)).sum())
    assert missed <= 0.02 * len(inputs)  # ascending a sum over classes can end at the wrong one
    once = survive(model, fgsm(model, inputs, targets, AttackConfig(epsilon=EPSILON)), targets)
    assert int(standing.sum()) <= int(once.sum())


@pytest.mark.parametrize("bounds", [(None, None), (-0.5, 0.5)])
def test_no_attack_leaves_its_ball(bounds: tuple[float | None, float | None]) -> None:
    model, inputs, targets = linear(classes=3)
    inputs = inputs.clamp(*bounds) if bounds[0] is not None else inputs
    ball = AttackConfig(epsilon=EPSILON, low=bounds[0], high=bounds[1], steps=7, restarts=3)
    for moved in (
        fgsm(model, inputs, targets, ball),
        noisy(inputs, ball, draw()),
        pgd(model, inputs, targets, ball, generator=draw()),
        pgd(model, inputs, targets, replace(ball, restarts=1), generator=draw(), smoothing=0.1),
    ):
        assert float((moved - inputs).abs().max()) <= EPSILON * (1 + 1e-12)
        assert float((moved - inputs).abs().max()) > 0.9 * EPSILON
        if bounds[0] is not None:
            assert -0.5 <= float(moved.min()) <= float(moved.max()) <= 0.5


def test_the_gradient_of_a_sure_model_is_not_rounded_away() -> None:
    model, inputs, targets = linear()
    sure = nn.Linear(6, 2)
    sure.load_state_dict({key: 60 * value.float() for key, value in model.state_dict().items()})
    single = inputs.float()
    lost = F.cross_entropy(sure(single), targets, reduction="none") == 0
    assert int(lost.sum()) > 100  # float32 sees no loss there, hence no gradient
    gradient = input_gradient(sure, single, targets)
    sides = (sure.weight[1] - sure.weight[0]) * (1 - 2 * targets[:, None])
    assert torch.equal(gradient.sign(), sides.sign())


def test_the_direction_is_the_cross_entropys() -> None:
    model, inputs, targets = linear(classes=4)
    found = input_gradient(model, inputs, targets)
    wanted = input_gradient(model, inputs, targets, lambda z, y: F.cross_entropy(z, y, reduction="none"))
    assert torch.equal(found.sign(), wanted.sign())


def test_objectives_against_their_formulas() -> None:
    logits = torch.randn(20, 4, generator=draw(4), dtype=torch.float64)
    targets = torch.arange(20) % 4
    for row, target, found, gap in zip(
        logits, targets.tolist(), F.softplus(log_odds(logits, targets)), margin(logits, targets), strict=True
    ):
        others = [float(row[j]) for j in range(4) if j != target]
        torch.testing.assert_close(found, (row.exp().sum() / row[target].exp()).log(), **exact(torch.float64))
        assert float(gap) == max(others) - float(row[target])


def test_a_tie_is_not_right() -> None:
    assert survive(lambda x: x, torch.tensor([[1.0, 1.0], [2.0, 1.0]]), torch.tensor([0, 0])).tolist() == [False, True]


# a task of two Gaussian clouds, whose inputs are standardised in front of the model
def clouds(standardize: tuple[tuple[float, ...], tuple[float, ...]] | None = None) -> Task:
    targets = torch.arange(300) % 2
    inputs = 0.5 + 0.1 * torch.randn(300, 1, 2, 2, generator=draw(5)) + 0.12 * (2.0 * targets - 1)[:, None, None, None]
    split = Split(inputs, targets)
    return Task(
        name="clouds", train=split, validation=split, test=split, model="-", sizes={}, sesoi=1.0,
        training=TrainingConfig(epochs=1, batch_size=2, lr=0.1), standardize=standardize,
        threat=AttackConfig(epsilon=0.08, steps=10, restarts=2, examples=200),
    )  # fmt: skip


def classifier(factor: float = 1.0) -> nn.Sequential:
    """Right where the mean is above or below 0.5, times the factor that standardisation divides by."""
    layer = nn.Linear(4, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[-8.0] * 4, [8.0] * 4]) * factor)
        layer.bias.copy_(torch.tensor([16.0, -16.0]) * factor)
    return nn.Sequential(nn.Flatten(), layer)


def test_distances_are_in_the_unit_of_the_inputs_whatever_the_model_standardises() -> None:
    plain = clouds()
    scaled = clouds(((0.5,), (0.05,)))
    inner = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    with torch.no_grad():
        inner[1].weight.copy_(torch.tensor([[-0.4] * 4, [0.4] * 4]))
        inner[1].bias.zero_()
    first = robustness(classifier(), plain, plain.threat, None)
    second = robustness(inner, scaled, scaled.threat, None)
    for name in ("clean", "noise", "fgsm", "pgd", "worst"):
        assert first[name] == pytest.approx(second[name], abs=0.5)  # one example may round to the other side
    assert first["clean"] > 95 > 90 > first["pgd"] > 50


def test_a_linear_model_shows_no_sign_and_the_figures_are_ordered() -> None:
    task = clouds()
    found = robustness(classifier(), task, task.threat, transferable(classifier(0.5), task, task.threat))
    assert found["signs"] == []
    assert found["clean"] >= found["noise"] >= found["fgsm"] >= found["pgd"] == found["worst"]
    assert found["transfer"] == found["pgd"]  # the same decision at another scale
    accuracies = [row["accuracy"] for row in found["radii"]]
    assert accuracies == sorted(accuracies, reverse=True)
    assert (accuracies[-1], found["zero_gradients"]) == (0.0, 0.0)


class Steps(nn.Module):
    """Rounds to a grid: as weak as without it, and without a gradient anywhere."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 50).round() / 50


class Saturated(nn.Module):
    """A bounded answer that float32 rounds to its bound: tanh's derivative is exactly 0 there."""

    def forward(self, x: Tensor) -> Tensor:
        return 10 * torch.tanh(100 * x)


@pytest.mark.parametrize("where", ["before", "behind"])
def test_hidden_gradients_are_seen(where: str) -> None:
    task = clouds()
    model = nn.Sequential(Steps(), classifier()) if where == "before" else nn.Sequential(classifier(), Saturated())
    found = robustness(model, task, task.threat, transferable(classifier(), task, task.threat))
    assert found["pgd"] > found["transfer"] + 10  # what PGD alone would have been believed
    assert found["worst"] <= found["transfer"]
    assert any("made for another model mislead more" in sign for sign in found["signs"])
    assert any("have a gradient of exactly 0" in sign for sign in found["signs"])
    assert any("PGD fails even from far away" in sign for sign in found["signs"])


def test_smoothed_gradients_get_through_steps() -> None:
    task = clouds()
    threat = replace(task.threat, epsilon=0.12)
    found = robustness(nn.Sequential(Saturated(), nn.Flatten(), classifier()[1]), task, threat, None)
    ragged = robustness(nn.Sequential(_Ragged(), classifier()), task, threat, None)
    assert ragged["smoothed"] < ragged["pgd"] - 10
    assert any("smoothed gradients mislead more" in sign for sign in ragged["signs"])
    assert found["zero_gradients"] > 50


class _Ragged(nn.Module):
    """A small, fast ripple: the gradient at a point says nothing about the slope around it."""

    def forward(self, x: Tensor) -> Tensor:
        return x - 0.02 * torch.sin(100 * x)


def test_the_attacked_examples_are_the_same_in_every_run_and_travel_bit_for_bit() -> None:
    task = clouds()
    (first, _), (again, _) = attacked_split(task, task.threat), attacked_split(task, task.threat)
    assert torch.equal(first, again)
    assert len(first) == 200
    assert torch.equal(from_text(to_text(first)), first)
    assert robustness(classifier(), task, task.threat, None) == robustness(classifier(), task, task.threat, None)
