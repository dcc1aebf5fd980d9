"""Tables of pages that are written from committed results equal what the results give."""

from __future__ import annotations

import json
import re
from types import ModuleType

import pytest

pytest.importorskip("sklearn")

from benchmarks import gains, other_tools, quantisation, self_orthogonality_strengths


@pytest.mark.parametrize("module", [gains, self_orthogonality_strengths], ids=lambda m: m.__name__)
def test_the_table_is_that_of_the_results(module: ModuleType) -> None:
    page = module.PAGE.read_text(encoding="utf-8")
    assert all(page.count(mark) == 1 for mark in module.MARKS)
    assert module.with_table(page) == page


def test_the_table_beside_other_tools_is_that_of_the_results() -> None:
    for page, words in other_tools.PAGES.items():
        text = page.read_text(encoding="utf-8")
        assert all(text.count(mark) == 1 for mark in other_tools.MARKS)
        assert other_tools.with_table(text, words) == text
        assert other_tools.with_table(text.replace("gonio 0.1.0 |", "gonio 9 |"), words) == text


def test_gonio_warns_of_the_planted_faults_as_the_table_says() -> None:
    row = json.loads(other_tools.RESULTS.read_text(encoding="utf-8"))["tools"]["gonio"]
    healthy, _ = other_tools.by_gonio(other_tools.network())
    warned = {name: other_tools.by_gonio(other_tools.network(plant))[0] != healthy for name, plant in
              other_tools.FAULTS.items()}  # fmt: skip
    assert warned == {name: row[name] == "warns" for name in other_tools.FAULTS}
    assert row["training"] == other_tools.tracked()
    assert row["file"] == other_tools.reads_a_file(other_tools.by_gonio)


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_a_readme_has_at_most_110_lines(name: str) -> None:
    text = (other_tools.ROOT / name).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 110
    pictures = re.findall(r'\b(?:src|srcset)="([^"]+)"', text)
    assert len(pictures) == 2
    assert all((other_tools.ROOT / picture).is_file() for picture in pictures)


def test_a_changed_result_makes_the_page_stale() -> None:
    page = gains.PAGE.read_text(encoding="utf-8")
    assert gains.with_table(page.replace("| tanh | small, 1 | ≈ ", "| tanh | small, 1 | ≈ 1")) == page


def test_the_default_gain_of_init_is_the_one_that_trains_best_in_deep_tanh_networks() -> None:
    cells = json.loads(gains.RESULT.read_text(encoding="utf-8"))["cells"]
    for name in ("tanh", "hardtanh"):
        for depth in (20, 50, 100):
            others = [cells[f"{name} {depth} {kind}"]["accuracy"] for kind in gains.gains_of(name) if kind != "small"]
            assert cells[f"{name} {depth} small"]["accuracy"] > max(others)


def test_what_rounding_to_int4_costs_is_regained_and_nothing_gets_worse() -> None:
    models = json.loads(quantisation.RESULT.read_text(encoding="utf-8"))["models"]
    assert models.keys() == set(quantisation.MODELS)
    costly = 0
    for cell in [cell for found in models.values() for cell in found.values()]:
        plain, (_, loss) = cell["losses"][""][0], quantisation.kept(cell)
        assert loss <= plain
        if quantisation.cost(cell, plain) > quantisation.MARGIN:
            assert plain - loss >= 0.5 * (plain - cell["float"])
            costly += 1
    assert costly > 10


def test_a_way_is_kept_where_it_halves_the_cost_on_calibration_data() -> None:
    cell = {
        "float": 1.0,
        "seen float": 1.0,
        "losses": {"": [1.2], "fold_": [1.1]},
        "seen": {"": [1.2], "fold_": [1.11]},
    }
    assert quantisation.kept(cell) == ("", 1.2)
    cell["seen"] = {"": [1.2], "fold_": [1.09]}
    assert quantisation.kept(cell) == ("fold_", 1.1)
