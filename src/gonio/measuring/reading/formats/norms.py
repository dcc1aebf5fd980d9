"""Weights that a normalisation or a pruning computes: torch's, old and new, and gonio's own parametrizations."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from gonio.measuring.reading.entry import StoredTensor
from gonio.measuring.reading.formats import Format, StoredTensors, StoredWeight, computed
from gonio.parametrizations import plain_state_dict
from gonio.parametrizations.checkpoints import over_spectral_norm


def _plain_name(key: str, ending: str) -> str:
    """The name of the weight: `fc.weight` for `fc.weight_g` and for `fc.parametrizations.weight.original0`."""
    name = key.removesuffix(ending)
    path, found, last = name.rpartition("parametrizations.")
    return f"{path}{last}" if found else name


def _weight_norm(key: str, stored: StoredTensors, _: Mapping[str, Any]) -> StoredWeight | None:
    ending, other = (".original0", ".original1") if key.endswith(".original0") else ("_g", "_v")
    direction = f"{key.removesuffix(ending)}{other}"
    if direction not in stored:
        return None
    shape, norms = stored[direction].shape, stored[key].shape
    kept = [axis for axis, size in enumerate(norms) if size != 1]
    fits = not norms or (len(norms) == len(shape) and len(kept) < 2 and all(norms[a] == shape[a] for a in kept))
    if len(shape) < 2 or not fits:
        return None
    made = computed(_normalised, stored[key], stored[direction], shape=shape)
    if (name := _plain_name(key, ending)) in stored:
        return None
    return StoredWeight(name, (direction, key), made, "computed from the weight norm's g and v", kind="weight-normed")


def _normalised(norms: StoredTensor, direction: StoredTensor) -> Tensor:
    r"""g v / ‖v‖, with a norm for each index of the dimension that g keeps.

    References: [1] T. Salimans, D. Kingma, "Weight normalization", 2016, arXiv 1602.07868, equation (2).
    """
    g, v = norms.load(), direction.load()
    wide = torch.promote_types(v.dtype, torch.float32)
    g, v = g.to(wide), v.to(wide)
    axes = [axis for axis in range(v.ndim) if not g.ndim or g.shape[axis] == 1]
    return v * (g / torch.linalg.vector_norm(v, dim=axes, keepdim=True))


def _spectral_norm(key: str, stored: StoredTensors, _: Mapping[str, Any]) -> StoredWeight | None:
    if key.endswith(".original"):
        ending, names = ".original", (f"{key.removesuffix('.original')}.0._u", f"{key.removesuffix('.original')}.0._v")
    else:
        ending, names = "_orig", (f"{key.removesuffix('_orig')}_u", f"{key.removesuffix('_orig')}_v")
    vectors = [stored.get(name) for name in names]
    shape = stored[key].shape
    if len(shape) < 2 or f"{key.removesuffix('_orig')}_mask" in stored:
        return None
    u, v = vectors
    if u is None or v is None or len(u.shape) != 1 or len(v.shape) != 1:
        return None
    axes = [axis for axis in (0, 1) if u.shape[0] == shape[axis] and v.shape[0] == prod(shape) // max(1, shape[axis])]
    if not axes:
        return None
    made = computed(_divided, stored[key], u, v, shape=shape)
    said = "computed from the spectral norm's weight and vectors"
    return StoredWeight(_plain_name(key, ending), (key, *names), made, said, kind="spectrally normed")


def _divided(original: StoredTensor, u: StoredTensor, v: StoredTensor) -> Tensor:
    weight = original.load()
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return over_spectral_norm(wide, u.load().to(wide), v.load().to(wide))


def _own(key: str, stored: StoredTensors, _: Mapping[str, Any]) -> StoredWeight | None:
    """A weight of :mod:`gonio.parametrizations`: the raw tensor, and the state of what computes the weight from it."""
    name = key.removesuffix("_parametrization._extra_state")
    parts = (name, *(part for part in stored if part.startswith(f"{name}_parametrization.")))
    if name not in stored:
        return None
    made = computed(lambda: plain_state_dict({p: stored[p].load() for p in parts})[name], shape=stored[name].shape)
    return StoredWeight(
        name, parts, made, "computed by the parametrization that the file describes", kind="parametrized"
    )


def _pruned(key: str, stored: StoredTensors, _: Mapping[str, Any]) -> StoredWeight | None:
    name = key.removesuffix("_mask")
    original = f"{name}_orig"
    if original not in stored or stored[original].shape != stored[key].shape or f"{name}_u" in stored:
        return None
    made = computed(lambda: stored[original].load() * stored[key].load(), shape=stored[key].shape)
    return StoredWeight(name, (original, key), made, "the pruned weight: the original times its mask", kind="pruned")


FORMATS = (
    Format(_own, ("_parametrization._extra_state",), quantised=False),
    Format(_weight_norm, ("_g", ".original0"), quantised=False),
    Format(_spectral_norm, ("_orig", ".original"), quantised=False),
    Format(_pruned, ("_mask",), quantised=False),
)
