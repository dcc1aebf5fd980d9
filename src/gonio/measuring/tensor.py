"""Everything that is measured on one tensor, each figure beside what random weights would show."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor

from gonio.geometry import Layout, matrix_view, welch_bound
from gonio.measuring.blocks import count_nonfinite, norms_of
from gonio.measuring.bulk import bulk_of, defect_at_random, distance_at_random
from gonio.measuring.chance import angle_std_at_random, coherence_at_random
from gonio.measuring.entry import PART, Entry
from gonio.measuring.gram import Gram
from gonio.measuring.numbers import numbers_of
from gonio.measuring.operator_norm import Also, operator_norm
from gonio.measuring.pairs import Pairs, measure_pairs
from gonio.measuring.spectra import gram_for, spectra_of

__all__ = ["TensorMeasurement", "measure_tensor"]


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
            `alignment_error`: its standard error; 0 where all pairs were counted, and not a sample.
            `alignment_z`: its distance from 1 in standard deviations of random weights.
        coherence: largest absolute cosine. `coherence_random`: median of random directions;
            `welch_bound`: the least that is possible.
        near_duplicates: pairs with an absolute cosine of at least 0.95; `near_antipodal`: those of them that point in
            opposite directions. `closest`: the two filters whose
            absolute cosine is the coherence, counted over all groups.
        sigma_max, sigma_min, stable_rank, effective_rank: of the matrices as one block-diagonal matrix.
            `sigma_random`, `stable_rank_random`: for independent entries of the same root mean square.
            `sigma_error`: 0 where all singular values were computed; for a larger weight the share by which
            `sigma_max` is too small at most, with a probability of 99 %, and usually a hundred times less.
        spectrum_distance: of the distribution of squared singular values from the law of Marchenko and Pastur for
            entries of the same root mean square: largest difference of the distribution functions, between 0 and 1.
            `spectrum_distance_random`: what one random matrix shows.
        spectrum_outliers: singular values beyond what the largest of a random matrix reaches once in 1000;
            `spectrum_outlier_share`: of the squared norm that they hold.
        orthogonality_defect: root mean square of the squared singular values over their mean, minus 1: 0 exactly for
            multiples of semi-orthogonal matrices. `orthogonality_defect_random`: of normal entries.
        operator_norm: of the layer as a map: `sigma_max` for linear layers and 1×1 kernels, and for other convolutions
            the norm on a periodic grid, if it was asked for (`also`).
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
    alignment_error: float | None = None
    alignment_z: float | None = None
    coherence: float | None = None
    coherence_random: float | None = None
    welch_bound: float | None = None
    near_duplicates: int | None = None
    near_antipodal: int | None = None
    closest: tuple[int, int] | None = None
    sigma_max: float | None = None
    sigma_min: float | None = None
    sigma_error: float | None = None
    sigma_random: float | None = None
    stable_rank: float | None = None
    stable_rank_random: float | None = None
    effective_rank: float | None = None
    spectrum_distance: float | None = None
    spectrum_distance_random: float | None = None
    spectrum_outliers: int | None = None
    spectrum_outlier_share: float | None = None
    orthogonality_defect: float | None = None
    orthogonality_defect_random: float | None = None
    operator_norm: float | None = None
    angle_histogram: tuple[int, ...] | None = None


@torch.no_grad()
def measure_tensor(entry: Entry, *, also: Also = ()) -> TensorMeasurement:
    """The measurement of one tensor; never raises for what the tensor holds: it says why instead.

    Args:
        also: figures that take longer than the others together.
    """
    if entry.load is None:
        return _row(entry, status="skipped", reason=entry.reason)
    try:
        tensor, known, notes = _loaded(entry)
        if tensor is None:
            return _row(entry, **known)
        known["nonfinite"], known["first_nonfinite"] = count_nonfinite(tensor)
        if entry.layout is None or tensor.ndim < 2:
            reason = entry.reason or f"{tensor.ndim}-d: no filters"
            return _row(entry, **known, status="no filters", reason=reason, notes=notes)
        values = _filters(tensor, entry.layout, entry.name, notes)
        values["operator_norm"], said = operator_norm(tensor, entry.layout, also, values.get("sigma_max"))
        values["notes"] = (*values["notes"], *([said] if said else []))
        return _row(entry, **known, status="measured", **values)
    except Exception as error:  # reading a weight runs the model's own code, which may raise anything
        return _row(entry, status="skipped", reason=f"cannot be read: {_said(error)}")


def _said(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def _loaded(entry: Entry) -> tuple[Tensor | None, dict[str, Any], tuple[str, ...]]:
    """The tensor's numbers, what is known of it without them, and notes; the row's reason where it has none."""
    raw = entry.load() if entry.load is not None else None
    if not isinstance(raw, Tensor):
        return None, {"status": "skipped", "reason": f"not a tensor but {type(raw).__name__}"}, ()
    numbers = numbers_of(raw)
    notes = (*entry.notes, *numbers.notes)
    known: dict[str, Any] = {"shape": tuple(raw.shape), "dtype": str(raw.dtype).removeprefix("torch.")}
    known["entries"] = raw.numel()
    if numbers.tensor is None:
        part = entry.kind == PART
        status = "skipped" if numbers.skipped and not part else "no filters"
        sizes = _sizes(raw, entry.layout) if raw.is_meta else {}
        reason = entry.reason if part else numbers.reason
        return None, {**known, **sizes, "status": status, "reason": reason, "notes": notes}, notes
    return numbers.tensor, known, notes


def _sizes(tensor: Tensor, layout: Layout | None) -> dict[str, Any]:
    """How many filters of what length there are: all that a shape tells."""
    if layout is None or tensor.ndim < 2:
        return {}
    return dict(zip(("groups", "filters", "dim"), matrix_view(tensor, layout).shape, strict=True))


def _row(entry: Entry, **values: Any) -> TensorMeasurement:
    base = {"name": entry.name, "path": entry.path, "kind": entry.kind, "shape": (), "dtype": ""}
    return TensorMeasurement(**{**base, "notes": entry.notes, **values})


def _filters(tensor: Tensor, layout: Layout, name: str, notes: tuple[str, ...]) -> dict[str, Any]:
    matrices = matrix_view(tensor, layout)
    groups, n, d = matrices.shape
    norms = torch.cat([norms_of(matrix) for matrix in matrices])
    fine = torch.isfinite(norms)
    values: dict[str, Any] = {"groups": groups, "filters": n, "dim": d, **_norms(norms[fine], d)}
    if not bool(fine.all()):
        notes = (*notes, f"{int((~fine).sum())} filters with non-finite entries left out")
    whole = bool(fine.all()) and bool((norms > 0).any())
    gram = gram_for(matrices) if whole else None
    pairs = measure_pairs(matrices, name=name, gram=gram)
    values |= _chance(pairs, n, d) if pairs else {"pairs": 0}
    notes = (*notes, *_sampling(pairs, n, d))
    if whole:
        values |= _spectrum(matrices, values["frobenius"], name, gram)
    return {**values, "notes": notes}


def _sampling(pairs: Pairs | None, n: int, d: int) -> tuple[str, ...]:
    """What the reader must know where not all pairs were counted."""
    if pairs is None or not pairs.sampled:
        return ()
    drawn = f"angles from {pairs.sampled} of {n} filters, drawn at random: alignment ± {2 * d * pairs.error:.2g} (95 %)"
    where = "among all of them" if pairs.searched else "among those drawn alone"
    return drawn, f"near duplicates sought {where}"


def _norms(norms: Tensor, dim: int) -> dict[str, Any]:
    if not norms.numel():
        return {"zero_filters": 0}
    most = float(norms.max())
    frobenius = float(torch.linalg.vector_norm(norms / (most or 1.0))) * most  # the square of 1e200 is no number
    points = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0], dtype=norms.dtype, device=norms.device)
    ordered = norms.sort().values
    places = (points * (len(ordered) - 1)).round().long()  # torch.quantile refuses more than 2^24 numbers
    return {
        "rms": frobenius / sqrt(norms.numel() * dim),
        "frobenius": frobenius,
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
        "alignment_error": d * pairs.error,
        "alignment_z": (alignment - 1) / deviation if deviation else 0.0,
        "coherence": pairs.coherence,
        "coherence_random": coherence_at_random(pairs.count, d),
        "welch_bound": welch_bound(n, d),
        "near_duplicates": pairs.near,
        "near_antipodal": pairs.opposite,
        "closest": pairs.closest,
        "angle_histogram": pairs.histogram,
    }


def _spectrum(matrices: Tensor, frobenius: float, name: str, gram: Gram | None) -> dict[str, Any]:
    _, n, d = matrices.shape
    found = spectra_of(matrices, name=name, gram=gram)
    edge = frobenius / sqrt(prod(matrices.shape)) * (sqrt(n) + sqrt(d))
    values: dict[str, Any] = {
        "sigma_max": found.largest,
        "sigma_error": found.error,
        "sigma_random": edge,
        "stable_rank": (frobenius / found.largest) ** 2 if found.largest else 0.0,
        "stable_rank_random": (frobenius / edge) ** 2,
    }
    if found.values is not None:
        share = found.values / found.values.sum()
        values["sigma_min"] = float(found.values.min())
        values["effective_rank"] = float(torch.special.entr(share).sum().exp())
        values |= _bulk(found.values, n, d)
    return values


def _bulk(values: Tensor, n: int, d: int) -> dict[str, Any]:
    """The spectrum beside the law of random matrices."""
    found = bulk_of(values, n, d)
    if found is None:
        return {}
    return {
        "spectrum_distance": found.distance,
        "spectrum_distance_random": distance_at_random(n, d),
        "spectrum_outliers": found.outliers,
        "spectrum_outlier_share": found.outlier_share,
        "orthogonality_defect": found.defect,
        "orthogonality_defect_random": defect_at_random(n, d),
    }
