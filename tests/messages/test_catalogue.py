"""The catalogues: every text that is shown has a translation, with the same fields, and none is left over."""

from __future__ import annotations

import json
import re
import string
from pathlib import Path

import jinja2
import pytest

from messages.marked import SOURCE, has_words, marked

GRAMMAR = {"are", "have", "has", "s", "turn"}  # fields that only English needs
CATALOGUE: dict[str, str] = json.loads((SOURCE / "messages" / "zh.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module", name="places")
def places_of_texts() -> dict[str, str]:
    """Each text, and the file that has it."""
    return marked()


def fields(template: str) -> dict[str, str]:
    """The fields of a template with their conversions and formats."""
    found = string.Formatter().parse(template)
    return {name: f"{kind or ''}:{form or ''}" for _, name, form, kind in found if name is not None}


def test_no_text_lacks_a_translation(places: dict[str, str]) -> None:
    missing = {text: place for text, place in places.items() if text not in CATALOGUE}
    assert not missing, "\n".join(f"{place}: {text}" for text, place in missing.items())


@pytest.mark.parametrize(
    "text",
    [
        "Seed of the random numbers.",
        "timm:NAME, torchvision:NAME, transformers:NAME, a built-in name, or file.py:factory; default: the task's own.",
        "coher.",
        "query",
        "over time",
        "untreated",
        "quartiles",
        "A Vae for images of 8 × 8.",
    ],
)
def test_helps_titles_and_lists_are_held(text: str, places: dict[str, str]) -> None:
    assert text in places


def test_no_translation_is_left_over(places: dict[str, str]) -> None:
    assert [text for text in CATALOGUE if text not in places] == []


def differing_fields(text: str, translation: str) -> set[str]:
    """The fields that a translation lacks, invents or formats differently."""
    if "{}" in text:  # filled by the script of a page
        return set() if text.count("{}") == translation.count("{}") else {""}
    english, translated = fields(text), fields(translation)
    return {name for name in english | translated if english.get(name) != translated.get(name)} - GRAMMAR


def test_a_translation_has_the_fields_of_its_text() -> None:
    assert {text: found for text, said in CATALOGUE.items() if (found := differing_fields(text, said))} == {}


def test_differing_fields_are_seen() -> None:
    assert differing_fields("{n:.2f} of {m} {are}", "{m} {n:.2f}") == set()
    assert differing_fields("{n:.2f} of {m}", "{m} {n}") == {"n"}
    assert differing_fields("{n}", "{k}") == {"n", "k"}
    assert differing_fields("{} of {}", "{}") == {""}


def test_every_sentence_is_translated() -> None:
    chinese = {text for text, said in CATALOGUE.items() if any("\u4e00" <= c <= "\u9fff" for c in said)}
    assert [text for text in CATALOGUE if len(text) > 40 and text not in chinese] == []


GLOSSARY = SOURCE.parents[1] / "docs" / "zh" / "glossary.md"


def glossary() -> list[tuple[list[str], list[str]]]:
    """The Chinese and the English terms of each row."""
    lines = [line for line in GLOSSARY.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in re.sub("（[^|]*", "", line).split("|")[1:3]] for line in lines]
    return [(chinese.split("、"), english.split(", ")) for chinese, english in rows]


def test_a_term_is_that_of_the_glossary() -> None:
    terms = {term: chinese for chinese, english in glossary() for term in english if term in CATALOGUE}
    assert len(terms) > 20
    assert {term: CATALOGUE[term] for term, chinese in terms.items() if CATALOGUE[term] not in chinese} == {}


FOLDERS = ("measuring", "lab/showing", "lab/treating")
PAGES = [path for folder in FOLDERS for path in sorted((SOURCE / folder).rglob("*.j2"))]
# What a page says outside of marked texts: names of figures and of this program, and symbols.
PLAIN_WORDS = {"a", "gonio", "doctor", "measure", "reproduce", "sin", "widths", "Tracker", "rad"}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_has_no_text_outside_of_marked_ones(path: Path) -> None:
    parsed = jinja2.Environment().parse(path.read_text("utf-8"))
    said = "".join(data.data for data in parsed.find_all(jinja2.nodes.TemplateData))
    outside = " ".join(part.partition(">")[2] for part in said.split("<"))
    words = {word.strip(".,:;-") for word in outside.split()} - PLAIN_WORDS
    assert {word for word in words if word.isalpha() and len(word) > 1} == set()


@pytest.mark.parametrize(
    ("text", "answer"), [("a word", True), ("{n} of {m}", True), ("{n} ({m})", True), ("{n} {m}", False), (" ", False)]
)
def test_texts_of_fields_alone_need_no_translation(text: str, answer: bool) -> None:
    assert has_words(text) is answer
