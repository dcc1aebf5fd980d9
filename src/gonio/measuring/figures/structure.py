"""Facts of a model and its training: movable scale, layers before a normalisation, norms, batch sizes, decay."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from gonio.editing.copies import holds_copies
from gonio.editing.twin import evaluating
from gonio.editing.where import unwrapped
from gonio.editing.wrappers import parameter_ids
from gonio.errors import GonioError, InvalidArgumentError
from gonio.execution import several_ranks
from gonio.measuring.figures.heads import HeadMeasurement, heads_in, input_of, parameters_of, with_logits
from gonio.measuring.figures.signals import Signal
from gonio.measuring.figures.starts import layers_as_built
from gonio.messages import say
from gonio.parametrizations.mechanism import parametrization_of
from gonio.surgery import Site, sites
from gonio.surgery.equivalent import SameFunction
from gonio.surgery.facts import TORCH_NORMS, WEIGHTED, facts_of
from gonio.surgery.graph import Graph, trace
from gonio.surgery.movable import Movable, least_scales, movable, movable_in_blocks
from gonio.surgery.symmetries import Sums, least_factors

LARGEST = 40_000_000  # weights; their squares are held in float64 where a graph shows them
LARGEST_RUN = 300_000_000  # weights of a model that is run; of those that have factors there are copies
LARGEST_UNASKED = 5_000_000  # weights of a model whose blocks are found unasked: a run of 20 million takes ten seconds
SWEEPS = 200
CONVERGED = 1e-4  # of a log scale: the figure is shown with three digits


@dataclass(frozen=True)
class PairScale:
    """The part of :class:`MovableScale` that lies in one pair of weights of an attention or MLP block.

    Attributes:
        path: the module of the block.
        kind: the pair: "value and output", "query and key" or "up and down".
        sum, least: of the rows of the first and the columns (of query and key the rows) of the second.
    """

    path: str
    kind: str
    sum: float
    least: float

    @property
    def wasted(self) -> float:
        """The share of the sum that could be saved, between 0 and 1."""
        return _share(self.least, self.sum)


@dataclass(frozen=True)
class MovableScale:
    r"""Sum of squared weights of the layers between which scale can move, and the least it could be.

    In a positively homogeneous part of a network the rows of one weight can be multiplied by a positive number and
    the columns of the next divided by it without changing the function; in transformers so can values and outputs,
    queries and keys, and both layers of an MLP with a gate or ReLU. The part of :math:`\sum \lVert W \rVert^2` that
    this would save is *wasted*: weight decay acts on it without effect. :func:`gonio.balance_` removes it.

    Attributes:
        layers: how many weights take part.
        least: with one scale per neuron or channel (`level="neuron"` of :func:`gonio.balance_`).
        least_by_layer: with one scale per layer (`level="layer"`); never below `least`.
        pairs: the shares of attention and MLP blocks, which are found by running the model.
        left: which scale of blocks cannot move, and why.
    """

    layers: int
    sum: float
    least: float
    least_by_layer: float
    pairs: tuple[PairScale, ...] = ()
    left: tuple[str, ...] = ()

    @property
    def wasted(self) -> float:
        """The share of the sum that could be saved, between 0 and 1."""
        return _share(self.least, self.sum)

    @property
    def wasted_by_layer(self) -> float:
        """The share that could be saved with one scale per layer."""
        return _share(self.least_by_layer, self.sum)

    @classmethod
    def of(cls, found: Movable) -> MovableScale | None:
        """The sums over the scales that can move; None where none can."""
        units, layers = (
            least_scales(found.free, per_channel=each, sweeps=SWEEPS, tolerance=CONVERGED) for each in (True, False)
        )
        symmetries, parameters = found.blocks.symmetries, found.blocks.parameters
        sums: Sums = {}
        of_units, of_layers = (
            least_factors(each.symmetries, parameters, sweeps=SWEEPS, tolerance=CONVERGED, sums=sums)
            for each in (found.blocks, found.blocks.joined())
        )
        before = units.before + of_units.before
        if not 0 < before < float("inf"):
            return None
        count = len(units.layers) + len({name for each in symmetries for name in each.weights})
        least, by_layer = units.after + of_units.after, layers.after + of_layers.after
        pairs = tuple(PairScale(s.path, s.kind, *each) for s, each in zip(symmetries, of_units.pairs, strict=True))
        return cls(count, before, least, by_layer, pairs, tuple(found.blocks.reasons()))


def _share(least: float, total: float) -> float:
    return 1 - least / total if total > 0 else 0.0


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
        heads: of the attention blocks that a run shows.
        notes: why there is no graph.
    """

    scale: MovableScale | None = None
    followed: dict[str, str] = field(default_factory=dict)
    invariant: frozenset[str] = frozenset()
    constant: tuple[str, ...] = ()
    calls: dict[str, int] = field(default_factory=dict)
    mixtures: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    heads: tuple[HeadMeasurement, ...] = ()
    notes: tuple[str, ...] = ()


@torch.no_grad()
def structure_of(model: nn.Module, batch: Any = None, *, blocks: bool = False) -> Structure:
    """Read the structure of a model; never raises because of the model.

    It is traced, and run only where there may be blocks of attention: on a generated input, or on the batch where none
    can be made. `blocks`: run it also if it has more than :data:`LARGEST_UNASKED` weights.
    """
    model = unwrapped(model)
    mixing = [(site, mixture) for site in sites(model) if (mixture := facts_of(site.module).mixture) is not None]
    mixtures = {site.path: mixture(site.module) for site, mixture in mixing}
    try:
        why = _refusal(model)
        found = Structure(notes=(_not_measured(why),)) if why else _read(model, batch, blocks=blocks)
    except Exception as error:  # tracing runs the model's own methods, which may raise anything
        said = str(error).strip().partition("\n")[0][:200].removesuffix(".")
        raised = "" if isinstance(error, GonioError) else f"reading the model raised {type(error).__name__}: "
        found = Structure(notes=(_not_measured(raised + said),))
    return replace(found, mixtures=mixtures)


def _not_measured(why: str) -> str:
    return f"Scale between layers was not measured: {why}."


def _read(model: nn.Module, batch: Any, *, blocks: bool) -> Structure:
    """What the graph and, where there may be blocks, a run show; of a large model blocks alone."""
    total = sum(p.numel() for p in model.parameters())
    with evaluating(model) as twin:  # in train mode torch's spectral_norm takes a step at each read of a weight
        graph = trace(twin, training=False)
        runs: Callable[[], SameFunction] | str = partial(input_of, twin, batch)
        if total > LARGEST_UNASKED and not blocks:
            runs = f"it has {total:,} weights, and they are found by running it: extra_figures=('blocks',) does so"
        if total > LARGEST:
            why = f"it has {total:,} weights, more than {LARGEST:,}, and the graph was not read"
            found = Movable([], movable_in_blocks(graph, runs, frozenset(), argument="batch="), why)
        else:
            found = movable(graph, trace(twin, training=True), runs, argument="batch=")
        scale = MovableScale.of(found)
        notes: tuple[str, ...] = ()
        if found.untraced and (scale is None or total > LARGEST):
            why = found.untraced if total > LARGEST else f"the model cannot be traced ({found.untraced})"
            more = found.blocks.reasons() if scale is None else ["blocks alone were"]
            notes = (_not_measured(why + "".join(f", and {each}" for each in more)),)
        constant = tuple(dict.fromkeys(path for path, node in _zero_calls(graph) if _on_every_path(node)))
        parts = found.blocks.anatomy
        heads = () if parts is None else heads_in(parts, parameters_of(twin))
        silent: tuple[str, ...] = ()
        if batch is not None and parts is not None:
            heads, silent = with_logits(heads, parts, twin, batch)
        elif batch is not None:
            silent = tuple(say("Logits were not measured: {why}.", why=why) for why in found.blocks.left)
        return Structure(
            scale,
            graph.norm_after,
            graph.scale_invariant,
            constant,
            graph.call_counts,
            heads=heads,
            notes=(*notes, *silent),
        )


def _zero_calls(graph: Graph) -> Iterator[tuple[str, fx.Node]]:
    """The calls of layers and norms whose weight is 0, so that their output is the same for every input."""
    for path, module, node in graph.calls():
        weight = module._parameters.get("weight")
        scales = isinstance(module, WEIGHTED) or graph.facts(node).removes_scale
        if scales and weight is not None and _is_zero(weight):
            yield path, node


def _is_zero(weight: Tensor) -> bool:
    return not bool(weight[:1].any()) and not bool(weight.any())  # one filter shows it of nearly every weight


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
    return f"it has {total:,} weights, more than {LARGEST_RUN:,}" if total > LARGEST_RUN else ""


# --- training --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingFacts:
    """Batch sizes and weight decays, as far as they are known.

    Attributes:
        batch, last: samples per batch and process, and of an epoch's last batch.
        decayed: `id` of each Parameter under weight decay.
        optimizer: whose parameters are compared with the model's.
    """

    batch: int | None = None
    last: int | None = None
    decayed: frozenset[int] = frozenset()
    optimizer: torch.optim.Optimizer | None = None

    @classmethod
    def of(cls, loader: Any = None, optimizer: torch.optim.Optimizer | None = None) -> TrainingFacts:
        """Read a data loader, without drawing from it, and an optimizer.

        Raises:
            InvalidArgumentError: if they are something else.
        """
        if loader is not None and not hasattr(loader, "batch_size"):
            asked = "measure(loader=) reads the batch size of a DataLoader"
            raise InvalidArgumentError(asked, type(loader).__name__, "Pass the loader.")
        if optimizer is not None and not hasattr(optimizer, "param_groups"):
            asked = "measure(optimizer=) reads the weight decay of an optimizer"
            raise InvalidArgumentError(asked, type(optimizer).__name__, "Pass it.")
        groups = [] if optimizer is None else optimizer.param_groups
        decayed = frozenset(id(p) for group in groups if group.get("weight_decay", 0) for p in group["params"])
        return cls(*_sizes(loader), decayed, optimizer)


def _sizes(loader: Any) -> tuple[int | None, int | None]:
    """Samples of a batch and of the last one of an epoch; None if the loader does not tell."""
    source = loader if getattr(loader, "batch_size", None) else getattr(loader, "batch_sampler", None)
    batch = getattr(source, "batch_size", None)
    if not isinstance(batch, int) or batch < 1:
        return None, None
    if getattr(source, "drop_last", False):
        return batch, batch
    try:
        sampler: Any = getattr(source, "sampler", None)
        samples = len(sampler)
    except TypeError:  # there is none, or the sampler of an iterable data set has no length
        return batch, None
    return batch, (samples % batch or batch) if samples else None


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, TORCH_NORMS) or bool(facts_of(module).removes_scale)


@dataclass(frozen=True)
class NormUse:
    """One normalisation layer.

    Attributes:
        calls: how often it runs in one forward, as far as is known; else 1.
        positions: values per channel and sample; None if no batch was measured.
        frozen: whether it does not update its running statistics while the rest of the model trains.
        recomputed: whether activation checkpointing runs it twice.
    """

    path: str
    module: nn.Module
    calls: int
    positions: int | None
    frozen: bool
    recomputed: bool

    @property
    def has_statistics(self) -> bool:
        """Whether it has running statistics."""
        return self.module._buffers.get("running_mean") is not None

    @property
    def averages_over_batches(self) -> bool:
        """Whether it is a batch norm that updates its statistics in training."""
        return isinstance(self.module, _BatchNorm) and not self.frozen

    @property
    def values(self) -> int | None:
        """Number of values that are centred together, for a layer or group norm."""
        if isinstance(self.module, nn.LayerNorm):
            return prod(self.module.normalized_shape)
        if isinstance(self.module, nn.GroupNorm) and self.positions is not None:
            return self.positions * self.module.num_channels // self.module.num_groups
        return None

    def samples(self, batch: int | None) -> float:
        """The number of samples in its statistics, for a batch of this size in each process."""
        if batch is None:
            return float("inf")
        together = isinstance(self.module, nn.SyncBatchNorm) and several_ranks()
        return batch * (dist.get_world_size() if together else 1)


@dataclass(frozen=True)
class Outside:
    """What optimizers and a model do not have in common.

    Attributes:
        names: parameters of the model that require a gradient and are in no optimizer.
        others: number of the optimizers' parameters that are not in the model.
        shared: whether they have any parameter in common.
    """

    names: tuple[str, ...]
    others: int
    shared: bool

    @classmethod
    def of(cls, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Outside:
        """Compare by identity. Optimizers of copies of the parameters, as of half precision, count as those of them."""
        held = set[int]().union(*map(parameter_ids, optimizers))
        own = dict(model.named_parameters())
        known = set(map(id, own.values()))
        if held.isdisjoint(known) and any(holds_copies(each, own.values()) for each in optimizers):
            return cls((), 0, True)
        names = [name for name, parameter in own.items() if parameter.requires_grad and id(parameter) not in held]
        return cls(tuple(names), len(held - known), not held.isdisjoint(known))

    @property
    def harmless(self) -> bool:
        """Whether the optimizers train a part of the model and nothing else, as those of two networks that compete."""
        return not self.others


@dataclass(frozen=True)
class ModelFacts:
    """The facts that the rules on a whole model read.

    Attributes:
        norms: every normalisation layer.
        weighted: paths of the linear layers and convolutions; without factors of adapters, whose products alone count.
        decayed: paths of the weights under weight decay whose scale the function does not depend on.
        constant: as in :class:`Structure`. `signals`: of the measured batch, if there was one.
        as_built: paths of the layers that have the values of torch's initialisation, in a model that was trained.
        learning: paths of the modules of which a parameter requires a gradient.
        outside: what the optimizer and the model do not have in common; None without one.
    """

    norms: tuple[NormUse, ...]
    weighted: frozenset[str]
    training: TrainingFacts
    decayed: tuple[str, ...]
    constant: tuple[str, ...]
    signals: tuple[Signal, ...]
    as_built: tuple[str, ...]
    learning: frozenset[str]
    outside: Outside | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        structure: Structure,
        signals: Sequence[Signal],
        training: TrainingFacts,
        factors: Container[str] = (),
    ) -> ModelFacts:
        everything = sites(model)
        wrappers = [site.module for site in everything if "_checkpoint_wrapped_module" in site.module._modules]
        inside = {id(module) for wrapper in wrappers for module in wrapper.modules()}
        ran = {signal.path: signal for signal in signals}
        norms = []
        for path, module in ((s.path, s.module) for s in everything if _is_norm(s.module)):
            signal = ran.get(path)
            calls = max(structure.calls.get(path, 1), signal.calls if signal is not None else 1)
            positions = prod(signal.shape[2:]) if signal is not None else None
            frozen = model.training and not module.training
            norms.append(NormUse(path, module, calls, positions, frozen, id(module) in inside))
        free = [
            f"{site.path}.{name}" if site.path else name
            for site in everything
            for name, parameter in site.module._parameters.items()
            if id(parameter) in training.decayed and _is_free(site, name, structure)
        ]
        layers = [site.path for site in everything if isinstance(site.module, WEIGHTED)]
        weighted = frozenset(path for path in layers if path not in factors)
        own = [(s.path, p) for s in everything for p in s.module._parameters.values() if p is not None]
        learn = {path for path, p in own if p.requires_grad}
        around = (above for path in learn for above in accumulate(path.split("."), "{}.{}".format))
        return cls(
            norms=tuple(norms),
            weighted=weighted,
            training=training,
            decayed=tuple(free),
            constant=structure.constant,
            signals=tuple(signals),
            as_built=layers_as_built(model),
            learning=frozenset({*around, ""} if learn else ()),
            outside=None if training.optimizer is None else Outside.of(model, [training.optimizer]),
        )


def _is_free(site: Site, name: str, structure: Structure) -> bool:
    """Whether the function does not depend on the scale of this weight."""
    return parametrization_of(site.module, name) is not None or (name == "weight" and site.path in structure.invariant)
