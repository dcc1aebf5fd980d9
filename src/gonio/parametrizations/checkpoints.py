"""State dicts of parametrized weights: plain, torch's and gonio's own formats, converted into one another.

gonio's own format holds the raw tensor under the weight's own key, and the state and description of the
parametrization under ``<name>_parametrization.``; a plain model refuses it because of these keys. A weight in any
other format is converted to its effective weight, to which the parametrization is bound as by an assignment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from gonio.errors import InvalidArgumentError
from gonio.parametrizations.parametrization import VERSION, Parametrization, describe, kind_of

_OWN = "_parametrization."
_ALIGNED = 0.9  # cosine of u and W v of a power iteration from which the dimension of the outputs is told
_DESCRIPTION = f"{_OWN}_extra_state"

# torch's formats: the keys of one weight, by the meaning of their values. {n} is the name of the weight.
_TORCH_FORMATS: tuple[dict[str, str], ...] = (
    {"g": "parametrizations.{n}.original0", "v": "parametrizations.{n}.original1"},
    {"original": "parametrizations.{n}.original", "u": "parametrizations.{n}.0._u", "v": "parametrizations.{n}.0._v"},
    {"original": "{n}_orig", "u": "{n}_u", "v": "{n}_v"},
    {"g": "{n}_g", "v": "{n}_v"},
)


@torch.no_grad()
def translate_(parametrization: Parametrization, state_dict: dict[str, Any], prefix: str, name: str) -> None:
    """Convert the entries of one weight, whatever their format, to the parametrization's own."""
    weight_key, own = prefix + name, prefix + name + _OWN
    fresh = parametrization.unbound()  # no copy: FSDP 2 has freed the storage of gradients that a copy would read
    weight: Any
    if any(key.startswith(own) for key in state_dict):
        if own + "_extra_state" not in state_dict:
            return  # a part of a state dict: torch reports the missing keys
        if parametrization.wrote(describe(state_dict[own + "_extra_state"])):
            _complete_(state_dict, weight_key, parametrization)
            return
        weight = _pop_own_(state_dict, weight_key)
    elif found := _keys_in(state_dict, prefix, name):
        tensors = {meaning: state_dict.pop(key) for meaning, key in found.items()}
        weight = effective(tensors, transposed=parametrization.bound_layout.transposed)
        fresh.bind(weight, parametrization.bound_layout)
        raw = fresh.adopt(tensors)
        if raw is not None:
            _fill_(state_dict, weight_key, fresh, raw)
            return
    elif any(key.startswith(f"{prefix}parametrizations.{name}.") for key in state_dict):
        raise _unknown("load_state_dict() converts", f"{prefix}parametrizations.{name}")
    else:
        weight = state_dict.get(weight_key)
    if isinstance(weight, Tensor) and weight.dim() >= 2:
        fresh.bind(weight, parametrization.bound_layout)
        _fill_(state_dict, weight_key, fresh, fresh.right_inverse(weight))


def _fill_(state_dict: dict[str, Any], weight_key: str, bound: Parametrization, raw: Tensor) -> None:
    state_dict[weight_key] = raw
    for key, value in bound.state_dict().items():
        state_dict[weight_key + _OWN + key] = value


def _complete_(state_dict: dict[str, Any], weight_key: str, parametrization: Parametrization) -> None:
    """Add the state that an older version did not have, as for a new parametrization of the weight."""
    absent = [key for key in parametrization.state_dict() if weight_key + _OWN + key not in state_dict]
    if absent and weight_key in state_dict and describe(state_dict[weight_key + _DESCRIPTION])["version"] < VERSION:
        fresh = parametrization.unbound()
        fresh.bind(state_dict[weight_key], parametrization.bound_layout)
        state_dict.update({weight_key + _OWN + key: fresh.state_dict()[key] for key in absent})


@torch.no_grad()
def plain_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict in which every parametrized weight is replaced by its effective weight.

    It loads into the model without parametrizations, which then computes the same function. Weights in the formats of
    ``torch.nn.utils`` (weight norm and spectral norm, old and new) are folded too. The argument is not changed.

    Raises:
        InvalidArgumentError: if a weight has another parametrization of torch, whose formula a state dict
            does not tell.

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
            weight_key = key.removesuffix(_DESCRIPTION)
            found[weight_key] = _pop_own_(found, weight_key)
    for prefix, name in list(_torch_weights(found)):
        keys = _keys_in(found, prefix, name)
        if keys is None:
            raise _unknown("plain_state_dict() folds", f"{prefix}parametrizations.{name}")
        tensors = {meaning: found.pop(key) for meaning, key in keys.items()}
        found[prefix + name] = effective(tensors)
    return found


def kinds_in(state_dict: Mapping[str, Any]) -> list[str]:
    """The names of gonio's own parametrizations whose state a state dict holds.

    Example:
        >>> layer = nn.Linear(4, 3)
        >>> _ = gonio.parametrizations.attach(layer, "weight", gonio.parametrizations.Sphere())
        >>> gonio.parametrizations.checkpoints.kinds_in(layer.state_dict())
        ['Sphere']
    """
    found = {key: value for key, value in state_dict.items() if key.endswith(_DESCRIPTION)}
    return sorted({str(describe(value).get("kind", "")) for value in found.values() if isinstance(value, Tensor)})


def _unknown(verb: str, path: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{verb} the formats of gonio and of torch's weight norm and spectral norm",
        f"{path} of another kind, whose formula a state dict does not tell",
        "Fold it in its own model and save that: torch.nn.utils.parametrize.remove_parametrizations().",
    )


def _pop_own_(state_dict: dict[str, Any], weight_key: str) -> Tensor:
    """Remove the parametrization's entries of one weight and return its effective weight."""
    own = weight_key + _OWN
    entries = {key.removeprefix(own): state_dict.pop(key) for key in list(state_dict) if key.startswith(own)}
    description = describe(entries["_extra_state"])
    parametrization = kind_of(description)
    raw: Tensor = state_dict[weight_key]
    # The shapes of the state follow from the weight's shape; its values come from the checkpoint.
    parametrization.bind(raw.detach().to("meta"), parametrization.bound_layout)
    parametrization.load_state_dict(entries, assign=True, strict=description["version"] == VERSION)
    weight: Tensor = parametrization(raw)
    return weight


def _torch_weights(state_dict: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(prefix, name) of every weight in a format of torch."""
    for key in state_dict:
        before, mark, after = key.rpartition("parametrizations.")
        if mark and after.count(".") == 1 and after.endswith((".original", ".original0")):
            yield before, after.partition(".")[0]
        for suffix in ("_g", "_orig"):
            prefix, dot, name = key.removesuffix(suffix).rpartition(".")
            free = key.endswith(suffix) and name and prefix + dot + name not in state_dict
            if free and _keys_in(state_dict, prefix + dot, name):
                yield prefix + dot, name


def _keys_in(state_dict: Mapping[str, Any], prefix: str, name: str) -> dict[str, str] | None:
    def shape_of(key: str) -> Sequence[int] | None:
        return found.shape if isinstance(found := state_dict.get(key), Tensor) else None

    return torch_keys(shape_of, prefix, name)


def torch_keys(shape_of: Callable[[str], Sequence[int] | None], prefix: str, name: str) -> dict[str, str] | None:
    """The keys of one weight in the first format of torch of which all keys are present, by meaning.

    Args:
        shape_of: the shape of the tensor at a key; None where there is none.
    """
    for template in _TORCH_FORMATS:
        keys = {meaning: prefix + key.format(n=name) for meaning, key in template.items()}
        shapes = {meaning: tuple(found) for meaning, key in keys.items() if (found := shape_of(key)) is not None}
        if len(shapes) == len(keys) and _fits(shapes):
            return keys
    return None


def _fits(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the shapes are those of a norm: two gates of one layer can have the same names."""
    if "g" in shapes:  # one number for all, or for each slice along one dimension
        g, v = shapes["g"], shapes["v"]
        kept = [(n, whole) for n, whole in zip(g, v, strict=False) if n != 1]
        return len(v) >= 1 and len(g) in (0, len(v)) and len(kept) <= 1 and all(n == whole for n, whole in kept)
    original, u, v = shapes["original"], shapes["u"], shapes["v"]
    return len(u) == len(v) == 1 and u[0] in original and u[0] * v[0] == prod(original)


def effective(tensors: Mapping[str, Tensor], *, transposed: bool | None = None) -> Tensor:
    r"""The weight that torch computes from the entries of a weight norm, :math:`g v / \|v\|`, or of a spectral norm.

    Args:
        tensors: by the meanings that :func:`torch_keys` gives them.
        transposed: whether the outputs of a spectral norm are on dimension 1; None where that is not known.

    References: [1] T. Salimans, D. Kingma, "Weight normalization", 2016, arXiv 1602.07868, equation (2).
    """
    if "g" in tensors:
        g, v = tensors["g"], tensors["v"]
        dims = [d for d in range(v.dim()) if g.dim() == 0 or g.shape[d] == 1]
        return v * (g / torch.linalg.vector_norm(v, dim=dims, keepdim=g.dim() > 0))
    original, u, v = tensors["original"], tensors["u"], tensors["v"]
    if transposed is None:
        return over_spectral_norm(original, u, v)
    matrix = (original.transpose(0, 1) if transposed else original).flatten(1)
    return original / torch.dot(u, matrix @ v)


def over_spectral_norm(original: Tensor, u: Tensor, v: Tensor) -> Tensor:
    r"""W / uᵀWv, with W as a matrix whose rows are the outputs, of the tensors that torch stores.

    Outputs are on dimension 0, or on 1 for a transposed convolution. Where both fit, it is the one for which u is the
    direction of W v, as each step of the power iteration leaves it.

    Raises:
        InvalidArgumentError: if this is so for neither of two, or for both.

    References: [1] T. Miyato et al., "Spectral normalization for generative adversarial networks", 2018, arXiv
        1802.05957, equation (8) and algorithm 1.
    """
    images = {dim: original.movedim(dim, 0).flatten(1) @ v for dim in (0, 1) if u.numel() == original.shape[dim]}
    near = [dim for dim, image in images.items() if torch.cosine_similarity(u, image, dim=0) > _ALIGNED]
    if len(images) > 1 and len(near) != 1:
        found = "which dimension holds the outputs is not known: the vectors fit neither of two, or both"
        do = "Run the model once in training mode, and save it again."
        raise InvalidArgumentError("a spectral norm is W / uᵀWv", found, do)
    return original / torch.dot(u, images[near[0] if len(images) > 1 else next(iter(images))])


def weight_by_hook(module: nn.Module, name: str = "weight") -> Tensor | None:
    """The weight that a hook of ``torch.nn.utils`` computes before a forward; None if there is no such hook.

    The hooks are those of ``weight_norm``, ``spectral_norm`` and ``prune``. The attribute ``module.weight`` is the
    value of the last forward, which is outdated after a load or a step. This is computed from the Parameters,
    differentiably; a spectral norm has the vectors that it stores.

    Example:
        >>> layer = torch.nn.utils.spectral_norm(nn.Linear(4, 3)).eval()
        >>> with torch.no_grad():
        ...     _ = layer.weight_orig.mul_(2)
        >>> weight = gonio.parametrizations.weight_by_hook(layer)
        >>> torch.allclose(weight, layer.weight), bool(layer(torch.eye(4)).isfinite().all())
        (False, True)
        >>> torch.allclose(weight, layer.weight)  # after the forward
        True
    """
    made = weights_of_hooks(module).get(name)
    return None if made is None else made()


def weights_of_hooks(module: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """For each weight that such a hook renews before a forward, a function that computes it and changes nothing."""
    made: dict[str, Callable[[], Tensor]] = {}
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            made[hook.name] = partial(hook.compute_weight, module)
        elif isinstance(hook, SpectralNorm):
            made[hook.name] = partial(hook.compute_weight, module, do_power_iteration=False)
        elif isinstance(hook, BasePruningMethod):
            made[hook._tensor_name] = partial(hook.apply_mask, module)
    return made
