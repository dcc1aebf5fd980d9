"""Finding near duplicates: against comparing all pairs, against indexes of FAISS, over sizes, on skewed sets.

Every candidate finds parallel and opposite pairs with |cosine| ≥ 0.95 from the bare vectors: an index is built
within the measured time, and its candidates are verified. What is compared between candidates is their recall
of planted pairs, so the largest deviation of a row is the largest share that one of them missed.

FAISS is optional (`pip install faiss-cpu`) and its candidates are left out without it. Each kind of index has
the settings that took the least processor time at a recall of 0.999, of about ten that were tried. Of 100,000
vectors only the fastest kind is measured: the others take half a minute and more.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import acos, pi, sqrt
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.harness import Candidate, Operation, Row
from gonio.geometry import near_duplicates

TITLE = "Near duplicates"
FLOOR = "one product of the vectors with 512 hyperplanes, a hash of 64 bytes for each"
COSINE = 0.95
BLOCK = 1024  # rows and columns of one block of the Gram matrix
NEIGHBOURS = 4  # asked of an index that cannot search by a radius
Pairs = tuple[Tensor, Tensor]
Find = Callable[[Tensor], Pairs]


@dataclass(frozen=True)
class Vectors:
    """A set in which a twentieth of the vectors have a partner at |cosine| in [0.95, 1], a third opposite.

    Attributes:
        shift: length of a direction that all vectors share, before they are normalised.
        power: their spectrum falls as a power with this exponent.
    """

    n: int
    d: int
    shift: float = 0.0
    power: float = 0.0

    @functools.lru_cache(maxsize=1)  # noqa: B019  one set is held, not one per instance
    def make(self) -> Tensor:
        g = torch.Generator().manual_seed(0)
        x = normalize(torch.randn(self.n, self.d, generator=g) * torch.arange(1, self.d + 1) ** -self.power)
        x = normalize(x + self.shift * normalize(torch.randn(self.d, generator=g), dim=0))
        source = x[self.planted : 2 * self.planted]
        other = torch.randn(source.shape, generator=g)
        other = normalize(other - (other * source).sum(-1, keepdim=True) * source)
        cosine = 0.9501 + 0.0499 * torch.rand(self.planted, 1, generator=g)
        x[: self.planted] = cosine * source + (1 - cosine**2).sqrt() * other
        x[: self.planted : 3] *= -1
        return x

    @property
    def planted(self) -> int:
        return self.n // 20

    def recall(self, pairs: Pairs) -> Tensor:
        """Share of the planted pairs that were found."""
        first = torch.arange(self.planted)
        a, b = torch.minimum(*pairs), torch.maximum(*pairs)
        return torch.isin(first * self.n + first + self.planted, a * self.n + b).float().mean()


def blocked(x: Tensor) -> Pairs:
    """Comparing all pairs, in blocks of the Gram matrix."""
    first, second = [], []
    for i in range(0, len(x), BLOCK):
        for j in range(i, len(x), BLOCK):
            hit = ((x[i : i + BLOCK] @ x[j : j + BLOCK].T).abs_() >= COSINE).nonzero()
            first.append(hit[:, 0] + i)
            second.append(hit[:, 1] + j)
    a, b = torch.cat(first), torch.cat(second)
    return a[a < b], b[a < b]


def ours(x: Tensor) -> Pairs:
    a, b = near_duplicates(x, cosine=COSINE).pairs.unbind(-1)
    return a, b


def verified(x: Tensor, queries: np.ndarray[Any, Any], found: np.ndarray[Any, Any]) -> Pairs:
    """The pairs among what an index answered; queries and answers beyond n are negated copies."""
    a, b = torch.from_numpy(queries) % len(x), torch.from_numpy(found) % len(x)
    codes = torch.unique(torch.minimum(a, b)[a != b] * len(x) + torch.maximum(a, b)[a != b])
    a, b = codes // len(x), codes % len(x)
    hits = [(x[i] * x[j]).sum(-1).abs() >= COSINE for i, j in zip(a.split(4096), b.split(4096), strict=True)]
    hit = torch.cat(hits) if hits else a.new_zeros(0, dtype=torch.bool)
    return a[hit], b[hit]


@functools.cache
def library() -> ModuleType | None:
    """FAISS with as many threads as torch, or None where it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its wrapper's own deprecations
            import faiss
    except ImportError:
        print("faiss is not installed (pip install faiss-cpu): its candidates are left out", file=sys.stderr)
        return None
    faiss.omp_set_num_threads(torch.get_num_threads())
    module: ModuleType = faiss
    return module


def neighbours(x: Tensor, index: Any) -> Pairs:
    """The pairs among the nearest neighbours of all vectors and of their negatives."""
    both = torch.cat([x, -x]).numpy()
    _, found = index.search(both, NEIGHBOURS)
    queries = np.repeat(np.arange(len(both)), NEIGHBOURS)
    kept = found.ravel() >= 0
    return verified(x, queries[kept], found.ravel()[kept])


def multi_hash(x: Tensor, *, tables: int, bits: int) -> Pairs:
    """Sign bits in hash tables; within a radius of 3.5 standard deviations beyond the expected distance."""
    faiss = library()
    total = -(-tables * bits // 8) * 8
    planes = torch.randn(x.shape[1], total, generator=torch.Generator().manual_seed(0))
    codes = np.packbits((x @ planes >= 0).numpy(), axis=1, bitorder="little")
    index = faiss.IndexBinaryMultiHash(total, tables, bits)
    index.add(codes)
    p = acos(COSINE) / pi
    radius = int(total * p + 3.5 * sqrt(total * p * (1 - p)))
    limits, _, found = index.range_search(np.concatenate([codes, ~codes]), radius)
    return verified(x, np.repeat(np.arange(2 * len(x)), np.diff(limits.astype(np.int64))), found)


def inverted_lists(x: Tensor, *, lists: int, probes: int) -> Pairs:
    """Inverted lists of product-quantised vectors, re-ranked exactly."""
    faiss = library()
    index = faiss.index_factory(x.shape[1], f"IVF{lists},PQ32x4fs,RFlat", faiss.METRIC_INNER_PRODUCT)
    index.train(x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[: 40 * lists]].numpy())
    index.add(x.numpy())
    faiss.extract_index_ivf(index).nprobe = probes
    return neighbours(x, index)


def sign_index(x: Tensor, *, bits: int) -> Pairs:
    """FAISS's IndexLSH: nearest codes of sign bits by comparing all."""
    index = library().IndexLSH(x.shape[1], bits, True, False)
    index.add(x.numpy())
    return neighbours(x, index)


def graph(x: Tensor, *, links: int, build: int, search: int) -> Pairs:
    """A hierarchical navigable small world."""
    faiss = library()
    index = faiss.IndexHNSWFlat(x.shape[1], links, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction, index.hnsw.efSearch = build, search
    index.add(x.numpy())
    return neighbours(x, index)


def _candidate(name: str, find: Find, vectors: Vectors) -> Candidate:
    def make() -> Operation:
        x = vectors.make()
        return lambda: [vectors.recall(find(x))]

    return Candidate(name, make)


def _floor(vectors: Vectors) -> Candidate:
    def make() -> Operation:
        x = vectors.make()
        planes = torch.randn(x.shape[1], 512, generator=torch.Generator().manual_seed(0))

        def operation() -> Sequence[Tensor]:
            for part in x.split(2048):
                part @ planes
            return []

        return operation

    return Candidate("hashing", make)


def _row(vectors: Vectors, table: str, finds: dict[str, Find], *, case: str = "") -> Row:
    candidates = tuple(_candidate(name, find, vectors) for name, find in finds.items())
    return Row(case or f"{vectors.n:,} × {vectors.d}", "F", _floor(vectors), candidates, table)


def _indexes(kinds: int) -> dict[str, Find]:
    """So many kinds of index by name, the fastest first."""
    if library() is None:
        return {}
    found: dict[str, Find] = {
        "FAISS multi-hash 24×16": functools.partial(multi_hash, tables=24, bits=16),
        "FAISS IVF 1024, 16 probes": functools.partial(inverted_lists, lists=1024, probes=16),
        "FAISS LSH 256": functools.partial(sign_index, bits=256),
        "FAISS HNSW 16": functools.partial(graph, links=16, build=40, search=64),
    }
    return dict(list(found.items())[:kinds])


SKEWED = {
    "common part 0.5": Vectors(50_000, 256, shift=0.5),
    "common part 1": Vectors(50_000, 256, shift=1.0),
    "spectrum r^-0.5": Vectors(50_000, 256, power=0.5),
    "spectrum r^-1": Vectors(50_000, 256, power=1.0),
}


def rows(*, quick: bool) -> Iterator[Row]:
    """All pairs against ours; indexes against ours; ours over two decades of sizes; ours on skewed sets."""
    exact: dict[str, Find] = {"all pairs": blocked, "gonio": ours}
    if quick:
        yield _row(Vectors(600, 16), "pairs", exact)
        yield _row(Vectors(9000, 16), "sizes", {"gonio": ours})
        return
    yield _row(Vectors(50_000, 512), "pairs", exact)
    yield _row(Vectors(10_000, 512), "indexes", {"gonio": ours, **_indexes(4)})
    yield _row(Vectors(100_000, 512), "indexes", {"gonio": ours, **_indexes(1)})
    for n in (10_000, 30_000, 100_000, 300_000, 1_000_000):
        yield _row(Vectors(n, 128), "sizes", {"gonio": ours})
    for case, vectors in SKEWED.items():
        yield _row(vectors, "skewed", exact, case=case)
