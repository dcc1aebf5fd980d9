"""Folding normalisation by fixed statistics into the layer before it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gonio.geometry.views import layout_of, matrix_view, unview
from gonio.nn import SwitchableNorm1d, SwitchableNorm2d, SwitchableNorm3d
from gonio.surgery.edit import Edit
from gonio.surgery.graph import WEIGHTED, Traced, trace
from gonio.surgery.site import Site, sites

__all__ = ["fold_norms_"]

_SWITCHABLE = (SwitchableNorm1d, SwitchableNorm2d, SwitchableNorm3d)


@dataclass(frozen=True)
class _Pair:
    layer: Site
    norm: Site


def fold_norms_(edit: Edit, chosen: set[int]) -> None:
    """Fold every chosen norm with fixed statistics whose input is the whole output of one plain layer."""
    if not any(_is_fixed_norm(module) and id(module) in chosen for module in edit.model.modules()):
        return
    traced = trace(edit.model)
    if traced.graph is None:
        edit.note(f"normalisation layers stay: the model cannot be traced ({traced.reason})")
        return
    for pair in _pairs(traced, chosen):
        _fold_one_(edit, pair)


def _pairs(traced: Traced, chosen: set[int]) -> list[_Pair]:
    by_module = {id(site.module): site for site in sites(traced.model)}
    calls = Counter(id(module) for _, module, _ in traced.calls())
    owners = Counter(id(p) for m in traced.model.modules() for p in m._parameters.values() if p is not None)
    found = []
    for _, module, node in traced.calls():
        if not (_is_fixed_norm(module) and id(module) in chosen and by_module[id(module)].owners):
            continue
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        if source is None or source.op != "call_module" or len(source.users) != 1:
            continue
        layer = traced.model.get_submodule(str(source.target))
        tied = any(owners[id(p)] > 1 for p in layer.parameters(recurse=False))
        once = calls[id(layer)] == 1 and calls[id(module)] == 1
        if _is_plain(layer) and once and not tied:
            found.append(_Pair(by_module[id(layer)], by_module[id(module)]))
    return found


def _fold_one_(edit: Edit, pair: _Pair) -> None:
    layer, norm = pair.layer.module, pair.norm.module
    scale, shift = _affine(norm)
    layout = layout_of(layer)
    weight: Tensor = layer.weight  # type: ignore[assignment]
    rows = matrix_view(weight.detach().double(), layout)
    scaled = rows * scale.view(rows.shape[0], -1, 1)
    edit.set_data_(weight, unview(scaled, weight.shape, layout).to(weight.dtype))
    bias: Tensor | None = layer.bias  # type: ignore[assignment]
    start = bias.detach().double() if bias is not None else torch.zeros_like(scale)
    new_bias = (scale * start + shift).to(weight.dtype)
    if bias is None:
        edit.snapshot_(layer)
        layer.register_parameter("bias", nn.Parameter(new_bias, requires_grad=weight.requires_grad))
    else:
        edit.set_data_(bias, new_bias)
    identity = nn.Identity()
    identity.train(norm.training)
    edit.replace_(pair.norm, identity, what=f"{type(norm).__name__} folded into {pair.layer.path}")


def _affine(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """The norm in evaluation mode as x ↦ scale·x + shift per channel, in float64."""
    mean = norm.get_buffer("running_mean").double()
    std = (norm.get_buffer("running_var").double() + norm.eps).sqrt()  # type: ignore[operator]
    weight, bias = norm._parameters.get("weight"), norm._parameters.get("bias")
    scale = (weight.detach().double() if weight is not None else torch.ones_like(mean)) / std
    shift = (bias.detach().double() if bias is not None else torch.zeros_like(mean)) - scale * mean
    return scale, shift


def _is_fixed_norm(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return module.running_mean is not None
    return isinstance(module, _SWITCHABLE) and module.is_batch_only()


def _is_plain(module: nn.Module) -> bool:
    if not isinstance(module, WEIGHTED) or isinstance(module, nn.Bilinear):
        return False
    return module._parameters.get("weight") is module.weight and not type(module).__module__.startswith("gonio.")
