"""Weight normalisation: the norm and the direction of each filter are trained apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gonio.geometry.norms import normalize, safe_norm
from gonio.geometry.views import Layout
from gonio.parametrizations.eager import is_eager
from gonio.parametrizations.filters import by_filter
from gonio.parametrizations.parametrization import Parametrization

__all__ = ["WeightNorm"]


class WeightNorm(Parametrization):
    r"""Each filter as a norm times a direction: :math:`w_i = g_i \, v_i / \lVert v_i \rVert`.

    Attaching keeps the weight: :math:`v` is the weight itself and :math:`g_i = \lVert w_i \rVert`, a new
    Parameter ``magnitude`` with one number per output filter, for transposed and grouped layers too.
    The gradients are :math:`\nabla_{g_i} = \langle \nabla_{w_i}, \hat v_i \rangle` and
    :math:`\nabla_{v_i} = \frac{g_i}{\lVert v_i \rVert} (I - \hat v_i \hat v_i^\top) \nabla_{w_i}`.
    A zero filter stays zero with gradient 0, as it has no direction: initialise it before.

    Invariances:
        Rescaling any filter of the trained tensor by a positive factor.

    Cost:
        one pass over the weight forward and one backward; one Parameter per filter.

    Folding:
        exact: ``detach(layer, "weight", keep="weight")``.

    Example:
        >>> layer = nn.ConvTranspose2d(4, 6, 3, groups=2)
        >>> before = layer.weight.detach().clone()
        >>> norm = gonio.parametrizations.attach(layer, "weight", gonio.parametrizations.WeightNorm())
        >>> norm.magnitude.shape, torch.allclose(layer.weight, before)
        (torch.Size([6]), True)

    References:
        T. Salimans and D. P. Kingma, "Weight normalization", NeurIPS 2016, equations (2) and (3).
        https://arxiv.org/abs/1602.07868
        Differs: torch's ``weight_norm`` is NaN at a zero filter, and by default has one gain per *input*
        channel of a transposed convolution.
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
        if self.magnitude is None:
            return raw  # a template keeps every weight
        magnitude = self.magnitude.to(raw.dtype)
        if _has_kernel(raw, magnitude, self.bound_layout):
            weight: Tensor = _WeightNorm.apply(raw, magnitude)[0]
            return weight
        return _rescaled(raw, magnitude, self.bound_layout)

    def holds(self, weight: Tensor) -> bool:
        """Every finite weight is of this form."""
        return bool(weight.isfinite().all())

    def adopt(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """Take over torch's g and v, if it has one gain per output filter."""
        if self.magnitude is None or "g" not in tensors:
            return None
        g, v = tensors["g"], tensors["v"]
        if g.shape != self._gain_shape(v):
            return None
        self.magnitude.data = g.detach().flatten().clone()
        return v

    def _gain_shape(self, raw: Tensor) -> torch.Size | None:
        """The shape of a gain per output filter that broadcasts against the stored weight."""
        if self.bound_layout.transposed and self.bound_layout.matrices > 1:
            return None
        filters = 1 if self.bound_layout.transposed else 0
        return torch.Size(n if d == filters else 1 for d, n in enumerate(raw.shape))


def _rescaled(raw: Tensor, magnitude: Tensor, layout: Layout) -> Tensor:
    """The formula in plain operations: for compiled graphs, transforms, other devices and layouts."""
    filters, dims = by_filter(raw, layout)
    each = [1 if d in dims else n for d, n in enumerate(filters.shape)]
    return (normalize(filters, dims) * magnitude.view(each)).view_as(raw)


def _has_kernel(raw: Tensor, magnitude: Tensor, layout: Layout) -> bool:
    """Whether torch's fused CPU kernels apply, which have filters on dim 0.

    They read the weight once forward and write it once; plain operations need twice the time.
    """
    on_cpu = raw.device.type == "cpu" and magnitude.device.type == "cpu"
    return on_cpu and not layout.transposed and raw.is_contiguous() and is_eager(raw, magnitude)


class _WeightNorm(torch.autograd.Function):
    """torch's kernels, made safe at zero filters and twice differentiable."""

    @staticmethod
    def forward(raw: Tensor, magnitude: Tensor) -> tuple[Tensor, Tensor]:
        weight, norms = torch._weight_norm_interface(raw, _each(magnitude, raw), 0)
        zero = norms < _smallest_norm(norms)
        if bool(zero.any()):  # costs nothing on CPU, and a pass over the weight is saved
            weight.masked_fill_(zero, 0)
        return weight, norms

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        raw, magnitude, norms = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _gradients(raw, magnitude, grad)
        zero = norms < _smallest_norm(norms)
        some = bool(zero.any())
        norms = norms.masked_fill(zero, 1) if some else norms
        kernel = torch.ops.aten._weight_norm_interface_backward
        of_raw, of_magnitude = kernel(grad.contiguous(), raw, _each(magnitude, raw), norms, 0)
        return of_raw.masked_fill_(zero, 0) if some else of_raw, of_magnitude.flatten()


def _gradients(raw: Tensor, magnitude: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The backward pass in operations that can be differentiated again."""
    dims = tuple(range(1, raw.dim()))
    norm = safe_norm(raw, dims, keepdim=True)
    inverse = norm.masked_fill(norm == 0, torch.inf).reciprocal()
    direction = raw * inverse
    along = (grad * direction).sum(dims, keepdim=True)
    return _each(magnitude, raw) * inverse * (grad - direction * along), along.flatten()


def _each(magnitude: Tensor, raw: Tensor) -> Tensor:
    return magnitude.view(-1, *[1] * (raw.dim() - 1))


def _smallest_norm(norms: Tensor) -> float:
    """As in Note [Zero vectors] of gonio.geometry.norms."""
    return float(torch.finfo(norms.dtype).tiny ** 0.5)
