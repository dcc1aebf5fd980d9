"""Damages of many kinds in every format are named, healthy files of many families are not, and the page says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

from checking import counts, plants
from checking.containers import FORMATS, NEEDS, weights
from checking.plants import KINDS, cases, found, named

QUICK = {*((kind, planted.formats[at % len(planted.formats)]) for at, (kind, planted) in enumerate(KINDS.items())),
         *(("NaN", form) for form in FORMATS)}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "form"), [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in cases()]
)
def test_a_planted_damage_is_named(kind: str, form: str, tmp_path: Path) -> None:
    if form in NEEDS:
        pytest.importorskip(NEEDS[form])
    assert named(kind, form, 0, tmp_path) == ""


def test_a_damage_that_is_none_and_one_of_another_kind_are_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = plants.Kind(["safetensors"], frozenset({"G001"}), lambda state, draw: None)
    other = plants.Kind(["safetensors"], frozenset({"G203"}), KINDS["NaN"].values)
    elsewhere = plants.Kind(["safetensors"], frozenset({"G001"}), KINDS["NaN"].values, place="layers.5")
    for number, kind in enumerate((nothing, other, elsewhere)):
        monkeypatch.setitem(plants.KINDS, "control", kind)
        assert named("control", "safetensors", 0, tmp_path / str(number)).startswith("found [")


def test_an_alarm_in_a_healthy_file_would_be_counted(tmp_path: Path) -> None:
    state = weights(0)
    state["layers.1.up.weight"] *= 100
    save_file(state, tmp_path / "m.safetensors")
    assert found(tmp_path / "m.safetensors")[1] == {("G709", "layers.1.up")}


def test_the_page_has_the_committed_counts() -> None:
    made = json.loads(counts.RESULT.read_text(encoding="utf-8"))
    assert set(made["damages"]) == set(KINDS)
    assert {(kind, form) for kind, forms in made["damages"].items() for form in forms} == set(cases())
    assert all(right == planted for forms in made["damages"].values() for right, planted in forms.values())
    assert sum(planted for forms in made["damages"].values() for _, planted in forms.values()) >= 400
    assert (made["healthy"]["alarms"], made["healthy"]["families"] >= 12) == (0, True)
    assert sum(made["healthy"]["files"].values()) >= 60
    page = counts.PAGE.read_text(encoding="utf-8")
    assert all(page.count(mark) == 1 for mark in counts.MARKS)
    assert counts.with_table(page) == page, "run make planted"


@pytest.mark.slow
def test_the_committed_counts_are_those_of_today() -> None:
    for need in NEEDS.values():
        pytest.importorskip(need)
    assert counts.counts() == json.loads(counts.RESULT.read_text(encoding="utf-8"))
