"""Whole training steps with a tracker at its optimizer, with held norms, with clipped logits, and with Muon."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gonio
from benchmarks.harness import Candidate, Operation, Row
from benchmarks.whole_steps import Network, networks

__all__ = ["FLOOR", "TITLE", "rows"]

TITLE = "Whole training steps that are tracked or held"
FLOOR = "the plain step: forward, backward and AdamW, or torch.optim.Muon"

# Prepares a model: its optimizer, with whatever watches or changes its steps, which stays alive with it.
Prepare = Callable[[nn.Module], tuple[torch.optim.Optimizer, object]]
STEPS = 10  # of one operation, so that every tenth step is measured once


def _plain(model: nn.Module) -> tuple[torch.optim.Optimizer, object]:
    return torch.optim.AdamW(model.parameters(), lr=1e-5), None


def _tracked(every: int) -> Prepare:
    def prepare(model: nn.Module) -> tuple[torch.optim.Optimizer, object]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        return optimizer, gonio.Tracker(model, optimizer=optimizer, every=every, figures="training")

    return prepare


def _held(step: str, norm: str = "matrix") -> Prepare:
    def prepare(model: nn.Module) -> tuple[torch.optim.Optimizer, object]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        return optimizer, gonio.hold_(model, optimizer, step=step, norm=norm)

    return prepare


def _clipped(model: nn.Module) -> tuple[torch.optim.Optimizer, object]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    return optimizer, gonio.clip_qk_(model, optimizer, limit=100.0)


def _attention(model: nn.Module) -> tuple[torch.optim.Optimizer, object]:
    """Every tenth step is measured, with the logits of its forward."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    also = ("attention",)
    return optimizer, gonio.Tracker(model, optimizer=optimizer, every=10, figures="training", also=also)


def _muon(model: nn.Module) -> tuple[torch.optim.Optimizer, object]:
    """On the weights in two dimensions, which torch's takes; each as one matrix."""
    return gonio.optim.Muon(_matrices(model), lr=1e-5), None


def _torchs_muon(model: nn.Module) -> tuple[torch.optim.Optimizer, object]:
    return torch.optim.Muon(_matrices(model), lr=1e-5), None


def _matrices(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.ndim == 2]


def steps_of(network: Network, prepare: Prepare, *, steps: int = STEPS) -> Operation:
    """Training steps as an operation; it returns nothing, since parameters move from step to step."""
    torch.manual_seed(0)
    torch.set_num_threads(network.threads)
    model = network.build()
    optimizer, kept = prepare(model)
    draw = torch.Generator().manual_seed(1)
    inputs = network.inputs(draw)
    labels = torch.randint(10, tuple(model(inputs).shape[:-1]), generator=draw)

    def operation(_kept: object = kept) -> Sequence[Tensor]:
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten()).backward()
            optimizer.step()
        return []

    return operation


METHODS = {
    "tracker, every 10th step": _tracked(10),
    "tracker, every step": _tracked(1),
    "hold_, free": _held("free"),
    "hold_, free, filters": _held("free", "filters"),
    "hold_, fixed": _held("fixed"),
}

OF_ATTENTION = {"clip_qk_": _clipped, "tracker of attention, every 10th step": _attention}


def rows(*, quick: bool) -> Iterator[Row]:
    steps = 2 if quick else STEPS
    for network in networks(quick=quick)[slice(1, 2) if quick else slice(None)]:  # a small one in tests
        table = network.name.replace(" ", "-")
        floor = Candidate("AdamW step", lambda n=network: steps_of(n, _plain, steps=steps))
        for name, prepare in (METHODS | (OF_ATTENTION if table == "transformer" else {})).items():
            ours = Candidate("gonio", lambda n=network, p=prepare: steps_of(n, p, steps=steps))
            yield Row(name, f"{steps} steps", floor, (ours,), table)
        if sum(p.ndim == 2 for p in network.build().parameters()) > 2:
            theirs = Candidate("torch.optim.Muon", lambda n=network: steps_of(n, _torchs_muon, steps=steps))
            ours = Candidate("gonio", lambda n=network: steps_of(n, _muon, steps=steps))
            yield Row("Muon", f"{steps} steps", theirs, (ours,), table)
