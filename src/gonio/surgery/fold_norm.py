"""Folding normalisation by fixed statistics into the layer before it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from gonio.geometry.views import layout_of, matrix_view, unview
from gonio.nn import SwitchableNorm1d, SwitchableNorm2d, SwitchableNorm3d
from gonio.surgery.edit import Edit
from gonio.surgery.kinds import computes_plainly, is_batch_norm, norm_tail
from gonio.surgery.site import Site, sites
from gonio.surgery.tracing import Traced, trace

__all__ = ["fold_norms_"]

_SWITCHABLE = (SwitchableNorm1d, SwitchableNorm2d, SwitchableNorm3d)


@dataclass(frozen=True)
class _Pair:
    layer: Site
    norm: Site


def fold_norms_(edit: Edit, chosen: list[Site]) -> dict[str, str]:
    """Fold every chosen norm with fixed statistics whose input is the whole output of one plain layer.

    Returns:
        The batch and switchable norms among the chosen that stay, by path, and why.
    """
    norms = {id(site.module): site for site in chosen if _is_candidate(site.module)}
    if not norms:
        return {}
    traced = trace(edit.model, training=False)
    if traced.graph is None:
        return {site.path: f"the model cannot be traced ({traced.reason})" for site in norms.values()}
    pairs, stay = _pairs(traced, norms)
    for pair in pairs:
        _fold_one_(edit, pair)
    return stay


def _pairs(traced: Traced, norms: dict[int, Site]) -> tuple[list[_Pair], dict[str, str]]:
    by_module = {id(site.module): site for site in sites(traced.model)}
    graph = _Graph(traced)
    pairs, stay = [], {site.path: "it does not run" for site in norms.values()}
    for _, module, node in traced.calls():
        if id(module) not in norms:
            continue
        norm, source = norms[id(module)], graph.source(node)
        why = graph.refusal(norm, source)
        if why is None and source is not None:
            pairs.append(_Pair(by_module[id(source)], norm))
            del stay[norm.path]
        else:
            stay[norm.path] = str(why)
    return pairs, stay


class _Graph:
    """What must be known of a graph to fold a norm into what feeds it."""

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.calls = Counter(id(module) for _, module, _ in traced.calls())
        parameters = (p for m in traced.model.modules() for p in m._parameters.values() if p is not None)
        self.owners = Counter(map(id, parameters))

    def source(self, norm: fx.Node) -> nn.Module | None:
        """The layer whose output a norm reads, if nothing else reads it."""
        feeds = norm.all_input_nodes
        return self.traced.called(feeds[0]) if len(feeds) == 1 and len(feeds[0].users) == 1 else None

    def refusal(self, norm: Site, source: nn.Module | None) -> str | None:
        """Why a norm cannot be folded; None if it can."""
        why = _not_fixed(norm.module)
        if why is not None:
            return why
        if source is None or not computes_plainly(source) or isinstance(source, nn.Bilinear):
            return "what feeds it is no linear or convolutional layer of torch that feeds it alone"
        if self.calls[id(source)] > 1 or self.calls[id(norm.module)] > 1:
            return "it or the layer before it runs more than once"
        if any(self.owners[id(p)] > 1 for p in source.parameters(recurse=False)):
            return "the layer before it shares its weight"
        if any(m._forward_hooks or m._forward_pre_hooks for m in (source, norm.module)):
            return "it or the layer before it has forward hooks"
        return None if norm.owners else "it is the model itself"


def _fold_one_(edit: Edit, pair: _Pair) -> None:
    layer, norm = pair.layer.module, pair.norm.module
    scale, shift = _affine(norm)
    layout = layout_of(layer)
    weight = layer.get_parameter("weight")
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
    edit.replace_(pair.norm, _rest_of(norm), what=f"{type(norm).__name__} folded into {pair.layer.path}")


def _rest_of(norm: nn.Module) -> nn.Module:
    """What a norm does after normalising: nothing, or its activation."""
    tail = [part for part in norm_tail(norm) if not isinstance(part, nn.Identity)]
    rest = nn.Identity() if not tail else tail[0] if len(tail) == 1 else nn.Sequential(*tail)
    rest.training = norm.training
    return rest


def _affine(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """The norm in evaluation mode as x ↦ scale·x + shift per channel, in float64."""
    mean = norm.get_buffer("running_mean").double()
    std = (norm.get_buffer("running_var").double() + norm.eps).sqrt()  # type: ignore[operator]
    weight, bias = norm._parameters.get("weight"), norm._parameters.get("bias")
    scale = (weight.detach().double() if weight is not None else torch.ones_like(mean)) / std
    shift = (bias.detach().double() if bias is not None else torch.zeros_like(mean)) - scale * mean
    return scale, shift


def _is_candidate(module: nn.Module) -> bool:
    return isinstance(module, (nn.modules.batchnorm._BatchNorm, *_SWITCHABLE))


def _not_fixed(norm: nn.Module) -> str | None:
    """Why the norm is not a fixed affine map in evaluation; None if it is."""
    if isinstance(norm, _SWITCHABLE):
        return None if norm.is_batch_only() else "its mixture is not batch statistics alone"
    if not isinstance(norm._buffers.get("running_mean"), Tensor):
        return "it keeps no running statistics"
    return None if is_batch_norm(norm) else f"{type(norm).__name__} computes something else than a batch norm"
