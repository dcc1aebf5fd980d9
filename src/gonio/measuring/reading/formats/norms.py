"""Weights that a normalisation or a pruning computes: torch's, old and new, and gonio's own parametrizations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gonio.measuring.reading.formats import Format, StoredTensors, StoredWeight, computed
from gonio.parametrizations import plain_state_dict
from gonio.parametrizations.checkpoints import effective, torch_keys

_OF_TORCH = ("_g", ".original0", "_orig", ".original")  # the ends of the keys by which its formats are known


def _plain_name(key: str, ending: str) -> str:
    """The name of the weight: `fc.weight` for `fc.weight_g` and for `fc.parametrizations.weight.original0`."""
    name = key.removesuffix(ending)
    path, found, last = name.rpartition("parametrizations.")
    return f"{path}{last}" if found else name


def _of_torch(key: str, stored: StoredTensors, _: Mapping[str, Any]) -> StoredWeight | None:
    """A weight norm or spectral norm of torch."""
    name = _plain_name(key, next(ending for ending in _OF_TORCH if key.endswith(ending)))
    prefix, dot, last = name.rpartition(".")
    keys = torch_keys(lambda at: stored[at].shape if at in stored else None, f"{prefix}{dot}", last)
    if keys is None or key not in keys.values():
        return None
    said, kind = "computed from the spectral norm's weight and vectors", "spectrally normed"
    if "g" in keys:
        said, kind = "computed from the weight norm's g and v", "weight-normed"
    first = keys["v" if "g" in keys else "original"]
    if len(stored[first].shape) < 2 or (name if "g" in keys else f"{name}_mask") in stored:
        return None
    made = computed(_effective, {meaning: stored[at] for meaning, at in keys.items()}, shape=stored[first].shape)
    return StoredWeight(name, (first, *(at for at in keys.values() if at != first)), made, said, kind=kind)


def _effective(parts: StoredTensors) -> Tensor:
    tensors = {meaning: part.load() for meaning, part in parts.items()}
    return effective({m: t.to(torch.promote_types(t.dtype, torch.float32)) for m, t in tensors.items()})


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
    Format(_of_torch, _OF_TORCH, quantised=False),
    Format(_pruned, ("_mask",), quantised=False),
)
