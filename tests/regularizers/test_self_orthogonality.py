"""The Self-Orthogonality Module: what it estimates, what it does to angles, and what it costs."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import gonio
from catalog import seeded
from gonio import regularizers as R
from gonio.errors import InvalidArgumentError
from gonio.geometry import angles
from tolerances import close

DOUBLE = torch.float64
OPTIONS: dict[str, R.SelfOrthogonality] = {
    "default": R.SelfOrthogonality(1.0),
    "paper": R.SelfOrthogonality.paper(),
    "not centred": R.SelfOrthogonality(1.0, center=False),
    "standardised": R.SelfOrthogonality(1.0, standardize=True),
    "standardised, not centred": R.SelfOrthogonality(1.0, standardize=True, center=False),
    "sum": R.SelfOrthogonality(1.0, reduction="sum"),
    "mean alone": R.SelfOrthogonality(1.0, spread_ratio=0.0),
}
OVER_OPTIONS = pytest.mark.parametrize("regularizer", OPTIONS.values(), ids=OPTIONS)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def value_and_gradient(regularizer: R.SelfOrthogonality, y: Tensor, **options: int) -> tuple[Tensor, Tensor]:
    y = y.detach().requires_grad_()
    value = regularizer.value(y, **options)
    return value.detach(), torch.autograd.grad(value, y)[0]


def off_diagonal(square: Tensor) -> Tensor:
    return square[~torch.eye(len(square), dtype=torch.bool)]


def pair(theta: float, dim: int = 20) -> Tensor:
    w = torch.zeros(2, dim, dtype=DOUBLE)
    w[0, 0], w[1, 0], w[1, 1] = 1.0, math.cos(theta), math.sin(theta)
    return w


# --- what it estimates ----------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", range(0, 181, 15))
def test_gaussian_probes_read_the_angle(degrees: int) -> None:
    """ϑ → 1 − 2θ/π within 3/√b: the spread term of one pair is ϑ² (γ large enough for a sign)."""
    samples, theta = 4000, math.radians(degrees)
    y = torch.randn(samples, 20, generator=generator(), dtype=DOUBLE) @ pair(theta).T
    sharp = R.SelfOrthogonality(1.0, mean_ratio=0.0, gamma=1000.0, center=False)
    estimate = float(sharp.value(y)) ** 0.5
    assert abs(estimate - abs(1 - 2 * theta / math.pi)) < 3 / math.sqrt(samples)


def soft_agreement(x: Tensor, w: Tensor, *, center: bool) -> Tensor:
    """ϑ of every pair, from pairs of channels one at a time (the library gives their squares)."""
    y = x @ w.T
    y = y - y.mean(0) if center else y
    t = torch.tanh(10 * y)
    t = t / t.norm(dim=0)
    return off_diagonal(t.T @ t)


def test_rectified_inputs_need_centring() -> None:
    """Correlation with 1 − 2θ/π: at least 0.9 centred, at most 0.3 not, and right angles read as 0 only centred."""
    x = torch.relu(torch.randn(8192, 256, generator=generator(), dtype=DOUBLE))
    w = torch.randn(24, 256, generator=generator(1), dtype=DOUBLE)
    truth = off_diagonal(1 - 2 * angles(w) / math.pi)
    centred, plain = (soft_agreement(x, w, center=c) for c in (True, False))
    assert float(torch.corrcoef(torch.stack([centred, truth]))[0, 1]) >= 0.9
    assert float(torch.corrcoef(torch.stack([plain, truth]))[0, 1]) <= 0.3
    spread = {c: float(R.SelfOrthogonality(1.0, mean_ratio=0.0, center=c).value(x @ w.T)) for c in (True, False)}
    assert spread[True] == pytest.approx(float(centred.square().mean()))
    assert spread[False] == pytest.approx(float(plain.square().mean()))
    assert spread[False] > 5 * spread[True]


@pytest.mark.parametrize(("samples", "filters"), [(128, 16), (128, 64), (1024, 16), (1024, 64)])
def test_mean_reduction_does_not_depend_on_the_size_of_the_problem(samples: int, filters: int) -> None:
    """Equally correlated outputs (ρ = 1/2) have one value, up to sampling noise."""
    shared = torch.randn(samples, 1, generator=generator(), dtype=DOUBLE)
    own = torch.randn(samples, filters, generator=generator(1), dtype=DOUBLE)
    value = float(R.SelfOrthogonality(1.0, mean_ratio=1.0).value(shared + own))
    expected = 2 * (2 / math.pi * math.asin(0.5)) ** 2
    assert value == pytest.approx(expected, rel=0.4 if samples == 128 else 0.2)
    total = float(R.SelfOrthogonality(1.0, mean_ratio=1.0, reduction="sum").value(shared + own))
    assert total > 20 * value, "the literal sum grows with the number of pairs"


@pytest.mark.parametrize(("filters", "samples"), [(256, 128), (64, 512)])
def test_the_floor_of_orthogonal_filters_is_the_formula(filters: int, samples: int) -> None:
    """E5: k(k−1)/b from sampling alone; k = 256, b = 128 gives 511."""
    values = []
    for seed in range(4):
        y = torch.randn(samples, filters, generator=generator(seed))
        values.append(R.SelfOrthogonality(1.0, mean_ratio=0.0, center=False, reduction="sum").value(y))
    floor = filters * (filters - 1) / samples
    assert float(torch.stack(values).mean()) == pytest.approx(floor, rel=0.03)


@pytest.mark.parametrize("rho", [0.0, 0.3])
def test_debiased_value(rho: float) -> None:
    samples = 64
    regularizer = R.SelfOrthogonality(1.0, mean_ratio=0.0, gamma=1000.0)
    found = []
    for seed in range(30):
        shared = torch.randn(samples, 1, generator=generator(seed), dtype=DOUBLE)
        own = torch.randn(samples, 24, generator=generator(100 + seed), dtype=DOUBLE)
        y = math.sqrt(rho) * shared + math.sqrt(1 - rho) * own
        found.append(regularizer.debias(regularizer.value(y), samples))
    truth = (2 / math.pi * math.asin(rho)) ** 2
    estimate = torch.stack(found)
    assert abs(float(estimate.mean()) - truth) < 4 * float(estimate.std()) / math.sqrt(30) + 2e-3
    assert truth < 1 / samples or rho > 0


def test_cancelling_correlations_hide_from_the_mean_term_alone() -> None:
    """E6: a filter with its copy and with its negative; the terms are shown one by one."""
    y = torch.randn(512, 2, generator=generator())
    pairs = torch.stack([y[:, 0], y[:, 0], y[:, 1], -y[:, 1]], 1)
    evaluation = R.SelfOrthogonality(1.0).evaluate(pairs)
    assert float(evaluation.terms["mean"]) < 0.2
    assert float(evaluation.terms["spread"]) > 0.3
    torch.testing.assert_close(evaluation.value, evaluation.terms["mean"] + evaluation.terms["spread"])


def test_gamma_is_relative_to_the_scale_of_the_outputs_unless_standardised() -> None:
    y = torch.randn(4096, 2, generator=generator(), dtype=DOUBLE)
    y = torch.stack([y[:, 0], y[:, 0] + y[:, 1]], 1)
    plain = R.SelfOrthogonality(1.0, mean_ratio=0.0)
    # the root of the spread is a cosine (0.71) of faint outputs and a sign agreement (0.5) of strong ones
    assert float(plain.value(1e-3 * y)) ** 0.5 == pytest.approx(math.sqrt(0.5), abs=0.03)
    assert float(plain.value(1e2 * y)) ** 0.5 == pytest.approx(0.5, abs=0.03)
    scaled = R.SelfOrthogonality(1.0, mean_ratio=0.0, standardize=True)
    torch.testing.assert_close(scaled.value(1e-3 * y), scaled.value(1e2 * y))


# --- what it does to angles -----------------------------------------------------------------------


def minimised(regularizer: R.SelfOrthogonality, start: Tensor, *, steps: int) -> Tensor:
    w = start.clone().requires_grad_()
    # A short memory of squared gradients: those of the mean term fall by orders of magnitude on the way.
    optimizer = torch.optim.Adam([w], lr=0.05, betas=(0.9, 0.9))
    probes = generator(5)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / steps)
        x = torch.randn(1024, w.shape[1], generator=probes, dtype=w.dtype)
        optimizer.zero_grad()
        regularizer(x @ w.T).backward()
        optimizer.step()
    return w.detach()


@pytest.mark.parametrize("name", ["default", "standardised"])
def test_it_drives_angles_to_ninety_degrees(name: str) -> None:
    """The paper's claim: mean to 90°, spread to 0, from filters that lean on one another."""
    start = torch.randn(12, 24, generator=generator()) * 0.2 + 0.3
    before = off_diagonal(angles(start)).rad2deg()
    after = off_diagonal(angles(minimised(OPTIONS[name], start, steps=300))).rad2deg()
    assert abs(float(before.mean()) - 90) > 30
    assert abs(float(after.mean()) - 90) < 0.5
    assert float(after.std()) < 2.5 < 5 < float(before.std())


# --- edge cases -----------------------------------------------------------------------------------


@OVER_OPTIONS
@pytest.mark.parametrize("column", [0.0, 1e5], ids=["zero", "constant"])
def test_an_output_that_does_not_vary_is_left_out(regularizer: R.SelfOrthogonality, column: float) -> None:
    y = torch.randn(40, 4, generator=generator())
    with_dead = torch.cat([y, torch.full((40, 1), column)], 1)
    if column and not regularizer.center:
        pytest.skip("a constant has a sign where outputs are not centred")
    value, gradient = value_and_gradient(regularizer, with_dead)
    expected, expected_gradient = value_and_gradient(regularizer, y)
    torch.testing.assert_close(value, expected)
    assert torch.equal(gradient[:, 4], torch.zeros(40))
    torch.testing.assert_close(gradient[:, :4], expected_gradient, rtol=1e-4, atol=1e-7)


@OVER_OPTIONS
@pytest.mark.parametrize(
    ("shape", "groups"), [((16, 1), 1), ((1, 4), 1), ((8, 4), 4), ((0, 4), 1), ((4, 3, 0), 1)], ids=str
)
def test_degenerate_shapes(regularizer: R.SelfOrthogonality, shape: tuple[int, ...], groups: int) -> None:
    """One filter, one sample, one filter per group, nothing at all: a finite value and gradient."""
    value, gradient = value_and_gradient(regularizer, torch.randn(*shape, generator=generator()), groups=groups)
    assert value.isfinite()
    assert gradient.isfinite().all()
    assert shape == (1, 4) or float(value) == 0


def test_a_large_mean_costs_no_digits() -> None:
    y = torch.randn(600, 5, generator=generator(), dtype=DOUBLE)
    shifted = (y + 1e5).float()
    value, gradient = value_and_gradient(R.SelfOrthogonality(1.0), shifted)
    exact, exact_gradient = value_and_gradient(R.SelfOrthogonality(1.0), shifted.double())
    torch.testing.assert_close(value.double(), exact, rtol=1e-4, atol=0)
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=1e-3, atol=1e-6)


# --- how it is computed ---------------------------------------------------------------------------

SHAPES = {
    "tall": ((50, 6), 1),
    "wide": ((4, 9), 1),
    "wide groups": ((3, 12), 2),
    "grouped convolution": ((5, 6, 3, 4), 3),
    "volume": ((2, 4, 2, 3, 2), 1),
}


@OVER_OPTIONS
@pytest.mark.parametrize(("shape", "groups"), SHAPES.values(), ids=SHAPES)
def test_layouts_change_nothing(regularizer: R.SelfOrthogonality, shape: tuple[int, ...], groups: int) -> None:
    y = seeded(*shape, dtype=DOUBLE)
    expected = value_and_gradient(regularizer, y, groups=groups)
    last = y.movedim(1, -1).contiguous().movedim(-1, 1)
    for other in (y, last, y.flip(0).flip(0)):
        for a, b in zip(value_and_gradient(regularizer, other, groups=groups), expected, strict=True):
            torch.testing.assert_close(a, b, **close(DOUBLE))


@OVER_OPTIONS
def test_groups_are_never_paired(regularizer: R.SelfOrthogonality) -> None:
    y = seeded(30, 6, dtype=DOUBLE)
    parts = torch.stack([regularizer.value(y[:, :3]), regularizer.value(y[:, 3:])])
    expected = parts.sum() if regularizer.reduction == "sum" else parts.mean()
    torch.testing.assert_close(regularizer.value(y, groups=2), expected)


@OVER_OPTIONS
@pytest.mark.parametrize("shape", [(9, 4), (3, 5)], ids=str)
def test_first_and_second_derivatives(regularizer: R.SelfOrthogonality, shape: tuple[int, ...]) -> None:
    y = (0.1 * seeded(*shape, dtype=DOUBLE)).requires_grad_()
    assert torch.autograd.gradcheck(regularizer.value, (y,))
    assert torch.autograd.gradgradcheck(regularizer.value, (y,), atol=1e-4)


def test_the_signs_are_all_that_is_kept() -> None:
    """Beside k × k numbers the graph holds one tensor of the size of the outputs; autograd would hold several."""
    y = torch.randn(4096, 32, generator=generator()).requires_grad_()
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        R.SelfOrthogonality(1.0).value(y)
    assert sum(t.numel() for t in saved) <= y.numel() + 32 * 32


@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-4, 1e-6])
def test_small_outputs_are_as_exact_as_large_ones(size: float) -> None:
    """float32 against float64, one channel smaller than the others."""
    y = 0.1 * seeded(600, 6)
    y[:, 2] *= size
    y[:, 4] += y[:, 2] / size  # two that agree, so that there is something to lose
    for regularizer in (R.SelfOrthogonality(1.0), R.SelfOrthogonality.paper()):
        found, wide = (value_and_gradient(regularizer, x) for x in (y, y.double()))
        torch.testing.assert_close(found[0].double(), wide[0], rtol=2e-5, atol=0)
        for mine, true in zip(found[1].double().unbind(1), wide[1].unbind(1), strict=True):
            assert float((mine - true).norm() / true.norm()) < 2e-5


# --- sampling -------------------------------------------------------------------------------------


def test_samples_are_drawn_by_the_generator_alone() -> None:
    regularizer, y = R.SelfOrthogonality(1.0, samples=20), seeded(10, 4, 5, 5)
    torch.manual_seed(1)
    first = regularizer.value(y, generator=generator(3))
    torch.manual_seed(2)
    assert torch.equal(regularizer.value(y, generator=generator(3)), first)
    assert not torch.equal(regularizer.value(y, generator=generator(4)), first)


def test_samples_are_positions_of_the_outputs() -> None:
    regularizer, y = R.SelfOrthogonality(1.0, samples=20), seeded(10, 4, 5, 5)
    assert torch.equal(R.SelfOrthogonality(1.0, samples=250).value(y), R.SelfOrthogonality(1.0).value(y))
    value, gradient = value_and_gradient(regularizer, y, generator=generator(3))  # type: ignore[arg-type]
    used = gradient.abs().sum(1).flatten() > 0
    assert int(used.sum()) == 20
    rows = y.movedim(1, -1).reshape(-1, 4)[used]
    torch.testing.assert_close(value, R.SelfOrthogonality(1.0).value(rows))


# --- the two terms ------------------------------------------------------------------------------------


def test_ratios_are_factors_of_the_terms() -> None:
    y = seeded(64, 6, dtype=DOUBLE)
    mean, spread = (float(R.SelfOrthogonality(1.0, **{f"{name}_ratio": 0.0}).value(y)) for name in ("spread", "mean"))
    both = R.SelfOrthogonality(1.0, mean_ratio=50.0, spread_ratio=3.0)
    assert float(both.value(y)) == pytest.approx(mean / 2 + 3 * spread, rel=1e-12)
    terms = both.evaluate(y).terms
    assert float(terms["mean"]) == pytest.approx(mean / 2, rel=1e-12)
    assert float(terms["spread"]) == pytest.approx(3 * spread, rel=1e-12)


@pytest.mark.parametrize("name", ["mean_ratio", "spread_ratio", "gamma"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_infinite_arguments_are_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"SelfOrthogonality\(\) needs a finite {name}; found {name}="):
        R.SelfOrthogonality(1.0, **{name: value})


def test_without_a_term_there_is_no_penalty() -> None:
    with pytest.raises(InvalidArgumentError, match="needs mean_ratio and spread_ratio >= 0, one of them and gamma > 0"):
        R.SelfOrthogonality(1.0, mean_ratio=0.0, spread_ratio=0.0)


@pytest.mark.parametrize(
    ("rate", "mean_ratio", "collapses"),
    [(0.3, 100.0, True), (0.01, 100.0, False), (0.3, 0.0, False), (100.0, 0.0, True)],
)
def test_steps_that_overshoot_collapse_the_filters_and_measure_finds_it(
    rate: float, mean_ratio: float, collapses: bool
) -> None:
    """The filters grow until their outputs are saturated, where tanh has no gradient; the mean term does it first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1))
    images = torch.tensor(load_digits().images[:1000], dtype=torch.float32)[:, None] / 16
    som = R.SelfOrthogonality(1.0, mean_ratio=mean_ratio)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    start = model[2].weight.detach().norm()
    for step in range(30):
        optimizer.zero_grad()
        som(model(images[step % 20 :: 20])).backward()
        optimizer.step()
    outputs = model(images[:50]).detach()
    saturated = (10 * (outputs - outputs.mean((0, 2, 3), keepdim=True))).abs() > 3
    found = {finding.code for finding in gonio.measure(model).findings}
    assert (model[2].weight.detach().norm() > 10 * start) == collapses
    assert saturated.double().mean() > 0.95 if collapses else saturated.double().mean() < 0.05
    assert found & {"G201", "G301"} if collapses else not found
