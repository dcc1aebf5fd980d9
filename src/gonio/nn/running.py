"""Running statistics: buffers in float32 that move once per batch, and sums over the processes of a training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["RunningStatistics", "several_ranks", "total"]


def several_ranks() -> bool:
    """Whether the default process group has been started with more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def total(x: Tensor) -> Tensor:
    """The sum of `x` over all processes, with the gradient; each must call it, in the same order."""
    result: Tensor = _Total.apply(x)
    return result


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.clone()
        dist.all_reduce(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        # every process's loss depends on every process's summand
        return total(grad)


class RunningStatistics(nn.Module):
    """Abstract base of the layers with running statistics.

    A concrete class registers `num_batches_tracked` and its statistics as buffers. `momentum` is torch's:
    the weight of the new batch, or None for the average of all batches.
    """

    first_batch_replaces: ClassVar[bool] = False  # the initial value otherwise stays in the average, as in torch
    momentum: float | None
    num_batches_tracked: Tensor

    def _track(self, news: Mapping[str, Tensor], count: Tensor | int) -> None:
        """Move the buffers named in `news` towards a batch's values; a batch of `count` 0 moves nothing."""
        if isinstance(count, int) and count == 0:
            return
        with torch.no_grad():
            seen = count > 0
            self.num_batches_tracked.add_(seen)
            for name, value in news.items():
                buffer = self._buffers[name]
                if buffer is not None:
                    value, factor = value.to(buffer.dtype), self._factor(buffer.dtype)
                    if isinstance(seen, Tensor):
                        value = torch.where(seen, value, buffer)
                    buffer.lerp_(value, factor)  # exact for a factor of 1, and for a value that is there already

    def _factor(self, dtype: torch.dtype) -> Tensor | float:
        if self.momentum is None:
            return (1 / self.num_batches_tracked.clamp_min(1)).to(dtype)
        if self.first_batch_replaces:
            return (self.num_batches_tracked <= 1).to(dtype).clamp_min(self.momentum)
        return self.momentum

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """As torch's, but `half()` and `bfloat16()` leave the running statistics in float32."""
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if new is not None and new.dtype in (torch.float16, torch.bfloat16):
                keep = new if old.is_meta else old.to(new.device)
                self._buffers[name] = keep.float()
        return self
