"""Soft orthogonality and its relatives: extremes, closed forms, feasibility."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

import gonio
from catalog import seeded
from gonio import regularizers as R
from gonio.geometry import Layout, cosines, welch_bound
from tolerances import close, exact

DOUBLE = torch.float64


def gradient(regularizer: R.WeightRegularizer, weight: Tensor) -> Tensor:
    weight = weight.detach().requires_grad_()
    return torch.autograd.grad(regularizer.value(weight), weight)[0]


def semi_orthogonal(rows: int, cols: int) -> Tensor:
    q = torch.linalg.qr(seeded(max(rows, cols), min(rows, cols), dtype=DOUBLE))[0]
    return q if rows >= cols else q.T


def trained(regularizer: R.Regularizer, weight: Tensor, *, lr: float, steps: int) -> Tensor:
    weight = weight.clone().requires_grad_()
    optimizer = torch.optim.Adam([weight], lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        regularizer(weight).backward()
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4)], ids=str)
@pytest.mark.parametrize(
    "regularizer",
    [R.Orthogonality(1.0), R.MutualCoherence(1.0), R.SRIP(1.0, iterations=5), R.ConvOrthogonality(1.0)],
    ids=lambda r: type(r).__name__,
)
def test_zero_exactly_at_semi_orthogonal_weights(regularizer: R.WeightRegularizer, shape: tuple[int, int]) -> None:
    weight = semi_orthogonal(*shape)
    assert float(regularizer.value(weight)) < 1e-12
    assert gradient(regularizer, weight).isfinite().all()
    assert float(regularizer.value(1.1 * weight)) > 0.01
    assert float(regularizer.value(seeded(*shape, dtype=DOUBLE))) > 0.01


@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (200, 220), (1025, 260), (385, 400)], ids=str)
def test_gradients_are_the_closed_forms(shape: tuple[int, int]) -> None:
    """4 (WWᵀ − I) W, and 4 (WWᵀ ⊙ (1 − I)) W: twice what BigGAN's code adds."""
    w = seeded(*shape, dtype=DOUBLE)
    gram, eye = w @ w.T, torch.eye(len(w), dtype=DOUBLE)
    torch.testing.assert_close(gradient(R.Orthogonality(1.0), w), 4 * (gram - eye) @ w, **close(DOUBLE))
    off = gradient(R.Orthogonality(1.0, diagonal=False), w)
    torch.testing.assert_close(off, 4 * (gram * (1 - eye)) @ w, **close(DOUBLE))
    assert not torch.allclose(off, 2 * (gram * (1 - eye)) @ w)


def test_the_diagonal_draws_norms_to_one_and_without_it_weights_shrink() -> None:
    start = 0.3 * seeded(6, 10, dtype=DOUBLE)
    with_diagonal = trained(R.Orthogonality(1.0), start, lr=0.01, steps=800)
    torch.testing.assert_close(with_diagonal @ with_diagonal.T, torch.eye(6, dtype=DOUBLE), rtol=0, atol=1e-3)
    crowded = seeded(10, 3, dtype=DOUBLE)  # cannot be orthogonal, so it vanishes instead
    shrunk = trained(R.Orthogonality(1.0, diagonal=False), crowded, lr=0.01, steps=800)
    assert shrunk.norm() < 0.5 * crowded.norm()
    kept = trained(R.Orthogonality(1.0, filters="unit"), crowded, lr=0.01, steps=800)
    assert kept.norm() > 0.8 * crowded.norm()


def test_unit_filters_reach_the_welch_bound() -> None:
    """Tight frames: Σ cos² over pairs falls to n²/d − n and not below."""
    regularizer = R.Orthogonality(1.0, filters="unit")
    frame = trained(regularizer, seeded(9, 4, dtype=DOUBLE), lr=0.02, steps=600)
    assert float(regularizer.lower_bound(frame)) == pytest.approx(81 / 4 - 9)
    assert 0 <= float(regularizer.excess(frame)) < 1e-6
    assert float(regularizer.excess(seeded(9, 4, dtype=DOUBLE))) > 1


def test_the_bound_of_raw_filters_is_that_of_their_norms() -> None:
    regularizer = R.Orthogonality(1.0, diagonal=False)
    mercedes = torch.tensor([[1.0, 0.0], [-0.5, 0.75**0.5], [-0.5, -(0.75**0.5)]], dtype=DOUBLE)
    torch.testing.assert_close(regularizer.value(2 * mercedes), regularizer.lower_bound(2 * mercedes))
    torch.testing.assert_close(
        R.MutualCoherence(1.0, filters="unit").value(mercedes), torch.tensor(welch_bound(3, 2), dtype=DOUBLE)
    )


def test_coherence_moves_the_worst_pair_alone() -> None:
    weight = seeded(5, 8, dtype=DOUBLE)
    moved = gradient(R.MutualCoherence(1.0, filters="unit"), weight).norm(dim=1) > 0
    worst = cosines(weight).fill_diagonal_(0).abs().argmax()
    assert set(moved.nonzero().flatten().tolist()) == {int(worst) // 5, int(worst) % 5}


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)], ids=str)
@pytest.mark.parametrize("filters", ["raw", "unit"])
def test_coherence_of_nothing_is_zero(filters: str, shape: tuple[int, int]) -> None:
    regularizer, weight = R.MutualCoherence(1.0, filters=filters), torch.empty(shape)  # type: ignore[arg-type]
    assert float(regularizer.value(weight)) == 0
    assert gradient(regularizer, weight).shape == shape


# --- SRIP -----------------------------------------------------------------------------------------


def spectral_defect(weight: Tensor) -> float:
    return float((torch.linalg.svdvals(weight).square() - 1).abs().max())


@pytest.mark.parametrize("shape", [(8, 12), (12, 8), (20, 20)], ids=str)
def test_srip_rises_to_the_spectral_norm(shape: tuple[int, int]) -> None:
    weight = 0.3 * seeded(*shape, dtype=DOUBLE)
    values = [float(R.SRIP(1.0, iterations=n).value(weight)) for n in (1, 2, 4, 16, 64, 1000)]
    true = spectral_defect(weight)
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(values))
    assert values[0] < 0.98 * true, "one iteration from a fixed vector is biased low"
    assert values[-1] == pytest.approx(true, rel=1e-6)
    assert values[-1] <= true * (1 + 1e-12)


def test_srip_without_a_state_takes_two_products() -> None:
    weight = 0.3 * seeded(8, 12, dtype=DOUBLE)
    defect = weight @ weight.T - torch.eye(8, dtype=DOUBLE)
    state = R.SRIP(1.0).evaluate(weight).state
    start = torch.linalg.solve(defect @ defect, state[0])  # two products back, up to length
    first = defect @ start
    torch.testing.assert_close(R.SRIP(1.0).value(weight), (defect @ first).norm() / first.norm())
    again = R.SRIP(1.0).evaluate(weight, state=state).value
    torch.testing.assert_close(again, (defect @ state[0]).norm())
    assert float(R.SRIP(1.0).value(weight)) > 0.8 * spectral_defect(weight)


def test_srip_with_opposite_extremes() -> None:
    """Singular values 0 and √2: the defects −1 and +1 tie, and the iteration must not cancel them."""
    weight = torch.diag(torch.tensor([0.0, math.sqrt(2.0), 1.0], dtype=DOUBLE))
    assert float(R.SRIP(1.0, iterations=20).value(weight)) == pytest.approx(1.0)


def test_srip_follows_a_weight_with_one_iteration_per_step() -> None:
    regularizer, weight, state = R.SRIP(1.0), 0.3 * seeded(10, 16, dtype=DOUBLE), None
    for step in range(60):
        evaluation = regularizer.evaluate(weight, state=state)
        state = evaluation.state
        weight = weight + 1e-3 * seeded(10, 16, seed=step, dtype=DOUBLE)
    assert float(evaluation.value) == pytest.approx(spectral_defect(weight), rel=0.02)
    torch.testing.assert_close(state.norm(dim=1), torch.ones(1, 1, dtype=DOUBLE))


def test_srip_reads_without_moving() -> None:
    regularizer, weight = R.SRIP(1.0, iterations=3), seeded(4, 6)
    assert torch.equal(regularizer.value(weight), regularizer.value(weight))
    state = regularizer.evaluate(weight).state
    kept = state.clone()
    regularizer.evaluate(weight, state=state)
    assert torch.equal(state, kept)


def test_srip_survives_an_orthogonal_weight() -> None:
    evaluation = R.SRIP(1.0).evaluate(torch.eye(3))
    assert float(evaluation.value) == 0
    assert float(evaluation.state.norm()) == pytest.approx(1.0), "a zero vector could never leave zero again"


def test_srip_refuses_a_second_derivative() -> None:
    weight = seeded(3, 4, dtype=DOUBLE).requires_grad_()
    (first,) = torch.autograd.grad(R.SRIP(1.0).value(weight), weight, create_graph=True)
    with pytest.raises(RuntimeError, match=r"second derivative of this penalty .* power iteration is held fixed"):
        first.sum().backward()
    with pytest.raises(RuntimeError, match=r"second derivative of this penalty"):
        torch.func.hessian(R.SRIP(1.0).value)(weight.detach())


# --- energy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [0, 1, 2])
def test_energy_is_least_at_the_simplex(power: int) -> None:
    regularizer = R.HypersphericalEnergy(1.0, power=power, eps=1e-6)  # type: ignore[arg-type]
    spread = trained(regularizer, seeded(4, 3, dtype=DOUBLE), lr=0.02, steps=600)
    off = cosines(spread)[~torch.eye(4, dtype=torch.bool)]
    torch.testing.assert_close(off, torch.full_like(off, -1 / 3), rtol=0, atol=1e-3)
    assert 0 <= float(regularizer.excess(spread)) < 1e-5


def test_half_space_energy_is_least_at_orthogonal_filters() -> None:
    regularizer = R.HypersphericalEnergy(1.0, half_space=True)
    spread = trained(regularizer, seeded(3, 5, dtype=DOUBLE), lr=0.02, steps=600)
    off = cosines(spread)[~torch.eye(3, dtype=torch.bool)]
    torch.testing.assert_close(off, torch.zeros_like(off), rtol=0, atol=1e-3)


def test_energy_leaves_dead_filters_out() -> None:
    weight = seeded(4, 6, dtype=DOUBLE)
    with_dead = torch.cat([weight, torch.zeros(2, 6, dtype=DOUBLE)])
    regularizer = R.HypersphericalEnergy(1.0)
    torch.testing.assert_close(regularizer.value(with_dead), regularizer.value(weight))
    assert torch.equal(gradient(regularizer, with_dead)[4:], torch.zeros(2, 6, dtype=DOUBLE))


def test_energy_of_coinciding_filters_is_bounded_by_eps() -> None:
    twins = seeded(1, 6).repeat(2, 1)
    assert float(R.HypersphericalEnergy(1.0, eps=1e-2).value(twins)) == pytest.approx(100, rel=1e-3)


# --- convolutions ---------------------------------------------------------------------------------


def circular_gram(weight: Tensor, stride: int, size: int) -> Tensor:
    """K Kᵀ on a circular 1-D map, by applying the layer to unit impulses."""
    inputs = torch.eye(weight.shape[1] * size, dtype=weight.dtype).view(-1, weight.shape[1], size)
    padded = torch.cat([inputs, inputs[..., : weight.shape[2] - 1]], -1)
    operator = torch.nn.functional.conv1d(padded, weight, stride=stride).flatten(1)  # (in, out)
    return operator.T @ operator


@pytest.mark.parametrize(("stride", "kernel"), [(1, 3), (2, 3), (2, 4), (3, 5)])
def test_conv_orthogonality_is_that_of_the_operator(stride: int, kernel: int) -> None:
    weight, size = 0.4 * seeded(3, 2, kernel, dtype=DOUBLE), 30
    gram = circular_gram(weight, stride, size)
    expected = (gram - torch.eye(len(gram), dtype=DOUBLE)).norm() / math.sqrt(size // stride)
    layout = Layout(stride=(stride,))
    torch.testing.assert_close(R.ConvOrthogonality(1.0).value(weight, layout), expected)


@pytest.mark.parametrize(
    ("shape", "stride", "dilation", "groups"),
    [
        ((3, 4, 3, 3), (1, 1), (1, 1), 1),
        ((7, 2, 3, 2), (1, 1), (2, 1), 1),  # more outputs than inputs: the smaller side is the other one
        ((9, 2, 3, 3), (2, 1), (1, 1), 1),
        ((6, 2, 3, 4), (2, 3), (1, 2), 2),
        ((2, 3, 2, 2), (3, 3), (1, 1), 1),  # pixels that no tap reads
        ((4, 1, 3, 3), (1, 1), (1, 1), 4),
        ((3, 2, 4, 5), (1, 1), (1, 1), 1),  # beyond what values at real points are used for
        ((5, 2, 7, 3), (2, 1), (1, 1), 1),
        ((4, 2, 7, 2), (1, 2), (1, 1), 2),
    ],
)
def test_conv_orthogonality_equals_the_sum_over_shifts(
    shape: tuple[int, ...], stride: tuple[int, int], dilation: tuple[int, int], groups: int
) -> None:
    """Value and gradient: torch's convolution of each group's kernel with itself, at every shift of the stride."""
    layout = Layout(groups=groups, stride=stride, dilation=dilation)
    weight = (0.3 * seeded(*shape, dtype=DOUBLE)).requires_grad_()
    extent = [(k - 1) * d + 1 for k, d in zip(shape[2:], dilation, strict=True)]
    written_out = torch.zeros(*shape[:2], *extent, dtype=DOUBLE)
    written_out[:, :, :: dilation[0], :: dilation[1]] = weight
    padding = [(k - 1) // s * s for k, s in zip(extent, stride, strict=True)]
    expected = torch.zeros((), dtype=DOUBLE)
    for kernel in written_out.chunk(groups):
        overlaps = torch.nn.functional.conv2d(kernel, kernel, stride=stride, padding=padding)
        centre = torch.zeros_like(overlaps)
        centre[:, :, padding[0] // stride[0], padding[1] // stride[1]] = torch.eye(len(kernel))
        expected = expected + (overlaps - centre).norm()
    found = R.ConvOrthogonality(1.0).value(weight, layout)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, weight), torch.autograd.grad(expected, weight))


@pytest.mark.parametrize("shape", [(32, 32, 3, 3), (8, 8, 3, 3, 3), (16, 16, 5, 5)], ids=str)
@pytest.mark.parametrize("noise", [1e-3, 0.1])
def test_conv_orthogonality_in_float32_is_that_in_float64(shape: tuple[int, ...], noise: float) -> None:
    """Also near an orthogonal kernel, where the values at single points are far larger than what they leave."""
    start = gonio.init.delta_orthogonal_(torch.empty(shape, dtype=DOUBLE), generator=gonio.seeding.generator(0))
    exact_weight = (start + noise * seeded(*shape, dtype=DOUBLE)).requires_grad_()
    rounded_weight = exact_weight.detach().float().requires_grad_()
    value, rounded = (R.ConvOrthogonality(1.0).value(weight) for weight in (exact_weight, rounded_weight))
    assert float(rounded.detach()) == pytest.approx(float(value.detach()), rel=1e-5)
    gradient, of_rounded = torch.autograd.grad(value, exact_weight) + torch.autograd.grad(rounded, rounded_weight)
    assert float((of_rounded.double() - gradient).norm()) < 1e-4 * float(gradient.norm())


def test_conv_orthogonality_of_dilated_kernels() -> None:
    weight = seeded(2, 2, 3, 2, dtype=DOUBLE)
    written_out = torch.zeros(2, 2, 5, 4, dtype=DOUBLE)
    written_out[:, :, ::2, ::3] = weight
    dilated = R.ConvOrthogonality(1.0).value(weight, Layout(dilation=(2, 3)))
    torch.testing.assert_close(dilated, R.ConvOrthogonality(1.0).value(written_out))


def test_conv_orthogonality_cannot_fall_below_its_bound() -> None:
    regularizer = R.ConvOrthogonality(1.0)
    crowded = trained(regularizer, 0.5 * seeded(5, 2, 3, dtype=DOUBLE), lr=0.01, steps=400)
    assert float(regularizer.lower_bound(crowded)) == pytest.approx(math.sqrt(3))
    assert 0 <= float(regularizer.excess(crowded)) < 0.1


# --- L2 -------------------------------------------------------------------------------------------


def test_l2_is_the_weight_decay_of_sgd() -> None:
    penalised, decayed = (torch.nn.Parameter(seeded(3, 4, dtype=DOUBLE)) for _ in range(2))
    R.L2(0.3)(penalised).backward()
    decayed.grad = torch.zeros_like(decayed)
    for parameter, decay in ((penalised, 0.0), (decayed, 0.3)):
        torch.optim.SGD([parameter], lr=0.1, weight_decay=decay).step()
    torch.testing.assert_close(penalised, decayed, **exact(DOUBLE))


def test_the_form_of_a_convolution_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step on an accelerator copies none of them: the second evaluation finds those of the first."""
    from gonio.regularizers import conv_orthogonality

    weight = seeded(4, 3, 3, 2)
    monkeypatch.setattr(conv_orthogonality, "_FORMS", {})
    first = R.ConvOrthogonality(1.0).value(weight)
    assert len(conv_orthogonality._FORMS) == 1
    monkeypatch.setattr(conv_orthogonality, "_made", lambda *_: pytest.fail("they were computed again"))
    assert torch.equal(R.ConvOrthogonality(1.0).value(weight), first)


def test_srip_of_the_gates_of_a_recurrent_layer() -> None:
    """Four matrices of more rows than columns lie in one tensor, so that the gradient of their transposes is a copy."""
    torch.manual_seed(0)
    layer = nn.LSTM(5, 8).double()
    penalty = gonio.Penalty(layer, [(None, R.SRIP(1.0, iterations=1000))])
    penalty().backward()
    weights = [layer.weight_ih_l0, layer.weight_hh_l0]
    found = [weight.grad.clone() for weight in weights if weight.grad is not None]
    layer.zero_grad()
    gates = [gate for weight in weights for gate in weight.chunk(4)]
    total = torch.stack([(torch.linalg.svdvals(gate).square() - 1).abs().max() for gate in gates]).sum()
    total.backward()
    torch.testing.assert_close(float(penalty().detach()), total.item(), rtol=1e-6, atol=0)
    assert len(found) == 2
    for weight, gradient in zip(weights, found, strict=True):
        torch.testing.assert_close(gradient, weight.grad, rtol=1e-3, atol=1e-4)
