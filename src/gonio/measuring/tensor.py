"""Everything that is measured on one tensor, each figure beside what random weights would show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor

from gonio.errors import GonioError
from gonio.geometry import Layout, filter_norms, matrix_view, spectral_norm, spectrum, welch_bound
from gonio.measuring.entry import Entry
from gonio.measuring.numbers import numbers_of
from gonio.measuring.pairs import Pairs, angle_std_at_random, coherence_at_random, measure_pairs

__all__ = ["TensorMeasurement", "measure_tensor"]

CHUNK = 1 << 22  # entries read at a time: a tensor of half precision is never widened whole
STEPS = 24  # of the bidiagonalisation for larger ones; its relative error there is below 1e-3
EXACT_WORK = 5e9  # multiply-adds of a Gram matrix up to which all singular values are computed


@dataclass(frozen=True, kw_only=True)
class TensorMeasurement:
    r"""One tensor of a model: its filters' norms and angles, its spectrum, and what chance would show.

    A filter is one output's weights, flattened: n filters of length d in each of `groups` matrices. Only
    filters of one group are compared, because others see other inputs. Figures that do not apply are None:
    a depthwise convolution has no pairs, a bias no filters.

    Attributes:
        status: `measured`; `no filters` (checked for non-finite values only); `skipped`.
        reason: why it is not `measured`.
        entries, nonfinite: how many numbers, and how many of them are NaN or infinite. Filters that hold
            one are left out of everything else.
        rms, frobenius: root mean square of the entries; square root of the sum of their squares.
        zero_filters: filters whose entries are all 0 (dead, unless training starts there on purpose).
        norm_quantiles: least, quartiles and largest filter norm. `norm_nonzero_min`: least that is not 0.
        angle_mean, angle_std: over all pairs, in degrees. `angle_std_random`: what random directions show
            (their mean is 90).
        alignment: mean squared cosine times d: 1 for random directions, 0 for orthogonal filters.
            `alignment_z`: its distance from 1 in standard deviations of random weights.
        coherence: largest absolute cosine. `coherence_random`: median of random directions;
            `welch_bound`: the least that is possible.
        near_duplicates: pairs with an absolute cosine of at least 0.95. `closest`: the two filters whose
            absolute cosine is the coherence, counted over all groups.
        sigma_max, stable_rank, effective_rank: of the matrices as one block-diagonal matrix.
            `sigma_random`, `stable_rank_random`: for independent entries of the same root mean square.
        angle_histogram: pairs per degree.
    """

    name: str
    path: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    status: str
    reason: str = ""
    notes: tuple[str, ...] = ()
    entries: int = 0
    nonfinite: int = 0
    first_nonfinite: tuple[int, ...] | None = None
    groups: int | None = None
    filters: int | None = None
    dim: int | None = None
    rms: float | None = None
    frobenius: float | None = None
    norm_mean: float | None = None
    norm_std: float | None = None
    norm_quantiles: tuple[float, ...] | None = None
    norm_nonzero_min: float | None = None
    zero_filters: int | None = None
    pairs: int | None = None
    angle_mean: float | None = None
    angle_std: float | None = None
    angle_std_random: float | None = None
    alignment: float | None = None
    alignment_z: float | None = None
    coherence: float | None = None
    coherence_random: float | None = None
    welch_bound: float | None = None
    near_duplicates: int | None = None
    closest: tuple[int, int] | None = None
    sigma_max: float | None = None
    sigma_random: float | None = None
    stable_rank: float | None = None
    stable_rank_random: float | None = None
    effective_rank: float | None = None
    angle_histogram: tuple[int, ...] | None = None


@torch.no_grad()
def measure_tensor(entry: Entry) -> TensorMeasurement:
    """The measurement of one tensor; never raises for what the tensor holds: it says why instead."""
    if entry.load is None:
        return _row(entry, status="skipped", reason=entry.reason)
    try:
        raw = entry.load()
    except (GonioError, RuntimeError, ValueError, TypeError, OSError) as error:
        return _row(entry, status="skipped", reason=f"cannot be read: {error}")
    numbers = numbers_of(raw)
    tensor, notes = numbers.tensor, (*entry.notes, *numbers.notes)
    known: dict[str, Any] = {
        "shape": tuple(raw.shape),
        "dtype": str(raw.dtype).removeprefix("torch."),
        "entries": raw.numel(),
    }
    if tensor is None:
        status = "skipped" if numbers.skipped else "no filters"
        return _row(entry, **known, status=status, reason=numbers.reason, notes=notes)
    bad, first = _nonfinite(tensor)
    known |= {"nonfinite": bad, "first_nonfinite": first}
    if entry.layout is None or tensor.ndim < 2:
        reason = entry.reason or f"{tensor.ndim}-d: no filters"
        return _row(entry, **known, status="no filters", reason=reason, notes=notes)
    return _row(entry, **known, status="measured", **_filters(tensor, entry.layout, entry.name, notes))


def _row(entry: Entry, **values: Any) -> TensorMeasurement:
    base = {"name": entry.name, "path": entry.path, "kind": entry.kind, "shape": (), "dtype": ""}
    return TensorMeasurement(**{**base, "notes": entry.notes, **values})


def _chunks(rows: Tensor) -> Iterator[Tensor]:
    step = max(1, CHUNK // max(1, rows.shape[-1]))
    for start in range(0, len(rows), step):
        chunk = rows[start : start + step]
        yield chunk if chunk.dtype == torch.float64 else chunk.float()


def _nonfinite(tensor: Tensor) -> tuple[int, tuple[int, ...] | None]:
    """How many entries are NaN or infinite, and the index of the first."""
    flat = tensor.reshape(1, -1) if tensor.ndim < 2 else tensor.flatten(1)
    count, first, seen = 0, None, 0
    for chunk in _chunks(flat):
        bad = ~torch.isfinite(chunk)
        here = int(bad.sum())
        if here and first is None:
            row, column = (int(v) for v in bad.nonzero()[0])
            first = _unravel((seen + row) * flat.shape[1] + column, tuple(tensor.shape))
        count, seen = count + here, seen + len(chunk)
    return count, first


def _unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    found = []
    for size in reversed(shape):
        index, rest = divmod(index, size)
        found.append(rest)
    return tuple(reversed(found))


def _filters(tensor: Tensor, layout: Layout, name: str, notes: tuple[str, ...]) -> dict[str, Any]:
    matrices = matrix_view(tensor, layout)
    groups, n, d = matrices.shape
    norms = torch.cat([filter_norms(chunk) for chunk in _chunks(matrices.reshape(-1, d))]).double()
    fine = torch.isfinite(norms)
    values: dict[str, Any] = {"groups": groups, "filters": n, "dim": d, **_norms(norms[fine], d)}
    whole = bool(fine.all())
    if not whole:
        notes = (*notes, f"{int((~fine).sum())} filters with non-finite entries left out")
    pairs = measure_pairs(matrices, name=name) if whole else _finite_pairs(matrices, fine, name)
    values |= _chance(pairs, n, d) if pairs else {"pairs": 0}
    if pairs and pairs.sampled:
        notes = (*notes, f"angles from {pairs.sampled} of {n} filters, drawn at random")
        if pairs.hashed:
            notes = (*notes, "near duplicates sought among all of them by hashing")
    if whole and bool((norms > 0).any()):
        values |= _spectrum(matrices, norms)
    return {**values, "notes": notes}


def _finite_pairs(matrices: Tensor, fine: Tensor, name: str) -> Pairs | None:
    """Filters with a non-finite entry become zero filters, which have no direction."""
    kept = fine.view(matrices.shape[:2]).unsqueeze(-1)
    return measure_pairs(torch.where(kept, matrices, torch.zeros_like(matrices)), name=name)


def _norms(norms: Tensor, dim: int) -> dict[str, Any]:
    if not norms.numel():
        return {"zero_filters": 0}
    square = float(norms.square().sum())
    points = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0], dtype=norms.dtype, device=norms.device)
    ordered = norms.sort().values
    places = (points * (len(ordered) - 1)).round().long()  # torch.quantile refuses more than 2^24 numbers
    return {
        "rms": sqrt(square / (norms.numel() * dim)),
        "frobenius": sqrt(square),
        "norm_mean": float(norms.mean()),
        "norm_std": float(norms.std(correction=0)),
        "norm_quantiles": tuple(ordered[places].tolist()),
        "norm_nonzero_min": float(ordered[ordered > 0][0]) if bool((ordered > 0).any()) else None,
        "zero_filters": int((norms == 0).sum()),
    }


def _chance(pairs: Pairs, n: int, d: int) -> dict[str, Any]:
    """The pairs' figures beside those of random directions.

    Cosines of different pairs are pairwise independent with Var cos² = 2(d−1)/(d²(d+2)), so the standard
    deviation of d·mean cos² over N unordered pairs is √(2(d−1)/((d+2)N)), exactly.
    """
    deviation = sqrt(2 * (d - 1) / ((d + 2) * pairs.count))
    alignment = d * pairs.mean_square_cosine
    return {
        "pairs": pairs.count,
        "angle_mean": pairs.angle_mean,
        "angle_std": pairs.angle_std,
        "angle_std_random": angle_std_at_random(d),
        "alignment": alignment,
        "alignment_z": (alignment - 1) / deviation if deviation else 0.0,
        "coherence": pairs.coherence,
        "coherence_random": coherence_at_random(pairs.count, d),
        "welch_bound": welch_bound(n, d),
        "near_duplicates": pairs.near,
        "closest": pairs.closest,
        "angle_histogram": pairs.histogram,
    }


def _spectrum(matrices: Tensor, norms: Tensor) -> dict[str, Any]:
    groups, n, d = matrices.shape
    square = float(norms.square().sum())
    edge = sqrt(square / (prod(matrices.shape))) * (sqrt(n) + sqrt(d))
    values: dict[str, Any] = {"sigma_random": edge, "stable_rank_random": square / edge**2}
    if groups * n * d * min(n, d) <= EXACT_WORK:
        singular = spectrum(matrices.reshape(groups, n, d)).values.flatten()
        top = float(singular.max())
        share = singular.double() / singular.double().sum()
        values["effective_rank"] = float(torch.special.entr(share).sum().exp())
    else:
        top = float(max(spectral_norm(matrix.float(), steps=STEPS) for matrix in matrices))
    return {**values, "sigma_max": top, "stable_rank": square / top**2 if top else 0.0}
