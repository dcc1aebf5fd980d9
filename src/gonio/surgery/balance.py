"""`balance_`: move scale between layers to the least squared norm, with the function unchanged."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from gonio.editing.edit import Edit, Edited
from gonio.editing.steps import check_optimizer, move_state_
from gonio.editing.wrapping import refuse_shards
from gonio.errors import InvalidArgumentError, NotApplicableError, listing
from gonio.surgery.equivalent import SAME_OUTPUTS, SameFunction
from gonio.surgery.facts import WEIGHTED
from gonio.surgery.graph import Graph, called_function, trace
from gonio.surgery.scales import ChannelMap, ScaleVariable, scale_variables
from gonio.surgery.symmetries import BlockSymmetries, LeastFactors, block_symmetries, least_factors

_ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-3}
_ROUNDINGS = 64  # times the rounding of a coarser type in which the model computes, as norms in float32 do
_AFTER_GATES = (nn.Linear, nn.Dropout, nn.Identity)
_PRODUCTS = frozenset({"matmul", "bmm", "einsum", "scaled_dot_product_attention"})
_SWEEPS = 10_000
_CONVERGED = 1e-13  # of a log scale: rounding, so that the closed form is reached to float64 precision


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
    check_optimizer(optimizer, model)
    refuse_shards(model, "balance_")
    same = SameFunction(model, example)
    graphs = [trace(model, training=mode, dims=same.dims) for mode in (False, True)]
    untraced = next((graph.reason for graph in graphs if graph.reason), "")
    variables = [] if untraced else _variables(*graphs)
    free = [variable for variable in variables if variable.free()]
    least = least_scales(free, per_channel=level == "neuron")
    blocks = _blocks(model, same, graphs[0], least, per_unit=level == "neuron")
    if not free and not blocks.symmetries:
        raise _nothing_moves(untraced, variables, blocks)
    of_blocks = least_factors(blocks.symmetries, blocks.parameters)
    with Edit(model, "balance_") as edit:
        for layer in least.layers:
            _rescale_(edit, layer, *least.factors(layer), optimizer)
        _rescale_blocks_(edit, of_blocks, optimizer)
        _note_result(edit, variables, least, blocks, of_blocks)
        same.check_(edit, "balance", _allowed(blocks, exact=not free), 0.1)
    return edit.done()


def _allowed(blocks: BlockSymmetries, *, exact: bool) -> dict[torch.dtype, float]:
    """The relative deviations of the outputs, by their dtype."""
    allowed, coarser = SAME_OUTPUTS if exact else _ALLOWED, min(_ROUNDINGS * blocks.eps, 0.1)
    return {dtype: max(each, coarser) for dtype, each in allowed.items()}


def _blocks(model: nn.Module, same: SameFunction, graph: Graph, least: LeastSum, *, per_unit: bool) -> BlockSymmetries:
    """The symmetries of attention and MLP blocks, of a model in which there may be some."""
    if not graph.reason and not any(_may_attend(graph, node) for node in graph.nodes):
        return BlockSymmetries()
    if same.input is None:
        why = f"they are found by running it, and {same.why}; pass example="
        return BlockSymmetries(left={why: (("attention and MLP blocks", ""),)})
    taken = frozenset(id(p) for layer in least.layers for p in layer.module.parameters(recurse=False))
    return block_symmetries(model, same.input, per_unit=per_unit, traced=not graph.reason, taken=taken)


def _may_attend(graph: Graph, node: fx.Node) -> bool:
    """Whether a node is a product of matrices, a gate of a linear layer, or a layer of several matrices."""
    module, called = graph.called(node), called_function(node)
    gates = called in ("mul", "imul") and any(isinstance(graph.called(user), _AFTER_GATES) for user in node.users)
    matrices = module is not None and not isinstance(module, WEIGHTED) and any(p.ndim > 1 for p in module.parameters())
    return gates or matrices or called in _PRODUCTS


def _nothing_moves(untraced: str, variables: list[ScaleVariable], blocks: BlockSymmetries) -> NotApplicableError:
    if untraced:
        why = "; ".join(blocks.reasons()) or "it has no known attention or MLP"
        return _not_applicable(f"the model cannot be traced ({untraced}), and {why}", "Balance its parts.")
    pinned = [*sorted({v.pinned for v in variables if v.pinned}), *blocks.reasons()]
    why = "; ".join(pinned) or "no layer feeds another"
    return _not_applicable(f"no scale is free to move: {why}", "Leave this model as it is.")


def _not_applicable(why: str, do: str) -> NotApplicableError:
    return NotApplicableError("balance_", "", why, do, action="balance")


def _variables(evaluation: Graph, training: Graph) -> list[ScaleVariable]:
    """Those of the graph in evaluation; pinned unless the graph in training has the same one, and it is free."""
    free = {_ends(variable) for variable in scale_variables(training) if variable.free()}
    variables = scale_variables(evaluation)
    for variable in variables:
        if variable.free() and _ends(variable) not in free:
            variable.pin("it is used differently in training and in evaluation")
    return variables


def _ends(variable: ScaleVariable) -> tuple[frozenset[str], frozenset[str]]:
    """Paths of producers and consumers, which identify a variable in every graph of one model."""
    consumers = frozenset(layer.path for layer, _ in variable.consumers)
    return frozenset(layer.path for layer in variable.producers), consumers


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


def _note_result(
    edit: Edit, variables: list[ScaleVariable], least: LeastSum, blocks: BlockSymmetries, of_blocks: LeastFactors
) -> None:
    before, after = least.before + of_blocks.before, least.after + of_blocks.after
    wasted = 1 - after / before if before > 0 else 0.0
    edit.note(f"Σ‖W‖² of these layers {before:.6g} → {after:.6g}: {wasted:.1%} of it was wasted")
    if not (least.converged and of_blocks.converged):
        edit.note("the search for the least sum has not converged: balance again to lower it further")
    pinned: dict[str, list[str]] = {}
    for variable in variables:
        if variable.pinned and variable.producers:
            pinned.setdefault(variable.pinned, []).append(variable.producers[0].path)
    for why, paths in pinned.items():
        edit.note(f"the output of {listing(paths)} keeps its scale: {why}")
    for sentence in blocks.reasons():
        edit.note(sentence)
    if not blocks.trained:
        edit.note("the outputs in training mode were not compared: they fail, or differ from run to run")


# --- the least sum of squares -------------------------------------------------------------------------


@torch.no_grad()
def least_scales(
    variables: list[ScaleVariable], *, per_channel: bool, sweeps: int = _SWEEPS, tolerance: float = _CONVERGED
) -> LeastSum:
    r"""The least sum of squared weights over the free scales, by coordinate descent.

    The sum consists of terms :math:`s_i^2\, m_{ij} / t_j^2` and so is convex in the logarithms of the scales.
    For one scale with all others fixed it is :math:`s^2 P + Q / s^2`, least at :math:`s^4 = Q / P`, where P is the
    square of the rows that produce the channel and Q of the columns that consume it. In :math:`\log s` this is a
    hyperbolic cosine about its minimum, so steps of up to twice the distance descend. Successive over-relaxation uses
    them: the number of sweeps is proportional to the length of a chain instead of its square.

    The variables must be free. `tolerance` is the largest change of a log scale at convergence.
    """
    least = LeastSum(variables)
    largest = 0.0
    for _ in range(sweeps):
        largest = max((least.improve_(variable, per_channel=per_channel) for variable in variables), default=0.0)
        if largest < tolerance:
            break
    least.after, least.converged = least.sum_of_squares(), largest < tolerance
    return least


class LeastSum:
    """Coordinate descent: the squared factors of the rows and columns of each layer; see :func:`least_scales`.

    Attributes:
        layers: those that take part.
        before: the sum of squares of these layers.
        after: the same at the factors found.
        converged: whether no factor changes any more; those found are valid, but not the best, if it is False.
    """

    def __init__(self, variables: list[ScaleVariable]) -> None:
        self.scales = {v: torch.ones(v.channels, dtype=torch.float64) for v in variables}
        parts = [part for v in variables for part in (*v.producers, *(c for c, _ in v.consumers))]
        self.layers = list(dict.fromkeys(parts))
        self.rows = {layer: torch.ones(layer.out_channels, dtype=torch.float64) for layer in self.layers}
        self.columns = {layer: torch.ones(layer.in_channels, dtype=torch.float64) for layer in self.layers}
        self.lengthened = _over_relaxation(variables)
        self.before = self.after = self.sum_of_squares()
        self.converged = False

    def sum_of_squares(self) -> float:
        """The sum of squares of all layers at the present factors."""
        return math.fsum(float(self._made(layer).sum()) for layer in self.layers)

    def factors(self, layer: ChannelMap) -> tuple[Tensor, Tensor]:
        """The factors of a layer's rows (outputs) and columns (inputs)."""
        return self.rows[layer].sqrt(), self.columns[layer].sqrt()

    def improve_(self, variable: ScaleVariable, *, per_channel: bool) -> float:
        """Give one variable its best scales, the others held; the largest step of a log scale."""
        # a layer that both makes and reads the tensor keeps its norm under a common factor
        loops = set(variable.producers) & {layer for layer, _ in variable.consumers}
        moved = 0.0
        if loops or not per_channel:
            made = [self._made(layer).sum() for layer in variable.producers if layer not in loops]
            used = [self._used(layer, per).sum() for layer, per in variable.consumers if layer not in loops]
            if made and used:
                shape = (variable.channels,)
                total_made, total_used = torch.stack(made).sum(), torch.stack(used).sum()
                moved = self._step_(variable, total_made.expand(shape), total_used.expand(shape), power=0.25)
        if not per_channel:
            return moved
        made_each = torch.stack([self._made(layer) for layer in variable.producers]).sum(0)
        used_each = torch.stack([self._used(layer, per) for layer, per in variable.consumers]).sum(0)
        # In a loop the channels of one step depend on each other: a full step of all of them overshoots,
        # half of it descends.
        return max(moved, self._step_(variable, made_each, used_each, power=0.125 if loops else 0.25))

    def _made(self, layer: ChannelMap) -> Tensor:
        """The squares of a layer's rows."""
        columns = self.columns[layer].view(layer.squares.shape[0], -1, 1).to(layer.squares.device)
        return self.rows[layer] * torch.bmm(layer.squares, columns).flatten().cpu()

    def _used(self, layer: ChannelMap, per_channel: int) -> Tensor:
        """The squares of a layer's columns, summed over the features of each channel."""
        rows = self.rows[layer].view(layer.squares.shape[0], 1, -1).to(layer.squares.device)
        columns = self.columns[layer] * torch.bmm(rows, layer.squares).flatten().cpu()
        return columns.view(-1, per_channel).sum(1)

    def _step_(self, variable: ScaleVariable, made: Tensor, used: Tensor, *, power: float) -> float:
        # a channel that is never produced or never used has no best scale: it stays
        step = torch.where((made > 0) & (used > 0), (used / made).pow(power * self.lengthened[variable]), 1.0)
        self.scales[variable] *= step
        squares = self.scales[variable].square()
        for layer in variable.producers:
            self.rows[layer] = squares
        for layer, per_channel in variable.consumers:
            self.columns[layer] = 1 / squares.repeat_interleave(per_channel)
        return float(step.log().abs().max()) if step.numel() else 0.0


def _over_relaxation(variables: list[ScaleVariable]) -> dict[ScaleVariable, float]:
    """The factor of each variable's steps: 1 for a variable on which no other one depends."""
    group = {variable: {variable} for variable in variables}
    touching: dict[ChannelMap, ScaleVariable] = {}
    for variable in variables:
        for layer in (*variable.producers, *(layer for layer, _ in variable.consumers)):
            other = touching.setdefault(layer, variable)
            if group[other] is not group[variable]:
                joined = group[other] | group[variable]
                group.update(dict.fromkeys(joined, joined))
    return {variable: 2 / (1 + math.sin(math.pi / (len(group[variable]) + 1))) for variable in variables}
