"""Running statistics: buffers that stay in float32, and move once per batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

__all__ = ["RunningStatistics", "inside_backward"]


def inside_backward() -> bool:
    """Whether this call is the recomputation of a checkpointed forward, which happens inside backward."""
    if torch.compiler.is_compiling():
        return False  # a compiled graph recomputes below this level
    return bool(torch._C._current_graph_task_id() != -1)  # private: no public function tells


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
        if inside_backward() or (isinstance(count, int) and count == 0):
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
            return torch.where(self.num_batches_tracked <= 1, 1.0, self.momentum).to(dtype)
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
