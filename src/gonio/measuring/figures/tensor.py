"""The figures of one tensor, each beside the value for random weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from math import isfinite, prod, sqrt
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from gonio.errors import GonioError, cause_of
from gonio.escaping import plain
from gonio.execution import one_thread
from gonio.geometry import (
    Layout,
    chance,
    conv_spectral_norm_estimate,
    marchenko_pastur,
    matrix_view,
    quantization_error,
    welch_bound,
)
from gonio.geometry.blocks import COSINE_WIDTH, GramMatrix, NormSummary, count_nonfinite, have_direction, row_norms
from gonio.geometry.conv_operator import periodic_grid
from gonio.geometry.duplicates import ROUNDING, SEARCHED, earliest_parallel, zero_nonfinite
from gonio.geometry.norms import computed_in
from gonio.geometry.pairs import PairStatistics, neighbour_ratio, pair_statistics, pair_statistics_of_each
from gonio.geometry.spectra import Spectrum, SpectrumEstimate, shared_gram, singular_values_of_each, spectrum_estimate
from gonio.geometry.views import PLAIN
from gonio.measuring.reading.entry import (
    ADDITIVE_MASK,
    NOTES,
    Mark,
    TensorEntry,
    are_sinusoids,
    dtype_name,
    fills_up,
    header_of,
    holds_variances,
    is_additive_mask,
    may_be_fixed,
    negative_variances,
    numbers_of,
    why_no_filters,
)
from gonio.measuring.showing.table import Column
from gonio.messages import counted, fixed, say
from gonio.plots import angles, spectrum

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ExtraFigure = Literal["operator_norm", "quantisation", "blocks"]  # measured on request
ExtraFigures = Collection[ExtraFigure]
EXTRA_FIGURES = get_args(ExtraFigure)
_STACKED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_GROUPS = (128, 32)  # entries that share a scale
GRID = 16  # positions in each dimension of the periodic grid of an operator norm
SMALL = 1 << 16  # entries of a tensor up to which it is measured together with others of its shape
LISTED = 1000  # filters of one kind that a row names
POSITIONS = 1 << 14  # rows up to which a table may be one of positions
STACK = 1 << 19  # entries of such tensors measured at once: 4 MiB in float64


def figure(
    title: str = "", explanation: str = "", width: int = 6, form: str = "", *, tracked: bool = False, **options: Any
) -> Any:
    """A field of a measurement that is None where it does not apply: the one place that declares a figure.

    Tables, pages and exports follow from it. A rule on it stands in `findings/rules.py`, its text in `rules.yaml`.

    Args:
        title, explanation, width, options: of its :class:`Column`, for a figure that has one.
        form: of the figure, or of the figure and its value for random weights; "" for a number of three digits.
        tracked: whether :class:`gonio.Tracker` logs it.
    """
    column: Column[TensorMeasurement] | None = Column("", title, explanation, width, **options) if title else None
    return field(default=None, metadata={"column": column, "form": form, "tracked": tracked})


def rounding(title: str, scales: str) -> Any:
    """The field of an error of rounding, which is measured on request."""
    what = say("‖Ŵ − W‖/‖W‖ after rounding to integers of {scales}", scales=fixed(scales))
    return figure(title, what, 8, "{:.2%}" if title.startswith("int8") else "{:.1%}", requested=True)


@dataclass(frozen=True, kw_only=True, repr=False)
class TensorMeasurement:
    r"""One tensor of a model: norms and angles of its filters, its spectrum, and the values for random weights.

    A filter is one output's weights, flattened: n filters of length d in each of `groups` matrices. Only
    filters of one group are compared, because others have other inputs. Figures that do not apply are None:
    a depthwise convolution has no pairs, a bias no filters.

    Attributes:
        status: `measured`; `no filters` (checked for non-finite values only); `skipped`.
        reason: why it is not `measured`. `notes`: remarks on how it was read; `marks`: what of them rules ask for.
        negative_variances: running variances below 0.
        entries, nonfinite: number of entries, and of those that are NaN or infinite, without those of an additive
            mask. Filters with such entries are left out of all other figures.
        rms, frobenius: root mean square of the entries; square root of the sum of their squares.
        zero_filters: filters whose entries are all 0 (dead, unless training starts there on purpose).
            `zero_indices`: the first thousand of them, counted over all groups.
        norm_quantiles: minimum, quartiles and maximum of the filter norms. `norm_nonzero_min`: the smallest that is
            not 0.
        angle_mean, angle_std: over all pairs, in degrees. `angle_std_random`: that of random directions
            (their mean is 90).
        alignment: mean squared cosine times d: 1 for random directions, 0 for orthogonal filters.
            `alignment_error`: its standard error; 0 where all pairs were counted, and not a sample.
            `alignment_z`: its distance from 1 in standard deviations of random weights.
        coherence: largest absolute cosine. `coherence_random`: its median for random directions;
            `welch_bound`: its lower bound for n vectors in d dimensions.
        near_duplicates: pairs with an absolute cosine of at least 0.95; `near_antipodal`: those with a negative one.
            `closest`: the two filters whose absolute cosine is the coherence, counted over all groups.
        proportional: each filter that is a multiple of an earlier one of its group up to the rounding of float32, with
            that one, counted over all groups; of a weight too large to search, `closest`.
        sigma_max, sigma_min, stable_rank, effective_rank: of the matrices as one block-diagonal matrix.
            `sigma_random`, `stable_rank_random`: for independent entries of the same root mean square.
            `sigma_error`: 0 where all singular values were computed; for a larger weight an upper bound of the share
            by which `sigma_max` is too small, with a probability of 99 %; usually the error is 100 times smaller.
        spectrum_distance: of the distribution of squared singular values from the Marchenko–Pastur law for
            entries of the same root mean square: largest difference of the distribution functions, between 0 and 1.
            `spectrum_distance_random`: that of one random matrix.
        spectrum_outliers: singular values above the 99.9 % quantile of the largest one of a random matrix;
            `spectrum_outlier_share`: their share of the squared norm.
        spectrum_quantiles: of all singular values, at 33 equal steps from the smallest to the largest.
        orthogonality_defect: root mean square of the squared singular values over their mean, minus 1: 0 exactly for
            multiples of semi-orthogonal matrices. `orthogonality_defect_random`: for normal entries.
        operator_norm: of the layer as a linear map: `sigma_max` for linear layers and 1×1 kernels; for other
            convolutions the norm on a periodic grid, measured on request (`extra_figures`).
        int8_tensor_error, int8_channel_error, int4_tensor_error, int4_channel_error, int4_128_error, int4_32_error: the
            relative error of rounding to integers of 8 or 4 bits (:func:`gonio.geometry.quantization_error`) with one
            scale per tensor, per filter, or per 128 or 32 consecutive entries of a filter, of layers without a kernel
            whose filters can be cut so; measured on request.
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
    marks: tuple[Mark, ...] = ()
    negative_variances: int = 0
    entries: int = 0
    nonfinite: int = 0
    first_nonfinite: tuple[int, ...] | None = None
    groups: int | None = None
    filters: int | None = None
    dim: int | None = None
    rms: float | None = None
    frobenius: float | None = figure(tracked=True)
    norm_mean: float | None = figure(tracked=True)
    norm_std: float | None = figure(tracked=True)
    norm_quantiles: tuple[float, ...] | None = figure(tracked=True)
    norm_nonzero_min: float | None = None
    zero_filters: int | None = figure("zero", "filters whose entries are all 0", 4, tracked=True)
    zero_indices: tuple[int, ...] = ()
    pairs: int | None = None
    angle_mean: float | None = figure(tracked=True)
    angle_std: float | None = figure(tracked=True)
    angle_std_random: float | None = figure("chance", "standard deviation of angles of random directions", 6, "±{:.1f}")
    alignment: float | None = figure(
        "align", "d · mean cos²: 1 for random directions, 0 for orthogonal filters", tracked=True
    )
    alignment_error: float | None = None
    alignment_z: float | None = figure(
        "z", "distance of align from 1 in standard deviations of random weights", 7, tracked=True
    )
    coherence: float | None = figure("coher.", "largest |cos|", tracked=True)
    coherence_random: float | None = figure("chance", "median of the largest |cos| of random directions", 6, "{:.2f}")
    welch_bound: float | None = figure("Welch", "least possible largest |cos|")
    near_duplicates: int | None = figure("near", "pairs of filters with |cos| ≥ 0.95; in brackets the opposite ones")
    near_antipodal: int | None = None
    closest: tuple[int, int] | None = None
    proportional: tuple[tuple[int, int], ...] = ()
    sigma_max: float | None = figure(tracked=True)
    sigma_min: float | None = None
    sigma_error: float | None = None
    sigma_random: float | None = None
    stable_rank: float | None = figure("s.rank", "stable rank ‖W‖²/σ²", spectral=True, tracked=True)
    stable_rank_random: float | None = None
    effective_rank: float | None = figure(
        "e.rank", "effective rank: exp of the entropy of the singular values", spectral=True
    )
    spectrum_distance: float | None = figure(
        "bulk", "distance from Marchenko–Pastur, 0 to 1 · by chance", 9, "{:.2f} · {:.2f}", spectral=True
    )
    spectrum_distance_random: float | None = None
    spectrum_outliers: int | None = figure(
        "beyond", "σ above those of random weights (share of ‖W‖²)", 8, spectral=True
    )
    spectrum_outlier_share: float | None = None
    spectrum_quantiles: tuple[float, ...] | None = None
    orthogonality_defect: float | None = figure(
        "orth.", "spread of σ², 0 if orthogonal · by chance", 9, "{:.2f} · {:.2f}", spectral=True
    )
    orthogonality_defect_random: float | None = None
    operator_norm: float | None = figure("‖layer‖", "operator norm of the layer", 7, spectral=True)
    int8_tensor_error: float | None = rounding("int8", "8 bits with one scale per tensor")
    int8_channel_error: float | None = rounding("int8 ch.", "8 bits with one scale per filter")
    int4_tensor_error: float | None = rounding("int4", "4 bits with one scale per tensor")
    int4_channel_error: float | None = rounding("int4 ch.", "4 bits with one scale per filter")
    int4_128_error: float | None = rounding("int4 128", "4 bits with one scale per 128 entries of a filter")
    int4_32_error: float | None = rounding("int4 32", "4 bits with one scale per 32 entries of a filter")
    angle_histogram: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        figures = "" if self.filters is None else f": {counted(self.total_filters, 'filter')} of length {self.dim}"
        angles = "" if self.alignment is None else f", alignment {self.alignment:.3g}"
        why = f": {plain(self.reason)}" if self.reason else ""
        return f"<{plain(self.path)} ({plain(self.kind)}){figures}{angles}{why}>"

    def plot_angles(self, ax: Axes | None = None) -> Figure:
        """Histogram of the angles between the filters, see :func:`gonio.plots.angles`."""
        return angles(self, ax=ax)

    def plot_spectrum(self, ax: Axes | None = None) -> Figure:
        """Singular values beside those of a random matrix, see :func:`gonio.plots.spectrum`."""
        return spectrum(self, ax=ax)

    @property
    def total_filters(self) -> int:
        """Filters of all groups; 0 for a tensor without filters."""
        return (self.groups or 0) * (self.filters or 0)


TRACKED = tuple(
    name
    for declared in fields(TensorMeasurement)
    if declared.metadata.get("tracked")
    for name in (("norm_min", "norm_max") if declared.name == "norm_quantiles" else (declared.name,))
)


def alike(entries: Sequence[TensorEntry], numbers: Sequence[int]) -> Iterator[list[int]]:
    """The numbers of entries in parts for :func:`measure_tensors`: small tensors of one shape together.

    A part has at most :data:`STACK` entries, or one tensor.
    """
    waiting: dict[Any, list[int]] = {}
    for number in numbers:
        entry = entries[number]
        shape, layout = entry.shape or (), entry.layout
        most = STACK // size if 0 < (size := prod(shape)) <= SMALL else 1
        if layout is None or layout.matrices > 1 or len(shape) < 2 or most < 2:
            yield [number]
            continue
        part = waiting.setdefault(key := (shape, entry.dtype, layout), [])
        part.append(number)
        if len(part) == most:
            yield waiting.pop(key)
    yield from waiting.values()


@torch.no_grad()
def measure_tensors(
    entries: Sequence[TensorEntry], *, extra_figures: ExtraFigures = (), deep: bool = False
) -> list[TensorMeasurement]:
    """The measurements of a part of :func:`alike`; figures of ordinary tensors of one shape are computed at once."""
    if len(entries) == 1:
        return [measure_tensor(entries[0], extra_figures=extra_figures, deep=deep)]
    loaded = [_loaded(entry) for entry in entries]
    made = {} if "quantisation" in extra_figures else _together(entries, loaded)
    return [
        made[number] if number in made else _guarded(entry, loaded[number], extra_figures, deep=deep)
        for number, entry in enumerate(entries)
    ]


@torch.no_grad()
def measure_tensor(entry: TensorEntry, *, extra_figures: ExtraFigures = (), deep: bool = False) -> TensorMeasurement:
    """The measurement of one tensor; never raises because of the tensor: the row has the reason instead.

    With `deep`, all pairs and all singular values of large weights too.
    """
    return _guarded(entry, _loaded(entry), extra_figures, deep=deep)


def _loaded(entry: TensorEntry) -> Any:
    """What the entry's `load` returns, or the exception that it raised."""
    try:
        return None if entry.load is None or entry.role == "unknown" else entry.load()
    except Exception as error:  # reading a weight runs the model's own code, which may raise anything
        return error


def _guarded(entry: TensorEntry, raw: Any, extra_figures: ExtraFigures, *, deep: bool) -> TensorMeasurement:
    """The row of what was loaded, or of the reason why there are no figures."""
    if entry.load is None or entry.role == "unknown":
        return _row(entry, status="skipped", reason=entry.reason)
    try:
        if isinstance(raw, Exception):
            raise raw
        return _measured(entry, raw, extra_figures, deep=deep)
    except Exception as error:  # as in _loaded: a tensor's class may have code of its own too
        return _row(entry, status="skipped", reason=f"cannot be read: {cause_of(error)}", marks=("failed",))


@one_thread()
def _together(entries: Sequence[TensorEntry], loaded: Sequence[Any]) -> dict[int, TensorMeasurement]:
    """The rows of the ordinary ones among small tensors of one shape, by number.

    Ordinary are finite tensors in memory that are filters, each of which has a direction.
    """
    layout, shape = entries[0].layout, entries[0].shape
    plainly = [n for n, raw in enumerate(loaded) if type(raw) in (Tensor, nn.Parameter) and raw.shape == shape]
    plainly = [n for n in plainly if loaded[n].is_cpu and loaded[n].dtype in _STACKED]
    plainly = [n for n in plainly if loaded[n].layout == torch.strided]  # sparse ones are not stacked
    if layout is None or len({loaded[n].dtype for n in plainly}) != 1:
        return {}
    stack = torch.stack([loaded[n].detach() for n in plainly])
    matrices = stack.transpose(1, 2).flatten(2) if layout.transposed else stack.flatten(2)
    k, n, d = matrices.shape
    if n > COSINE_WIDTH:
        return {}
    norms = row_norms(matrices.reshape(k * n, d)).view(k, n)
    fine = torch.isfinite(stack.flatten(1).sum(1, dtype=computed_in(stack.dtype))) & torch.isfinite(norms.sum(1))
    fine = (fine & have_direction(norms, stack.dtype).all(1) & ~may_be_fixed(stack)).nonzero().flatten()
    if not len(fine):
        return {}
    figures = _filters_of_each(matrices[fine], norms[fine])
    known: dict[str, Any] = {"shape": tuple(stack.shape[1:]), "dtype": dtype_name(stack.dtype)}
    known |= {"entries": n * d, "status": "measured"}
    whole = prod(stack.shape[3:]) == 1
    made = {}
    for number, values in zip((plainly[place] for place in fine.tolist()), figures, strict=True):
        entry = entries[number]
        in_order = entry.table and layout == PLAIN and _in_order(loaded[number].detach(), values)
        values |= {"notes": (*entry.notes, NOTES["ordered"]), "marks": (*entry.marks, "ordered")} if in_order else {}
        values |= {"operator_norm": values["sigma_max"]} if whole else {}
        made[number] = _row(entry, **known, **values)
    return made


def _measured(entry: TensorEntry, raw: Any, extra_figures: ExtraFigures, *, deep: bool) -> TensorMeasurement:
    """The row of what the entry's `load` returned."""
    if not isinstance(raw, Tensor):
        return _row(entry, status="skipped", reason=f"not a tensor but {type(raw).__name__}")
    numbers = numbers_of(raw)
    tensor, notes = numbers.tensor, (*entry.notes, *numbers.notes)
    shape, dtype = header_of(raw)
    known: dict[str, Any] = {"shape": shape, "dtype": dtype, "entries": raw.numel(), "marks": entry.marks}
    if tensor is None:
        part = entry.role == "part"
        status = "skipped" if numbers.skipped and not part else "no filters"
        if raw.is_meta and entry.layout is not None and raw.ndim >= 2:
            known |= zip(("groups", "filters", "dim"), matrix_view(raw, entry.layout).shape, strict=True)
        return _row(entry, **known, status=status, reason=entry.reason if part else numbers.reason, notes=notes)
    del raw  # a quantised tensor is released once its values are computed
    known["nonfinite"], known["first_nonfinite"] = count_nonfinite(tensor)
    if known["nonfinite"] > 1 and is_additive_mask(tensor, known["nonfinite"]):
        known |= {"nonfinite": 0, "first_nonfinite": None}
        reason = ADDITIVE_MASK
        return _row(entry, **known, status="no filters", reason=reason, notes=notes)
    if holds_variances(entry.name) and (negative := int((tensor.to(computed_in(tensor.dtype)) < 0).sum())):
        notes, known["negative_variances"] = (*notes, negative_variances(negative)), negative
    if holds_variances(entry.name) and tensor.numel() and not tensor.any():
        notes, known["marks"] = (*notes, NOTES["no variance"]), (*known["marks"], "no variance")
    if entry.layout is None or tensor.ndim < 2:
        reason = entry.reason or f"{tensor.ndim}-d: no filters"
        return _row(entry, **known, status="no filters", reason=reason, notes=notes)
    if tensor.ndim == 2 and entry.layout == PLAIN and are_sinusoids(tensor):
        reason = "sines and cosines of positions: fixed, not trained"
        return _row(entry, **known, status="no filters", reason=reason, notes=notes)
    lone = entry.inferred and entry.layout == PLAIN and tensor.shape[1] == 1
    if entry.inferred and (why := why_no_filters(tensor, lone=lone)):
        return _row(entry, **known, status="no filters", reason=why, notes=notes)
    values = _filters(tensor, entry.layout, entry.name, notes, deep=deep)
    marked: list[Mark] = []
    if values["zero_filters"] == 1 and values["zero_indices"][0] in entry.padding:
        marked.append("maybe padding")
    if entry.table and fills_up(values["zero_filters"], tensor.shape[0], values.get("zero_indices", ())):
        marked.append("filled")
    if entry.table and entry.layout == PLAIN and _in_order(tensor, values):
        marked.append("ordered")
    known["marks"] = (*known["marks"], *marked)
    values["operator_norm"], said = _operator_norm(tensor, entry.layout, extra_figures, values.get("sigma_max"))
    values["notes"] = (*values["notes"], *(NOTES[mark] for mark in marked), *([said] if said else []))
    if "quantisation" in extra_figures and "sigma_max" in values:
        values |= _rounding_errors(matrix_view(tensor, entry.layout), prod(tensor.shape[2:]))
    return _row(entry, **known, status="measured", **values)


def _in_order(table: Tensor, values: dict[str, Any]) -> bool:
    """Whether the order of a table's rows explains that they are alike: half of their distances, by 4 deviations.

    Neighbours in five trained tables of positions that seem to collapse have 0.15 to 0.33 of the distance of all pairs,
    those in two that do not 0.62 and 0.88, those in the other matrices of these networks 0.82 or more.
    """
    if len(table) > POSITIONS or not values["pairs"]:
        return False
    ratio, deviation = neighbour_ratio(table, values["alignment"] / values["dim"])
    return ratio < min(0.5, 1 - 4 * deviation)


def _row(entry: TensorEntry, **values: Any) -> TensorMeasurement:
    base = {"name": entry.name, "path": entry.path, "kind": entry.kind, "shape": (), "dtype": ""}
    made = {**base, "notes": entry.notes, "marks": entry.marks, **values}
    if entry.table:
        made["marks"] = ("table", *made["marks"])
    return TensorMeasurement(**made)


def _filters(tensor: Tensor, layout: Layout, name: str, notes: tuple[str, ...], *, deep: bool) -> dict[str, Any]:
    matrices = matrix_view(tensor, layout)
    groups, n, d = matrices.shape
    norms = torch.cat([row_norms(matrix) for matrix in matrices]).cpu()
    fine = norms if isfinite(float(norms.sum())) else norms[torch.isfinite(norms)]
    values: dict[str, Any] = {"groups": groups, "filters": n, "dim": d, "zero_filters": 0}
    if len(fine):
        values |= norm_figures(NormSummary.of(fine, d))
    if values["zero_filters"]:
        values["zero_indices"] = tuple((norms == 0).nonzero().flatten()[:LISTED].tolist())
    if len(fine) < len(norms):
        notes = (*notes, f"{counted(len(norms) - len(fine), 'filter')} with non-finite entries left out")
    whole = len(fine) == len(norms) > values["zero_filters"]
    gram = shared_gram(matrices) if whole else None
    pairs = pair_statistics(matrices, name=name, gram=gram, deep=deep)
    values |= _angles(pairs, n, d) if pairs else {"pairs": 0}
    values["proportional"] = _proportional(matrices, pairs)
    if pairs is not None and pairs.sampled:
        error = f"{2 * pairs.alignment_error:.2g}"
        where = "among all of them" if pairs.searched else "among those drawn alone"
        drawn = f"angles from {pairs.sampled} of {n} filters, drawn at random: alignment ± {error} (95 %)"
        notes = (*notes, drawn, f"near duplicates sought {where}")
    if whole:
        singular = spectrum_estimate(matrices, name=name, gram=gram, deep=deep)
        values |= _spectrum(singular, matrices.shape, values["frobenius"])
    return {**values, "notes": notes}


def _filters_of_each(matrices: Tensor, norms: Tensor) -> Iterator[dict[str, Any]]:
    """The figures of `_filters`, of each of some finite matrices of one size without a zero filter."""
    _, n, d = matrices.shape
    gram = GramMatrix.of(matrices)
    singular = singular_values_of_each(matrices, gram)
    columns = (NormSummary.of_each(norms, d), pair_statistics_of_each(matrices, gram), _values(singular, n, d))
    rows = zip(*columns, singular[:, -1].tolist(), matrices, strict=True)
    for found, pairs, values, largest, matrix in rows:
        yield {
            "groups": 1,
            "filters": n,
            "dim": d,
            **norm_figures(found),
            **(_angles(pairs, n, d) if pairs else {"pairs": 0}),
            "proportional": _proportional(matrix[None], pairs),
            **_edge(SpectrumEstimate(largest, 0.0, None), (1, n, d), found.frobenius),
            **values,
        }


def norm_figures(found: NormSummary) -> dict[str, Any]:
    """The figures of a measurement that follow from the norms of its filters."""
    return {
        "rms": found.rms,
        "frobenius": found.frobenius,
        "norm_mean": found.mean,
        "norm_std": found.std,
        "norm_quantiles": found.quantiles,
        "norm_nonzero_min": found.nonzero_min,
        "zero_filters": found.zeros,
    }


def _angles(pairs: PairStatistics, n: int, d: int) -> dict[str, Any]:
    return {
        "pairs": pairs.count,
        "angle_mean": pairs.angle_mean,
        "angle_std": pairs.angle_std,
        "angle_std_random": chance.random_angle_std(d),
        "alignment": pairs.alignment,
        "alignment_error": pairs.alignment_error,
        "alignment_z": pairs.alignment_zscore,
        "coherence": pairs.coherence,
        "coherence_random": chance.random_coherence(pairs.count, d),
        "welch_bound": welch_bound(n, d),
        "near_duplicates": pairs.near,
        "near_antipodal": pairs.opposite,
        "closest": pairs.closest,
        "angle_histogram": pairs.histogram,
    }


def _proportional(matrices: Tensor, pairs: PairStatistics | None) -> tuple[tuple[int, int], ...]:
    """Each filter that is proportional to an earlier one of its matrix, and that one, counted over all matrices."""
    if pairs is None or pairs.coherence < 1 - ROUNDING:
        return ()
    n = matrices.shape[1]
    found: list[tuple[int, int]] = []
    for index, matrix in enumerate(matrices):
        if matrix.numel() > SEARCHED:
            continue
        wide = zero_nonfinite(matrix.to(computed_in(matrix.dtype)))
        earliest = earliest_parallel(wide, cosine=1 - ROUNDING)
        copies = (earliest < torch.arange(n, device="cpu")).nonzero().flatten()
        found += zip((copies + index * n).tolist(), (earliest[copies] + index * n).tolist(), strict=True)
    return tuple(found) or (pairs.closest[::-1],)


def _spectrum(found: SpectrumEstimate, shape: torch.Size, frobenius: float) -> dict[str, Any]:
    values = {} if found.values is None else next(_values(found.values[None], *shape[1:]))
    return _edge(found, shape, frobenius) | values


def _edge(found: SpectrumEstimate, shape: Sequence[int], frobenius: float) -> dict[str, Any]:
    _, n, d = shape
    edge = marchenko_pastur(n, d, std=frobenius / sqrt(prod(shape))).upper
    return {
        "sigma_max": found.largest,
        "sigma_error": found.error,
        "sigma_random": edge,
        "stable_rank": found.stable_rank(frobenius),
        "stable_rank_random": (frobenius / edge) ** 2,
    }


def _values(singular: Tensor, n: int, d: int) -> Iterator[dict[str, Any]]:
    """The figures of all singular values of n×d matrices, smallest first, in a row for each tensor."""
    ordered = singular.cpu().numpy()
    places = np.arange(33) * ((ordered.shape[1] - 1) / 32)
    low = places.astype(np.intp).clip(max=max(ordered.shape[1] - 2, 0))
    below, above = ordered[:, low], ordered[:, (low + 1).clip(max=ordered.shape[1] - 1)]
    quantiles = (below + (above - below) * (places - low)).tolist()
    ranks = Spectrum(singular.flip(1)).effective_rank.tolist()
    deviations = chance.spectrum_deviations(singular, n, d)
    for least, rank, steps, deviation in zip(ordered[:, 0].tolist(), ranks, quantiles, deviations, strict=True):
        values = {"sigma_min": least, "effective_rank": rank, "spectrum_quantiles": tuple(steps)}
        if deviation is not None:
            values |= {
                "spectrum_distance": deviation.distance,
                "spectrum_distance_random": chance.random_spectrum_distance(n, d),
                "spectrum_outliers": deviation.outliers,
                "spectrum_outlier_share": deviation.outlier_share,
                "orthogonality_defect": deviation.defect,
                "orthogonality_defect_random": chance.random_orthogonality_defect(n, d),
            }
        yield values


def _rounding_errors(matrices: Tensor, positions: int) -> dict[str, float]:
    """Those of matrices of finite entries; the kernel has so many positions."""
    scales: list[tuple[int, Literal["tensor", "channel"]]] = [(b, per) for b in (8, 4) for per in ("tensor", "channel")]
    found = {f"int{b}_{per}_error": quantization_error(matrices, bits=b, per=per) for b, per in scales}
    sizes = [size for size in _GROUPS if positions == 1 and matrices.shape[-1] % size == 0]
    return found | {f"int4_{size}_error": quantization_error(matrices, bits=4, per=size) for size in sizes}


def _operator_norm(
    tensor: Tensor, layout: Layout, extra_figures: ExtraFigures, sigma_max: float | None
) -> tuple[float | None, str]:
    """The norm of the layer as a linear map, or None, and a note: the grid, or why there is no norm.

    Args:
        sigma_max: of the filters' matrix: the same number for linear layers and kernels of one position.
    """
    kernel = tensor.shape[2:]
    if sigma_max is None or prod(kernel) == 1:
        return sigma_max, ""
    if "operator_norm" not in extra_figures:
        return None, ""
    grid = periodic_grid(tensor.shape, layout, least=GRID)
    wide = tensor.to(computed_in(tensor.dtype))
    try:
        found = conv_spectral_norm_estimate(wide, grid, layout=replace(layout, padding_mode="circular"))
    except GonioError as error:
        return None, f"no operator norm: {error}"
    return float(found), f"operator norm on a periodic grid of {'×'.join(map(str, grid))}"
