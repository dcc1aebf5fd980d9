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


@pytest.mark.parametrize("name", ["paths", "changes", "training", "doctor"])
def test_no_word_is_broken_on_a_phone(name: str, visit: Visit) -> None:
    page = visit(name, width=390)
    assert page.evaluate(BROKEN) == []


def test_a_broken_word_is_seen(visit: Visit) -> None:
    page = visit("paths", width=390)
    page.evaluate("document.querySelectorAll('wbr').forEach((one) => one.remove())")
    assert page.evaluate(BROKEN) != []


def test_the_texts_of_a_treatment_have_the_width_of_the_page(visit: Visit) -> None:
    page = visit("doctor", width=390)
    widths = page.locator("td[data-label=why]").evaluate_all("(cells) => cells.map((cell) => cell.clientWidth)")
    assert widths
    assert min(widths) > 300


def test_titles_are_written_as_they_are(visit: Visit) -> None:
    style = "getComputedStyle(document.querySelector('.over')).textTransform"
    assert visit("study", width=390).evaluate(style) == "none"
