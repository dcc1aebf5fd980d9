"""`balance_`: move scale between layers so that the squared norm is least and the function the same."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gonio.errors import InvalidArgumentError, NotApplicableError
from gonio.surgery.edit import Edit, Edited
from gonio.surgery.equivalent import deviation, outputs
from gonio.surgery.graph import trace
from gonio.surgery.scales import Layer, Variable, scale_variables

__all__ = ["balance_"]

_SWEEPS = 10_000
_CONVERGED = 1e-13  # of a log scale: rounding, so that the closed form is reached to fp64 precision
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
    ReLU, LeakyReLU, PReLU, dropout, pooling, flattening and residual sums, found on the traced graph.
    GELU, SiLU, softplus, ELU, concatenation and other layers pin the tensors that they touch; the
    result's notes say which and why.

    Args:
        model: changed in place.
        example: an input on which the outputs before and after are compared; None to skip that.
        level: "neuron" or "layer".
        optimizer: its momentum buffers and moments are moved along: the gradient of a weight that is
            multiplied by s is divided by s, its square by s².

    Raises:
        NotApplicableError: if the model cannot be traced, if no scale is free to move (with the
            reasons), or if the outputs changed by more than rounding; the model then is as before.

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
    traced = trace(model)
    if traced.graph is None:
        raise NotApplicableError("balance_", "", f"the model cannot be traced ({traced.reason})", "Balance its parts.")
    variables = scale_variables(traced)
    free = [variable for variable in variables if variable.free()]
    if not free:
        why = "; ".join(sorted({v.pinned for v in variables if v.pinned})) or "no layer feeds another"
        raise NotApplicableError("balance_", "", f"no scale is free to move: {why}", "Leave this model as it is.")
    before = outputs(model, example) if example is not None else None
    sum_before = _sum_of_squares(free)
    scales = _solve(free, per_channel=level == "neuron")
    with Edit(model, "balance_") as edit:
        for path, module, name, factor in _factors(free, scales):
            _rescale_(edit, path, module, name, factor, optimizer)
        _report(edit, variables, sum_before, _sum_of_squares(free))
        if before is not None:
            _check(edit, before, outputs(model, example))
    return edit.done()


def _solve(variables: list[Variable], *, per_channel: bool) -> dict[Variable, Tensor]:
    """Coordinate descent on the layers' squared entries, which are rescaled on the way."""
    scales = {variable: torch.ones(variable.channels, dtype=torch.float64) for variable in variables}
    for _ in range(_SWEEPS):
        largest = 0.0
        for variable in variables:
            step = _best_step(variable, per_channel=per_channel)
            _apply_to_squares_(variable, step)
            scales[variable] *= step
            largest = max(largest, float(step.log().abs().max()))
        if largest < _CONVERGED:
            break
    return scales


def _best_step(variable: Variable, *, per_channel: bool) -> Tensor:
    made = sum((layer.squares.sum(1) for layer in variable.producers), torch.zeros(variable.channels).double())
    used = sum(
        (layer.squares.sum(0).view(variable.channels, per).sum(1) for layer, per in variable.consumers),
        torch.zeros(variable.channels).double(),
    )
    if not per_channel:
        made, used = made.sum().expand_as(made), used.sum().expand_as(used)
    step = (used / made).pow(0.25)
    # a channel that is never produced or never used has no best scale: it stays
    return torch.where((made > 0) & (used > 0), step, 1.0)


def _apply_to_squares_(variable: Variable, step: Tensor) -> None:
    for layer in variable.producers:
        layer.squares = layer.squares * step.square().unsqueeze(1)
    for layer, per in variable.consumers:
        layer.squares = layer.squares / step.square().repeat_interleave(per)


def _sum_of_squares(variables: list[Variable]) -> float:
    layers = {id(layer): layer for v in variables for layer in (*v.producers, *(c for c, _ in v.consumers))}
    return math.fsum(float(layer.squares.sum()) for layer in layers.values())


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
    module = side.layer.module
    out_channels, in_channels = side.layer.squares.shape
    rows = side.rows if side.rows is not None else torch.ones(out_channels, dtype=torch.float64)
    if side.layer.is_norm:
        return rows
    columns = side.columns if side.columns is not None else torch.ones(in_channels, dtype=torch.float64)
    groups = int(getattr(module, "groups", 1))
    # per group: (out/g, in/g), stored as (out, in/g, …) or, transposed, as (in, out/g, …)
    blocks = torch.stack([r.unsqueeze(1) * c for r, c in zip(rows.chunk(groups), columns.chunk(groups), strict=True)])
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
    parameter = module._parameters[name]
    if parameter is None:
        return
    factor = factor.to(parameter.device)
    edit.set_data_(parameter, (parameter.detach().double() * factor).to(parameter.dtype))
    if name == "weight":
        low, high = float(factor.min()), float(factor.max())
        edit.changed(path, f"× {low:.3g}" if math.isclose(low, high) else f"× {low:.3g} … {high:.3g}")
    if optimizer is not None:
        _move_state_(edit, optimizer.state.get(parameter, {}), factor, parameter.shape)


# power of 1/factor by which each kind of optimizer state moves; shared names of torch.optim
_STATE_POWERS = {
    "momentum_buffer": 1,
    "exp_avg": 1,
    "exp_avg_sq": 2,
    "max_exp_avg_sq": 2,
    "square_avg": 2,
    "sum": 2,
}


def _move_state_(edit: Edit, state: dict[str, Any], factor: Tensor, shape: torch.Size) -> None:
    for name, value in state.items():
        power = _STATE_POWERS.get(name)
        if power is not None and isinstance(value, Tensor) and value.shape == shape:
            edit.set_data_(value, (value.double() / factor.pow(power)).to(value.dtype))


def _report(edit: Edit, variables: list[Variable], before: float, after: float) -> None:
    wasted = 1 - after / before if before > 0 else 0.0
    edit.note(f"Σ‖W‖² of these layers {before:.6g} → {after:.6g}: {wasted:.1%} of it was wasted")
    for variable in variables:
        if variable.pinned and variable.producers:
            edit.note(f"the output of {variable.producers[0].path} keeps its scale: {variable.pinned}")


def _check(edit: Edit, before: list[Tensor], after: list[Tensor]) -> None:
    moved = deviation(before, after)
    allowed = max(_ALLOWED.get(x.dtype, 0.1) for x in before)
    if moved.relative > allowed:
        raise NotApplicableError("balance_", "", f"the outputs changed: {moved}", "Please report this model.")
    edit.note(str(moved))
