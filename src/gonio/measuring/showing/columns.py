"""The columns of all tables: one list for terminal, markdown and page, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import Field, fields, replace
from typing import Any

from gonio.measuring.figures.signals import Signal
from gonio.measuring.figures.tensor import TensorMeasurement
from gonio.measuring.figures.usual import FIGURES
from gonio.measuring.showing.table import Column, figures
from gonio.messages import counted, local, say
from gonio.pages.tables import number, signed


def _norm(t: TensorMeasurement) -> str:
    return number(t.norm_quantiles[2] if t.norm_quantiles else None)


def _norm_range(t: TensorMeasurement) -> str:
    ends = t.norm_quantiles
    return "–" if ends is None else f"{number(ends[0], 2)}–{number(ends[-1], 2)}"


def _z(t: TensorMeasurement) -> str:
    return "–" if t.alignment_z is None else signed(t.alignment_z)


def _beyond(t: TensorMeasurement) -> str:
    return "0" if t.spectrum_outliers == 0 else figures("{} ({:.0%})", "spectrum_outliers", "spectrum_outlier_share")(t)


def _near(t: TensorMeasurement) -> str:
    return figures("{} ({})" if t.near_antipodal else "{}", "near_duplicates", "near_antipodal")(t)


C = Column[TensorMeasurement]
# The texts of figures that take more than one number, and columns that no single figure has, by the one before them.
_TEXTS = {"alignment_z": _z, "spectrum_outliers": _beyond, "near_duplicates": _near}
_TEXTS["zero_filters"] = lambda t: str(t.zero_filters or "–")
_COMPOSED: dict[str, tuple[Column[TensorMeasurement], ...]] = {
    "shape": (C("shape", "shape", "of the tensor", 14, lambda t: "×".join(map(str, t.shape))),),
    "filters": (
        C(
            "filters", "n", "filters per group; two numbers: groups · filters", 6,
            lambda t: str(t.filters) if t.groups == 1 else f"{t.groups}·{t.filters}",
        ),
    ),
    "dim": (
        C("dim", "d", "length of a filter", 6, lambda t: str(t.dim)),
        C("norm", "norm", "median norm of a filter", 7, _norm),
        C("norm_range", "min–max", "smallest and largest norm of a filter", 13, _norm_range),
    ),
    "angle_std": (
        C(
            "angle", "angle", "between filters, in degrees: mean ± standard deviation", 10,
            figures("{:.1f}±{:.1f}", "angle_mean", "angle_std"),
        ),
    ),
    "sigma_max": (
        C(
            "sigma", "σ/σ₀", "spectral norm over that of random weights of the same size", 6,
            lambda t: number(FIGURES["sigma_ratio"](t)), spectral=True,
        ),
    ),
}  # fmt: skip


def _column(figure: Field[Any]) -> Column[TensorMeasurement]:
    """The column of a figure as its field declares it."""
    column: Column[TensorMeasurement] = figure.metadata["column"]
    name, form = figure.name, figure.metadata["form"]
    names = (name, f"{name}_random")[: form.count("{")]
    return replace(column, name=name, text=_TEXTS.get(name) or (figures(form, *names) if form else None))


COLUMNS: tuple[Column[TensorMeasurement], ...] = tuple(
    column
    for declared in fields(TensorMeasurement)
    for column in (
        *_COMPOSED.get(declared.name, ()),
        *([_column(declared)] if declared.metadata.get("column") else ()),
    )
)


def columns_of(layers: Sequence[TensorMeasurement]) -> list[Column[TensorMeasurement]]:
    """The columns of a table of these layers: all but those of figures on request that no layer has."""
    return [c for c in COLUMNS if not c.requested or any(getattr(t, c.name) is not None for t in layers)]


# The figures of groups of layers: title, explanation, value.
GROUPED: tuple[tuple[str, str, Callable[[TensorMeasurement], float | None]], ...] = (
    (say("norm"), "median norm of a filter", lambda t: t.norm_quantiles[2] if t.norm_quantiles else None),
    (say("angle"), say("mean angle between filters, in degrees"), lambda t: t.angle_mean),
    (say("align"), say("alignment, 1 for random weights"), lambda t: t.alignment),
    (say("z"), say("of the alignment, in standard deviations of chance"), lambda t: t.alignment_z),
)

# The columns that a narrow screen keeps, most important first; all others are dropped before them, from the right.
KEPT = (
    *(column.name for column in COLUMNS if column.requested),
    *("alignment", "alignment_z", "norm", "angle", "angle_std_random", "norm_range", "shape", "dim", "filters"),
    *("zero_filters", "coherence", "coherence_random", "sigma", "stable_rank"),
)


def _dead(s: Signal) -> str:
    counts = "–" if s.units is None else local(say("{n} of {every}", n=s.dead_units, every=s.units))
    said = local("ends a branch") if s.branch == "ends" else counts
    broken = local(say(", {values} NaN or infinite", values=counted(s.nonfinite, "value"))) if s.nonfinite else ""
    return f"{said}{broken}"


def _angles(s: Signal) -> str:
    return "–" if s.angles_read is None else f"{number(s.angles_read)} ({number(s.angles_exact)})"


def _gradient(s: Signal) -> str:
    return local("waits") if s.branch == "waits" else number(s.gradient_rms)


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
