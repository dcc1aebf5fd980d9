"""What a batch becomes on its way through the layers: size, spread, dead units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gonio.surgery import Site, sites
from gonio.surgery.equivalent import call, evaluating

__all__ = ["Signal", "measure_signals"]


@dataclass(frozen=True, kw_only=True)
class Signal:
    """One layer's output on a batch, in evaluation mode, at the layer's first call.

    Attributes:
        mean, std, rms: over all entries.
        gain: rms of the output over rms of the input; None where the layer has no tensor input.
        zeros: share of entries that are exactly 0.
        units, dead_units: channels (dim 1, or the last of a 2- or 3-d output), and those that are 0 throughout.
        nonfinite: entries that are NaN or infinite; they are left out of the other figures.
        calls: how often the layer ran.
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    mean: float
    std: float
    rms: float
    gain: float | None
    zeros: float
    units: int
    dead_units: int
    nonfinite: int
    calls: int


@torch.no_grad()
def measure_signals(model: nn.Module, batch: Any) -> tuple[Signal, ...]:
    """The outputs of all layers without sub-layers, in the order in which they run.

    The model runs once, in evaluation mode and without compilation; modes, buffers and hooks are as before
    afterwards, also if it raises.
    """
    plain = getattr(model, "_orig_mod", model)  # hooks set after a compiled call would never fire
    found: dict[int, dict[str, Any]] = {}
    handles = []
    try:
        for site in (site for site in sites(plain) if not site.module._modules):
            handle = site.module.register_forward_hook(_recorder(site, found))
            handles.append(handle)
        with evaluating(plain):
            call(plain, batch)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(Signal(**values) for values in found.values())


def _recorder(site: Site, found: dict[int, dict[str, Any]]) -> Callable[..., None]:
    def record(module: nn.Module, inputs: Any, output: Any) -> None:
        if id(module) in found:
            found[id(module)]["calls"] += 1
            return
        tensor = _first_tensor(output)
        if tensor is not None:
            name = {"path": site.path, "kind": type(module).__name__, "calls": 1}
            found[id(module)] = name | _figures(tensor, _first_tensor(inputs))

    return record


def _first_tensor(value: Any) -> Tensor | None:
    """The first floating-point tensor in any nesting of tuples, lists and dicts."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
            return leaf.detach()
    return None


def _figures(output: Tensor, source: Tensor | None) -> dict[str, Any]:
    units = output.movedim(1 if output.ndim > 3 else -1, 0).flatten(1) if output.ndim > 1 else output.unsqueeze(0)
    finite = torch.isfinite(output)
    values = output[finite].double()
    rms = float(values.square().mean().sqrt()) if values.numel() else 0.0
    fed = _rms(source) if source is not None else 0.0
    return {
        "shape": tuple(output.shape),
        "mean": float(values.mean()) if values.numel() else 0.0,
        "std": float(values.std(correction=0)) if values.numel() else 0.0,
        "rms": rms,
        "gain": rms / fed if fed else None,
        "zeros": float((output == 0).double().mean()),
        "units": units.shape[0],
        "dead_units": int((units == 0).all(1).sum()),
        "nonfinite": int((~finite).sum()),
    }


def _rms(tensor: Tensor) -> float:
    values = tensor[torch.isfinite(tensor)].double()
    return float(values.square().mean().sqrt()) if values.numel() else 0.0
