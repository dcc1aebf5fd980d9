"""Cosines and angles between filters: of every pair, the largest, the mean square; and sign hashes of directions."""

from __future__ import annotations

from math import pi

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.geometry.chance import alignment_variance
from gonio.geometry.norms import (
    Array,
    as_matrices,
    as_real,
    filter_norms,
    full_precision,
    in_range,
    safe_norm,
    small_side,
    unit_vectors,
    whole,
    widen,
    widest,
)
from gonio.seeding import normal

# Note [Close pairs]
# acos loses half of the digits near ±1: in float32 it does not distinguish 0 from 3e-4 rad. For two vectors
# the angle is 2·atan2(|a−b|, |a+b|) on unit vectors (Kahan), accurate to 1e-7 in float32. For all pairs that takes
# n²·d memory, so the Gram matrix is computed in float64 instead: its rounding of 1e-16 is 2e-8 in the angle.
TANGENTIAL = 1e-14  # share of a squared change below which its tangential part is rounding
CHORD_NOISE = 2e-15  # squared chord below which an angle is 0: Gram entries of equal rows deviate by a few 2.2e-16
BLOCK_ENTRIES = 1 << 24  # largest Gram block of coherence: 64 MiB in float32


def clamp_through(x: Tensor, low: float) -> Tensor:
    """`x` between `low` and 1, with the gradient of the identity: a clamp sets that of a cosine of 1 + 1e-7 to 0."""
    return x + (x.clamp(low, 1.0) - x).detach()


def cosines(matrix: Array) -> Tensor:
    r"""Cosine of the angle between every two filters, :math:`\hat w_i^\top \hat w_j`.

    Always within [−1, 1]. A zero filter has cosine 0 with every filter, itself included. As everywhere in geometry, a
    filter counts as zero if its norm is below 4.5e-13 (float32, bfloat16), 6.1e-5 (float16) or 5.6e-103 (float64).

    Shape: (n, d) or (groups, n, d) → (n, n) or (groups, n, n), in float32 at least.
    Invariances: Rescaling filters by positive factors, rotating :math:`\mathbb{R}^d`.
    Raises: InvalidArgumentError for a tensor of another rank.

    Example:
        >>> gonio.geometry.cosines(torch.tensor([[1.0, 0.0], [-3.0, 0.0]]))
        tensor([[ 1., -1.],
                [-1.,  1.]])
    """
    matrix = as_matrices(matrix, "cosines")
    with full_precision(matrix):
        unit = unit_vectors(in_range(matrix))
        return clamp_through(unit @ unit.mT, -1.0)


def angles(matrix: Array) -> Tensor:
    r"""Angle between every two filters in radians, :math:`\theta_{ij} \in [0, \pi]`.

    Computed in float64 from chords, :math:`2\,\mathrm{atan2}(\sqrt{2 - 2c}, \sqrt{2 + 2c})` [1]: accurate to
    1e-7 near 0 and to 1.2e-7 near :math:`\pi` (float32), where the arc cosine has an error of 3e-4. Angles below 4.5e-8
    become 0. The gradient is bounded. A zero filter is at :math:`\pi/2` to every filter, itself included.

    Shape: (n, d) or (groups, n, d) → (n, n) or (groups, n, n), in float32 at least.
    Invariances: Rescaling filters by positive factors, rotating :math:`\mathbb{R}^d`.
    Raises: InvalidArgumentError for a tensor of another rank.

    Example:
        >>> gonio.geometry.angles(torch.tensor([[1.0, 0.0], [1.0, 1.0]])).rad2deg()
        tensor([[ 0., 45.],
                [45.,  0.]])

    References: [1] W. Kahan, "How futile are mindless assessments of roundoff in floating-point computation?", 2006,
        §12.
    """
    matrix = as_matrices(matrix, "angles")
    with full_precision(matrix):
        unit = unit_vectors(in_range(matrix), dtype=widest(matrix))
        cosine = unit @ unit.mT
        near, far = (
            square.masked_fill(noise := square < CHORD_NOISE, 1).sqrt().masked_fill(noise, 0)
            for square in (2 - 2 * cosine, 2 + 2 * cosine)
        )
        return (2 * torch.atan2(near, far)).to(widen(matrix).dtype)


def turned(squares: Tensor, moved: Tensor, product: Tensor) -> Tensor:
    r"""The angle in radians between w and w + Δ, from their sums Σ w², Σ Δ² and Σ w·Δ in float64.

    With the radial part :math:`r = \langle \Delta, w\rangle / \lVert w\rVert` of the change and the tangential one
    :math:`q = \sqrt{\lVert \Delta\rVert^2 - r^2}` it is :math:`\mathrm{atan2}(q, \lVert w\rVert + r)`. The difference
    of squares is known to rounding: a q below :math:`10^{-7}\lVert \Delta\rVert` counts as 0.
    """
    norm = squares.sqrt()
    radial = product / norm
    square = moved - radial.square()
    tangential = square.masked_fill(square < TANGENTIAL * moved, 0).sqrt()
    return torch.atan2(tangential, norm + radial)


def angle_between(a: Array, b: Array, dim: int = -1) -> Tensor:
    r"""Angle in radians between corresponding vectors of `a` and `b`, which broadcast.

    :math:`2\,\mathrm{atan2}(\lVert \hat a - \hat b \rVert, \lVert \hat a + \hat b \rVert)`: in float32 accurate to
    1e-7 near 0 and to the last digit (2.4e-7) up to :math:`\pi`, with an accurate gradient, 0 at exactly parallel
    vectors. A zero vector is at :math:`\pi/2` to every other vector.

    Returns: Angles in :math:`[0, \pi]`, in float32 at least, without the dimension `dim`.

    Example:
        >>> gonio.geometry.angle_between(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1e-6]))
        tensor(1.0000e-06)
    """
    a, b = (unit_vectors(in_range(as_real(x), dim), dim) for x in (a, b))
    near, far = safe_norm(a - b, dim), safe_norm(a + b, dim)
    return torch.where((near == 0) & (far == 0), torch.pi / 2, 2 * torch.atan2(near, far))


def coherence(matrix: Array) -> Tensor:
    r"""Largest absolute cosine between two different filters.

    .. math:: \mu(W) = \max_{i \ne j} \frac{|\langle w_i, w_j \rangle|}{\lVert w_i \rVert \lVert w_j \rVert}

    0 if the filters are orthogonal; 1 if two are parallel or opposite. For :math:`n > d` it is at least
    :func:`welch_bound`. Computed in blocks of rows, so memory is bounded.

    Shape: (n, d) or (groups, n, d) with n ≥ 2 → () or (groups,).
    Invariances: Rescaling or flipping filters, permuting them, rotating :math:`\mathbb{R}^d`.
    Raises: InvalidArgumentError if there are fewer than two filters.

    Example:
        >>> gonio.geometry.coherence(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
        tensor(0.7071)

    References: [1] T. Strohmer, R. W. Heath, "Grassmannian frames with applications to coding and communication", Appl.
        Comput. Harmon. Anal. 14(3), 2003. https://arxiv.org/abs/math/0301135
    """
    matrix = as_matrices(matrix, "coherence")
    if matrix.shape[-2] < 2:
        raise InvalidArgumentError(
            "coherence() compares pairs of filters and needs at least 2 rows",
            f"shape {tuple(matrix.shape)}",
            "Exclude layers with a single output.",
        )
    n, matrix = matrix.shape[-2], whole(matrix)
    with full_precision(matrix):
        unit = unit_vectors(in_range(matrix))
        rows = max(1, BLOCK_ENTRIES // (n * max(1, matrix.shape[:-2].numel())))
        highest = []
        for own in torch.arange(n, device=unit.device).split(rows):
            block = (unit[..., own, :] @ unit.mT).abs()
            index = own.expand(block.shape[:-1]).unsqueeze(-1)
            highest.append(block.scatter(-1, index, 0.0).amax(-1))
        return clamp_through(torch.cat(highest, -1).amax(-1), 0.0)


def alignment(matrix: Array) -> Tensor:
    r"""Mean squared cosine between different filters, relative to that of random directions.

    .. math:: A(W) = d \cdot \frac{1}{n(n-1)} \sum_{i \ne j} \cos^2\theta_{ij}

    1 for random directions in any dimension (:math:`E\cos^2 = 1/d`), 0 for orthogonal filters, :math:`d`
    for parallel filters; at least :math:`(n - d)/(n - 1)` for :math:`n > d`. Zero filters have no direction
    and are left out; with fewer than two directions the result is 1.

    Shape: (n, d) or (groups, n, d) → () or (groups,), in float32 at least.
    Invariances: Rescaling or flipping filters, permuting them, rotating :math:`\mathbb{R}^d`.

    Example:
        >>> gonio.geometry.alignment(torch.eye(4)), gonio.geometry.alignment(torch.ones(3, 4))
        (tensor(0.), tensor(4.))
    """
    matrix = as_matrices(matrix, "alignment")
    with full_precision(matrix):
        unit = unit_vectors(in_range(matrix))
        small = small_side(unit)  # |U Uᵀ|² = |Uᵀ U|²: the smaller side needs no n² memory
        gram = small @ small.mT
        self_terms = (unit * unit).sum(-1).square().sum(-1)
        off_diagonal = (gram * gram).sum((-2, -1)) - self_terms
    pairs = _ordered_pairs(matrix)
    value = matrix.shape[-1] * off_diagonal.clamp(min=0) / pairs.clamp(min=1)
    return torch.where(pairs > 0, value, 1.0)


def alignment_zscore(matrix: Array) -> Tensor:
    r"""Distance of :func:`alignment` from 1, in standard deviations of random directions.

    :math:`z = (A(W) - 1) / \sigma` with the exact :math:`\sigma` of :func:`alignment_deviation`. Positive if filters
    are more parallel than random directions. For random weights it is between −3 and 3; its law
    is nearly normal for many filters and skewed to the right for few.

    Shape: (n, d) or (groups, n, d) → () or (groups,). 0 where there are fewer than two directions, or d = 1.

    Example:
        >>> gonio.geometry.alignment_zscore(torch.eye(4))
        tensor(-2.4495)
    """
    matrix = as_matrices(matrix, "alignment_zscore")
    excess = alignment(matrix) - 1
    pairs = (_ordered_pairs(matrix) / 2).clamp(min=1)
    deviation = alignment_variance(pairs, matrix.shape[-1]).sqrt()
    return torch.where(deviation > 0, excess / deviation.masked_fill(deviation == 0, 1), 0.0)


def _ordered_pairs(matrix: Tensor) -> Tensor:
    """n(n−1) for the n filters that are not zero."""
    directions = (filter_norms(matrix.detach()) > 0).sum(-1).to(widen(matrix).dtype)
    return directions * (directions - 1)


def sign_similarity(matrix: Array) -> Tensor:
    r"""Expected product of the signs of two filters' outputs, :math:`\vartheta_{ij} = 1 - 2\theta_{ij}/\pi`.

    .. math:: \vartheta_{ij} = E_x[\operatorname{sgn}(w_i^\top x)\operatorname{sgn}(w_j^\top x)]

    for inputs of uniformly random direction: 1 for parallel filters, 0 for orthogonal, −1 for opposite ones.

    Shape: (n, d) or (groups, n, d) → (n, n) or (groups, n, n), in float32 at least.
    Invariances: Rescaling filters by positive factors, rotating :math:`\mathbb{R}^d`.

    Example:
        >>> gonio.geometry.sign_similarity(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
        tensor([[1.0000, 0.5000],
                [0.5000, 1.0000]])

    References: [1] M. Charikar, "Similarity estimation techniques from rounding algorithms", STOC 2002, §3.
    """
    return 1 - angles(matrix) * (2 / pi)


def hyperplanes(d: int, bits: int, like: Tensor, seed: int) -> Tensor:
    """Normals of `bits` random hyperplanes as columns, (d, bits); the same on every device."""
    return normal((d, bits), seed, "hyperplanes", d, bits).to(widen(like))


def sign_hash(vectors: Array, bits: int = 256, *, seed: int = 0) -> Tensor:
    r"""The side of `bits` random hyperplanes on which each vector lies.

    Two vectors at angle :math:`\theta` differ in each bit with probability :math:`p = \theta/\pi`, independently,
    so the share of differing bits estimates :math:`p` with standard deviation
    :math:`\sqrt{p(1-p)/\text{bits}}`. A bit is set if the projection is ≥ 0, also for the zero vector.

    For estimates of angles the product of the unit vectors in bfloat16 takes about as long and has an error of 0.007°
    instead of 4° (512 bits, root mean square). Only hashes with equal `seed` and `bits` can be compared.

    Shape: (n, d) or (groups, n, d) → (n, bits) or (groups, n, bits), bool.
    Invariances: Rescaling vectors by positive factors; the negated vector has the complement, except at projections of
        0.
    Raises: InvalidArgumentError for `bits` below 1, or another rank.

    Example:
        >>> bits = gonio.geometry.sign_hash(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), 4096)
        >>> round((bits[0] != bits[1]).float().mean().item(), 1)  # 90° / 180°
        0.5
    """
    vectors = as_matrices(vectors, "sign_hash")
    if bits < 1:
        raise InvalidArgumentError("sign_hash() needs bits >= 1", f"bits={bits}", "Use 64 or more.")
    vectors = whole(vectors)
    with full_precision(vectors):
        return widen(vectors.detach()) @ hyperplanes(vectors.shape[-1], bits, vectors, seed) >= 0
