"""The change over depth: the tensors of one block of layers together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from gonio.measuring.changes.pair import TensorDifference

_BLOCK = re.compile(r"(.*?\.)?\d+(?=\.)")  # up to the first number: `model.layers.3`


@dataclass(frozen=True)
class DepthChange:
    """The tensors of one block together: those whose names begin alike up to the first number.

    Attributes:
        path: of the block; the first part of the name for a tensor without a number.
        relative: norm of the difference over the norm before; None from zero tensors.
        tensors: number of tensors compared.
        intruders: of all its weights.
    """

    path: str
    relative: float | None
    tensors: int
    intruders: int


def block_of(name: str) -> str:
    """The block of a tensor.

    Example:
        >>> from gonio.measuring.changes.profile import block_of
        >>> block_of("model.layers.3.mlp.up.weight"), block_of("head.weight")
        ('model.layers.3', 'head')
    """
    found = _BLOCK.match(name)
    return found[0] if found else name.split(".")[0]


def profile_of(tensors: Sequence[TensorDifference]) -> tuple[DepthChange, ...]:
    """The change of each block, in the order of its first tensor; tensors without known norms are left out."""
    blocks: dict[str, list[TensorDifference]] = {}
    for tensor in tensors:
        if tensor.norm is not None and tensor.change_norm is not None:
            blocks.setdefault(block_of(tensor.name), []).append(tensor)
    made = []
    for path, members in blocks.items():
        norm = sqrt(sum((t.norm or 0.0) ** 2 for t in members))
        moved = sqrt(sum((t.change_norm or 0.0) ** 2 for t in members))
        relative = moved / norm if norm else None
        made.append(DepthChange(path, relative, len(members), sum(t.intruders or 0 for t in members)))
    return tuple(made)
