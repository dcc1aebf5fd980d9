"""Pairs of nearly parallel or nearly opposite vectors: exact in small sets, by sign hashing in large ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import acos, pi
from typing import Literal

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.geometry.angles import hyperplanes
from gonio.geometry.blocks import BLOCK, row_blocks, row_directions
from gonio.geometry.norms import Array, as_matrices, check_finite, computed_in, full_precision, whole
from gonio.seeding import generator, normal

EXACT_SIZE = 8192  # vectors up to which the Gram matrix costs no more than planning a search
GRAM_BLOCK = 1024  # rows and columns of one Gram block
COMPARED = 2e12  # multiplications, see Note [Costs]: half a minute of one core
VERIFY = 1 << 12  # candidate pairs verified at once; small chunks stay in the cache
ROUNDING = 1e-6  # of a float32 cosine
RECALL = 0.999

# Of banded sign hashing:
BUCKET_LIMIT = 256  # neighbours that a vector is compared with in one bucket
POOLS = (256, 512, 1024)
BITS = range(8, 25, 2)  # per band; keys are summed in float32, whose integers are exact to 2^24
MAX_BANDS = 512
SAMPLE = 512  # vectors on each side of the pairs from which the cost is estimated
STEPS = 16  # every such angle at the threshold is used
ROW_CHUNK = 1 << 11  # vectors hashed at once
MERGE = 1 << 24  # candidate codes held before repeated ones are dropped

# Note [Costs]
# In multiplications inside a matrix product (13 ps on one core of a Zen 4): testing one entry of a Gram block; sorting
# and comparing one key; gathering and verifying one candidate, in all and per dimension. They decide between exact and
# hashed search, and change no result.
ENTRY_COST, KEY_COST, CANDIDATE_COST, GATHER_COST = 25.0, 1800.0, 6000.0, 190.0

# Note [Sketch]
# Projected onto k Gaussian directions, a pair with the cosine c has one whose inverse hyperbolic tangent is nearly
# normal, with mean artanh c and standard deviation 1/√k. At 0.95 and k = 128, 0.88 is 5.2 deviations below: the
# candidates miss fewer than one pair in 10⁶ at the threshold. Random directions in 128 dimensions never reach 0.88.
NEAR = 0.95  # |cosine| from which two filters count as near duplicates in measurements
UNPROJECTED = 256  # length up to which vectors are compared as they are
SKETCH = 128  # directions onto which longer vectors are projected
SKETCH_COSINE = 0.88  # |cosine| of the projections from which a pair is a candidate
SEARCHED = 1 << 26  # entries of the searched vectors, in float32 at once, up to which near_pairs searches


@dataclass(frozen=True)
class NearDuplicates:
    """Result of :func:`near_duplicates`.

    Example:
        >>> print(gonio.geometry.near_duplicates(torch.tensor([[1.0, 0.0], [2.0, 0.0], [-3.0, 0.0]])))
        3 pairs with |cosine| >= 0.95 among 3 vectors (1 parallel, 2 opposite); exact search
    """

    pairs: Tensor  # (count, 2) int64, first < second, sorted
    cosines: Tensor  # (count,), of each pair; negative for opposite vectors
    cosine: float  # the threshold
    vectors: int
    method: Literal["exact", "hashed"]
    recall: float  # expected share of the pairs exactly at the threshold that is found; higher for nearer pairs
    capped: int  # vectors not compared with all their candidates, because too many are alike

    def __len__(self) -> int:
        """The number of pairs."""
        return len(self.pairs)

    def __bool__(self) -> bool:
        return True  # a search without a hit is a result too

    def __repr__(self) -> str:
        return f"<NearDuplicates: {self}>"

    def __str__(self) -> str:
        opposite = int((self.cosines < 0).sum())
        head = (
            f"{len(self.pairs)} pairs with |cosine| >= {self.cosine:g} among {self.vectors} vectors "
            f"({len(self.pairs) - opposite} parallel, {opposite} opposite)"
        )
        if self.method == "exact":
            search, capped = "exact search", f", ended before the last {self.capped} vectors"
        else:
            search = f"sign hashing, expected recall {self.recall:.4f} at the threshold"
            capped = f", {self.capped} vectors in crowded buckets compared with {BUCKET_LIMIT} neighbours"
        return f"{head}; {search}{capped if self.capped else ''}"


def near_duplicates(vectors: Array, *, cosine: float = 0.95, recall: float = RECALL, seed: int = 0) -> NearDuplicates:
    r"""All pairs of rows with :math:`|\cos\theta| \ge` `cosine`: duplicates and antipodes.

    Small sets, and sets for which hashing would cost more, are searched exactly in blocks of the Gram matrix. Other
    sets are searched by banded sign hashing: each of :math:`L` bands reads :math:`k` of :math:`m` sign bits and sorts
    the vectors into buckets; vectors in one bucket are compared exactly, so there are no false pairs. A pair at angle
    :math:`\theta` is found with probability

    .. math::
        1 - E_h\Big(1 - \tbinom{m-h}{k} \big/ \tbinom{m}{k}\Big)^L, \qquad h \sim \text{Binomial}(m, \theta/\pi).

    The cheapest :math:`m, k, L` with the requested recall at the threshold are used. Of more than 256 copies of one
    vector each is compared with 256 others (``capped`` counts such vectors). Zero vectors are in no pair.

    Args:
        vectors: one per row, (n, d); or the weight (n, in, *kernel) of an ungrouped 2-d or 3-d convolution.
        cosine: smallest absolute cosine, in (0, 1]; pairs within 1e-6 of it (float32 rounding) may fall on either side.
        recall: least expected share of the pairs at the threshold that hashing finds, in (0, 1).
        seed: of the hyperplanes.

    Raises: InvalidArgumentError for another rank, non-finite entries, or arguments out of range.

    Example:
        >>> vectors = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [2.0, 0.02, 0.0]])
        >>> gonio.geometry.near_duplicates(vectors, cosine=0.99).pairs
        tensor([[0, 2]])

    References:
        [1] M. Charikar, "Similarity estimation techniques from rounding algorithms", STOC 2002, §3.
        [2] J. Leskovec, A. Rajaraman, J. Ullman, "Mining of Massive Datasets", §3.4 (banding).
    """
    vectors = whole(as_matrices(vectors, "near_duplicates", stacks=False))
    if not 0 < cosine <= 1 or not 0 < recall < 1:
        raise InvalidArgumentError(
            "near_duplicates() needs 0 < cosine <= 1 and 0 < recall < 1",
            f"cosine={cosine}, recall={recall}",
            "Use for example cosine=0.95, recall=0.995.",
        )
    with torch.no_grad(), full_precision(vectors):
        unit, kept = _directions(vectors.detach())
        least = min(cosine, 1 - ROUNDING)  # equal rows have a cosine of 1 up to rounding
        search = cheapest_search(unit, cosine, recall, seed) if len(unit) > EXACT_SIZE else None
        if search is None:
            pairs, cosines, capped = _exact_search(unit, least)
            return NearDuplicates(kept[pairs], cosines, cosine, len(vectors), "exact", 1.0, capped)
        codes, capped = _candidates(unit, search, seed)
        parts = (torch.stack([part // len(unit), part % len(unit)], -1) for part in codes.split(VERIFY))
        pairs, cosines = _verified(parts, lambda rows: unit[rows], least)
        return NearDuplicates(kept[pairs], cosines, cosine, len(vectors), "hashed", search.recall, capped)


def earliest_parallel(vectors: Tensor, *, cosine: float) -> Tensor:
    """For each row the number of the first row with this absolute cosine or a larger one to it, or its own number.

    Pairs are not stored, so that memory grows with the rows alone. Of more rows than can be compared in
    :data:`COMPARED` multiplications only those with equal directions are found. A zero row has its own number.

    Shape: (n, d) → (n,), integers on the CPU.
    """
    with torch.no_grad(), full_precision(vectors):
        unit, kept = _directions(vectors)
        leaders, group = _of_equal_rows(unit)
        some = unit[leaders] if len(leaders) < len(unit) else unit
        n, d = some.shape
        found = torch.arange(n, device=unit.device)
        if n > EXACT_SIZE and cheapest_search(some, cosine, RECALL, 0) is not None:
            first, second = near_duplicates(some, cosine=cosine, recall=RECALL).pairs.unbind(1)
            found.scatter_reduce_(0, second, first, "amin")
        elif n * n / 2 * (d + ENTRY_COST) <= COMPARED:
            _first_of_each_(found, some, cosine)
        earliest = torch.arange(len(vectors), device="cpu")
        earliest[kept.cpu()] = kept[leaders[found[group]]].cpu()
        return earliest


def _of_equal_rows(unit: Tensor) -> tuple[Tensor, Tensor]:
    """The first rows of all directions, equal up to the sign and to the last bit, and the place of each row's there."""
    keys, rows = unit.new_empty(len(unit), dtype=torch.long), torch.arange(len(unit), device=unit.device)
    for start, block in row_blocks(unit):
        first = block.gather(1, (block != 0).int().argmax(1, keepdim=True)).sign()
        bits = (block * first + 0.0).view(torch.int32).long()  # −0 becomes 0
        draw = generator(0, "equal rows", bits.shape[1])
        factors = torch.randint(1 << 62, (bits.shape[1],), generator=draw, device="cpu").to(unit.device)
        keys[start : start + len(block)] = (bits * factors).sum(1)
    _, key = keys.unique(return_inverse=True)
    leader = rows.new_full((len(unit),), len(unit)).scatter_reduce_(0, key, rows, "amin")[key]
    for start, block in row_blocks(unit):  # two directions with one key are told apart
        own = rows[start : start + len(block)]
        led = unit[leader[own]]
        leader[own] = torch.where(((block == led).all(1) | (block == -led).all(1)), leader[own], own)
    return leader.unique(return_inverse=True)


def _first_of_each_(found: Tensor, unit: Tensor, cosine: float) -> None:
    """Write the first parallel row of each; a row that has one is compared with no later ones."""
    open_rows = torch.arange(len(unit), device=unit.device)
    for start in range(0, len(unit), GRAM_BLOCK):
        open_rows = open_rows[(open_rows > start) & (found[open_rows] == open_rows)]
        block = unit[start : start + GRAM_BLOCK]
        numbers = torch.arange(start, start + len(block), device=unit.device)
        for rows in open_rows.split(GRAM_BLOCK):
            hit = ((unit[rows] @ block.mT).abs() >= cosine) & (numbers < rows[:, None])
            has, first = hit.max(1)  # the first of equal ones
            found[rows[has]] = numbers[first[has]]


def _directions(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors of the rows that have a direction, and the numbers of these rows."""
    check_finite(vectors, "near_duplicates")
    unit = row_directions(vectors)
    kept = unit.any(-1).nonzero()[:, 0]
    return (unit if len(kept) == len(unit) else unit[kept]), kept


def _exact_search(unit: Tensor, cosine: float) -> tuple[Tensor, Tensor, int]:
    """Pairs and cosines from blocks of the upper triangle, and the number of last rows left out to bound memory."""
    n = len(unit)
    pairs, cosines = [unit.new_zeros(0, 2, dtype=torch.long)], [unit.new_zeros(0)]
    room, left = max(EXACT_SIZE**2 // 2, n * BUCKET_LIMIT), 0
    held = unit.new_empty(min(n, GRAM_BLOCK) ** 2)  # new blocks between kept pairs would scatter over the heap
    for i, j in combinations_with_replacement(range(0, n, GRAM_BLOCK), 2):
        if room < 0:
            left = n - i
            break
        one, other = unit[i : i + GRAM_BLOCK], unit[j : j + GRAM_BLOCK]
        gram = torch.mm(one, other.mT, out=held[: len(one) * len(other)].view(len(one), len(other)))
        # Most rows have no hit; two reductions find the rows that have one in a quarter of the time.
        rows = ((gram.amax(1) >= cosine) | (gram.amin(1) <= -cosine)).nonzero()
        hit = (gram[rows[:, 0]].abs() >= cosine).nonzero()
        hit[:, :1] = rows[hit[:, 0]]
        if i == j:
            hit = hit[hit[:, 0] < hit[:, 1]]
        pairs.append(hit + hit.new_tensor([i, j]))
        cosines.append(gram[hit[:, 0], hit[:, 1]])
        room -= len(hit)
    joined = torch.cat(pairs)
    order = (joined[:, 0] * n + joined[:, 1]).argsort()
    return joined[order], torch.cat(cosines)[order].clamp(-1, 1), left


def _verified(
    candidates: Iterable[Tensor], directions: Callable[[Tensor], Tensor], cosine: float
) -> tuple[Tensor, Tensor]:
    """The candidate pairs, given in parts, that are pairs, with exact cosines; `directions` are those of some rows."""
    pairs, cosines = [], []
    for part in candidates:
        dots = (directions(part[:, 0]) * directions(part[:, 1])).sum(-1)
        hit = dots.abs() >= cosine
        pairs.append(part[hit])
        cosines.append(dots[hit])
    return torch.cat(pairs), torch.cat(cosines).clamp(-1, 1)


# --- planning a search ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Search:
    """Parameters of a search by hashing, with its expected recall and cost."""

    pool: int  # hyperplanes
    bits: int  # per band
    bands: int
    mean: Tensor | None  # subtracted before hashing
    recall: float  # expected share of the pairs at the threshold
    cost: float  # per vector, see Note [Costs]


def cheapest_search(unit: Tensor, cosine: float, recall: float, seed: int) -> Search | None:
    """The cheapest search with this recall, or None where comparing all pairs costs less.

    The number of candidates is estimated from pairs in a sample: vectors that crowd into few buckets get more bits, or
    are centred, or are searched exactly.
    """
    n, d = unit.shape
    order = torch.randperm(n, generator=generator(seed, "sample", n), device="cpu").to(unit.device)
    left, right = unit[order[:SAMPLE]].float(), unit[order[-SAMPLE:]].float()
    mean = unit.mean(0).float()
    same, at_threshold = _together(left, right), torch.tensor([acos(cosine) / pi], dtype=torch.float64, device="cpu")
    found = list(_searches(at_threshold, (same, 1 - same), n, d, recall, None))
    # Centring leaves the distance of two vectors as it is and shortens them, which widens their angle.
    half = ((1 - cosine) / 2) ** 0.5 / torch.linalg.vector_norm(left - mean, dim=-1)
    at_threshold = (2 * half.clamp_max(1).asin() / pi).sort().values[::STEPS].cpu().double()
    together = (_together(left - mean, right - mean), _together(left - mean, -right - mean))
    found += _searches(at_threshold, together, n, d, recall, mean)
    best = min(found, key=lambda search: search.cost, default=None)
    return best if best is not None and best.cost < (n - 1) / 2 * (d + ENTRY_COST) else None


def _together(a: Tensor, b: Tensor) -> Tensor:
    """Probability that a random hyperplane does not separate two vectors."""
    a, b = (x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=1e-30) for x in (a, b))
    return 1 - (a @ b.mT).clamp(-1, 1).acos() / pi


def _searches(
    apart: Tensor, together: tuple[Tensor, Tensor], n: int, d: int, recall: float, mean: Tensor | None
) -> Iterator[Search]:
    """One search per pool and number of bits that reaches the recall.

    A random hyperplane separates pairs at the threshold with probability `apart`. It does not separate random pairs,
    and pairs of which one is negated, with the probabilities `together`.
    """
    copies = 1 if mean is None else 2  # without a mean a negated vector has the complementary bits
    shares = {pool: _separating(apart, pool) for pool in POOLS}
    for bits in BITS:
        met = (n - 1) / 2 * sum(float(p.pow(bits).mean()) for p in together)
        for pool in POOLS:
            bands, expected = _bands(shares[pool], pool, bits, recall)
            hashing = copies * (pool * (d + bands) + KEY_COST * bands)
            cost = hashing + bands * met * (CANDIDATE_COST + GATHER_COST * d)
            if expected >= recall:
                yield Search(pool, bits, bands, mean, expected, cost)


def _separating(apart: Tensor, pool: int) -> Tensor:
    """Probability that 0, 1, … `pool` hyperplanes separate a pair: binomial, averaged over `apart`."""
    h = torch.arange(pool + 1, dtype=torch.float64, device="cpu")
    log_count = torch.lgamma(h.new_tensor(pool + 1.0)) - torch.lgamma(h + 1) - torch.lgamma(pool - h + 1)
    p = apart.clamp(1e-300, 1 - 1e-12)[:, None]
    return torch.exp(log_count + h * p.log() + (pool - h) * torch.log1p(-p)).mean(0)


def _bands(share: Tensor, pool: int, bits: int, recall: float) -> tuple[int, float]:
    r"""Fewest bands with this recall (or the largest number), and their recall.

    A band of `k` bits reads none of the `h` hyperplanes that separate a pair with probability
    :math:`\binom{m - h}{k} / \binom{m}{k}`, independently of the other bands once h is given.
    """
    h = torch.arange(pool + 1, dtype=torch.float64, device="cpu")
    taken = torch.arange(bits, dtype=torch.float64, device="cpu")[:, None]
    meet = ((pool - h - taken).clamp(min=0) / (pool - taken)).prod(0)
    miss = torch.log1p(-meet)  # −∞ at h = 0: such a pair meets in every band

    def expected(bands: int) -> float:
        return 1 - float((share * torch.exp(bands * miss)).sum())

    low, high = 0, MAX_BANDS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if expected(middle) >= recall else (middle, high)
    return high, expected(high)


# --- hashing --------------------------------------------------------------------------------------


def _candidates(unit: Tensor, search: Search, seed: int) -> tuple[Tensor, int]:
    """Distinct codes i·n + j, i < j, of vectors that share a bucket; and the number of vectors in crowded buckets."""
    n = len(unit)
    keys = _keys(unit, search, seed)
    entries = torch.arange(keys.shape[1], device=unit.device)
    # Copies of one vector share every bucket. Vectors that agree in many bands are compared once, and all but the
    # last of a crowd are left out of the bands.
    together = range(min(len(keys), 62 // search.bits))
    joined = torch.stack([keys[k].long() << (k * search.bits) for k in together]).sum(0)
    first, crowd = _meetings(joined.unique(return_inverse=True)[1], entries, n)
    capped = torch.zeros(n, dtype=torch.bool, device=unit.device)
    capped[crowd] = True
    kept = (~capped[entries % n]).nonzero().squeeze(-1)
    codes = [first]
    for band in keys if len(kept) == len(entries) else keys[:, kept]:
        found, crowd = _meetings(band, entries[kept], n)
        codes.append(found)
        capped[crowd] = True
        if sum(map(len, codes)) > MERGE:  # crowded buckets yield the same pairs in every band
            codes = [torch.unique(torch.cat(codes))]
    return torch.unique(torch.cat(codes)), int(capped.sum())


def _keys(unit: Tensor, search: Search, seed: int) -> Tensor:
    """Buckets of each band, (bands, n), or (bands, 2n) with those of the negated vectors after the others.

    Without centring a negated vector has the complementary bits: the smaller of both keys is the bucket.
    """
    normals = hyperplanes(unit.shape[-1], search.pool, unit, seed)
    drawn, sizes = generator(seed, "bands", search.bands, search.pool), (search.bands, search.pool)
    places = torch.rand(sizes, generator=drawn, device="cpu", dtype=torch.float32).topk(search.bits).indices
    powers = 2.0 ** torch.arange(search.bits, dtype=torch.float32, device="cpu").expand_as(places)
    reading = powers.new_zeros(sizes).scatter_(1, places, powers).mT.to(unit)
    signed = [unit] if search.mean is None else [unit - search.mean, -unit - search.mean]
    keys = torch.empty(len(signed) * len(unit), search.bands, dtype=torch.int32, device=unit.device)
    parts = (part for vectors in signed for part in vectors.split(ROW_CHUNK))
    for rows, part in zip((r for k in keys.split(len(unit)) for r in k.split(ROW_CHUNK)), parts, strict=True):
        projections = part @ normals
        bits = torch.ge(projections, 0, out=projections)  # 1 or 0, as numbers
        rows.copy_(bits @ reading)
    joined = keys.mT.contiguous()
    return torch.minimum(joined, (1 << search.bits) - 1 - joined) if search.mean is None else joined


def _meetings(keys: Tensor, entries: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Codes of pairs in equal buckets, and the vectors in buckets above the limit."""
    # Key and entry in one number: sorting numbers alone is faster than sorting with indices, and buckets are in
    # the order of the entries, so that crowded ones yield the same pairs in every band.
    width = (2 * n).bit_length()
    ordered = (keys.long() << width).bitwise_or_(entries)
    if ordered.is_cpu:
        ordered.numpy().sort()  # in place; torch's sort always makes indices too
    else:
        ordered = ordered.sort().values
    found, codes = ordered & ((1 << width) - 1), [entries[:0]]
    for shift in range(1, BUCKET_LIMIT + 2):
        same = ((ordered[shift:] ^ ordered[:-shift]) < 1 << width).nonzero().squeeze(-1)
        if not len(same):
            return torch.cat(codes), entries[:0]
        a, b = found[same], found[same + shift]
        useful = ((a < n) | (b < n)) & (a % n != b % n)  # at most one is a negated copy, of another vector
        a, b = a[useful] % n, b[useful] % n
        codes.append(torch.minimum(a, b) * n + torch.maximum(a, b))
    return torch.cat(codes[:-1]), found[same] % n


# --- very long vectors ----------------------------------------------------------------------------


def near_pairs(matrix: Tensor, *, name: str) -> tuple[Tensor, Tensor] | None:
    """Pairs and cosines of :func:`near_duplicates` at :data:`NEAR`, of very many or very long rows; in bounded memory.

    Rows longer than :data:`UNPROJECTED` are projected first, see Note [Sketch]; `name` seeds the projection. Rows
    with a non-finite entry are in no pair. None if there are too many rows to search.
    """
    n, d = matrix.shape
    if n * min(d, UNPROJECTED) > SEARCHED:
        return None
    if d <= UNPROJECTED:
        found = near_duplicates(zero_nonfinite(matrix.to(computed_in(matrix.dtype))), cosine=NEAR)
        return found.pairs, found.cosines
    onto = normal((d, SKETCH), 0, "near_pairs", name).to(matrix.device)
    sketch = torch.empty(n, SKETCH, device=matrix.device, dtype=torch.float32)
    for start, rows in row_blocks(matrix):
        torch.mm(rows.float(), onto, out=sketch[start : start + len(rows)])
    norms = torch.linalg.vector_norm(sketch, dim=1)
    odd = (~((norms > 1e-10) & (norms < 1e18))).nonzero().flatten()  # zero, not finite, or out of range
    step = max(1, BLOCK // d)
    for some in odd.split(step):
        sketch[some] = row_directions(zero_nonfinite(matrix[some].to(computed_in(matrix.dtype)))).float() @ onto
    candidates = near_duplicates(sketch, cosine=SKETCH_COSINE).pairs
    return _verified(candidates.split(step), lambda rows: row_directions(matrix[rows]), NEAR)


def zero_nonfinite(rows: Tensor) -> Tensor:
    """The rows with 0 for every row that has a non-finite entry."""
    fine = torch.isfinite(rows).all(-1, keepdim=True)
    return rows if bool(fine.all()) else torch.where(fine, rows, torch.zeros_like(rows))
