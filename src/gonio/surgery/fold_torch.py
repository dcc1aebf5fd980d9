"""Folding the parametrizations of `torch.nn.utils.parametrize`, in place of torch's own removal.

torch removes by deleting a property of the layer's class, which copies of the layer share, and puts the
weight behind the bias. Here the instance gets its own class back and the weight its place.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gonio.surgery.edit import Edit
from gonio.surgery.site import Site

__all__ = ["fold_torchs_"]

# Parameters that the hooks of torch.nn.utils (weight_norm, spectral_norm, prune) put in the place of a weight.
_HOOKED = {"_g": "remove_weight_norm()", "_orig": "remove_spectral_norm() or prune.remove()"}


def fold_torchs_(edit: Edit, chosen: list[Site]) -> dict[str, str]:
    """Fold what can be; the layers that stay, by path, and why."""
    stay: dict[str, str] = {}
    owners = Counter(id(p) for m in edit.model.modules() for p in m._parameters.values() if p is not None)
    for site in chosen:
        names = [name for name in site.module._parameters if site.module._forward_pre_hooks]
        hooked = next((do for name in names for end, do in _HOOKED.items() if name.endswith(end)), None)
        if hooked is not None:
            stay[site.path] = f"a hook of torch.nn.utils computes its weight: use {hooked}"
        if parametrize.is_parametrized(site.module):
            why = _refusal(site.module, owners)
            if why is None:
                _fold_one_(edit, site)
            else:
                stay[site.path] = why
    return stay


def _lists(module: nn.Module) -> dict[str, parametrize.ParametrizationList]:
    return dict(module.parametrizations.items())  # type: ignore[operator, union-attr]


def _refusal(module: nn.Module, owners: Counter[int]) -> str | None:
    originals = [tensor for found in _lists(module).values() for tensor in _originals(found)]
    if not all(isinstance(tensor, nn.Parameter) for tensor in originals):
        return "its parametrized tensor is no Parameter"
    if any(owners[id(tensor)] > 1 for tensor in originals):
        return "it shares its parametrized weight"
    return None


def _originals(found: parametrize.ParametrizationList) -> list[Tensor]:
    names = ["original"] if found.is_tensor else [f"original{index}" for index in range(found.ntensors)]
    return [getattr(found, name) for name in names]


def _fold_one_(edit: Edit, site: Site) -> None:
    module = site.module
    edit.snapshot_(module)
    folded: dict[str, nn.Parameter | None] = {}
    for name, found in _lists(module).items():
        value = _frozen(found)
        original = _originals(found)[0]
        if found.is_tensor and isinstance(original, nn.Parameter):
            edit.set_data_(original, value)
            folded[name] = original
        else:
            folded[name] = nn.Parameter(value, requires_grad=original.requires_grad)
        what = ", ".join(type(part).__name__.lstrip("_") for part in found)
        edit.changed(site.path, f"{name}: {what} of torch folded")
    others = dict(module._parameters)
    module.__class__ = type(module).__bases__[0]
    del module._modules["parametrizations"]
    module._parameters.clear()
    module._parameters.update(folded | others)


@torch.no_grad()
def _frozen(found: parametrize.ParametrizationList) -> Tensor:
    """The tensor in evaluation mode: torch's spectral norm takes a step at each read in training."""
    modes = [(part, part.training) for part in found.modules()]
    found.eval()
    try:
        value: Tensor = found()
    finally:
        for part, training in modes:
            part.training = training
    return value.detach().clone()
