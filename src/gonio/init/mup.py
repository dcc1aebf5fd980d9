"""Maximal update parametrisation (μP): the kinds of weights by their shapes at two widths, and initialisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Literal

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.geometry.views import PLAIN, Layout, check_shape
from gonio.init.gain import Gain, resolve_gain
from gonio.init.variance import variance_scaling_

Kind = Literal["input", "hidden", "output"]
Rule = Literal["adam", "sgd"]


@dataclass(frozen=True)
class Growth:
    r"""How a parameter grows from one width to another, and what follows for its learning rate.

    With :math:`r_\text{in}`, :math:`r_\text{out}` the growth of the length and of the number of filters:

    ====== ======================== ====================== =====================================
    kind   grows                    Adam                   SGD
    ====== ======================== ====================== =====================================
    input  fan_out, or neither      1                      :math:`r_\text{out}`
    hidden both                     :math:`1/r_\text{in}`  :math:`r_\text{out}/r_\text{in}`
    output fan_in                   :math:`1/r_\text{in}`  :math:`1/r_\text{in}`
    ====== ======================== ====================== =====================================

    Biases, gains and tables are inputs: nothing is summed over their entries.

    Attributes:
        fan_in, fan_out: the ratios; 1 where nothing grows.

    Example:
        >>> from gonio.init.mup import growth
        >>> grown = growth((64, 32), (16, 8))
        >>> grown.kind, grown.rate("adam"), grown.rate("sgd")
        ('hidden', 0.25, 1.0)

    References: as :func:`mup_`; the ratio of a hidden weight that is not square is that of the authors' package `mup`.
    """

    fan_in: float = 1.0
    fan_out: float = 1.0

    @property
    def kind(self) -> Kind:
        if self.fan_in == 1:
            return "input"
        return "output" if self.fan_out == 1 else "hidden"

    def rate(self, rule: Rule) -> float:
        """The learning rate over that of the narrower model."""
        return (1.0 if rule == "adam" else self.fan_out) / self.fan_in


def growth(shape: Sequence[int], base: Sequence[int], layout: Layout = PLAIN, was: Layout | None = None) -> Growth:
    """The growth of a weight with filters over its shape in a narrower model.

    Args:
        was: the layout there; None for the same one. Depthwise convolutions have fewer groups.

    Raises: InvalidArgumentError for another number of dimensions, other kernels, or a layout that does not fit.
    """
    was = was or layout
    if len(shape) != len(base) or tuple(shape[2:]) != tuple(base[2:]):
        raise _apart(shape, base)
    if 0 in (*shape, *base):  # a weight without entries
        if tuple(shape) != tuple(base):
            raise _apart(shape, base)
        return Growth()
    check_shape(shape, layout)
    if not layout.transposed:
        return Growth(shape[1] / base[1], shape[0] / base[0])
    check_shape(base, was)
    inputs, outputs = shape[0] / layout.groups, shape[1] * layout.groups
    return Growth(inputs / (base[0] / was.groups), outputs / (base[1] * was.groups))


def entry_growth(shape: Sequence[int], base: Sequence[int]) -> Growth:
    """The growth of a parameter whose entries nothing is summed over: a bias, a gain, a table, a position.

    Raises: InvalidArgumentError for another number of dimensions, or if more than one of them grows.
    """
    ratios = [now / before for now, before in zip(shape, base, strict=False) if now != before]
    if len(shape) != len(base) or len(ratios) > 1:
        raise _apart(shape, base)
    return Growth(fan_out=ratios[0]) if ratios else Growth()


def _apart(shape: Sequence[int], base: Sequence[int]) -> InvalidArgumentError:
    return InvalidArgumentError(
        "μP compares a weight with the same weight at another width",
        f"shapes {tuple(shape)} and {tuple(base)}",
        "Pass the shape from a narrower model of the same factory.",
    )


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
    grown = growth(weight.shape, base, layout)
    if grown.kind == "output":
        factor /= sqrt(grown.fan_in)
    return variance_scaling_(weight, preserve="rms", gain=factor, layout=layout, generator=generator)
