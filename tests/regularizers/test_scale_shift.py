"""WEISSI: invariance, the two gradients, the floor, and the printed formula that is constant."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from catalog import regularizers as reference
from catalog import seeded
from gonio import Penalty
from gonio import regularizers as R
from regularizers.test_orthogonality import gradient
from tolerances import close, exact

DOUBLE = torch.float64
SCALE = R.ScaleShift(1.0, floor=0.1)
DIRECTION = R.ScaleShift(1.0, direction_strength=1.0, floor=1e6)  # the logarithm is constant under the floor


def layers(depth: int = 3) -> list[Tensor]:
    return [seeded(4, 4, seed=i, dtype=DOUBLE) for i in range(depth)]


def total(regularizer: R.WeightRegularizer, weights: list[Tensor]) -> Tensor:
    return torch.stack([regularizer(w) for w in weights]).sum()


def test_scale_moved_between_layers_changes_nothing() -> None:
    weights, factors = layers(), (4.0, 0.5, 0.5)
    moved = [f * w for f, w in zip(factors, weights, strict=True)]
    torch.testing.assert_close(total(SCALE, moved), total(SCALE, weights), **exact(DOUBLE))
    both = R.ScaleShift(1.0, direction_strength=0.3, floor=0.1)
    torch.testing.assert_close(total(both, moved), total(both, weights), **exact(DOUBLE))
    for f, w, m in zip(factors, weights, moved, strict=True):
        torch.testing.assert_close(f * gradient(both, m), gradient(both, w), **exact(DOUBLE))


def test_l2_is_lowered_by_moving_scale() -> None:
    """Negative control, and the seed's argument against L2."""
    weights = [4 * layers()[0], 0.25 * layers()[1]]
    moved = [weights[0] / 4, weights[1] * 4]
    assert total(R.L2(1.0), moved) < 0.5 * total(R.L2(1.0), weights)


def test_rescaling_single_neurons_is_seen() -> None:
    first, second = layers(2)
    s = torch.tensor([3.0, 1.0, 1.0, 1.0], dtype=DOUBLE)
    assert abs(total(SCALE, [s[:, None] * first, second / s]) - total(SCALE, [first, second])) > 0.05


def test_the_gradient_of_the_second_term_is_orthogonal_to_the_weight() -> None:
    w = seeded(3, 5, dtype=DOUBLE)
    found = gradient(DIRECTION, w)
    assert abs(float((found * w).sum())) < 1e-12
    assert float(found.abs().max()) > 0.1, "with an L2 norm, as one account prints it, the term is a constant"


def test_terms_add_up_with_their_own_strengths() -> None:
    w = seeded(3, 5, dtype=DOUBLE)
    both = R.ScaleShift(0.5, direction_strength=0.2, floor=1e-3)
    expected = 0.5 * reference.log_norm(w, 1e-3) + 0.2 * reference.direction(w)
    torch.testing.assert_close(both(w), expected, **close(DOUBLE))
    per_root = R.ScaleShift(0.5, direction_strength=0.2, floor=1e-3, direction_scale="sqrt_numel")
    expected = 0.5 * reference.log_norm(w, 1e-3) + 0.2 * reference.direction(w) / math.sqrt(15)
    torch.testing.assert_close(per_root(w), expected, **close(DOUBLE))
    torch.testing.assert_close(R.ScaleShift.paper(0.5, 0.2)(w), both(w), **close(DOUBLE))


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-3, 1.0], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=str)
def test_small_weights_are_let_go(scale: float, dtype: torch.dtype) -> None:
    w = scale * seeded(3, 5, dtype=dtype)
    for regularizer in (R.ScaleShift(1e-2, direction_strength=1e-3), R.ScaleShift.paper(1e-2, 0.0)):
        assert regularizer.value(w).isfinite()
        assert gradient(regularizer, w).isfinite().all()
    below = R.ScaleShift(1.0, floor=100.0)
    assert float(below.value(w)) == pytest.approx(math.log(100.0))
    assert torch.equal(gradient(below, w), torch.zeros_like(w))


def test_the_l1_norm_of_a_large_weight_keeps_its_digits() -> None:
    """torch's own norms add up a million entries in a row in float32, and lose four digits."""
    weight = seeded(1500, 1500).requires_grad_()
    value = R.ScaleShift(1.0, direction_strength=1.0, floor=0.1).evaluate(weight).terms["direction"]
    torch.testing.assert_close(value.double(), reference.direction(weight.detach().double()), rtol=1e-6, atol=0)


def test_a_floor_is_fitted_to_strength_and_weight() -> None:
    assert R.ScaleShift(1e-4).effective_floor == pytest.approx(1e-3)
    assert R.ScaleShift(1e-3).fitted(5.0).floor == pytest.approx(0.2)
    assert R.ScaleShift(1e-3, every=4).fitted(5.0).floor == pytest.approx(0.4)
    assert R.ScaleShift(1.0).fitted(5.0).floor == pytest.approx(2.5)
    assert R.ScaleShift(1.0, floor=0.2).fitted(5.0).floor == 0.2
    assert R.ScaleShift(1e-3).fitted(5.0).largest_rate == pytest.approx(10.0)
    assert R.ScaleShift(1e-3, every=4).fitted(5.0).largest_rate == pytest.approx(10.0)
    assert R.ScaleShift(0.0).value(torch.ones(2, 2)).isfinite()
    assert R.ScaleShift(0.0).largest_rate == math.inf


def descent(regularizer: R.ScaleShift, weight: nn.Parameter, *, lr: float, momentum: float = 0.0) -> list[float]:
    """The component along the first direction in two thousand steps of SGD."""
    direction = weight.detach() / weight.detach().norm()
    optimizer = torch.optim.SGD([weight], lr=lr, momentum=momentum)
    found = []
    for _ in range(2000):
        optimizer.zero_grad()
        regularizer(weight).backward()
        optimizer.step()
        found.append(float((weight.detach() * direction).sum()))
    return found


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("strength", [1e-3, 1e-2, 1.0])
def test_descent_never_overshoots_the_floor(strength: float, momentum: float) -> None:
    """E1: at the largest rate that the fitted floor is made for."""
    weight = nn.Parameter(seeded(3, 5, dtype=DOUBLE))
    regularizer = R.ScaleShift(strength).fitted(float(weight.detach().norm()))
    norms = descent(regularizer, weight, lr=regularizer.largest_rate * (1 - momentum) ** 2, momentum=momentum)
    assert min(norms) > 0.7 * regularizer.effective_floor, "carried far below the floor, or past zero"
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(norms)), "the norm rose again"


def test_descent_overshoots_without_a_floor() -> None:
    """Negative control: the published form at the same strength and rate."""
    norms = descent(R.ScaleShift.paper(1.0, 0.0), nn.Parameter(seeded(3, 5, dtype=DOUBLE)), lr=0.1)
    assert max(abs(b / a) for a, b in itertools.pairwise(norms)) > 2


# --- on a network whose loss does not see the scale -------------------------------------------------


def normalised_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def train(model: nn.Sequential, regularizer: R.ScaleShift, steps: int) -> tuple[list[float], list[float]]:
    """Norms of the first weight and losses; a teacher on fixed data."""
    x = seeded(256, 10)
    y = (x @ seeded(10, 4, seed=1)).argmax(1)
    penalty = Penalty(model, [(None, regularizer)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms, losses = [], []
    for step in range(steps):
        rows = torch.arange(step * 32, step * 32 + 32) % 256
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        (loss + penalty()).backward()
        optimizer.step()
        norms.append(float(model[0].weight.detach().norm()))
        losses.append(float(loss.detach()))
    return norms, losses


def biggest_jump(norms: list[float]) -> float:
    return max(b / a for a, b in itertools.pairwise(norms))


@pytest.mark.slow
@pytest.mark.parametrize("before_norm", ["skip", "keep"])
def test_a_normalised_network_does_not_catapult(before_norm: str) -> None:
    """2,000 steps at λ = 1, lr = 0.1: by default the weight is left out; kept, the floor holds it."""
    regularizer = R.ScaleShift(1.0, before_norm=before_norm)  # type: ignore[arg-type]
    norms, losses = train(normalised_network(), regularizer, 2000)
    assert biggest_jump(norms) < 1.1
    assert min(norms) > 0.9
    assert sum(losses[-100:]) / 100 < 0.8, "chance is 1.39"


@pytest.mark.slow
def test_a_normalised_network_catapults_without_a_floor() -> None:
    """Negative control: the published form on the same network."""
    norms, _ = train(normalised_network(), R.ScaleShift.paper(1.0, 0.0), 2000)
    assert biggest_jump(norms) > 2
