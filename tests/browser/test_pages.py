"""Every page in a browser: accessible in light and dark at three widths, silent, printable, whole without script."""

from __future__ import annotations

import io
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from browser.conftest import SCHEMES, WIDTHS
from browser.pages import PAGES

Visit = Callable[..., Any]
KINDS = [name for name in PAGES if name not in ("payloads", "large")]
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


QUICK = {"measurements", "claims"}
SOME = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in KINDS]


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("scheme", [SCHEMES[0], pytest.param(SCHEMES[1], marks=pytest.mark.slow)])
def test_axe_finds_nothing_and_nothing_is_wider_than_the_window(
    name: str, scheme: str, visit: Visit, violations: Callable[..., list[str]]
) -> None:
    page = visit(name, color_scheme=scheme)
    found = {}
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        if width == WIDTHS[-1] and name == "measurements":
            page.locator("tr.open button").first.click()  # the detail of a row too
        assert page.evaluate(OVERFLOW) == 0, width
        if seen := violations(page, "color-contrast" if scheme == "dark" else ""):  # all else is the same
            found[width] = seen
    assert found == {}


def test_axe_sees_a_page_without_names(visit: Visit, violations: Callable[..., list[str]]) -> None:
    page = visit("training")
    page.evaluate("document.querySelectorAll('svg').forEach((one) => one.removeAttribute('aria-label'))")
    assert [one for one in violations(page) if one.startswith("svg-img-alt")]


@pytest.mark.parametrize("name", SOME)
def test_without_the_script_every_row_and_figure_is_shown(name: str, visit: Visit) -> None:
    bare, scripted = (visit(name, java_script_enabled=enabled) for enabled in (False, True))
    rows = bare.locator("table tbody tr")
    assert rows.count() == scripted.locator("table tbody tr:not(.more)").count() > 0
    assert bare.locator("button, input").count() == 0
    hidden = "(rows) => rows.filter((row) => !row.checkVisibility() && !row.closest('details:not([open])')).length"
    assert rows.evaluate_all(hidden) == 0


@pytest.mark.parametrize(
    "name", ["differences", *(pytest.param(n, marks=pytest.mark.slow) for n in ("measurements", "study"))]
)
def test_print_has_the_text_of_every_column(name: str, visit: Visit, tmp_path: Path) -> None:
    pypdf = pytest.importorskip("pypdf", reason="needs pypdf: make browser")
    page = visit(name)
    pdf = page.pdf(prefer_css_page_size=True)
    printed = "".join(part.extract_text() for part in pypdf.PdfReader(io.BytesIO(pdf)).pages)
    squeezed = re.sub(r"\s+", "", unicodedata.normalize("NFKC", printed))  # a font may have one sign for ff
    cells = page.locator("section > .scroll :is(th, td), section > table tbody :is(th, td)").all_inner_texts()
    wanted = {re.sub(r"\s+", "", unicodedata.normalize("NFKC", cell)) for cell in cells}
    assert len(wanted) > 20
    assert {cell for cell in wanted if cell not in squeezed} == set()


LANDSCAPE, UPRIGHT = 1047, 718  # px between the margins of A4; pages ask for the first
PRINTED = [("claims", UPRIGHT), *(pytest.param(name, LANDSCAPE, marks=pytest.mark.slow) for name in KINDS)]


@pytest.mark.parametrize(("name", "width"), PRINTED)
def test_nothing_is_wider_than_the_sheet(name: str, width: int, visit: Visit) -> None:
    page = visit(name, width=width)
    page.emulate_media(media="print")
    assert page.evaluate(OVERFLOW) == 0


def test_text_of_others_stays_text(visit: Visit) -> None:
    page = visit("payloads")
    assert page.locator("script").count() == 1
    assert page.locator("img, iframe, [onload], [onerror], [onmouseover]").count() == 0
    assert page.locator("body").inner_text().count("alert(1)") > 10


def test_a_script_that_is_not_the_pages_own_does_not_run(visit: Visit, files: Callable[[str], Path]) -> None:
    forged = files("training").with_name("forged.html")
    text = files("training").read_text(encoding="utf-8")
    forged.write_text(text.replace("</main>", "<script>document.title = 'ran'</script></main>"), encoding="utf-8")
    page = visit("training")
    said: list[str] = []
    other = page.context.new_page()
    other.on("console", lambda message: said.append(message.text))
    other.goto(forged.as_uri())
    assert other.title() == page.title()
    assert "Content Security Policy" in said[0]
