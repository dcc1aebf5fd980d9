"""What a training says that the weights do not: how large its batches are, and which weights decay."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import Any

import torch

from gonio.errors import InvalidArgumentError

__all__ = ["Training"]


@dataclass(frozen=True)
class Training:
    """Sizes and decays, as far as they are known.

    Attributes:
        batch: samples per batch and process.
        last: samples of an epoch's last batch.
        decayed: `id` of each Parameter under weight decay.
    """

    batch: int | None = None
    last: int | None = None
    decayed: frozenset[int] = frozenset()

    @classmethod
    def of(cls, loader: Any = None, optimizer: torch.optim.Optimizer | None = None) -> Training:
        """Read a data loader, without drawing from it, and an optimizer.

        Raises:
            InvalidArgumentError: if they are something else.
        """
        if loader is not None and not hasattr(loader, "batch_size"):
            raise InvalidArgumentError(
                "measure(loader=) reads the batch size of a DataLoader", type(loader).__name__, "Pass the loader."
            )
        if optimizer is not None and not hasattr(optimizer, "param_groups"):
            raise InvalidArgumentError(
                "measure(optimizer=) reads the weight decay of an optimizer", type(optimizer).__name__, "Pass it."
            )
        groups = [] if optimizer is None else optimizer.param_groups
        decayed = frozenset(id(p) for group in groups if group.get("weight_decay", 0) for p in group["params"])
        batch, last = _sizes(loader)
        return cls(batch, last, decayed)


def _sizes(loader: Any) -> tuple[int | None, int | None]:
    """Samples of a batch and of the last one of an epoch; None for what the loader does not tell."""
    source = loader if getattr(loader, "batch_size", None) else getattr(loader, "batch_sampler", None)
    batch = getattr(source, "batch_size", None)
    if not isinstance(batch, int) or batch < 1:
        return None, None
    if getattr(source, "drop_last", False):
        return batch, batch
    sampler = getattr(source, "sampler", None)
    if not isinstance(sampler, Sized):
        return batch, None
    try:
        samples = len(sampler)
    except TypeError:  # an iterable data set has a sampler without an end
        return batch, None
    return batch, (samples % batch or batch) if samples else None
