"""Maximal update parametrisation (μP): initialisation and learning rates for hyper-parameters that fit every width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gonio.errors import InvalidArgumentError
from gonio.geometry.views import PLAIN, Layout
from gonio.init.gain import Gain, resolve_gain
from gonio.init.variance import fans, variance_scaling_

Kind = Literal["input", "hidden", "output"]
_TABLES = (nn.Embedding, nn.EmbeddingBag)


def mup_(
    weight: Tensor,
    *,
    base: Sequence[int],
    gain: Gain = 1.0,
    layout: Layout = PLAIN,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Normal entries with the variance of μP, from the shape of the same weight in a narrower model.

    ====== ========================= ==================================================
    kind   grows with the width      variance
    ====== ========================= ==================================================
    input  fan_out, or neither       :math:`g^2 / \text{fan\_in}`
    hidden fan_in and fan_out        :math:`g^2 / \text{fan\_in}`
    output fan_in alone              :math:`g^2 \,\text{fan\_in}_0 / \text{fan\_in}^2`
    ====== ========================= ==================================================

    At the width of the base this is :func:`lecun_`. The output of the last layer shrinks with the width, so that its
    change by training does not grow. Embeddings, whose rows are looked up, keep one variance at every width; leave
    them out. Attention has to scale its products by :math:`1/d`, not :math:`1/\sqrt d`, which no weight can do.

    Args:
        base: the shape of this weight in a model of another width.
        gain: as in :func:`variance_scaling_`.

    Raises: InvalidArgumentError for a base of another number of dimensions or with other kernels, and as
        :func:`variance_scaling_`.

    Example:
        >>> draw = gonio.seeding.generator(0)
        >>> head = gonio.init.mup_(torch.empty(200, 1024), base=(200, 64), generator=draw)
        >>> bool((head.std() * 1024 / 64**0.5 - 1).abs() < 0.01)
        True

    References: [1] G. Yang et al., "Tensor programs V: tuning large neural networks via zero-shot hyperparameter
        transfer", 2022, arXiv 2203.03466, table 3.
    """
    factor = resolve_gain(gain)
    if _kind(weight.shape, base, layout) == "output":
        factor *= sqrt(fans(base, layout).fan_in / fans(weight.shape, layout).fan_in)
    return variance_scaling_(weight, preserve="rms", gain=factor, layout=layout, generator=generator)


def mup_groups(
    model: nn.Module,
    base: nn.Module,
    *,
    lr: float,
    rule: Literal["adam", "sgd"] = "adam",
    layouts: Mapping[str, Layout] | None = None,
) -> list[dict[str, Any]]:
    r"""Parameter groups with the learning rates of μP, from the shapes of the same model at two widths.

    With r the growth of a weight's fan_in (or of its fan_out) over the base:

    ============ ======= =====================
    kind         Adam    SGD
    ============ ======= =====================
    input, bias  1       :math:`r_\text{out}`
    hidden       1/r     1
    output       1/r     1/r
    ============ ======= =====================

    At the width of the base all factors are 1, so a learning rate that was tuned there stays. Embeddings are inputs; a
    weight tied to one is treated as an embedding. Each group has `params`, `lr` and the `factor`.

    Args:
        base: the model at another width, with the same names.
        lr: the learning rate at the width of the base.
        rule: `adam`, for optimizers whose steps have a size of their own; `sgd`.
        layouts: of weights, by name, that are stored in another way than those of linear layers and convolutions.

    Raises: InvalidArgumentError if names or numbers of dimensions differ, or for an unknown rule.

    Example:
        >>> narrow, wide = (nn.Sequential(nn.Linear(8, n), nn.Linear(n, n), nn.Linear(n, 3)) for n in (16, 64))
        >>> [(len(group["params"]), group["lr"]) for group in gonio.init.mup_groups(wide, narrow, lr=0.1)]
        [(4, 0.1), (2, 0.025)]

    References: as :func:`mup_`.
    """
    if rule not in ("adam", "sgd"):
        raise InvalidArgumentError("mup_groups() needs the rule 'adam' or 'sgd'", repr(rule), "Choose one of them.")
    shapes = {name: tuple(parameter.shape) for name, parameter in base.named_parameters()}
    own = dict(model.named_parameters())
    if own.keys() != shapes.keys():
        apart = sorted(own.keys() ^ shapes.keys())
        raise InvalidArgumentError(
            "mup_groups() compares the same model at two widths",
            f"parameters of only one: {', '.join(apart[:4])}",
            "Build both with the same factory.",
        )
    tables = {id(module.weight) for module in model.modules() if isinstance(module, _TABLES)}
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in own.items():
        layout = (layouts or {}).get(name, PLAIN)
        factor = _factor(parameter, shapes[name], layout, rule, table=id(parameter) in tables)
        groups.setdefault(factor, []).append(parameter)
    return [{"params": group, "lr": lr * factor, "factor": factor} for factor, group in groups.items()]


def _factor(parameter: Tensor, base: Sequence[int], layout: Layout, rule: str, *, table: bool) -> float:
    if parameter.ndim < 2 or table:
        return 1.0 if rule == "adam" else parameter.shape[-1] / base[-1] if parameter.ndim else 1.0
    kind = _kind(parameter.shape, base, layout)
    now, before = fans(parameter.shape, layout), fans(base, layout)
    if kind == "input":
        return 1.0 if rule == "adam" else now.fan_out / before.fan_out
    return 1.0 if kind == "hidden" and rule == "sgd" else before.fan_in / now.fan_in


def _kind(shape: Sequence[int], base: Sequence[int], layout: Layout) -> Kind:
    """The kind of a weight by which of its sides changed."""
    if len(shape) != len(base) or tuple(shape[2:]) != tuple(base[2:]):
        raise InvalidArgumentError(
            "μP compares a weight with the same weight at another width",
            f"shapes {tuple(shape)} and {tuple(base)}",
            "Pass the shape from a narrower model of the same factory.",
        )
    now, before = fans(shape, layout), fans(base, layout)
    if now.fan_in == before.fan_in:
        return "input"
    return "hidden" if now.fan_out != before.fan_out else "output"
