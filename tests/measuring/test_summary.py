"""Long tables are summarised in a terminal and on a page; exports have everything."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import gonio
from catalog import seeded
from gonio.measuring import Measurements
from gonio.measuring.changes.difference import Differences
from gonio.measuring.changes.several import Changes
from gonio.measuring.reading.order import pattern_of
from gonio.measuring.showing.table import GROUPS, PAGE, TERMINAL, Medium, grouped, rows_shown
from gonio.pages.charts import BARS, Lane, runs
from html_reader import Page

COUNT = 1100
ODD = "layers.211.up"  # of which half of the filters are 0


def state(shift: float = 0.0) -> dict[str, Tensor]:
    made = {f"layers.{i}.{'up' if i % 2 else 'down'}.weight": seeded(8, 4, seed=i) for i in range(COUNT)}
    made[f"{ODD}.weight"][:4] = 0
    return {name: value + shift * seeded(8, 4, seed=i + 5000) for i, (name, value) in enumerate(made.items())}


@cache
def measured() -> Measurements:
    return gonio.measure(state())


@cache
def compared() -> Differences:
    return gonio.measuring.difference(state(), state(0.01))


@pytest.mark.parametrize("make", [measured, compared], ids=["measure", "difference"])
def test_a_terminal_shows_groups_and_what_stands_out(make) -> None:
    found = make()
    text = str(found)
    assert len(text) < 12_000
    assert "layers.*.up " in text
    assert f"Of {COUNT:,} " in text
    shown = [line for line in text.splitlines() if re.match(r"layers\.\d", line)]
    assert len(shown) == TERMINAL.most
    assert make is compared or any(line.startswith(ODD) for line in shown)
    assert len(found.to_csv().splitlines()) == COUNT + 1
    assert len(json.loads(found.to_json())["tensors"]) == COUNT


@pytest.mark.parametrize("make", [measured, compared], ids=["measure", "difference"])
def test_a_page_has_rows_for_what_stands_out(make) -> None:
    page = make().to_html()
    assert len(page) < 600_000
    assert "layers.*.down" in Page(page).text
    assert page.count('<tr data-i="') == PAGE.most * (2 if make is measured else 1)  # norms and angles, and spectra
    assert ODD in page or make is compared


def test_findings_of_layers_without_a_row_have_no_link() -> None:
    broken = {name: torch.zeros_like(value) if i % 2 else value for i, (name, value) in enumerate(state().items())}
    found = gonio.measure(broken)
    page = found.to_html()
    assert len(found.findings) > PAGE.most
    links = {link.partition('"')[0] for link in page.split('href="#')[1:]}
    ids = {one.partition('"')[0] for one in page.split(' id="')[1:]}
    assert links <= ids
    assert "more places, which the page and the JSON list" in str(found)
    assert len(str(found)) < 12_000


def test_short_tables_are_shown_whole() -> None:
    few = dict(list(state().items())[: TERMINAL.longest])
    found = gonio.measure(few)
    assert sum(line.startswith("layers.") for line in str(found).splitlines()) == TERMINAL.longest
    assert "layers.*" not in str(found)


def test_what_stands_out_is_chosen_by_findings_then_by_score() -> None:
    rows = [measured()[f"layers.{i}.{'up' if i % 2 else 'down'}"] for i in range(6)]
    scores = dict(zip((row.path for row in rows), (1.0, 5.0, 2.0, 4.0, 0.0, 3.0), strict=True))
    told: dict[str, Any] = {"first": {"layers.4.down"}, "figures": (), "noun": "layers", "by": "the scores"}
    _, chosen, _ = rows_shown(rows, Medium(3, 3), score=lambda row: scores[row.path], **told)
    assert [row.path for row in chosen] == ["layers.1.up", "layers.3.up", "layers.4.down"]


def test_groups_have_the_median_and_the_range_of_known_figures() -> None:
    rows = list(measured().layers[:6:2])  # of one group
    values = dict(zip((row.path for row in rows), (3.0, None, 1.0), strict=True))
    made = grouped(rows, [("a", "b", lambda row: values[row.path]), ("none", "b", lambda row: None)])
    assert made.rows == (("layers.*.down", ("3", "2.0 (1.0 to 3.0)", "–")),)
    assert pattern_of("a1.b22c.w") == "a*.b*c.w"
    many = grouped([rows[0]] * (GROUPS + 5), [])
    assert (len(many.rows), many.omitted) == (1, 0)


@pytest.mark.parametrize("count", [0, 1, BARS, BARS + 1, 20_000])
def test_bars_cover_every_layer_once(count: int) -> None:
    made = runs(count)
    assert len(made) <= BARS
    assert [i for run in made for i in run] == list(range(count))


def test_a_binned_lane_has_medians_and_whole_ranges() -> None:
    lane = Lane(
        "norm", "", [1.0, None, 5.0, 3.0, 4.0], [(0.0, 2.0), None, (4.0, 6.0), (2.0, 9.0), None], others=[[2.0] * 5]
    )
    binned = lane.binned([range(3), range(3, 5)])
    assert list(binned.middles) == [3.0, 3.5]
    assert list(binned.ranges) == [(0.0, 6.0), (2.0, 9.0)]
    assert [list(other) for other in binned.others] == [[2.0, 2.0]]


# --- several changes of one base --------------------------------------------------------------------------


@cache
def several() -> Changes:
    models = [state(0.01), state(0.02)]
    models[1][f"{ODD}.weight"] = state()[f"{ODD}.weight"] - 0.01 * seeded(8, 4, seed=5211)  # cosine −1 with the first
    return gonio.measuring.changes(state(), *models)


def test_a_terminal_shows_the_changes_that_agree_least() -> None:
    text = str(several())
    assert len(text) < 14_000
    assert "layers.*.up " in text
    assert f"Of {COUNT:,} tensors, the {TERMINAL.most} that stand out" in text
    shown = [line for line in text.splitlines() if re.match(r"layers\.\d", line)]
    assert len(shown) == TERMINAL.most
    assert shown[0].startswith(ODD)
    assert "all tensors" in text
    assert len(several().to_csv().splitlines()) >= COUNT


def test_a_page_of_several_changes_is_bounded() -> None:
    page = several().to_html()
    assert len(page) < 900_000
    assert "layers.*.down" in Page(page).text
    assert f"{COUNT - PAGE.most} more are in the JSON." in Page(page).text  # blocks of each model
    assert len(re.findall(r'<th scope="row">layers\.\d+</th>', page)) == 2 * PAGE.most
    assert len(json.loads(several().to_json())["tensors"]) == COUNT


def test_blocks_and_intruders_of_one_change_are_bounded_and_it_is_said() -> None:
    page = compared().to_html()
    assert f"{COUNT - PAGE.most} more are in the JSON." in Page(page).text
    assert len(re.findall(r'<th scope="row">layers\.\d+</th>', page)) == PAGE.most
