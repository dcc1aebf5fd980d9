"""`even_out_`: replace what cannot be right by what its siblings have."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor, nn

from gonio.editing.edit import Edit, Edited
from gonio.editing.memory import memory_key
from gonio.editing.where import Site, Where, left_out, refuse_shards, select, sites, why_not
from gonio.errors import listing
from gonio.geometry import layout_of, matrix_view, unview
from gonio.geometry.views import why_not_dense
from gonio.messages import counted, joined, say
from gonio.surgery.facts import TABLES, facts_of
from gonio.surgery.recycle import can_act as has_filters

FACTOR = 10.0  # from the median of the siblings
WEAK = 1e-3  # of the median norm
OFFSET = 1.0  # standard deviations of a layer's weights


def even_out_(model: nn.Module, *, where: Where = None) -> Edited:
    r"""Give weights that cannot be right the values that are usual among their siblings. It is a guess.

    In a linear or convolutional layer, in this order:

    1. entries that are NaN or infinite become 0, those of a bias the median of the other entries;
    2. the mean of all weights is subtracted if it is larger than their standard deviation;
    3. a filter whose norm is above 10 times the median of its layer, or below 1/1000 of it and not 0, gets the median;
    4. if the median norm of its filters is beyond a factor of 10 from that of the model's other layers, W is scaled.

    In an embedding the same is done to its rows, without the last step. In a layer with a norm's gain and shift, of
    vectors: entries that are NaN or infinite get the median; gains whose median is 0, or beyond a factor of 10 from
    that of the model's other norms (1 if there are none), are set or scaled to it; the median of the shifts is
    subtracted if it is above 10 times the median gain; then a single gain or shift beyond a factor of 10 of the median
    gain gets the median.

    What a value was is not known, so that the function changes: check it on data. Values that the rules do not name
    stay as they are.

    Args:
        where: which layers; None for all linear and convolutional ones, embeddings and norms.

    Raises:
        NoMatchError: if `where` selects none of them.
        NotApplicableError: if the model is sharded.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> with torch.no_grad():
        ...     _ = model[0].weight[1].mul_(100), model[2].weight[0, 0].fill_(torch.nan)
        >>> print(gonio.even_out_(model))
        even_out_: 2 modules
          0  filter 1 gets the median norm
          2  1 entry that is not finite set to 0
    """
    refuse_shards(model, "even_out_")
    found = select(model, where, verb="even_out_", can_act=can_act)
    everything = [site for site in sites(model) if why_not(site, can_act) is None]
    with Edit(model, "even_out_", once=True) as edit, torch.no_grad():
        done: set[Hashable] = set()
        for site in found:
            key = memory_key(site.module.get_parameter("weight"))
            if key in done:
                continue
            done.add(key)
            others = [other.module for other in everything if other.module is not site.module]
            said = (_even_norm if _is_norm(site.module) else _even_layer)(edit, site, others)
            if said:
                edit.changed(site.path, joined(said, "; "))
        edit.note_stays(left_out(model, where, can_act=can_act))
    return edit.done()


def can_act(module: nn.Module) -> str | None:
    """Why :func:`even_out_` cannot act on a layer; None if it can.

    Example:
        >>> from gonio.surgery.even_out import can_act
        >>> can_act(nn.Linear(4, 4)), can_act(nn.LayerNorm(4)), can_act(nn.ReLU())
        (None, None, 'it is not a linear or convolutional layer, an embedding, or a norm with a gain')
    """
    weight = module._parameters.get("weight")
    if _is_norm(module) or has_filters(module) is None:
        return None
    if weight is not None and weight.is_meta:
        return say("its weight is on the meta device")
    if isinstance(module, TABLES) and weight is not None and why_not_dense(weight) is None:
        return None
    return say("it is not a linear or convolutional layer, an embedding, or a norm with a gain")


def _is_norm(module: nn.Module) -> bool:
    gain = module._parameters.get("weight")
    return bool(facts_of(module).removes_scale) and gain is not None and gain.dim() == 1 and not gain.is_meta


def _median(values: Tensor) -> float:
    known = values[torch.isfinite(values)]
    return float(known.median()) if len(known) else 0.0


def _far(value: float, usual: float) -> bool:
    return usual > 0 and not usual / FACTOR <= value <= usual * FACTOR


def _gain(module: nn.Module) -> float:
    """The median norm of the filters of a layer, the median gain of a norm."""
    weight = module.get_parameter("weight").detach().double()
    if _is_norm(module):
        return _median(weight.abs())
    rows = matrix_view(weight, layout_of(module)).flatten(0, 1)
    return _median(rows.norm(dim=1))


def _usual(others: list[nn.Module], *, norms: bool) -> float | None:
    """The median gain of the other layers of a kind that are not 0; None if there are none."""
    gains = [_gain(module) for module in others if _is_norm(module) == norms and not isinstance(module, TABLES)]
    known = torch.tensor([gain for gain in gains if 0 < gain < float("inf")], dtype=torch.float64, device="cpu")
    return float(known.median()) if len(known) else None


def _even_layer(edit: Edit, site: Site, others: list[nn.Module]) -> list[str]:
    """Change a layer with filters; what was done."""
    weight, bias, layout = (
        site.module.get_parameter("weight"),
        site.module._parameters.get("bias"),
        layout_of(site.module),
    )
    values = weight.detach().double()
    said: list[str] = []
    if lost := int((~torch.isfinite(values)).sum()):
        values = torch.where(torch.isfinite(values), values, 0.0)
        one = say("1 entry that is not finite set to 0")
        said.append(one if lost == 1 else say("{n} entries that are not finite set to 0", n=lost))
    if values.numel() > 1 and abs(float(values.mean())) > OFFSET * float(values.std()) > 0:
        said.append(say("{mean:.3g} subtracted from every weight", mean=float(values.mean())))
        values = values - values.mean()
    rows = matrix_view(values, layout)
    norms = rows.norm(dim=2)
    usual = _median(norms[norms > 0])
    outside = (norms > FACTOR * usual) | ((norms < WEAK * usual) & (norms > 0))
    if numbers := outside.flatten().nonzero().flatten().tolist():
        rows = torch.where(outside[..., None], rows * (usual / norms.clamp_min(1e-300))[..., None], rows)
        listed = listing([*map(str, numbers)], limit=8)
        one = say("filter {listed} gets the median norm", listed=listed)
        said.append(one if len(numbers) == 1 else say("filters {listed} get the median norm", listed=listed))
    of_others = None if isinstance(site.module, TABLES) else _usual(others, norms=False)
    if of_others is not None and usual > 0 and _far(usual, of_others):
        rows = rows * (of_others / usual)
        said.append(say("all weights times {factor:.3g}", factor=of_others / usual))
    if said:
        edit.set_data_(weight, unview(rows, weight.shape, layout).to(weight))
    if bias is not None and not bool(torch.isfinite(bias).all()):
        edit.set_data_(bias, torch.where(torch.isfinite(bias), bias, _median(bias.detach())))
        said.append(say("entries of the bias that are not finite set to the median"))
    return said


def _even_norm(edit: Edit, site: Site, others: list[nn.Module]) -> list[str]:
    """Change a norm's gain and shift; what was done."""
    gain, shift = site.module.get_parameter("weight"), site.module._parameters.get("bias")
    said: list[str] = []
    usual = _usual(others, norms=True) or 1.0
    values = gain.detach().double()
    middle = _median(values.abs())
    if middle == 0:
        values, middle = torch.full_like(values, usual), usual
        said.append(say("gains set to {usual:.3g}", usual=usual))
    elif _far(middle, usual):
        values, middle, factor = values * (usual / middle), usual, usual / middle
        said.append(say("gains times {factor:.3g}", factor=factor))
    said += _single(edit, gain, values, FACTOR * middle, "gain")
    if shift is not None:
        values, common = shift.detach().double(), _median(shift.detach().double())
        if abs(common) > FACTOR * middle:
            values = values - common
            said.append(say("{common:.3g} subtracted from the shifts", common=common))
        said += _single(edit, shift, values, FACTOR * middle, "shift")
    return said


def _single(edit: Edit, parameter: Tensor, values: Tensor, most: float, name: str) -> list[str]:
    """Store the values of a vector, with the median for entries that are larger or not finite; what was done."""
    alone = ~(torch.isfinite(values) & (values.abs() <= most))
    new = torch.where(alone, _median(values[~alone]), values)
    if not torch.equal(new.to(parameter), parameter):
        edit.set_data_(parameter, new.to(parameter))
    count = int(alone.sum())
    said = counted(count, "gain") if name == "gain" else counted(count, "shift")
    return [say("{parts} set to the median", parts=said)] if count else []
