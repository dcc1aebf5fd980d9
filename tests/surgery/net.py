"""A module of a few layers whose forward is a function, for tests that need another one each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

__all__ = ["Net"]


class Net(nn.Module):
    """Layers by name, and `compute(module, x)` that calls them."""

    def __init__(self, compute: Callable[[Any, Tensor], Any], **layers: nn.Module) -> None:
        super().__init__()
        self.compute = compute
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Any:
        return self.compute(self, x)
