"""Nearest neighbours by angle: candidates from the signs of random projections, then their exact cosines."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.geometry.angles import hyperplanes
from gonio.geometry.blocks import row_directions
from gonio.geometry.norms import Array, as_real, full_precision, whole

_ROWS = 1 << 14  # stored vectors whose agreements with the queries are held at once


@dataclass(frozen=True)
class Neighbours:
    """Result of :meth:`SignIndex.query`: of each query the k stored vectors, nearest first.

    Attributes:
        indices: (queries, k), rows of the stored vectors.
        cosines: (queries, k), exact.
    """

    indices: Tensor
    cosines: Tensor


class SignIndex:
    r"""Stored vectors, of which a query finds those at the smallest angle.

    Each vector keeps `bits` signs of projections onto random hyperplanes, of which two vectors at angle :math:`\theta`
    share the fraction :math:`1 - \theta/\pi` on average, with a standard deviation of at most
    :math:`1/(2\sqrt{\text{bits}})`. A query takes the `candidates · k` vectors that share most bits, and orders them by
    their exact cosine. So the cosines are exact, and only a neighbour that is not among the candidates can be missed.

    Args:
        vectors: (n, d), one per row; they are kept as unit vectors.
        bits: signs per vector, one byte each. More find more of the neighbours and cost more.
        candidates: vectors that are compared exactly, for each neighbour that is wanted.
        seed: of the hyperplanes.

    Cost: d · bits + n · bits + candidates · k · d multiplications per query, where exact search needs n · d.

    Raises: InvalidArgumentError for another rank, no rows, zero or non-finite vectors, or numbers below 1.

    Example:
        >>> vectors = torch.randn(1000, 128, generator=torch.Generator().manual_seed(0))
        >>> index = gonio.geometry.SignIndex(vectors, bits=64)
        >>> found = index.query(30 * vectors[7] + 20 * vectors[8], 2)  # the length does not matter
        >>> found.indices.tolist(), round(found.cosines[0, 0].item(), 3)
        ([[7, 8]], 0.83)

    References: M. Charikar, "Similarity estimation techniques from rounding algorithms", STOC 2002, §3.
    See also: :func:`near_duplicates`, all pairs within one set. For speed, FAISS, whose inverted files and graphs visit
        a small part of a set; this class shows what signs alone find, and needs no further package.
    """

    def __init__(self, vectors: Array, *, bits: int = 256, candidates: int = 20, seed: int = 0) -> None:
        if bits < 1 or candidates < 1:
            raise InvalidArgumentError(
                "SignIndex() needs bits >= 1 and candidates >= 1", f"bits={bits}, candidates={candidates}",
                "Use for example 256 and 20.",
            )  # fmt: skip
        self.bits, self.candidates = bits, candidates
        self._unit = _directions(vectors, "SignIndex()")
        self._planes = hyperplanes(self._unit.shape[1], bits, self._unit, seed)
        self._signs = self._signs_of(self._unit)

    def __len__(self) -> int:
        """The number of stored vectors."""
        return len(self._unit)

    def __repr__(self) -> str:
        return f"SignIndex({len(self)} vectors of {self._unit.shape[1]} numbers, bits={self.bits})"

    @torch.no_grad()
    def query(self, x: Array, k: int = 1) -> Neighbours:
        """The k stored vectors at the smallest angles to each query.

        Shape: ``x``: (d,) or (queries, d).
        Raises: InvalidArgumentError for queries of another length, or k outside of 1 to n.
        """
        x = as_real(x)
        rows = x[None] if x.ndim == 1 else x
        if not 1 <= k <= len(self):
            raise InvalidArgumentError(f"query() needs 1 <= k <= {len(self)}", f"k={k}", "Ask for fewer.")
        if rows.ndim != 2 or rows.shape[1] != self._unit.shape[1]:
            asked = f"query() needs vectors of {self._unit.shape[1]} numbers"
            raise InvalidArgumentError(asked, f"shape {tuple(x.shape)}", "Pass (d,) or (queries, d).")
        unit = _directions(rows, "query()").to(self._unit.dtype)
        near = self._near(self._signs_of(unit), min(len(self), k * self.candidates))
        with full_precision(unit):
            cosines = torch.einsum("qd,qcd->qc", unit, self._unit[near])
        best, order = cosines.topk(k, dim=1)
        return Neighbours(near.gather(1, order), best.clamp(-1, 1))

    def _signs_of(self, unit: Tensor) -> Tensor:
        with full_precision(unit):
            return torch.where(unit @ self._planes >= 0, 1, -1).to(torch.int8)

    def _near(self, signs: Tensor, count: int) -> Tensor:
        """The stored vectors that share most signs with each query; blocks of them are merged one by one."""
        wide = signs.to(self._unit.dtype)
        best = wide.new_full((len(wide), 0), 0)
        held = torch.zeros(len(wide), 0, dtype=torch.int64, device=wide.device)
        for start in range(0, len(self), _ROWS):
            shared = wide @ self._signs[start : start + _ROWS].to(wide.dtype).T
            places = torch.arange(start, start + shared.shape[1], device=wide.device).expand_as(shared)
            best, kept = torch.cat([best, shared], 1).topk(min(count, best.shape[1] + shared.shape[1]), dim=1)
            held = torch.cat([held, places], 1).gather(1, kept)
        return held


def _directions(vectors: Array, function: str) -> Tensor:
    """Unit vectors, after a check."""
    vectors = whole(as_real(vectors).detach())
    if vectors.ndim != 2 or len(vectors) == 0:
        raise InvalidArgumentError(
            f"{function} needs vectors (n, d), at least one", f"shape {tuple(vectors.shape)}", "Pass one per row."
        )
    unit = row_directions(vectors)
    bad = int((~vectors.isfinite().all(1) | ~unit.any(1)).sum())
    if bad:
        found = f"{bad} of {len(vectors)} zero or non-finite"
        raise InvalidArgumentError(f"{function} needs finite vectors other than zero", found, "Leave these rows out.")
    return unit
