"""Benchmarks over time: what counts as slower, and the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks import history
from benchmarks.history import Entry, append, entry_of, grown, joined, page, read, series, write
from benchmarks.results import FOLDER, Ratio
from benchmarks.results import read as read_report

CONDITIONS = {"machine": {"processor": "A"}, "versions": {"torch": "2"}, "allocator": "tuned", "threads": 2}


def entry(commit: str, median: float, *, half: float = 0.01, usual: float = 2.0, **changes: object) -> Entry:
    ratios = {
        "t · case, FB": {"gonio": Ratio(median, median - half, median + half), "usual": Ratio(usual, usual, usual)}
    }
    return replace(Entry("topic", commit, "2026-01-01", CONDITIONS, ratios), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("after", "found"),
    [
        (entry("b", 1.2), True),
        (entry("b", 1.04), False),  # less than 5 %
        (entry("b", 1.2, half=0.25), False),  # the quartiles overlap
        (entry("b", 1.2, usual=2.4), False),  # the machine: the other candidates grew as much
        (entry("b", 1.2, usual=1.0), True),  # that others became faster changes nothing
        (entry("b", 0.8), False),
        (entry("b", 1.2, conditions={**CONDITIONS, "threads": 1}), False),  # not comparable
        (entry("b", 1.2, topic="another"), False),
        (entry("b", 1.2, ratios={"t · new, FB": {"gonio": Ratio(9, 9, 9)}}), False),
    ],
)
def test_a_row_is_slower_beyond_its_spread_and_beyond_what_moved_the_others(after: Entry, found: bool) -> None:
    assert bool(grown([entry("a", 1.0), after])) == found


def test_a_finding_names_row_figures_and_commits() -> None:
    (slower,) = grown([entry("a", 1.0), entry("b", 1.2, usual=2.1)])
    assert str(slower) == (
        "topic: t · case, FB · gonio: 1.00 (0.99–1.01) at a, 1.20 (1.19–1.21) at b; the other candidates ×1.05"
    )


def test_only_the_last_two_measurements_are_compared() -> None:
    assert grown([entry("a", 1.0), entry("b", 1.5), entry("c", 1.5)]) == []
    other = {**CONDITIONS, "machine": {"processor": "B"}}
    mixed = [entry("a", 1.0), entry("a", 1.0, conditions=other), entry("b", 1.5)]
    assert [len(line) for line in series(mixed)] == [2, 1]
    assert [slower.commits for slower in grown(mixed)] == [("a", "b")]


def test_a_report_is_added_once_per_commit_and_survives_the_file(tmp_path: Path) -> None:
    report, file = read_report(FOLDER / "scale_shift.json"), tmp_path / "history.jsonl"
    write([entry("a", 1.23456)], file=file)
    append(report, file=file)
    append(report, file=file)
    first, second = read(file)
    assert first.ratios["t · case, FB"]["gonio"].median == 1.235
    again = entry_of(report, commit=second.commit, day=second.day)
    assert second.conditions == again.conditions
    assert list(second.ratios) == list(again.ratios)


def test_the_page_shows_what_can_be_joined(tmp_path: Path) -> None:
    alone = entry("c", 1.0, topic="alone")
    conditions = {**CONDITIONS, "machine": {"processor": "A|<b>"}}
    entries = [entry("a", 1.0, conditions=conditions), entry("b", 1.2, conditions=conditions), alone]
    assert [line[0].topic for line in joined(entries)] == ["topic"]
    text = page(entries)
    assert "## alone" not in text
    assert "1.00 (0.99–1.01) at a" in text
    assert "No row grew" in page([alone])
    history.draw(joined(entries)[0], tmp_path / "one.svg")
    drawn = (tmp_path / "one.svg").read_text(encoding="utf-8")
    assert "t · case, FB · gonio" in drawn
    assert "usual" not in drawn


def test_the_committed_page_is_that_of_the_committed_history() -> None:
    entries = read()
    assert history.PAGE.read_text(encoding="utf-8") == page(entries)
    assert {path.name for path in history.PICTURES.glob("history-*.svg")} == {
        f"history-{at}.svg" for at in range(len(joined(entries)))
    }
