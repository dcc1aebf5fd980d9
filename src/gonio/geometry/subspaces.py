"""Top singular subspaces with a stated error, the angles between them, and directions that a base does not have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.geometry.blocks import (
    HELD,
    StoredDifference,
    column_blocks,
    normal_product,
    products,
    row_blocks,
    safe_scale,
)
from gonio.geometry.chance import random_coherence
from gonio.geometry.lanczos import Krylov
from gonio.geometry.norms import (
    Array,
    as_real,
    check_finite,
    computed_in,
    full_precision,
    normalize,
    widest,
)
from gonio.seeding import normal

# Note [Block Krylov]
# From a random block Q₀ the vectors (W Wᵀ)ʲ Q₀ span a space whose Ritz vectors converge with the square root of
# the relative gap, so that a Gaussian matrix, whose top singular values are close together, needs tens of steps where
# the power iteration needs thousands. The blocks are kept orthonormal. With the residual R of the
# Ritz vectors and their distance g from the next Ritz value, the sine of the largest angle to the true subspace is
# at most ‖R‖/g [Davis and Kahan 1970], as far as the next Ritz value has converged; rounding adds to R. Where a block
# is only rounding, the Krylov space is complete, as after one step for a matrix with equal singular values.
EXACT = 512  # smaller side up to which all singular vectors are computed, in float64
BLOCK = 6  # vectors of a block beyond k, at least
MULTIPLE = 16  # of which the vectors of a block are a multiple: products of 32 columns are faster than those of 34
STEPS = 64  # blocks at most
ROUNDING = 16.0  # errors of products and decompositions, in units of the rounding of σ₁²
INDEPENDENT = 0.5  # of a column that is left after its part in the basis is removed
TOLERANCE = 3e-4  # of the sine, at which the iteration ends
CHECKS = frozenset((4, 6, 7, 8, 10, 13, 18, 24, 31, 39, 48, 56, STEPS))  # blocks after which the error is computed

# Note [A changed matrix]
# The top directions of W + Δ are nearly those of W, or new ones, which come from Δ. So the block starts with those of W
# and with sums of random columns x and ΔΔᵀx, of length 1 each, and converges in half of the steps or fewer; the error
# is that of Note [Block Krylov], and no fewer steps are made than without a base.

# Note [Directions of a base]
# Of the vector y = Wᵀu the spectral measure under WᵀW has the mass σᵢ² cos²(u, uᵢ) at σᵢ². q Lanczos steps give its
# orthonormal polynomials, and 1/Σ pⱼ(x)² bounds the mass at x from above [Akhiezer 1965, §2.3]. So the largest
# cosine with any singular vector is bounded without computing them; the bound is exact once the space is complete.
DECOMPOSED = 1024  # smaller side up to which the largest cosine is computed from all singular vectors instead
LANCZOS = 64
LEAST = 1e-2  # singular values below this share of the largest of which the direction has a part are left out
FAINT = 1e-6  # share of a direction's mass that may be rounding
GRID = 2048  # positions at which the bound is evaluated
NULL = 1e-14  # squared singular values below this share of the largest have no direction
SURE = 0.71  # a cosine above √½ with one direction is the largest

THRESHOLD = 0.5  # of the cosine below which a direction is an intruder
NEAR = 3e-3  # tolerance of the subspaces that are compared: a cosine is off by no more than this
CONSIDERED = 10  # top directions of the tuned weight


@dataclass(frozen=True)
class TopSubspace:
    """The largest singular values of a matrix with their vectors; see :func:`top_subspace`."""

    left: Tensor  # (n, k), orthonormal columns
    values: Tensor  # (k,), largest first
    right: Tensor  # (d, k), orthonormal columns
    error: float  # sine of the largest angle between the subspace and the true one, at most; 1: it may be any


def top_subspace(matrix: Array, k: int, *, seed: int = 0) -> TopSubspace:
    r"""The k largest singular values with their vectors, by a randomised block Krylov method.

    `error` bounds the sine of the largest angle between the subspace found and the true one (left and right alike to
    first order), rounding included; the iteration ends at 3e-4. It is 1 where :math:`\sigma_k` and :math:`\sigma_{k+1}`
    are equal: then no subspace of this dimension is defined. Vectors are orthonormal, and values right, there too.
    Up to a smaller side of 512 all singular vectors are computed.

    Shape: (n, d) → left (n, k), values (k,), right (d, k), in float32 at least.
    Raises: InvalidArgumentError for another rank, non-finite entries, or k outside 1 … min(n, d).

    Example:
        >>> found = gonio.geometry.top_subspace(torch.diag(torch.tensor([1.0, 5.0, 2.0])), 2)
        >>> found.values, found.error < 1e-12
        (tensor([5., 2.]), True)

    References: [1] C. Musco, C. Musco, "Randomized block Krylov methods for stronger and faster approximate singular
        value decomposition", NeurIPS 2015, Algorithm 2. [2] C. Davis, W. Kahan, "The rotation of eigenvectors by a
        perturbation III", SIAM J. Numer. Anal. 7(1), 1970 (the error).
    """
    return _top(matrix, k, seed, TOLERANCE)


@torch.no_grad()
def _top(
    matrix: Array, k: int, seed: int, tolerance: float, near: tuple[Tensor, TopSubspace] | None = None
) -> TopSubspace:
    matrix = as_real(matrix)
    if matrix.ndim != 2 or not 1 <= k <= min(matrix.shape):
        raise InvalidArgumentError(
            "top_subspace() takes a matrix (n, d) and 1 <= k <= min(n, d)",
            f"shape {tuple(matrix.shape)}, k={k}",
            "Pass one matrix of gonio.geometry.matrix_view(weight, layout).",
        )
    check_finite(matrix, "top_subspace")
    with full_precision(matrix):
        scale, dtype = safe_scale(matrix), computed_in(matrix.dtype)
        flipped = matrix.shape[0] > matrix.shape[1]
        small = matrix.mT if flipped else matrix
        if len(small) <= EXACT:
            left, values, right, error = _exact(small, scale, k)
        else:
            start = _start(small, k, seed)
            if near is not None:
                before, top = near
                known, before = (top.right, before.mT) if flipped else (top.left, before)
                start = _start_near(start, known[:, :k], before, small, scale)
            small = small.to(dtype) if small.numel() <= HELD else small
            left, values, right, error = _krylov(small, scale, k, start, tolerance)
        left, right = (right, left) if flipped else (left, right)
        return TopSubspace(left.to(dtype), values.to(dtype) * scale, right.to(dtype), error)


def _exact(matrix: Tensor, scale: float, k: int) -> tuple[Tensor, Tensor, Tensor, float]:
    wide = matrix.to(widest(matrix)) / scale
    left, values, right = torch.linalg.svd(wide, full_matrices=False)
    error = 0.0 if k == len(wide) == wide.shape[1] else _sine(values.square(), k, 0.0, wide.dtype)
    return left[:, :k], values[:k], right[:k].mT, error


def _sine(squares: Tensor, k: int, residual: float, dtype: torch.dtype) -> float:
    """The bound of Note [Block Krylov]; `dtype` is that of the products."""
    gap = float(squares[k - 1] - (squares[k] if k < len(squares) else 0.0))
    residual += ROUNDING * torch.finfo(dtype).eps * float(squares[0])
    return min(1.0, residual / gap) if gap > 0 else 1.0


def _start(matrix: Tensor, k: int, seed: int) -> Tensor:
    """Random columns for the matrix, some more than k."""
    width = -(-(k + BLOCK) // MULTIPLE) * MULTIPLE
    draw = normal((len(matrix), width), seed, "top_subspace", dtype=torch.float64)
    return draw.to(matrix.device, computed_in(matrix.dtype))


def _start_near(draw: Tensor, known: Tensor, before: Tensor, after: Tensor, scale: float) -> Tensor:
    """The top directions of the matrix before its change, and random columns; see Note [A changed matrix]."""
    dtype = torch.promote_types(before.dtype, after.dtype)
    drawn = normalize(draw[:, known.shape[1] :], 0)
    _, images = products(StoredDifference(before.to(dtype), after.to(dtype)), drawn, scale=scale)
    return torch.cat([known.to(draw), drawn + normalize(images.nan_to_num(0.0, 0.0, 0.0), 0)], 1)


def _krylov(
    matrix: Tensor, scale: float, k: int, start: Tensor, tolerance: float
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Left vectors, values, right vectors and error of W/scale with no more rows than columns."""
    n, width = start.shape
    block = basis = torch.linalg.qr(start).Q
    images: list[Tensor] = []  # Wᵀ times each block of the basis
    squared = torch.empty(0, 0, dtype=widest(block), device=block.device)  # the projection of W Wᵀ to the basis
    for step in range(1, STEPS + 1):
        image, following = products(matrix, block, scale=scale)  # (d, width), (n, width)
        images.append(image)
        squared = _bordered(squared, images)
        block, coupling = torch.linalg.qr(following - basis @ (basis.mT @ following))
        for _ in range(3):  # a block of rounding, normalised, lies in the basis again
            block, change = torch.linalg.qr(block - basis @ (basis.mT @ block))
            coupling = change @ coupling
            if bool((change.diagonal().abs() > INDEPENDENT).all()):
                break
        rounding = ROUNDING * torch.finfo(block.dtype).eps * squared.diagonal().amax()
        ended = basis.shape[1] + width > n or bool(coupling.abs().amax() <= rounding)  # the Krylov space is complete
        if step in CHECKS or ended:
            squares, vectors = (found.flip(-1) for found in torch.linalg.eigh(squared))
            residual = float(torch.linalg.matrix_norm(coupling.to(vectors) @ vectors[-width:, :k], 2))
            error = _sine(squares, k, residual, block.dtype)
            if error <= tolerance or ended:
                break
        basis = torch.cat([basis, block], 1)
    # Not the images of left vectors over their values, which are noise where a value is 0.
    parts = vectors[:, :k].split(width)
    together = reduce(torch.add, (image.to(part) @ part for image, part in zip(images, parts, strict=True)))
    onto, triangle = torch.linalg.qr(together)
    turned, values, top = torch.linalg.svd(triangle)
    return basis[:, : len(vectors)] @ (vectors[:, :k] @ top.mT).to(basis), values, onto @ turned, error


def _bordered(squared: Tensor, images: Sequence[Tensor]) -> Tensor:
    """The products of the columns of all images in the dtype of those of all but the last, which are known."""
    last = images[-1].to(squared)
    side = torch.cat([image.to(squared).mT @ last for image in images])
    known = len(squared)
    return torch.cat([torch.cat([squared, side[:known]], 1), side.mT])


@torch.no_grad()
def principal_angles(a: Array, b: Array) -> Tensor:
    r"""Angles between the subspaces that the columns of two matrices span, in radians, smallest first.

    The cosines are the singular values of :math:`Q_a^\top Q_b`; the angles are computed from cosines and sines, so that
    small ones are accurate too. Two random subspaces of dimension k in :math:`\mathbb{R}^n` have a mean squared cosine
    of k/n.

    Shape: (n, k), (n, l) → (min(k, l),), between 0 and π/2, in float64.
    Raises: InvalidArgumentError for another rank, different n, more columns than rows, or non-finite entries.

    Example:
        >>> plane, line = torch.eye(3)[:, :2], torch.tensor([[1.0], [0.0], [1.0]])
        >>> torch.rad2deg(gonio.geometry.principal_angles(plane, line))
        tensor([45.0000], dtype=torch.float64)

    References: [1] Å. Björck, G. Golub, "Numerical methods for computing angles between linear subspaces", Math. Comp.
        27(123), 1973, §3.
    """
    a, b = as_real(a), as_real(b)
    for matrix in (a, b):
        check_finite(matrix, "principal_angles")
        if matrix.ndim != 2 or len(matrix) != len(a) or matrix.shape[1] > len(matrix):
            raise InvalidArgumentError(
                "principal_angles() takes two matrices (n, k) and (n, l) with k, l <= n",
                f"shapes {tuple(a.shape)} and {tuple(b.shape)}",
                "Pass bases of subspaces of one space, one vector per column.",
            )
    first, second = (torch.linalg.qr(m.to(widest(m))).Q for m in (a, b))
    first, second = (first, second) if first.shape[1] >= second.shape[1] else (second, first)
    shared = first.mT @ second
    cosines = torch.linalg.svdvals(shared)
    sines = torch.linalg.svdvals(second - first @ shared).flip(-1)
    return torch.atan2(sines, cosines)


@dataclass(frozen=True)
class IntruderDimensions:
    """The top singular directions of a tuned weight beside its base; see :func:`intruder_dimensions`."""

    cosines: Tensor  # (k,), the largest with any singular direction of the base
    top: TopSubspace  # of the tuned weight
    base: TopSubspace  # of the base, with k directions, or 2k where the tuned weight has one that is like none of k
    threshold: float
    chance: float  # median of the largest cosine of a random direction with those of the base

    @property
    def numbers(self) -> tuple[int, ...]:
        """The positions of the intruders among the top directions, from 0."""
        present = self.top.values > NULL**0.5 * self.top.values[0]
        return tuple(((self.cosines < self.threshold) & present).nonzero().flatten().tolist())

    @property
    def part(self) -> Tensor:
        """The sum of σ u vᵀ over the intruders, (n, d)."""
        chosen = list(self.numbers)
        return self.top.left[:, chosen] * self.top.values[chosen] @ self.top.right[:, chosen].mT


@torch.no_grad()
def intruder_dimensions(
    base: Array, tuned: Array, *, k: int = CONSIDERED, threshold: float = THRESHOLD, seed: int = 0
) -> IntruderDimensions:
    r"""The top k left singular directions of a tuned weight that are like none of its base.

    A direction :math:`u_j` is an intruder if :math:`\max_i |\langle u_j, u_i^0 \rangle|` over all singular directions
    of the base is below `threshold`. A random direction reaches `chance`, about :math:`\sqrt{2 \ln n / n}`: where that
    is near the threshold (fewer than about 20 rows) an intruder cannot be told from any other direction.

    Up to a smaller side of 1024 the cosines are exact. For larger weights a direction without a counterpart
    among the top ones of the base has an upper bound instead, from 64 products with the weight, over the directions of
    the base with at least a hundredth of the largest singular value of which the direction has a part: a direction is
    called an intruder wrongly only where it mixes directions of the base that are further apart.
    Top subspaces are found up to a sine of 3e-3, by which a cosine can be off; where singular values are so close that
    rounding allows no less, :attr:`TopSubspace.error` is larger (0.004 for a random 8192 × 8192 matrix).

    Shape: (n, d), (n, d).
    Raises: InvalidArgumentError as :func:`top_subspace`, and for different shapes.

    Example:
        >>> base = torch.diag(torch.arange(1.0, 41.0))
        >>> added = torch.ones(40, 1) @ torch.ones(1, 40) * 5  # a new direction, larger than all others
        >>> found = gonio.geometry.intruder_dimensions(base, base + added, k=3)
        >>> found.numbers, round(found.chance, 2)
        ((0,), 0.37)

    References: [1] R. Shuttleworth, J. Andreas, A. Torralba, P. Sharma, "LoRA vs full fine-tuning: an illusion of
        equivalence", 2024, arXiv 2410.21228, Algorithm 1 (k = 10, threshold 0.5 and 0.6).
    """
    base, tuned = as_real(base), as_real(tuned)
    if base.shape != tuned.shape:
        raise InvalidArgumentError(
            "intruder_dimensions() compares two weights of one shape",
            f"shapes {tuple(base.shape)} and {tuple(tuned.shape)}",
            "Pass the weight before and after.",
        )
    return BaseDirections(base, k=k, seed=seed).intruders(tuned, threshold=threshold)


class BaseDirections:
    """The top directions of a base, for :func:`intruder_dimensions` of several tuned weights of its shape."""

    @torch.no_grad()
    def __init__(self, base: Array, *, k: int = CONSIDERED, seed: int = 0) -> None:
        self._base, self._k, self._seed = as_real(base), k, seed
        self.top = _top(self._base, min((k, *self._base.shape)), seed, NEAR)

    @torch.no_grad()
    def intruders(self, tuned: Array, *, threshold: float = THRESHOLD) -> IntruderDimensions:
        """What :func:`intruder_dimensions` returns."""
        base, most = self._base, min((2 * self._k, *self._base.shape))
        top = _top(tuned, self._k, self._seed, NEAR, (base, self.top))
        cosines, exact = self._cosines(top), min(base.shape) <= DECOMPOSED
        least = max(threshold, SURE) if exact else threshold
        if bool((cosines < least).any()) and len(self.top.values) < most:
            self.top = _top(base, most, self._seed, NEAR, (base, self.top))
            cosines = self._cosines(top)
        unlike = (cosines < least).nonzero().flatten()
        if len(unlike):  # like none of the top ones: look at all
            others = top.left[:, unlike]
            cosines[unlike] = _cosines_with_all(base, others) if exact else _cosine_bounds(base, others)
        chance = random_coherence(min(base.shape), len(base))
        return IntruderDimensions(cosines.clamp_max(1).to(top.values), top, self.top, threshold, chance)

    def _cosines(self, top: TopSubspace) -> Tensor:
        """The largest |cosine| of each top direction of a tuned weight with those of the base that are known."""
        known = self.top.values > NULL**0.5 * self.top.values[0]
        return (self.top.left.mT @ top.left).double().abs().mul(known[:, None]).amax(0)


def _cosines_with_all(base: Tensor, directions: Tensor) -> Tensor:
    """The largest |cosine| of each column with a left singular vector of the base, from the Gram matrix in float64."""
    scale, (n, d) = safe_scale(base), base.shape
    small = base if n <= d else base.mT
    directions = directions.to(widest(base))
    gram = directions.new_zeros(len(small), len(small))
    images = directions if n <= d else directions.new_zeros(d, directions.shape[1])  # Wᵀu where the rows are many
    for left, block in column_blocks(small):
        part = block.to(gram) / scale
        gram.addmm_(part, part.mT)
        if n > d:
            images.addmm_(part, directions[left : left + part.shape[1]])
    squares, vectors = torch.linalg.eigh(gram)
    known = squares > NULL * squares[-1]
    if not bool(known.any()):
        return directions.new_zeros(directions.shape[1])
    cosines = vectors[:, known].mT @ images
    return (cosines if n <= d else cosines / squares[known].sqrt()[:, None]).abs().amax(0)


def _cosine_bounds(base: Tensor, directions: Tensor) -> Tensor:
    """Upper bounds of these cosines; see Note [Directions of a base]. One pass over the base serves all directions."""
    scale, directions = safe_scale(base), directions.to(computed_in(base.dtype))
    images = directions.new_zeros(directions.shape[1], base.shape[1])
    for top, rows in row_blocks(base):
        images.addmm_(directions[top : top + len(rows)].mT, rows)
    images /= scale
    sizes = torch.linalg.vector_norm(images, dim=1, dtype=torch.float64)
    krylov = Krylov(basis=((images / sizes.masked_fill(sizes == 0, 1).to(images)[:, None]).unsqueeze(-1),))
    while krylov.steps < min(LANCZOS, *base.shape) and (not krylov.steps or bool(krylov.beside[-1].any())):
        krylov = krylov.forward(lambda v: normal_product(base, v[..., 0], scale=scale).unsqueeze(-1), krylov.steps + 1)
    atoms = [_largest_atom(_alone(krylov, i)) if size else 0.0 for i, size in enumerate(sizes.tolist())]
    return sizes.new_tensor(atoms).sqrt() * sizes


def _alone(krylov: Krylov, number: int) -> Krylov:
    """One of several recurrences, up to the step at which its space is complete."""
    beside = [value[number] for value in krylov.beside]
    steps = next((step for step, value in enumerate(beside, start=1) if not value), krylov.steps)
    diagonal = [value[number] for value in krylov.diagonal[:steps]]
    return Krylov(basis=(), diagonal=tuple(diagonal), beside=tuple(beside[:steps]))


def _largest_atom(krylov: Krylov) -> float:
    """Upper bound of mass(x)/x over x, from the coefficients of the orthonormal polynomials."""
    diagonal, beside = ([float(x) for x in each] for each in (krylov.diagonal, krylov.beside))
    nodes, vectors = torch.linalg.eigh(krylov.tridiagonal().cpu())
    mass = vectors[0].square()
    kept = nodes >= LEAST**2 * nodes[mass > FAINT].max()
    largest = float((mass[kept] / nodes[kept]).max())
    if not beside[-1]:  # the Krylov space is complete, and the measure is that of the nodes
        return largest
    ends = float(nodes[kept][0]) ** 0.5, float(nodes[-1]) ** 0.5
    x = torch.linspace(*ends, GRID, dtype=torch.float64, device="cpu").square()
    before, now = torch.zeros_like(x), torch.ones_like(x)
    total = torch.ones_like(x)
    for j, alpha in enumerate(diagonal[:-1]):
        before, now = now, ((x - alpha) * now - (beside[j - 1] if j else 0.0) * before) / beside[j]
        total += now.square()
    return max(largest, float((1 / (total * x)).max()))
