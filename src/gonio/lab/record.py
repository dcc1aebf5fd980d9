"""The record of one run: what a study stores, and what it may contain when somebody else wrote it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, TypeAdapter

from gonio import errors
from gonio.lab.plan import CLOSED


@dataclass(frozen=True)
class _Layer:
    """The filters of a layer, see :func:`gonio.lab.filter_summary`."""

    shape: list[int]
    dim: int
    filters: int
    norms: list[float]
    angle_counts: list[int]


@dataclass(frozen=True)
class _Geometry:
    """See :func:`gonio.lab.filter_summary`; empty for a run without a scored model."""

    layers: dict[str, _Layer] = field(default_factory=dict)
    norm_quantiles: list[float] = field(default_factory=list)
    angle_edges: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class _Robustness:
    """See :func:`gonio.lab.running.robustness.robustness`; empty where models are not attacked."""

    clean: float = 0.0
    noise: float = 0.0
    transfer: float = 0.0
    fgsm: float = 0.0
    pgd: float = 0.0
    smoothed: float = 0.0
    worst: float = 0.0
    radii: list[dict[str, float]] = field(default_factory=list)
    zero_gradients: float = 0.0
    signs: list[str] = field(default_factory=list)


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def _readable_geometry(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raise ValueError unless it is a :class:`_Geometry` with lists as long as its edges and quantiles say."""
    record: _Geometry = _adapter(_Geometry).validate_python(value)
    bins, quantiles = len(record.angle_edges) - 1, len(record.norm_quantiles)
    for path, layer in record.layers.items():
        if len(layer.angle_counts) != bins or len(layer.norms) not in (0, quantiles):
            raise ValueError(f"layer {path!r} has {len(layer.angle_counts)} counts of angles in {bins} bins")
    return value


def _readable_robustness(value: Mapping[str, Any]) -> Mapping[str, Any]:
    _adapter(_Robustness).validate_python(value)
    return value


@dataclass(frozen=True)
class RunRecord:
    """One recipe × one seed, as it ended.

    Attributes:
        recipe: its name; "baseline" for the unchanged model.
        status: `finished`; `diverged` (NaN or Inf in a loss or output); `failed` (an exception, or the process died).
        score: test score at the epoch with the best validation score; None unless finished.
        best_epoch: that epoch, counted from 0.
        curve: `train_loss` (task loss without penalty) and `val_score`, one number per epoch; a
            non-finite number is None.
        geometry: of the scored model, see :func:`gonio.lab.filter_summary`; empty unless finished.
        plan: the recipe's plan for this model, layer by layer; "" for the baseline.
        settings: tuned values of the recipe, by name; empty without tuning.
        robustness: accuracy in percent on disturbed inputs, see
            :func:`gonio.lab.running.robustness.robustness`; empty if the study does not attack models.
        metrics: the task's further metrics on the test split, or the last values that a script logged, by name.
        costs: of a script's run: `step_time` in seconds (median), and on an accelerator `memory` in bytes.
        error: why the run diverged or failed.
        seconds: CPU seconds of the run's process; ignored when records are compared.
    """

    __pydantic_config__ = CLOSED

    recipe: str
    seed: int
    status: Literal["finished", "diverged", "failed"]
    score: float | None = None
    best_epoch: int | None = None
    curve: Mapping[str, list[float | None]] = field(default_factory=dict)
    geometry: Annotated[Mapping[str, Any], AfterValidator(_readable_geometry)] = field(default_factory=dict)
    plan: str = ""
    error: str | None = None
    seconds: float | None = field(default=None, compare=False)
    settings: Mapping[str, float] = field(default_factory=dict)
    robustness: Annotated[Mapping[str, Any], AfterValidator(_readable_robustness)] = field(default_factory=dict)
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    costs: Mapping[str, float] = field(default_factory=dict)

    @property
    def refused(self) -> bool:
        """Whether gonio refused the run, as it would again; a failure of other code can pass."""
        return self.status == "failed" and (self.error or "").partition(":")[0] in errors.__all__

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON-able data."""
        return asdict(self)
