"""The global generators, which user code reads and gonio does not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["kept_generators", "seed_everything"]


def seed_everything(seed: int) -> None:
    """Seed the global generators: user factories, dropout and the like read them; gonio does not."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (for user code that reads it)


@contextmanager
def kept_generators() -> Iterator[None]:
    """The global generators have the same state after the block as before it."""
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng():
        yield
    random.setstate(python)
    np.random.set_state(legacy)  # noqa: NPY002
