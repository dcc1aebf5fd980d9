"""`balance_`: move scale between layers to the least squared norm, with the function unchanged."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gonio.editing.edit import Edit, Edited
from gonio.editing.optimizer_states import move_state_
from gonio.editing.steps import check_optimizer
from gonio.editing.where import refuse_meta, refuse_shards
from gonio.errors import InvalidArgumentError, NotApplicableError, listing
from gonio.messages import fixed, joined, say
from gonio.surgery.equivalent import SAME_FUNCTION, SAME_OUTPUTS, SameFunction, or_coarser
from gonio.surgery.graph import trace
from gonio.surgery.movable import ChannelMap, LeastSum, Movable, least_scales, movable
from gonio.surgery.symmetries import LeastFactors, least_factors


def balance_(
    model: nn.Module,
    *,
    example: Any = None,
    level: Literal["neuron", "layer"] = "neuron",
    optimizer: torch.optim.Optimizer | None = None,
) -> Edited:
    r"""Rescale weights so that the function is the same and :math:`\sum \lVert W \rVert^2` is least.

    Where a network is positively homogeneous between layers, rows of one weight can be multiplied by :math:`s > 0` and
    the matching columns of the next divided by it. At the least sum of squares each free scale satisfies

    .. math::
        s^2 = \sqrt{\textstyle\sum \lVert \text{columns that consume} \rVert^2
              \,/\, \sum \lVert \text{rows that produce} \rVert^2},

    which coordinate descent reaches (the sum is convex in :math:`\log s`). With `level="layer"` there is one scale per
    tensor and a chain ends at :math:`\lVert W_l \rVert^2 = (\prod_i \lVert W_i \rVert^2)^{1/L}`; with `level="neuron"`
    one per channel. Biases move with their rows, so the bias of layer l carries the product of all factors up to l.

    Linear, convolutional and transposed layers and the affine map of batch norms are balanced across ReLU, LeakyReLU,
    PReLU, dropout, pooling, flattening and residual sums, found on the graphs that `torch.fx` traces in evaluation and
    in training mode, called with the first arguments alone. The first dimension must be the batch. Every other
    operation fixes the scale of the tensors that it reads, as do layers that run twice, share a weight, have forward
    hooks or do not run torch's forward; notes give the reasons.

    In transformer blocks, which :func:`anatomy` finds by running the model, scale moves along further symmetries:

    * value to output, per channel of a head of values, for all heads that read it;
    * query to key, per channel of a head of keys, for all queries that meet it; per pair of channels that rotary
      positions turn; per head where channels mix otherwise; and not across a norm of queries or keys;
    * up to down, per unit of an MLP (of each expert of a stack) with a gate, with ReLU, or with its square, for which
      :math:`s^6` is twice the quotient of the two sums above.

    With `level="layer"` it is one scale for each of these pairs of a block. Each symmetry is tried with random powers
    of two, by which floating-point numbers are multiplied without rounding: the outputs must stay, in evaluation and in
    training mode, with random values in the place of parameters of one value, such as biases of 0. Blocks are looked
    for in models that cannot be traced, have products of activations, gate a linear layer or call layers of several
    matrices. Weights that the graph balances, and shared weights, stay; notes give the reasons.

    Args:
        example: an input on which the outputs before and after are compared, with a note; None for one that is made
            from the model's first layer, if that can be done. Blocks need one of at least two tokens.
        optimizer: its state is rescaled too: gradients of a weight that is multiplied by s are divided by s, their
            squares by s². The next step of Adam then is the same step; that of SGD is s² times smaller.

    Raises:
        NotApplicableError: if the model is sharded, if no scale is free to move, if a tensor of the optimizer's state
            has an unknown unit, or if the outputs changed by more than rounding; the model is restored. Where only
            blocks change, that is 1e-12 of the largest output in float64 and 1e-5 in float32, or what rounding makes.
        InvalidArgumentError: for another level, or an optimizer of another model.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False)).double()
        >>> x = torch.ones(1, 4, dtype=torch.float64)
        >>> before = model(x)
        >>> edited = gonio.balance_(model, example=x, level="layer")
        >>> torch.allclose(model(x), before), torch.allclose(model[0].weight.norm(), model[2].weight.norm())
        (True, True)
        >>> block = nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True)
        >>> [change.path for change in gonio.balance_(block).changes]
        ['self_attn', 'self_attn.out_proj']

    References: P. Stock et al., "Equi-normalization of neural networks", ICLR 2019, section 3 (two layers at a time).
        https://arxiv.org/abs/1902.10416. Z. Liu et al., WEISSI, arXiv 2008.02965, equation (4).
    Differs: residual groups share one scale, and biases carry the cumulative factor. For values and outputs the least
    sum over all matrices in the place of the scales, 2‖W_o W_v‖_* of each head, is lower.
    """
    if level not in ("neuron", "layer"):
        raise InvalidArgumentError('balance_ takes level="neuron" or "layer"', repr(level), "Choose one.")
    check_optimizer(optimizer, model, "balance_")
    refuse_shards(model, "balance_")
    refuse_meta(model, "balance_")
    same = SameFunction(model, example)
    evaluation, training = (trace(model, training=mode, dims=same.dims) for mode in (False, True))
    found = movable(evaluation, training, lambda: same)
    free, blocks = found.free, found.blocks if level == "neuron" else found.blocks.joined()
    if not free and not blocks.symmetries:
        raise _nothing_moves(found)
    least = least_scales(free, per_channel=level == "neuron")
    of_blocks = least_factors(blocks.symmetries, blocks.parameters)
    with Edit(model, "balance_") as edit:
        for layer in least.layers:
            _rescale_(edit, layer, *least.factors(layer), optimizer)
        _rescale_blocks_(edit, of_blocks, optimizer)
        _note_result(edit, found, least, of_blocks)
        same.check_(edit, "balance", or_coarser(SAME_FUNCTION if free else SAME_OUTPUTS, blocks.eps), 0.1)
    return edit.done()


def _nothing_moves(found: Movable) -> NotApplicableError:
    if found.untraced:
        why = joined(found.blocks.reasons(), "; ") or say("it has no known attention or MLP")
        told = {"reason": fixed(found.untraced), "why": why}
        reason, do = say("the model cannot be traced ({reason}), and {why}", **told), "Balance its parts."
    else:
        pinned = [*sorted({v.pinned for v in found.variables if v.pinned}), *found.blocks.reasons()]
        why = joined([*map(fixed, pinned)], "; ") or say("no layer feeds another")
        reason, do = say("no scale is free to move: {why}", why=why), "Leave this model as it is."
    return NotApplicableError("balance_", "", reason, do, action="balance")


def _rescale_(
    edit: Edit, layer: ChannelMap, rows: Tensor, columns: Tensor, optimizer: torch.optim.Optimizer | None
) -> None:
    """Multiply weight and bias by their factors, and the optimizer's state with them."""
    factors = {"weight": _weight_factor(layer, rows, columns)}
    if layer.module._parameters.get("bias") is not None and not bool((rows == 1).all()):
        factors["bias"] = rows
    for name, factor in factors.items():
        _multiply_(edit, layer.path, layer.module.get_parameter(name), factor, optimizer)
    edit.changed(layer.path, _shown([factors["weight"]]))


def _multiply_(
    edit: Edit, path: str, parameter: nn.Parameter, factor: Tensor, optimizer: torch.optim.Optimizer | None
) -> None:
    factor = factor.to(parameter.device)
    edit.set_data_(parameter, (parameter.detach().double() * factor).to(parameter.dtype))
    if optimizer is not None:
        move_state_(edit, optimizer, path, parameter, factor)


def _shown(factors: list[Tensor]) -> str:
    low, high = min(float(f.min()) for f in factors), max(float(f.max()) for f in factors)
    return f"× {low:.3g}" if math.isclose(low, high) else f"× {low:.3g} … {high:.3g}"


def _rescale_blocks_(edit: Edit, least: LeastFactors, optimizer: torch.optim.Optimizer | None) -> None:
    """Multiply the weights and biases of blocks by their factors, and the optimizer's state with them."""
    changed: dict[str, list[Tensor]] = {}
    for name in least.factors.names:
        path, factor = name.rpartition(".")[0], least.factors.exact(name)
        _multiply_(edit, path, least.factors.parameters[name], factor, optimizer)
        changed.setdefault(path, []).append(factor)
    for path, factors in changed.items():
        edit.changed(path, _shown(factors))


def _weight_factor(layer: ChannelMap, rows: Tensor, columns: Tensor) -> Tensor:
    """The factor of every entry of a weight; broadcasts over kernel positions."""
    if layer.is_norm:
        return rows
    groups = layer.squares.shape[0]
    # per group: (out/g, in/g), stored as (out, in/g, …) or, transposed, as (in, out/g, …)
    blocks = rows.view(groups, -1, 1) * columns.view(groups, 1, -1)
    if getattr(layer.module, "transposed", False):
        blocks = blocks.transpose(1, 2)
    flat = blocks.reshape(-1, blocks.shape[-1])
    weight: Tensor = layer.module.weight  # type: ignore[assignment]
    return flat.view(*flat.shape, *[1] * (weight.dim() - 2))


def _note_result(edit: Edit, found: Movable, least: LeastSum, of_blocks: LeastFactors) -> None:
    before, after = least.before + of_blocks.before, least.after + of_blocks.after
    wasted = 1 - after / before if before > 0 else 0.0
    sums = {"before": before, "after": after, "wasted": wasted}
    edit.note(say("Σ‖W‖² of these layers {before:.6g} → {after:.6g}: {wasted:.1%} of it was wasted", **sums))
    if not (least.converged and of_blocks.converged):
        edit.note(say("the search for the least sum has not converged: balance again to lower it further"))
    pinned: dict[str, list[str]] = {}
    for variable in found.variables:
        if variable.pinned and variable.producers:
            pinned.setdefault(variable.pinned, []).append(variable.producers[0].path)
    for why, paths in pinned.items():
        edit.note(say("the output of {paths} keeps its scale: {why}", paths=listing(paths), why=fixed(why)))
    for sentence in found.blocks.reasons():
        edit.note(sentence)
    if not found.blocks.trained:
        edit.note(say("the outputs in training mode were not compared: they fail, or differ from run to run"))
