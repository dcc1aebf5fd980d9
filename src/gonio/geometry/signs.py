"""Sign hashing: the angle between two vectors as the chance that random hyperplanes separate them."""

from __future__ import annotations

from math import pi

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.geometry.angles import angles
from gonio.geometry.precision import check_matrix, full_precision, whole, widen
from gonio.seeding import generator

__all__ = ["hyperplanes", "sign_hash", "sign_similarity"]


def sign_similarity(matrix: Tensor) -> Tensor:
    r"""Expected product of the signs of two filters' outputs, :math:`\vartheta_{ij} = 1 - 2\theta_{ij}/\pi`.

    .. math:: \vartheta_{ij} = E_x[\operatorname{sgn}(w_i^\top x)\operatorname{sgn}(w_j^\top x)]

    for inputs of uniformly random direction: 1 for parallel filters, 0 for orthogonal, −1 for opposite ones.

    Shape:
        - ``matrix``: (n, d) or (groups, n, d).
        - output: (n, n) or (groups, n, n), in float32 at least.

    Invariances:
        Rescaling filters by positive factors, rotating :math:`\mathbb{R}^d`.

    Example:
        >>> gonio.geometry.sign_similarity(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
        tensor([[1.0000, 0.5000],
                [0.5000, 1.0000]])

    References:
        [1] M. Charikar, "Similarity estimation techniques from rounding algorithms", STOC 2002, §3.
    """
    return 1 - angles(matrix) * (2 / pi)


def hyperplanes(d: int, bits: int, like: Tensor, seed: int) -> Tensor:
    """Normals of `bits` random hyperplanes as columns, (d, bits); the same on every device."""
    normals = torch.randn(d, bits, generator=generator(seed, "hyperplanes", d, bits))
    return normals.to(widen(like))


def sign_hash(vectors: Tensor, bits: int = 256, *, seed: int = 0) -> Tensor:
    r"""On which side of `bits` random hyperplanes each vector lies.

    Two vectors at angle :math:`\theta` differ in each bit with probability :math:`\theta/\pi`, independently, so
    the share of differing bits estimates :math:`\theta/\pi` with standard deviation
    :math:`\sqrt{p(1-p)/\text{bits}}`. A bit is set where the projection is ≥ 0, also for the zero vector.

    Hashes are for finding candidates and for storing directions in few bytes. They do not pay for *estimating*
    angles: 512 bits are off by 4° (root mean square), a matrix product of the unit vectors in bfloat16, which
    takes about as long as comparing the hashes of all pairs, by 0.007°.

    Args:
        vectors: one per row.
        bits: number of hyperplanes.
        seed: of the hyperplanes; hashes compare only within one seed and number of bits.

    Shape:
        - ``vectors``: (n, d) or (groups, n, d).
        - output: (n, bits) or (groups, n, bits), bool.

    Invariances:
        Rescaling vectors by positive factors; the negated vector has the complement (unless 0 occurs).

    Raises:
        InvalidArgumentError: for `bits` below 1, or another rank.

    Example:
        >>> bits = gonio.geometry.sign_hash(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), 4096)
        >>> round((bits[0] != bits[1]).float().mean().item(), 1)  # 90° / 180°
        0.5

    See also:
        :func:`near_duplicates`, which looks for candidates by such bits; :func:`angles`, exact.
    """
    check_matrix(vectors, "sign_hash")
    if bits < 1:
        raise InvalidArgumentError("sign_hash() needs bits >= 1", f"bits={bits}", "Use 64 or more.")
    vectors = whole(vectors)
    with full_precision(vectors):
        return widen(vectors.detach()) @ hyperplanes(vectors.shape[-1], bits, vectors, seed) >= 0
