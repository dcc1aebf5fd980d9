"""Queries for nearest neighbours by angle: `geometry.SignIndex` against exact search and indexes of FAISS.

100 queries ask for 10 neighbours each among vectors that lie in clusters, as embeddings do; an index is built before
the time is taken. The first candidate is the exact search, so the deviation of a candidate is the share of the true
neighbours that it missed, 1 − recall@10.

FAISS is optional (`pip install faiss-cpu`) and its candidates are left out without it.
`python -m benchmarks.sign_index` prints the recall alone, without taking times.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.harness import Candidate, Operation, Row
from benchmarks.near_duplicates import library
from gonio.geometry import SignIndex

TITLE = "Sign index"
FLOOR = "one product of the queries with all vectors"
QUERIES, NEIGHBOURS = 100, 10
Search = Callable[[Tensor], Tensor]  # queries to the numbers of their neighbours
Build = Callable[[Tensor], Search]


@dataclass(frozen=True)
class Vectors:
    """Unit vectors around `n / 100` random centres; the queries are drawn around the same centres.

    Attributes:
        noise: length of the part that is not the centre's, whose length is 1.
    """

    n: int
    d: int
    noise: float = 1.0

    @functools.lru_cache(maxsize=1)  # noqa: B019  one set is held, not one per instance
    def make(self) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(0)
        centres = normalize(torch.randn(max(1, self.n // 100), self.d, generator=draw))

        def around(count: int) -> Tensor:
            centre = centres[torch.randint(len(centres), (count,), generator=draw)]
            return normalize(centre + self.noise * self.d**-0.5 * torch.randn(count, self.d, generator=draw))

        return around(self.n), around(QUERIES)

    @functools.lru_cache(maxsize=1)  # noqa: B019
    def truth(self) -> Tensor:
        stored, queries = self.make()
        return (queries.double() @ stored.double().T).topk(min(NEIGHBOURS, self.n)).indices

    def recall(self, found: Tensor) -> Tensor:
        """Share of the true neighbours among those that were found."""
        return (found[:, :, None] == self.truth()[:, None]).any(1).float().mean()


def exact(stored: Tensor) -> Search:
    return lambda queries: (queries @ stored.T).topk(min(NEIGHBOURS, len(stored))).indices


def signs(stored: Tensor, *, bits: int, candidates: int) -> Search:
    index = SignIndex(stored, bits=bits, candidates=candidates)
    return lambda queries: index.query(queries, min(NEIGHBOURS, len(stored))).indices


def of_faiss(stored: Tensor, *, factory: str, set_up: Callable[[Any], None] = lambda index: None) -> Search:
    """An index by its name in FAISS's factory, trained on the stored vectors."""
    faiss = library()
    index = faiss.index_factory(stored.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
    index.train(stored.numpy())
    index.add(stored.numpy())
    set_up(index)
    return lambda queries: torch.from_numpy(index.search(queries.numpy(), NEIGHBOURS)[1])


def hashes(stored: Tensor, *, bits: int) -> Search:
    """FAISS's IndexLSH: the nearest codes of sign bits, without exact cosines behind them."""
    index = library().IndexLSH(stored.shape[1], bits, True, False)
    index.add(stored.numpy())
    return lambda queries: torch.from_numpy(index.search(queries.numpy(), NEIGHBOURS)[1])


def _probes(index: Any) -> None:
    library().extract_index_ivf(index).nprobe = 16


def _breadth(index: Any) -> None:
    index.hnsw.efSearch = 64


def builds(vectors: Vectors) -> dict[str, Build]:
    """Every candidate by name, the exact search first; those of FAISS where it is installed."""
    found: dict[str, Build] = {
        "exact": exact,
        "gonio, 256 signs": functools.partial(signs, bits=256, candidates=20),
        "gonio, 64 signs": functools.partial(signs, bits=64, candidates=50),
    }
    if library() is not None:
        lists = max(1, min(1024, vectors.n // 40))
        found |= {
            "FAISS flat": functools.partial(of_faiss, factory="Flat"),
            "FAISS IVF, 16 probes": functools.partial(of_faiss, factory=f"IVF{lists},Flat", set_up=_probes),
            "FAISS HNSW 16": functools.partial(of_faiss, factory="HNSW16", set_up=_breadth),
            "FAISS LSH 256": functools.partial(hashes, bits=256),
        }
    return found


def _candidate(name: str, build: Build, vectors: Vectors) -> Candidate:
    def make() -> Operation:
        stored, queries = vectors.make()
        search = build(stored)
        return lambda: [vectors.recall(search(queries))]

    return Candidate(name, make)


def _floor(vectors: Vectors) -> Candidate:
    def make() -> Operation:
        stored, queries = vectors.make()

        def operation() -> Sequence[Tensor]:
            queries @ stored.T
            return []

        return operation

    return Candidate("product", make)


SETS = (Vectors(10_000, 128), Vectors(50_000, 128), Vectors(20_000, 768))


def rows(*, quick: bool) -> Iterator[Row]:
    """Three sizes; the quick run a small one."""
    for vectors in (Vectors(300, 16),) if quick else SETS:
        found = builds(vectors)
        candidates = tuple(_candidate(name, build, vectors) for name, build in found.items())
        yield Row(f"{vectors.n:,} × {vectors.d}", "F", _floor(vectors), candidates, "queries")


def main() -> None:
    """Print the recall of each candidate on each set."""
    for vectors in SETS:
        stored, queries = vectors.make()
        for name, build in builds(vectors).items():
            print(f"{vectors.n:,} × {vectors.d}, {name}: {float(vectors.recall(build(stored)(queries))):.3f}")


if __name__ == "__main__":
    main()
