"""Point clouds of ten solids: generated, so the data set is on every machine."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from gonio.compare.planning.plan import AttackConfig, Training
from gonio.compare.tasks.task import Split, Task
from gonio.seeding import generator

_POINTS = 96
_TRAIN, _VALIDATION, _TEST = 40, 40, 120  # clouds per solid
_NOISE, _AUGMENTED_NOISE = 0.04, 0.02  # standard deviation, where the solids have radius about 1
_STRETCH = 0.3  # each axis by a factor between 1 − and 1 +
Profile = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Solid:
    """The solid of revolution, or of a regular polygon, around the z axis.

    Attributes:
        profile: corners (r, z) of a polyline, r ≥ 0.
        sides: of the polygon, whose corners have radius r; None: a circle.
    """

    profile: Profile
    sides: int | None = None

    def sample(self, count: int, generator: Generator) -> Tensor:
        """Points that are uniform on the surface, of shape (count, 3)."""
        corners = torch.tensor(self.profile, dtype=torch.float64)
        first, last = corners[:-1], corners[1:]
        piece = torch.multinomial(self._areas(first, last), count, replacement=True, generator=generator)
        start, end = first[piece], last[piece]
        # A ring's area is proportional to its radius, so along a piece the square of the radius is uniform.
        share = torch.rand(count, generator=generator, dtype=torch.float64)
        radius = (start[:, 0] ** 2 + share * (end[:, 0] ** 2 - start[:, 0] ** 2)).sqrt()
        wide = end[:, 0] - start[:, 0]
        along = torch.where(wide.abs() > 1e-9, (radius - start[:, 0]) / wide, share)
        height = start[:, 1] + along * (end[:, 1] - start[:, 1])
        return torch.cat([radius[:, None] * self._outline(count, generator), height[:, None]], 1).float()

    def _areas(self, first: Tensor, last: Tensor) -> Tensor:
        """Area of each piece, up to one common factor."""
        inner = 1.0 if self.sides is None else math.cos(math.pi / self.sides)  # middle of a side over its corner
        slant = ((inner * (last[:, 0] - first[:, 0])) ** 2 + (last[:, 1] - first[:, 1]) ** 2).sqrt()
        return (first[:, 0] + last[:, 0]) * slant

    def _outline(self, count: int, generator: Generator) -> Tensor:
        """Points on the circle or polygon of radius 1."""
        turn = torch.rand(count, generator=generator, dtype=torch.float64)
        if self.sides is None:
            return torch.stack([(2 * math.pi * turn).cos(), (2 * math.pi * turn).sin()], 1)
        side, part = (turn * self.sides).floor(), (turn * self.sides).frac()[:, None]
        corner, following = (
            torch.stack([angle.cos(), angle.sin()], 1)
            for angle in (2 * math.pi * (side + k) / self.sides for k in (0, 1))
        )
        return corner + part * (following - corner)


def _arc(count: int, *, centre: float = 0.0, radius: float = 1.0, turns: float = 0.5) -> Profile:
    """A circular arc in the half-plane, from the bottom upwards, as a polyline."""
    angles = [2 * math.pi * turns * i / count - math.pi / 2 for i in range(count + 1)]
    return tuple((max(0.0, centre + radius * math.cos(a)), radius * math.sin(a)) for a in angles)


_BARREL = ((0.0, -0.8), (1.0, -0.8), (1.0, 0.8), (0.0, 0.8))
_SPIKE = ((0.0, -0.7), (1.0, -0.7), (0.0, 0.9))
_BOWL = _arc(16, turns=0.25)

SOLIDS = {
    "sphere": Solid(_arc(32)),
    "capsule": Solid(tuple((r, z - 0.5) for r, z in _BOWL) + tuple((r, 0.5 - z) for r, z in reversed(_BOWL))),
    "torus": Solid(_arc(32, centre=1.0, radius=0.4, turns=1.0)),
    "cylinder": Solid(_BARREL),
    "cone": Solid(_SPIKE),
    "cube": Solid(((0.0, -0.75), (1.0, -0.75), (1.0, 0.75), (0.0, 0.75)), sides=4),
    "prism": Solid(_BARREL, sides=3),
    "pyramid": Solid(_SPIKE, sides=4),
    "tetrahedron": Solid(_SPIKE, sides=3),
    "octahedron": Solid(((0.0, -1.0), (1.0, 0.0), (0.0, 1.0)), sides=4),
}

_NOTES = (
    f"Generated data: {_POINTS} points from the surface of one of {len(SOLIDS)} solids, stretched by up to "
    f"{_STRETCH:.0%} along each axis, turned about the upright axis, with noise of {_NOISE:g} of the radius. "
    "A method that helps here need not help on scans of real objects.",
    "Learning rate and epochs were tuned for the baseline alone, by the validation score on seeds that a study "
    "does not use. The recipes run with the baseline's values and their own default strengths, unless the study "
    "tunes them.",
)


def points() -> Task:
    """Ten solids as clouds of 96 points: 400 to train on, 400 to validate, 1,200 to test.

    The solids are stretched along their axes and turned about the upright one, and the points are noisy, so
    that the baseline makes mistakes. During training each cloud is turned again in every epoch, with fresh noise.

    Example:
        >>> task = gonio.compare.tasks.points()
        >>> task.train.inputs.shape, len(task.validation), len(task.test)
        (torch.Size([400, 3, 96]), 400, 1200)

    References:
        The field of Z. Zhang et al., "Self-Orthogonality Module", WACV 2020, arXiv 2001.01275, which
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
        threat=AttackConfig(epsilon=0.02),
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
    """Each cloud of shape (3, P) turned about the upright axis, with fresh noise."""
    rotated = random_turns(len(clouds), generator) @ clouds
    return rotated + _AUGMENTED_NOISE * torch.randn(clouds.shape, generator=generator)


def random_turns(count: int, generator: Generator) -> Tensor:
    """Rotation matrices about the z axis, by uniformly random angles, of shape (count, 3, 3)."""
    angle = 2 * math.pi * torch.rand(count, generator=generator)
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros(count)
    rows = ((cos, -sin, zero), (sin, cos, zero), (zero, zero, zero + 1))
    return torch.stack([torch.stack(row, 1) for row in rows], 1)


def _clouds(count: int, split: str) -> Split:
    """`count` clouds of each solid; the solids alternate."""
    draws = [generator(0, "points", split, name) for name in SOLIDS]
    clouds = torch.stack(
        [_placed(s.sample(count * _POINTS, d), count, d) for s, d in zip(SOLIDS.values(), draws, strict=True)], 1
    )
    return Split(clouds.flatten(0, 1), torch.arange(len(SOLIDS)).repeat(count))


def _placed(surface: Tensor, count: int, draw: Generator) -> Tensor:
    """Clouds of points of one solid: stretched, turned, with noise, centred, and scaled to radius 1."""
    clouds = surface.view(count, _POINTS, 3).mT
    stretch = 1 + _STRETCH * (2 * torch.rand(count, 3, 1, generator=draw) - 1)
    clouds = random_turns(count, draw) @ (clouds * stretch)
    clouds = clouds + _NOISE * torch.randn(clouds.shape, generator=draw)
    clouds = clouds - clouds.mean(2, keepdim=True)
    return clouds / clouds.norm(dim=1, keepdim=True).amax(2, keepdim=True)
