"""The columns of all tables: one list for terminal, markdown and page, in the order in which they are shown."""

from __future__ import annotations

from gonio.measuring.figures.signals import Signal
from gonio.measuring.figures.tensor import TensorMeasurement
from gonio.measuring.showing.table import Column, figures
from gonio.pages.tables import number


def _norm(t: TensorMeasurement) -> str:
    return number(t.norm_quantiles[2] if t.norm_quantiles else None)


def _norm_range(t: TensorMeasurement) -> str:
    ends = t.norm_quantiles
    return "–" if ends is None else f"{number(ends[0], 2)}–{number(ends[-1], 2)}"


def _z(t: TensorMeasurement) -> str:
    digits = 1 if abs(t.alignment_z or 0) < 100 else 0
    return figures(f"{{:+.{digits}f}}", "alignment_z")(t).replace("-", "−")


def _beyond(t: TensorMeasurement) -> str:
    return "0" if t.spectrum_outliers == 0 else figures("{} ({:.0%})", "spectrum_outliers", "spectrum_outlier_share")(t)


def _near(t: TensorMeasurement) -> str:
    return figures("{} ({})" if t.near_antipodal else "{}", "near_duplicates", "near_antipodal")(t)


C = Column[TensorMeasurement]
COLUMNS: tuple[Column[TensorMeasurement], ...] = (
    C("shape", "shape", "of the tensor", 14, lambda t: "×".join(map(str, t.shape))),
    C(
        "filters", "n", "filters per group; two numbers: groups · filters", 6,
        lambda t: str(t.filters) if t.groups == 1 else f"{t.groups}·{t.filters}",
    ),
    C("dim", "d", "length of a filter", 6, lambda t: str(t.dim)),
    C("norm", "norm", "median norm of a filter", 7, _norm),
    C("norm_range", "min–max", "smallest and largest norm of a filter", 13, _norm_range),
    C("zero_filters", "zero", "filters whose entries are all 0", 4, lambda t: str(t.zero_filters or "–")),
    C(
        "angle", "angle", "between filters, in degrees: mean ± standard deviation", 10,
        figures("{:.1f}±{:.1f}", "angle_mean", "angle_std"),
    ),
    C(
        "angle_std_random", "chance", "standard deviation of angles of random directions", 6,
        figures("±{:.1f}", "angle_std_random"),
    ),
    C("alignment", "align", "d · mean cos²: 1 for random directions, 0 for orthogonal filters", 6),
    C("alignment_z", "z", "distance of align from 1 in standard deviations of random weights", 7, _z),
    C("coherence", "coher.", "largest |cos|", 6),
    C(
        "coherence_random", "chance", "median of the largest |cos| of random directions", 6,
        figures("{:.2f}", "coherence_random"),
    ),
    C("welch_bound", "Welch", "least possible largest |cos|", 6),
    C(
        "sigma", "σ/σ₀", "spectral norm over that of random weights of the same size", 6,
        lambda t: number(t.sigma_max / t.sigma_random if t.sigma_max is not None and t.sigma_random else None),
        spectral=True,
    ),
    C("stable_rank", "s.rank", "stable rank ‖W‖²/σ²", 6, spectral=True),
    C("effective_rank", "e.rank", "effective rank: exp of the entropy of the singular values", 6, spectral=True),
    C(
        "spectrum_distance", "bulk", "distance from Marchenko–Pastur, 0 to 1 · by chance", 9,
        figures("{:.2f} · {:.2f}", "spectrum_distance", "spectrum_distance_random"), spectral=True,
    ),
    C("spectrum_outliers", "beyond", "σ above those of random weights (share of ‖W‖²)", 8, _beyond, spectral=True),
    C(
        "orthogonality_defect", "orth.", "spread of σ², 0 if orthogonal · by chance", 9,
        figures("{:.2f} · {:.2f}", "orthogonality_defect", "orthogonality_defect_random"), spectral=True,
    ),
    C("near_duplicates", "near", "pairs of filters with |cos| ≥ 0.95; in brackets the opposite ones", 6, _near),
    C("operator_norm", "‖layer‖", "operator norm of the layer", 7, spectral=True),
)  # fmt: skip

# The columns that a narrow screen keeps, most important first; all others are dropped before them, from the right.
KEPT = (
    *("alignment", "alignment_z", "norm", "angle", "angle_std_random", "norm_range", "shape", "dim", "filters"),
    *("zero_filters", "coherence", "coherence_random", "sigma", "stable_rank"),
)


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
DROPPED = ("mean", "gradient_gain", "std", "angles", "train_eval_gap")  # of SIGNALS, on a narrow screen, in this order
