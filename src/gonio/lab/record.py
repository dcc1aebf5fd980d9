"""The record of one run: what a study stores, and what it may contain when somebody else wrote it.

That are also norms and angles of the trained model's filters, small enough to be stored with every run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, ConfigDict
from torch import Tensor, nn

from gonio import errors
from gonio.geometry import angles, filter_norms, layout_of, matrix_view
from gonio.lab.plan import adapter
from gonio.parametrizations.checkpoints import weight_by_hook

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
ANGLE_EDGES = tuple(range(0, 181, 2))  # degrees; the same for every layer, run and study
_FINITE = ConfigDict(extra="forbid", allow_inf_nan=False)  # a run with another number has diverged


@dataclass(frozen=True)
class _Layer:
    """The filters of a layer, see :func:`gonio.lab.filter_summary`."""

    __pydantic_config__ = _FINITE

    shape: list[int]
    dim: int
    filters: int
    norms: list[float]
    angle_counts: list[int]


@dataclass(frozen=True)
class _Geometry:
    """See :func:`gonio.lab.filter_summary`; empty for a run without a scored model."""

    __pydantic_config__ = _FINITE

    layers: dict[str, _Layer] = field(default_factory=dict)
    norm_quantiles: list[float] = field(default_factory=list)
    angle_edges: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class _Robustness:
    """See :func:`gonio.lab.running.robustness.robustness`; empty where models are not attacked."""

    __pydantic_config__ = _FINITE

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


def _readable_geometry(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raise ValueError unless it is a :class:`_Geometry` with lists as long as its edges and quantiles say."""
    record: _Geometry = adapter(_Geometry).validate_python(value)
    bins, quantiles = len(record.angle_edges) - 1, len(record.norm_quantiles)
    for path, layer in record.layers.items():
        if len(layer.angle_counts) != bins or len(layer.norms) not in (0, quantiles):
            raise ValueError(f"layer {path!r} has {len(layer.angle_counts)} counts of angles in {bins} bins")
    return value


def _readable_robustness(value: Mapping[str, Any]) -> Mapping[str, Any]:
    adapter(_Robustness).validate_python(value)
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

    __pydantic_config__ = _FINITE

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
        """Whether gonio refused the run, as it would again; a failure of other code can pass.

        The error begins with the name of its class; classes that are neither of Python nor of gonio have their module
        before it.
        """
        return self.status == "failed" and (self.error or "").partition(":")[0] in errors.__all__

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON-able data."""
        return asdict(self)


def trouble(record: RunRecord) -> str | None:
    """One line about a run that did not finish, else None."""
    if record.status == "finished":
        return None
    return f"{record.recipe}, seed {record.seed}: {record.status}: {record.error}"


@torch.no_grad()
def filter_summary(model: nn.Module) -> dict[str, Any]:
    """Filter norms and pairwise angles of every linear and convolutional layer.

    A parametrised layer shows its effective weight. Angles are between filters of one group; a filter of norm 0 has
    none and is left out.

    Returns:
        `layers` by path, each with `shape`, `dim` (length of a filter), `filters` (how many), `norms`
        (at :data:`QUANTILES`) and `angle_counts` (per bin of :data:`ANGLE_EDGES`); `norm_quantiles`;
        `angle_edges`.

    Example:
        >>> layer = nn.Linear(2, 3)
        >>> _ = layer.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0]]))
        >>> found = gonio.lab.filter_summary(nn.Sequential(layer))["layers"]["0"]
        >>> found["norms"][0], found["norms"][-1], sum(found["angle_counts"])
        (1.0, 3.0, 3)
    """
    layers = {
        path: _summary_of(*_weight_and_matrices(module))
        for path, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd))
    }
    return {
        "layers": layers,
        "norm_quantiles": list(QUANTILES),
        "angle_edges": list(ANGLE_EDGES),
    }


def _weight_and_matrices(layer: nn.Linear | nn.modules.conv._ConvNd) -> tuple[Tensor, Tensor]:
    """The weight that the next forward uses, and its matrices in float64."""
    computed = weight_by_hook(layer)
    weight = layer.weight if computed is None else computed
    return weight, matrix_view(weight, layout_of(layer)).double().cpu()


def _summary_of(weight: Tensor, matrices: Tensor) -> dict[str, Any]:
    norms = filter_norms(matrices)
    first, second = torch.triu_indices(matrices.shape[-2], matrices.shape[-2], offset=1)
    usable = (norms[:, first] > 0) & (norms[:, second] > 0)
    degrees = torch.rad2deg(angles(matrices))[:, first, second][usable]
    return {
        "shape": list(weight.shape),
        "dim": matrices.shape[-1],
        "filters": norms.numel(),
        "norms": torch.quantile(norms.flatten(), torch.tensor(QUANTILES, dtype=torch.float64)).tolist(),
        "angle_counts": torch.histogram(degrees, torch.tensor(ANGLE_EDGES, dtype=torch.float64)).hist.int().tolist(),
    }
