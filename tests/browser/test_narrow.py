"""What a phone shows: whole words, and figures that are not squeezed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Visit = Callable[..., Any]
BROKEN = """() => {
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode, shown = text.parentElement;
    if (!shown.checkVisibility() || shown.closest("thead, script, style")) continue;
    for (const match of text.data.matchAll(/[A-Za-z0-9]{3,16}/g)) {
      const range = document.createRange();
      range.setStart(text, match.index);
      range.setEnd(text, match.index + match[0].length);
      const lines = [...range.getClientRects()];
      if (lines.length > 1 && lines.at(-1).top - lines[0].top > 3) found.push(match[0]);
    }
  }
  return found;
}"""


@pytest.mark.parametrize("name", ["measurements", "chinese", "paths", "changes", "training", "doctor"])
def test_no_word_is_broken_on_a_phone(name: str, visit: Visit) -> None:
    page = visit(name, width=390)
    assert page.evaluate(BROKEN) == []


def test_a_broken_word_is_seen(visit: Visit) -> None:
    page = visit("paths", width=390)
    page.evaluate("document.querySelectorAll('wbr').forEach((one) => one.remove())")
    narrow = "document.querySelectorAll('.figures th > button').forEach((one) => { one.style.maxWidth = '5em'; })"
    page.evaluate(narrow)
    assert page.evaluate(BROKEN) != []


def test_the_texts_of_a_treatment_have_the_width_of_the_page(visit: Visit) -> None:
    page = visit("doctor", width=390)
    widths = page.locator("td[data-label=why]").evaluate_all("(cells) => cells.map((cell) => cell.clientWidth)")
    assert widths
    assert min(widths) > 300


def test_titles_are_written_as_they_are(visit: Visit) -> None:
    style = "getComputedStyle(document.querySelector('.over')).textTransform"
    assert visit("study", width=390).evaluate(style) == "none"


def test_all_sections_and_the_ends_of_the_depth_can_be_read_on_a_phone(visit: Visit) -> None:
    page = visit("measurements", width=390)
    ends = page.locator("nav a").evaluate_all("(links) => links.map((link) => link.getBoundingClientRect().right)")
    assert len(ends) > 4
    assert max(ends) <= 390
    assert page.locator(".stages li:visible").all_inner_texts() == ["stem", "head"]


def test_a_long_name_takes_few_lines(visit: Visit) -> None:
    page = visit("paths", width=390)
    lines = "(names) => names.map((name) => name.clientHeight / parseFloat(getComputedStyle(name).lineHeight))"
    assert max(page.locator("#angles tbody th > button").evaluate_all(lines)) < 3.5


def test_the_table_of_norms_fits_in_a_window_of_1200(visit: Visit) -> None:
    page = visit("measurements", width=1200)
    width = "(box) => box.scrollWidth - box.clientWidth"
    assert page.locator("#angles .scroll").evaluate(width) == 0
    name, shape = (page.locator(f"#angles tr:has(.badge) {cell}").first for cell in ("th .badge:last-child", "td"))
    gap = """(cell) => {
      const range = document.createRange();
      range.selectNodeContents(cell);
      return range.getBoundingClientRect().left;
    }"""
    assert name.evaluate("(badge) => badge.getBoundingClientRect().right") + 4 < shape.evaluate(gap)


def test_names_of_adapters_break_at_dots_and_leave_the_types_their_room(visit: Visit) -> None:
    page = visit("adapter", width=1280)
    width = "(box) => box.scrollWidth - box.clientWidth"
    assert page.locator("#angles .scroll").evaluate(width) == 0
    lines = "(names) => names.map((name) => name.clientHeight / parseFloat(getComputedStyle(name).lineHeight))"
    assert max(page.locator("#angles tbody th > button").evaluate_all(lines)) < 2.5
    assert max(page.locator("#spectra tbody th > button").evaluate_all(lines)) < 1.5
    assert page.evaluate(BROKEN) == []
    kind = page.locator("#angles tbody td.text").first
    assert kind.inner_text() == "factor of an adapter"
    assert kind.evaluate("(cell) => cell.getBoundingClientRect().right") <= 1280


def test_the_findings_begin_in_the_first_screen(visit: Visit) -> None:
    for name in ("measurements", "adapter", "differences"):
        page = visit(name, width=1280)
        assert page.locator("#findings h2").bounding_box()["y"] < 600
        assert page.locator("#findings").bounding_box()["y"] < page.locator("#map").bounding_box()["y"]


def test_the_line_of_no_difference_does_not_cross_names(visit: Visit) -> None:
    page = visit("study", width=1200)
    chart = page.locator("#costs figure svg, #costs svg").first
    crossed = """(svg) => {
      const names = [...svg.querySelectorAll("text[text-anchor=start]")].map((text) => text.getBoundingClientRect());
      const lines = [...svg.querySelectorAll("path[stroke*=muted]")].map((line) => line.getBoundingClientRect());
      const inside = (line, name) => line.left < name.right && line.right > name.left
        && line.top < name.bottom - 2 && line.bottom > name.top + 2;
      return [names.length, lines.length, lines.filter((line) => names.some((name) => inside(line, name))).length];
    }"""
    names, lines, crossing = chart.evaluate(crossed)
    assert names
    assert lines
    assert crossing == 0
