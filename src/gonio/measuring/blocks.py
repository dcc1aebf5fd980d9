"""A stored matrix read in blocks of floating-point numbers, so that it is never widened whole."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gonio.geometry.norms import least_norm, normalize

__all__ = ["BLOCK", "computed_in", "count_nonfinite", "directions_of", "norms_of", "row_blocks", "rows_at", "tiles"]

BLOCK = 1 << 20  # entries of one block: 4 MiB in float32, which stays in the cache
LARGE = 1e15  # entries above it have squares whose sums overflow in float32


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """float64 stays; everything narrower is computed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def tiles(matrix: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Blocks of a matrix with the row and the column at which they begin; long rows are cut.

    A block is valid until the next one is asked for: all share one buffer.
    """
    n, d = matrix.shape
    width = max(1, min(d, BLOCK))
    height = max(1, min(n, BLOCK // width))
    buffer = torch.empty(height, width, dtype=computed_in(matrix.dtype), device=matrix.device)
    for top in range(0, n, height):
        for left in range(0, d, width):
            part = matrix[top : top + height, left : left + width]
            yield top, left, _copied(part, buffer)


def row_blocks(matrix: Tensor) -> Iterator[tuple[int, Tensor]]:
    """As :func:`tiles`, of whole rows, however long."""
    height = max(1, min(len(matrix), BLOCK // max(1, matrix.shape[1])))
    buffer = torch.empty(height, matrix.shape[1], dtype=computed_in(matrix.dtype), device=matrix.device)
    for top in range(0, len(matrix), height):
        yield top, _copied(matrix[top : top + height], buffer)


def _copied(part: Tensor, buffer: Tensor) -> Tensor:
    view = buffer.flatten()[: part.numel()].view(part.shape)
    return view.copy_(part)


def rows_at(matrix: Tensor, rows: Tensor) -> Tensor:
    """The rows of these numbers, in float32 at least."""
    return matrix[rows].to(computed_in(matrix.dtype))


def directions_of(rows: Tensor) -> Tensor:
    """Unit vectors; rows whose squares would overflow are divided by their largest entry first."""
    largest = rows.abs().amax(-1, keepdim=True)
    return normalize(rows / largest.masked_fill(~(largest > LARGE), 1) if bool((largest > LARGE).any()) else rows)


def norms_of(matrix: Tensor) -> Tensor:
    """The norm of each row in float64; 0 below :func:`gonio.geometry.least_norm`, as everywhere.

    Squares are summed in float64, and at the scale of the row's largest entry where even these overflow.
    """
    squares = torch.zeros(len(matrix), dtype=torch.float64, device=matrix.device)
    for top, _, tile in tiles(matrix):
        squares[top : top + len(tile)] += torch.linalg.vector_norm(tile, dim=1, dtype=torch.float64).square_()
    norms = squares.sqrt_()
    if matrix.dtype == torch.float64:
        for row in (norms == torch.inf).nonzero().flatten().tolist():
            scale = matrix[row].abs().amax()
            if bool(torch.isfinite(scale)):
                norms[row] = torch.linalg.vector_norm(matrix[row] / scale) * scale
    return norms.masked_fill_(norms < least_norm(computed_in(matrix.dtype)), 0)


def count_nonfinite(tensor: Tensor) -> tuple[int, tuple[int, ...] | None]:
    """How many entries are NaN or infinite, and the index of the first."""
    flat = tensor.reshape(-1)
    count, first = 0, None
    for start in range(0, len(flat), BLOCK):
        part = flat[start : start + BLOCK]
        part = part.float() if part.element_size() == 1 else part
        if bool(torch.isfinite(part.sum())):  # one that is not finite makes the sum so: a twentieth of the time
            continue
        finite = torch.isfinite(part)
        if bool(finite.all()):  # the sum alone was beyond the range
            continue
        bad = (~finite).nonzero()
        if first is None:
            first = _unravel(start + int(bad[0]), tuple(tensor.shape))
        count += len(bad)
    return count, first


def _unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    found = []
    for size in reversed(shape):
        index, rest = divmod(index, size)
        found.append(rest)
    return tuple(reversed(found))
