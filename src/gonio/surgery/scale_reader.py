"""Which scales of a network can move: one free variable per tensor between layers, read off the graph.

A tensor that flows only through positively homogeneous operations, φ(cx) = cφ(x) for c > 0, between the
layers that produce it and those that consume it can be multiplied by any c > 0 without changing the
function: the producers' rows are multiplied by c, the consumers' columns divided by it. A sum ties the
tensors that it adds to one variable. Anything else pins the tensors that it touches to scale 1.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import fx, nn
from torch.nn.parameter import is_lazy

from gonio.surgery.kinds import WEIGHTED, computes_as, computes_plainly, is_batch_norm, norm_tail
from gonio.surgery.scales import Layer, Variable, layer_of
from gonio.surgery.tracing import Traced, called_function

__all__ = ["scale_variables"]

_ELEMENTWISE_MODULES = (
    *(nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.Identity),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
)
_ELEMENTWISE_FUNCTIONS = frozenset({"relu", "relu_", "leaky_relu", "dropout", "contiguous"})
_POOLING_MODULES = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
)
_POOLING_FUNCTIONS = frozenset(
    f"{kind}{d}d" for kind in ("max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool") for d in (1, 2, 3)
)


def scale_variables(traced: Traced) -> list[Variable]:
    """All scale variables of a traced model, free and pinned."""
    reader = _Reader(traced)
    for node in traced.graph.nodes if traced.graph is not None else ():
        reader.read(node)
    return reader.variables()


@dataclass(frozen=True)
class _Flow:
    """The tensor of a node: its variable, and where its channels are.

    `axis` is "channels" (dim 1, before `spatial` further dims), "features" (the last dim) or "flat" (dim 1
    after flattening channels and positions, so that each channel is a run of features).
    """

    variable: Variable
    axis: str
    spatial: int = 0


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
        module = self.traced.called(node)
        if isinstance(module, WEIGHTED):
            self._read_weighted(node, module)
        elif isinstance(module, nn.modules.batchnorm._BatchNorm):
            self._read_batch_norm(node, module)
        elif called_function(node) in ("add", "iadd", "add_"):
            self._add(node)
        elif (after := self._after(node, module)) is not None:
            self.flow[node] = after
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
        layer = layer_of(path, module)
        for source in node.all_input_nodes:
            if source in self.flow:
                self._consume(self.flow[source], layer)
        if isinstance(module, nn.Linear):
            self.flow[node] = _Flow(self._new(layer), "features")
        else:
            self.flow[node] = _Flow(self._new(layer), "channels", module.weight.dim() - 2)  # type: ignore[operator]

    def _read_batch_norm(self, node: fx.Node, module: nn.Module) -> None:
        path = str(node.target)
        flows = [self.flow[source] for source in node.all_input_nodes if source in self.flow]
        self._pin_inputs(node, f"a {type(module).__name__} normalises it")
        refusal = self._refusal(path, module)
        if refusal or module._parameters.get("weight") is None:
            return
        if isinstance(module, (nn.BatchNorm2d, nn.BatchNorm3d)):
            axis, spatial = "channels", 2 if isinstance(module, nn.BatchNorm2d) else 3
        elif flows:
            axis, spatial = flows[0].axis, flows[0].spatial
        else:
            return  # (N, C), (N, C, L) or more: not to be told from the graph
        variable = self._new(layer_of(path, module))
        self.flow[node] = _Flow(variable, axis, spatial)
        for part in norm_tail(module):
            if not computes_as(part, _ELEMENTWISE_MODULES):
                self._pin(variable, f"the {type(part).__name__} in {path} is not positively homogeneous in it")

    def _consume(self, flow: _Flow, layer: Layer) -> None:
        variable, width = self._root(flow.variable), layer.in_channels
        per_channel = width // variable.channels if flow.axis == "flat" else 1
        wanted = "channels" if not isinstance(layer.module, nn.Linear) else ("features", "flat")
        if flow.axis not in wanted or variable.channels * per_channel != width:
            self._pin(variable, f"{layer.path} does not read its channels one by one")
            return
        variable.consumers.append((layer, per_channel))

    def _add(self, node: fx.Node) -> None:
        known = [self.flow[source] for source in node.all_input_nodes if source in self.flow]
        if len(known) != 2 or len(node.args) != 2 or node.kwargs:
            self._pin_inputs(node, f"it is added to a tensor of fixed scale ({node.name})")
            return
        a, b = self._root(known[0].variable), self._root(known[1].variable)
        if a.channels != b.channels or (known[0].axis, known[0].spatial) != (known[1].axis, known[1].spatial):
            self._pin_inputs(node, f"it is added to a tensor of another shape ({node.name})")
            return
        if a is not b:
            a.producers += b.producers
            a.consumers += b.consumers
            a.pinned = a.pinned or b.pinned
            self.merged[b] = a
        self.flow[node] = _Flow(a, known[0].axis, known[0].spatial)

    def _after(self, node: fx.Node, module: nn.Module | None) -> _Flow | None:
        """The flow after a positively homogeneous operation; None for any other."""
        if len(node.all_input_nodes) != 1 or node.all_input_nodes[0] not in self.flow:
            return None
        flow = self.flow[node.all_input_nodes[0]]
        called = called_function(node)
        if (module is not None and computes_as(module, _ELEMENTWISE_MODULES)) or called in _ELEMENTWISE_FUNCTIONS:
            return flow
        if (module is not None and computes_as(module, _POOLING_MODULES)) or called in _POOLING_FUNCTIONS:
            return flow if flow.axis == "channels" else None
        if _flattens_from_dim_1(node, module, called):
            return _Flow(flow.variable, "flat") if flow.axis == "channels" else flow
        if called == "mean" and flow.axis == "channels":
            return _after_mean(node, flow)
        return None

    def _pin_inputs(self, node: fx.Node, why: str) -> None:
        for source in node.all_input_nodes:
            if source in self.flow:
                self._pin(self._root(self.flow[source].variable), why)

    # --- the rest ----------------------------------------------------------------------------------

    def _new(self, producer: Layer) -> Variable:
        variable = Variable(producer.out_channels, [producer])
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
        parameters = [p for p in module._parameters.values() if p is not None]
        if any(map(is_lazy, parameters)):
            return f"{path} is lazy: run one batch first"
        if self.calls[path] > 1:
            return f"{path} runs more than once"
        if module._parameters.get("weight") is not getattr(module, "weight", None):
            return f"{path} has a parametrized weight"
        if any(self.owners[id(p)] > 1 for p in parameters):
            return f"{path} shares its weight"
        if isinstance(module, nn.Bilinear) or not (computes_plainly(module) or is_batch_norm(module)):
            return f"{path} is a {type(module).__name__}"
        if _changed_by_hooks(module):
            return f"{path} has forward hooks, which may change its output"
        return ""

    def _why(self, node: fx.Node, module: nn.Module | None) -> str:
        if node.op == "output":
            return "it is the model's output"
        name = type(module).__name__ if module is not None else called_function(node)
        return f"{name} ({node.name}) is not positively homogeneous in it"


def _changed_by_hooks(module: nn.Module) -> bool:
    """Hooks of this library only read."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(not str(getattr(hook, "__module__", "")).startswith("gonio.") for hook in hooks)


def _flattens_from_dim_1(node: fx.Node, module: nn.Module | None, called: str) -> bool:
    if module is not None:
        return bool(computes_as(module, (nn.Flatten,)) and module.start_dim == 1 and module.end_dim == -1)
    start = node.args[1] if len(node.args) > 1 else node.kwargs.get("start_dim", 0)
    plain = len(node.args) <= 2 and "end_dim" not in node.kwargs
    return bool(called == "flatten" and start == 1 and plain)


def _after_mean(node: fx.Node, flow: _Flow) -> _Flow | None:
    """A mean over all positions leaves one number per channel."""
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    dims = (dims,) if isinstance(dims, int) else dims
    if len(node.args) > 2 or not isinstance(dims, (tuple, list)) or not all(isinstance(d, int) for d in dims):
        return None
    rank = 2 + flow.spatial
    if {d % rank for d in dims if isinstance(d, int)} != set(range(2, rank)):
        return None
    return flow if node.kwargs.get("keepdim") else _Flow(flow.variable, "features")
