"""The columns of all tables: one list for terminal, markdown and page, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from gonio.measuring.figures.signals import Signal
from gonio.measuring.figures.tensor import TensorMeasurement

Subject = TypeVar("Subject")


@dataclass(frozen=True)
class Column(Generic[Subject]):
    """One column.

    Attributes:
        name: unique among the columns of a table; without `text`, the attribute of the subject that is shown.
        title: its heading; `explanation`: its meaning, and the value for random weights.
        width: in characters.
        text: the figure of a subject as text.
        spectral: whether a page shows it in the table of spectra.
    """

    name: str
    title: str
    explanation: str
    width: int
    text: Callable[[Subject], str] | None = None
    spectral: bool = False

    def cell(self, subject: Subject) -> str:
        """The figure of this subject as text."""
        return number(getattr(subject, self.name)) if self.text is None else self.text(subject)


def number(value: float | None, digits: int = 3) -> str:
    """A figure with `digits` significant digits, two below 1; a dash for None."""
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


def _form(form: str, *values: float | int | None) -> str:
    """The values in this form; a dash if one is missing."""
    return "–" if None in values else form.format(*values)


def _shape(t: TensorMeasurement) -> str:
    return "×".join(map(str, t.shape))


def _filters(t: TensorMeasurement) -> str:
    return str(t.filters) if t.groups == 1 else f"{t.groups}·{t.filters}"


def _norm(t: TensorMeasurement) -> str:
    return number(t.norm_quantiles[2] if t.norm_quantiles else None)


def _norm_range(t: TensorMeasurement) -> str:
    ends = t.norm_quantiles
    return "–" if ends is None else f"{number(ends[0], 2)}–{number(ends[-1], 2)}"


def _angle(t: TensorMeasurement) -> str:
    return _form("{:.1f}±{:.1f}", t.angle_mean, t.angle_std)


def _z(t: TensorMeasurement) -> str:
    return _form("{:+.1f}" if abs(t.alignment_z or 0) < 100 else "{:+.0f}", t.alignment_z).replace("-", "−")


def _sigma(t: TensorMeasurement) -> str:
    return number(None if t.sigma_max is None or not t.sigma_random else t.sigma_max / t.sigma_random)


def _bulk(t: TensorMeasurement) -> str:
    return _form("{:.2f} · {:.2f}", t.spectrum_distance, t.spectrum_distance_random)


def _beyond(t: TensorMeasurement) -> str:
    text = _form("{} ({:.0%})", t.spectrum_outliers, t.spectrum_outlier_share)
    return "0" if t.spectrum_outliers == 0 else text


def _defect(t: TensorMeasurement) -> str:
    return _form("{:.2f} · {:.2f}", t.orthogonality_defect, t.orthogonality_defect_random)


def _near(t: TensorMeasurement) -> str:
    return _form("{} ({})" if t.near_antipodal else "{}", t.near_duplicates, t.near_antipodal)


def _angle_random(t: TensorMeasurement) -> str:
    return _form("±{:.1f}", t.angle_std_random)


def _coherence_random(t: TensorMeasurement) -> str:
    return _form("{:.2f}", t.coherence_random)


C = Column[TensorMeasurement]
COLUMNS: tuple[Column[TensorMeasurement], ...] = (
    C("shape", "shape", "of the tensor", 14, _shape),
    C("filters", "n", "filters per group; two numbers: groups · filters", 6, _filters),
    C("dim", "d", "length of a filter", 6, lambda t: str(t.dim)),
    C("norm", "norm", "median norm of a filter", 7, _norm),
    C("norm_range", "min–max", "smallest and largest norm of a filter", 13, _norm_range),
    C("zero_filters", "zero", "filters whose entries are all 0", 4, lambda t: str(t.zero_filters or "–")),
    C("angle", "angle", "between filters, in degrees: mean ± standard deviation", 10, _angle),
    C("angle_std_random", "chance", "standard deviation of angles of random directions", 6, _angle_random),
    C("alignment", "align", "d · mean cos²: 1 for random directions, 0 for orthogonal filters", 6),
    C("alignment_z", "z", "distance of align from 1 in standard deviations of random weights", 7, _z),
    C("coherence", "coher.", "largest |cos|", 6),
    C("coherence_random", "chance", "median of the largest |cos| of random directions", 6, _coherence_random),
    C("welch_bound", "Welch", "least possible largest |cos|", 6),
    C("sigma", "σ/σ₀", "spectral norm over that of random weights of the same size", 6, _sigma, spectral=True),
    C("stable_rank", "s.rank", "stable rank ‖W‖²/σ²", 6, spectral=True),
    C("effective_rank", "e.rank", "effective rank: exp of the entropy of the singular values", 6, spectral=True),
    C("spectrum_distance", "bulk", "distance from Marchenko–Pastur, 0 to 1 · by chance", 9, _bulk, spectral=True),
    C("spectrum_outliers", "beyond", "σ above those of random weights (share of ‖W‖²)", 8, _beyond, spectral=True),
    C("orthogonality_defect", "orth.", "spread of σ², 0 if orthogonal · by chance", 9, _defect, spectral=True),
    C("near_duplicates", "near", "pairs of filters with |cos| ≥ 0.95; in brackets the opposite ones", 6, _near),
    C("operator_norm", "‖layer‖", "operator norm of the layer", 7, spectral=True),
)

# The columns that a narrow screen keeps, most important first; all others are dropped before them, from the right.
KEPT = (
    *("alignment", "alignment_z", "norm", "angle", "angle_std_random", "norm_range", "shape", "dim", "filters"),
    *("zero_filters", "coherence", "coherence_random", "sigma", "stable_rank"),
)


def columns_for(
    columns: Sequence[Column[Subject]], kept: Sequence[str], width: int, path: int
) -> tuple[Column[Subject], ...]:
    """The columns that fit beside paths of `path` characters.

    Args:
        kept: names of columns, most important first; all others follow in the order of `columns`.
    """
    left, shown = width - path - 2, set()
    for column in sorted(columns, key=lambda c: kept.index(c.name) if c.name in kept else len(kept)):
        left -= column.width + 2
        if left < 0:
            break
        shown.add(column.name)
    return tuple(column for column in columns if column.name in shown)


def _dead(s: Signal) -> str:
    broken = f", {s.nonfinite} values NaN or infinite" if s.nonfinite else ""
    return f"{'ends a branch' if s.branch == 'ends' else f'{s.dead_units} of {s.units}'}{broken}"


def _angles(s: Signal) -> str:
    return "–" if s.angles_read is None else f"{number(s.angles_read)} ({number(s.angles_exact)})"


def _gradient(s: Signal) -> str:
    return "waits" if s.branch == "waits" else number(s.gradient_rms)


SIGNALS: tuple[Column[Signal], ...] = (
    Column("mean", "mean", "of the output", 7),
    Column("std", "std", "of the output", 7),
    Column("rms", "rms", "of the output", 7),
    Column("gain", "gain", "rms of the output over that of the input", 7),
    Column("zeros", "zeros", "share of the output that is exactly 0", 5, lambda s: f"{s.zeros:.0%}"),
    Column("dead_units", "dead", "units whose output is 0 throughout", 13, _dead),
    Column("gradient_rms", "gradient", "rms of the gradient at the output", 8, _gradient),
    Column("gradient_gain", "its gain", "rms of the gradient at the input over that at the output", 8),
    Column("angles", "off 90°", "deviation of angles from 90°, by the signs of the outputs (exact)", 12, _angles),
    Column("train_eval_gap", "train–eval", "difference between the outputs in training and in evaluation mode", 10),
)
_DROPPED = ("mean", "gradient_gain", "std", "angles", "train_eval_gap")  # on a narrow screen, in this order


def signals_for(signals: Sequence[Signal], width: int, path: int) -> list[Column[Signal]]:
    """The columns that fit beside paths of `path` characters; those without any figure are dropped first."""
    cells = {c.name: [c.title, *(c.cell(signal) for signal in signals)] for c in SIGNALS}
    empty = [name for name, column in cells.items() if set(column[1:]) == {"–"}]
    shown = [c.name for c in SIGNALS]
    for name in (*empty, *_DROPPED):
        if path + sum(max(map(len, cells[kept])) + 2 for kept in shown) > width and name in shown:
            shown.remove(name)
    return [column for column in SIGNALS if column.name in shown]
