"""Sharded weights: every function gives what it gives on the whole tensor."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.multiprocessing import spawn

from gonio import geometry
from tolerances import close

OF_MATRICES = [
    "filter_norms",
    "normalize",
    "cosines",
    "angles",
    "coherence",
    "alignment",
    "alignment_zscore",
    "singular_values",
    "spectral_norm",
    "stable_rank",
    "effective_rank",
    "condition_number",
    "sign_similarity",
    "sign_hash",
]
FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {name: getattr(geometry, name) for name in OF_MATRICES}
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


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def differing(world: int) -> list[str]:
    """Functions whose result on a sharded tensor is not that on the whole tensor."""
    mesh = init_device_mesh("cpu", (world,))
    wrong = []
    for functions, weight in ((FUNCTIONS, draw(7, 5)), (OF_KERNELS, draw(4, 3, 3, 3))):
        for placement in (Shard(0), Shard(1), Replicate()):
            sharded = distribute_tensor(weight, mesh, [placement])
            for name, function in functions.items():
                value = function(sharded)
                value = value.full_tensor() if hasattr(value, "full_tensor") else value
                if not torch.allclose(value, function(weight), **close(torch.float32)):
                    wrong.append(f"{name} {placement}")
    return wrong


def run_rank(rank: int, folder: str, world: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    (Path(folder) / str(rank)).write_text("\n".join(differing(world)), encoding="utf-8")
    dist.barrier()  # without it, leaving the group aborts now and then
    dist.destroy_process_group()


def test_one_process(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        assert not differing(1)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    spawn(run_rank, args=(str(tmp_path), 2), nprocs=2)
    assert [(tmp_path / str(rank)).read_text(encoding="utf-8") for rank in range(2)] == ["", ""]
