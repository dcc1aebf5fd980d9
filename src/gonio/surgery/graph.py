"""What follows each layer, read off the traced graph.

`torch.fx` traces most convolutional networks and fails on data-dependent control flow. Callers must
work without a graph: every function here returns what is known, and `trace` says why nothing is.
"""

from __future__ import annotations

from torch import fx, nn

from gonio.surgery.kinds import WEIGHTED, is_norm, norm_tail
from gonio.surgery.tracing import Traced, called_function, trace

__all__ = ["activation_after", "followed_by_norm"]

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


def followed_by_norm(model: nn.Module | Traced) -> dict[str, str]:
    """Weighted layers whose output goes only into normalisation layers, and the first such layer.

    The loss does not depend on the scale of their weights, so a penalty on that scale has nothing to
    push against. Empty where the model cannot be traced.

    Example:
        >>> followed_by_norm(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 3)))
        {'0': '1'}
    """
    traced = trace(model) if isinstance(model, nn.Module) else model
    met: dict[str, list[str | None]] = {}
    for path, node in _weighted(traced):
        met.setdefault(path, []).extend(_first_norm(user, traced) for user in node.users)
    return {path: norms[0] for path, norms in met.items() if norms and norms[0] and all(norms)}


def activation_after(model: nn.Module) -> dict[str, str]:
    """The activation that each weighted layer's output meets first, `"linear"` if it meets none.

    Normalisation, pooling by averages, dropout and reshaping are looked through. A layer whose output
    goes to different activations, or to one that is not known, is left out.

    Example:
        >>> activation_after(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.GELU(), nn.Linear(2, 2)))
        {'0': 'gelu', '3': 'linear'}
    """
    traced = trace(model)
    met: dict[str, set[str | None]] = {}
    for path, node in _weighted(traced):
        met.setdefault(path, set()).update(_first_activation(user, traced) for user in node.users)
    return {path: name for path, names in met.items() if len(names) == 1 and (name := next(iter(names))) is not None}


def _weighted(traced: Traced) -> list[tuple[str, fx.Node]]:
    """Every call of a weighted layer; one that runs twice counts with both."""
    return [(path, node) for path, module, node in traced.calls() if isinstance(module, WEIGHTED)]


def _first_norm(node: fx.Node, traced: Traced) -> str | None:
    while True:
        module = traced.called(node)
        if module is not None and is_norm(module):
            return str(node.target)
        if not _transparent(node, module) or len(node.users) != 1:
            return None
        node = next(iter(node.users))


def _first_activation(node: fx.Node, traced: Traced) -> str | None:
    while True:
        module = traced.called(node)
        name = _activation_name(node, module)
        if name is not None:
            return name
        if node.op == "output" or (module is not None and isinstance(module, WEIGHTED)):
            return "linear"
        looked_through = _transparent(node, module) or (module is not None and _only_normalises(module))
        if not looked_through or len(node.users) != 1:
            return None
        node = next(iter(node.users))


def _only_normalises(module: nn.Module) -> bool:
    """A norm without children: one with an activation inside that is not known ends the search."""
    return is_norm(module) and all(isinstance(part, nn.Identity) for part in module.children())


def _activation_name(node: fx.Node, module: nn.Module | None) -> str | None:
    if module is not None:
        candidates = [module, *norm_tail(module)]
        return next((n for m in candidates for n, types in _ACTIVATIONS.items() if isinstance(m, types)), None)
    called = called_function(node).removesuffix("_")
    return called if called in _ACTIVATIONS else None


def _transparent(node: fx.Node, module: nn.Module | None) -> bool:
    if module is not None:
        return isinstance(module, _TRANSPARENT_MODULES)
    return called_function(node) in _TRANSPARENT_FUNCTIONS
