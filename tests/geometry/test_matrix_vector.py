"""Products of a matrix with a vector that all cores share."""

from __future__ import annotations

import pytest
import torch

from catalog import seeded
from gonio.geometry import matrix_vector as module
from gonio.geometry.matrix_vector import matrix_vector


@pytest.mark.parametrize("shape", [(512, 640), (513, 640), (1021, 300), (2, 200_000)], ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_every_layout_gives_the_product(shape: tuple[int, int], threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that divide by the threads or do not, transposes, and rows that lie apart in memory."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    whole = seeded(shape[0], shape[1] + 3)
    for matrix in (whole[:, : shape[1]], whole[:, : shape[1]].contiguous(), whole[:, 3:].T):
        vector = seeded(matrix.shape[1])
        expected = matrix.double() @ vector.double()
        found = matrix_vector(matrix, vector)
        assert found.shape == expected.shape
        assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_only_large_matrices_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    calls = []
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *a: calls.append(1) or bmm(*a))
    side = int(module.SHARED_FROM**0.5)
    matrix_vector(seeded(side, side - 1), seeded(side - 1))
    assert not calls
    matrix_vector(seeded(side, side), seeded(side))
    assert calls
