"""The figures of a change equal those of full decompositions in float64; planted changes are named rightly."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from torch import Tensor

from catalog import seeded
from changes.references import figures
from gonio.measuring import TensorDifference, difference


def trained(n: int, d: int, seed: int = 0) -> Tensor:
    """Singular values that fall as a power, as those of trained weights."""
    small = min(n, d)
    left = torch.linalg.qr(seeded(n, small, seed=seed)).Q
    right = torch.linalg.qr(seeded(d, small, seed=seed + 1)).Q
    return left * torch.arange(1.0, small + 1).pow(-0.6) @ right.mT


def rotated(weight: Tensor, seed: int, angle: float = 0.3) -> Tensor:
    skew = seeded(weight.shape[1], weight.shape[1], seed=seed) * angle / sqrt(weight.shape[1])
    return weight @ torch.linalg.matrix_exp(skew - skew.mT)


def changed(kind: str, weight: Tensor, seed: int) -> Tensor:
    """The weight after a planted change."""
    n, d = weight.shape
    top = float(torch.linalg.matrix_norm(weight, 2))
    if kind == "rotation":
        return rotated(weight, seed)
    if kind == "gains":
        return weight * (1 + 0.5 * torch.rand(n, 1, generator=torch.Generator().manual_seed(seed)))
    if kind == "low rank":
        return (
            weight
            + 0.1 * top * torch.linalg.qr(seeded(n, 3, seed=seed)).Q @ torch.linalg.qr(seeded(d, 3, seed=seed)).Q.mT
        )
    if kind == "intruders":
        left, right = (torch.linalg.qr(seeded(size, 3, seed=seed + size)).Q for size in (n, d))
        return weight + top * left * torch.tensor([3.0, 2.5, 2.0]) @ right.mT
    return weight + seeded(n, d, seed=seed) * 0.02 * weight.norm() / sqrt(n * d)


def measured(before: Tensor, after: Tensor) -> TensorDifference:
    return difference({"w.weight": before}, {"w.weight": after})["w"]


KINDS = {"rotation": "rotation", "gains": "gains", "low rank": "rank 3", "intruders": "rank 3", "full": "full"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(60, 90), (96, 64), (600, 540)], ids=str)
def test_all_figures_are_those_of_the_reference(kind: str, shape: tuple[int, int]) -> None:
    before = trained(*shape)
    after = changed(kind, before, 7)
    found, exact = measured(before, after), figures(before, after)
    gains = kind == "gains"  # its angles are rounding
    for name in ("relative", "norm_ratio", "stable_rank", "effective_rank", "overlap"):
        assert getattr(found, name) == pytest.approx(exact[name], rel=1e-3), name
    for name in ("magnitude_change", "gram_change", "angle_mean", "direction_change"):
        assert getattr(found, name) == pytest.approx(exact[name], rel=2e-3, abs=2e-6 if name != "angle_mean" else 5e-3)
    if not gains and kind != "rotation":
        assert found.magnitude_direction == pytest.approx(exact["magnitude_direction"], abs=1e-3)
    assert (found.rank_99, found.intruders) == (exact["rank_99"], exact["intruders"])
    sure = exact["cosines"] > 0.5
    assert torch.tensor(found.intruder_cosines)[sure].tolist() == pytest.approx(
        exact["cosines"][sure].tolist(), abs=2e-3
    )
    assert sorted(found.principal_angles) == pytest.approx(exact["principal"].tolist(), abs=0.5)
    assert found.form == KINDS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_forty_planted_changes_of_each_kind_are_named_rightly(kind: str) -> None:
    for seed in range(40):
        shape = [(40, 64), (64, 48), (80, 80), (50, 120)][seed % 4]
        before = trained(*shape, seed=seed) if seed % 2 else seeded(*shape, seed=seed)
        after = changed(kind, before, seed + 1000)
        found = measured(before, after)
        assert found.form == KINDS[kind], (seed, shape)
        if kind == "intruders":
            assert (found.intruders or 0) >= 2, seed  # of 40 rows one in 50 is near one of the base's by chance
        if kind == "gains":
            assert found.angle_max == pytest.approx(0, abs=0.05)


def test_chance_levels_are_those_of_random_changes() -> None:
    before = seeded(80, 120)
    found = [measured(before, before + 0.05 * seeded(80, 120, seed=s)) for s in range(1, 9)]
    for seen, chance in (("gram_change", "gram_change_random"), ("stable_rank", "stable_rank_random")):
        values = [getattr(one, seen) for one in found]
        assert sum(values) / len(values) == pytest.approx(getattr(found[0], chance), rel=0.08), seen
    far = [measured(before, seeded(80, 120, seed=s)) for s in range(9, 29)]
    assert sum(one.overlap for one in far) / 20 == pytest.approx(far[0].overlap_random, rel=0.25)
    assert all(one.intruders == 10 and one.intruders_random for one in far)


def test_small_weights_have_no_intruders_and_blocks_are_compared_one_by_one() -> None:
    assert measured(seeded(12, 30), seeded(12, 30, seed=1)).intruders is None
    lstm = torch.nn.LSTM(40, 40)
    before = {k: v.clone() for k, v in lstm.state_dict().items()}
    with torch.no_grad():
        lstm.weight_hh_l0[40:80] += 5 * seeded(40, 1) @ seeded(1, 40, seed=1)
    found = difference(before, lstm)["weight_hh_l0"]
    parts = [
        figures(before["weight_hh_l0"][i : i + 40], lstm.weight_hh_l0[i : i + 40].detach())["intruders"] for i in (40,)
    ]
    assert found.intruders == parts[0] >= 1


def test_half_precision_is_compared_without_its_rounding() -> None:
    before = trained(64, 80).bfloat16()
    after = (before.float() * 1.25).bfloat16()
    exact = figures(before, after)
    assert measured(before, after).relative == pytest.approx(exact["relative"], rel=1e-5)
