"""Tables of positions: neighbouring rows are alike, which is no collapse; the order of rows tells it, and no name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from catalog import seeded
from gonio.geometry.pairs import neighbour_ratio
from gonio.measuring import measure
from gonio.measuring.reading.entry import NOTES

COLLAPSED = {"G201", "G202", "G301"}


def positions(count: int = 32, dim: int = 64, *, noise: float = 0.2, seed: int = 0) -> Tensor:
    """Smooth curves of a few slow waves, as trained tables of positions are, and noise."""
    steps = torch.linspace(0, 1, count)[:, None]
    waves = torch.cat([torch.cos(torch.pi * k * steps) / (1 + k) ** 2 for k in range(1, 5)], 1)
    curves = waves @ seeded(4, dim, seed=seed)
    return curves + noise * curves.std() * seeded(count, dim, seed=seed + 1)


def shuffled(table: Tensor) -> Tensor:
    return table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]


def collapsed(count: int = 32, dim: int = 64, *, signs: bool = False) -> Tensor:
    """Rows of one direction, which is what the rules are for."""
    along = torch.ones(count) if not signs else seeded(count, seed=5).sign()
    return along[:, None] * seeded(dim, seed=3) + 0.1 * seeded(count, dim, seed=4)


def embedding(table: Tensor) -> nn.Embedding:
    return nn.Embedding.from_pretrained(table, freeze=False)


def codes(source: nn.Module | dict[str, Tensor]) -> set[str]:
    return {finding.code for finding in measure(source).findings}


@pytest.mark.parametrize("size", [(24, 32), (32, 64), (128, 48), (1024, 96)])
@pytest.mark.parametrize("seed", range(3))
def test_neighbours_that_are_alike_are_no_collapse(size: tuple[int, int], seed: int) -> None:
    table = positions(*size, seed=seed)
    assert codes({"a.weight": shuffled(table)}) & COLLAPSED  # what would be found
    for source in (nn.ModuleDict({"a": embedding(table)}), {"a.weight": table}):
        measured = measure(source)
        assert not measured.findings
        assert NOTES["ordered"] in measured["a"].notes


@pytest.mark.parametrize(
    "table", [shuffled(positions()), collapsed(), collapsed(signs=True), collapsed(300, 16, signs=True)]
)
def test_what_has_no_order_is_found(table: Tensor) -> None:
    for source in (embedding(table), {"a.weight": table}):
        assert codes(source) & COLLAPSED


def test_a_layer_is_no_table() -> None:
    table = positions()
    linear = nn.Linear(64, 32)
    with torch.no_grad():
        linear.weight.copy_(table)
    assert codes(linear) & COLLAPSED
    assert codes({"a.weight": table, "a.bias": torch.zeros(32)}) & COLLAPSED
    assert codes({f"layers.{i}.weight": positions(seed=i) for i in range(4)}) & COLLAPSED  # one in each layer


def test_tables_of_one_shape_are_measured_together_and_alike() -> None:
    tables = {f"{name}.weight": positions(seed=seed) for seed, name in enumerate("abc")}
    tables["c.weight"] = shuffled(tables["c.weight"])
    measured = measure(tables)
    assert [NOTES["ordered"] in measured[name].notes for name in "abc"] == [True, True, False]


def test_equal_rows_of_a_table_in_order_are_found() -> None:
    table = positions()
    table[20] = table[3]
    assert codes(embedding(table)) == {"G203"}


def test_the_ratio_is_that_of_its_formula() -> None:
    table = positions(40, 8)
    table[7] = 0
    unit = nn.functional.normalize(table[table.norm(dim=1) > 0].double(), dim=1)
    cosines = unit @ unit.mT
    every = cosines[~torch.eye(len(unit), dtype=torch.bool)]
    ratio, deviation = neighbour_ratio(table, float(every.square().mean()))
    assert ratio == pytest.approx(float((1 - cosines.diagonal(1).mean()) / (1 - every.mean())), rel=1e-5)
    drawn = torch.stack(
        [
            (1 - cosines[order][:, order].diagonal(1).mean()) / (1 - every.mean())
            for order in (torch.randperm(len(unit), generator=torch.Generator().manual_seed(k)) for k in range(500))
        ]
    )
    assert float(drawn.mean()) == pytest.approx(1, abs=0.05)
    assert 0.5 < float(drawn.std()) / deviation < 1.1  # not larger: the pairs of a row are not independent
    assert neighbour_ratio(torch.ones(5, 3), 1.0)[0] == 1
    assert neighbour_ratio(torch.zeros(5, 3), 0.0)[0] == 1
