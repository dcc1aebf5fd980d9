"""Bands of trained networks: architectures count once, and the package has the bands of the results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("sklearn")

from benchmarks import usual_networks
from benchmarks.usual_networks import (
    BANDS,
    FIGURES,
    LEAST,
    RESULT,
    bands,
    content_of,
    distinct,
    held_out,
    judged,
    table,
)

KIND = "matrix 9 to 32"


def row(architecture: str, values: list[float | None], source: str = "shipped") -> dict[str, object]:
    layers = {KIND: {name: list(values) for name in FIGURES}}
    return {"source": source, "origin": "p 1", "network": architecture, "architecture": architecture, "layers": layers}


def test_an_architecture_of_many_networks_and_layers_counts_once() -> None:
    rows = [row("a", [100.0] * 300), row("a", [101.0] * 300), *(row(f"b{i}", [float(i)]) for i in range(9))]
    made = bands(rows)[KIND]
    assert (made.networks, made.architectures, made.layers) == (11, 10, 609)
    assert made.figures["alignment"][2] == pytest.approx(4.5)


def test_too_few_architectures_give_no_band() -> None:
    rows = [row(f"a{i}", [1.0, None]) for i in range(LEAST - 1)]
    assert bands(rows, LEAST) == {}
    assert set(bands([*rows, row("last", [2.0])], LEAST)) == {KIND}
    without = bands([*rows, row("last", [None])], LEAST)[KIND]  # a kind that is known, with no figure that is
    assert without.figures == {}


def test_networks_with_the_same_figures_are_one_in_whatever_order_their_layers_are() -> None:
    rows = [row("a", [1.0, 2.0]), row("b", [2.0, 1.0]), row("c", [1.0, 3.0])]
    assert [one["network"] for one in distinct(rows)] == ["a", "c"]


def test_what_is_held_out_is_judged_by_the_others_alone() -> None:
    rows = [row(f"a{i}", [float(i)]) for i in range(20)] + [row("far", [1000.0] * 50)]
    inside = held_out(rows, "layers", "shipped")
    assert set(inside) == set(FIGURES)
    assert inside["alignment"] == pytest.approx(
        19 / 21
    )  # of those of the ends, 0 is below the 5th percentile of others
    assert held_out(rows, "fresh", "shipped") == {}


def test_a_measurement_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usual_networks, "PART", tmp_path / "part.jsonl")
    trained: list[int] = []

    def found(known: dict[tuple[str, int], object], last: int = 3) -> Iterator[tuple[tuple[str, int], object]]:
        for i in range(last):
            if ("a", i) not in known:
                trained.append(i)
            yield ("a", i), known.get(("a", i), row(f"a{i}", [1.0]) if i else None)

    assert len(usual_networks.resumed(partial(found, last=2))) == 1  # the first one has not learnt
    assert len(usual_networks.resumed(found)) == 2
    assert trained == [0, 1, 2]


def test_the_package_has_the_bands_of_the_results() -> None:
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    assert content_of(found) == BANDS.read_text(encoding="utf-8")
    names = {(one["origin"], one["network"], one.get("score")) for one in found["networks"]}
    assert len(names) > 60
    assert "Shipped: " in table(found)


@pytest.mark.slow
def test_the_coverage_is_that_of_the_results() -> None:
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    assert {t: {n: round(s, 3) for n, s in of.items()} for t, of in judged(found["networks"]).items()} == found[
        "held_out"
    ]
    shipped, fresh = found["held_out"]["shipped, inside"], found["held_out"]["before training, inside"]
    assert min(shipped.values()) > 0.75
    assert fresh["sigma_ratio"] < shipped["sigma_ratio"] - 0.2
