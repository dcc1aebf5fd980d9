"""Which solid do these points come from? Generated, so it is on every machine and never runs out."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from gonio.compare.plan import Training
from gonio.compare.task import Split, Task
from gonio.compare.tasks.solids import SOLIDS, random_turns
from gonio.compare.threat import Threat
from gonio.seeding import generator

__all__ = ["points", "turned"]

_POINTS = 96
_TRAIN, _VALIDATION, _TEST = 40, 40, 120  # clouds per solid
_NOISE, _AUGMENTED_NOISE = 0.04, 0.02  # standard deviation, where the solids have radius about 1
_STRETCH = 0.3  # each axis by a factor between 1 − and 1 +

_NOTES = (
    f"Generated data: {_POINTS} points from the surface of one of {len(SOLIDS)} solids, stretched by up to "
    f"{_STRETCH:.0%} along each axis, turned about the upright axis, with noise of {_NOISE:g} of the radius. "
    "What helps here need not help on scans of real things.",
    "Learning rate and epochs were tuned for the baseline alone, by the validation score on seeds that a study "
    "does not use. The recipes run with the baseline's values and their own default strengths, unless the study "
    "tunes them.",
)


def points() -> Task:
    """Ten solids as clouds of 96 points: 400 to train on, 400 to validate, 1,200 to test.

    The solids are stretched along their axes and turned about the upright one, and the points are noisy, so
    that the baseline makes mistakes. During training each cloud is turned anew in every epoch, with fresh
    noise.

    Example:
        >>> task = gonio.compare.tasks.points()
        >>> task.train.inputs.shape, len(task.validation), len(task.test)
        (torch.Size([400, 3, 96]), 400, 1200)

    References:
        The field of T. Zhang et al., "Self-Orthogonality Module", WACV 2020, arXiv 2001.01275, which
        classifies point clouds of ModelNet40.
    """
    train, validation, test = (
        _clouds(count, name) for name, count in (("train", _TRAIN), ("validation", _VALIDATION), ("test", _TEST))
    )
    return Task(
        name="points",
        train=train,
        validation=validation,
        test=test,
        model="pointnet",
        sizes={"num_classes": len(SOLIDS), "in_channels": 3},
        training=Training(epochs=25, batch_size=20, lr=0.02),
        sesoi=1.0,
        augment=turned,
        threat=Threat(epsilon=0.02),
        recipes=(
            "orthogonal-init",
            "switchable-norm-1d",
            "decoupled-tanh-1d",
            "self-orthogonality-1d",
            "scale-shift",
        ),
        notes=_NOTES,
    )


def turned(clouds: Tensor, generator: Generator) -> Tensor:
    """Each cloud turned about the upright axis, with fresh noise.

    Shape:
        - ``clouds``: (N, 3, P); output: the same.
    """
    rotated = random_turns(len(clouds), generator) @ clouds
    return rotated + _AUGMENTED_NOISE * torch.randn(clouds.shape, generator=generator)


def _clouds(count: int, split: str) -> Split:
    """`count` clouds of each solid; the solids take turns."""
    draws = [generator(0, "points", split, name) for name in SOLIDS]
    clouds = torch.stack(
        [_placed(s.sample(count * _POINTS, d), count, d) for s, d in zip(SOLIDS.values(), draws, strict=True)], 1
    )
    return Split(clouds.flatten(0, 1), torch.arange(len(SOLIDS)).repeat(count))


def _placed(surface: Tensor, count: int, draw: Generator) -> Tensor:
    """Clouds of points of one solid: stretched, turned, made noisy, centred, and scaled to radius 1."""
    clouds = surface.view(count, _POINTS, 3).mT
    stretch = 1 + _STRETCH * (2 * torch.rand(count, 3, 1, generator=draw) - 1)
    clouds = random_turns(count, draw) @ (clouds * stretch)
    clouds = clouds + _NOISE * torch.randn(clouds.shape, generator=draw)
    clouds = clouds - clouds.mean(2, keepdim=True)
    return clouds / clouds.norm(dim=1, keepdim=True).amax(2, keepdim=True)
