"""Running statistics: buffers that stay in float32, and move once per batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

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
    the weight of the new batch, or None for the average of all batches. The first batch replaces the
    initial values.
    """

    momentum: float | None
    num_batches_tracked: Tensor

    def _track(self, news: Mapping[str, Tensor], count: Tensor | int = 1) -> None:
        """Move the buffers named in `news` towards the batch's values; an empty batch (`count` 0) moves nothing."""
        if inside_backward():
            return
        with torch.no_grad():
            seen = torch.as_tensor(count, device=self.num_batches_tracked.device) > 0
            self.num_batches_tracked.add_(seen)
            factor = self._factor() * seen
            for name, value in news.items():
                buffer = self._buffers[name]
                if buffer is not None:
                    # a product with 0 would keep a NaN of an empty batch
                    step = torch.where(seen, value.detach().to(buffer.dtype) - buffer, 0)
                    buffer.add_(step * factor)

    def _factor(self) -> Tensor:
        tracked = self.num_batches_tracked.clamp_min(1)
        if self.momentum is None:
            return 1 / tracked
        return torch.where(tracked == 1, 1.0, self.momentum)

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
