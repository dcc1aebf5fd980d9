"""Scales that can move between the layers of a traced model without changing its function."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor, fx, nn

from gonio.errors import with_article
from gonio.messages import say
from gonio.surgery.channels import Position, why_unread
from gonio.surgery.facts import TORCH_NORMS, WEIGHTED, facts_of, tail_of
from gonio.surgery.graph import ELEMENTWISE_FUNCTIONS, Graph, called_function, reads_size, value_inputs


def scale_variables(graph: Graph) -> list[ScaleVariable]:
    """One variable for each tensor between layers, free and pinned; new objects at each call.

    If only positively homogeneous operations, φ(cx) = cφ(x) for c > 0, lie between the producers and the consumers
    of a tensor, the rows of the producers can be multiplied by c and the columns of the consumers divided by it
    without changing the function. A sum ties its terms to one variable. Any other operation pins the tensors that
    it reads to scale 1.
    """
    reader = _ScaleReader(graph)
    for node in graph.nodes:
        reader.read(node)
    return [variable for variable in reader.variables if variable not in reader.merged]


@dataclass(eq=False)
class ChannelMap:
    """One weight, of a weighted layer or of a norm's affine part, as a map between channels.

    Attributes:
        squares: (groups, out/groups, in/groups) float64: the sums of squared entries between a channel that
            is read and one that is made. For a normalisation layer's affine map (1, channels, 1).
    """

    path: str
    module: nn.Module
    squares: Tensor = field(init=False)

    def __post_init__(self) -> None:
        module = self.module
        weight: Tensor = module.weight.detach().double().square()  # type: ignore[operator]
        if not isinstance(module, WEIGHTED):
            self.squares = weight.view(1, -1, 1)
        elif isinstance(module, nn.Linear):
            self.squares = weight.unsqueeze(0)
        else:
            blocks = weight.flatten(2).sum(2).unflatten(0, (int(module.groups), -1))  # type: ignore[arg-type]
            self.squares = blocks.transpose(1, 2) if module.transposed else blocks

    @property
    def is_norm(self) -> bool:
        """Whether it is a normalisation layer's affine map, which has no input side."""
        return not isinstance(self.module, WEIGHTED)

    @property
    def out_channels(self) -> int:
        return self.squares.shape[0] * self.squares.shape[1]

    @property
    def in_channels(self) -> int:
        return self.squares.shape[0] * self.squares.shape[2]


@dataclass(eq=False)
class ScaleVariable:
    """One free scale per channel of a tensor, with the layers that produce and consume it."""

    channels: int  # 0 for the output of a layer that is left out
    producers: list[ChannelMap] = field(default_factory=list)
    consumers: list[tuple[ChannelMap, int]] = field(default_factory=list)  # and features per channel
    pinned: str = ""  # the reason why it must stay 1

    def free(self) -> bool:
        """Whether it can move."""
        return not self.pinned and bool(self.producers) and bool(self.consumers)

    def pin(self, why: str) -> None:
        """Hold it at 1; the first reason stays."""
        self.pinned = self.pinned or why


@dataclass(frozen=True)
class _Flow:
    """The tensor of a node: its variable, and where its channels are."""

    variable: ScaleVariable
    position: Position


class _ScaleReader:
    """Reads the nodes in order and records the scale of each tensor: where it comes from and where it goes."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.flow: dict[fx.Node, _Flow] = {}
        self.merged: dict[ScaleVariable, ScaleVariable] = {}
        self.variables: list[ScaleVariable] = []

    def read(self, node: fx.Node) -> None:
        module = self.graph.called(node)
        if reads_size(node):
            return
        if isinstance(module, WEIGHTED):
            self._read_weighted(node, module)
        elif isinstance(module, TORCH_NORMS[0]):
            self._read_batch_norm(node, module)
        elif called_function(node) in ("add", "iadd", "add_"):
            self._read_sum(node)
        elif (after := self._after(node)) is not None:
            self.flow[node] = after
        elif node.op == "output":
            self._pin_inputs(node, say("it is the model's output"))
        else:
            name = type(module).__name__ if module is not None else called_function(node) or node.name
            why = say("{name} ({node}) is not known to be positively homogeneous in it", name=name, node=node.name)
            self._pin_inputs(node, why)

    def _read_weighted(self, node: fx.Node, module: nn.Module) -> None:
        path = str(node.target)
        if refusal := why_unread(self.graph, path, module):
            self._pin_inputs(node, refusal)
            self.variables.append(ScaleVariable(0, pinned=refusal))
            return
        layer = ChannelMap(path, module)
        for flow in self._inputs(node):
            variable = self._root(flow.variable)
            if each := flow.position.features_of_each(variable.channels, module):
                variable.consumers.append((layer, each))
            else:
                variable.pin(say("{path} does not read its channels one by one", path=path))
        made = self._new(layer)
        if why := self.graph.why_read_at_rest(module):
            made.pin(why)
        self.flow[node] = _Flow(made, Position.made_by(module))

    def _read_batch_norm(self, node: fx.Node, module: nn.Module) -> None:
        path, flows = str(node.target), self._inputs(node)
        self._pin_inputs(node, say("{kind} normalises it", kind=with_article(type(module).__name__)))
        known = self.graph.facts(node).why_not_affine is not None and module._parameters.get("weight") is not None
        if not known or self.graph.why_pinned(path, module):
            return
        dims = self.graph.dims_of(node)
        if dims is None or (dims > 2 and flows and flows[0].position.axis == "features"):
            return  # (N, C), (N, C, L) or more, or the channels are not those of the layer before
        variable = self._new(ChannelMap(path, module))
        self.flow[node] = _Flow(variable, Position("features" if dims == 2 else "channels", dims - 2))
        for part in tail_of(module):
            facts = facts_of(part)
            if not facts.homogeneous or facts.acts_on != "entries":
                told = {"kind": type(part).__name__, "path": path}
                variable.pin(say("the {kind} in {path} is not positively homogeneous in it", **told))

    def _read_sum(self, node: fx.Node) -> None:
        known = self._inputs(node)
        if len(known) != 2 or len(node.args) != 2 or node.kwargs:
            self._pin_inputs(node, say("it is added to a tensor of fixed scale ({node})", node=node.name))
            return
        a, b = self._root(known[0].variable), self._root(known[1].variable)
        if a.channels != b.channels or known[0].position != known[1].position:
            self._pin_inputs(node, say("it is added to a tensor of another shape ({node})", node=node.name))
            return
        if a is not b:
            a.producers += b.producers
            a.consumers += b.consumers
            a.pinned = a.pinned or b.pinned
            self.merged[b] = a
        self.flow[node] = _Flow(a, known[0].position)

    def _after(self, node: fx.Node) -> _Flow | None:
        """The flow after a positively homogeneous operation; None for any other."""
        flows = self._inputs(node)
        if len(value_inputs(node)) != 1 or not flows:
            return None
        flow, facts = flows[0], self.graph.facts(node)
        if (facts.homogeneous and facts.acts_on == "entries") or called_function(node) in ELEMENTWISE_FUNCTIONS:
            return flow
        after = flow.position.after(self.graph, node)
        return None if after is None else replace(flow, position=after)

    def _inputs(self, node: fx.Node) -> list[_Flow]:
        return [self.flow[source] for source in node.all_input_nodes if source in self.flow]

    def _pin_inputs(self, node: fx.Node, why: str) -> None:
        for flow in self._inputs(node):
            self._root(flow.variable).pin(why)

    def _new(self, producer: ChannelMap) -> ScaleVariable:
        variable = ScaleVariable(producer.out_channels, [producer])
        self.variables.append(variable)
        return variable

    def _root(self, variable: ScaleVariable) -> ScaleVariable:
        while variable in self.merged:
            variable = self.merged[variable]
        return variable
