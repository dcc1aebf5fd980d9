"""Scale down what a fine-tuning has changed: all of it, or the top singular directions that its base does not have."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gonio.editing.edit import Edit, Edited
from gonio.editing.memory import memory_key
from gonio.editing.twin import without_wrappers
from gonio.editing.where import Site, Where, as_selector, left_out, refuse_flat_shards, select, sites
from gonio.errors import InvalidArgumentError, NotApplicableError, listing
from gonio.execution import loaded
from gonio.geometry import intruder_dimensions, layout_of, matrix_view, unview
from gonio.geometry.norms import whole
from gonio.geometry.subspaces import CONSIDERED, THRESHOLD
from gonio.geometry.views import why_not_dense
from gonio.messages import joined, say
from gonio.parametrizations.checkpoints import plain_state_dict, weights_of_hooks
from gonio.parametrizations.mechanism import Parametrized, child_name, parametrizations_of_torch
from gonio.surgery.fold import removal_of_hook

_ADAPTED = "peft.tuners.tuners_utils:BaseTunerLayer"


def shrink_intruders_(
    model: nn.Module,
    base: nn.Module | Mapping[str, Any],
    *,
    where: Where = None,
    factor: float = 0.75,
    k: int = CONSIDERED,
    threshold: float = THRESHOLD,
) -> Edited:
    r"""Multiply the intruder dimensions of a fine-tuned model's weights by `factor`.

    For each weight W' and its base, with the top k singular values :math:`\sigma_j` and vectors of W' of which those in
    J are intruders (:func:`gonio.geometry.intruder_dimensions`):

    .. math:: W' \leftarrow W' + (\text{factor} - 1) \sum_{j \in J} \sigma_j u_j v_j^\top

    Less of the intruders recovers more of what the base could do, and loses some of what the fine-tuning taught:
    measure both. Weights without intruders stay as they are; a weight of several matrices is treated matrix by matrix.

    Args:
        model: fine-tuned; adapters must be merged.
        base: the model before, or its state dict; layers are matched by path.
        where: which layers; None for all with a weight in the base.
        factor: 1 changes nothing, 0 removes the intruders.
        k, threshold: which directions count as intruders.

    Raises:
        NoMatchError: if no selected layer has a weight that can be compared.
        InvalidArgumentError: for a factor that is negative or not finite.
        NotApplicableError: if the base has none of the weights, for values that are not finite, and for a model in FSDP
            1.

    Example:
        >>> base = nn.Sequential(nn.Linear(64, 64, bias=False))
        >>> tuned = nn.Sequential(nn.Linear(64, 64, bias=False))
        >>> with torch.no_grad():
        ...     _ = tuned[0].weight.copy_(base[0].weight + torch.randn(64, 1) @ torch.randn(1, 64))
        >>> gonio.measure(base, tuned)["0"].intruders
        1
        >>> print(gonio.shrink_intruders_(tuned, base, factor=0.0))
        shrink_intruders_: 1 module
          0  1 of 10 directions scaled by 0
        >>> gonio.measure(base, tuned)["0"].intruders
        0

    References: R. Shuttleworth, J. Andreas, A. Torralba, P. Sharma, "LoRA vs full fine-tuning: an illusion of
        equivalence", 2024, arXiv 2410.21228, section 5 (the factor λ; figure 8 for its effect).
    """
    if not 0 <= factor < float("inf"):
        raise InvalidArgumentError("shrink_intruders_ needs a factor >= 0", f"{factor}", "Use for example 0.75.")
    refuse_flat_shards(model, "shrink_intruders_")
    weights = _tensors(base)
    computed = _Computed(model, weights)
    able = computed.unless(can_act)
    found = select(model, where, verb="shrink_intruders_", can_act=able)
    with Edit(model, "shrink_intruders_", once=True) as edit:
        missing: list[str] = []
        done: set[Hashable] = set()
        for site in found:
            weight = site.module.get_parameter("weight")
            before = weights.get(f"{site.path}.weight" if site.path else "weight")
            if before is None or before.shape != weight.shape:
                missing.append(site.path or "the model")
            elif memory_key(weight) not in done:
                done.add(memory_key(weight))
                _shrink(edit, site, whole(before.detach()), factor, k, threshold)
        edit.note_stays(computed.left_out(where, able))
        _note_missing(edit, "shrink_intruders_", missing, none=len(missing) == len(found))
    return edit.done()


def shrink_change_(
    model: nn.Module, base: nn.Module | Mapping[str, Any], *, where: Where = None, factor: float = 0.5
) -> Edited:
    r"""Multiply the change of a fine-tuned model's parameters since its base by `factor`.

    .. math:: W' \leftarrow W + \text{factor} \, (W' - W)

    for each parameter W' and its base W, weights and biases alike. This is the repair of an adapter that was merged
    with a scale (alpha/r) that is too large, and the interpolation between a fine-tuned model and its base. Buffers
    stay: measure the running statistics of batch norms anew (:func:`gonio.calibrate_`).

    A layer whose weight is computed from its parameters, by a parametrization, a hook of torch.nn.utils or an adapter
    of peft, is left out with a note, because the computed weight would not be this one: fold it in both models first. A
    pruned layer is changed if the base has the same mask.

    Args:
        model: fine-tuned; adapters must be merged.
        base: the model before, or its state dict; parameters are matched by path.
        where: which layers; None for all with a parameter in the base.
        factor: 1 changes nothing, 0 restores the base, above 1 the change grows.

    Raises:
        NoMatchError: if no selected layer has a parameter.
        InvalidArgumentError: for a factor that is negative or not finite.
        NotApplicableError: if the base has none of the parameters, for values that are not finite, and for a model in
            FSDP 1.

    Example:
        >>> base, tuned = nn.Linear(4, 4), nn.Linear(4, 4)
        >>> change = (tuned.weight - base.weight).detach().norm()
        >>> print(gonio.shrink_change_(tuned, base, factor=0.25))
        shrink_change_: 1 module
          (model)  the change of weight and bias scaled by 0.25
        >>> round(float((tuned.weight - base.weight).detach().norm() / change), 4)
        0.25

    References: M. Wortsman et al., "Robust fine-tuning of zero-shot models", CVPR 2022, arXiv 2109.01903, section 3
        (the mixing coefficient α, of all parameters).
    """
    if not 0 <= factor < float("inf"):
        raise InvalidArgumentError("shrink_change_ needs a factor >= 0", f"{factor}", "Use for example 0.5.")
    refuse_flat_shards(model, "shrink_change_")
    weights = _tensors(base)
    computed = _Computed(model, weights)
    able = computed.unless(can_interpolate)
    found = select(model, where, verb="shrink_change_", can_act=able)
    with Edit(model, "shrink_change_", once=True) as edit:
        missing: list[str] = []
        done: set[Hashable] = set()
        for site in found:
            names = []
            for name, parameter in site.module.named_parameters(recurse=False):
                own = f"{site.path}.{name}".removeprefix(".")
                before = weights.get(own)
                if before is None or before.shape != parameter.shape:
                    missing.append(own)
                    continue
                names.append(name)
                if memory_key(parameter) not in done:
                    done.add(memory_key(parameter))
                    edit.set_data_(parameter, _between(site, whole(before.detach()), whole(parameter.detach()), factor))
            if names:
                what = joined(names, " and ")
                edit.changed(site.path, say("the change of {what} scaled by {factor:g}", what=what, factor=factor))
        edit.note_stays(computed.left_out(where, able))
        _note_missing(edit, "shrink_change_", missing, none=not edit.changes)
    return edit.done()


def _tensors(base: nn.Module | Mapping[str, Any]) -> dict[str, Tensor]:
    state = without_wrappers(base).state_dict() if isinstance(base, nn.Module) else base
    found = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
    described = child_name("") + "._extra_state"  # of a weight that is computed by gonio: what is stored is another one
    computed = {name.removesuffix(described) for name in found if name.endswith(described)}
    own = {name: value for name, value in found.items() if name.partition(child_name("") + ".")[0] in computed}
    return {**found, **plain_state_dict(own)}


class _Computed:
    """The layers with a weight that is computed from parameters, on which it does not depend linearly."""

    def __init__(self, model: nn.Module, base: Mapping[str, Tensor]) -> None:
        self._model = model
        self._why: dict[int, str] = {}  # by the `id` of a layer
        self._parts: set[int] = set()  # the modules that compute a weight
        for site in sites(model):
            if (why := _why_computed(site, base)) is not None:
                self._why.setdefault(id(site.module), why)
                self._parts |= {id(part) for part in _computing(site.module)}

    def unless(self, can_act: Callable[[nn.Module], str | None]) -> Callable[[nn.Module], str | None]:
        """Why a verb cannot act on a layer, and on those that are computed."""

        def able(module: nn.Module) -> str | None:
            part = say("a part of what computes a weight") if id(module) in self._parts else None
            return self._why.get(id(module)) or part or can_act(module)

        return able

    def left_out(self, where: Where, able: Callable[[nn.Module], str | None]) -> dict[str, str]:
        """The layers to be named: those with a matrix of their own or a computed one, without parts of the latter."""
        everything = [site for site in sites(self._model) if site.matches(as_selector(where))]
        parts = {site.path for site in everything if id(site.module) in self._parts}
        stay = left_out(self._model, where, can_act=able)
        stay |= {site.path: self._why[id(site.module)] for site in everything if id(site.module) in self._why}
        return {path: why for path, why in stay.items() if path not in parts}


def _why_computed(site: Site, base: Mapping[str, Tensor]) -> str | None:
    """What computes a weight of a layer from its parameters, other than a pruning mask that the base has as well."""
    module = site.module
    if isinstance(module, loaded(_ADAPTED)):
        return say("an adapter of peft computes its weight: merge and unload it first")
    names = [
        *parametrizations_of_torch(module),
        *(module.parametrized_names if isinstance(module, Parametrized) else ()),
    ]
    if names:
        return say("its {names} is computed by a parametrization", names=", ".join(names))
    for name in weights_of_hooks(module):
        mask, removal = module._buffers.get(f"{name}_mask"), removal_of_hook(module)
        if mask is None:
            return say("a hook of torch.nn.utils computes its weight: use {removal}", removal=removal)
        before = base.get(f"{site.path}.{name}_mask".removeprefix("."))
        if before is None or not torch.equal(mask, before.to(mask)):
            return say("its pruning mask is another one in the base")
    return None


def _computing(module: nn.Module) -> Iterator[nn.Module]:
    """The modules inside a layer that compute its weights; of an adapted one, the layer that it adapts as well."""
    names = module.parametrized_names if isinstance(module, Parametrized) else ()
    inside = [*parametrizations_of_torch(module).values(), *(module._modules[child_name(name)] for name in names)]
    for each in module.children() if isinstance(module, loaded(_ADAPTED)) else inside:
        yield from each.modules() if each is not None else ()


def _note_missing(edit: Edit, verb: str, missing: list[str], *, none: bool) -> None:
    """Name what the base does not have; refuse if it has none of what was selected."""
    if missing:
        edit.note(say("{paths}: the base has no weight of this path and shape", paths=listing(missing)))
    if none:
        why = say("the base has no weight of its path and shape")
        do = "Pass the model before fine-tuning, with the same names."
        raise NotApplicableError(verb, missing[0], why, do, action="change")


def _refuse_nonfinite(verb: str, site: Site, *tensors: Tensor) -> None:
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
        why = say("it or its base has values that are not finite")
        raise NotApplicableError(verb, site.path, why, "Restore it.", action="change", kind=site.kind)


@torch.no_grad()
def _between(site: Site, before: Tensor, now: Tensor, factor: float) -> Tensor:
    _refuse_nonfinite("shrink_change_", site, now, before)
    wide = torch.promote_types(now.dtype, torch.float32)
    old, new = before.to(now.device, wide), now.to(wide)
    return new if factor == 1 else (old + factor * (new - old)).to(now.dtype)


@torch.no_grad()
def _shrink(edit: Edit, site: Site, before: Tensor, factor: float, k: int, threshold: float) -> None:
    parameter = site.module.get_parameter("weight")
    weight = whole(parameter.detach())
    _refuse_nonfinite("shrink_intruders_", site, weight, before)
    layout = layout_of(site.module)
    matrices = matrix_view(weight, layout)
    parts, count = [], 0
    for old, new in zip(matrix_view(before.to(weight), layout), matrices, strict=True):
        considered = min(k, *new.shape)
        intruders = intruder_dimensions(old, new, k=considered, threshold=threshold)
        count += len(intruders.numbers)
        parts.append(new + (factor - 1) * intruders.part.to(new))
    if count:
        edit.set_data_(parameter, unview(torch.stack(parts), weight.shape, layout))
        total = considered * len(parts)
        what = {"count": count, "total": total, "factor": factor}
        edit.changed(site.path, say("{count} of {total} directions scaled by {factor:g}", **what))


def can_act(module: nn.Module) -> str | None:
    """Why :func:`shrink_intruders_` cannot act on a layer; None if it can.

    Example:
        >>> from gonio.surgery.shrink import can_act
        >>> can_act(nn.Linear(4, 4)), can_act(nn.ReLU())
        (None, 'it has no weight matrix of its own')
    """
    weight = module._parameters.get("weight")
    if (why := why_not_dense(weight)) is not None:
        return why
    if weight is None or weight.dim() < 2:
        return say("it has no weight matrix of its own")
    if weight is not module.weight:
        return say("its weight is computed by a parametrization")
    if weight.is_meta:
        return say("its weight is on the meta device")
    try:
        _, n, d = matrix_view(weight.detach(), layout_of(module)).shape
    except (NotApplicableError, InvalidArgumentError):
        return say("its weight is not a stack of filters")
    return say("its filters are too few to have top directions") if min(n, d) < 2 else None


def can_interpolate(module: nn.Module) -> str | None:
    """Why :func:`shrink_change_` cannot act on a layer; None if it can.

    Example:
        >>> from gonio.surgery.shrink import can_interpolate
        >>> can_interpolate(nn.LayerNorm(4)), can_interpolate(nn.ReLU())
        (None, 'it has no parameters of its own')
    """
    own = [p for p in module._parameters.values() if p is not None]
    for parameter in own:
        if (why := why_not_dense(parameter)) is not None:
            return why
    if not own:
        return say("it has no parameters of its own")
    return say("its parameters are on the meta device") if any(p.is_meta for p in own) else None
