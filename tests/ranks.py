"""Two gloo processes, or as many as GONIO_WORLD says; what each of them returns comes back through files."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import spawn

WORLD = int(os.environ.get("GONIO_WORLD", "2"))  # 2 or 4: `make distributed` runs both


@contextmanager
def group(folder: Path | str, rank: int = 0, world: int = 1) -> Iterator[None]:
    """A gloo process group; by default of this process alone."""
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        yield
        dist.barrier()  # without it, leaving the group aborts now and then
    finally:
        dist.destroy_process_group()


def spawned(work: Callable[[], Any], folder: Path) -> list[Any]:
    """What `work`, a function of a module, returns in each of the processes, which form a group."""
    spawn(_on_rank, args=(str(folder), work), nprocs=WORLD)
    found = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]
    assert not any(isinstance(each, str) for each in found), found
    return found


def _on_rank(rank: int, folder: str, work: Callable[[], Any]) -> None:
    torch.set_num_threads(1)
    with group(folder, rank, WORLD):
        torch.save(attempt(work), Path(folder) / f"{rank}.pt")


def attempt(work: Callable[[], Any]) -> Any:
    """What `work` returns; an error as text, with which the parent says which case failed."""
    try:
        return work()
    except Exception as error:
        return f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
