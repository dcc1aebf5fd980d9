"""Self-orthogonality of layer outputs against autograd through the formula, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.harness import Candidate, Operation, Row, operation_of
from gonio.regularizers import SelfOrthogonality

TITLE = "Self-orthogonality, the paper's form"
FLOOR = "the products YᵀY and YG: one matrix product forward, one backward"
GAMMA, RATIO = 10.0, 100.0
SHAPES = ((32768, 64), (32768, 256), (32768, 512), (4096, 512), (256, 4096))
MAPS = ((32, 64, 32, 32), (32, 256, 16, 16))


def _outputs(*shape: int) -> Tensor:
    return (0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).requires_grad_()


def naive(y: Tensor) -> Tensor:
    """The formula as it stands: soft signs, unit columns, Gram matrix, sums over pairs."""
    if y.dim() > 2:
        y = y.movedim(1, -1).flatten(0, -2)
    t = torch.tanh(GAMMA * y)
    unit = t / t.norm(dim=0).clamp_min(1e-12)
    gram = unit.T @ unit
    off = gram - torch.diag(gram.diagonal())
    return RATIO * off.sum() ** 2 + off.square().sum()


def gram_first(y: Tensor) -> Tensor:
    """The same with the columns' norms taken off the Gram matrix: one pass less over the outputs."""
    if y.dim() > 2:
        y = y.movedim(1, -1).flatten(0, -2)
    t = torch.tanh(GAMMA * y)
    gram = t.T @ t
    scale = gram.diagonal().clamp_min(1e-24).rsqrt()
    off = gram * scale * scale[:, None]
    off = off - torch.diag(off.diagonal())
    return RATIO * off.sum() ** 2 + off.square().sum()


def _candidate(name: str, function: Callable[[Tensor], Tensor], shape: tuple[int, ...], mode: str) -> Candidate:
    def make() -> Operation:
        y = _outputs(*shape)
        call = torch.compile(function, dynamic=False) if "compiled" in name else function
        return operation_of(lambda: call(y), [y], mode)

    return Candidate(name, make, compiled="compiled" in name)


def _floor(shape: tuple[int, ...], mode: str) -> Candidate:
    def make() -> Operation:
        with torch.no_grad():
            y = _outputs(*shape)
            y = y.movedim(1, -1).flatten(0, -2).contiguous() if len(shape) > 2 else y.detach()
        return lambda: [y @ (y.T @ y)] if mode == "FB" else [y.T @ y]

    return Candidate("2 GEMMs" if mode == "FB" else "1 GEMM", make)


def row(shape: tuple[int, ...], mode: str, table: str) -> Row:
    candidates = (
        _candidate("naive", naive, shape, mode),
        _candidate("naive, compiled", naive, shape, mode),
        _candidate("Gram first", gram_first, shape, mode),
        _candidate("gonio", SelfOrthogonality.paper().value, shape, mode),
    )
    return Row("×".join(map(str, shape)), mode, _floor(shape, mode), candidates, table)


def rows(*, quick: bool) -> Iterator[Row]:
    """Outputs of linear layers, tall and wide, then of convolutions."""
    for mode in ("F", "FB"):
        for shape in ((64, 8),) if quick else SHAPES:
            yield row(shape, mode, "matrices")
        for shape in ((2, 4, 5, 5),) if quick else MAPS:
            yield row(shape, mode, "maps")
