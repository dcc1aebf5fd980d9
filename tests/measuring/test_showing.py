"""Measurements on the terminal, as a page, and exported; the JSON holds the keys and types that its page lists."""

from __future__ import annotations

import csv
import io
import json
import math
import pickle
import re
import sys
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from catalog import seeded
from gonio.errors import MissingExtraError
from gonio.measuring import Outline, TensorHeader, Tracker, difference, measure
from gonio.measuring.showing.columns import COLUMNS, KEPT, SIGNALS, number
from html_reader import Page
from lab.showing.test_page import PAYLOADS, TAGS


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=8), nn.Linear(8, 4))


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 200])
def test_the_table_keeps_to_the_width_of_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = str(measure(model()))
    assert max(map(len, text.splitlines())) <= width
    table, _, left_out = text.partition("not in ")
    assert ("align" in table) == (width >= 40)
    assert all((title in table) == (width >= 200) for title in ("Welch", "e.rank"))
    assert all((title in " ".join(left_out.split())) == (width < 200) for title in ("Welch", "e.rank"))


def test_without_findings_the_scope_of_the_rules_is_shown() -> None:
    plain, fed = measure(model()[:2]), measure(model()[:2], batch=torch.randn(2, 3, 8, 8))
    for found, said in ((plain, "outputs only with batch="), (fed, "dead units on the batch")):
        for text in (" ".join(str(found).split()), Page(found.to_html()).text):
            assert f"rank 1; {said}. Not visible here: whether the model is accurate" in text
    lines = str(measure({"w.weight": torch.zeros(2, 2)})).splitlines()
    assert lines[1] == "1 remark in 1 of 1 layer."
    assert lines[3].startswith("info  G101  w: every value is 0")
    assert not any("Not visible" in line for line in lines)


def test_foreign_names_are_shown_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    found = measure({"[bold]x[/bold].weight": torch.eye(3), "\x1b[31mred.weight": torch.eye(3)})
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system="truecolor")
    console.print(found)
    assert "\x1b[31m" not in console.file.getvalue()  # type: ignore[attr-defined]
    assert "[bold]x[/bold]" in str(found)


@pytest.mark.parametrize("payload", PAYLOADS)
def test_escaping_is_never_markup_on_the_page(payload: str) -> None:
    found = measure(
        {f"{payload}.weight": torch.zeros(2, 2), payload: "x", f"{payload}.other": torch.eye(3).to_sparse()}
    )
    for html, scripts in ((found.to_html(), 1), (found._repr_html_(), 0)):
        read = Page(html)
        assert read.names() <= TAGS
        assert (len(read.may_run()) if scripts else html.count("<script")) == scripts
        assert not {a for a in read.attributes() if a.startswith("on") or a == "src"}
        assert all(value.startswith("#") for value in read.values("href"))


def test_the_page_is_one_file_with_every_figure() -> None:
    found = measure(model())
    read = Page(found.to_html())
    assert len(read.may_run()) == 1
    assert {"0", "2", "3"} <= {text for tag, text in read.texts if tag in ("th", "span")}
    assert found.coverage in read.text
    assert all(a.get("aria-label") for tag, a in read.tags if tag == "svg")
    assert all(a.get("scope") for tag, a in read.tags if tag == "th")
    assert found.to_html() == measure(model()).to_html()
    assert "<html" not in found._repr_html_()


def test_two_parts_in_one_document_share_no_id() -> None:
    broken = model()
    with torch.no_grad():
        broken[0].weight[:2] = 0
    parts = [Page(measure(broken)._repr_html_()) for _ in range(2)]
    ids = [set(part.values("id")) for part in parts]
    assert ids[0]
    assert not ids[0] & ids[1]
    for part, own in zip(parts, ids, strict=True):
        linked = [value[1:] for value in part.values("href") if value.startswith("#")]
        assert linked
        assert set(linked) <= own


def test_the_data_is_versioned_strict_and_complete() -> None:
    made = model()
    with torch.no_grad():
        made[0].weight[0, 0, 0, 0] = float("inf")
    found = measure(made)
    read = json.loads(found.to_json())
    assert read == json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert [t["path"] for t in read["tensors"]] == [t.path for t in found.values()]
    conv = read["tensors"][0]
    assert (conv["nonfinite"], conv["alignment"]) == (1, found["0"].alignment)
    assert read["findings"][0]["code"] == "G001"


def test_the_csv_reads_back_and_no_cell_is_a_formula() -> None:
    found = measure({"=cmd.weight": torch.eye(3), "b.weight": torch.full((2, 5), 3.0)})
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [row["path"] for row in rows] == ["'=cmd", "b"]
    assert float(rows[1]["alignment"]) == found["b"].alignment
    assert rows[1]["shape"] == "2; 5"
    assert math.isclose(float(rows[0]["sigma_max"]), 1.0)


def test_the_markdown_table_is_a_table() -> None:
    text = measure({"a|b.weight": torch.eye(3), "<i>.weight": torch.zeros(2, 2)}).to_markdown()
    lines = [line.replace(r"\|", "") for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1
    assert "&lt;i&gt;" in text
    assert "**info G101**" in text


def test_measurements_compare_and_travel() -> None:
    found = measure(model())
    assert found == measure(model())
    assert pickle.loads(pickle.dumps(found)) == found
    assert dict(found.items()) == {t.path: t for t in found.tensors}
    assert found.get("nowhere") is None
    assert repr(found) == "<Measurements of Sequential: 3 layers, 0 findings>"
    assert repr(found["2"]) == "<2 (Conv2d): 8 filters of length 9>"
    assert repr(found["0"]).startswith("<0 (Conv2d): 8 filters of length 27, alignment ")
    assert repr(found["0.bias"]) == "<0.bias (Conv2d): a vector>"


def test_a_frame_has_a_row_per_tensor_and_the_columns_of_the_csv() -> None:
    found = measure(model())
    frame = found.to_frame()
    assert list(frame.columns) == next(csv.reader(io.StringIO(found.to_csv())))
    assert frame["path"].tolist() == [t.path for t in found.values()]
    assert frame["alignment"].iloc[0] == found["0"].alignment
    moved = difference(model(), model()[:1]).to_frame()
    assert moved["name"].tolist() == [t.name for t in found.values()]
    assert moved["status"].tolist() == ["equal"] * 2 + ["not compared"] * (len(found) - 2)


def test_columns_have_names_of_their_own_and_those_that_are_kept_exist() -> None:
    for columns, kept in ((COLUMNS, KEPT), (SIGNALS, ())):
        names = [column.name for column in columns]
        assert len(set(names)) == len(names)
        assert set(kept) <= set(names)


def test_a_frame_without_pandas_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Tracker(nn.Linear(3, 2), every=1)
    tracker.step()
    monkeypatch.setitem(sys.modules, "pandas", None)
    said = r"^to_frame\(\) needs the package 'pandas', which is not installed\. Install it with: pip install pandas$"
    for source in (measure(model()), difference(model(), model()), tracker):
        with pytest.raises(MissingExtraError, match=said):
            source.to_frame()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0"),
        (0.0123, "0.012"),
        (0.00123, "0.0012"),
        (-0.0457, "−0.046"),
        (0.314, "0.31"),
        (1.0, "1.00"),
        (31.27, "31.3"),
        (9120.0, "9120"),
        (2e-5, "2.0e−05"),
        (3e7, "3.0e+07"),
    ],
)
def test_figures_keep_two_digits_at_least(value: float | None, text: str) -> None:
    assert number(value) == text


def test_names_that_differ_in_the_middle_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    state = {f"base_model.model.model.layers.{i}.mlp.down_proj.lora.weight": seeded(9, 9, seed=i) for i in range(3)}
    lines = [line.split()[0] for line in str(measure(state)).splitlines() if "lora " in line]
    assert [line.endswith(f"layers.{i}.mlp.down_proj.lora") for i, line in enumerate(lines)] == [True] * 3


@pytest.mark.parametrize("names", [True, False])
def test_a_file_that_tells_no_filters_is_not_said_to_be_without_findings(names: bool) -> None:
    """The advice on names is given where a tensor is left out for its name."""
    found = measure({"a": torch.randn(4, *([3, 2] if names else [])), "b": torch.randn(3)})
    assert found.verdict.startswith("Nothing was measured")
    assert ("Call weights NAME.weight" in found.verdict) == names
    assert ("for the reasons in the last lines" in found.verdict) != names
    assert "dead" not in str(found)
    assert "dead" not in found.scope
    assert "No findings" not in str(found)


def test_a_file_of_weights_that_are_not_read_says_so() -> None:
    found = measure({"a.weight": torch.ones(4, 4, dtype=torch.int8), "a.bias": torch.randn(4)})
    assert found.verdict == "Nothing was measured: the weights are of kinds that are not read, as the last lines say."
    assert "whose scale is not known here" in found.coverage


def test_kinds_of_tensors_without_filters_that_are_not_shown_are_counted() -> None:
    state = {f"{i}.weight": seeded(8, 8, seed=i).to(torch.int8) for i in range(6)}
    state |= {f"{i}.weight_scale": torch.ones(8, 1) for i in range(6)}
    assert measure(state).coverage.endswith("1 part of the quantised 3.weight and 2 more). Skipped: none.")


def test_a_finding_on_a_vector_is_named_at_the_chart() -> None:
    """A norm has no bar that could be coloured."""
    state = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).state_dict()
    page = measure(state).to_html()
    assert "Without a bar" not in page
    state["1.running_var"][2] = -1
    page = measure(state).to_html()
    place = re.search(
        r'Without a bar, because they have no filters: 1\.running_var<a class="badge error" href="#(\w+)">', page
    )
    assert place is not None
    assert f'<li id="{place[1]}">' in page


def test_every_row_of_a_large_table_is_found_at_once() -> None:
    """Of 4000 rows each is asked for its path a few times, and not once for every other row."""
    reads = 0

    class Header(TensorHeader):
        def __getattribute__(self, name: str) -> Any:
            nonlocal reads
            reads += name in ("path", "name")
            return super().__getattribute__(name)

    shown = {"kind": "", "shape": (), "dtype": "float32", "entries": 1, "bytes": 4}
    rows = tuple(Header(name=f"{i}.weight", path=f"{i}", **shown) for i in range(4000))
    table = Outline("m", rows)
    assert [row.entries for row in table.values()] == [1] * 4000
    assert table["17.weight"] is table["17"] is rows[17]
    assert reads < 20 * 4000
    assert 17 not in table
