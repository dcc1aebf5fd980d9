"""A training step of a ResNet-18 with each penalty, as a ratio to the step without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    """A penalty on all convolutions; where its cheap form is measured too, the n of `every`."""

    regularizer: R.Regularizer
    every: int = 0

    @property
    def name(self) -> str:
        unit = getattr(self.regularizer, "filters", "raw") == "unit"
        return type(self.regularizer).__name__ + (" of unit filters" if unit else "")

    @property
    def reads_outputs(self) -> bool:
        return isinstance(self.regularizer, R.OutputRegularizer)

    def cheap(self) -> R.Regularizer:
        if isinstance(self.regularizer, R.SelfOrthogonality):
            return replace(self.regularizer, every=self.every, samples=SAMPLES)
        return replace(self.regularizer, every=self.every)


SAMPLES = 512
CASES = (
    Case(R.L2(1e-4, before_norm="keep")),
    Case(R.ScaleShift(1e-4, direction_strength=1e-6, before_norm="keep"), 8),
    Case(R.SRIP(1e-2), 8),
    Case(R.Orthogonality(1e-4), 32),
    Case(R.Orthogonality(1e-4, filters="unit")),
    Case(R.DoubleOrthogonality(1e-4)),
    Case(R.MutualCoherence(1e-3)),
    Case(R.HypersphericalEnergy(1e-1)),
    Case(R.ConvOrthogonality(1e-4)),
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


def _cheap(case: Case, width: int) -> Row:
    """Over as many steps as `every` says, so that the dear step counts as often as it comes."""
    asked = f"every={case.every}" + (f", samples={SAMPLES}" if case.reads_outputs else "")
    candidate = _candidate("gonio", case.cheap(), width, steps=case.every, in_place=not case.reads_outputs)
    floor = _candidate("plain step", None, width, steps=case.every)
    return Row(f"{case.name}, {asked}", "step", floor, (candidate,), "cheap")


def rows(*, quick: bool) -> Iterator[Row]:
    width, cases = (4, CASES[:2]) if quick else (64, CASES)
    for case in cases:
        ways = [_candidate("gonio, in the loss", case.regularizer, width)]
        if not case.reads_outputs:
            ways.append(_candidate("gonio, add_grads_", case.regularizer, width, in_place=True))
        yield Row(case.name, "step", _candidate("plain step", None, width), tuple(ways), "each-step")
    for case in cases:
        if case.every:
            yield _cheap(case, width)
