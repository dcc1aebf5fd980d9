"""Weight normalisation: the norm and the direction of each filter are separate parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gonio.geometry.norms import safe_norm
from gonio.geometry.views import Layout
from gonio.parametrizations.filters import by_filter, rescaled
from gonio.parametrizations.parametrization import Parametrization

__all__ = ["WeightNorm"]


class WeightNorm(Parametrization):
    r"""Each filter as a norm times a direction: :math:`w_i = g_i \, v_i / \lVert v_i \rVert`.

    Attaching keeps the weight: :math:`v` is the weight itself and :math:`g_i = \lVert w_i \rVert`, a new
    Parameter ``magnitude`` with one number per output filter, for transposed and grouped layers too.
    The gradients are :math:`\nabla_{g_i} = \langle \nabla_{w_i}, \hat v_i \rangle` and
    :math:`\nabla_{v_i} = \frac{g_i}{\lVert v_i \rVert} (I - \hat v_i \hat v_i^\top) \nabla_{w_i}`.
    A zero filter has no direction and stays zero, with gradient 0; initialise it before.

    Invariances:
        Rescaling any filter of the trained tensor by a positive factor.

    Cost:
        one pass over the weight forward and one backward; one Parameter per filter.

    Example:
        >>> layer = nn.ConvTranspose2d(4, 6, 3, groups=2)
        >>> before = layer.weight.detach().clone()
        >>> norm = gonio.parametrizations.attach(layer, "weight", gonio.parametrizations.WeightNorm())
        >>> norm.magnitude.shape, torch.allclose(layer.weight, before)
        (torch.Size([6]), True)

    References:
        T. Salimans and D. P. Kingma, "Weight normalization", NeurIPS 2016, equations (2) and (3).
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
            return raw  # a template keeps every weight
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
