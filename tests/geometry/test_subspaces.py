"""Top subspaces, their angles and intruder dimensions against full decompositions in float64."""

from __future__ import annotations

from math import degrees, log, sqrt

import pytest
import torch
from torch import Tensor

import gonio
from catalog import seeded
from gonio.errors import InvalidArgumentError
from gonio.geometry import intruder_dimensions, principal_angles, subspaces, top_subspace


def decaying(n: int, d: int) -> Tensor:
    """Singular values that fall as a power, as those of trained weights."""
    left, right = torch.linalg.qr(seeded(n, d)).Q[:, : min(n, d)], torch.linalg.qr(seeded(d, min(n, d), seed=1)).Q
    return left * torch.arange(1.0, min(n, d) + 1).pow(-0.7) @ right.mT


@pytest.mark.parametrize("shape", [(600, 800), (900, 560), (40, 70), (33, 1)], ids=str)
@pytest.mark.parametrize("make", [seeded, decaying], ids=["random", "decaying"])
@pytest.mark.parametrize("seed", [0, 7])
def test_the_top_subspace_is_that_of_the_full_decomposition(make, shape: tuple[int, int], seed: int) -> None:
    matrix, k = make(*shape), min(16, *shape)
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    found = top_subspace(matrix, k, seed=seed)
    for mine, exact in ((found.left, left[:, :k]), (found.right, right[:k].mT)):
        angle = float(principal_angles(mine, exact)[-1])
        assert angle <= max(found.error, 2e-4)  # the stated error, or the rounding of float32 over the gap
        assert angle < 1e-3
        torch.testing.assert_close(mine.mT @ mine, torch.eye(k), atol=1e-4, rtol=0)
    torch.testing.assert_close(found.values.double(), values[:k], rtol=1e-5, atol=0)


def test_equal_singular_values_have_no_subspace_and_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subspaces, "STEPS", 6)
    monkeypatch.setattr(subspaces, "CHECKS", frozenset((4, 6)))
    found = top_subspace(torch.linalg.qr(seeded(700, 700)).Q, 4)
    assert found.error > 0.1
    torch.testing.assert_close(found.values, torch.ones(4), rtol=1e-4, atol=0)


@pytest.mark.parametrize("factor", [1e-25, 1e25])
def test_any_scale_of_the_weight(factor: float) -> None:
    matrix = decaying(560, 600)
    here, there = top_subspace(matrix, 3), top_subspace(matrix * factor, 3)
    torch.testing.assert_close(there.values / factor, here.values, rtol=1e-4, atol=0)
    assert float(principal_angles(here.left, there.left)[-1]) < 1e-3


def test_a_zero_matrix_and_a_matrix_of_low_rank() -> None:
    assert top_subspace(torch.zeros(600, 700), 3).values.tolist() == [0, 0, 0]
    low = seeded(600, 2) @ seeded(2, 700, seed=1)
    found = top_subspace(low, 2)
    assert found.error < 1e-3
    exact = torch.linalg.svd(low.double(), full_matrices=False)[0][:, :2]
    assert float(principal_angles(found.left, exact)[-1]) < 1e-4


@pytest.mark.parametrize("angle", [1e-7, 1e-3, 0.3, 1.5707])
def test_a_planted_angle_is_found(angle: float) -> None:
    frame = torch.linalg.qr(seeded(50, 4).double()).Q
    turned = torch.stack([frame[:, 0], frame[:, 1] * torch.tensor(angle).double().cos()], 1)
    turned[:, 1] += frame[:, 2] * torch.tensor(angle).double().sin()
    found = principal_angles(frame[:, :2], turned @ seeded(2, 2).double())
    assert found.tolist() == pytest.approx([0, angle], rel=1e-6, abs=1e-13)


def test_random_subspaces_share_the_dimension_of_chance() -> None:
    shared = [
        principal_angles(seeded(60, 6, seed=s), seeded(60, 6, seed=s + 99)).cos().square().mean() for s in range(40)
    ]
    assert float(torch.stack(shared).mean()) == pytest.approx(6 / 60, rel=0.1)


def largest_cosines(base: Tensor, tuned: Tensor, k: int = 10) -> Tensor:
    """By two full decompositions in float64, as the paper computes them."""
    before, after = (torch.linalg.svd(x.double(), full_matrices=False)[0] for x in (base, tuned))
    return (after.mT @ before).abs().amax(1)[:k]


def tunings(n: int, d: int) -> dict[str, Tensor]:
    base = decaying(n, d)
    left, right = (torch.linalg.qr(seeded(size, 3, seed=size)).Q for size in (n, d))
    return {
        "base": base,
        "equal": base.clone(),
        "everywhere": base + 1e-3 * seeded(n, d, seed=5) / sqrt(d),
        "three new directions": base + left * torch.tensor([3.0, 2.5, 2.0]) @ right.mT,
        "scaled": base * 3,
        "turned": torch.linalg.qr(seeded(n, n, seed=6)).Q @ base,
    }


@pytest.mark.parametrize(
    "shape",
    [
        (80, 120),
        (560, 600),
        pytest.param((640, 540), marks=pytest.mark.slow),
        pytest.param((1100, 1040), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_intruders_are_those_of_the_full_decomposition(shape: tuple[int, int]) -> None:
    made = tunings(*shape)
    base = made.pop("base")
    for name, tuned in made.items():
        found, exact = intruder_dimensions(base, tuned), largest_cosines(base, tuned)
        assert found.numbers == tuple((exact < 0.5).nonzero().flatten().tolist()), name
        known = found.cosines >= 0.5
        torch.testing.assert_close(found.cosines[known].double(), exact[known], atol=2e-3, rtol=0)
        assert bool((found.cosines >= exact - 1e-3).all()), "an upper bound where it is not exact"
        assert len(found.numbers) == {"three new directions": 3, "turned": 10}.get(name, 0), name


@pytest.mark.parametrize("place", [0, 5, 9, 10])
def test_an_intruder_is_found_at_any_place_beside_other_changes(place: int) -> None:
    """The search starts near the directions of the base, of which the new one is none."""
    base = decaying(560, 620)
    values = torch.linalg.svdvals(base)
    size = float(values[place - 1] + values[place]) / 2 if place else 1.1 * float(values[0])
    u, v = (torch.nn.functional.normalize(seeded(n, 1, seed=n), dim=0) for n in base.shape)
    noise = seeded(560, 620, seed=2)
    for name, more in {"alone": 0.0, "noise": 0.02, "much noise": 0.1}.items():
        tuned = base + size * u @ v.mT + noise * (more * base.norm() / noise.norm())
        found, exact = intruder_dimensions(base, tuned), largest_cosines(base, tuned)
        assert found.numbers == tuple((exact < 0.5).nonzero().flatten().tolist()), name
        left = torch.linalg.svd(tuned.double())[0][:, :10]
        assert float(principal_angles(found.top.left, left).sin()[-1]) <= max(2 * found.top.error, 0.01), name


def test_more_directions_of_the_base_are_sought_where_one_is_like_none() -> None:
    made = tunings(560, 600)
    assert len(intruder_dimensions(made["base"], made["scaled"]).base.values) == 10
    assert len(intruder_dimensions(made["base"], made["three new directions"]).base.values) == 20


def test_the_part_of_the_intruders_is_their_share_of_the_weight() -> None:
    made = tunings(80, 120)
    found = intruder_dimensions(made["base"], made["three new directions"])
    left, values, right = torch.linalg.svd(made["three new directions"].double(), full_matrices=False)
    chosen = list(found.numbers)
    exact = left[:, chosen] * values[chosen] @ right[chosen]
    torch.testing.assert_close(found.part.double(), exact, atol=1e-5, rtol=0)


def test_the_chance_level_is_what_random_directions_reach() -> None:
    base = seeded(200, 300)
    frame = torch.linalg.svd(base)[0]
    random = torch.nn.functional.normalize(seeded(200, 400, seed=3), dim=0)
    seen = float((frame.mT @ random).abs().amax(0).median())
    assert intruder_dimensions(base, base).chance == pytest.approx(seen, rel=0.03)
    assert seen == pytest.approx(sqrt(2 * log(200) / 200), rel=0.15)


def test_refusals() -> None:
    with pytest.raises(InvalidArgumentError, match=r"1 <= k <= min\(n, d\); found shape \(3, 4\), k=4"):
        top_subspace(torch.ones(3, 4), 4)
    with pytest.raises(InvalidArgumentError, match="needs finite entries"):
        top_subspace(torch.full((3, 4), float("nan")), 1)
    with pytest.raises(InvalidArgumentError, match=r"shapes \(3, 4\) and \(4, 4\)"):
        principal_angles(torch.ones(3, 4), torch.ones(4, 4))
    with pytest.raises(InvalidArgumentError, match="two weights of one shape"):
        intruder_dimensions(torch.ones(3, 4), torch.ones(4, 4))
    assert degrees(float(principal_angles(torch.eye(2)[:, :1], torch.eye(2)[:, 1:])[0])) == pytest.approx(90)


@pytest.mark.parametrize(("n", "d"), [(600, 800), (768, 768), (1024, 700)])
def test_orthogonal_weights_have_values_of_one(n: int, d: int) -> None:
    """Every block after the first is rounding; no subspace is defined, which `error` says."""
    weight = gonio.init.orthogonal_(torch.empty(n, d), generator=gonio.seeding.generator(0))
    found = gonio.geometry.top_subspace(weight, 10)
    torch.testing.assert_close(found.values, torch.ones(10), rtol=1e-4, atol=0)
    for basis in (found.left, found.right):
        torch.testing.assert_close(basis.mT @ basis, torch.eye(10), rtol=0, atol=1e-4)
    assert found.error == 1.0


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([3.0] * 5 + [2.0] * 20 + [1.0] * 575),
        torch.cat([torch.full((2,), 3.0), torch.linspace(2, 0.1, 598)]),
        torch.cat([torch.tensor([1e9]), torch.linspace(2, 1, 559)]),
        torch.ones(100),
    ],
    ids=["steps", "a pair", "one far above", "identity"],
)
def test_the_error_bounds_the_sine_where_values_are_equal_or_far_apart(values: Tensor) -> None:
    draw = torch.Generator().manual_seed(0)
    n, k = len(values), 1 if len(values) == 600 else 10
    left, right = (torch.linalg.qr(torch.randn(m, n, generator=draw, dtype=torch.float64)).Q for m in (n, n + 40))
    matrix = (left * values.double()) @ right.mT
    found = gonio.geometry.top_subspace(matrix, k)
    true = torch.linalg.svd(matrix, full_matrices=False).U[:, :k]
    assert float(torch.linalg.matrix_norm(found.left - true @ (true.mT @ found.left), 2)) <= found.error + 1e-4
    for basis in (found.left, found.right):
        torch.testing.assert_close(basis.mT @ basis, torch.eye(k, dtype=torch.float64), rtol=0, atol=1e-6)


def test_a_raised_direction_of_the_base_is_no_intruder() -> None:
    """Of a hundredth of the largest value in the base, and the largest after tuning."""
    draw = torch.Generator().manual_seed(0)
    n = 1100
    left, right = (torch.linalg.qr(torch.randn(n, n, generator=draw, dtype=torch.float64)).Q for _ in "ab")
    base = (left * 0.99 ** torch.arange(n)) @ right.mT
    tuned = base + 5 * torch.outer(left[:, 550], right[:, 550])
    found = gonio.geometry.intruder_dimensions(base.float(), tuned.float())
    assert found.cosines[0] == pytest.approx(1.0, abs=1e-2)
    assert 0 not in found.numbers
    mixed = base + 5 * torch.outer(left @ torch.ones(n, dtype=torch.float64) / n**0.5, right[:, 0])
    assert 0 in gonio.geometry.intruder_dimensions(base.float(), mixed.float()).numbers


def test_complex_matrices_are_refused() -> None:
    z = torch.randn(6, 5, dtype=torch.complex64)
    for call in (lambda: gonio.geometry.top_subspace(z, 2), lambda: gonio.geometry.principal_angles(z, 1j * z)):
        with pytest.raises(InvalidArgumentError, match=r"real floating-point tensors; found dtype torch\.complex64"):
            call()


def test_bounds_of_several_directions_are_those_of_each_alone() -> None:
    """Also where the space of one is complete after few steps, and another has no image."""
    left, values = torch.linalg.qr(seeded(60, 60).double())[0], torch.linspace(1, 3, 40).double()
    base = left[:, :40] * values @ torch.linalg.qr(seeded(40, 40, seed=1).double())[0].mT
    mixed = torch.stack(
        [left[:, 3], (left[:, 5] + left[:, 9]) / 2**0.5, left[:, 50], *seeded(3, 60, seed=2).double()], 1
    )
    mixed = mixed / mixed.norm(dim=0)
    together = subspaces._cosine_bounds(base, mixed)
    alone = torch.cat([subspaces._cosine_bounds(base, column[:, None]) for column in mixed.mT])
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-7)
    true = (left[:, :40].mT @ mixed).abs().amax(0)
    assert bool((together >= true - 1e-7).all())
    assert together[:3].tolist() == pytest.approx([1, 0.5**0.5, 0], abs=1e-6)
