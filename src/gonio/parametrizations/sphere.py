"""Filters on a sphere: only their direction is trained."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.geometry.norms import safe_norm
from gonio.parametrizations.filters import by_filter, filter_size, rescaled
from gonio.parametrizations.parametrization import Parametrization

__all__ = ["Sphere"]


class Sphere(Parametrization):
    r"""Filters of one fixed norm: :math:`w_i = r \, v_i / \lVert v_i \rVert`.

    Each filter is projected to the sphere of radius r. The gradient with respect to :math:`v_i` is tangent to
    the sphere and scales with :math:`1/\lVert v_i \rVert`, so plain gradient steps only increase
    :math:`\lVert v_i \rVert` and decrease the effective learning rate; weight decay on :math:`v` limits both. A
    zero filter stays zero, with gradient 0.

    Args:
        radius: r > 0, the norm of each filter.

    Shape:
        - any weight with a :class:`gonio.geometry.Layout`.

    Invariances:
        Rescaling any filter of the trained tensor by a positive factor.

    Raises:
        InvalidArgumentError: if `radius` is not positive and finite.

    Cost:
        two passes over the weight; no state.

    Example:
        >>> layer = nn.Conv2d(4, 8, 3, groups=2)
        >>> _ = gonio.parametrizations.attach(layer, "weight", gonio.parametrizations.Sphere(radius=2.0))
        >>> torch.allclose(layer.weight.flatten(1).norm(dim=1), torch.full((8,), 2.0))
        True

    See also:
        :class:`WeightNorm`, which trains the norms too; :class:`Orthogonal`, the same projection for
        whole matrices, of which this is the case of one row.

    References:
        W. Liu et al., "Deep hyperspherical learning", NeurIPS 2017, section 3.
        https://arxiv.org/abs/1711.03189. Differs: the projection is part of the forward pass, and its
        derivative is taken.
    """

    options: ClassVar[tuple[str, ...]] = ("radius",)

    def __init__(self, *, radius: float = 1.0) -> None:
        super().__init__()
        if not 0 < radius < float("inf"):
            raise InvalidArgumentError(
                "Sphere needs a finite radius > 0", f"{radius}", "The norm of each filter is the radius."
            )
        self.radius = float(radius)

    def weight_of(self, raw: Tensor) -> Tensor:
        filters = raw.numel() // filter_size(raw, self.bound_layout)
        return rescaled(raw, raw.new_full((filters,), self.radius), self.bound_layout)

    def holds(self, weight: Tensor) -> bool:
        """Whether every filter has norm `radius`, up to rounding."""
        filters, dims = by_filter(weight.detach(), self.bound_layout)
        # every entry is rounded once to the dtype, and the sum of squares accumulates in float32
        rounding = 8 * max(torch.finfo(weight.dtype).eps, 1e-12)
        return bool(((safe_norm(filters, dims) / self.radius - 1).abs() <= rounding).all())
