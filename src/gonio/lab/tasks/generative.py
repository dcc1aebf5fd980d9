"""Tasks of generative models on handwritten digits: an adversarial network and a variational autoencoder."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gonio.errors import import_extra
from gonio.lab.plan import TrainingConfig
from gonio.lab.tasks.built_in import built_in
from gonio.lab.tasks.metric import Metric
from gonio.lab.tasks.task import Split, Task
from gonio.models.generative import gan_loss, negative_elbo
from gonio.seeding import generator, state_kept

_TRAIN, _VALIDATION = 1000, 1400  # of the 1,797 images: up to here train, validation
_FEATURES, _FEATURE_STEPS = 32, 300


def _images() -> tuple[Tensor, Tensor]:
    """All digits in random order, in [0, 1], with their classes."""
    datasets = import_extra("sklearn.datasets", "the task 'digits-gan'", package="scikit-learn", extra="lab")
    data = datasets.load_digits()
    order = torch.randperm(len(data.target), generator=generator(0, "generative"))
    return torch.tensor(data.images, dtype=torch.float32)[order, None] / 16, torch.tensor(data.target)[order]


def _task(name: str, **options: Any) -> Task:
    """A task whose targets are the images themselves, and whose model has its name."""
    parts = _images()[0].tensor_split((_TRAIN, _VALIDATION))
    train, validation, test = (Split(part, part) for part in parts)
    return Task(name=name, train=train, validation=validation, test=test, model=name, sizes={}, **options)


@built_in
def digits_gan() -> Task:
    """Images of 8 × 8 for an adversarial network: 1,000 to train on, 400 to validate, 397 to test.

    The score is the Fréchet distance between generated and real images in the features of a classifier of the training
    images; lower is better.

    Example:
        >>> task = gonio.lab.tasks.digits_gan()
        >>> real = task.test.targets
        >>> same = torch.cat([torch.zeros(len(real), 3), real.flatten(1)], 1)
        >>> round(abs(task.metric.function(same, real)), 3)
        0.0

    References:
        M. Heusel et al., "GANs trained by a two time-scale update rule", arXiv 1706.08500, §3.
    """
    return _task(
        "digits-gan",
        training=TrainingConfig(epochs=60, batch_size=50, lr=1e-3, optimizer="adamw", weight_decay=0.0,
                                betas=(0.5, 0.999), schedule="constant"),
        sesoi=1.0,
        metric=Metric("Fréchet distance", frechet_distance, "min", "squared distance"),
        loss=gan_loss,
        notes=(f"Features: {_FEATURES} hidden units of a classifier that was trained on the same 1,000 images.",),
    )  # fmt: skip


@built_in
def digits_vae() -> Task:
    """Images of 8 × 8 for a variational autoencoder: 1,000 to train on, 400 to validate, 397 to test.

    The score is the negative evidence lower bound in nats per image; lower is better.

    Example:
        >>> task = gonio.lab.tasks.digits_vae()
        >>> len(task.train), task.metric.direction
        (1000, 'min')
    """
    return _task(
        "digits-vae",
        training=TrainingConfig(epochs=20, batch_size=50, lr=3e-3, optimizer="adamw", weight_decay=0.0),
        sesoi=0.2,
        metric=Metric("negative ELBO", lambda outputs, targets: float(negative_elbo(outputs, targets)), "min", "nats"),
        loss=negative_elbo,
    )


def frechet_distance(outputs: Tensor, targets: Tensor) -> float:
    r"""Fréchet distance of two normal distributions with the moments of the features of generated and real images.

    .. math:: \lVert \mu - \mu' \rVert^2 + \operatorname{tr}(\Sigma + \Sigma' - 2 (\Sigma \Sigma')^{1/2})

    Args:
        outputs: of :class:`gonio.models.generative.Gan`, whose last 64 columns are images.
    """
    with torch.no_grad():
        made, real = (_classifier()[:2](each).double().numpy() for each in (outputs[:, 3:], targets.flatten(1)))
    first, second = (np.cov(each, rowvar=False) for each in (made, real))
    root = _root(first)
    mixed = np.sqrt(np.clip(np.linalg.eigvalsh(root @ second @ root), 0, None)).sum()
    return float(((made.mean(0) - real.mean(0)) ** 2).sum() + np.trace(first + second) - 2 * mixed)


def _root(matrix: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(matrix)
    root: np.ndarray = (vectors * np.sqrt(np.clip(values, 0, None))) @ vectors.T
    return root


@cache
def _classifier() -> nn.Sequential:
    """A classifier of the training images; torch's global generator stays as it is."""
    images, labels = (each[:_TRAIN] for each in _images())
    with state_kept(), torch.enable_grad():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, _FEATURES), nn.ReLU(), nn.Linear(_FEATURES, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(_FEATURE_STEPS):
            optimizer.zero_grad()
            F.cross_entropy(model(images.flatten(1)), labels).backward()
            optimizer.step()
    return model.requires_grad_(requires_grad=False)
