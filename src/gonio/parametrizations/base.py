"""Attach a parametrization to a tensor of a layer, and take it off again."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import nn

from gonio.errors import AlreadyAppliedError, InvalidArgumentError, NotApplicableError
from gonio.geometry.views import layout_of
from gonio.parametrizations.covering import Covered, child_name, covered_class
from gonio.parametrizations.parametrization import Parametrization

__all__ = ["Parametrization", "attach", "detach", "is_parametrized", "parametrization_of"]


def attach(module: nn.Module, name: str, parametrization: Parametrization) -> Parametrization:
    """Compute the tensor `name` of a layer by a parametrization from now on; in place.

    The Parameter object stays under its own name and in its place among the layer's parameters: it now
    is the trained tensor from which ``layer.weight`` is computed at each read. Parameters that the
    parametrization adds (a gain) come after it, and are frozen if it is. ``layer.weight = tensor`` sets
    the effective weight.

    Layers whose forward reads the attribute work as they are, ``nn.MultiheadAttention`` and the fast
    path of ``nn.TransformerEncoderLayer`` included; RNN, LSTM and GRU, which keep a list of weights,
    are handled. Refused are weights that are changed in place by a forward (``max_norm``), have sparse
    gradients, are sharded or not materialised yet, or are parametrized by torch already.

    Args:
        module: the layer.
        name: a parameter of it that is a stack of filters.
        parametrization: a template, which is bound and kept (copy it to use it again). To parametrize
            one Parameter that several layers share, attach the same object to each of them.

    Returns:
        The parametrization, bound.

    Raises:
        AlreadyAppliedError: if the tensor is parametrized already.
        NotApplicableError: if the layer or its tensor cannot carry one; the message says why.

    Example:
        >>> layer = nn.Linear(4, 3)
        >>> raw = layer.weight
        >>> _ = gonio.parametrizations.attach(layer, "weight", gonio.parametrizations.Sphere())
        >>> torch.allclose(layer.weight.norm(dim=1), torch.ones(3)), next(layer.parameters()) is raw
        (True, True)
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise NotApplicableError(
            "attach()", name, "a scripted layer has a compiled forward", "Script the folded model instead."
        )
    raw = _carrier(module, name)
    layout = layout_of(module, name)
    if parametrization.layout is None:
        _bind_(parametrization, raw, name, module)
    elif parametrization.raw_id != id(raw):
        raise InvalidArgumentError(
            "attach() takes a parametrization that is a template, or is bound to the same Parameter",
            f"one that is bound to another tensor, of layout {parametrization.layout}",
            "Attach a new one: parametrization.unbound() has the same options.",
        )
    elif parametrization.layout != layout:
        raise NotApplicableError(
            "attach()", name, "it is shared with a layer that stores filters otherwise", "Untie the two."
        )
    _cover_(module, name, parametrization)
    return parametrization


def detach(module: nn.Module, name: str, *, keep: Literal["raw", "weight"] = "raw") -> Parametrization:
    """Take the parametrization off a tensor; the layer gets its own class back.

    Args:
        module: the layer.
        name: the parametrized tensor.
        keep: what the Parameter holds afterwards: ``"weight"`` (the function stays the same) or
            ``"raw"`` (what was trained).

    Returns:
        The parametrization, still bound, so that it can be attached to the same Parameter again.

    Raises:
        NotApplicableError: if the tensor is not parametrized, or the layer's class was changed since.
        InvalidArgumentError: if `keep` is something else.

    Example:
        >>> layer = nn.Linear(4, 3)
        >>> _ = gonio.parametrizations.attach(layer, "weight", gonio.parametrizations.Sphere())
        >>> weight = layer.weight
        >>> _ = gonio.parametrizations.detach(layer, "weight", keep="weight")
        >>> type(layer) is nn.Linear, torch.equal(layer.weight, weight)
        (True, True)
    """
    parametrization = parametrization_of(module, name)
    if parametrization is None:
        raise NotApplicableError("detach()", name, "it is not parametrized", "Attach one first.")
    if keep not in ("raw", "weight"):
        raise InvalidArgumentError('detach() takes keep="raw" or "weight"', repr(keep), "Choose one.")
    base, names = _covered_from(module)
    if type(module) is not covered_class(base, names):
        raise NotApplicableError(
            "detach()",
            name,
            f"the layer became a {type(module).__name__} after the parametrization was attached",
            "Undo that first; a sharded model is folded before it is sharded.",
        )
    if keep == "weight":
        raw = cast(nn.Parameter, module._parameters[name])
        with torch.no_grad():
            raw.copy_(parametrization(raw))
    rest = tuple(n for n in names if n != name)
    module.__class__ = covered_class(base, rest) if rest else base
    del module._modules[child_name(name)]
    return parametrization


def parametrization_of(module: nn.Module, name: str = "weight") -> Parametrization | None:
    """The parametrization of a layer's tensor, or None.

    Example:
        >>> gonio.parametrizations.parametrization_of(nn.Linear(2, 2)) is None
        True
    """
    if isinstance(module, Covered) and name in module.covered_names:
        return cast(Parametrization, module._modules[child_name(name)])
    return None


def is_parametrized(module: nn.Module, name: str | None = None) -> bool:
    """Whether the tensor `name` of a layer is parametrized; with None, whether any of its tensors is.

    Example:
        >>> layer = nn.Linear(4, 3)
        >>> _ = gonio.parametrizations.attach(layer, "weight", gonio.parametrizations.Sphere())
        >>> gonio.parametrizations.is_parametrized(layer), gonio.parametrizations.is_parametrized(layer, "bias")
        (True, False)
    """
    return isinstance(module, Covered) and (name is None or name in module.covered_names)


def _carrier(module: nn.Module, name: str) -> nn.Parameter:
    """The Parameter that is to be covered, if it can be."""
    there = parametrization_of(module, name)
    torchs = f"parametrizations.{name}" if name in getattr(module, "parametrizations", {}) else None
    legacy = next((n for n in (f"{name}_orig", f"{name}_g") if n in module._parameters), None)
    if there is not None or torchs or legacy:
        found = f"{type(there).__name__}" if there is not None else f"torch's own ({torchs or legacy})"
        raise AlreadyAppliedError("attach()", name, found)
    raw = module._parameters.get(name)
    why = _refusal(module, raw)
    if why is not None:
        raise NotApplicableError("attach()", f"{type(module).__name__}.{name}", *why)
    return cast(nn.Parameter, raw)


def _refusal(module: nn.Module, raw: nn.Parameter | None) -> tuple[str, str] | None:
    """Why a layer cannot carry a parametrization, and what to do; None if it can."""
    if raw is None:
        return "it is not a Parameter of that layer", "Name a tensor in layer.named_parameters()."
    if isinstance(raw, nn.UninitializedParameter):
        return "it has no shape yet", "Run one batch through the model first."
    if hasattr(raw, "device_mesh"):
        return "it is sharded", "Parametrize before sharding."
    if getattr(module, "max_norm", None) is not None:
        return "max_norm renormalises it in place during forward", "Set max_norm=None."
    if getattr(module, "sparse", False):
        return "its gradients are sparse", "Set sparse=False."
    return None


@torch.no_grad()
def _bind_(parametrization: Parametrization, raw: nn.Parameter, name: str, module: nn.Module) -> None:
    weight = raw.detach()
    parametrization.bind(weight, layout_of(module, name))
    inverse = parametrization.right_inverse(weight)
    if inverse is not weight:
        raw.copy_(inverse)
    parametrization.raw_id = id(raw)
    for parameter in parametrization.parameters():
        parameter.requires_grad_(raw.requires_grad)


def _cover_(module: nn.Module, name: str, parametrization: Parametrization) -> None:
    base, names = _covered_from(module)
    try:
        module.__class__ = covered_class(base, (*names, name))
    except TypeError as error:
        raise NotApplicableError(
            "attach()", f"{base.__name__}.{name}", f"its class cannot be extended ({error})", "Leave it out."
        ) from error
    module._modules[child_name(name)] = parametrization.train(module.training)


def _covered_from(module: nn.Module) -> tuple[type[nn.Module], tuple[str, ...]]:
    """The layer's own class, and the names that are parametrized."""
    if isinstance(module, Covered):
        return module.covered_base, module.covered_names
    return type(module), ()
