"""Small networks for the tests of figures and findings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["Residual", "Scaled"]


class Residual(nn.Module):
    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class Scaled(Residual):
    """ReZero: the branch is multiplied by a number that starts at 0."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__(branch)
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.branch(x)
