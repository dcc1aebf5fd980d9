"""Random orthogonal matrices: a large one, all weights of a network, each weight shape of ResNet-50."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from benchmarks.harness import Candidate, Operation, Row
from benchmarks.shapes import MODELS, TINY, resnet50
from gonio import init

TITLE = "Random orthogonal initialisation"
FLOOR = "filling with normal numbers"
Fill = Callable[..., Tensor]


def _candidate(name: str, fill: Fill, shapes: Sequence[tuple[int, ...]]) -> Candidate:
    def make() -> Operation:
        tensors = [torch.empty(shape) for shape in shapes]
        generator = torch.Generator().manual_seed(0)

        def operation() -> Sequence[Tensor]:
            for tensor in tensors:
                fill(tensor, generator=generator)
            return []  # random: nothing to compare, the laws test what is drawn

        return operation

    return Candidate(name, make)


def _row(case: str, shapes: Sequence[tuple[int, ...]], table: str) -> Row:
    candidates = (_candidate("torch", nn.init.orthogonal_, shapes), _candidate("gonio", init.orthogonal_, shapes))
    return Row(case, "F", _candidate("normal_", nn.init.normal_, shapes), candidates, table)


def rows(*, quick: bool) -> Iterator[Row]:
    whole = {"32×32": [(32, 32)], "tiny": TINY} if quick else {"4096×4096": [(4096, 4096)]}
    whole |= {} if quick else {name: shapes() for name, shapes in MODELS.items()}
    for name, shapes in whole.items():
        yield _row(name, shapes, "whole")
    for shape, count in Counter(TINY if quick else resnet50()).items():
        yield _row(f"{'×'.join(map(str, shape))} (×{count})", [shape], "layers")
