"""Which scales can move in a model without changing its function, and the least sum of squares over them.

`balance_` moves them and `measure` reports what that would save: both ask :func:`movable`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx, nn

from gonio.errors import with_article
from gonio.messages import say
from gonio.surgery.channels import Position, why_unread
from gonio.surgery.equivalent import SameFunction
from gonio.surgery.facts import TORCH_NORMS, WEIGHTED, facts_of, tail_of
from gonio.surgery.graph import ELEMENTWISE_FUNCTIONS, Graph, called_function, reads_size, value_inputs
from gonio.surgery.symmetries import CONVERGED, SWEEPS, BlockSymmetries, block_symmetries

_AFTER_GATES = (nn.Linear, nn.Dropout, nn.Identity)
_PRODUCTS = frozenset({"matmul", "bmm", "einsum", "scaled_dot_product_attention"})


@dataclass(frozen=True)
class Movable:
    """The scales of a model, free and pinned.

    Attributes:
        variables: those between the layers of the graph; none where the model cannot be traced.
        blocks: those of attention and MLP blocks, found by running the model.
        untraced: why the model cannot be traced; empty if it can.
    """

    variables: list[ScaleVariable]
    blocks: BlockSymmetries
    untraced: str

    @property
    def free(self) -> list[ScaleVariable]:
        """The variables that can move."""
        return [variable for variable in self.variables if variable.free()]


def movable(
    evaluation: Graph, training: Graph, same: Callable[[], SameFunction] | str, *, argument: str = "example="
) -> Movable:
    """What can move, by the graphs of a model in evaluation and in training mode.

    Args:
        same: gives the inputs of the model; called, and the model run, only where there may be blocks of attention or
            an MLP: if the model cannot be traced, has products of activations, gates a linear layer or calls layers of
            several matrices. Or why it is not to be run.
        argument: the one by which the caller takes inputs.
    """
    untraced = next((graph.reason for graph in (evaluation, training) if graph.reason), "")
    variables = [] if untraced else _variables(evaluation, training)
    layers = {
        layer for v in variables if v.free() for layer in (*v.producers, *(consumer for consumer, _ in v.consumers))
    }
    taken = frozenset(id(p) for layer in layers for p in layer.module.parameters(recurse=False))
    return Movable(variables, movable_in_blocks(evaluation, same, taken, argument=argument), untraced)


def _variables(evaluation: Graph, training: Graph) -> list[ScaleVariable]:
    """Those of the graph in evaluation; pinned unless the graph in training has the same one, and it is free."""
    free = {_ends(variable) for variable in scale_variables(training) if variable.free()}
    variables = scale_variables(evaluation)
    for variable in variables:
        if variable.free() and _ends(variable) not in free:
            variable.pin(say("it is used differently in training and in evaluation"))
    return variables


def _ends(variable: ScaleVariable) -> tuple[frozenset[str], frozenset[str]]:
    """Paths of producers and consumers, which identify a variable in every graph of one model."""
    consumers = frozenset(layer.path for layer, _ in variable.consumers)
    return frozenset(layer.path for layer in variable.producers), consumers


def movable_in_blocks(
    graph: Graph, same: Callable[[], SameFunction] | str, taken: frozenset[int], *, argument: str = "example="
) -> BlockSymmetries:
    """The symmetries of attention and MLP blocks, of a model in which there may be some; as :func:`movable`."""
    if not may_attend(graph):
        return BlockSymmetries()
    if isinstance(same, str):
        return BlockSymmetries(left={same: (("attention and MLP blocks", ""),)})
    given = same()
    if given.input is None:
        why = f"they are found by running it, and {given.why}; pass {argument}"
        return BlockSymmetries(left={why: (("attention and MLP blocks", ""),)})
    return block_symmetries(given.model, given.input, traced=not graph.reason, taken=taken)


def may_attend(graph: Graph) -> bool:
    """Whether a model may have blocks of attention or an MLP with a gate, which a run would show."""
    return bool(graph.reason) or any(_of_blocks(graph, node) for node in graph.nodes)


def _of_blocks(graph: Graph, node: fx.Node) -> bool:
    """Whether a node is a product of matrices, a gate of a linear layer, a layer of several matrices, or a kernel."""
    module, called = graph.called(node), called_function(node)
    gates = called in ("mul", "imul") and any(isinstance(graph.called(user), _AFTER_GATES) for user in node.users)
    matrices = module is not None and not isinstance(module, WEIGHTED) and any(p.ndim > 1 for p in module.parameters())
    kernel = module is not None and facts_of(module).attends is not None
    return gates or matrices or kernel or called in _PRODUCTS


# --- scales on the graph ------------------------------------------------------------------------------


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


# --- the least sum of squares -------------------------------------------------------------------------


@torch.no_grad()
def least_scales(
    variables: list[ScaleVariable], *, per_channel: bool, sweeps: int = SWEEPS, tolerance: float = CONVERGED
) -> LeastSum:
    r"""The least sum of squared weights over the free scales, by coordinate descent.

    The sum consists of terms :math:`s_i^2\, m_{ij} / t_j^2` and so is convex in the logarithms of the scales.
    For one scale with all others fixed it is :math:`s^2 P + Q / s^2`, least at :math:`s^4 = Q / P`, where P is the
    square of the rows that produce the channel and Q of the columns that consume it. In :math:`\log s` this is a
    hyperbolic cosine about its minimum, so steps of up to twice the distance descend. Successive over-relaxation uses
    them: the number of sweeps is proportional to the length of a chain instead of its square.

    The variables must be free. `tolerance` is the largest change of a log scale at convergence.
    """
    least = LeastSum(variables)
    largest = 0.0
    for _ in range(sweeps):
        largest = max((least.improve_(variable, per_channel=per_channel) for variable in variables), default=0.0)
        if largest < tolerance:
            break
    least.after, least.converged = least.sum_of_squares(), largest < tolerance
    return least


class LeastSum:
    """Coordinate descent: the squared factors of the rows and columns of each layer; see :func:`least_scales`.

    Attributes:
        layers: those that take part.
        before: the sum of squares of these layers.
        after: the same at the factors found.
        converged: whether no factor changes any more; those found are valid, but not the best, if it is False.
    """

    def __init__(self, variables: list[ScaleVariable]) -> None:
        self.scales = {v: torch.ones(v.channels, dtype=torch.float64, device="cpu") for v in variables}
        parts = [part for v in variables for part in (*v.producers, *(c for c, _ in v.consumers))]
        self.layers = list(dict.fromkeys(parts))
        self.rows = {layer: torch.ones(layer.out_channels, dtype=torch.float64, device="cpu") for layer in self.layers}
        self.columns = {
            layer: torch.ones(layer.in_channels, dtype=torch.float64, device="cpu") for layer in self.layers
        }
        self.lengthened = _over_relaxation(variables)
        self.before = self.after = self.sum_of_squares()
        self.converged = False

    def sum_of_squares(self) -> float:
        """The sum of squares of all layers at the present factors."""
        return math.fsum(float(self._made(layer).sum()) for layer in self.layers)

    def factors(self, layer: ChannelMap) -> tuple[Tensor, Tensor]:
        """The factors of a layer's rows (outputs) and columns (inputs)."""
        return self.rows[layer].sqrt(), self.columns[layer].sqrt()

    def improve_(self, variable: ScaleVariable, *, per_channel: bool) -> float:
        """Give one variable its best scales, the others held; the largest step of a log scale."""
        # a layer that both makes and reads the tensor keeps its norm under a common factor
        loops = set(variable.producers) & {layer for layer, _ in variable.consumers}
        moved = 0.0
        if loops or not per_channel:
            made = [self._made(layer).sum() for layer in variable.producers if layer not in loops]
            used = [self._used(layer, per).sum() for layer, per in variable.consumers if layer not in loops]
            if made and used:
                shape = (variable.channels,)
                total_made, total_used = torch.stack(made).sum(), torch.stack(used).sum()
                moved = self._step_(variable, total_made.expand(shape), total_used.expand(shape), power=0.25)
        if not per_channel:
            return moved
        made_each = torch.stack([self._made(layer) for layer in variable.producers]).sum(0)
        used_each = torch.stack([self._used(layer, per) for layer, per in variable.consumers]).sum(0)
        # In a loop the channels of one step depend on each other: a full step of all of them overshoots,
        # half of it descends.
        return max(moved, self._step_(variable, made_each, used_each, power=0.125 if loops else 0.25))

    def _made(self, layer: ChannelMap) -> Tensor:
        """The squares of a layer's rows."""
        columns = self.columns[layer].view(layer.squares.shape[0], -1, 1).to(layer.squares.device)
        return self.rows[layer] * torch.bmm(layer.squares, columns).flatten().cpu()

    def _used(self, layer: ChannelMap, per_channel: int) -> Tensor:
        """The squares of a layer's columns, summed over the features of each channel."""
        rows = self.rows[layer].view(layer.squares.shape[0], 1, -1).to(layer.squares.device)
        columns = self.columns[layer] * torch.bmm(rows, layer.squares).flatten().cpu()
        return columns.view(-1, per_channel).sum(1)

    def _step_(self, variable: ScaleVariable, made: Tensor, used: Tensor, *, power: float) -> float:
        # a channel that is never produced or never used has no best scale: it stays
        step = torch.where((made > 0) & (used > 0), (used / made).pow(power * self.lengthened[variable]), 1.0)
        self.scales[variable] *= step
        squares = self.scales[variable].square()
        for layer in variable.producers:
            self.rows[layer] = squares
        for layer, per_channel in variable.consumers:
            self.columns[layer] = 1 / squares.repeat_interleave(per_channel)
        return float(step.log().abs().max()) if step.numel() else 0.0


def _over_relaxation(variables: list[ScaleVariable]) -> dict[ScaleVariable, float]:
    """The factor of each variable's steps: 1 for a variable on which no other one depends."""
    group = {variable: {variable} for variable in variables}
    touching: dict[ChannelMap, ScaleVariable] = {}
    for variable in variables:
        for layer in (*variable.producers, *(layer for layer, _ in variable.consumers)):
            other = touching.setdefault(layer, variable)
            if group[other] is not group[variable]:
                joined = group[other] | group[variable]
                group.update(dict.fromkeys(joined, joined))
    return {variable: 2 / (1 + math.sin(math.pi / (len(group[variable]) + 1))) for variable in variables}
