"""Which scales of a network can move: one free variable per tensor between layers, read off the graph.

A tensor that flows only through positively homogeneous operations, φ(cx) = cφ(x) for c > 0, between the
layers that produce it and those that consume it can be multiplied by any c > 0 without changing the
function: the producers' rows are multiplied by c, the consumers' columns divided by it. A sum ties the
tensors that it adds to one variable. Anything else pins the tensors that it touches to scale 1.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn

from gonio.surgery.graph import WEIGHTED, Traced, called_function

__all__ = ["Layer", "Variable", "scale_variables"]

_ELEMENTWISE_MODULES = (nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.Identity, nn.modules.dropout._DropoutNd)
_ELEMENTWISE_FUNCTIONS = frozenset({"relu", "relu_", "leaky_relu", "dropout", "contiguous"})
_POOLING_MODULES = (
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
)
_POOLING_FUNCTIONS = frozenset({"max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d"})
_CONV_TRANSPOSE = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(eq=False)
class Layer:
    """One weight as a map between channels: `squares[o, i]` is the sum of its squared entries there."""

    path: str
    module: nn.Module
    squares: Tensor  # (out, in) float64

    @property
    def is_norm(self) -> bool:
        """Whether it is a normalisation layer's affine map, which has no input side."""
        return not isinstance(self.module, WEIGHTED)


@dataclass(eq=False)
class Variable:
    """One free scale per channel of a tensor, with the layers that produce and consume it."""

    channels: int  # 0 where it stands for the output of a layer that is left out
    producers: list[Layer] = field(default_factory=list)
    consumers: list[tuple[Layer, int]] = field(default_factory=list)  # and features per channel
    pinned: str = ""  # the reason why it must stay 1

    def free(self) -> bool:
        return not self.pinned and bool(self.producers) and bool(self.consumers)


def scale_variables(traced: Traced) -> list[Variable]:
    """All scale variables of a traced model, free and pinned."""
    reader = _Reader(traced)
    for node in traced.graph.nodes if traced.graph is not None else ():
        reader.read(node)
    return reader.variables()


@dataclass(frozen=True)
class _Flow:
    """The tensor of a node: its variable, and where its channels are.

    `axis` is "channels" (dim 1, before spatial dims), "features" (the last dim) or "flat" (dim 1 after
    flattening channels and positions, so that each channel is a run of features).
    """

    variable: Variable
    axis: str


class _Reader:
    """Walks the graph once and notes where each node's scale comes from and goes to."""

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.flow: dict[fx.Node, _Flow] = {}
        self.merged: dict[Variable, Variable] = {}
        self.all: list[Variable] = []
        self.calls = Counter(path for path, _, _ in traced.calls())
        self.owners = Counter(id(p) for m in traced.model.modules() for p in m._parameters.values() if p is not None)

    def variables(self) -> list[Variable]:
        return [variable for variable in self.all if variable not in self.merged]

    def read(self, node: fx.Node) -> None:
        module = self.traced.model.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, WEIGHTED):
            self._read_weighted(node, module)
        elif isinstance(module, nn.modules.batchnorm._BatchNorm):
            self._read_batch_norm(node, module)
        elif called_function(node) in ("add", "iadd", "add_"):
            self._add(node)
        elif (after := self._axis_after(node, module)) is not None:
            source = node.all_input_nodes[0]
            self.flow[node] = _Flow(self.flow[source].variable, after)
        else:
            self._pin_inputs(node, self._why(node, module))

    # --- what each kind of node does ---------------------------------------------------------------

    def _read_weighted(self, node: fx.Node, module: nn.Module) -> None:
        path = str(node.target)
        refusal = self._refusal(path, module)
        if refusal:
            self._pin_inputs(node, refusal)
            self.all.append(Variable(0, pinned=refusal))
            return
        layer = Layer(path, module, _squares(module))
        for source in node.all_input_nodes:
            if source in self.flow:
                self._consume(self.flow[source], layer)
        axis = "features" if isinstance(module, nn.Linear) else "channels"
        self.flow[node] = _Flow(self._new(layer), axis)

    def _read_batch_norm(self, node: fx.Node, module: nn.Module) -> None:
        path = str(node.target)
        axes = {self.flow[source].axis for source in node.all_input_nodes if source in self.flow}
        self._pin_inputs(node, f"{path} normalises it")
        if isinstance(module, nn.BatchNorm1d) and len(axes) != 1:
            return  # (N, C) or (N, C, L): not to be told from the graph
        if module._parameters.get("weight") is None or self._refusal(path, module):
            return
        squares = module.weight.detach().double().square().view(-1, 1)  # type: ignore[operator]
        axis = axes.pop() if isinstance(module, nn.BatchNorm1d) else "channels"
        self.flow[node] = _Flow(self._new(Layer(path, module, squares)), axis)

    def _consume(self, flow: _Flow, layer: Layer) -> None:
        variable, width = self._root(flow.variable), layer.squares.shape[1]
        per_channel = width // variable.channels if flow.axis == "flat" else 1
        wanted = "channels" if not isinstance(layer.module, nn.Linear) else ("features", "flat")
        if flow.axis not in wanted or variable.channels * per_channel != width:
            self._pin(variable, f"{layer.path} does not read its channels one by one")
            return
        variable.consumers.append((layer, per_channel))

    def _add(self, node: fx.Node) -> None:
        sources = node.all_input_nodes
        known = [self.flow[source] for source in sources if source in self.flow]
        if len(known) != 2 or len(node.args) != 2 or node.kwargs:
            self._pin_inputs(node, f"it is added to a tensor of fixed scale ({node.name})")
            return
        a, b = self._root(known[0].variable), self._root(known[1].variable)
        if a.channels != b.channels or known[0].axis != known[1].axis:
            self._pin_inputs(node, f"it is added to a tensor of another shape ({node.name})")
            return
        if a is not b:
            a.producers += b.producers
            a.consumers += b.consumers
            a.pinned = a.pinned or b.pinned
            self.merged[b] = a
        self.flow[node] = _Flow(a, known[0].axis)

    def _axis_after(self, node: fx.Node, module: nn.Module | None) -> str | None:
        """Where the channels are after a positively homogeneous operation; None for any other."""
        if len(node.all_input_nodes) != 1 or node.all_input_nodes[0] not in self.flow:
            return None
        axis = self.flow[node.all_input_nodes[0]].axis
        called = called_function(node)
        if isinstance(module, _ELEMENTWISE_MODULES) or called in _ELEMENTWISE_FUNCTIONS:
            return axis
        if isinstance(module, _POOLING_MODULES) or called in _POOLING_FUNCTIONS:
            return axis if axis == "channels" else None
        if _flattens_from_dim_1(node, module, called):
            return "flat" if axis == "channels" else axis
        if called == "mean" and axis == "channels":
            return _axis_after_mean(node)
        return None

    def _pin_inputs(self, node: fx.Node, why: str) -> None:
        for source in node.all_input_nodes:
            if source in self.flow:
                self._pin(self._root(self.flow[source].variable), why)

    # --- helpers -----------------------------------------------------------------------------------

    def _new(self, producer: Layer) -> Variable:
        variable = Variable(producer.squares.shape[0], [producer])
        self.all.append(variable)
        return variable

    def _root(self, variable: Variable) -> Variable:
        while variable in self.merged:
            variable = self.merged[variable]
        return variable

    @staticmethod
    def _pin(variable: Variable, why: str) -> None:
        variable.pinned = variable.pinned or why

    def _refusal(self, path: str, module: nn.Module) -> str:
        if self.calls[path] > 1:
            return f"{path} runs more than once"
        if module._parameters.get("weight") is not getattr(module, "weight", None):
            return f"{path} has a parametrized weight"
        if any(self.owners[id(p)] > 1 for p in module._parameters.values() if p is not None):
            return f"{path} shares its weight"
        if isinstance(module, nn.Bilinear) or type(module).__module__.startswith("gonio."):
            return f"{path} is a {type(module).__name__}"
        return ""

    def _why(self, node: fx.Node, module: nn.Module | None) -> str:
        if node.op == "output":
            return "it is the model's output"
        name = type(module).__name__ if module is not None else called_function(node)
        return f"{name} ({node.name}) is not positively homogeneous in it"


def _flattens_from_dim_1(node: fx.Node, module: nn.Module | None, called: str) -> bool:
    if module is not None:
        return isinstance(module, nn.Flatten) and module.start_dim == 1 and module.end_dim == -1
    start = node.args[1] if len(node.args) > 1 else node.kwargs.get("start_dim", 0)
    plain = len(node.args) <= 2 and "end_dim" not in node.kwargs
    return bool(called == "flatten" and start == 1 and plain)


def _axis_after_mean(node: fx.Node) -> str | None:
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    spatial = isinstance(dims, (tuple, list)) and set(dims) in ({2, 3}, {-1, -2}, {2, 3, 4})
    if not spatial or len(node.args) > 2:
        return None
    return "channels" if node.kwargs.get("keepdim") else "features"


@torch.no_grad()
def _squares(module: nn.Module) -> Tensor:
    """Squared entries of a weight summed over everything but (output channel, input channel)."""
    weight: Tensor = module.weight.detach().double().square()  # type: ignore[operator]
    if isinstance(module, nn.Linear):
        return weight
    weight = weight.flatten(2).sum(2)
    groups = int(module.groups)  # type: ignore[arg-type]
    if isinstance(module, _CONV_TRANSPOSE):
        blocks = [block.T for block in weight.chunk(groups)]
    else:
        blocks = list(weight.chunk(groups))
    return torch.block_diag(*blocks)
