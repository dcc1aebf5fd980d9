"""What trained networks hold that packages ship, and that is no damage."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import gonio


def fourier(samples: int) -> Tensor:
    """The cosines and the sines of a short-time transform, as filters of a convolution."""
    angle = 2 * math.pi / samples * torch.outer(torch.arange(samples // 2 + 1.0), torch.arange(float(samples)))
    rows = torch.cat([angle.cos(), angle.sin()]) * torch.hann_window(samples)
    return rows.masked_fill(rows.abs() < 1e-4, 0.0)[:, None]


def warned(state: dict[str, Tensor]) -> tuple[set[str], ...]:
    return tuple(
        {(f.code, f.path) for f in found.findings if f.level != "info"}
        for found in (gonio.check(state), gonio.measure(state))
    )


@pytest.mark.parametrize("samples", [32, 128])
def test_the_sines_that_are_0_in_a_fourier_transform_are_no_dead_filters(samples: int) -> None:
    basis = fourier(samples)
    assert not basis[samples // 2 + 1].any()
    assert not basis[samples + 1].any()
    assert warned({"stft.weight": basis}) == (set(), set())
    basis[3] = 0
    assert all(("G102", "stft") in found for found in warned({"stft.weight": basis}))


def test_biases_of_images_are_vectors_and_have_no_siblings() -> None:
    generator = torch.Generator().manual_seed(0)
    state = {f"op.{i}.0": torch.randn(1, 96, 1, 1, generator=generator) for i in range(9)}
    state["op.4.0"] *= 1000
    assert gonio.check(state).intact
    matrices = {f"op.{i}.0": torch.randn(8, 96, generator=generator) for i in range(9)}
    matrices["op.4.0"] *= 1000
    assert "G709" in {finding.code for finding in gonio.check(matrices).findings}
