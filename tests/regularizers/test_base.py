"""Strength, schedules, errors and bounds: what all regularizers share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalog import REGULARIZERS, seeded
from gonio import regularizers as R
from gonio.errors import InvalidArgumentError
from gonio.geometry import Layout, layout_of, matrix_view
from tolerances import close

OF_WEIGHTS: list[R.WeightRegularizer] = [
    *dict.fromkeys(case.make() for case in REGULARIZERS if case.reads == "weight" and not case.long_to_compile),
    R.SRIP(1.0, iterations=20),
    R.ScaleShift(1.0, floor=0.1, direction_strength=0.5),
    R.ScaleShift(1.0, floor=0.1, direction_strength=0.5, direction_scale="sqrt_numel"),
]
OVER_WEIGHTS = pytest.mark.parametrize("regularizer", OF_WEIGHTS, ids=str)
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 4),
    "tall linear": lambda: nn.Linear(4, 9),
    "one filter": lambda: nn.Linear(5, 1),
    "1d": lambda: nn.Conv1d(3, 4, 3),
    "1x1": lambda: nn.Conv2d(4, 6, 1),
    "grouped": lambda: nn.Conv2d(4, 6, 3, groups=2, stride=2),
    "depthwise": lambda: nn.Conv2d(4, 4, 3, groups=4),
    "dilated": lambda: nn.Conv2d(2, 3, 3, dilation=2),
    "oblong": lambda: nn.Conv2d(2, 3, (1, 5), stride=(1, 2)),
    "3d": lambda: nn.Conv3d(2, 3, 2),
    "transposed": lambda: nn.ConvTranspose2d(4, 6, 3),
    "transposed, grouped": lambda: nn.ConvTranspose2d(4, 6, 3, groups=2),
}
OVER_LAYERS = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)


def weight_and_layout(layer: Callable[[], nn.Module]) -> tuple[Tensor, Layout]:
    module = layer()
    return seeded(*module.weight.shape, dtype=torch.float64), layout_of(module)


@pytest.mark.grid(3)
@OVER_LAYERS
@OVER_WEIGHTS
def test_value_is_finite_and_above_its_bound(regularizer: R.WeightRegularizer, layer: Callable[[], nn.Module]) -> None:
    weight, layout = weight_and_layout(layer)
    value, bound = regularizer.value(weight, layout), regularizer.lower_bound(weight, layout)
    assert value.isfinite()
    assert value >= bound - close(torch.float64)["atol"], f"{value} below {bound}"
    torch.testing.assert_close(regularizer.excess(weight, layout), (value - bound).clamp_min(0))


@pytest.mark.parametrize("kept", [0, 1, 2])
@pytest.mark.parametrize("power", [0, 1, 2])
@pytest.mark.parametrize("distance", ["chord", "angle"])
@pytest.mark.parametrize("half_space", [False, True])
def test_the_bound_of_an_energy_counts_the_filters_that_are_not_zero(
    kept: int, power: Any, distance: Any, half_space: bool
) -> None:
    weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    weight[kept:] = 0
    energy = R.HypersphericalEnergy(1.0, power=power, distance=distance, half_space=half_space)
    value, bound = float(energy.value(weight)), float(energy.lower_bound(weight))
    assert bound <= value + 1e-12
    if kept == 2 and not half_space:
        assert bound == pytest.approx(value)


def test_the_bound_of_a_coherence_counts_the_filters_that_are_not_zero() -> None:
    coherence = R.MutualCoherence(1.0, filters="unit")
    weight = torch.eye(5, dtype=torch.float64)[:, :2]
    assert float(coherence.value(weight)) == float(coherence.lower_bound(weight)) == 0
    weight[2:] = seeded(3, 2, dtype=torch.float64)
    assert float(coherence.lower_bound(weight)) == pytest.approx(math.sqrt((5 - 2) / (2 * 4)))


@OVER_WEIGHTS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_transforms_of_functions(regularizer: R.WeightRegularizer, dtype: torch.dtype) -> None:
    """Many weights at once, and the derivative in one direction, by `torch.func`; float16 was refused."""
    pair = seeded(2, 6, 4).to(dtype)
    direction = seeded(6, 4, seed=1).to(dtype)
    found = torch.func.vmap(regularizer.value)(pair)
    torch.testing.assert_close(found, torch.stack([regularizer.value(each) for each in pair]))
    weight = pair[0].float().requires_grad_()
    (gradient,) = torch.autograd.grad(regularizer.value(weight), weight)
    value, slope = torch.func.jvp(regularizer.value, (pair[0],), (direction,))
    torch.testing.assert_close(value, found[0])
    torch.testing.assert_close(slope.float(), (gradient * direction).sum(), rtol=1e-3, atol=1e-3)  # torch widens some


@OVER_WEIGHTS
def test_groups_are_separate_matrices(regularizer: R.WeightRegularizer) -> None:
    """A grouped layer costs what its groups cost one by one (WEISSI and L2 take the whole weight)."""
    if isinstance(regularizer, R.ScaleShift):
        pytest.skip("reads the norm of the whole weight")
    weight = seeded(6, 3, 3, 3, dtype=torch.float64)
    whole = regularizer.value(weight, Layout(groups=2))
    torch.testing.assert_close(whole, regularizer.value(weight[:3]) + regularizer.value(weight[3:]))


@OVER_WEIGHTS
def test_stacked_blocks_are_separate_matrices(regularizer: R.WeightRegularizer) -> None:
    weight = seeded(9, 5, dtype=torch.float64)
    whole = regularizer.value(weight, Layout(blocks=3))
    torch.testing.assert_close(whole, sum(regularizer.value(block) for block in weight.chunk(3)))


@pytest.mark.grid(3)
@OVER_LAYERS
@OVER_WEIGHTS
def test_gradients_added_in_place_are_those_of_autograd(
    regularizer: R.WeightRegularizer, layer: Callable[[], nn.Module]
) -> None:
    weight, layout = weight_and_layout(layer)
    leaf = weight.clone().requires_grad_()
    evaluation = regularizer.evaluate(leaf, layout)
    (expected,) = torch.autograd.grad(evaluation.value, leaf)
    grad = torch.ones_like(weight)
    added = regularizer.add_gradient_(grad, weight, layout, factor=0.25)
    torch.testing.assert_close(grad - 1, 0.25 * expected, **close(torch.float64))
    torch.testing.assert_close(added.value, evaluation.value)
    assert added.terms.keys() == evaluation.terms.keys()


@OVER_WEIGHTS
def test_the_gradient_of_stacked_blocks_is_that_of_each_in_plain_operations(regularizer: R.WeightRegularizer) -> None:
    weight = seeded(8, 6, dtype=torch.float64)
    blocks = [block.clone().requires_grad_() for block in weight.chunk(2)]
    values = [regularizer._evaluate(block, Layout(), None).value for block in blocks]
    grad = torch.zeros_like(weight)
    added = regularizer.add_gradient_(grad, weight, Layout(blocks=2), factor=1.0)
    torch.testing.assert_close(grad, torch.cat(torch.autograd.grad(sum(values), blocks)), **close(torch.float64))
    torch.testing.assert_close(added.value, sum(values).detach(), **close(torch.float64))


@pytest.mark.parametrize("kind", ["bfloat16", "channels last", "mixed formats"])
@OVER_WEIGHTS
def test_gradients_are_added_to_any_layout(regularizer: R.WeightRegularizer, kind: str) -> None:
    weight = seeded(4, 3, 3, 3, dtype=torch.bfloat16 if kind == "bfloat16" else torch.float64)
    leaf = weight.clone().requires_grad_()
    value = regularizer.value(leaf)
    (expected,) = torch.autograd.grad(value, leaf)
    if kind == "channels last":
        weight = weight.to(memory_format=torch.channels_last)
    grad = torch.zeros_like(expected)
    if kind == "mixed formats":
        grad = grad.to(memory_format=torch.channels_last)
    added = regularizer.add_gradient_(grad, weight, Layout(), factor=1.0)
    torch.testing.assert_close(grad, expected, **close(weight.dtype))
    torch.testing.assert_close(added.value, value)


def test_transposed_convolutions_have_their_filters_on_dim_1() -> None:
    module = nn.ConvTranspose2d(4, 6, 3)
    matrix = matrix_view(module.weight, layout_of(module))[0]
    value = R.Orthogonality(1.0).value(module.weight, layout_of(module))
    torch.testing.assert_close(value, R.Orthogonality(1.0).value(matrix))
    assert not torch.isclose(value, R.Orthogonality(1.0).value(module.weight), rtol=1e-2)


def test_a_float16_weight_gets_a_finite_gradient() -> None:
    weight = torch.full((4, 6), 100.0, dtype=torch.float16, requires_grad=True)
    R.Orthogonality(1.0).value(weight).backward()
    assert weight.grad is not None
    assert weight.grad.dtype is torch.float16
    assert torch.equal(weight.grad, torch.full_like(weight.grad, 65504.0))


SPECTRA = {
    "orthogonal": lambda: torch.linalg.qr(seeded(6, 6, dtype=torch.float64))[0],
    "semi-orthogonal": lambda: torch.linalg.qr(seeded(9, 4, dtype=torch.float64))[0],
    "identity": lambda: torch.eye(5, dtype=torch.float64),
    "rank one": lambda: torch.outer(seeded(4, dtype=torch.float64), seeded(6, seed=1, dtype=torch.float64)),
    "zero": lambda: torch.zeros(4, 6, dtype=torch.float64),
}


@pytest.mark.grid(4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spectrum", SPECTRA)
@OVER_WEIGHTS
def test_repeated_singular_values_cost_nothing(
    regularizer: R.WeightRegularizer, spectrum: str, dtype: torch.dtype
) -> None:
    """E7: the derivative of singular vectors does not exist there, and none is taken."""
    weight = SPECTRA[spectrum]().to(dtype).requires_grad_()
    value = regularizer.value(weight)
    (gradient,) = torch.autograd.grad(value, weight)
    assert value.isfinite()
    assert gradient.isfinite().all()
    added = torch.zeros_like(gradient)
    regularizer.add_gradient_(added, weight.detach(), Layout(), factor=1.0)
    torch.testing.assert_close(added, gradient, **close(dtype))


@OVER_WEIGHTS
def test_a_weight_that_diverged_shows(regularizer: R.WeightRegularizer) -> None:
    """E7: no exception from inside a decomposition, and no silence; also where gradients are added in place."""
    weight = seeded(4, 6, dtype=torch.float64)
    weight[1, 2] = math.nan
    assert regularizer.value(weight).isnan()
    grad = torch.zeros_like(weight)
    assert regularizer.add_gradient_(grad, weight, Layout(), factor=1.0).value.isnan()
    assert grad.isnan().any()


@OVER_WEIGHTS
def test_torch_func_sees_the_plain_form(regularizer: R.WeightRegularizer) -> None:
    """An autograd function with a closed form would refuse vmap and forward mode."""
    weights = seeded(3, 4, 5, dtype=torch.float64)
    expected = torch.stack([regularizer.value(w) for w in weights])
    torch.testing.assert_close(torch.func.vmap(regularizer.value)(weights), expected)
    _, along = torch.func.jvp(regularizer.value, (weights[0],), (weights[1],))
    torch.testing.assert_close(along, (torch.func.grad(regularizer.value)(weights[0]) * weights[1]).sum())


# --- strength, every, schedules -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("regularizer", "expected"),
    [
        (R.L2(0.1, every=3), [0.3, 0, 0, 0.3, 0, 0]),  # the same mean pull
        (R.SRIP(1e-2, every=2, schedule=R.Warmup(4)), [0.005, 0, 0.015, 0, 0.02, 0]),
        (R.L2(1.0, schedule=R.Milestones((2, 5), (0.5, 0.0))), [1, 1, 0.5, 0.5, 0.5, 0]),
    ],
    ids=str,
)
def test_the_strength_at_each_step(regularizer: R.Regularizer, expected: list[float]) -> None:
    assert [regularizer.strength_at(step) for step in range(6)] == pytest.approx(expected)


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: R.L2(-1.0), r"L2\(\) needs a finite strength >= 0; found strength=-1.0"),
        (lambda: R.SRIP(float("nan")), r"SRIP\(\) needs a finite strength"),
        (lambda: R.L2(1.0, every=0), r"L2\(\) needs every >= 1; found every=0"),
        (lambda: R.SRIP(1.0, iterations=0), r"SRIP\(\) needs iterations from 1 to 1000"),
        (lambda: R.L2(1.0, before_norm="no"), r"L2\(before_norm=…\) takes 'skip' or 'keep'; found 'no'"),
        (lambda: R.Orthogonality(1.0, filters="x"), r"Orthogonality\(filters=…\) takes 'raw' or 'unit'"),
        (lambda: R.MutualCoherence(1.0, filters="x"), r"MutualCoherence\(filters=…\) takes"),
        (lambda: R.HypersphericalEnergy(1.0, power=3), r"HypersphericalEnergy\(power=…\) takes 0 or 1 or 2"),
        (lambda: R.HypersphericalEnergy(1.0, distance="x"), r"distance=…\) takes 'chord' or 'angle'"),
        (lambda: R.HypersphericalEnergy(1.0, eps=-1.0), r"HypersphericalEnergy\(\) needs eps >= 0"),
        (lambda: R.ScaleShift(1.0, floor=0.0), r"ScaleShift\(\) needs floor > 0"),
        (lambda: R.ScaleShift(1.0, direction_strength=-1.0), r"ScaleShift\(\) needs direction_strength >= 0"),
        (lambda: R.ScaleShift(0.0, direction_strength=1.0), r"and strength > 0 beside it"),
        (lambda: R.ScaleShift(1.0, direction_scale="x"), r"direction_scale=…\) takes 'none' or 'sqrt_numel'"),
        (
            lambda: R.SelfOrthogonality(1.0, gamma=0.0),
            r"needs mean_ratio and spread_ratio >= 0, one of them and gamma > 0",
        ),
        (lambda: R.SelfOrthogonality(1.0, reduction="x"), r"reduction=…\) takes 'mean' or 'sum'"),
        (lambda: R.SelfOrthogonality(1.0, samples=1), r"needs samples >= 2; found samples=1"),
        (lambda: R.Warmup(0), r"Warmup\(\) needs steps >= 1"),
        (lambda: R.Milestones((3, 2), (1.0, 0.0)), r"Milestones\(\) needs increasing steps"),
        (lambda: R.Milestones((3,), (1.0, 0.0)), r"one factor for each"),
        (lambda: R.Orthogonality(1.0).value(torch.ones(3)), r"a matrix view needs a weight with at least 2 dim"),
        (lambda: R.SelfOrthogonality(1.0).value(torch.ones(3)), r"takes outputs \(N, k, \*positions\)"),
        (lambda: R.SelfOrthogonality(1.0).value(torch.ones(4, 3), groups=2), r"k divisible by groups=2"),
        (lambda: R.SelfOrthogonality(1.0, samples=9).value(torch.ones(10, 4)), r"at random; found 10 samples and no"),
    ],
)
def test_arguments_out_of_range(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        make()


def test_a_scale_shift_of_an_almost_zero_weight_has_no_direction() -> None:
    """Below a norm of 1e-19 its square is no normal number of float32; 1/norm would be a gradient of that size."""
    regularizer, weight = R.ScaleShift(1.0, direction_strength=1.0, floor=1e-3), 1e-25 * seeded(3, 4).float()
    grad = torch.zeros_like(weight)
    added = regularizer.add_gradient_(grad, weight, Layout(), factor=1.0)
    assert not grad.any()
    assert added.value == regularizer._evaluate(weight, Layout(), None).value == pytest.approx(math.log(1e-3))
