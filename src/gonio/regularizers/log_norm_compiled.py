"""The passes of :mod:`gonio.regularizers.log_norm` as kernels that torch.compile makes.

Note [Blocks]
    A row is read as blocks of 4096 entries, whose sums the compiler vectorises. Rows that follow one another in memory,
    their targets likewise (parameters and gradients in flat buffers), are one call: blocks know their row by its index.
    Where the addresses say otherwise each row is a call, in one graph for all numbers of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from gonio.regularizers.log_norm import Row, add_rows_

__all__ = ["add_rows_compiled_", "runs"]

BLOCK = 4096
LEAST = 8 * BLOCK  # entries below which a compiled call costs more than it saves
MOST_RUNS = 4  # each is a graph of its own


def add_rows_compiled_(rows: Sequence[Row], backend: str) -> list[tuple[float, float]]:
    """:func:`gonio.regularizers.log_norm.add_rows_`, compiled where rows are large."""
    found: dict[int, tuple[float, float]] = {}
    for run in runs([row for row in rows if row.x.numel() % BLOCK == 0]):
        if sum(row.x.numel() for row in run) >= LEAST:
            found.update(zip(map(id, run), _add_run(run, backend), strict=True))
    small = [row for row in rows if id(row) not in found]
    found.update(zip(map(id, small), add_rows_(small), strict=True))
    return [found[id(row)] for row in rows]


def runs(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that follow one another in memory together, unless that would make many runs."""
    found: list[list[Row]] = []
    ends: tuple[int, ...] = ()
    limits = (0, 0)  # of the memory that the last run began in: neighbours by chance lie beyond
    for row in rows:
        starts, length = (row.x.data_ptr(), row.target.data_ptr()), row.x.numel() * row.x.element_size()
        follows = starts == ends and row.x.dtype is found[-1][0].x.dtype
        ends = starts[0] + length, starts[1] + length
        if follows and ends[0] <= limits[0] and ends[1] <= limits[1]:
            found[-1].append(row)
        else:
            found.append([row])
            limits = _end_of_memory(row.x), _end_of_memory(row.target)
    several = sum(len(run) > 1 for run in found)
    return found if several <= MOST_RUNS else [[row] for row in rows]


def _end_of_memory(x: Tensor) -> int:
    storage = x.untyped_storage()
    return storage.data_ptr() + storage.nbytes()


def _add_run(run: Sequence[Row], backend: str) -> Iterator[tuple[float, float]]:
    blocks = [row.x.numel() // BLOCK for row in run]
    x, target = (_whole(first, sum(blocks)) for first in (run[0].x, run[0].target))
    options = x.new_tensor([(row.factor, row.formula.share, row.formula.floor) for row in run])
    if len(run) == 1:
        terms = _compiled(_add_one, backend)(x, target, options)
    else:
        terms = _add_many(x, target, options, blocks, backend)
    return zip(*terms.tolist(), strict=True)


def _whole(first: Tensor, blocks: int) -> Tensor:
    """The memory that begins with a row, as blocks."""
    return first.as_strided((blocks, BLOCK), (BLOCK, 1))


def _coefficients(square: Tensor, absolute: Tensor, options: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both terms, and the coefficients of x and of sign(x), for each row."""
    factor, share, floor = options.unbind(1)
    norm = square.sqrt()
    zero = norm < torch.finfo(norm.dtype).tiny ** 0.5
    inverse = torch.where(zero, 0.0, torch.where(zero, 1.0, norm).reciprocal())
    direction = share * absolute * inverse
    on_weight = (torch.where(norm <= floor, 0.0, 1.0) - direction) * inverse * inverse
    return torch.stack([torch.maximum(norm, floor).log(), direction]), factor * on_weight, factor * share * inverse


def _add_one(x: Tensor, target: Tensor, options: Tensor) -> Tensor:
    square, absolute = (part.sum(0, keepdim=True) for part in _sums(x))
    terms, on_weight, on_sign = _coefficients(square, absolute, options)
    _add(target, x, on_weight, on_sign)
    return terms


def _add_many(x: Tensor, target: Tensor, options: Tensor, blocks: Sequence[int], backend: str) -> Tensor:
    """The compiler would look up a block's row for each of its entries, so only what is large is compiled."""
    owner, none = _owners(tuple(blocks)), x.new_zeros(len(blocks))
    square, absolute = (none.index_add(0, owner, part) for part in _compiled(_sums, backend)(x))
    terms, *coefficients = _coefficients(square, absolute, options)
    _compiled(_add, backend)(target, x, *(c[owner].unsqueeze(1) for c in coefficients))
    return terms


@lru_cache(maxsize=MOST_RUNS)
def _owners(blocks: tuple[int, ...]) -> Tensor:
    """For each block the number of its row, where rows have so many."""
    return torch.repeat_interleave(torch.arange(len(blocks)), torch.tensor(blocks))


def _sums(x: Tensor) -> tuple[Tensor, Tensor]:
    """Σ x² and Σ |x| of each block."""
    return (x * x).sum(1), x.abs().sum(1)


def _add(target: Tensor, x: Tensor, on_weight: Tensor, on_sign: Tensor) -> None:
    """target + on_weight · x + on_sign · sign(x), in comparisons that cost half of what the compiler makes of sign."""
    linear = on_weight * x
    negative = torch.where(x < 0, linear - on_sign, linear)
    target.add_(torch.where(x > 0, linear + on_sign, negative))


@cache
def _compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    return torch.compile(function, backend=backend)
