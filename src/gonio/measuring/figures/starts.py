"""Layers that have the values with which torch builds them, in a model whose other layers were trained."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor, nn

from gonio.measuring.reading.peft_layers import AdaptedLayers
from gonio.surgery import sites
from gonio.surgery.facts import WEIGHTED, facts_of

LEAST = 64  # entries of a weight: fewer tell little of their distribution
TRAINED = 2  # layers at least, and as many as there are at their start
SAMPLE = 65_536  # entries of a weight, of which the distribution is compared
UNIFORM = 1.95  # times 1/√n: the largest difference from the distribution function in 0.1 % of uniform samples
EDGE = 20.0  # times b/n: the largest of n uniform numbers is farther from the bound b with probability e⁻²⁰


@torch.no_grad()
def layers_as_built(model: nn.Module) -> tuple[str, ...]:
    r"""The linear layers and convolutions that have the values of torch's initialisation, if others were trained.

    torch draws weight and bias from :math:`U(-b, b)` with :math:`b = 1/\sqrt{\text{fan in}}`. A layer is as built if
    no entry is beyond :math:`b`, the largest of the weight is next to it, and the weight's distribution is uniform
    (Kolmogorov and Smirnov); a few steps of training carry entries beyond :math:`b`. A layer was trained if its weight
    and its bias have entries beyond :math:`b`, and a norm if neither its gains nor its shifts are alike. With fewer
    than two such layers, or fewer than there are as built, the model counts as not trained, and there are none. What
    begins an adapter is none either: layers of peft, and layers of few filters beside one of as many inputs that is 0.

    Example:
        >>> from gonio.measuring.figures.starts import layers_as_built
        >>> model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        >>> layers_as_built(model)
        ()
        >>> for layer in model[:2]:
        ...     _ = nn.init.normal_(layer.weight), nn.init.normal_(layer.bias)
        >>> layers_as_built(model)
        ('2',)
    """
    everything = sites(model)
    known = [site for site in everything if all(map(_is_plain, _weight_and_bias(site.module)))]
    trained = sum(_was_trained(site.module) for site in known)
    if trained < TRAINED:
        return ()
    weighted = {site.path: site.module for site in known if isinstance(site.module, WEIGHTED)}
    found = [path for path, layer in weighted.items() if _as_built(layer)]
    zero = [weight.shape for layer in weighted.values() if found and (weight := _zero_weight(layer)) is not None]
    adapted = AdaptedLayers(everything)
    own = [
        path
        for path in found
        if not adapted.role_of(f"{path}.weight")[0] and not any(_is_a_factor(weighted[path], shape) for shape in zero)
    ]
    return tuple(own) if len(own) <= trained else ()


def _zero_weight(layer: nn.Module) -> Tensor | None:
    weight, _ = _weight_and_bias(layer)
    return None if weight is None or not weight.numel() or bool(weight.any()) else weight


def _is_a_factor(layer: nn.Module, other: torch.Size) -> bool:
    """Whether a layer and another one, of weights of this shape, make a change of low rank."""
    weight, _ = _weight_and_bias(layer)
    return weight is not None and len(weight) == other[1] and len(weight) < min(weight.shape[1], other[0])


def _weight_and_bias(module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    own = dict(module._parameters.items())  # of a scripted module it is no dict
    return own.get("weight"), own.get("bias")


def _is_plain(parameter: Tensor | None) -> bool:
    """Whether it is an ordinary tensor of numbers: not lazy, sharded, fake, sparse, packed, or on the meta device."""
    if parameter is None:
        return True
    dense = type(parameter) in (nn.Parameter, Tensor) and parameter.layout is torch.strided and not parameter.is_meta
    return dense and parameter.is_floating_point() and parameter.element_size() > 1


def _beyond(values: Tensor, bound: float) -> bool:
    return bool(values.abs().amax() > bound * (1 + torch.finfo(values.dtype).eps))


def _was_trained(module: nn.Module) -> bool:
    weight, bias = _weight_and_bias(module)
    if weight is None or bias is None or not weight.numel():
        return False
    if isinstance(module, WEIGHTED):
        bound = 1 / sqrt(weight[0].numel())
        return _beyond(weight, bound) and _beyond(bias, bound)
    return bool(facts_of(module).removes_scale) and all(bool((v != v.flatten()[0]).any()) for v in (weight, bias))


def _as_built(layer: nn.Module) -> bool:
    weight, bias = _weight_and_bias(layer)
    if weight is None or weight.numel() < LEAST:
        return False
    bound, count = 1 / sqrt(weight[0].numel()), weight.numel()
    if _beyond(weight, bound) or (bias is not None and _beyond(bias, bound)):
        return False
    values = weight.detach().double().flatten()
    if float(values.abs().amax()) < bound * (1 - EDGE / count):
        return False
    ordered = values[:: -(-count // SAMPLE)].sort().values / (2 * bound) + 0.5
    steps = torch.arange(len(ordered), dtype=ordered.dtype, device=ordered.device) / len(ordered)
    return float((ordered - steps).abs().amax()) < UNIFORM / sqrt(len(ordered))
