"""Filters of given norms: their norm trained apart from the direction, or fixed; and a weight as filters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from gonio.geometry.kernels import applies_to
from gonio.geometry.kernels import rescaled as rescaled_by_kernel
from gonio.geometry.norms import least_norm, safe_norm
from gonio.geometry.views import Layout
from gonio.parametrizations.parametrization import Parametrization, positive


class WeightNorm(Parametrization):
    r"""Each filter as a norm times a direction: :math:`w_i = g_i \, v_i / \lVert v_i \rVert`.

    Attaching keeps the weight: :math:`v` is the weight itself and :math:`g_i = \lVert w_i \rVert`, a new
    Parameter ``magnitude`` with one number per output filter, for transposed and grouped layers too.
    The gradients are :math:`\nabla_{g_i} = \langle \nabla_{w_i}, \hat v_i \rangle` and
    :math:`\nabla_{v_i} = \frac{g_i}{\lVert v_i \rVert} (I - \hat v_i \hat v_i^\top) \nabla_{w_i}`.
    A zero filter has no direction and stays zero, with gradient 0; initialise it before.

    Invariances: Rescaling any filter of the trained tensor by a positive factor.

    Cost: one pass over the weight forward and one backward; one Parameter per filter.

    Example:
        >>> layer = nn.ConvTranspose2d(4, 6, 3, groups=2)
        >>> before = layer.weight.detach().clone()
        >>> norm = gonio.parametrizations.attach(layer, "weight", gonio.parametrizations.WeightNorm())
        >>> norm.magnitude.shape, torch.allclose(layer.weight, before)
        (torch.Size([6]), True)

    References: T. Salimans and D. P. Kingma, "Weight normalization", NeurIPS 2016, equations (2) and (3).
        https://arxiv.org/abs/1602.07868
        Differs: torch's ``weight_norm`` is NaN at a zero filter, by default has one gain per *input* channel of a
        transposed convolution, and its second derivative is wrong (2.13, CPU).
    """

    def __init__(self) -> None:
        super().__init__()
        self.magnitude: nn.Parameter | None
        self.register_parameter("magnitude", None)

    def bind(self, weight: Tensor, layout: Layout) -> None:
        filters, dims = by_filter(weight, layout)
        self.magnitude = nn.Parameter(safe_norm(filters, dims).flatten().to(weight.dtype))
        super().bind(weight, layout)

    def weight_of(self, raw: Tensor) -> Tensor:
        magnitude = self._parameters["magnitude"]  # the registry itself: `self.magnitude` is a slow search
        if magnitude is None:
            return raw  # unbound: the identity
        norms = magnitude if magnitude.dtype is raw.dtype else magnitude.to(raw.dtype)
        return rescaled(raw, norms, self.bound_layout)

    def holds(self, weight: Tensor) -> bool:
        """Every finite weight is of this form."""
        return bool(weight.isfinite().all())

    def adopt(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """Take over torch's g and v, if it has one gain per output filter."""
        if self.magnitude is None or "g" not in tensors:
            return None
        g, v = tensors["g"], tensors["v"]
        layout = self.bound_layout
        if layout.transposed and layout.matrices > 1:
            return None
        filters = 1 if layout.transposed else 0
        if g.shape != torch.Size(n if d == filters else 1 for d, n in enumerate(v.shape)):
            return None
        self.magnitude.data = g.detach().flatten().clone()
        return v


class Sphere(Parametrization):
    r"""Filters of one fixed norm: :math:`w_i = r \, v_i / \lVert v_i \rVert`.

    The gradient with respect to :math:`v_i` is tangent to the sphere and scales with :math:`1/\lVert v_i \rVert`, so
    plain gradient steps only increase :math:`\lVert v_i \rVert` and decrease the effective learning rate; weight decay
    on :math:`v` limits both. A zero filter stays zero, with gradient 0.

    Invariances: Rescaling any filter of the trained tensor by a positive factor.

    Raises: InvalidArgumentError if the radius r is not positive and finite.

    Cost: two passes over the weight; no state.

    Example:
        >>> layer = nn.Conv2d(4, 8, 3, groups=2)
        >>> _ = gonio.parametrizations.attach(layer, "weight", gonio.parametrizations.Sphere(radius=2.0))
        >>> torch.allclose(layer.weight.flatten(1).norm(dim=1), torch.full((8,), 2.0))
        True

    See also: :class:`WeightNorm`, which trains the norms too; :class:`Orthogonal`, which reduces to this for one row.

    References: W. Liu et al., "Deep hyperspherical learning", NeurIPS 2017, section 3.
        https://arxiv.org/abs/1711.03189. Differs: the projection is part of the forward pass, with its derivative.
    """

    options: ClassVar[tuple[str, ...]] = ("radius",)

    def __init__(self, *, radius: float = 1.0) -> None:
        super().__init__()
        self.radius = positive("Sphere", "radius", radius, "The norm of each filter is the radius.")

    def weight_of(self, raw: Tensor) -> Tensor:
        filters = raw.numel() // filter_size(raw, self.bound_layout)
        return rescaled(raw, raw.new_full((filters,), self.radius), self.bound_layout)

    def holds(self, weight: Tensor) -> bool:
        """Whether every filter has norm `radius`, up to rounding."""
        filters, dims = by_filter(weight.detach(), self.bound_layout)
        # every entry is rounded once to the dtype, and the sum of squares accumulates in float32
        rounding = 8 * max(torch.finfo(weight.dtype).eps, 1e-12)
        return bool(((safe_norm(filters, dims) / self.radius - 1).abs() <= rounding).all())


# --- a weight as filters, without copies -----------------------------------------------------------


def by_filter(weight: Tensor, layout: Layout) -> tuple[Tensor, tuple[int, ...]]:
    """A view of `weight`, and its dimensions that belong to one filter; the other dimensions number the filters.

    Reductions over these dimensions with ``keepdim=True`` have one number per filter, broadcast against
    the view, and in row-major order count filters as :func:`gonio.geometry.matrix_view` does. The view is the weight
    itself, or (groups, in, out, *kernel) if the layout is transposed; it keeps the memory format.
    """
    if not layout.transposed:
        return weight, tuple(range(1, weight.dim()))
    split = weight.unflatten(0, (layout.matrices, -1))
    return split, (1, *range(3, split.dim()))


def filter_size(weight: Tensor, layout: Layout) -> int:
    """The number of entries of one filter, which is the fan-in of the layer."""
    filters = layout.matrices * weight.shape[1] if layout.transposed else weight.shape[0]
    return weight.numel() // filters


def rescaled(raw: Tensor, norms: Tensor, layout: Layout) -> Tensor:
    r"""Filters of given norms, :math:`w_i = g_i v_i / \lVert v_i \rVert`; a zero filter stays zero, with gradient 0.

    A filter counts as zero as in Note [Zero vectors] of :mod:`gonio.geometry.norms`. There is one norm per filter,
    in the order of the matrix view.
    """
    if not layout.transposed and applies_to(raw, norms):
        found = rescaled_by_kernel(raw, norms)
        if found is not None:
            return found
    filters, dims = by_filter(raw, layout)
    square = (filters * filters).sum(dims, keepdim=True)
    norm = infinite_where(square < least_norm(raw.dtype) ** 2, square).sqrt()
    # Compiled code divides once per entry in either order; a scale g/|v| per filter takes 1 % of a step longer.
    return (norms.view_as(square) * (filters / norm)).view_as(raw)


def infinite_where(zero: Tensor, squares: Tensor) -> Tensor:
    """`squares`, but infinite where filters count as zero: their inverse roots are 0, and so is every derivative."""
    # Added and not filled in: compiled code stores no mask for the gradient.
    return squares + torch.zeros_like(squares).masked_fill(zero, torch.inf)
