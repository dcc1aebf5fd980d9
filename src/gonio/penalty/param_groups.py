"""Which parameters weight decay should shrink, and which not and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, overload

from torch import nn

from gonio.editing.where import sites
from gonio.editing.wrapping import unwrapped
from gonio.errors import InvalidArgumentError
from gonio.geometry.views import matrix_view
from gonio.init.mup import Rule
from gonio.penalty.matrices import Groups, MatrixGroups, matrix_groups
from gonio.penalty.mup_groups import MupGroups, mup_groups
from gonio.penalty.penalty import Penalty
from gonio.penalty.terms import TABLES, weights_of


@dataclass(frozen=True)
class ParamGroups(Groups):
    """Two parameter groups for an optimizer; printing them says what is in which and why.

    Example:
        >>> groups = gonio.param_groups(nn.Linear(4, 2), 5e-4)
        >>> groups.decayed, groups.spared
        (('weight',), {'bias': 'a bias'})
    """

    decayed: tuple[str, ...]  # the names in the first group, which decays
    spared: Mapping[str, str]  # the names of the others, and why each does not decay

    def __str__(self) -> str:
        width = max((len(name) for name in (*self.decayed, *self.spared)), default=0)
        lines = [f"  {name:<{width}}  decays" for name in self.decayed]
        lines += [f"  {name:<{width}}  does not: {why}" for name, why in self.spared.items()]
        head = (
            f"weight decay {self.groups[0]['weight_decay']:g} on {len(self.decayed)} tensors, not on {len(self.spared)}"
        )
        return "\n".join([head, *lines])


@overload
def param_groups(
    model: nn.Module,
    weight_decay: float,
    *,
    penalty: Penalty | None = None,
    matrices: Literal[False] = False,
    mup: Literal[False] = False,
) -> ParamGroups: ...
@overload
def param_groups(
    model: nn.Module,
    weight_decay: float | None = None,
    *,
    penalty: Penalty | None = None,
    matrices: Literal[True],
    heads: Mapping[str, int] | None = None,
) -> MatrixGroups: ...
@overload
def param_groups(
    model: nn.Module,
    weight_decay: float | None = None,
    *,
    penalty: Penalty | None = None,
    mup: Literal[True],
    base: nn.Module,
    lr: float,
    rule: Rule = "adam",
) -> MupGroups: ...
def param_groups(
    model: nn.Module,
    weight_decay: float | None = None,
    *,
    penalty: Penalty | None = None,
    matrices: bool = False,
    heads: Mapping[str, int] | None = None,
    mup: bool = False,
    base: nn.Module | None = None,
    lr: float | None = None,
    rule: Rule = "adam",
) -> ParamGroups | MatrixGroups | MupGroups:
    r"""The model's trainable parameters in groups for an optimizer: weights decay, and nothing else does.

    Weights are the tensors of linear layers, convolutions, attention and recurrent layers that have filters. Biases,
    the scales of normalisation layers, one scale per filter (weight normalisation's magnitudes, whatever their number
    of dimensions), look-up tables, tokens and positions do not decay: shrinking them moves what the network computes
    without making any direction simpler. A weight whose scale a penalty already draws down would be shrunk twice.

    A weight before a normalisation layer decays, as is usual: its scale does not change the function, and decay then
    holds the effective learning rate.

    With `matrices=True` the groups are for an optimizer that orthogonalises updates (:class:`gonio.optim.Muon`): first
    the weights that are matrices, and the blocks into which each is cut. Convolutions are matrices of flattened
    filters; cut are their groups, the gates of recurrent layers, experts stacked in three dimensions, and queries, keys
    and values that one layer computes, head by head, with the numbers of heads that the modules have. Not matrices are
    embeddings and what is tied to them, the output layer (by its name, or as the model's own method names it),
    depthwise filters, norms and biases.

    With `mup=True` the groups have the learning rates of μP: a rate that was tuned for `base`, the same model with a
    smaller width, then fits this one, whose weights :func:`gonio.init.mup_` initialised. With the growth
    :math:`r_\text{in}`, :math:`r_\text{out}` of the numbers of inputs and outputs between the two:

    ============= ===================== ================================
    kind          Adam, AdamW           SGD
    ============= ===================== ================================
    input, biases 1                     :math:`r_\text{out}`
    hidden        :math:`1/r_\text{in}` :math:`r_\text{out}/r_\text{in}`
    output        :math:`1/r_\text{in}` :math:`1/r_\text{in}`
    ============= ===================== ================================

    The decay of each group is divided by its factor, so that their product stays. Tables are inputs. So is a head that
    is tied to one: the model has to multiply its outputs by :math:`1/r`. Attention has to divide its products by the
    size of a head instead of its root, where that size grows.

    Args:
        model: as it will be trained; edits and parametrizations first.
        weight_decay: of the first group; needed unless `matrices`, whose groups without it have the optimizer's
            default for matrices and 0 for the others, or `mup`, whose groups without it have 0.
        penalty: weights under its terms on scale (`L2`, `ScaleShift`) do not decay as well.
        matrices: whether matrices are apart, as :class:`MatrixGroups`.
        heads: with `matrices`, rows per head of layers (by a glob over paths) whose modules do not have the number.
        mup: whether learning rates are those of μP, as :class:`MupGroups`.
        base: with `mup`, the model at the width at which `lr` was tuned; it may be on the meta device.
        lr: with `mup`, the learning rate there.
        rule: with `mup`, `adam` for optimizers whose steps have a size of their own, or `sgd`.

    Raises:
        InvalidArgumentError: if weight_decay is negative or missing, or the model has nothing to train; if `heads` do
            not divide a weight, match no layer or are given without `matrices`; if model and base have other
            parameters, or one whose growth cannot be told; for a missing base or lr, or an unknown rule.

    Example:
        >>> groups = gonio.param_groups(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), 5e-4)
        >>> print(groups)
        weight decay 0.0005 on 1 tensors, not on 3
          0.weight  decays
          0.bias    does not: a bias
          1.weight  does not: one number per unit
          1.bias    does not: a bias
        >>> optimizer = torch.optim.SGD(groups, lr=0.1)
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 4))
        >>> print(gonio.param_groups(model, matrices=True))
        1 matrices, 3 other parameters
          0.weight  matrix 8×27
          0.bias    not a matrix: a bias
          2.weight  not a matrix: the output layer
          2.bias    not a matrix: a bias
        >>> narrow, wide = (nn.Sequential(nn.Linear(8, n), nn.ReLU(), nn.Linear(n, 3)) for n in (16, 64))
        >>> print(gonio.param_groups(wide, mup=True, base=narrow, lr=0.1, rule="sgd"))
        lr 0.1 at the width of the base, rule sgd
          0.weight  × 4        input: the gradient of each of 4 times as many outputs is smaller by that
          0.bias    × 4        input: the gradient of each of 4 times as many outputs is smaller by that
          2.weight  × 0.25     output: 4 times as many inputs are summed, and their gradients do not shrink
          2.bias    × 1        input: the same size at both widths

    References: G. Yang et al., "Tensor programs V: tuning large neural networks via zero-shot hyperparameter transfer",
        2022, arXiv 2203.03466, table 3 (and table 8 for tied heads).

    See also:
        :meth:`gonio.Penalty.check`, which finds scale that an optimizer and a penalty shrink both.
    """
    _check_mup(mup, matrices, {"base": base, "lr": lr})
    if weight_decay is None and not matrices and not mup:
        do = "Pass the decay of the first group; 0 decays nothing."
        raise InvalidArgumentError("param_groups() needs weight_decay", "none", do)
    if weight_decay is not None and weight_decay < 0:
        raise InvalidArgumentError("param_groups() needs weight_decay >= 0", f"{weight_decay}", "0 decays nothing.")
    if heads and not matrices:
        raise InvalidArgumentError("param_groups(heads=) cuts matrices", "matrices=False", "Pass matrices=True.")
    reasons = _reasons(unwrapped(model) if mup else model, penalty)
    if not reasons:
        raise InvalidArgumentError(
            "param_groups() needs parameters that train", "none requires a gradient", "Thaw what should train first."
        )
    if mup and base is not None and lr is not None:
        return mup_groups(unwrapped(model), reasons, unwrapped(base), lr, rule, weight_decay or 0.0)
    if matrices:
        return matrix_groups(model, reasons, weight_decay, heads or {})
    parameters = dict(model.named_parameters())
    spared = {name: why for name, why in reasons.items() if why is not None}
    decayed = [name for name in reasons if name not in spared]
    groups = (
        {"params": [parameters[name] for name in decayed], "weight_decay": weight_decay},
        {"params": [parameters[name] for name in spared], "weight_decay": 0.0},
    )
    return ParamGroups(groups, tuple(decayed), spared)


def _check_mup(mup: bool, matrices: bool, needed: Mapping[str, object]) -> None:
    """Raise unless all arguments of μP are given, or none."""
    if mup and matrices:
        do = "Build the groups of one of them; rates of Muon follow other rules."
        raise InvalidArgumentError("param_groups() takes mup=True or matrices=True", "both", do)
    for name, value in needed.items():
        if mup and value is None:
            do = "Pass the model at the width at which lr was tuned, and lr."
            raise InvalidArgumentError(f"param_groups(mup=True) needs {name}=", "none", do)
        if not mup and value is not None:
            raise InvalidArgumentError(f"param_groups({name}=) belongs to μP", "mup=False", "Pass mup=True.")


def _reasons(model: nn.Module, penalty: Penalty | None) -> dict[str, str | None]:
    """Why each trainable parameter, by name, does not decay; None for one that does."""
    weights, tables = _weights(unwrapped(model))
    held = penalty.scaled_parameters() if penalty is not None else {}
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {name: held.get(id(p)) or _why_spared(name, p, weights, tables) for name, p in trained}


def _weights(model: nn.Module) -> tuple[set[int], set[int]]:
    """Parameters that hold more than a number per filter of some weight, and those of tables, by identity."""
    weights: set[int] = set()
    tables: set[int] = set()
    for ref in (ref for site in sites(model) for ref in weights_of(site)):
        if isinstance(ref.module, TABLES):
            tables.update(map(id, ref.parameters()))
            continue
        groups, filters, _ = matrix_view(ref.tensor().detach(), ref.layout).shape
        own = ref.module._parameters.get(ref.name)
        for parameter in ref.parameters():
            if parameter.numel() > groups * filters or (parameter is own and parameter.ndim == 2):
                weights.add(id(parameter))
    return weights, tables


def _why_spared(name: str, parameter: nn.Parameter, weights: set[int], tables: set[int]) -> str | None:
    if id(parameter) in weights:
        return None
    if "bias" in name.rsplit(".", 1)[-1]:
        return "a bias"
    if id(parameter) in tables:
        return "a table that is looked up"
    few = sum(size > 1 for size in parameter.shape) < 2
    return "one number per unit" if few else "no weight with filters"
