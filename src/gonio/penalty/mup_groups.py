"""Parameter groups with the learning rates of μP, from the parameters of one model at two widths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, get_args

from torch import nn

from gonio.editing.where import sites, unwrapped
from gonio.errors import InvalidArgumentError, listing
from gonio.init.mup import Growth, Rule, entry_growth, growth
from gonio.penalty.decay import Groups, check_decay, decay_reasons
from gonio.penalty.penalty import Penalty
from gonio.penalty.weights import WeightRef, weights_of
from gonio.surgery.facts import TABLES


@dataclass(frozen=True)
class MupGroups(Groups):
    """Parameter groups with the learning rates of μP; printing them says the factor of each parameter and why.

    Attributes:
        groups: each with `params`, `lr`, `weight_decay`, and the `factor`, `kind` and `reason` of its rate.
        lr: at the width of the base. `rule`: of the optimizer.
        factors: by name, of the learning rate. `reasons`: by name, why.

    Example:
        >>> narrow, wide = (nn.Sequential(nn.Linear(8, n), nn.ReLU(), nn.Linear(n, 3)) for n in (16, 64))
        >>> groups = gonio.param_groups(wide, mup=True, base=narrow, lr=0.1)
        >>> groups.factors["2.weight"], groups.reasons["2.weight"]
        (0.25, 'output: 4 times as many inputs are summed, and Adam changes all alike')
    """

    lr: float
    rule: Rule
    factors: Mapping[str, float]
    reasons: Mapping[str, str]

    def __str__(self) -> str:
        width = max(map(len, self.factors), default=0)
        lines = [f"  {name:<{width}}  × {self.factors[name]:<8.4g} {why}" for name, why in self.reasons.items()]
        return "\n".join([f"lr {self.lr:g} at the width of the base, rule {self.rule}", *lines])


def mup_groups(
    model: nn.Module,
    base: nn.Module,
    lr: float,
    *,
    rule: Rule = "adam",
    weight_decay: float | None = None,
    penalty: Penalty | None = None,
) -> MupGroups:
    r"""Groups with the learning rates of μP.

    A rate that was tuned for `base`, the same model with a smaller width, then fits this one, whose weights
    :func:`gonio.init.mup_` initialised. With the growth :math:`r_\text{in}`, :math:`r_\text{out}` of the numbers of
    inputs and outputs between the two:

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
        base: the model at the width at which `lr` was tuned; it may be on the meta device.
        lr: the learning rate there.
        rule: `adam` for optimizers whose steps have a size of their own, or `sgd`.
        weight_decay: of what decays; None for 0.
        penalty: weights under its terms on scale do not decay as well.

    Raises:
        InvalidArgumentError: as :func:`decay_groups`; if model and base have other parameters, or one whose growth
            cannot be told; for an unknown rule or a rate that is not positive.

    Example:
        >>> from gonio.penalty import mup_groups
        >>> narrow, wide = (nn.Sequential(nn.Linear(8, n), nn.ReLU(), nn.Linear(n, 3)) for n in (16, 64))
        >>> print(mup_groups(wide, narrow, 0.1, rule="sgd"))
        lr 0.1 at the width of the base, rule sgd
          0.weight  × 4        input: the gradient of each of 4 times as many outputs is smaller by that
          0.bias    × 4        input: the gradient of each of 4 times as many outputs is smaller by that
          2.weight  × 0.25     output: 4 times as many inputs are summed, and their gradients do not shrink
          2.bias    × 1        input: the same size at both widths

    References: G. Yang et al., "Tensor programs V: tuning large neural networks via zero-shot hyperparameter transfer",
        2022, arXiv 2203.03466, table 3 (and table 8 for tied heads).
    """
    check_decay(weight_decay)
    model, base = unwrapped(model), unwrapped(base)
    spared = decay_reasons(model, penalty)
    if rule not in get_args(Rule):
        do = "Use 'adam' for AdamW, Adagrad, RMSprop and Lion as well."
        raise InvalidArgumentError("param_groups(rule=) is 'adam' or 'sgd'", repr(rule), do)
    if not (isfinite(lr) and lr > 0):
        raise InvalidArgumentError("param_groups(mup=True) needs lr > 0", f"{lr}", "Pass that of the base.")
    own, others = (dict(one.named_parameters()) for one in (model, base))
    if apart := sorted(own.keys() ^ others.keys()):
        found = f"parameters of only one: {listing(apart, limit=4)}"
        do = "Build both with the same factory, with the same weights tied."
        raise InvalidArgumentError("param_groups(mup=True) compares the same model at two widths", found, do)
    (tables, refs), (_, was) = _weights(model), _weights(base)
    factors, reasons = dict[str, float](), dict[str, str]()
    groups: dict[tuple[Growth, bool], dict[str, Any]] = {}
    for name, why in spared.items():
        ref, table = refs.get(id(own[name])), id(own[name]) in tables
        grown = _growth(name, own[name], others[name], None if table else ref, was.get(id(others[name])))
        factors[name], reason = grown.rate(rule), f"{grown.kind}: {_reason(grown, rule)}"
        if ref is not None and table and grown.fan_out != 1:
            reason += f"; tied: the outputs of {ref.path} need × {1 / grown.fan_out:.4g}"
        reasons[name] = reason
        decay = (weight_decay or 0.0) if why is None else 0.0
        groups.setdefault((grown, why is None), _group(grown, rule, lr, decay))["params"].append(own[name])
    return MupGroups(tuple(groups.values()), lr, rule, factors, reasons)


def _group(grown: Growth, rule: Rule, lr: float, decay: float) -> dict[str, Any]:
    factor = grown.rate(rule)
    rates = {"lr": lr * factor, "weight_decay": decay / factor, "factor": factor}
    return {"params": [], **rates, "kind": grown.kind, "reason": _reason(grown, rule)}


def _weights(model: nn.Module) -> tuple[set[int], dict[int, WeightRef]]:
    """The parameters of tables, and those that other layers use as their weights, by identity."""
    tables: set[int] = set()
    refs: dict[int, WeightRef] = {}
    for ref in (ref for site in sites(model) for ref in weights_of(site)):
        own = ref.module._parameters.get(ref.name)
        if isinstance(ref.module, TABLES):
            tables.update(map(id, ref.parameters()))
        elif own is not None:
            refs.setdefault(id(own), ref)
    return tables, refs


def _growth(
    name: str, parameter: nn.Parameter, base: nn.Parameter, ref: WeightRef | None, was: WeightRef | None
) -> Growth:
    try:
        if ref is None or was is None:
            return entry_growth(parameter.shape, base.shape)
        return growth(parameter.shape, base.shape, ref.layout, was.layout)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            f"param_groups(mup=True) cannot tell how {name} grows with the width",
            f"shapes {tuple(parameter.shape)} and {tuple(base.shape)}"
            + ("" if ref is not None else " of a parameter that is no weight of a known layer"),
            "Build both models with the same factory, before weights are parametrized; freeze others, and give them a "
            "group of their own.",
        ) from error


def _reason(grown: Growth, rule: Rule) -> str:
    """Why a parameter of this growth has its factor."""
    inputs, outputs = grown.fan_in, grown.fan_out
    if inputs == outputs == 1:
        return "the same size at both widths"
    summed = f"{inputs:.4g} times as many inputs are summed"
    if rule == "adam":
        return f"{summed}, and Adam changes all alike" if inputs != 1 else "nothing is summed over the width"
    if grown.kind == "input":
        return f"the gradient of each of {outputs:.4g} times as many outputs is smaller by that"
    if grown.kind == "output":
        return f"{summed}, and their gradients do not shrink"
    return f"{summed}, and the gradient of each of {outputs:.4g} times as many outputs is smaller by that"
