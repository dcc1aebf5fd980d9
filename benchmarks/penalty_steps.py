"""A training step of a ResNet-18 with each penalty, as a ratio to the step without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gonio
from benchmarks.harness import Candidate, Operation, Row
from benchmarks.networks import ResNet18
from gonio import regularizers as R

TITLE = "A training step with a penalty"
FLOOR = "the step without a penalty: forward, backward and SGD with momentum, ResNet-18, batch 32, images 3×32×32"
BATCH, SIZE = 32, 32


@dataclass(frozen=True)
class Case:
    """A penalty on all convolutions, and the n that makes it cheap: each n-th step, for outputs from few samples."""

    regularizer: R.Regularizer
    every: int

    @property
    def name(self) -> str:
        return type(self.regularizer).__name__

    def cheap(self) -> R.Regularizer:
        if isinstance(self.regularizer, R.SelfOrthogonality):
            return replace(self.regularizer, every=self.every, samples=512)
        return replace(self.regularizer, every=self.every)


CASES = (
    Case(R.L2(1e-4, before_norm="keep"), 4),
    Case(R.ScaleShift(1e-4, direction_strength=1e-6, before_norm="keep"), 8),
    Case(R.SRIP(1e-2), 8),
    Case(R.Orthogonality(1e-4), 32),
    Case(R.Orthogonality(1e-4, filters="unit"), 32),
    Case(R.DoubleOrthogonality(1e-4), 64),
    Case(R.MutualCoherence(1e-3), 32),
    Case(R.HypersphericalEnergy(1e-1), 32),
    Case(R.ConvOrthogonality(1e-4), 64),
    Case(R.SelfOrthogonality(1e-2), 16),
)


def _step(rules: Sequence[tuple[object, R.Regularizer]], steps: int, *, in_place: bool, width: int) -> Operation:
    """`steps` training steps; in the last way of adding a penalty the graph is left out."""
    torch.manual_seed(0)
    model = ResNet18(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    penalty = gonio.Penalty(model, rules) if rules else None
    draw = torch.Generator().manual_seed(1)
    images = torch.randn(BATCH, 3, SIZE, SIZE, generator=draw)
    labels = torch.randint(10, (BATCH,), generator=draw)

    def operation() -> Sequence[Tensor]:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            if penalty is not None and not in_place:
                loss = loss + penalty()
            loss.backward()
            if penalty is not None and in_place:
                penalty.add_grads_()
            optimizer.step()
        return []

    return operation


def _candidate(
    name: str, regularizer: R.Regularizer | None, width: int, *, steps: int = 1, in_place: bool = False
) -> Candidate:
    rules = [] if regularizer is None else [(nn.Conv2d, regularizer)]

    def make() -> Operation:
        return _step(rules, steps, in_place=in_place, width=width)

    return Candidate(name, make)


def _label(case: Case) -> str:
    words = [case.name]
    if getattr(case.regularizer, "filters", "raw") == "unit":
        words.append("of unit filters")
    return " ".join(words)


def _cheap(case: Case, width: int, build: Callable[..., Candidate]) -> Row:
    """Over as many steps as `every` says, so that the dear step is counted as often as it comes."""
    cheap = case.cheap()
    asked = f"every={case.every}" + (", samples=512" if isinstance(cheap, R.SelfOrthogonality) else "")
    in_place = not isinstance(cheap, R.SelfOrthogonality)
    candidate = build("gonio", cheap, width, steps=case.every, in_place=in_place)
    floor = build("plain step", None, width, steps=case.every)
    return Row(f"{_label(case)}, {asked}", "step", floor, (candidate,), "cheap")


def rows(*, quick: bool) -> Iterator[Row]:
    width = 4 if quick else 64
    for case in CASES[:2] if quick else CASES:
        ways = [_candidate("added to the loss", case.regularizer, width)]
        if not isinstance(case.regularizer, R.SelfOrthogonality):
            ways.append(_candidate("add_grads_", case.regularizer, width, in_place=True))
        yield Row(_label(case), "step", _candidate("plain step", None, width), tuple(ways), "each step")
    for case in CASES[:2] if quick else CASES:
        yield _cheap(case, width, _candidate)
