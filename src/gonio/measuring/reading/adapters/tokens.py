"""Trained rows of an embedding: peft's trainable tokens."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gonio.measuring.reading.adapters import Adapter, AdapterConfig, Group, Unfit
from gonio.measuring.reading.entry import StoredTensor, TensorEntry
from gonio.messages import say


def adapters_of(group: Group, config: AdapterConfig, _: Mapping[str, StoredTensor]) -> list[Adapter]:
    """The adapter of an embedding some of whose rows were trained."""
    rows = group.parts.get("trainable_tokens_delta")
    if rows is None:
        return []
    indices = _indices(config, group.path)
    if indices is None or len(rows.shape) != 2 or len(indices) != rows.shape[0]:
        return [group.refused("tokens", "the places of its trained tokens are not known")]
    return [group.refused("tokens", config.refusal) if config.refusal else
            group.adapter("tokens", partial(_replaced, rows, indices))]  # fmt: skip


def _indices(config: AdapterConfig, path: str) -> list[int] | None:
    """The places of the rows: a list, or one for each layer by the end of its path."""
    given: Any = config.get("trainable_token_indices") or config.get("token_indices")
    if isinstance(given, Mapping):
        given = next((value for key, value in given.items() if f".{path}".endswith(f".{key}")), None)
    known = isinstance(given, list) and all(isinstance(i, int) and 0 <= i < 1 << 31 for i in given)
    return given if known else None


def _replaced(rows: StoredTensor, indices: list[int], weight: Tensor, base: TensorEntry) -> Tensor:
    trained = rows.load().to(weight)
    if weight.ndim != 2 or trained.shape[1] != weight.shape[1] or max(indices, default=0) >= len(weight):
        raise Unfit(say("its trained tokens do not fit the base's shape {found}", found=tuple(weight.shape)))
    return weight.index_copy(0, torch.tensor(indices, device=weight.device), trained)
