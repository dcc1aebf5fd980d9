"""The columns of the table of layers: one list for the terminal, markdown and the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from gonio.measuring.tensor import TensorMeasurement

__all__ = ["COLUMNS", "Column", "columns_for", "number"]

Subject = TypeVar("Subject")


@dataclass(frozen=True)
class Column(Generic[Subject]):
    """One column.

    Attributes:
        title: its heading; `explanation`: what it is, and what random weights show.
        cell: a tensor's figure as text.
        rank: columns with the largest rank are left out first where the screen is narrow.
        width: characters it takes.
        spectral: whether a page shows it in the table of spectra.
    """

    title: str
    explanation: str
    cell: Callable[[Subject], str]
    rank: int
    width: int
    spectral: bool = False


def number(value: float | None, digits: int = 3) -> str:
    """A figure with `digits` significant digits, two below 1; a dash where there is none."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1:
        return (f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}").replace("-", "−")
    if not 1e-3 <= abs(value) < 1e5:
        return f"{value:.1e}".replace("-", "−")
    places = max(0, digits - 1 - (len(str(int(abs(value)))) - 1))
    return f"{value:.{min(places, digits - 1)}f}".replace("-", "−")


def _shape(t: TensorMeasurement) -> str:
    return "×".join(map(str, t.shape))


def _filters(t: TensorMeasurement) -> str:
    return f"{t.groups}·{t.filters}" if t.groups != 1 else str(t.filters)


def _norm(t: TensorMeasurement) -> str:
    if t.norm_quantiles is None:
        return "–"
    return number(t.norm_quantiles[2])


def _norm_range(t: TensorMeasurement) -> str:
    return "–" if t.norm_quantiles is None else f"{number(t.norm_quantiles[0], 2)}–{number(t.norm_quantiles[-1], 2)}"


def _angle(t: TensorMeasurement) -> str:
    return "–" if t.angle_mean is None else f"{t.angle_mean:.1f}±{t.angle_std:.1f}"


def _alignment(t: TensorMeasurement) -> str:
    return number(t.alignment)


def _z(t: TensorMeasurement) -> str:
    if t.alignment_z is None:
        return "–"
    return f"{t.alignment_z:+.1f}".replace("-", "−") if abs(t.alignment_z) < 100 else f"{t.alignment_z:+.0f}"


def _chance(t: TensorMeasurement) -> str:
    return "–" if t.angle_std_random is None else f"±{t.angle_std_random:.1f}"


def _coherence_chance(t: TensorMeasurement) -> str:
    return "–" if t.coherence_random is None else f"{t.coherence_random:.2f}"


def _sigma(t: TensorMeasurement) -> str:
    return "–" if t.sigma_max is None or not t.sigma_random else number(t.sigma_max / t.sigma_random)


def _rank(t: TensorMeasurement) -> str:
    return number(t.stable_rank)


def _effective(t: TensorMeasurement) -> str:
    return number(t.effective_rank)


def _bulk(t: TensorMeasurement) -> str:
    if t.spectrum_distance is None:
        return "–"
    return f"{t.spectrum_distance:.2f} · {t.spectrum_distance_random:.2f}"


def _beyond(t: TensorMeasurement) -> str:
    if t.spectrum_outliers is None or t.spectrum_outlier_share is None:
        return "–"
    return f"{t.spectrum_outliers} ({t.spectrum_outlier_share:.0%})" if t.spectrum_outliers else "0"


def _defect(t: TensorMeasurement) -> str:
    if t.orthogonality_defect is None:
        return "–"
    return f"{t.orthogonality_defect:.2f} · {t.orthogonality_defect_random:.2f}"


def _near(t: TensorMeasurement) -> str:
    if t.near_duplicates is None:
        return "–"
    return f"{t.near_duplicates} ({t.near_antipodal})" if t.near_antipodal else str(t.near_duplicates)


COLUMNS: tuple[Column[TensorMeasurement], ...] = (
    Column("shape", "of the tensor", _shape, 6, 14),
    Column("n", "filters per group; two numbers: groups · filters", _filters, 8, 6),
    Column("d", "length of a filter", lambda t: str(t.dim), 7, 6),
    Column("norm", "median norm of a filter", _norm, 2, 7),
    Column("min–max", "least and largest norm of a filter", _norm_range, 5, 13),
    Column("zero", "filters whose entries are all 0", lambda t: str(t.zero_filters or "–"), 9, 4),
    Column("angle", "between filters, in degrees: mean ± standard deviation", _angle, 3, 10),
    Column("chance", "standard deviation of the angle between random directions", _chance, 4, 6),
    Column("align", "d · mean cos²: 1 for random directions, 0 for orthogonal filters", _alignment, 0, 6),
    Column("z", "distance of align from 1 in standard deviations of random weights", _z, 1, 7),
    Column("coher.", "largest |cos|", lambda t: number(t.coherence), 10, 6),
    Column("chance", "median of the largest |cos| of random directions", _coherence_chance, 11, 6),
    Column("Welch", "least possible largest |cos|", lambda t: number(t.welch_bound), 14, 6),
    Column("σ/σ₀", "spectral norm over that of random weights of the same size", _sigma, 12, 6, spectral=True),
    Column("s.rank", "stable rank ‖W‖²/σ²", _rank, 13, 6, spectral=True),
    Column(
        "e.rank", "effective rank: exponential of the entropy of the singular values", _effective, 15, 6, spectral=True
    ),
    Column(
        "bulk",
        "distance of the spectrum from Marchenko and Pastur's law, 0 to 1 · that of random weights",
        _bulk,
        16,
        9,
        spectral=True,
    ),
    Column(
        "beyond",
        "singular values beyond what random ones reach: how many, and the share of ‖W‖² in them",
        _beyond,
        17,
        8,
        spectral=True,
    ),
    Column(
        "orth.",
        "deviation of σ² from its mean, 0 for orthogonal weights · that of random ones",
        _defect,
        18,
        9,
        spectral=True,
    ),
    Column("near", "pairs of filters with |cos| ≥ 0.95; in brackets the opposite ones", _near, 19, 6),
    Column("‖layer‖", "operator norm of the layer", lambda t: number(t.operator_norm), 20, 7, spectral=True),
)


def columns_for(columns: Sequence[Column[Subject]], width: int, path: int) -> tuple[Column[Subject], ...]:
    """The columns that fit beside paths of `path` characters, the most telling first to stay."""
    left, kept = width - path - 2, set()
    for column in sorted(columns, key=lambda column: column.rank):
        left -= column.width + 2
        if left < 0:
            break
        kept.add(column.rank)
    return tuple(column for column in columns if column.rank in kept)
