"""Adapters that rotate a weight's inputs: OFT, exactly or by a Neumann series."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import isqrt, sqrt
from typing import Any

import torch
from torch import Tensor

from gonio.measuring.reading.adapters import Adapter, AdapterConfig, Group, Unfit
from gonio.measuring.reading.entry import StoredTensor, TensorEntry
from gonio.messages import say

TERMS = 5  # of the Neumann series, where the configuration names no other number
MOST_TERMS = 100
_NAMES = ("oft_R", "oft_embedding_R")


def adapters_of(group: Group, config: AdapterConfig, _: Mapping[str, StoredTensor]) -> list[Adapter]:
    r"""The orthogonal adapter of a layer: block-diagonal R, :math:`W' = W R^\top`, from skew-symmetric matrices Q.

    :math:`R = (I - Q)(I + Q)^{-1}` up to sign, exactly or by a series; the series is orthogonal only approximately. A
    file holds the upper triangles of the blocks, (blocks, b(b − 1)/2); one row if all blocks are equal.

    References:
        [1] Z. Qiu et al., "Controlling text-to-image diffusion by orthogonal finetuning", 2023, arXiv 2306.07280,
        section 3. [2] Z. Qiu et al., "Orthogonal finetuning made scalable", 2025, arXiv 2506.19847 (the series).
    """
    packed = next((group.parts[name] for name in _NAMES if name in group.parts), None)
    if packed is None:
        return [group.refused("oft", "it has no oft_R")] if any(name.startswith("oft_") for name in group.parts) else []
    reason = config.refusal or ("" if len(config) else "how its rotation is computed is not known: no configuration")
    count = packed.shape[1] if len(packed.shape) == 2 else 0
    root = isqrt(1 + 8 * count)  # whole where so many entries fill the upper triangle of a matrix
    if count < 1 or root * root != 1 + 8 * count or len(group.parts) > 1:
        reason = f"its parts are no triangles of rotations: {', '.join(group.parts)} {packed.shape}"
    terms: Any = config.get("num_cayley_neumann_terms", TERMS) if config.get("use_cayley_neumann", True) else 0
    if isinstance(terms, bool) or not isinstance(terms, int) or not 0 <= terms <= MOST_TERMS:
        reason = reason or f"its number of terms of the Neumann series is not one of 0 to {MOST_TERMS}"
    radius = config.number("eps") if "eps" in config else 6e-5
    if config.get("coft") and (radius is None or radius <= 0):
        reason = reason or "its largest rotation (eps) is not a positive number"
    limit, turned = (radius if config.get("coft") else None), bool(config.get("fan_in_fan_out"))
    change = None if reason else partial(_turned, packed, terms, limit, turned)
    return [group.adapter("oft", change, reason=reason)]


def _blocks(packed: Tensor, terms: int, radius: float | None) -> Tensor:
    """The rotations, (blocks, b, b); `terms` = 0 is the exact one, `radius` the largest norm of all Q together."""
    size = (1 + isqrt(1 + 8 * packed.shape[1])) // 2
    rows, columns = torch.triu_indices(size, size, 1, device="cpu").unbind()
    skew = packed.new_zeros(len(packed), size, size)
    skew[:, rows, columns] = packed
    skew = skew - skew.mT
    if radius is not None:
        norms = torch.linalg.matrix_norm(skew, keepdim=True)
        limit = radius / sqrt(len(packed))
        skew = skew * (limit / norms.clamp_min(limit))
    one = torch.eye(size, device="cpu", dtype=torch.float32).expand_as(skew)
    return _series(skew, terms) if terms else torch.linalg.solve(one + skew, one - skew, left=False)


def _series(skew: Tensor, terms: int) -> Tensor:
    """I + 2Q + 2Q² + … + Qᵗ with t = `terms` − 1, as peft sums it: 3 terms are 4."""
    total = torch.eye(skew.shape[-1], device="cpu", dtype=torch.float32).expand_as(skew).clone()
    if terms < 3:
        return total + 2 * skew if terms == 2 else total
    power = skew
    for _ in range(max(terms, 4) - 2):
        total += 2 * power
        power = power @ skew
    return total + power


def _turned(
    packed: StoredTensor, terms: int, radius: float | None, turned: bool, weight: Tensor, base: TensorEntry
) -> Tensor:
    """The base's weight with its inputs rotated. peft ignores `fan_in_fan_out` for layers that store outputs first."""
    if not base.inferred and base.layout is not None:
        turned = base.layout.transposed and weight.ndim == 2
    stored = weight.float().mT if turned else weight.float()
    filters, blocks = stored.flatten(1), _blocks(packed.load().float(), terms, radius)
    size = blocks.shape[-1]
    if filters.shape[1] % size or len(blocks) not in (1, filters.shape[1] // size):
        raise Unfit(
            say(
                "the adapter rotates {blocks} blocks of {size}, the base has filters of length {length}",
                blocks=len(blocks),
                size=size,
                length=filters.shape[1],
            )
        )
    every = blocks.expand(filters.shape[1] // size, -1, -1)
    made = torch.einsum("nrk,rck->nrc", filters.unflatten(1, (-1, size)), every).reshape(stored.shape)
    return made.mT if turned else made
