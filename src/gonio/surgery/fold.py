"""`fold_`: replace parametrizations, norms and decoupled layers by plain layers of the same function."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gonio.editing.edit import Edit, Edited
from gonio.editing.twin import evaluating
from gonio.editing.where import Site, Where, as_selector, asked_of, refuse_shards, sites, unwrapped
from gonio.errors import NoMatchError, NotApplicableError, listing
from gonio.geometry.views import layout_of, matrix_view, unview, why_not_dense
from gonio.messages import say
from gonio.parametrizations.checkpoints import weights_of_hooks
from gonio.parametrizations.mechanism import detach, is_parametrized, parametrizations_of_torch
from gonio.surgery.equivalent import SAME_OUTPUTS, SameFunction
from gonio.surgery.facts import TORCH_NORMS, facts_of, tail_of
from gonio.surgery.gains import gains_of
from gonio.surgery.graph import trace

# Endings of the parameters that hooks of torch.nn.utils put in the place of a weight, and what removes the hook.
_HOOKED = {"_g": "remove_weight_norm()", "_orig": "remove_spectral_norm() or prune.remove()"}


def fold_(model: nn.Module, *, example: Any = None, where: Where = None, gains: bool = False) -> Edited:
    r"""Replace parametrizations, batch norms and exact decoupled layers by plain torch layers.

    Parametrizations, those of ``torch.nn.utils.parametrize`` too, are replaced by the tensor that they compute. A batch
    norm, or a switchable norm whose mixture is batch statistics alone, folds into the layer that feeds only it,

    .. math::
        W' = \frac{\gamma}{\sqrt{\sigma^2 + \varepsilon}}\, W, \qquad
        b' = \frac{\gamma}{\sqrt{\sigma^2 + \varepsilon}}\,(b - \mu) + \beta.

    Decoupled layers that are linear in their input become plain layers. With `gains`, the gain g and the shift b of a
    norm whose result linear layers alone read move into them, also in transformers, which cannot be traced:

    .. math::
        W' = W \operatorname{diag}(g), \qquad c' = c + Wb, \qquad g' = 1, \qquad b' = 0.

    The norm stays, with the same parameters; :math:`g' = 0` where it multiplies by :math:`1 + g`. Where a reader has no
    bias the shift stays as :math:`b/g`. The readers are found by running the model, and each gain is confirmed by it.

    The result computes the function of the model
    in evaluation mode; it is meant for export and inference, not for further training. Notes name the layers that stay.

    Args:
        example: an input on which the outputs before and after are compared, with a note; None for one that is made
            from the model's first layer, if that can be done. It also tells the number of dimensions of a linear
            layer's output, on which it depends whether a batch norm after it has the same channels.
        where: which modules; None for all that can be folded. Naming one that cannot is an error. A gain is folded
            where its norm is selected.
        gains: whether the gains and shifts of norms move into the layers that read them.

    Raises:
        NoMatchError: if `where` selects nothing that could be folded.
        NotApplicableError: if `where` is given and selects a decoupled layer that is not linear or a norm that cannot
            be folded, if `gains` are wanted and there is no example, if the model is sharded or replicated, or if the
            outputs changed by more than rounding; the model is restored.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        >>> edited = gonio.fold_(model, example=torch.ones(1, 1, 5, 5))
        >>> [type(layer).__name__ for layer in model]
        ['Conv2d', 'Identity', 'ReLU']
        >>> block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
        >>> _ = nn.init.normal_(block.norm1.weight)
        >>> print(gonio.fold_(block, gains=True).changes[0])
        Change(path='norm1', what='gain and shift folded into self_attn.in_proj_weight')

    References: S. Ashkboos et al., "SliceGPT", ICLR 2024, section 3.2 (gains of norms). https://arxiv.org/abs/2401.15024
    """
    refuse_shards(model, "fold_")
    selector = as_selector(where)
    chosen = [site for site in sites(model) if site.matches(selector)]
    same = SameFunction(model, example)
    with Edit(model, "fold_") as edit, torch.no_grad():
        stay: dict[str, str] = {}  # the layers that are not folded, by path, and why
        for fold_some_ in (_fold_parametrizations_, _fold_parametrizations_of_torch_, _fold_decoupled_):
            fold_some_(edit, chosen, stay)
        _fold_norms_(edit, chosen, stay, same.dims)
        if gains and edit.changes:  # what follows runs the model
            same.check_runs_(edit, "fold")
        eps = _fold_gains_(edit, chosen, stay, same) if gains else 0.0
        if stay and where is not None:
            first = next(site for site in chosen if site.path in stay)
            why, do = stay[first.path], "Leave it out of `where`."
            raise NotApplicableError("fold_", first.path, why, do, action="fold", kind=first.kind)
        edit.note_stays(stay)
        if not edit.changes and not stay:
            refused = {site.path: stay.get(site.path, say("nothing to fold")) for site in chosen if site.owners}
            raise NoMatchError("fold_", asked_of(selector), [], refused=refused)
        allowed = {dtype: max(each, min(10 * eps, 0.05)) for dtype, each in SAME_OUTPUTS.items()}
        same.check_(edit, "fold", allowed, 0.05)
    return edit.done()


# --- parametrizations ---------------------------------------------------------------------------------


def _fold_parametrizations_(edit: Edit, chosen: list[Site], stay: dict[str, str]) -> None:
    """Fold the parametrizations of gonio."""
    selected = {id(site.module) for site in chosen}
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in edit.model.modules():
        for name, raw in module._parameters.items():
            owners.setdefault(id(raw), []).append((module, name))
    # decided for all before any is folded: one that shares its tensor with a folded one still is parametrized
    shared = {
        key
        for key, found in owners.items()
        if any(id(m) not in selected or not is_parametrized(m, n) for m, n in found)
    }
    folded: set[int] = set()  # a tensor that several layers share is overwritten once
    for site in chosen:
        for name, raw in list(site.module._parameters.items()):
            if raw is None or not is_parametrized(site.module, name):
                continue
            if id(raw) in shared:
                stay[site.path] = say(
                    "it shares its {name} with a layer that is not selected or not parametrized", name=name
                )
                continue
            edit.snapshot_(site.module)
            edit.set_data_(raw, raw)
            parametrization = detach(site.module, name, keep="raw" if id(raw) in folded else "weight")
            folded.add(id(raw))
            edit.changed(site.path, say("{name}: {kind} folded", name=name, kind=type(parametrization).__name__))


def _fold_parametrizations_of_torch_(edit: Edit, chosen: list[Site], stay: dict[str, str]) -> None:
    """Fold those of `torch.nn.utils.parametrize`.

    Unlike torch's own removal this keeps the class that copies of the layer share, and the order of parameters.
    """
    owners = Counter(id(p) for m in edit.model.modules() for p in m._parameters.values() if p is not None)
    inside: set[int] = set()  # parts of parametrizations, which may be parametrized themselves, fold with them
    for site in chosen:
        if (removal := removal_of_hook(site.module)) is not None:
            stay[site.path] = say("a hook of torch.nn.utils computes its weight: use {removal}", removal=removal)
        lists = parametrizations_of_torch(site.module)
        if not lists or id(site.module) in inside:
            continue
        inside.update(id(part) for found in lists.values() for part in found.modules())
        if any(found._buffers for found in lists.values()):
            stay[site.path] = say("its parametrized tensor is no Parameter")
        elif any(owners[id(tensor)] > 1 for found in lists.values() for tensor in found._parameters.values()):
            stay[site.path] = say("it shares its parametrized weight")
        elif reasons := [why for found in lists.values() if (why := why_not_dense(_value(found))) is not None]:
            stay[site.path] = reasons[0]
        else:
            _remove_parametrizations_(edit, site, lists)


def removal_of_hook(module: nn.Module) -> str | None:
    """What removes the hook of `torch.nn.utils` that computes a weight of a layer; None if there is no such hook."""
    stored = module._parameters
    return next((do for n in weights_of_hooks(module) for end, do in _HOOKED.items() if f"{n}{end}" in stored), None)


def _value(found: parametrize.ParametrizationList) -> Tensor:
    with evaluating(found) as twin:  # torch's spectral norm takes a step at each read in training
        value: Tensor = twin()
    return value.detach().clone()


def _remove_parametrizations_(edit: Edit, site: Site, lists: dict[str, parametrize.ParametrizationList]) -> None:
    module = site.module
    edit.snapshot_(module)
    folded: dict[str, nn.Parameter | None] = {}
    for name, found in lists.items():
        value = _value(found)
        original = next(found.parameters(recurse=False))
        # the trained tensor goes on as the weight unless the parametrization changes its shape or dtype
        if found.is_tensor and (original.shape, original.dtype) == (value.shape, value.dtype):
            edit.set_data_(original, value)
            folded[name] = original
        else:
            folded[name] = nn.Parameter(value, requires_grad=original.requires_grad)
        what = ", ".join(type(part).__name__.lstrip("_") for part in found)
        edit.changed(site.path, say("{name}: {kind} of torch folded", name=name, kind=what))
    others = dict(module._parameters)
    module.__class__ = type(module).__bases__[0]
    del module._modules["parametrizations"]
    module._parameters.clear()
    module._parameters.update(folded | others)


# --- decoupled layers ---------------------------------------------------------------------------------


def _fold_decoupled_(edit: Edit, chosen: list[Site], stay: dict[str, str]) -> None:
    """Replace decoupled layers that are linear in their input."""
    for site in chosen:
        to_plain = getattr(type(site.module), "to_plain", None)  # of the type: a wrapper may forward attributes
        if to_plain is None:
            continue
        if not site.path:
            stay[site.path] = say("it is the model itself")
            continue
        try:
            plain = to_plain(site.module)
        except NotApplicableError as error:
            stay[site.path] = str(error)
            continue
        plain.train(site.module.training)
        edit.replace_(site, plain, what=f"{site.kind} → {type(plain).__name__}")


# --- norms --------------------------------------------------------------------------------------------


def _fold_norms_(edit: Edit, chosen: list[Site], stay: dict[str, str], dims: dict[str, int]) -> None:
    """Fold norms with fixed statistics into the layer that feeds them alone."""
    norms = [site for site in chosen if _has_statistics(site.module)]
    if not norms:
        return
    graph = trace(edit.model, training=False, dims=dims)
    untraced = say("the model cannot be traced ({reason})", reason=graph.reason) if graph.reason else None
    paths = {id(site.module): site.path for site in sites(graph.model)}
    # all layers are found before the first norm is replaced
    layers = [_not_fixed(site.module) or untraced or graph.folds_into(site.module) for site in norms]
    for site, layer in zip(norms, layers, strict=True):
        if isinstance(layer, str):
            stay[site.path] = layer
        elif not site.owners:
            stay[site.path] = say("it is the model itself")
        else:
            _fold_norm_(edit, layer, site.module)
            edit.replace_(
                site,
                _rest_of(site.module),
                what=say("{kind} folded into {path}", kind=site.kind, path=paths[id(layer)]),
            )


def _has_statistics(module: nn.Module) -> bool:
    """Whether it is a norm that may be a fixed affine map in evaluation."""
    return facts_of(module).why_not_affine is not None or isinstance(module, TORCH_NORMS[0])


def _fold_gains_(edit: Edit, chosen: list[Site], stay: dict[str, str], same: SameFunction) -> float:
    """Move the gains and shifts of norms into the layers that alone read them; the rounding of the model's types."""
    if same.input is None:
        why = f"what reads a norm is found by running the model, and {same.why}"
        raise NotApplicableError("fold_", "", why, "Pass example=.", action="fold")
    inner = unwrapped(edit.model)
    found = gains_of(inner, same.input, {id(site.module) for site in chosen if not _has_statistics(site.module)})
    stay.update(found.stay)
    for each in found.able:
        old = {name: found.parameters[name].detach() for name in each.tensors}
        gain = torch.ones_like(old[each.gain], dtype=torch.float64)
        for name, value in each.values(old, gain).items():
            edit.set_data_(found.parameters[name], value.to(old[name].dtype))
        into = ", ".join(dict.fromkeys(r.tensor for r in each.readers))
        what = say("gain and shift") if each.moves_shift else say("gain")
        edit.changed(each.path, say("{kind} folded into {path}", kind=what, path=into))
    kept = [each.path for each in found.able if each.shift and not each.moves_shift]
    if kept:
        why = say("it cannot move into biases exactly")
        edit.note(say("the shift of {paths} stays, divided by the gain: {why}", paths=listing(kept), why=why))
    return found.eps if found.able else 0.0


def _not_fixed(norm: nn.Module) -> str | None:
    """Why the norm is not a fixed affine map in evaluation; None if it is."""
    why_not = facts_of(norm).why_not_affine
    if why_not is None:
        return say("{kind} does not compute what a batch norm computes", kind=type(norm).__name__)
    return why_not(norm)


def _fold_norm_(edit: Edit, layer: nn.Module, norm: nn.Module) -> None:
    """Multiply the layer's rows by the norm's scale, and give it the bias of both."""
    scale, shift = affine_map(norm)
    layout = layout_of(layer)
    weight = layer.get_parameter("weight")
    rows = matrix_view(weight.detach().double(), layout)
    scaled = rows * scale.view(rows.shape[0], -1, 1)
    edit.set_data_(weight, unview(scaled, weight.shape, layout).to(weight.dtype))
    bias: Tensor | None = layer.bias  # type: ignore[assignment]
    if bias is not None:
        edit.set_data_(bias, (scale * bias.detach().double() + shift).to(weight.dtype))
    else:
        edit.snapshot_(layer)
        new = nn.Parameter(shift.to(weight.dtype), requires_grad=weight.requires_grad)
        layer.register_parameter("bias", new)


def affine_map(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """The norm in evaluation mode as x ↦ scale·x + shift per channel, in float64."""
    mean = norm.get_buffer("running_mean").double()
    std = (norm.get_buffer("running_var").double() + norm.eps).sqrt()  # type: ignore[operator]
    weight, bias = norm._parameters.get("weight"), norm._parameters.get("bias")
    scale = (weight.detach().double() if weight is not None else torch.ones_like(mean)) / std
    shift = (bias.detach().double() if bias is not None else torch.zeros_like(mean)) - scale * mean
    return scale, shift


def _rest_of(norm: nn.Module) -> nn.Module:
    """The layers of a norm after its normalisation: none, or its activation."""
    tail = [part for part in tail_of(norm) if not isinstance(part, nn.Identity)]
    rest = nn.Identity() if not tail else tail[0] if len(tail) == 1 else nn.Sequential(*tail)
    rest.training = norm.training
    return rest
