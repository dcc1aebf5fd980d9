"""What only the model's graph tells: which scales could move, which layers a normalisation follows, mixtures."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gonio.nn import SwitchableNorm1d, SwitchableNorm2d, SwitchableNorm3d
from gonio.surgery import followed_by_norm, sites
from gonio.surgery.equivalent import evaluating
from gonio.surgery.graph import trace
from gonio.surgery.scales import Layer, Variable, scale_variables

__all__ = ["MovableScale", "Structure", "structure_of"]

LARGEST = 40_000_000  # weights; their squares are held in float64
SWEEPS = 200
CONVERGED = 1e-4  # of a log scale: the figure is shown with three digits


@dataclass(frozen=True)
class MovableScale:
    r"""Sum of squared weights of the layers between which scale can move, and the least it could be.

    In a positively homogeneous part of a network rows of one weight can grow by what the columns of the next
    shrink, and the function stays the same. What :math:`\sum \lVert W \rVert^2` would lose by that is *wasted*:
    weight decay pays for it and gets nothing. :func:`gonio.balance_` moves it.

    Attributes:
        layers: how many layers take part.
    """

    layers: int
    sum: float
    least: float

    @property
    def wasted(self) -> float:
        """The share of the sum that could be saved, between 0 and 1."""
        return 1 - self.least / self.sum if self.sum > 0 else 0.0


@dataclass(frozen=True)
class Structure:
    """What the graph of a model tells.

    Attributes:
        scale: None where the model cannot be traced or no scale is free to move.
        followed: layers whose output goes only into a normalisation, and which; their norm is free.
        mixtures: shares of the statistics in each switchable norm, for the mean and for the variance.
        notes: why there is no graph.
    """

    scale: MovableScale | None = None
    followed: dict[str, str] = field(default_factory=dict)
    mixtures: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@torch.no_grad()
def structure_of(model: nn.Module) -> Structure:
    """Trace the model once and read its structure; never raises because of the model."""
    model = _unwrapped(model)
    kinds = (SwitchableNorm1d, SwitchableNorm2d, SwitchableNorm3d)
    mixtures = {site.path: site.module.mixture() for site in sites(model) if isinstance(site.module, kinds)}
    why = _refusal(model)
    if not why:
        with evaluating(model):  # in train mode torch's spectral_norm takes a step at each read of a weight
            traced = trace(model)
            free = [variable for variable in scale_variables(traced) if variable.free()]
            followed = followed_by_norm(model)
        why = f"the model cannot be traced ({traced.reason})" if traced.graph is None else ""
    if why:
        return Structure(mixtures=mixtures, notes=(f"Nothing is said on scale between layers: {why}.",))
    return Structure(_movable(free), followed, mixtures)


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model that its author wrote, without compilation and data parallelism around it."""
    while True:
        wrapper = {base.__name__ for base in type(model).__mro__}
        parallel = wrapper & {"DataParallel", "DistributedDataParallel"}
        inner = model._modules.get("_orig_mod") or (model._modules.get("module") if parallel else None)
        if inner is None:
            return model
        model = inner


def _refusal(model: nn.Module) -> str:
    parameters = list(model.parameters())
    if any(is_lazy(p) or p.is_meta for p in parameters):
        return "some weights have no values"
    total = sum(p.numel() for p in parameters)
    return f"it has {total:,} weights, more than {LARGEST:,}" if total > LARGEST else ""


def _movable(free: list[Variable]) -> MovableScale | None:
    layers = {id(layer): layer for v in free for layer in (*v.producers, *(c for c, _ in v.consumers))}
    before = _total(list(layers.values()))
    if not free or not 0 < before < float("inf"):
        return None
    for _ in range(SWEEPS):
        if max(_balance_(variable) for variable in free) < CONVERGED:
            break
    return MovableScale(len(layers), before, _total(list(layers.values())))


def _total(layers: list[Layer]) -> float:
    return float(sum(layer.squares.sum() for layer in layers))


def _balance_(variable: Variable) -> float:
    """Give each channel its best scale, s⁴ = used/made, on the layers' squares; the largest log step."""
    made = torch.stack([layer.squares.sum(1) for layer in variable.producers]).sum(0)
    used = torch.stack([_per_channel(layer, per) for layer, per in variable.consumers]).sum(0)
    step = torch.where((made > 0) & (used > 0), (used / made).pow(0.25), 1.0)
    for layer in variable.producers:
        layer.squares = layer.squares * step.square().unsqueeze(1)
    for layer, per in variable.consumers:
        layer.squares = layer.squares / step.square().repeat_interleave(per)
    return float(step.log().abs().max())


def _per_channel(layer: Layer, per: int) -> Tensor:
    return layer.squares.sum(0).view(-1, per).sum(1)
