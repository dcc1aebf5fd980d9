"""Random orthogonal matrices: one large one, and all weights of a network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from benchmarks.harness import Candidate, Operation, Row
from benchmarks.shapes import MODELS, TINY
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


def rows(*, quick: bool) -> Iterator[Row]:
    sizes = {"32×32": [(32, 32)], "tiny": TINY} if quick else {"4096×4096": [(4096, 4096)]}
    sizes |= {} if quick else {name: shapes() for name, shapes in MODELS.items()}
    for name, shapes in sizes.items():
        candidates = (
            _candidate("torch", nn.init.orthogonal_, shapes),
            _candidate("gonio", init.orthogonal_, shapes),
        )
        yield Row(name, "F", _candidate("normal_", nn.init.normal_, shapes), candidates)
