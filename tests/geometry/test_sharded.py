"""Sharded weights: every function gives what it gives on the whole tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from catalog import seeded
from foreign import SHARDING_ON_A_CPU
from gonio import geometry
from ranks import WORLD, group, spawned
from tolerances import close

OF_ROWS = ["filter_norms", "normalize", "cosines", "angles", "coherence", "alignment", "alignment_zscore"]
OF_SPECTRA = ["singular_values", "spectral_norm", "stable_rank", "effective_rank", "condition_number"]
OF_SIGNS = ["sign_similarity", "sign_hash"]
FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    name: getattr(geometry, name) for name in OF_ROWS + OF_SPECTRA + OF_SIGNS
}
FUNCTIONS |= {
    "matrix_view": geometry.matrix_view,
    "least_scale": lambda w: geometry.least_scale([w, w]),
    "defect": lambda w: geometry.orthogonality_defect(w).spectral,
    "duplicates": lambda w: geometry.near_duplicates(w, cosine=0.5).pairs,
}
OF_KERNELS: dict[str, Callable[[Tensor], Any]] = {
    "conv": lambda w: geometry.conv_spectral_norm(w, (4, 4)),
    "bound": geometry.conv_spectral_norm_bound,
    "certificate": geometry.conv_spectral_norm_certificate,
    "estimate": lambda w: geometry.conv_spectral_norm_estimate(w, (4, 4)),
}


def differing() -> dict[str, float]:
    """Functions whose result on a sharded tensor is not that on the whole tensor."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wrong = {}
    for functions, weight in ((FUNCTIONS, seeded(7, 5)), (OF_KERNELS, seeded(4, 3, 3, 3))):
        for placement in (Shard(0), Shard(1), Replicate()):
            sharded = distribute_tensor(weight, mesh, [placement])
            for name, function in functions.items():
                value = function(sharded)
                value = value.full_tensor() if hasattr(value, "full_tensor") else value
                if not torch.allclose(value, function(weight), **close(torch.float32)):
                    wrong[f"{name} {placement}"] = float((value - function(weight)).abs().max())
    return wrong


@SHARDING_ON_A_CPU
def test_one_process(tmp_path: Path) -> None:
    with group(tmp_path):
        assert differing() == {}


@pytest.mark.slow
def test_several_processes(tmp_path: Path) -> None:
    assert spawned(differing, tmp_path) == [{}] * WORLD
