"""Fast forms of a spectral norm and of weight standardisation for eager mode on CPU.

A training step of a small network (three convolutions, batch 20 of 1×8×8) takes 1.3 times the plain step instead of
1.7 with a spectral norm, and 1.1 instead of 1.4 with standardised weights. Compilers, transforms of functions, tensor
subclasses and other devices use the plain forms, `spectral_norm._divided`, `spectral_views.FilterView.step` and
`WeightStandardization._standardized`.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import Tensor

from gonio.geometry.norms import least_norm, matrix_vector
from gonio.parametrizations.spectral_views import SpectralView

Array = numpy.ndarray[Any, Any]
_norm = torch.linalg.vector_norm
_SMALL, _LARGE = 1e-18, 1e30  # squared norms of a matrix whose Gram matrix is far from overflow and from 0
_LEAST = {dtype: least_norm(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}
_EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}
_SMALLEST = {dtype: torch.finfo(dtype).tiny ** 0.5 for dtype in (torch.float32, torch.float64)}

# Note [Stale vectors]
# The norm that u and v show is uᵀWv, as in torch's spectral norm; after a power iteration it equals ‖Wv‖. Vectors
# that belong to another weight may show a number near 0 or below, by which the weight must not be divided. If u is
# more than 60° away from Wv, the norm shown is ‖Wv‖ instead, which is positive and a lower bound as well.
STALE = 0.5


def matrix_of(weight: Tensor, view: SpectralView) -> Tensor:
    """The matrix of a weight without groups, (rows, columns)."""
    return weight.flatten(1) if view.flat else view.matrices(weight)[0]


def top_vectors(matrix: Array, last: Array) -> tuple[Array, Array] | None:
    """Unit vectors u and v of the largest singular value of a matrix (rows, columns) with a small side.

    `last` is an earlier v, whose sign is kept. None for a matrix near 0, near overflow or not finite. This is
    `spectral_views.FilterView.step` for one matrix in NumPy, whose calls are faster: between the layers of a network it
    takes 90 µs for 32×288, and 350 µs in torch.
    """
    a = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    entries = matrix.reshape(-1)
    squared_norm, side = entries.dot(entries), a.shape[0]
    if not _SMALL < squared_norm < _LARGE:
        return None
    power = a.dot(a.T)
    power *= side**0.5 / squared_norm
    for _ in range(4):
        power = power.dot(power)
    power *= 1 / (power.max() * side**0.5)
    for _ in range(5):
        power = power.dot(power)
    best = power.diagonal().argmax()
    top = power[best] / power[best, best]
    v = top.dot(matrix) if a is matrix else top
    length = v.dot(v) ** 0.5
    v = v / (length if v.dot(last) >= 0 else -length)
    u = matrix.dot(v)
    return u / u.dot(u) ** 0.5, v


class DividedBySpectralNorm(torch.autograd.Function):
    r"""With :math:`c = n/\sigma`: value :math:`cW`, gradient :math:`c(G - \langle G,W\rangle\, uv^\top/\sigma)`.

    The identity if the norm is 0 or, where only norms above n are changed, at most n. For a single matrix. Numbers are
    read from the device, which costs nothing on CPU; passes over the weight do. The constants are one argument,
    because torch looks at each one in Python.
    """

    @staticmethod
    def forward(
        ctx: Any, raw: Tensor, constants: tuple[Tensor, Tensor, Tensor | None, SpectralView, float, bool]
    ) -> Tensor:
        u, v, length, view, norm, only_above = constants
        parts, left, right, matrix = u.shape[1], u.reshape(-1), v.reshape(-1), matrix_of(raw, view)
        image = matrix_vector(matrix, right) if parts == 1 else (right.view(parts, -1) @ matrix.mT).view(-1)
        per_right = (1.0 if length is None else length.item()) / (_inner(right, right) ** 0.5 or 1.0)
        reached, size = _inner(image, image) ** 0.5 * per_right, _inner(left, left) ** 0.5
        sigma = _inner(left, image) * per_right / size if size else 0.0
        if sigma < STALE * reached:
            sigma, left, size = reached, image, reached / per_right
        ctx.sigma = sigma if sigma >= (norm if only_above else _SMALLEST[raw.dtype]) else 0.0
        ctx.factor = norm / sigma if ctx.sigma else 1.0
        ctx.view, ctx.norm, ctx.parts, ctx.per_pair = view, norm, parts, per_right / (size or 1.0)
        # Copies: a tick, or DDP's broadcast of buffers, may change u and v between forward and backward.
        ctx.left, ctx.right = left.clone(), right.clone()
        ctx.save_for_backward(raw)
        return raw * ctx.factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (raw,), left, right = ctx.saved_tensors, ctx.left, ctx.right
        if torch.is_grad_enabled():  # the gradient will be differentiated again
            image = right.view(ctx.parts, -1) @ matrix_of(raw, ctx.view).mT
            sigma = torch.dot(left, image.view(-1)) * ctx.per_pair
            factor = ctx.norm / sigma if ctx.sigma else 1 + 0 * sigma
            return torch.autograd.grad(raw * factor, raw, grad, create_graph=True)[0], None
        if not ctx.sigma:
            return grad, None
        matrix = matrix_of(grad, ctx.view)
        share = -_inner(grad.reshape(-1), raw.reshape(-1)) / ctx.sigma * ctx.factor * ctx.per_pair
        if ctx.parts == 1:
            of_raw = torch.addr(matrix, left, right, beta=ctx.factor, alpha=share)
        else:
            left, right = left.view(ctx.parts, -1), right.view(ctx.parts, -1)
            of_raw = torch.addmm(matrix, left.mT, right, beta=ctx.factor, alpha=share)
        return of_raw.view_as(raw) if ctx.view.flat else ctx.view.weight_of(of_raw.unsqueeze(0)), None


def _inner(a: Tensor, b: Tensor) -> float:
    return torch.dot(a, b).item()


def standardized(raw: Tensor, stds: Tensor, rounding: float) -> Tensor | None:
    """Filters on dim 0 of mean 0 and biased standard deviations `stds`, as channels of torch's batch normalisation.

    None if a filter is constant up to `rounding` roundings of its mean, or counts as zero.
    """
    if raw.dim() == 4 and not raw.is_contiguous():  # channels_last: the order of a filter's entries does not matter
        found = standardized(raw.permute(0, 2, 3, 1).contiguous(), stds, rounding)
        return None if found is None else found.permute(0, 3, 1, 2)
    rows = raw.reshape(1, raw.shape[0], -1)
    out, mean, inverse = torch.native_batch_norm(rows, stds, None, None, None, True, 0.0, 0.0)
    inexact = rounding * _EPS[raw.dtype] * _norm(mean, torch.inf).item()
    least = _LEAST[raw.dtype] / rows.shape[2] ** 0.5
    return out.view_as(raw) if inverse.max().item() * max(inexact, least) < 1 else None
