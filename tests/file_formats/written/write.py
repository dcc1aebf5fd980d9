"""Write the archives of this folder: tiny checkpoints by DeepSpeed and Megatron, from two processes on a CPU.

    python -m file_formats.written.write deepspeed|megatron|omegaconf      (in tests; needs the package, einops, hjson)

DeepSpeed 0.19.8 trains a perceptron for five steps with AdamW in bfloat16, in stages 1 to 3 of ZeRO. megatron-core
0.16.1 saves two sharded weights, a replicated one and moments; its calls that wait for a GPU do nothing here. OmegaConf
2.3 is saved by torch with settings beside weights.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing import spawn

HERE = Path(__file__).resolve().parent
WORLD = 2


def started(rank: int, port: int) -> None:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ.update(where, WORLD_SIZE=str(WORLD), LOCAL_SIZE=str(WORLD), DS_ACCELERATOR="cpu")
    torch.set_num_threads(1)
    torch.manual_seed(0)


def by_deepspeed(rank: int, stage: int, folder: str) -> None:
    started(rank, 29600 + stage)
    import deepspeed

    model = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 6))
    decayed, others = ([p for p in model.parameters() if (p.ndim > 1) is matrix] for matrix in (True, False))
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero, "bf16": {"enabled": True}}
    config["zero_allow_untested_optimizer"] = True
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=True)
    draw = torch.Generator().manual_seed(rank)
    for _ in range(5):
        engine.backward(engine(torch.randn(4, 12, generator=draw).bfloat16()).float().square().mean())
        engine.step()
    engine.save_checkpoint(folder, tag=f"stage{stage}")


def by_megatron(rank: int, folder: str) -> None:
    started(rank, 29700)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    torch.cuda.synchronize, torch.cuda.current_device = lambda *_: None, lambda: "cpu"  # type: ignore[assignment,return-value]

    def shard(name: str, value: Tensor, dim: int) -> Any:
        return ShardedTensor.from_rank_offsets(name, value.chunk(WORLD, dim)[rank].contiguous(), (dim, rank, WORLD))

    weights = {"decoder.layers.0.self_attention.linear_qkv.weight": (torch.randn(24, 16), 0)}
    weights["decoder.layers.0.mlp.linear_fc2.weight"] = (torch.randn(16, 8), 1)
    state: dict[str, Any] = {name: shard(name, value, dim) for name, (value, dim) in weights.items()}
    norm = "decoder.final_layernorm.weight"
    state[norm] = ShardedTensor.from_rank_offsets(norm, torch.ones(16), replica_id=rank)
    moments = {
        name: {
            word: shard(f"optimizer.state.{word}.{name}", made, dim)
            for word, made in (("exp_avg", w * 0.01), ("exp_avg_sq", w.square() * 1e-4), ("fp32_param", w))
        }
        for name, (w, dim) in weights.items()
    }
    state |= {"optimizer": {"state": moments, "param_groups": [{"lr": 0.01, "step": 5}]}, "iteration": 5}
    Path(folder).mkdir(exist_ok=True)
    dist_checkpointing.save(state, folder)
    dist.barrier()
    dist.destroy_process_group()


def by_omegaconf(path: Path) -> None:
    """A checkpoint as Lightning writes them, with the settings that people keep in `hyper_parameters`."""
    from omegaconf import OmegaConf

    config = OmegaConf.create({"model": {"width": 8, "lr": 1e-3, "on": True, "dims": [1, 2], "ref": "${model.width}"}})
    settings: dict[str, Any] = {"config": config, "args": argparse.Namespace(lr=1e-3, out=PurePosixPath("runs"))}
    settings |= {"when": datetime(2025, 1, 1), "scale": np.float32(3), "ones": np.ones(2)}
    settings["lists"] = defaultdict(list, {"a": [1]})
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    model.tied = model.weight
    torch.save({"epoch": 3, "state_dict": model.state_dict(), "hyper_parameters": settings}, path)


if __name__ == "__main__":
    if sys.argv[1:] == ["omegaconf"]:
        by_omegaconf(HERE / "omegaconf.ckpt")
        sys.exit()
    with tempfile.TemporaryDirectory() as made:
        if sys.argv[1:] == ["deepspeed"]:
            for stage in (1, 2, 3):
                spawn(by_deepspeed, args=(stage, made), nprocs=WORLD)
                shutil.make_archive(str(HERE / f"deepspeed-{stage}"), "zip", Path(made) / f"stage{stage}")
        else:
            spawn(by_megatron, args=(f"{made}/megatron",), nprocs=WORLD)
            shutil.make_archive(str(HERE / "megatron"), "zip", f"{made}/megatron")
