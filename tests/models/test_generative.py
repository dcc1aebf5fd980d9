"""The adversarial network, the autoencoder and the recurrent network against their definitions, and their tasks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gonio
from catalog import seeded
from gonio import parametrizations as P
from gonio.errors import UnknownNameError
from gonio.lab.tasks import resolve
from gonio.lab.tasks.generative import frechet_distance
from gonio.models import byte_gru, digits_gan, digits_vae
from gonio.models.generative import gan_loss, negative_elbo

IMAGES = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def test_each_side_of_the_adversarial_network_has_the_gradient_of_its_own_loss() -> None:
    """Against two losses that are written out, with the same generated images."""
    torch.manual_seed(0)
    model = digits_gan(width=16).double()
    x = IMAGES.double()
    torch.manual_seed(5)
    gan_loss(model(x), x).backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    torch.manual_seed(5)
    made = model.generator(torch.randn(len(x), model.code).double())
    real, fake = model.discriminator(x.flatten(1)), model.discriminator(made.detach())
    judge = F.softplus(-real).mean() + F.softplus(fake).mean()
    wanted = torch.autograd.grad(judge, [*model.discriminator.parameters()])
    maker = F.softplus(-model.discriminator(made)).mean()
    wanted += torch.autograd.grad(maker, [*model.generator.parameters()])
    names = [name for side in ("discriminator", "generator") for name, _ in model.named_parameters() if side in name]
    for name, gradient in zip(names, wanted, strict=True):
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-14)


def test_the_discriminator_can_have_spectral_norm() -> None:
    torch.manual_seed(0)
    model = digits_gan(width=16)
    gonio.parametrize_(model, P.SpectralNorm(), where="discriminator.*")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(30):
        optimizer.zero_grad()
        gan_loss(model(IMAGES), IMAGES).backward()
        optimizer.step()
    sigmas = [torch.linalg.matrix_norm(model.discriminator[at].weight.detach(), 2).item() for at in (0, 2, 4)]
    assert sigmas == pytest.approx([1.0] * 3, abs=0.01)


@pytest.mark.parametrize("build", [digits_gan, digits_vae])
def test_evaluation_draws_the_same_noise_and_training_does_not(build: object) -> None:
    model = build(width=16)  # type: ignore[operator]
    model.eval()
    state = torch.get_rng_state()
    assert torch.equal(model(IMAGES), model(IMAGES))
    assert torch.equal(state, torch.get_rng_state())
    model.train()
    assert not torch.equal(model(IMAGES), model(IMAGES))


def test_the_elbo_is_that_of_its_two_distributions() -> None:
    """Bernoulli pixels, and the divergence of two normal distributions as torch.distributions computes it."""
    outputs, targets = seeded(5, 64 + 16, seed=2, dtype=torch.float64), torch.rand(5, 1, 8, 8, dtype=torch.float64)
    mean, log_variance = outputs[:, 64:].chunk(2, 1)
    posterior = torch.distributions.Normal(mean, (log_variance / 2).exp())
    prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
    p, y = outputs[:, :64].sigmoid(), targets.flatten(1)
    fit = -(y * p.log() + (1 - y) * (1 - p).log()).sum(1)
    wanted = (fit + torch.distributions.kl_divergence(posterior, prior).sum(1)).mean()
    torch.testing.assert_close(negative_elbo(outputs, targets), wanted, rtol=1e-10, atol=0)


def test_the_frechet_distance_is_that_of_its_formula() -> None:
    from gonio.lab.tasks.generative import _classifier

    images = torch.rand(200, 64, generator=torch.Generator().manual_seed(3))
    targets = torch.rand(150, 64, generator=torch.Generator().manual_seed(4)).square()
    features = [_classifier()[:2](each).double() for each in (images, targets)]
    means, covariances = [f.mean(0) for f in features], [f.mT.cov() for f in features]
    roots = torch.linalg.eigvals(covariances[0] @ covariances[1]).real.clamp_min(0).sqrt()
    wanted = (means[0] - means[1]).square().sum() + covariances[0].trace() + covariances[1].trace() - 2 * roots.sum()
    found = frechet_distance(torch.cat([torch.zeros(200, 3), images], 1), targets.view(-1, 1, 8, 8))
    assert found == pytest.approx(float(wanted), rel=1e-5)  # roots of eigenvalues that are nearly 0
    assert found > 0.1


def test_the_features_are_the_same_whatever_was_drawn_before() -> None:
    from gonio.lab.tasks.generative import _classifier

    first = _classifier()[0].weight.clone()
    _classifier.cache_clear()
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert torch.equal(first, _classifier()[0].weight)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("name", ["digits-gan", "digits-vae"])
def test_a_task_trains_its_model(name: str) -> None:
    task = resolve(name)
    from gonio.lab.running.training import evaluate, fit
    from gonio.models import resolve as resolve_model

    torch.manual_seed(0)
    model = resolve_model(task.model)()
    before = evaluate(model, task, task.validation)
    from dataclasses import replace

    fit(model, task, training=replace(task.training, epochs=8), seed=0)
    after = evaluate(model, task, task.validation)
    assert before is not None
    assert after is not None
    assert math.isfinite(after)
    assert after < before if name == "digits-vae" else after < 300  # an adversarial network need not fall so soon


def test_the_recurrent_network_is_that_of_torch() -> None:
    """Without norms: reset, update and new gate of nn.GRU are at other places."""
    torch.manual_seed(0)
    model = byte_gru(width=8).double()
    ids = torch.randint(0, 256, (3, 11))
    gru = nn.GRU(8, 8, batch_first=True).double()
    with torch.no_grad():
        for ours, weight, bias in ((model.input, gru.weight_ih_l0, gru.bias_ih_l0),
                                   (model.recurrent, gru.weight_hh_l0, gru.bias_hh_l0)):  # fmt: skip
            update, reset, new = ours.weight.chunk(3)
            weight.copy_(torch.cat([reset, update, new]))
            update, reset, new = ours.bias.chunk(3)
            bias.copy_(torch.cat([reset, update, new]))
        wanted = model.head(gru(model.embed(ids))[0])
    torch.testing.assert_close(model(ids), wanted, rtol=1e-10, atol=1e-12)


def test_norms_of_the_recurrent_network() -> None:
    for norm, kind in (("layer", nn.LayerNorm), ("batch", nn.BatchNorm1d)):
        model = byte_gru(width=8, norm=norm)
        assert sum(isinstance(m, kind) for m in model.modules()) == 2
        assert model(torch.randint(0, 256, (4, 5))).shape == (4, 5, 256)
    with pytest.raises(UnknownNameError, match="no norm named 'group'"):
        byte_gru(norm="group")
