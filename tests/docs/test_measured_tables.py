"""Tables of pages that are written from committed results equal what the results give."""

from __future__ import annotations

from types import ModuleType

import pytest

pytest.importorskip("sklearn")

from benchmarks import gains, self_orthogonality_strengths


@pytest.mark.parametrize("module", [gains, self_orthogonality_strengths], ids=lambda m: m.__name__)
def test_the_table_is_that_of_the_results(module: ModuleType) -> None:
    page = module.PAGE.read_text(encoding="utf-8")
    assert all(page.count(mark) == 1 for mark in module.MARKS)
    assert module.with_table(page) == page


def test_a_changed_result_makes_the_page_stale() -> None:
    page = gains.PAGE.read_text(encoding="utf-8")
    assert gains.with_table(page.replace("| tanh | small, 1 | ≈ ", "| tanh | small, 1 | ≈ 1")) == page


def test_the_default_gain_of_init_is_the_one_that_trains_best_in_deep_tanh_networks() -> None:
    import json

    cells = json.loads(gains.RESULT.read_text(encoding="utf-8"))["cells"]
    for name in ("tanh", "hardtanh"):
        for depth in (20, 50, 100):
            others = [cells[f"{name} {depth} {kind}"]["accuracy"] for kind in gains.gains_of(name) if kind != "small"]
            assert cells[f"{name} {depth} small"]["accuracy"] > max(others)
