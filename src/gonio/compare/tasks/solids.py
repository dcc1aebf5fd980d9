"""Points drawn evenly from the surfaces of solids."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

__all__ = ["SOLIDS", "Solid", "random_turns"]


Profile = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Solid:
    """What a profile in the half-plane sweeps as it goes round the z axis.

    Attributes:
        profile: corners (r, z) of a polyline, r ≥ 0.
        sides: of the regular polygon on which it goes round, with r as the radius of the circle through its
            corners; None is the circle itself.
    """

    profile: Profile
    sides: int | None = None

    def sample(self, count: int, generator: Generator) -> Tensor:
        """Points that are uniform on the surface.

        Shape:
            - output: (count, 3).

        Example:
            >>> from gonio.compare.tasks.solids import SOLIDS
            >>> ball = SOLIDS["sphere"].sample(100, torch.Generator().manual_seed(0))
            >>> bool(torch.allclose(ball.norm(dim=1), torch.ones(100), atol=1e-2))  # a profile of 32 straight pieces
            True
        """
        corners = torch.tensor(self.profile, dtype=torch.float64)
        first, last = corners[:-1], corners[1:]
        piece = torch.multinomial(self._areas(first, last), count, replacement=True, generator=generator)
        start, end = first[piece], last[piece]
        # A ring's area is in proportion to its radius, so along a piece the square of the radius is uniform.
        share = torch.rand(count, generator=generator, dtype=torch.float64)
        radius = (start[:, 0] ** 2 + share * (end[:, 0] ** 2 - start[:, 0] ** 2)).sqrt()
        wide = end[:, 0] - start[:, 0]
        along = torch.where(wide.abs() > 1e-9, (radius - start[:, 0]) / wide, share)
        height = start[:, 1] + along * (end[:, 1] - start[:, 1])
        return torch.cat([radius[:, None] * self._outline(count, generator), height[:, None]], 1).float()

    def _areas(self, first: Tensor, last: Tensor) -> Tensor:
        """Of each piece, up to one factor for all."""
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


def _arc(
    count: int, *, centre: float = 0.0, radius: float = 1.0, turns: float = 0.5
) -> tuple[tuple[float, float], ...]:
    """A circle's arc in the half-plane, from the bottom upwards, as a polyline."""
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


def random_turns(count: int, generator: Generator) -> Tensor:
    """Rotation matrices about the z axis, by uniformly random angles.

    Shape:
        - output: (count, 3, 3).
    """
    angle = 2 * math.pi * torch.rand(count, generator=generator)
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros(count)
    rows = ((cos, -sin, zero), (sin, cos, zero), (zero, zero, zero + 1))
    return torch.stack([torch.stack(row, 1) for row in rows], 1)
