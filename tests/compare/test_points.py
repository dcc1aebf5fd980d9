"""The task `points`: are the points where the solids are, and evenly?"""

from __future__ import annotations

import math

import pytest
import torch

from gonio.compare.tasks import points
from gonio.compare.tasks.points import SOLIDS, Solid, random_turns, turned

COUNT = 20_000


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_cubes_points_are_on_its_six_faces_in_equal_shares() -> None:
    half = math.sqrt(0.5)
    cube = Solid(((0.0, -half), (1.0, -half), (1.0, half), (0.0, half)), sides=4).sample(COUNT, draw())
    turn = torch.tensor([[half, -half, 0.0], [half, half, 0.0], [0.0, 0.0, 1.0]])  # corners to faces
    where = cube @ turn
    assert torch.allclose(where.abs().amax(1), torch.full((COUNT,), half), atol=1e-5)
    face = 2 * where.abs().argmax(1) + (where.gather(1, where.abs().argmax(1, keepdim=True))[:, 0] > 0)
    # each count is binomial with mean 3333 and standard deviation 53
    assert all(abs(int(n) - COUNT / 6) < 4 * 53 for n in face.bincount(minlength=6))


def test_a_cylinders_points_are_as_many_on_its_side_as_its_area() -> None:
    cylinder = SOLIDS["cylinder"].sample(COUNT, draw())
    radius, height = cylinder[:, :2].norm(dim=1), cylinder[:, 2]
    side = height.abs() < 0.8 - 1e-6
    assert torch.allclose(radius[side], torch.ones(int(side.sum())), atol=1e-5)
    share = 2 * math.pi * 1.6 / (2 * math.pi * 1.6 + 2 * math.pi)
    assert float(side.float().mean()) == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / COUNT))
    # on a disc the square of the radius is uniform
    assert float((radius[~side] ** 2).mean()) == pytest.approx(0.5, abs=0.02)


def test_a_spheres_heights_are_uniform() -> None:
    heights = SOLIDS["sphere"].sample(COUNT, draw())[:, 2].sort().values
    expected = torch.linspace(-1, 1, COUNT)
    # the bound of Kolmogorov and Smirnov at p = 1e-6, over a density of 1/2
    assert float((heights - expected).abs().max()) < 2 * 2.7 / math.sqrt(COUNT)


def test_a_tori_points_are_at_the_small_radius_from_the_large_circle() -> None:
    torus = SOLIDS["torus"].sample(1000, draw())
    ring = torch.stack([torus[:, :2].norm(dim=1) - 1, torus[:, 2]], 1).norm(dim=1)
    assert torch.allclose(ring, torch.full((1000,), 0.4), atol=0.4 * (1 - math.cos(math.pi / 32)))


def test_turns_are_rotations_about_the_upright_axis() -> None:
    turns = random_turns(50, draw())
    assert torch.allclose(turns @ turns.mT, torch.eye(3).expand(50, 3, 3), atol=1e-6)
    assert torch.allclose(torch.linalg.det(turns), torch.ones(50), atol=1e-6)
    assert bool((turns @ torch.tensor([0.0, 0.0, 1.0]) == torch.tensor([0.0, 0.0, 1.0])).all())


def test_an_epochs_clouds_are_turned_and_noisy_and_depend_on_their_generator_alone() -> None:
    clouds = points().train.inputs[:20]
    first, again, other = (turned(clouds, draw(seed)) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert float((first[:, 2] - clouds[:, 2]).std()) == pytest.approx(0.02, rel=0.1)  # noise alone moves the height
    assert float((first[:, :2] - clouds[:, :2]).abs().max()) > 0.5


def test_splits_hold_every_solid_equally_often_and_no_cloud_twice() -> None:
    task = points()
    assert [len(split) for split in task.splits.values()] == [400, 400, 1200]
    for split in task.splits.values():
        assert split.targets.bincount().tolist() == [len(split) // 10] * 10
        assert torch.allclose(split.inputs.norm(dim=1).amax(1), torch.ones(len(split)), atol=1e-6)
    assert len({c.numpy().tobytes() for split in task.splits.values() for c in split.inputs}) == 2000
    assert task.digest() == points().digest()
