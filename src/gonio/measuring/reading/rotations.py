"""Adapters that rotate a weight (OFT), in files: the rotation that each stores, and the rotated weight."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt, sqrt
from typing import Any

import torch
from torch import Tensor

from gonio.measuring.reading.entry import Entry, Stored

ROTATED = ".oft_"  # in the names of all tensors of such adapters
_PEFT = re.compile(r"(?:base_model\.model\.)?(.+)\.oft_(?:embedding_)?R(?:\.([^.]+))??(?:\.weight)?")
TERMS = 5  # of the Neumann series, where the configuration names no other number


@dataclass(frozen=True)
class Rotation:
    r"""An orthogonal adapter of one weight: block-diagonal R, :math:`W' = W R^\top`, from skew-symmetric matrices Q.

    :math:`R = (I - Q)(I + Q)^{-1}` up to sign, exactly or by a series; the series is orthogonal only approximately.

    Attributes:
        path: of the adapted layer. `name`: of the adapter where a layer may have several.
        entries: the upper triangles of the blocks, (blocks, b(b − 1)/2); one row if all blocks are equal.
        terms: of the Neumann series; 0 for the exact Cayley transform.
        radius: the largest norm of a block of Q (constrained OFT); None for no limit.
        turned: whether the weight is stored with its inputs first (`Conv1D`).

    References:
        [1] Z. Qiu et al., "Controlling text-to-image diffusion by orthogonal finetuning", 2023, arXiv 2306.07280,
        section 3. [2] Z. Qiu et al., "Orthogonal finetuning made scalable", 2025, arXiv 2506.19847 (the series).
    """

    path: str
    name: str
    entries: Stored
    terms: int
    radius: float | None = None
    turned: bool = False

    @property
    def size(self) -> int:
        """b: rows of a block."""
        return (1 + isqrt(1 + 8 * self.entries.shape[1])) // 2

    def blocks(self) -> Tensor:
        """The rotations, (blocks, b, b)."""
        packed = self.entries.load().float()
        rows, columns = torch.triu_indices(self.size, self.size, 1).unbind()
        skew = packed.new_zeros(len(packed), self.size, self.size)
        skew[:, rows, columns] = packed
        skew = skew - skew.mT
        if self.radius is not None:
            norms = torch.linalg.matrix_norm(skew, keepdim=True)
            limit = self.radius / sqrt(len(packed))
            skew = skew * (limit / norms.clamp_min(limit))
        one = torch.eye(self.size).expand_as(skew)
        return _series(skew, self.terms) if self.terms else torch.linalg.solve(one + skew, one - skew, left=False)

    def total(self, base: Entry) -> Tensor:
        """The base's weight with its inputs rotated."""
        weight = base.load() if base.load is not None else None
        if not isinstance(weight, Tensor):
            raise ValueError("the base has no values here")
        stored = weight.float().mT if self.turned else weight.float()
        filters, blocks = stored.flatten(1), self.blocks()
        if filters.shape[1] % self.size or len(blocks) not in (1, filters.shape[1] // self.size):
            found = f"{len(blocks)} blocks of {self.size}, the base has filters of length {filters.shape[1]}"
            raise ValueError(f"the adapter rotates {found}")
        turned = torch.einsum(
            "nrk,rck->nrc", filters.unflatten(1, (-1, self.size)), blocks.expand(filters.shape[1] // self.size, -1, -1)
        )
        made = turned.reshape(stored.shape)
        return made.mT if self.turned else made


def _series(skew: Tensor, terms: int) -> Tensor:
    """I + 2Q + 2Q² + … + Qᵗ with t = `terms` − 1, as peft sums it: 3 terms are 4."""
    total = torch.eye(skew.shape[-1]).expand_as(skew).clone()
    if terms < 3:
        return total + 2 * skew if terms == 2 else total
    power = skew
    for _ in range(max(terms, 4) - 2):
        total += 2 * power
        power = power @ skew
    return total + power


def rotations_in(stored: Mapping[str, Stored], config: Mapping[str, Any]) -> list[Rotation]:
    """The orthogonal adapters among these tensors.

    Args:
        config: of the adapter (`adapter_config.json`), or an empty mapping: then peft's defaults hold.
    """
    made = []
    for name, tensor in stored.items():
        match = _PEFT.fullmatch(name)
        if match is None or len(tensor.shape) != 2 or not _triangular(tensor.shape[1]):
            continue
        terms = config.get("num_cayley_neumann_terms", TERMS) if config.get("use_cayley_neumann", True) else 0
        radius = float(config.get("eps", 6e-5)) if config.get("coft") else None
        turned = bool(config.get("fan_in_fan_out"))
        made.append(Rotation(match[1], match[2] or "", tensor, int(terms), radius, turned))
    return made


def _triangular(count: int) -> bool:
    """Whether so many entries fill the upper triangle of a matrix."""
    root = isqrt(1 + 8 * count)
    return count > 0 and root * root == 1 + 8 * count


def entries_of_rotations(rotations: list[Rotation], base: Mapping[str, Entry]) -> list[Entry]:
    """For each adapter whose base is given the base's weight and the rotated one."""
    made: list[Entry] = []
    for rotation in rotations if base else ():
        end = f".{rotation.name}" if rotation.name else ""
        name, held = f"{rotation.path}.base_and_oft{end}", base.get(rotation.path)
        if held is None:
            made.append(Entry(name, "", None, None, f"the base has no weight {rotation.path}"))
        else:
            made += [held, replace(held, name=name, load=partial(rotation.total, held), notes=())]
    return made
