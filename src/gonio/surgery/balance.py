"""`balance_`: move scale between layers so that the squared norm is least and the function the same."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gonio.errors import InvalidArgumentError, NotApplicableError, listing
from gonio.surgery.edit import Edit, Edited
from gonio.surgery.equivalent import deviation, outputs
from gonio.surgery.least_scale import Placed, least_scales
from gonio.surgery.optimizer import check_holds
from gonio.surgery.optimizer_state import move_state_
from gonio.surgery.scale_reader import scale_variables
from gonio.surgery.scales import Layer, Variable, in_all
from gonio.surgery.tracing import trace
from gonio.surgery.wrapping import refuse_shards

__all__ = ["balance_"]

_ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-3}


def balance_(
    model: nn.Module,
    *,
    example: Any = None,
    level: Literal["neuron", "layer"] = "neuron",
    optimizer: torch.optim.Optimizer | None = None,
) -> Edited:
    r"""Rescale weights so that the function is the same and :math:`\sum \lVert W \rVert^2` is least.

    Where a network is positively homogeneous between layers, rows of one weight can be multiplied by
    :math:`s > 0` and the matching columns of the next divided by it. At the least sum of squares each
    free scale satisfies

    .. math::
        s^2 = \sqrt{\textstyle\sum \lVert \text{columns that consume} \rVert^2
              \,/\, \sum \lVert \text{rows that produce} \rVert^2},

    which coordinate descent reaches (the sum is convex in :math:`\log s`). With `level="layer"` there
    is one scale per tensor and a chain ends at :math:`\lVert W_l \rVert^2 = (\prod_i \lVert W_i
    \rVert^2)^{1/L}`; with `level="neuron"` one per channel. Biases move with their rows, so the bias
    of layer l carries the product of all factors up to l.

    Linear, convolutional and transposed layers and the affine map of batch norms are balanced across
    ReLU, LeakyReLU, PReLU, dropout, pooling, flattening and residual sums, found on the graphs that
    `torch.fx` traces in evaluation and in training mode, called with the first arguments alone. The first
    dimension must be the batch. GELU, SiLU, softplus, ELU, concatenation and other layers pin the tensors
    that they touch, as do layers that run twice, share a weight, have forward hooks or compute otherwise
    than torch's; the result's notes say which and why.

    Args:
        model: changed in place.
        example: an input on which the outputs before and after are compared; None to skip that.
        level: "neuron" or "layer".
        optimizer: what it remembers is moved along: the gradient of a weight that is multiplied by s is
            divided by s, its square by s². The next step of Adam and its relatives then is the same step;
            that of SGD is s² times smaller than the same step, with momentum as without.

    Raises:
        NotApplicableError: if the model cannot be traced or is sharded, if no scale is free to move (with the
            reasons), if the optimizer remembers something of unknown scale, or if the outputs changed by more
            than rounding; the model then is as before.
        InvalidArgumentError: for another level, or an optimizer of another model.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double()
        >>> with torch.no_grad():
        ...     _ = model[0].weight.mul_(100)
        >>> x = torch.ones(1, 4, dtype=torch.float64)
        >>> before = model(x)
        >>> edited = gonio.balance_(model, example=x)
        >>> torch.allclose(model(x), before, rtol=1e-12)
        True

    References:
        P. Stock et al., "Equi-normalization of neural networks", ICLR 2019, section 3 (two layers at a
        time). https://arxiv.org/abs/1902.10416. J. Su, WEISSI, arXiv 2008.02965, equation (4).
        Differs: residual groups share one scale, and biases carry the cumulative factor.
    """
    if level not in ("neuron", "layer"):
        raise InvalidArgumentError('balance_ takes level="neuron" or "layer"', repr(level), "Choose one.")
    check_holds(optimizer, model)
    refuse_shards(model, "balance_")
    variables = _variables(model)
    free = [variable for variable in variables if variable.free()]
    if not free:
        why = "; ".join(sorted({v.pinned for v in variables if v.pinned})) or "no layer feeds another"
        raise NotApplicableError("balance_", "", f"no scale is free to move: {why}", "Leave this model as it is.")
    before = outputs(model, example) if example is not None else None
    placed = least_scales(free, per_channel=level == "neuron")
    with Edit(model, "balance_") as edit:
        for path, module, name, factor in _factors(free, placed.scales):
            _rescale_(edit, path, module, name, factor, optimizer)
        _report(edit, variables, placed)
        if before is not None:
            _check(edit, before, outputs(model, example))
    return edit.done()


def _variables(model: nn.Module) -> list[Variable]:
    """Those of the graph in evaluation, free only where the graph in training agrees."""
    graphs = [trace(model, training=mode) for mode in (False, True)]
    failed = next((traced for traced in graphs if traced.graph is None), None)
    if failed is not None:
        raise NotApplicableError("balance_", "", f"the model cannot be traced ({failed.reason})", "Balance its parts.")
    evaluation, training = map(scale_variables, graphs)
    return in_all(evaluation, [training])


@dataclass
class _Sides:
    """The factors of one layer: of its rows (outputs) and of its columns (inputs)."""

    layer: Layer
    rows: Tensor | None = None
    columns: Tensor | None = None


def _factors(variables: list[Variable], scales: dict[Variable, Tensor]) -> Iterable[tuple[str, nn.Module, str, Tensor]]:
    """(path, module, parameter name, factor that broadcasts against the parameter)."""
    sides: dict[int, _Sides] = {}
    for variable in variables:
        for layer in variable.producers:
            sides.setdefault(id(layer), _Sides(layer)).rows = scales[variable]
        for layer, per in variable.consumers:
            sides.setdefault(id(layer), _Sides(layer)).columns = 1 / scales[variable].repeat_interleave(per)
    for side in sides.values():
        module, path = side.layer.module, side.layer.path
        yield path, module, "weight", _weight_factor(side)
        if side.rows is not None and getattr(module, "bias", None) is not None:
            yield path, module, "bias", side.rows


def _weight_factor(side: _Sides) -> Tensor:
    layer, module = side.layer, side.layer.module
    rows = side.rows if side.rows is not None else torch.ones(layer.out_channels, dtype=torch.float64)
    if layer.is_norm:
        return rows
    columns = side.columns if side.columns is not None else torch.ones(layer.in_channels, dtype=torch.float64)
    groups = layer.squares.shape[0]
    # per group: (out/g, in/g), stored as (out, in/g, …) or, transposed, as (in, out/g, …)
    blocks = rows.view(groups, -1, 1) * columns.view(groups, 1, -1)
    if getattr(module, "transposed", False):
        blocks = blocks.transpose(1, 2)
    flat = blocks.reshape(-1, blocks.shape[-1])
    weight: Tensor = module.weight  # type: ignore[assignment]
    return flat.view(*flat.shape, *[1] * (weight.dim() - 2))


def _rescale_(
    edit: Edit,
    path: str,
    module: nn.Module,
    name: str,
    factor: Tensor,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    parameter = module.get_parameter(name)
    factor = factor.to(parameter.device)
    edit.set_data_(parameter, (parameter.detach().double() * factor).to(parameter.dtype))
    if name == "weight":
        low, high = float(factor.min()), float(factor.max())
        edit.changed(path, f"× {low:.3g}" if math.isclose(low, high) else f"× {low:.3g} … {high:.3g}")
    if optimizer is not None:
        move_state_(edit, optimizer, path, parameter, factor)


def _report(edit: Edit, variables: list[Variable], placed: Placed) -> None:
    wasted = 1 - placed.after / placed.before if placed.before > 0 else 0.0
    edit.note(f"Σ‖W‖² of these layers {placed.before:.6g} → {placed.after:.6g}: {wasted:.1%} of it was wasted")
    if not placed.converged:
        edit.note("the search for the least sum has not come to rest: balance again to lower it further")
    pinned: dict[str, list[str]] = {}
    for variable in variables:
        if variable.pinned and variable.producers:
            pinned.setdefault(variable.pinned, []).append(variable.producers[0].path)
    for why, paths in pinned.items():
        edit.note(f"the output of {listing(paths)} keeps its scale: {why}")


def _check(edit: Edit, before: list[Tensor], after: list[Tensor]) -> None:
    moved = deviation(before, after)
    allowed = max(_ALLOWED.get(x.dtype, 0.1) for x in before)
    if moved.relative > allowed:
        raise NotApplicableError("balance_", "", f"the outputs changed: {moved}", "Please report this model.")
    edit.note(str(moved))
