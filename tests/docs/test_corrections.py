"""What docs/claims/corrections.md says is wrong is wrong, and what it says is right is right: each row a small case."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gonio
from gonio import geometry
from gonio import nn as gnn
from gonio import regularizers as R
from gonio.lab.running.training import evaluate, fit
from gonio.lab.tasks import resolve
from gonio.models import deep_cnn
from gonio.nn import DecoupledConv2d, angular, magnitude
from gonio.seeding import generator


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator(seed, "corrections"))


def trained(model: nn.Module, *, epochs: int, seed: int) -> float:
    """Accuracy on the test part of the digits after training with the task's settings."""
    task = resolve("digits")
    done = fit(model, task, training=replace(task.training, epochs=epochs), seed=seed)
    assert done.state is not None
    model.load_state_dict(done.state)
    found = evaluate(model, task, task.test)
    assert found is not None
    return found


# --- angles between filters -----------------------------------------------------------------------


def test_similarity_is_normalised_over_the_batch_not_over_the_filters() -> None:
    """With b probes in d dimensions the vectors of signs have b entries, one per probe."""
    filters, probes = F.normalize(draw(5, 16), dim=1), draw(20_000, 16, seed=1)
    signs = (probes @ filters.T).sign()
    expected = 1 - 2 * geometry.cosines(filters).clamp(-1, 1).acos() / math.pi
    over_batch = F.normalize(signs, dim=0)
    over_filters = F.normalize(signs, dim=1)
    assert torch.allclose(over_batch.T @ over_batch, expected, atol=0.03)
    assert (over_filters.T @ over_filters - expected).abs().max() > 100


def test_the_tanh_cuts_single_samples_off_and_makes_the_term_no_softer() -> None:
    """At γ = 10 outputs beyond 1 have no slope; the gradient as a whole is larger than that of the linear form."""
    mixed = draw(512, 4) + draw(512, 1, seed=1)

    def gradient(gamma: float) -> Tensor:
        outputs = mixed.clone().requires_grad_()
        R.SelfOrthogonality(1.0, gamma=gamma, center=False)(outputs).backward()
        assert outputs.grad is not None
        return outputs.grad

    saturated, linear = gradient(10.0), gradient(0.1)
    near, far = mixed.abs() < 0.05, mixed.abs() > 1
    assert float(saturated[far].abs().max()) < 1e-3 * float(saturated[near].abs().max())
    assert float(linear[far].abs().max()) > 0.1 * float(linear[near].abs().max())
    assert float(saturated.norm()) > float(linear.norm())


# --- scale of weights -----------------------------------------------------------------------------


def test_at_its_own_optimum_l2_penalises_the_product_too() -> None:
    """The least sum of squares is l · exp(2/l · Σ log ‖W‖): it orders networks as the logarithm does."""
    networks = [[scale * draw(6, 6, seed=3 * i + j) for j in range(3)] for i, scale in enumerate((0.5, 2.0, 1.0))]
    logs = [float(sum(R.ScaleShift(1.0, floor=1e-9)(w) for w in weights)) for weights in networks]
    least = [float(geometry.least_scale(weights)) for weights in networks]
    assert least == pytest.approx([3 * math.exp(2 / 3 * log) for log in logs], rel=1e-12)
    assert np.argsort(least).tolist() == np.argsort(logs).tolist()


def test_the_logarithm_is_not_bounded_below() -> None:
    """φ(x) = x² is least at 0; log x falls by the same amount with every tenth and is not defined at 0."""
    weight = draw(6, 6)
    values = [float(R.ScaleShift(1.0, floor=1e-19)(weight / 10.0**k)) for k in (0, 5, 10, 15)]
    assert np.diff(values) == pytest.approx([-5 * math.log(10)] * 3)
    assert float(R.ScaleShift(1.0)(0 * weight)) == pytest.approx(math.log(1e-3))


# --- normalisation --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("norm", "depends"),
    [
        (nn.BatchNorm2d(8), True),
        (nn.GroupNorm(1, 8), False),
        (nn.GroupNorm(4, 8), False),
        (nn.InstanceNorm2d(8), False),
    ],
    ids=["batch", "layer", "group", "instance"],
)
def test_statistics_of_the_batch_are_those_of_batch_norm_alone(norm: nn.Module, depends: bool) -> None:
    images = draw(4, 8, 5, 5).float()
    alone, together = norm(images[:1]), norm(images)[:1]
    assert torch.allclose(alone, together, atol=1e-5) is not depends


def test_one_group_has_all_channels() -> None:
    """With G = 1 a group has C channels, not G of them."""
    images = draw(3, 8, 5, 5)
    values = images.reshape(3, 1, 8 * 25)
    by_hand = (values - values.mean(2, keepdim=True)) / (values.var(2, correction=0, keepdim=True) + 1e-5).sqrt()
    assert torch.allclose(nn.GroupNorm(1, 8).double()(images), by_hand.reshape(images.shape))


def test_a_running_variance_from_zero_enlarges_the_outputs() -> None:
    """After one batch it is a tenth of the variance, so outputs are √10 times too large; torch starts at 1."""
    x = 3 * draw(64, 5)
    listing = 0.9 * 0.0 + 0.1 * x.numpy().var(0)
    norm = nn.BatchNorm1d(5).double()
    norm(x)
    assert norm.running_var is not None
    outputs = (x.numpy() - x.numpy().mean(0)) / np.sqrt(listing)
    assert outputs.std(0) == pytest.approx([math.sqrt(10)] * 5)
    expected = 0.9 + 0.1 * x.numpy().var(0) * 64 / 63
    assert norm.running_var.numpy() == pytest.approx(expected)


SPECTRAL_NORM = """
class SpectralNorm:
    def __init__(self, module):
        self.module = module
        def _update_u_v(self):
        u = getattr(self.module, "weight_u")
"""


def test_the_listings_do_not_run() -> None:
    """`True0` is a name that nothing defines, and the method of the spectral norm lacks its indentation."""
    with pytest.raises(NameError, match="True0"):
        eval("np.var(x, axis=(2, 3), keepdims=True0)", {"np": np, "x": np.ones((2, 3, 4, 4))})
    with pytest.raises(IndentationError, match="expected an indented block"):
        compile(SPECTRAL_NORM, "listing", "exec")


def test_a_gain_per_channel_does_not_broadcast_to_groups() -> None:
    """(1, C, 1, 1) against (N, G, C/G, H, W); after the result has the shape of the input, it does."""
    images, gain = np.ones((2, 32, 4, 4)), np.ones((1, 32, 1, 1))
    grouped = images.reshape(2, 16, 32 // 16, 4, 4)
    with pytest.raises(ValueError, match="could not be broadcast"):
        gain * grouped
    assert (gain * grouped.reshape(images.shape)).shape == images.shape


def test_the_slope_of_a_sine_lies_between_minus_one_and_one() -> None:
    assert np.cos(np.linspace(0, 2 * np.pi, 5)).min() == -1.0


def test_a_quotient_without_norms_bounds_nothing() -> None:
    """x → −2x has the quotient −2 ≤ 1 and the Lipschitz constant 2; vectors have no quotient."""
    x, y = torch.tensor(3.0), torch.tensor(1.0)
    assert float((-2 * x + 2 * y) / (x - y)) == -2.0
    assert float(geometry.spectral_norm(torch.tensor([[-2.0]]))) == pytest.approx(2.0)


def test_power_iteration_needs_a_dominant_eigenvalue() -> None:
    """A rotation is square and of full rank, and the iteration turns for ever; on WᵀW it finds the singular value."""
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    v = torch.tensor([1.0, 0.0], dtype=torch.float64)
    steps = [torch.linalg.matrix_power(turn, k) @ v for k in (100, 101, 102)]
    assert [float(steps[0] @ step) for step in steps] == [1.0, 0.0, -1.0]
    assert float(geometry.spectral_norm(turn)) == pytest.approx(1.0)
    sheared = torch.tensor([[1.0, 1.0], [0.0, 1.0]])  # full rank, with one direction of eigenvectors
    vectors = torch.linalg.eig(sheared)[1].real
    assert float(torch.linalg.det(vectors).abs()) < 1e-6


def test_batch_norm_leaves_correlations() -> None:
    """What it is said not to remove is the shift of the inputs' distribution; covariance is another word."""
    x = draw(256, 3) @ draw(3, 3, seed=1)
    outputs = nn.BatchNorm1d(3).double()(x)
    assert torch.allclose(torch.corrcoef(x.T), torch.corrcoef(outputs.T), atol=1e-3)
    assert "1805.11604" in gonio.lab.claims.load_claim("bn-smooths").source  # not the paper on switchable norm


def test_a_network_with_layer_norm_converges() -> None:
    """Worse than with batch norm, and far from the 10 % of guessing."""
    scores = {}
    for norm in ("layer", "batch"):
        torch.manual_seed(0)
        scores[norm] = trained(deep_cnn(depth=3, width=32, norm=norm), epochs=20, seed=0)
    assert 80 < scores["layer"] < scores["batch"]


def test_sigmoid_gradients_vanish_without_batch_norm() -> None:
    """Ten sigmoid layers: the gradient of the first weight is 1e-4 of the last one's, with batch norm 1e-2 or more."""

    def ratio(norm: type[nn.Module]) -> float:
        layers = [part for _ in range(10) for part in (nn.Linear(32, 32), norm(32), nn.Sigmoid())]
        model = nn.Sequential(*layers).double()
        gonio.init_(model, gonio.init.xavier_, where=nn.Linear, gain=1.0)
        model(draw(64, 32)).square().sum().backward()
        first, last = model[0].weight.grad, model[-3].weight.grad
        return float(first.norm() / last.norm())

    assert ratio(nn.Identity) < 1e-4
    assert ratio(nn.BatchNorm1d) > 1e-2


def test_instance_norm_forgets_the_contrast_of_an_image() -> None:
    """Brightness and contrast of single images, a part of their style, are removed; batch norm keeps them."""
    images = draw(4, 3, 8, 8)
    restyled = torch.arange(1.0, 5).reshape(4, 1, 1, 1) * images + torch.arange(4.0).reshape(4, 1, 1, 1)
    instance, batch = nn.InstanceNorm2d(3, eps=0), nn.BatchNorm2d(3).double()
    assert torch.allclose(instance(restyled), instance(images))
    assert not torch.allclose(batch(restyled), batch(images), atol=0.1)


def test_at_the_last_step_of_a_sequence_batch_statistics_are_those_of_few() -> None:
    """Of 32 sequences 2 last to step 20: batch norm makes their states ±1 whatever they are, layer norm does not."""
    states = draw(2, 16)
    by_batch = nn.BatchNorm1d(16, eps=1e-12).double()(states)
    assert torch.allclose(by_batch.abs(), torch.ones_like(states), atol=1e-3)
    layer = nn.LayerNorm(16).double()
    assert torch.equal(layer(states)[:1], layer(states[:1]))


# --- decoupled networks ---------------------------------------------------------------------------


def linear_layer(**options: object) -> gnn.DecoupledLinear:
    return gnn.DecoupledLinear(6, 3, bias=False, **options).double()  # type: ignore[arg-type]


def test_the_norm_of_w_alone_is_no_convolution() -> None:
    """α‖w‖ does not depend on x; ‖w‖‖x‖ cos θ is the plain layer."""
    layer, x = linear_layer(magnitude=magnitude.Linear(), angular=angular.Cosine(), weighted="linear"), draw(8, 6)
    assert torch.allclose(layer(x), x @ layer.weight.T)
    alone = layer.weight.norm(dim=1).expand(8, 3)
    assert not torch.allclose(layer(x), alone, atol=0.1)


def test_below_the_radius_the_ball_still_has_its_angle() -> None:
    """f = (α/ρ) ‖x‖ g(θ), bounded by α and not by ρ."""
    ball = magnitude.Ball(alpha=2.0, radius=50.0, radius_in="absolute")
    layer, x = linear_layer(magnitude=ball, angular=angular.Cosine()), draw(8, 6)
    cosine = F.normalize(x, dim=1) @ F.normalize(layer.weight, dim=1).T
    assert torch.allclose(layer(x), 2 / 50 * x.norm(dim=1, keepdim=True) * cosine)
    assert float(layer(1e6 * x).detach().abs().max()) <= 2.0
    assert float(ball(torch.tensor(1e6))) == 2.0


def test_the_ball_is_continuous_with_a_kink() -> None:
    ball, near = magnitude.Ball(alpha=2.0, radius=5.0), 1e-6
    norms = torch.tensor([5.0 - near, 5.0, 5.0 + near], dtype=torch.float64)
    below, at, above = ball(norms).tolist()
    assert below == pytest.approx(at, abs=1e-5)
    assert above == pytest.approx(at, abs=1e-5)
    assert (at - below) / near == pytest.approx(2 / 5, rel=1e-3)
    assert (above - at) / near == pytest.approx(0.0, abs=1e-3)


def test_a_batch_norm_is_no_product_of_norms_and_cosine() -> None:
    """Ten times the weight gives the same outputs, and a sample's output depends on the rest of the batch."""
    x, weight, norm = draw(16, 6), draw(3, 6, seed=1), nn.BatchNorm1d(3, eps=1e-12).double()
    assert torch.allclose(norm(x @ (10 * weight).T), norm(x @ weight.T))
    assert not torch.allclose(norm(x[:8] @ weight.T), norm(x @ weight.T)[:8], atol=0.05)


@pytest.mark.slow
def test_training_from_scratch_ends_in_no_bad_optimum_here() -> None:
    """The decoupled network that starts from random weights reaches what the converted one does, within 2 points."""
    scores = []
    for first, later in ((0, 25), (15, 10)):
        torch.manual_seed(0)
        model = deep_cnn(depth=3, width=32)
        if first:
            trained(model, epochs=first, seed=0)
        gonio.swap_(model, DecoupledConv2d.from_conv, where=nn.Conv2d, magnitude=magnitude.Tanh())
        scores.append(trained(model, epochs=later, seed=1))
    assert min(scores) > 90
    assert abs(scores[0] - scores[1]) < 2


# --- initialisation -------------------------------------------------------------------------------


def test_a_distribution_that_thins_out_makes_no_orthogonal_matrix() -> None:
    """±1 with probability 1/n has variance 1/n; a share 1/e of the columns is 0 for every n."""
    for n in (200, 800):
        source = generator(n, "thin")
        signs = torch.randint(0, 2, (n, n), generator=source).double() * 2 - 1
        weight = signs * (torch.rand(n, n, generator=source, dtype=torch.float64) < 1 / n)
        assert float(weight.var()) == pytest.approx(1 / n, rel=0.1)
        assert float((weight.norm(dim=0) == 0).double().mean()) == pytest.approx(math.exp(-1), abs=0.06)
        gaussian = draw(n, n) / n**0.5
        assert float(gaussian.norm(dim=0).min()) > 0.8


def test_a_layer_norm_takes_the_mean_away_and_an_rms_norm_restores_the_norm() -> None:
    activations = draw(8, 64).relu()
    layer, rms = F.layer_norm(activations, (64,), eps=0), F.rms_norm(activations, (64,), eps=0)
    cosines = [float(F.cosine_similarity(activations, outputs).min()) for outputs in (layer, rms)]
    assert cosines[0] < 0.95
    assert cosines[1] == pytest.approx(1.0)
    assert rms.norm(dim=1).tolist() == pytest.approx([8.0] * 8)
    assert float(F.layer_norm(torch.ones(1, 64), (64,)).norm()) == 0.0
