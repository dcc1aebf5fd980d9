"""Figures of a model's graph: scale that can move between layers, layers before a normalisation, mixtures."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from gonio.nn import SwitchableNorm1d, SwitchableNorm2d, SwitchableNorm3d
from gonio.surgery import followed_by_norm, sites
from gonio.surgery.equivalent import evaluating
from gonio.surgery.kinds import WEIGHTED, computes_as
from gonio.surgery.least_scale import least_scales
from gonio.surgery.scale_reader import scale_variables
from gonio.surgery.scales import Variable
from gonio.surgery.tracing import Traced, trace
from gonio.surgery.wrapping import unwrapped

__all__ = ["MovableScale", "Structure", "structure_of"]

LARGEST = 40_000_000  # weights; their squares are held in float64
SWEEPS = 200
CONVERGED = 1e-4  # of a log scale: the figure is shown with three digits


@dataclass(frozen=True)
class MovableScale:
    r"""Sum of squared weights of the layers between which scale can move, and the least it could be.

    In a positively homogeneous part of a network the rows of one weight can be multiplied by a positive number and
    the columns of the next divided by it without changing the function. The part of :math:`\sum \lVert W \rVert^2`
    that this would save is *wasted*: weight decay acts on it without effect. :func:`gonio.balance_` removes it.

    Attributes:
        layers: how many layers take part.
        least: with one scale per neuron or channel (`level="neuron"` of :func:`gonio.balance_`).
        least_by_layer: with one scale per layer (`level="layer"`); never below `least`.
    """

    layers: int
    sum: float
    least: float
    least_by_layer: float

    @property
    def wasted(self) -> float:
        """The share of the sum that could be saved, between 0 and 1."""
        return 1 - self.least / self.sum if self.sum > 0 else 0.0

    @property
    def wasted_by_layer(self) -> float:
        """The share that could be saved with one scale per layer."""
        return 1 - self.least_by_layer / self.sum if self.sum > 0 else 0.0


@dataclass(frozen=True)
class Structure:
    """Figures of a model's graph.

    Attributes:
        scale: None where the model cannot be traced or no scale is free to move.
        followed: layers whose output is used only by a normalisation, and which; their norm is free.
        invariant: layers whose weight can be multiplied by a positive number without changing the function in training.
        calls: how often each layer runs in one forward, by its first path.
        mixtures: shares of the statistics in each switchable norm, for the mean and for the variance.
        notes: why there is no graph.
    """

    scale: MovableScale | None = None
    followed: dict[str, str] = field(default_factory=dict)
    invariant: frozenset[str] = frozenset()
    calls: dict[str, int] = field(default_factory=dict)
    mixtures: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@torch.no_grad()
def structure_of(model: nn.Module) -> Structure:
    """Trace the model once and read its structure; never raises because of the model."""
    model = unwrapped(model)
    kinds = (SwitchableNorm1d, SwitchableNorm2d, SwitchableNorm3d)
    mixtures = {site.path: site.module.mixture() for site in sites(model) if isinstance(site.module, kinds)}
    try:
        return _traced(model, mixtures)
    except Exception as error:  # tracing runs the model's own methods, which may raise anything
        said = str(error).strip().partition("\n")[0][:200]
        return _without_graph(f"reading the model raised {type(error).__name__}: {said}", mixtures)


def _without_graph(why: str, mixtures: dict[str, dict[str, dict[str, float]]]) -> Structure:
    return Structure(mixtures=mixtures, notes=(f"Scale between layers was not measured: {why}.",))


def _traced(model: nn.Module, mixtures: dict[str, dict[str, dict[str, float]]]) -> Structure:
    why = _refusal(model)
    if why:
        return _without_graph(why, mixtures)
    with evaluating(model):  # in train mode torch's spectral_norm takes a step at each read of a weight
        traced = trace(model)
        free = [variable for variable in scale_variables(traced) if variable.free()]
        followed = followed_by_norm(traced)
    if traced.graph is None:
        return _without_graph(f"the model cannot be traced ({traced.reason})", mixtures)
    return Structure(_movable(free), followed, _scale_invariant(traced), _calls(traced), mixtures)


def _refusal(model: nn.Module) -> str:
    parameters = list(model.parameters())
    if any(is_lazy(p) or p.is_meta for p in parameters):
        return "some weights have no values"
    total = sum(p.numel() for p in parameters)
    return f"it has {total:,} weights, more than {LARGEST:,}" if total > LARGEST else ""


def _movable(free: list[Variable]) -> MovableScale | None:
    placed = least_scales(free, per_channel=True, sweeps=SWEEPS, tolerance=CONVERGED)
    if not free or not 0 < placed.before < float("inf"):
        return None
    layers = least_scales(free, per_channel=False, sweeps=SWEEPS, tolerance=CONVERGED)
    return MovableScale(placed.layers, placed.before, placed.after, layers.after)


def _calls(traced: Traced) -> dict[str, int]:
    """How often each module runs in one forward."""
    first: dict[int, str] = {}
    return dict(Counter(first.setdefault(id(module), path) for path, module, _ in traced.calls()))


# Norms of each channel by itself also remove a bias before them; the others would need the bias scaled too.
_PER_CHANNEL = (
    *(nn.SyncBatchNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
_ACROSS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, SwitchableNorm1d, SwitchableNorm2d, SwitchableNorm3d)


def _scale_invariant(traced: Traced) -> frozenset[str]:
    """Layers whose outputs all go directly into norms that remove the scale of their weight, in training.

    Stricter than :func:`gonio.surgery.followed_by_norm`: the norm must be torch's own or a switchable one, without
    a module between; a bias must be removed by it; and no other layer may share the weight.
    """
    owners = Counter(id(p) for m in traced.model.modules() for p in m._parameters.values() if p is not None)
    found: dict[str, bool] = {}
    for path, module, node in traced.calls():
        if computes_as(module, WEIGHTED) and owners[id(module._parameters.get("weight"))] == 1:
            found[path] = found.get(path, True) and _is_normalised(module, node, traced)
    return frozenset(path for path, free in found.items() if free)


def _is_normalised(module: nn.Module, node: fx.Node, traced: Traced) -> bool:
    undoing = _PER_CHANNEL if module._parameters.get("bias") is not None else (*_PER_CHANNEL, *_ACROSS)
    norms = [traced.called(user) for user in node.users]
    return bool(norms) and all(norm is not None and computes_as(norm, undoing) for norm in norms)
