"""Rows of zeros at the end of a table fill a vocabulary up and are a remark; those of layers are dead filters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gonio
from catalog import seeded


def levels(source: dict[str, Tensor]) -> dict[str, str]:
    """The level of the finding on rows of zeros by path, which is the same in `check` and in `measure`."""
    checked = {f.path: f.level for f in gonio.check(source).findings if f.code == "G102"}
    assert checked == {f.path: f.level for f in gonio.measure(source).findings if f.code == "G102"}
    return checked


def with_zeros(first: int, last: int, seed: int = 0) -> Tensor:
    table = seeded(100, 16, seed=seed, dtype=torch.float32)
    table[first:last] = 0
    return table


@pytest.mark.parametrize(("first", "last", "level"), [(90, 100, "info"), (99, 100, "info"), (40, 50, "warn")])
def test_the_last_rows_of_a_table_are_a_remark(first: int, last: int, level: str) -> None:
    state = {"embed.weight": with_zeros(first, last), "head.weight": with_zeros(first, last, seed=1)}
    assert levels(state) == {"embed": level, "head": level}


def test_the_last_filters_of_a_layer_are_dead() -> None:
    stack = {f"layers.{i}.up.weight": with_zeros(90, 100 if i == 2 else 90, seed=i) for i in range(5)}
    state = {**stack, "fc.weight": with_zeros(95, 100), "fc.bias": torch.ones(100)}
    assert levels(state) == {"layers.2.up": "warn", "fc": "warn"}


def test_of_a_model_too() -> None:
    model = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 100))
    with torch.no_grad():
        model[0].weight[80:] = 0
        model[1].weight[80:] = 0
    found = {f.path: f.level for f in gonio.measure(model).findings if f.code == "G102"}
    assert found == {"0": "info", "1": "warn"}
