"""The self-orthogonality estimate beside the exact angles."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gonio
from catalog import seeded


def exact(weight: torch.Tensor) -> float:
    """From the formula, in float64: √(mean over pairs of (90° − θ)²)."""
    w = weight.double().flatten(1)
    unit = w / w.norm(dim=1, keepdim=True)
    off = ~torch.eye(len(w), dtype=torch.bool)
    degrees = torch.rad2deg(torch.arccos((unit @ unit.T)[off].clamp(-1, 1)))
    return float((degrees - 90).square().mean().sqrt())


def leaning(filters: int, dim: int, lean: float) -> nn.Linear:
    """Filters that share a direction."""
    layer = nn.Linear(dim, filters)
    with torch.no_grad():
        layer.weight.copy_(seeded(filters, dim) + lean)
    return layer


@pytest.mark.parametrize("lean", [0.0, 0.5, 1.5])
def test_both_agree_for_inputs_uniform_in_direction(lean: float) -> None:
    layer = leaning(12, 24, lean)
    (signal,) = gonio.measure(layer, batch=seeded(4096, 24, seed=1)).signals
    assert signal.angles_exact == pytest.approx(exact(layer.weight.detach()), rel=1e-5)
    assert signal.angles_read == pytest.approx(signal.angles_exact, rel=0.06)


def test_the_sample_adds_nothing_to_orthogonal_filters() -> None:
    """Without the correction 100 samples of orthogonal filters would read as 90°/√99, 9°."""
    layer = nn.Linear(64, 32)
    nn.init.orthogonal_(layer.weight)
    (signal,) = gonio.measure(layer, batch=seeded(100, 64)).signals
    assert signal.angles_exact == pytest.approx(0, abs=1e-3)
    assert signal.angles_read == pytest.approx(0, abs=3)


def test_inputs_in_few_directions_show_other_angles_than_the_weights() -> None:
    """Negative control: the two are different figures."""
    layer = nn.Linear(24, 12)
    narrow = seeded(4096, 2, seed=1) @ seeded(2, 24, seed=2)
    (signal,) = gonio.measure(layer, batch=narrow).signals
    assert signal.angles_read > 2 * signal.angles_exact  # type: ignore[operator]


def test_groups_are_not_paired() -> None:
    layer = nn.Conv2d(4, 8, 3, groups=2)
    with torch.no_grad():
        layer.weight[4:] = layer.weight[:4]  # twins in another group see other inputs
    (signal,) = gonio.measure(layer, batch=seeded(64, 4, 10, 10)).signals
    blocks = [exact(layer.weight[:4].detach()), exact(layer.weight[4:].detach())]
    assert signal.angles_exact == pytest.approx((sum(b * b for b in blocks) / 2) ** 0.5, rel=1e-5)
    assert signal.angles_read < 45  # type: ignore[operator]


def test_where_there_is_nothing_to_read() -> None:
    model = nn.Sequential(nn.Linear(4, 1), nn.ReLU())
    for signal in gonio.measure(model, batch=seeded(32, 4)).signals:
        assert (signal.angles_read, signal.angles_exact) == (None, None)
    (one,) = gonio.measure(nn.Linear(4, 3), batch=seeded(2, 4)).signals
    assert one.angles_read is None


def test_measuring_prints_and_exports_both() -> None:
    measured = gonio.measure(nn.Linear(8, 6), batch=seeded(256, 8))
    (signal,) = measured.signals
    assert "off 90°" in str(measured)
    assert measured.to_dict()["signals"][0]["angles_exact"] == signal.angles_exact
