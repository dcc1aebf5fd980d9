"""Norms and unit vectors with finite values and gradients at zero, and how geometry computes: float32 at least,
outside autocast, and on stacks of matrices."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from math import inf
from typing import TypeAlias

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from gonio.errors import InvalidArgumentError
from gonio.execution import ordinary_eager

Array: TypeAlias = Tensor | ArrayLike  # what the functions of geometry take: all that `torch.as_tensor` takes
WIDE = (torch.float32, torch.float64)  # the dtypes in which geometry computes; others are widened

# Note [Zero vectors]
# A vector counts as zero, with norm 0, direction 0 and gradient 0, if its norm is below least_norm: 4.5e-13 in float32
# and bfloat16, 5.6e-103 in float64, 6.1e-5 in float16. Above it, the first and second derivatives of norm and direction
# and their intermediates (1/|x|³) are representable. No eps is added, so norms of small filters are not biased.
LARGE = 1e15  # entries above it have squares whose sums overflow in float32
HALVED_FROM = 192  # rows of a Gram matrix from which computing half of it saves more than copying the rest costs
SHARED_FROM = 2**18  # entries, 1 MiB in float32, from which matrix_vector uses several cores
_ORDINARY = (Tensor, nn.Parameter)
_UNCHANGED = nullcontext()


def least_norm(dtype: torch.dtype) -> float:
    """Norm below which a vector of `dtype` counts as zero; see Note [Zero vectors]."""
    return max(2 * torch.finfo(computed_in(dtype)).tiny ** (1 / 3), torch.finfo(dtype).tiny)


def safe_norm(x: Array, dim: int | tuple[int, ...], keepdim: bool = False) -> Tensor:
    r"""Euclidean norm :math:`\lVert x \rVert = \sqrt{\sum x_i^2}` with a finite gradient at 0.

    The gradient is :math:`x / \lVert x \rVert`, and the subgradient 0 where the norm is 0. In float32 norms above
    1.8e19 overflow to infinity, and norms below 4.5e-13 count as 0. Returned in float32 at least.

    Example:
        >>> x = torch.zeros(3, requires_grad=True)
        >>> gonio.geometry.safe_norm(x, 0).backward(); x.grad
        tensor([0., 0., 0.])
    """
    x = as_real(x)
    root, zero = _root(widen(x), dim, keepdim, least_norm(x.dtype))
    return root.masked_fill(zero, 0)


def _root(x: Tensor, dim: int | tuple[int, ...], keepdim: bool, least: float) -> tuple[Tensor, Tensor]:
    """The norm, replaced by 1 where it counts as zero, and the mask of these places."""
    square = (x * x).sum(dim, keepdim)
    zero = square < least * least
    return square.masked_fill(zero, 1).sqrt(), zero


def normalize(x: Array, dim: int | tuple[int, ...] = -1) -> Tensor:
    r"""Unit vectors :math:`x / \lVert x \rVert` along the dimension(s) `dim`; a zero vector stays zero.

    The gradient is :math:`(I - \hat x \hat x^\top) / \lVert x \rVert`, and 0 at zero, where ``F.normalize`` has one of
    size 1e12. If the norm overflows (1.8e19 in float32), the vector becomes 0 as with ``F.normalize``. The dtype is
    that of `x`; norms are accumulated in float32 at least.

    Example:
        >>> gonio.geometry.normalize(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    x = as_real(x)
    return unit_vectors(x, dim).to(x.dtype)


def unit_vectors(x: Tensor, dim: int | tuple[int, ...] = -1, *, dtype: torch.dtype | None = None) -> Tensor:
    """:func:`normalize` with a result in `dtype`, by default float32 at least."""
    wide = widen(x) if dtype is None else x.to(dtype)
    root, zero = _root(wide, dim, True, least_norm(x.dtype))
    # Divided by infinity, zero vectors and their gradients become 0 without a further pass over them; a
    # product with rsqrt would cube 1/|x| in its derivative.
    return wide / root.masked_fill(zero, inf)


def filter_norms(matrix: Array) -> Tensor:
    """Euclidean norm of each filter (row).

    Shape: (n, d) or (groups, n, d) → (n,) or (groups, n), in float32 at least.
    Raises: InvalidArgumentError for a tensor of another rank.

    Example:
        >>> gonio.geometry.filter_norms(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([5., 0.])
    """
    return safe_norm(as_matrices(matrix, "filter_norms"), -1)


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which figures of a weight of `dtype` are computed: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widen(x: Array) -> Tensor:
    """`x` in float32 if it is narrower, else `x` itself; raises for a tensor that is not real floating-point.

    Squares of float16 numbers above 256 overflow and bfloat16 cosines carry an error of 4e-3.
    """
    x = as_real(x)
    return x if x.dtype in WIDE else x.float()


def whole(x: Tensor) -> Tensor:
    """A sharded tensor gathered on every rank, differentiably; any other tensor unchanged."""
    gather = None if type(x) in _ORDINARY else getattr(x, "full_tensor", None)
    return x if gather is None else gather()


def widest(x: Tensor) -> torch.dtype:
    """float64 where the device has it, else float32 (Apple's MPS)."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast does not turn the matrix products of `x` into half precision."""
    # torch refuses the question for meta tensors
    if not x.is_meta and (torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type)):
        return torch.autocast(x.device.type, enabled=False)
    return _UNCHANGED


def check_finite(matrix: Tensor, function: str) -> None:
    """Raise if a decomposition of `matrix` would fail or return noise."""
    matrix = matrix.float() if matrix.element_size() == 1 else matrix  # torch cannot sum 8-bit floats
    if bool(torch.isfinite(matrix.detach().sum())):  # a non-finite entry makes the sum non-finite: one pass, no memory
        return
    bad = int((~torch.isfinite(matrix)).sum())
    if bad:
        raise InvalidArgumentError(
            f"{function}() needs finite entries",
            f"{bad} of {matrix.numel()} NaN or infinite",
            "Find the training step that produced them.",
        )


def as_real(x: Array) -> Tensor:
    """Whatever ``torch.as_tensor`` takes as a real floating-point tensor; integers of other types become floats."""
    if not isinstance(x, Tensor):
        x = torch.as_tensor(x, device="cpu")
        x = x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())
    if x.layout is not torch.strided or x.is_nested:
        raise InvalidArgumentError(
            "geometry works on dense tensors",
            "a nested tensor" if x.is_nested else f"layout {x.layout}",
            "Convert it first, with .to_dense() or .to_padded_tensor(0.0).",
        )
    if not x.is_floating_point():
        raise InvalidArgumentError(
            "geometry works on real floating-point tensors",
            f"dtype {x.dtype}",
            "Convert it first, for example with .float(); a quantised weight must be dequantised.",
        )
    return x


def as_matrices(x: Array, function: str, *, stacks: bool = True) -> Tensor:
    """The argument of every function of filters: a matrix (n, d), or a stack of matrices (groups, n, d).

    The weight of a 2-d or 3-d convolution (n, in, *kernel) is flattened to (n, in·kernel). That of a 1-d convolution
    has the rank of a stack and is one; its filters are ``weight.flatten(1)``.
    """
    matrix = as_real(x)
    matrix = matrix.flatten(1) if matrix.ndim in (4, 5) else matrix
    if matrix.ndim != 2 and not (stacks and matrix.ndim == 3):
        raise InvalidArgumentError(
            f"{function}() takes a matrix (n, d), one filter per row{', or a stack (groups, n, d)' * stacks}",
            f"shape {tuple(matrix.shape)}",
            "Turn a layer's weight into matrices with gonio.geometry.matrix_view(weight, layout).",
        )
    return matrix


def in_range(x: Tensor, dim: int = -1) -> Tensor:
    """Vectors along `dim`; those with squares that overflow in float32 are divided by their largest entry.

    The dtype stays where no entry is so large, because it says which vectors count as zero.
    """
    x = as_real(x)
    if torch.finfo(x.dtype).max < LARGE or not x.numel() or not ordinary_eager(x):
        return x
    x = widen(x)
    largest = x.detach().abs().amax(dim, keepdim=True)
    large = (largest > LARGE) & largest.isfinite()
    if x.is_cpu and not bool(large.any()):  # reading the answer would wait for another device
        return x
    return x / largest.masked_fill(~large, 1)


def small_side(matrix: Tensor) -> Tensor:
    """The matrices with the smaller side as rows: W or its transpose; a view."""
    return matrix if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT


def matrix_vector(matrix: Tensor, vector: Tensor) -> Tensor:
    """matrix @ vector on all cores, for a matrix (rows, columns); for its transpose pass ``matrix.T``.

    BLAS multiplies a matrix with a vector on a single core, which cannot saturate the memory bandwidth. As a
    batch of as many blocks as there are threads, each core reads its own: up to twice as fast on two.
    """
    if not matrix.is_cpu or matrix.numel() < SHARED_FROM or torch.compiler.is_compiling():
        return torch.mv(matrix, vector)
    stored = matrix if matrix.stride(1) == 1 else matrix.T
    parts = _equal_parts(len(stored), torch.get_num_threads())
    if parts == 1:
        return torch.mv(matrix, vector)
    blocks = stored.unflatten(0, (parts, -1))
    if stored is matrix:
        return torch.bmm(vector.expand(parts, 1, -1), blocks.mT).view(-1)
    return torch.bmm(vector.view(parts, 1, -1), blocks).sum((0, 1))


def gram(a: Tensor) -> Tensor:
    """A Aᵀ of a matrix or a stack; of a large matrix on CPU only the blocks on and below the diagonal are computed."""
    rows = a.shape[-2]
    if a.dim() > 2 or not a.is_cpu or rows < HALVED_FROM:
        return a @ a.mT
    product, size = a.new_empty(rows, rows), -(-rows // 4)
    for start in range(0, rows, size):
        stop = min(start + size, rows)
        torch.mm(a[start:], a[start:stop].T, out=product[start:, start:stop])
        product[start:stop, stop:] = product[stop:, start:stop].T
    return product


@lru_cache(maxsize=256)
def _equal_parts(rows: int, threads: int) -> int:
    """The largest number of equal blocks of rows, at most one per thread."""
    return max(parts for parts in range(1, max(1, min(rows, threads)) + 1) if rows % parts == 0)
