"""Small networks for the tests of figures and findings, and a training that a tracker may watch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gonio


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


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adam with L2": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.5),
        nn.utils.parametrizations.spectral_norm(nn.Conv2d(6, 6, 3, groups=6)), nn.Flatten(), nn.Linear(24, 3),
    )  # fmt: skip


Watch = Callable[[nn.Module, torch.optim.Optimizer], Any]


def train(
    optimizer: str, watch: Watch | None = None, steps: int = 6, *, each: bool = False
) -> tuple[dict[str, Tensor], Any]:
    """A training, and everything that a further step would depend on; `each`: what watches is told of each step."""
    model = network()
    opt = OPTIMIZERS[optimizer](model.parameters())
    watcher = watch(model, opt) if watch else None
    for _ in range(steps):
        opt.zero_grad()
        model(torch.randn(4, 2, 6, 6)).square().mean().backward()
        opt.step()
        if each and watcher is not None:
            watcher.step()
    state = {f"grad {name}": p.grad for name, p in model.named_parameters()} | dict(model.state_dict())
    state |= {f"{i} {k}": v for i, s in opt.state_dict()["state"].items() for k, v in s.items() if v is not None}
    state |= {"random": torch.get_rng_state(), "modes": torch.tensor([m.training for m in model.modules()])}
    return state, watcher


def tracked(steps: int) -> gonio.Tracker:
    """So many steps of a network with one layer before a norm, tracked at every second one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    tracker = gonio.Tracker(model, optimizer=optimizer, every=2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().sum().backward()
        optimizer.step()
    return tracker
