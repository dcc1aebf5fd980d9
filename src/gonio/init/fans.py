"""How many inputs one output sums, and how many outputs one input feeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from gonio.errors import InvalidArgumentError
from gonio.geometry.views import PLAIN, Layout, check_shape

__all__ = ["Fans", "fans"]


@dataclass(frozen=True)
class Fans:
    """Average numbers of connections of one output (`fan_in`) and of one input (`fan_out`)."""

    fan_in: float
    fan_out: float


def fans(shape: Sequence[int], layout: Layout = PLAIN) -> Fans:
    r"""Connections per output and per input of the linear map that a weight defines.

    For a convolution with `g` groups, kernel volume :math:`K` and stride volume :math:`S`:

    ========== ================= ==================
    kind       fan_in            fan_out
    ========== ================= ==================
    conv       in/g · K          out/g · K / S
    transposed in/g · K / S      out/g · K
    ========== ================= ==================

    With weights of variance :math:`\sigma^2` and inputs of equal variance, the output's variance is
    :math:`\sigma^2 \cdot` fan_in times the input's, and :math:`E\lVert y \rVert^2 = \sigma^2 \cdot` fan_out
    :math:`\cdot\, E\lVert x \rVert^2` (away from zero-padded borders). Fans may be fractions.

    Args:
        shape: of the stored weight.
        layout: how it is stored and applied; stacked blocks count as separate matrices.

    Raises:
        InvalidArgumentError: for fewer than two dimensions, or a layout that does not fit the shape.

    Example:
        >>> gonio.init.fans((4, 1, 3, 3), gonio.geometry.Layout(groups=4))  # depthwise
        Fans(fan_in=9.0, fan_out=9.0)
        >>> gonio.init.fans((8, 4, 3, 3), gonio.geometry.Layout(stride=(2, 2)))
        Fans(fan_in=36.0, fan_out=18.0)

    Differs:
        ``torch.nn.init`` takes fan_out as out · K for grouped convolutions (36 instead of 9 above), swaps
        the two for transposed convolutions, and ignores the stride and stacked blocks.
    """
    check_shape(shape, layout)
    if layout.stride and len(layout.stride) != len(shape) - 2:
        raise InvalidArgumentError(
            f"fans() needs one stride per kernel dimension, of which a weight of shape {tuple(shape)} has "
            f"{len(shape) - 2}",
            f"stride={layout.stride}",
            "Take the layout from the layer with gonio.geometry.layout_of(module).",
        )
    kernel, stride = prod(shape[2:]), prod(layout.stride)
    if layout.transposed:
        return Fans(shape[0] / layout.matrices * kernel / stride, float(shape[1] * kernel))
    return Fans(float(shape[1] * kernel), shape[0] / layout.matrices * kernel / stride)
