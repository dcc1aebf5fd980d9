"""The figures of one tensor before and after: how far it moved, in how many directions, and what kept its geometry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import radians, sqrt
from typing import Any, Literal

import torch
from torch import Tensor

from gonio.escaping import plain
from gonio.geometry import Layout, matrix_view, principal_angles
from gonio.geometry.angles import turned
from gonio.geometry.blocks import HELD, Stored, StoredDifference, frobenius_norm, safe_scale
from gonio.geometry.chance import random_coherence
from gonio.geometry.norms import computed_in
from gonio.geometry.spectra import energy_rank, spectrum_estimate
from gonio.geometry.subspaces import CONSIDERED, THRESHOLD, BaseDirections
from gonio.seeding import generator, normal

FILTERS, SAMPLED = 1024, 512  # of one matrix: up to so many, all products are compared, else those of a sample
MATRICES = 16  # of one weight, at most, whose directions are compared
FIRST = 3  # directions, the largest, among which a random change seldom makes intruders
CLEAR = 0.8  # share of the threshold that the chance level of a cosine may reach, so that intruders can be told
BLOCK = 1 << 18  # entries converted to float64 at once: 2 MiB, which stay in the cache
ROTATION = 0.1  # share of the change of a random difference below which the filters' products are preserved
LOW_RANK = 0.5  # share of the stable rank of a random change up to which a change is of low rank
RADIAL = 0.2  # largest angle of a filter, over the relative change, below which a change is one of norms
UNIFORM = 0.01  # of the change of the norms, by which they differ where all filters are scaled alike


Cause = Literal["", "nonfinite", "adapter"]


@dataclass(frozen=True, kw_only=True, repr=False)
class TensorDifference:
    r"""One tensor of both sources, W before and :math:`W' = W + \Delta` after; filters are rows w.

    Attributes:
        status: `compared`, `equal` (every value), or `not compared`, with the reason. `cause`: of the reason: values
            that are not finite, or an `adapter` that does not fit its base; else empty.
        relative: :math:`\lVert \Delta \rVert / \lVert W \rVert`; None from a zero tensor. `norm`, `change_norm`: its
            parts.
        norm_ratio: median over filters of the norm after over the norm before.
        angle_mean, angle_max: between each filter before and after, in degrees; 90 for independent directions.
        magnitude_change: mean over filters of :math:`|\lVert w' \rVert / \lVert w \rVert - 1|`. `direction_change`:
            mean of 1 − cos: the two axes of DoRA. `magnitude_direction`: correlation of the two over the filters
            (by chance 0 ± 1/√n); None below 8 filters.
        stable_rank: :math:`\lVert \Delta \rVert^2 / \sigma_{\max}^2(\Delta)`. `stable_rank_random`: for a change with
            independent entries.
        rank_99: the smallest number of singular directions of :math:`\Delta` with 99 % of its squared norm, so that the
            best approximation of this rank has a relative error of 0.1; None where it is above 256 in a
            weight too large for all singular values. `effective_rank`: of :math:`\Delta`; None in such a weight.
        gram_change: :math:`\lVert W'W'^\top - WW^\top \rVert / \lVert WW^\top \rVert`: 0 if all filters were turned by
            one rotation. `gram_change_random`: for a change with independent entries of the same norm.
        intruders: of the 10 largest left singular directions after, those whose largest cosine with any before is below
            0.5. None where chance alone comes near 0.5, below about 35 filters. `intruder_cosines`: these largest
            cosines, largest direction first (of the first matrix). `intruder_chance`: their median for a random
            direction. `intruders_random`: the number after a random change of the same norm; None without intruders.
        intruders_first, intruders_first_random: of these, those among the 3 largest directions, where a random change
            seldom has any: it replaces small directions.
        principal_angles: between the subspaces of the 10 largest left singular directions before and after, in degrees,
            smallest first (of the first matrix). `overlap`: their mean squared cosine; `overlap_random`: for two
            random subspaces.
        entries_changed: number of entries that differ. `entries_zeroed`: of them, those that are 0 after.
        reordered: number of filters at other places, if those after are those before in another order; else 0.
        reordered_inputs: the same of the columns of its matrix.
        transposed: whether a square matrix after is the transpose of that before.
        moved_from: the name in the base of another weight that has the values after; empty if there is none.
        rounded: whether one side is the other one rounded to its dtype, so that nothing else changed.
    """

    name: str
    path: str
    status: str
    reason: str = ""
    cause: Cause = ""
    shape: tuple[int, ...] = ()
    relative: float | None = None
    norm_ratio: float | None = None
    angle_mean: float | None = None
    angle_max: float | None = None
    stable_rank: float | None = None
    stable_rank_random: float | None = None
    rank_99: int | None = None
    norm: float | None = None
    change_norm: float | None = None
    magnitude_change: float | None = None
    direction_change: float | None = None
    magnitude_direction: float | None = None
    effective_rank: float | None = None
    gram_change: float | None = None
    gram_change_random: float | None = None
    intruders: int | None = None
    intruders_random: int | None = None
    intruders_first: int | None = None
    intruders_first_random: int | None = None
    intruder_cosines: tuple[float, ...] = ()
    intruder_chance: float | None = None
    principal_angles: tuple[float, ...] = ()
    overlap: float | None = None
    overlap_random: float | None = None
    entries_changed: int | None = None
    entries_zeroed: int | None = None
    reordered: int | None = None
    reordered_inputs: int | None = None
    transposed: bool = False
    moved_from: str = ""
    rounded: bool = False

    def __repr__(self) -> str:
        change = "" if self.relative is None else f", changed by {self.relative:.3g}"
        return f"<{plain(self.path)}: {plain(self.reason) or self.status}{change}>"

    @property
    def form(self) -> str:
        """The change in a word or two; empty without filters, but for `rounded`.

        `equal`, `rounded` (to another dtype, and nothing else changed), `pruned` (entries became 0 and no other
        changed), `reordered` (the same filters or columns at other places), `transposed`, `moved` (the values of
        another weight of the base), `scaled` (all filters alike), `gains` (each filter by its own factor), `rotation`,
        `rank r`, `full`.
        """
        if self.rounded:
            return "rounded"
        if self.status != "compared" or (self.angle_max is None and self.gram_change is None):
            return self.status if self.status == "equal" else ""
        if self.entries_zeroed and self.entries_zeroed == self.entries_changed:
            return "pruned"
        if self.reordered or self.reordered_inputs:
            return "reordered"
        if self.transposed:
            return "transposed"
        if self.moved_from:
            return "moved"
        if self.angle_max is not None and radians(self.angle_max) < RADIAL * (self.relative or 0.0):
            return "scaled" if self._uniform else "gains"
        if self.gram_change is not None and self.gram_change < ROTATION * (self.gram_change_random or 0.0):
            return "rotation"
        low = self.rank_99 is not None and self.rank_99 <= LOW_RANK * (self.stable_rank_random or 0.0)
        return f"rank {self.rank_99}" if low else "full"

    @property
    def _uniform(self) -> bool:
        """Whether all norms changed by one factor: it is their median, and the change of the whole as well."""
        factor = abs((self.norm_ratio or 0.0) - 1)
        others = (self.relative or 0.0, self.magnitude_change or 0.0)
        return all(abs(other - factor) <= UNIFORM * factor for other in others)


@torch.no_grad()
def figures_of(before: Tensor, after: Tensor, layout: Layout | None, name: str) -> dict[str, Any]:
    """The figures of two finite tensors of one shape and dtype that differ, read in blocks as they are stored."""
    scale = max(map(_scale, (before, after)))
    if scale != 1:  # squares may leave the range of float64
        found = figures_of(before / scale, after / scale, layout, name)
        return found | {part: found[part] * scale for part in ("norm", "change_norm")}
    values: dict[str, Any] = {"shape": tuple(before.shape)}
    views = None if layout is None or before.ndim < 2 else [matrix_view(x, layout) for x in (before, after)]
    bases: list[BaseDirections] = []
    if views is not None and _tellable(views[0]) and all(bool(view.any()) for view in views):
        bases = [BaseDirections(old, k=_considered(*old.shape)) for old in views[0]]
        values |= _directions(bases, views[1])
    norm, moved = norm_of(before), norm_of(StoredDifference(before, after))
    values |= {"norm": norm, "change_norm": moved, "relative": moved / norm if norm else None}
    values |= _entries(before.flatten(), after.flatten())
    if views is not None and moved:
        change = StoredDifference(*views)
        rows = change.flatten(0, 1)
        values |= _turned(rows) | _ranks(change[...] if change.numel() <= HELD else change, moved, name)
        values["reordered"] = _reordered(rows.before, rows.after)
        values["reordered_inputs"] = _reordered_columns(views[0][0], views[1][0]) if len(views[0]) == 1 else 0
        values["transposed"] = before.ndim == 2 and before.shape == after.mT.shape and torch.equal(before, after.mT)
        values |= _products(change, norm, moved, name)
        if values.get("intruders"):
            chance = _intruders_by_chance(bases, views[0], moved, name)
            values |= {"intruders_random": len(chance), "intruders_first_random": _first(chance)}
    return values


def _scale(tensor: Tensor) -> float:
    return safe_scale(tensor.reshape(1, -1)) if tensor.dtype == torch.float64 else 1.0


def norm_of(stored: Stored) -> float:
    """The norm of all entries in float64, without a copy of them."""
    return frobenius_norm(stored.flatten().unsqueeze(0))


def _entries(before: Tensor, after: Tensor) -> dict[str, int]:
    changed = zeroed = 0
    for old, new in zip(before.split(BLOCK), after.split(BLOCK), strict=True):
        different = old != new
        changed += int(torch.count_nonzero(different))
        if int(torch.count_nonzero(new)) < len(new):
            zeroed += int(torch.count_nonzero(different & (new == 0)))
    return {"entries_changed": changed, "entries_zeroed": zeroed}


def _turned(filters: StoredDifference) -> dict[str, float]:
    """Norms and angles of the filters that are not zero in either, from sums in float64."""
    parts = []
    for old, delta in _doubles(filters.before, filters):
        if filters.dtype == torch.float64:  # the square of 1e200 overflows; others are in range
            size = torch.maximum(old.abs().amax(1, keepdim=True), delta.abs().amax(1, keepdim=True))
            size = size.masked_fill((size == 0) | ~size.isfinite(), 1)
            old, delta = old / size, delta / size
        pairs = ((old, old), (old, delta), (delta, delta))
        parts.append(torch.stack([torch.einsum("nd,nd->n", *pair) for pair in pairs]))
    norms, inner, moved = torch.cat(parts, 1)
    norms_after = (norms + 2 * inner + moved).clamp_min(0)
    alive = (norms > 0) & (norms_after > 1e-14 * (norms + moved))
    if not bool(alive.any()):
        return {}
    norms, inner, moved, norms_after = (x[alive] for x in (norms, inner, moved, norms_after))
    angles = turned(norms, moved, inner)
    ratios = (norms_after / norms).sqrt()
    degrees, magnitudes = torch.rad2deg(angles), (ratios - 1).abs()
    values = {
        "norm_ratio": float(ratios.median()),
        "angle_mean": float(degrees.mean()),
        "angle_max": float(degrees.max()),
        "magnitude_change": float(magnitudes.mean()),
        "direction_change": float((2 * (angles / 2).sin().square()).mean()),
    }
    spread = [float(x.std()) if len(x) > 1 else 0.0 for x in (magnitudes, angles)]
    if len(angles) >= 8 and all(s > 1e-7 * float(x.mean()) for s, x in zip(spread, (magnitudes, angles), strict=True)):
        values["magnitude_direction"] = float(torch.corrcoef(torch.stack([magnitudes, angles]))[0, 1])
    return values


def _reordered(before: Tensor, after: Tensor) -> int:
    """The number of filters at other places if both have the same filters, which are told apart by their norms."""
    if not torch.equal(before[:, 0].sort().values, after[:, 0].sort().values):
        return 0  # without a pass over the filters
    sizes = [torch.cat([x.square().sum(1) for (x,) in _doubles(matrix)]).sort() for matrix in (before, after)]
    if not torch.equal(sizes[0].values, sizes[1].values):
        return 0
    if not torch.equal(before[sizes[0].indices], after[sizes[1].indices]):
        return 0
    return int((before != after).any(1).sum())


def _reordered_columns(before: Tensor, after: Tensor) -> int:
    """The number of columns at other places if both have the same ones; most matrices need a look at one row."""
    height = max(1, BLOCK // before.shape[1])
    parts = zip(before.split(height), after.split(height), strict=True)
    old, new = next((old[rows], new[rows]) for old, new in parts if bool((rows := (old != new).any(1)).any()))
    if not torch.equal(old[0].sort().values, new[0].sort().values):
        return 0
    return _reordered(before.mT.contiguous(), after.mT.contiguous())


def _doubles(*matrices: Stored) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of some matrices in float64, some at a time."""
    height = max(1, BLOCK // max(1, matrices[0].shape[1]))
    for top in range(0, len(matrices[0]), height):
        yield tuple(matrix[top : top + height].double() for matrix in matrices)


def _ranks(change: Stored, total: float, name: str) -> dict[str, Any]:
    """Ranks of the change as one block-diagonal matrix, beside that of independent entries."""
    _, n, d = change.shape
    found = spectrum_estimate(change, name=name)
    return {
        "stable_rank": found.stable_rank(total),
        "stable_rank_random": change.numel() / (n**0.5 + d**0.5) ** 2,
        "rank_99": energy_rank(change, found, 0.99, name=name),
        "effective_rank": found.effective_rank,
    }


def _products(change: StoredDifference, norm: float, moved: float, name: str) -> dict[str, float]:
    """How far the filters' products with each other changed: W'W'ᵀ − WWᵀ = P + Pᵀ with P = (W + Δ/2) Δᵀ."""
    groups, n, d = change.shape
    if n < 2 or not norm:
        return {}
    rows: Any = slice(None)
    if n > FILTERS:
        rows = torch.randperm(n, generator=generator(0, "products", name), device="cpu")[:SAMPLED]
    difference = own = kept = 0.0
    share = moved / norm
    scale = max(1.0, share)  # divided out, so that no product overflows where an adapter's factor is huge
    for one in change:
        old, delta = one.before[rows].to(one.dtype) / norm, one[rows] / moved
        half = (old / scale).add_(delta, alpha=0.5 * share / scale) @ delta.mT
        difference += float((half + half.mT).double().square().sum())
        own += float((old @ old.mT).double().square().sum())
        kept += float(torch.linalg.vector_norm(old, dtype=torch.float64)) ** 2
    if not own:
        return {}
    entries = groups * n * d
    n = n if n <= FILTERS else SAMPLED
    squares = groups * (n * d**2 + n**2 * d + n * d) / entries
    random = 2 * (n + 1) * kept / scale / scale + (share / scale) ** 2 * squares
    return {
        "gram_change": scale * share * sqrt(difference / own),
        "gram_change_random": scale * share * sqrt(random / (entries * own)),
    }


# --- directions ------------------------------------------------------------------------------------------------------


def _tellable(matrices: Tensor) -> bool:
    """Whether an intruder can be told from a random direction."""
    groups, n, d = matrices.shape
    return groups <= MATRICES and n > 1 and random_coherence(min(n, d), n) <= CLEAR * THRESHOLD


def _considered(n: int, d: int) -> int:
    return max(1, min(CONSIDERED, min(n, d) // 4))


def _directions(bases: Sequence[BaseDirections], after: Tensor) -> dict[str, Any]:
    """Intruders and the angles between top subspaces; of all matrices, the details of the first."""
    _, n, d = after.shape
    k = _considered(n, d)
    found = [base.intruders(new) for base, new in zip(bases, after, strict=True)]
    angles = [principal_angles(one.base.left[:, :k], one.top.left) for one in found]
    return {
        "intruders": sum(len(one.numbers) for one in found),
        "intruders_first": _first([number for one in found for number in one.numbers]),
        "intruder_cosines": tuple(round(c, 6) for c in found[0].cosines.tolist()),
        "intruder_chance": found[0].chance,
        "principal_angles": tuple(torch.rad2deg(angles[0]).tolist()),
        "overlap": float(torch.stack(angles).cos().square().mean()),
        "overlap_random": k / n,
    }


def _first(numbers: Sequence[int]) -> int:
    return sum(number < FIRST for number in numbers)


def _intruders_by_chance(bases: Sequence[BaseDirections], before: Tensor, moved: float, name: str) -> list[int]:
    """The places of the intruders after a change of this norm with independent normal entries."""
    _, n, d = before.shape
    places: list[int] = []
    for i, (base, old) in enumerate(zip(bases, before, strict=True)):
        draw = normal((n, d), 0, "random change", name, i)
        changed = draw.to(old.device, computed_in(old.dtype)).mul_(moved / sqrt(before.numel())).add_(old)
        places += base.intruders(changed).numbers
    return places
