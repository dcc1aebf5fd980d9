"""State dicts of weights as functions: read plain, torch's and our own formats into one another.

Our own state dict holds the raw tensor under the weight's own key, and the parametrization's state and
description under ``<name>_parametrization.``; a plain model refuses it because of these keys. What any
other format holds is turned into the effective weight that it means, and bound as if it were assigned.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.parametrizations.parametrization import Parametrization, describe, kind_of

__all__ = ["plain_state_dict", "translate_"]

_DESCRIPTION = "_parametrization._extra_state"

# torch's formats: the entries of one weight, by what they mean. {n} is the weight's name.
_TORCH_FORMATS: tuple[dict[str, str], ...] = (
    {"g": "parametrizations.{n}.original0", "v": "parametrizations.{n}.original1"},
    {
        "original": "parametrizations.{n}.original",
        "u": "parametrizations.{n}.0._u",
        "v": "parametrizations.{n}.0._v",
    },
    {"original": "{n}_orig", "u": "{n}_u", "v": "{n}_v"},
    {"g": "{n}_g", "v": "{n}_v"},
)


@torch.no_grad()
def translate_(parametrization: Parametrization, state_dict: dict[str, Any], prefix: str, name: str) -> None:
    """Rewrite the entries of one weight, in whatever format they are, into the parametrization's own."""
    own = f"{prefix}{name}_parametrization."
    fresh = copy.deepcopy(parametrization)
    if any(key.startswith(own) for key in state_dict):
        if own + "_extra_state" not in state_dict:
            return  # part of a state dict: torch reports what is missing
        description = describe(state_dict[own + "_extra_state"])
        if parametrization.wrote(description):
            return
        weight = _pop_own_(state_dict, prefix, name)
    elif found := _torch_entries(state_dict, prefix, name):
        tensors = {meaning: state_dict.pop(prefix + key) for meaning, key in found.items()}
        weight = _effective(tensors, transposed=parametrization.bound_layout.transposed)
        fresh.bind(weight, parametrization.bound_layout)
        raw = fresh.adopt(tensors)
        if raw is not None:
            _fill_(state_dict, prefix, name, fresh, raw)
            return
    elif prefix + name in state_dict:
        weight = state_dict[prefix + name]
    else:
        return
    if isinstance(weight, Tensor) and weight.dim() >= 2:
        fresh.bind(weight, parametrization.bound_layout)
        _fill_(state_dict, prefix, name, fresh, fresh.right_inverse(weight))


def _fill_(state_dict: dict[str, Any], prefix: str, name: str, bound: Parametrization, raw: Tensor) -> None:
    state_dict[prefix + name] = raw
    for key, value in bound.state_dict().items():
        state_dict[f"{prefix}{name}_parametrization.{key}"] = value


@torch.no_grad()
def plain_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict in which every parametrized weight is replaced by its effective weight.

    The result loads into the model without parametrizations and computes the same function. Weights in
    the formats of ``torch.nn.utils`` (weight norm and spectral norm, old and new) are folded too.

    Args:
        state_dict: of a whole model or a part of it; not changed.

    Raises:
        InvalidArgumentError: if a weight was parametrized by something else, of which a state dict does
            not tell the formula.

    Example:
        >>> layer = nn.Linear(4, 3)
        >>> _ = gonio.parametrizations.attach(layer, "weight", gonio.parametrizations.Sphere())
        >>> plain = gonio.parametrizations.plain_state_dict(layer.state_dict())
        >>> sorted(plain), torch.equal(plain["weight"], layer.weight)
        (['bias', 'weight'], True)
    """
    found = dict(state_dict)
    for key in state_dict:
        if key.endswith(_DESCRIPTION):
            prefix, _, name = key.removesuffix(_DESCRIPTION).rpartition(".")
            prefix = prefix + "." if prefix else ""
            found[prefix + name] = _pop_own_(found, prefix, name)
    for prefix, name in _torch_weights(found):
        entries = _torch_entries(found, prefix, name)
        if entries is None:
            raise InvalidArgumentError(
                "plain_state_dict() folds the formats of gonio and torch's weight and spectral norm",
                f"{prefix}parametrizations.{name} of another kind",
                "Fold it in the model: torch.nn.utils.parametrize.remove_parametrizations().",
            )
        tensors = {meaning: found.pop(prefix + key) for meaning, key in entries.items()}
        found[prefix + name] = _effective(tensors, transposed=None)
    return found


def _torch_weights(state_dict: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(prefix, name) of every weight in a format of torch."""
    found = []
    for key in state_dict:
        before, mark, after = key.rpartition("parametrizations.")
        if mark and after.count(".") == 1 and after.endswith((".original", ".original0")):
            found.append((before, after.partition(".")[0]))
        for suffix in ("_g", "_orig"):
            path = key.removesuffix(suffix)
            prefix, dot, name = path.rpartition(".")
            if key.endswith(suffix) and name and _torch_entries(state_dict, prefix + dot, name):
                found.append((prefix + dot, name))
    return found


def _pop_own_(state_dict: dict[str, Any], prefix: str, name: str) -> Tensor:
    """Remove the parametrization's entries of one weight and return its effective weight."""
    own = f"{prefix}{name}_parametrization."
    entries = {key.removeprefix(own): state_dict.pop(key) for key in list(state_dict) if key.startswith(own)}
    parametrization = kind_of(describe(entries["_extra_state"]))
    raw: Tensor = state_dict[prefix + name]
    # Shapes of the state follow from the weight's; its values come from the checkpoint.
    parametrization.bind(raw.detach().to("meta"), parametrization.bound_layout)
    parametrization.load_state_dict(entries, assign=True)
    weight: Tensor = parametrization(raw)
    return weight


def _torch_entries(state_dict: Mapping[str, Any], prefix: str, name: str) -> dict[str, str] | None:
    """The keys of the first format of which all entries are there."""
    for template in _TORCH_FORMATS:
        keys = {meaning: key.format(n=name) for meaning, key in template.items()}
        if all(isinstance(state_dict.get(prefix + key), Tensor) for key in keys.values()):
            return keys
    return None


def _effective(tensors: Mapping[str, Tensor], *, transposed: bool | None) -> Tensor:
    """The weight that torch computes from the entries of a weight norm or a spectral norm."""
    if "g" in tensors:
        g, v = tensors["g"], tensors["v"]
        dims = [d for d in range(v.dim()) if g.dim() == 0 or g.shape[d] == 1]
        return v * (g / torch.linalg.vector_norm(v, dim=dims, keepdim=g.dim() > 0))
    original, u, v = tensors["original"], tensors["u"], tensors["v"]
    first = original.shape[0]
    # torch takes dim 1 as output for transposed convolutions; without a layout the length of u tells
    on_dim_1 = transposed if transposed is not None else u.numel() != first
    matrix = (original.transpose(0, 1) if on_dim_1 else original).flatten(1)
    return original / torch.dot(u, matrix @ v)
