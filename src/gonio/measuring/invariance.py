"""Weights whose scale a model's function does not depend on, read off its graph; and how often its layers run."""

from __future__ import annotations

from collections import Counter

from torch import fx, nn

from gonio.nn import SwitchableNorm1d, SwitchableNorm2d, SwitchableNorm3d
from gonio.surgery.kinds import WEIGHTED, computes_as
from gonio.surgery.tracing import Traced

__all__ = ["calls_of", "scale_invariant"]

# Norms of each channel by itself remove a bias before them too, which must not grow with the weight otherwise.
_PER_CHANNEL = (
    nn.SyncBatchNorm,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
_ACROSS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, SwitchableNorm1d, SwitchableNorm2d, SwitchableNorm3d)


def calls_of(traced: Traced) -> dict[str, int]:
    """How often each module runs in one forward."""
    first: dict[int, str] = {}
    return dict(Counter(first.setdefault(id(module), path) for path, module, _ in traced.calls()))


def scale_invariant(traced: Traced) -> frozenset[str]:
    """Layers all of whose outputs go straight into norms that undo the scale of their weight, in training.

    Stricter than :func:`gonio.surgery.followed_by_norm`: the norm must be torch's own or a switchable one, with
    nothing between; a bias must be removed by it; and no other layer may share the weight.
    """
    owners = Counter(id(p) for m in traced.model.modules() for p in m._parameters.values() if p is not None)
    found: dict[str, bool] = {}
    for path, module, node in traced.calls():
        if computes_as(module, WEIGHTED) and owners[id(module._parameters.get("weight"))] == 1:
            found[path] = found.get(path, True) and _is_normalised(module, node, traced)
    return frozenset(path for path, free in found.items() if free)


def _is_normalised(module: nn.Module, node: fx.Node, traced: Traced) -> bool:
    undoing = _PER_CHANNEL if module._parameters.get("bias") is not None else (*_PER_CHANNEL, *_ACROSS)
    norms = [traced.called(user) for user in node.users]
    return bool(norms) and all(norm is not None and computes_as(norm, undoing) for norm in norms)
