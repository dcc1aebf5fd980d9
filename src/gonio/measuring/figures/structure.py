"""Figures of a model's graph: scale that can move between layers, layers before a normalisation, mixtures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from gonio.surgery import sites
from gonio.surgery.balance import least_scales
from gonio.surgery.equivalent import evaluating
from gonio.surgery.graph import Graph, ScaleVariable, trace
from gonio.surgery.kinds import SWITCHABLE_NORMS, WEIGHTED, is_norm
from gonio.surgery.wrapping import unwrapped

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
        constant: layers and norms whose weight is 0 and through which every path to the output leads.
        calls: how often each layer runs in one forward, by its first path.
        mixtures: shares of the statistics in each switchable norm, for the mean and for the variance.
        notes: why there is no graph.
    """

    scale: MovableScale | None = None
    followed: dict[str, str] = field(default_factory=dict)
    invariant: frozenset[str] = frozenset()
    constant: tuple[str, ...] = ()
    calls: dict[str, int] = field(default_factory=dict)
    mixtures: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@torch.no_grad()
def structure_of(model: nn.Module) -> Structure:
    """Trace the model once and read its structure; never raises because of the model."""
    model = unwrapped(model)
    mixtures = {site.path: site.module.mixture() for site in sites(model) if isinstance(site.module, SWITCHABLE_NORMS)}
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
        graph = trace(model)
        if graph.reason:
            return _without_graph(f"the model cannot be traced ({graph.reason})", mixtures)
        free = [variable for variable in graph.scale_variables() if variable.free()]
        constant = tuple(dict.fromkeys(path for path, node in _zero_calls(graph) if _on_every_path(node)))
        return Structure(_movable(free), graph.norm_after, graph.scale_invariant, constant, graph.call_counts, mixtures)


def _zero_calls(graph: Graph) -> Iterator[tuple[str, fx.Node]]:
    """The calls of layers and norms whose weight is 0, so that their output is the same for every input."""
    for path, module, node in graph.calls():
        weight = module._parameters.get("weight")
        if weight is not None and (isinstance(module, WEIGHTED) or is_norm(module)) and not bool(weight.any()):
            yield path, node


def _on_every_path(node: fx.Node) -> bool:
    """Whether the model's output depends on this node and on parameters only."""
    after, pending = {node}, [node]
    while pending:
        new = [user for user in pending.pop().users if user not in after]
        after.update(new)
        pending += new
    sources = {source for reached in after - {node} for source in reached.all_input_nodes}
    ends = any(reached.op == "output" for reached in after)
    return ends and all(source in after or source.op == "get_attr" for source in sources)


def _refusal(model: nn.Module) -> str:
    parameters = list(model.parameters())
    if any(is_lazy(p) or p.is_meta for p in parameters):
        return "some weights have no values"
    total = sum(p.numel() for p in parameters)
    return f"it has {total:,} weights, more than {LARGEST:,}" if total > LARGEST else ""


def _movable(free: list[ScaleVariable]) -> MovableScale | None:
    placed = least_scales(free, per_channel=True, sweeps=SWEEPS, tolerance=CONVERGED)
    if not free or not 0 < placed.before < float("inf"):
        return None
    layers = least_scales(free, per_channel=False, sweeps=SWEEPS, tolerance=CONVERGED)
    return MovableScale(len(placed.layers), placed.before, placed.after, layers.after)
