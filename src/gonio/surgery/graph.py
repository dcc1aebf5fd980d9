"""What follows each layer, read off the traced graph.

`torch.fx` traces most convolutional networks and fails on data-dependent control flow. Callers must
work without a graph: every function here returns what is known and :func:`trace` says why nothing is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx, nn

__all__ = ["Traced", "activation_after", "followed_by_norm", "trace"]

WEIGHTED = (
    nn.Linear,
    nn.Bilinear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
_TORCH_NORMS = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)
_ACTIVATIONS = {
    "relu": (nn.ReLU, nn.ReLU6),
    "leaky_relu": (nn.LeakyReLU,),
    "tanh": (nn.Tanh,),
    "sigmoid": (nn.Sigmoid,),
    "gelu": (nn.GELU,),
    "silu": (nn.SiLU,),
    "mish": (nn.Mish,),
    "elu": (nn.ELU,),
    "selu": (nn.SELU,),
    "softplus": (nn.Softplus,),
    "hardswish": (nn.Hardswish,),
}
# Layers and functions that neither weigh nor bend their input, so the search looks through them.
_TRANSPARENT_MODULES = (
    nn.Identity,
    nn.modules.dropout._DropoutNd,
    nn.Flatten,
    nn.Unflatten,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
)
_TRANSPARENT_FUNCTIONS = frozenset(
    {
        "flatten",
        "reshape",
        "view",
        "permute",
        "transpose",
        "contiguous",
        "dropout",
        "squeeze",
        "unsqueeze",
        "mean",
    }
)


@dataclass(frozen=True)
class Traced:
    """A model's graph, or the reason why there is none.

    Attributes:
        graph: the `torch.fx` graph, or None.
        reason: why tracing failed; empty if it did not.
    """

    model: nn.Module
    graph: fx.Graph | None
    reason: str = ""

    def calls(self) -> Iterator[tuple[str, nn.Module, fx.Node]]:
        """Every call of a module: its path, the module and the node."""
        if self.graph is None:
            return
        for node in self.graph.nodes:
            if node.op == "call_module":
                yield str(node.target), self.model.get_submodule(str(node.target)), node


class _Tracer(fx.Tracer):
    """Stops at every layer that carries weights or belongs to torch or to gonio."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            return False
        return type(m).__module__.startswith(("torch.nn.", "gonio.nn")) or isinstance(m, WEIGHTED) or is_norm(m)


def is_norm(module: nn.Module) -> bool:
    """Whether the module normalises its input, so that the scale of what feeds it does not matter.

    Known by torch's base classes, and by `Norm` in the class name for everybody else's.
    """
    if isinstance(module, _TORCH_NORMS):
        return True
    return not module._modules and any("Norm" in base.__name__ for base in type(module).__mro__)


def trace(model: nn.Module) -> Traced:
    """Trace a model symbolically; never raises because of the model.

    Example:
        >>> trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU())).reason
        ''
    """
    try:
        graph = _Tracer().trace(model)
    except Exception as error:  # user code under a tracer can raise anything at all
        return Traced(model, None, f"{type(error).__name__}: {error}".split("\n")[0])
    return Traced(model, graph)


def followed_by_norm(model: nn.Module) -> dict[str, str]:
    """Weighted layers whose output goes only into normalisation layers, and the first such layer.

    The loss does not depend on the scale of their weights, so a penalty on that scale has nothing to
    push against. Empty where the model cannot be traced.

    Example:
        >>> followed_by_norm(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 3)))
        {'0': '1'}
    """
    traced = trace(model)
    found: dict[str, str] = {}
    for path, module, node in traced.calls():
        if isinstance(module, WEIGHTED):
            norms = [_first_norm(user, traced) for user in node.users]
            if norms and all(norms):
                found[path] = str(norms[0])
    return found


def activation_after(model: nn.Module) -> dict[str, str]:
    """The activation that each weighted layer's output meets first, `"linear"` if it meets none.

    Normalisation, pooling by averages, dropout and reshaping are looked through. A layer whose output
    goes to different activations, or to one that is not known, is left out.

    Example:
        >>> activation_after(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.GELU(), nn.Linear(2, 2)))
        {'0': 'gelu', '3': 'linear'}
    """
    traced = trace(model)
    found: dict[str, str] = {}
    for path, module, node in traced.calls():
        if isinstance(module, WEIGHTED):
            met = {_first_activation(user, traced) for user in node.users}
            if len(met) == 1 and (name := met.pop()) is not None:
                found[path] = name
    return found


def _first_norm(node: fx.Node, traced: Traced) -> str | None:
    while True:
        module = _module_of(node, traced)
        if module is not None and is_norm(module):
            return str(node.target)
        if not _transparent(node, module) or len(node.users) != 1:
            return None
        node = next(iter(node.users))


def _first_activation(node: fx.Node, traced: Traced) -> str | None:
    while True:
        module = _module_of(node, traced)
        name = _activation_name(node, module)
        if name is not None:
            return name
        if node.op == "output" or (module is not None and isinstance(module, WEIGHTED)):
            return "linear"
        looked_through = _transparent(node, module) or (module is not None and is_norm(module))
        if not looked_through or len(node.users) != 1:
            return None
        node = next(iter(node.users))


def _module_of(node: fx.Node, traced: Traced) -> nn.Module | None:
    return traced.model.get_submodule(str(node.target)) if node.op == "call_module" else None


def _activation_name(node: fx.Node, module: nn.Module | None) -> str | None:
    if module is not None:
        return next((name for name, types in _ACTIVATIONS.items() if isinstance(module, types)), None)
    called = called_function(node).removesuffix("_")
    return called if called in _ACTIVATIONS else None


def _transparent(node: fx.Node, module: nn.Module | None) -> bool:
    if module is not None:
        return isinstance(module, _TRANSPARENT_MODULES)
    return called_function(node) in _TRANSPARENT_FUNCTIONS


def called_function(node: fx.Node) -> str:
    """The name of the function or method that a node calls; empty for anything else."""
    if node.op == "call_method":
        return str(node.target)
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""
