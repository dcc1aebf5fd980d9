"""Who reads each output channel of a layer, and what is done to the channel in between."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from gonio.errors import with_article
from gonio.geometry.scale import HOMOGENEOUS
from gonio.messages import say
from gonio.surgery.facts import ACTIVATIONS, TORCH_NORMS, WEIGHTED, computes_plainly, facts_of, tail_of
from gonio.surgery.fold import affine_map
from gonio.surgery.graph import (
    POOLING_FUNCTIONS,
    Graph,
    averages_positions,
    called_function,
    flattens_from_dim_1,
    reads_size,
    value_inputs,
)

_NOTHING = ("contiguous", "dropout")  # functions that do nothing in evaluation mode


@dataclass(frozen=True, eq=False)
class Operation:
    """What is done in evaluation mode to each channel alone.

    Attributes:
        function: maps the constant of each channel, (channels,) in float64.
        homogeneous: whether f(c·x) = c·f(x) for c > 0; `linear`: for every c, and sums too.
        alike: whether it is the same function for every channel.
        keeps_constants: whether a constant channel stays constant: not where an average is over padding, too.
        norm: the batch norm, of which this is the affine map `scale`·x + `shift` per channel.
    """

    function: Callable[[Tensor], Tensor]
    homogeneous: bool = False
    linear: bool = False
    alike: bool = True
    keeps_constants: bool = True
    norm: nn.Module | None = None
    scale: Tensor = field(default_factory=lambda: torch.ones((), device="cpu", dtype=torch.float32))
    shift: Tensor = field(default_factory=lambda: torch.zeros((), device="cpu", dtype=torch.float32))


@dataclass(frozen=True, eq=False)
class Reading:
    """How a later layer reads the channels: after these operations, each as so many features."""

    path: str
    module: nn.Module
    per_channel: int
    operations: tuple[Operation, ...]


@dataclass(eq=False)
class OutputChannels:
    """The output channels of a weighted layer; `why` says why not all of their readers are known, if so."""

    path: str
    module: nn.Module
    readings: list[Reading] = field(default_factory=list)
    why: str = ""

    def stop(self, why: str) -> None:
        """Something else reads the channels; the first reason stays."""
        self.why = self.why or why


def output_channels(graph: Graph) -> dict[str, OutputChannels]:
    """The output channels of every weighted layer of a traced model by path, in the order of execution.

    Batch norms with running statistics, activations, dropout, pooling, means over positions and flattening are passed:
    they act on each channel alone in evaluation mode. Everything else (a sum, another norm, the model's output) reads
    the channels in a way that is not followed.

    Example:
        >>> from gonio.surgery.graph import trace
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        >>> found = output_channels(trace(model, training=False))
        >>> [reading.path for reading in found["0"].readings], found["2"].why
        (['2'], "it is the model's output")
    """
    reader = _ChannelReader(graph)
    for node in graph.nodes:
        reader.read(node)
    for channels in reader.found.values():
        if not channels.readings:
            channels.stop("no layer reads its output")
    return reader.found


@dataclass(frozen=True)
class Position:
    """Where the channels of a tensor are.

    `axis` is "channels" (dim 1, before `spatial` further dims), "features" (the last dim) or "flat" (dim 1 after
    flattening channels and positions, so that each channel is a run of features).
    """

    axis: str
    spatial: int = 0

    @classmethod
    def made_by(cls, module: nn.Module) -> Position:
        """Where the channels of a weighted layer's output are."""
        return cls("features") if isinstance(module, nn.Linear) else cls("channels", module.weight.dim() - 2)  # type: ignore[operator]

    def after(self, graph: Graph, node: fx.Node) -> Position | None:
        """Where they are after flattening, pooling or a mean over positions; None after any other operation."""
        module, called, facts = graph.called(node), called_function(node), graph.facts(node)
        if flattens_from_dim_1(node, module, called):
            return Position("flat") if self.axis == "channels" else self
        if self.axis != "channels":
            return None
        if (facts.homogeneous and facts.acts_on == "channels") or called in POOLING_FUNCTIONS:
            return self
        if called == "mean" and averages_positions(node, self.spatial):
            return self if node.kwargs.get("keepdim") else Position("features")
        return None

    def features_of_each(self, channels: int, module: nn.Module) -> int:
        """As how many features a weighted layer reads each of the channels; 0 if it does not read them one by one."""
        linear = isinstance(module, nn.Linear)
        if self.axis not in (("features", "flat") if linear else ("channels",)):
            return 0
        read = int(module.in_features if linear else module.in_channels)  # type: ignore[arg-type]
        each = read // channels if self.axis == "flat" else 1
        return each if channels * each == read else 0


def why_unread(graph: Graph, path: str, module: nn.Module) -> str:
    """Why the channels that a weighted layer reads and makes are not followed; empty if they are."""
    why = graph.why_pinned(path, module)
    if not why and (isinstance(module, nn.Bilinear) or not computes_plainly(module)):
        why = say("{path} is {kind}", path=path, kind=with_article(type(module).__name__))
    return why


@dataclass(frozen=True)
class _ChannelFlow:
    """The tensor of a node: whose channels it holds, where they are, and after which operations."""

    source: OutputChannels
    count: int
    position: Position
    operations: tuple[Operation, ...] = ()

    def then(self, operation: Operation) -> _ChannelFlow:
        return replace(self, operations=(*self.operations, operation))


class _ChannelReader:
    """Reads the nodes in order and follows the channels of each weighted layer."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.flow: dict[fx.Node, _ChannelFlow] = {}
        self.found: dict[str, OutputChannels] = {}

    def read(self, node: fx.Node) -> None:
        module = self.graph.called(node)
        if reads_size(node):
            return
        flows = [self.flow[source] for source in node.all_input_nodes if source in self.flow]
        if isinstance(module, WEIGHTED):
            self._read_weighted(node, module, flows)
            return
        alone = len(flows) == len(value_inputs(node)) == 1
        after = self._after(node, module, flows[0]) if alone else None
        if after is not None:
            self.flow[node] = after
            return
        name = type(module).__name__ if module is not None else called_function(node) or node.name
        why = say("{name} ({node}) reads its output", name=name, node=node.name)
        why = say("it is the model's output") if node.op == "output" else why
        for flow in flows:
            flow.source.stop(why)

    def _read_weighted(self, node: fx.Node, module: nn.Module, flows: list[_ChannelFlow]) -> None:
        path = str(node.target)
        refusal = why_unread(self.graph, path, module)
        for flow in flows:
            if not refusal and (each := flow.position.features_of_each(flow.count, module)):
                flow.source.readings.append(Reading(path, module, each, flow.operations))
            else:
                flow.source.stop(refusal or say("{path} does not read its channels one by one", path=path))
        why = refusal or self.graph.why_read_at_rest(module)
        own = self.found.setdefault(path, OutputChannels(path, module, why=why))
        if not refusal:
            count: Any = module.out_features if isinstance(module, nn.Linear) else module.out_channels
            self.flow[node] = _ChannelFlow(own, count, Position.made_by(module))

    def _after(self, node: fx.Node, module: nn.Module | None, flow: _ChannelFlow) -> _ChannelFlow | None:
        """The flow after an operation that acts on each channel alone; None for any other."""
        called, facts = called_function(node), self.graph.facts(node)
        if isinstance(module, TORCH_NORMS[0]):
            return self._after_norm(node, module, flow)
        if module is not None and (each := _on_entries(module)) is not None:
            return flow.then(each)
        if called.removesuffix("_") in (*ACTIVATIONS, *_NOTHING):
            return flow.then(_of_function(node, called))
        after = flow.position.after(self.graph, node)
        if after is None:
            return None
        flow = replace(flow, position=after)
        if flattens_from_dim_1(node, module, called):
            return flow
        mean = bool(facts.linear) or "avg" in called or called == "mean"
        keeps = not mean or called.startswith(("adaptive", "mean")) or not _sums(node, module)
        return flow.then(Operation(_same, homogeneous=True, linear=mean, keeps_constants=keeps))

    def _after_norm(self, node: fx.Node, module: nn.Module, flow: _ChannelFlow) -> _ChannelFlow | None:
        why_not, dims = self.graph.facts(node).why_not_affine, self.graph.dims_of(node)
        if why_not is None or why_not(module) is not None or self.graph.why_pinned(str(node.target), module):
            return None
        axis = flow.position.axis
        if axis == "flat" or dims is None or (axis == "features" and dims > 2):
            return None  # the channels of the norm are not those of the layer
        scale, shift = (value.detach().cpu() for value in affine_map(module))
        after = flow.then(Operation(lambda k: scale * k + shift, norm=module, scale=scale, shift=shift))
        for part in tail_of(module):
            each = _on_entries(part)
            if each is None:
                return None
            after = after.then(each)
        return after


def _same(constants: Tensor) -> Tensor:
    return constants


def _on_entries(module: nn.Module) -> Operation | None:
    """The operation of a layer that acts on each entry alone; None for any other."""
    facts = facts_of(module)
    if facts.acts_on != "entries" and not facts.activation:
        return None
    own = [p for p in module.parameters() if p.numel() > 1]
    return Operation(
        partial(_run, module), homogeneous=bool(facts.homogeneous), linear=bool(facts.linear), alike=not own
    )


def _run(module: nn.Module, constants: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = copy.deepcopy(module).cpu().double().eval()(constants.clone().view(1, -1))
    return found.view(-1)


def _of_function(node: fx.Node, called: str) -> Operation:
    """The operation of a call of an activation, of dropout or of a function that does nothing."""
    name = called.removesuffix("_")
    if name == "contiguous":
        return Operation(_same, homogeneous=True, linear=True)
    if name == "dropout":
        given: Any = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True)
        drops = given is not False
        return Operation(_same, homogeneous=True, linear=True, alike=not drops, keeps_constants=not drops)
    return Operation(partial(_call, node), homogeneous=name in HOMOGENEOUS)


def _call(node: fx.Node, constants: Tensor) -> Tensor:
    rest: Any = node.args[1:]
    options: Any = dict(node.kwargs)
    x = constants.clone()
    if "input" in options:
        options["input"] = x
        found: Tensor = node.target(**options)  # type: ignore[operator]
        return found
    if node.op == "call_method":
        method: Tensor = getattr(x, str(node.target))(*rest, **options)
        return method
    made: Tensor = node.target(x, *rest, **options)  # type: ignore[operator]
    return made


def _sums(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether the result of an average pooling, or of one that may be one, is not a mean of its inputs alone.

    It reads zeros around the input, or divides by another number.
    """
    if module is None:
        return len(node.args) > 3 or not {"padding", "divisor_override"}.isdisjoint(node.kwargs)
    padding = getattr(module, "padding", 0)
    padded = any(padding) if isinstance(padding, (tuple, list)) else bool(padding)
    return padded or getattr(module, "divisor_override", None) is not None
