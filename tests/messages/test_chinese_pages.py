"""A page in Chinese has no sentence, no title of a column and no label of a chart in English."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

import gonio
from browser.pages import PAGES, claimed
from gonio.lab.claims import load_claims
from html_reader import Page

CHINESE = re.compile(r"[\u4e00-\u9fff]")
WORDS = re.compile(r"[a-z]{2,}(?: [a-z]{2,}){2,}")  # three words, as no name of a layer, recipe or command has
KINDS = ("measurements", "differences", "changes", "training", "widths", "study", "adapter", "doctor")
# Texts of the samples, not of gonio.
SAMPLES = {"A reason.", "One test image is 0.28 points."}


def english(html: str) -> set[str]:
    """The texts of a page, and what it tells a screen reader, that are English sentences or titles."""
    page = Page(html)
    texts = [text for tag, text in page.texts if tag not in ("style", "script", "code", "pre", "title")]
    every = [" ".join(text.split()) for text in (*texts, *page.values("aria-label"))]
    return {text for text in every if WORDS.search(text) and not CHINESE.search(text)} - SAMPLES


def labels(html: str) -> list[str]:
    """The texts in the charts of a page."""
    return [text for tag, text in Page(html).texts if tag == "text" and re.search(r"[A-Za-z]{3}", text)]


@pytest.mark.parametrize("name", KINDS)
def test_a_page_has_no_english_sentence(name: str) -> None:
    with gonio.language("zh"):
        found = PAGES[name]()
    settings = {text for text in english(found) if text.startswith(("epochs 30,", "train 1078,"))}  # as a plan has them
    assert english(found) - settings == set()


def test_the_charts_of_a_study_have_chinese_axes() -> None:
    with gonio.language("zh"):
        found = labels(PAGES["study"]())
    assert "轮" in "".join(text for tag, text in Page(_chinese(PAGES["study"])).texts if tag == "text")
    assert {text for text in found if not CHINESE.search(text)} <= {
        "baseline",
        "orthogonal-init",
        "a-recipe-wit…-a-long-name-",
    }


def test_a_page_of_claims_says_what_differs_in_chinese() -> None:
    import browser.pages as pages

    current = {claim.name: claim for claim in load_claims()}
    kept = pages.from_data

    def renewed(data: object) -> object:
        found = kept(data)
        return replace(found, results=tuple(replace(one, claim=current[one.claim.name]) for one in found.results[:2]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "from_data", renewed)
        assert english(_chinese(claimed)) == set()


def _chinese(make: Callable[[], str]) -> str:
    with gonio.language("zh"):
        return make()


def test_an_english_sentence_is_seen() -> None:
    assert english("<p>the rest is random</p><p>其余 is as random</p><p>conv1 body.2</p>") == {"the rest is random"}
