"""`parametrize_`: compute the weights of chosen layers from their trained parameters."""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import Tensor, nn

from gonio.editing.edit import Edit, Edited
from gonio.editing.steps import check_optimizer, note_added, update_optimizer_
from gonio.editing.where import Site, Where, at, further_matrices, left_out, refuse_shards, select, sites, unwrapped
from gonio.errors import AlreadyAppliedError, InvalidArgumentError, NotApplicableError
from gonio.geometry.views import has_filters, why_not_dense
from gonio.messages import say
from gonio.parametrizations.mechanism import attach, parametrization_of
from gonio.parametrizations.parametrization import Parametrization


def parametrize_(
    model: nn.Module,
    template: Parametrization,
    *,
    where: Where = None,
    tensor: str = "weight",
    optimizer: torch.optim.Optimizer | None = None,
) -> Edited:
    """Compute a tensor of every chosen layer from its trained parameter by a parametrization.

    Layers with several matrices take one call per tensor: `tensor="in_proj_weight"` for the packed projections of
    ``nn.MultiheadAttention``, `"weight_hh_l0"` for an LSTM. The Parameter keeps its name and its place among the
    layer's parameters, so an optimizer built before stays valid. A parametrization that adds parameters (a weight
    norm's gain) needs `optimizer=` if the optimizer exists already.

    Args:
        template: copied for each layer.
        where: which layers; None for all that have such a tensor.
        optimizer: updated with the added parameters; without it, as for :func:`gonio.swap_`.

    Raises:
        NoMatchError: if `where` selects no layer with such a tensor.
        AlreadyAppliedError: if the tensor of a selected layer is parametrized already.
        NotApplicableError: if a selected layer shares the tensor with one that is not selected; if the model is
            sharded, or replicated and gets other parameters.
        InvalidArgumentError: if the template is no object of a parametrization, or `optimizer` is not of this model.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
        >>> edited = gonio.parametrize_(model, gonio.parametrizations.Sphere())
        >>> torch.allclose(model[0].weight.norm(dim=1), torch.ones(3))
        True
    """
    given: object = template
    if not isinstance(given, Parametrization):
        what = f"the class {given.__name__}" if isinstance(given, type) else repr(given)
        do = f"Pass {given.__name__}()." if isinstance(given, type) else "Pass e.g. SpectralNorm()."
        raise InvalidArgumentError("parametrize_ takes an object of gonio.parametrizations", what, do)
    refuse_shards(model, "parametrize_")
    able = partial(can_act, tensor=tensor)
    found = select(model, where, verb="parametrize_", can_act=able)
    for site in found:
        there = parametrization_of(site.module, tensor)
        if there is not None:
            raise AlreadyAppliedError("parametrize_", site.path, f"{type(there).__name__} on {tensor!r}")
    _check_ties(model, found, tensor)
    check_optimizer(optimizer, model, "parametrize_")
    shared: dict[int, Parametrization] = {}
    with Edit(model, "parametrize_") as edit:
        for site in found:
            module, raw = site.module, site.module.get_parameter(tensor)
            parametrization = shared.setdefault(id(raw), copy.deepcopy(template))
            before, values = list(module.parameters()), [raw.detach().clone()]
            edit.refuse_unwritable(raw)
            edit.snapshot_(module)
            edit.on_undo(partial(_restore_, raw, values))
            with at(site, tensor):
                attach(module, tensor, parametrization)
            if raw.is_meta or torch.equal(values[0], raw):  # attaching left it: an undo keeps what training makes of it
                values.clear()
            edit.changed(site.path, f"{tensor} = {parametrization}")
            update_optimizer_(edit, site.path, optimizer, before, dict(module.named_parameters()))
        if len(shared) < len(found) and hasattr(type(unwrapped(model)), "tie_weights"):
            edit.note(
                say(
                    "tie_weights(), resize_token_embeddings() and init_weights() of transformers fail while a tied "
                    "weight is parametrized: call them before this edit, or undo it"
                )
            )
        if hasattr(type(unwrapped(model)), "save_pretrained"):
            edit.note(say("call gonio.fold_ before save_pretrained: from_pretrained builds a model without this edit"))
        edit.note_adapters()
        edit.note_stays(left_out(model, where, can_act=able, tensor=tensor))
        for what in further_matrices(model, can_act) if tensor == "weight" and where is None else ():
            edit.note(say("{what} stay as they are: parametrize them with tensor=", what=what))
        if optimizer is None:
            note_added(edit)
    return edit.done()


def _restore_(raw: Tensor, values: list[Tensor]) -> None:
    for value in values:
        Edit.overwrite_(raw, value)


def can_act(module: nn.Module, tensor: str = "weight") -> str | None:
    """Why :func:`parametrize_` cannot act on a layer; None if it can.

    Example:
        >>> from gonio.surgery.parametrize import can_act
        >>> can_act(nn.Linear(2, 2)), can_act(nn.ReLU())
        (None, "it has no parameter 'weight'")
    """
    raw = module._parameters.get(tensor)
    if not isinstance(raw, Tensor):
        return f"it has no parameter {tensor!r}"
    if (why := why_not_dense(raw)) is not None:
        return why
    if raw.dim() < 2:
        return f"its {tensor} is not a matrix"
    return None if has_filters(module, tensor) else f"its {tensor} is not a stack of filters"


def _check_ties(model: nn.Module, found: list[Site], tensor: str) -> None:
    """A shared tensor is parametrized in all of its layers or in none."""
    chosen = {id(site.module) for site in found}
    raw = {id(site.module._parameters[tensor]): site for site in found}
    for site in sites(model):
        for name, parameter in site.module._parameters.items():
            tied = raw.get(id(parameter))
            if tied is not None and (id(site.module) not in chosen or name != tensor):
                why = f"it shares its {tensor} with {site.path}.{name}, which is not selected"
                do = "Select both or none."
                raise NotApplicableError("parametrize_", tied.path, why, do, action="parametrize", kind=tied.kind)
