"""The site: what axe-core finds in its theme is repaired in the pages; its tables have a field that filters them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from browser.test_narrow import BROKEN
from docs.pages import ROOT, builder_of

DOCS = ROOT / "docs"
CONF = """
import sys
sys.path.insert(0, {docs!r})
import conf
from conf import *

conf.write_reference = lambda app: None
html_extra_path, html_static_path, templates_path = [], [{docs!r} + "/_static"], [{docs!r} + "/_templates"]
nb_execution_mode = "off"
"""
ROWS = "\n".join(f"| claim{i} | small | {'seen' if i % 2 else 'undecided'} |" for i in range(4))
PAGES = {
    "index.md": f"""# Site

```
{"wide " * 80}
```

|  | size |
|---|---|
| a | 1 |

## One

| claim | scope | verdict |
|---|---|---|
{ROWS}

## Two

| claim | scope | verdict |
|---|---|---|
{ROWS.replace("claim", "other")}

## Three

| claim | scope | verdict |
|---|---|---|
{ROWS.replace("small", "field")}

```{{toctree}}
:hidden:
:caption: Learn

api
benchmarks
zh/page
```
""",
    "api.md": "# API\n\n```{eval-rst}\n.. autofunction:: gonio.measure\n```\n",
    "zh/page.md": "# 中文\n\n正文。\n",
    "benchmarks.md": "# Benchmarks\n",
}
METHODS = ("gonio.regularizers.SelfOrthogonality", "gonio.nn.DecoupledConv2d", "gonio.init.orthogonal_")

pytestmark = pytest.mark.slow


def reference() -> dict[str, str]:
    """The pages of some methods, and what they link to."""
    sys.path.insert(0, str(DOCS))
    try:
        import reference_pages
    finally:
        sys.path.remove(str(DOCS))
    made = reference_pages.pages()
    packages = {name.rpartition(".")[0] for name in METHODS}
    links = {f"reference/{name}.md": f"---\norphan: true\n---\n\n# {name}\n" for name in packages}
    return links | {f"reference/{name}.md": made[name] for name in METHODS}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small site by the settings and the theme of the large one."""
    for package in ("furo", "latex2mathml", "myst_nb", "sphinx"):
        pytest.importorskip(package, reason="needs the group docs: make site")
    source = tmp_path_factory.mktemp("docs")
    (source / "zh").mkdir()
    (source / "reference").mkdir()
    for name, text in {**PAGES, **reference(), "conf.py": CONF.format(docs=str(DOCS))}.items():
        (source / name).write_text(text, encoding="utf-8")
    made = source / "site"
    words = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", str(source), str(made)]
    subprocess.run(words, check=True, capture_output=True, text=True)
    return made


@pytest.fixture
def show(site: Path, chromium: Any) -> Any:
    """Open a page of the site in a window of a width."""
    contexts = []

    def opened(name: str, width: int = 1440, scheme: str = "light") -> Any:
        contexts.append(chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.goto((site / name).as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()


def test_a_long_name_breaks_between_its_words(show: Callable[..., Any]) -> None:
    page = show("reference/gonio.nn.DecoupledConv2d.html", 390)
    assert page.locator("h1 wbr").count() == 2
    assert page.evaluate(BROKEN) == []


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (390, "dark")])
@pytest.mark.parametrize(
    "name", ["index.html", "api.html", "zh/page.html", "search.html", *(f"reference/{name}.html" for name in METHODS)]
)
def test_axe_finds_nothing(
    name: str, width: int, scheme: str, show: Callable[..., Any], violations: Callable[..., list[str]]
) -> None:
    page = show(name, width, scheme)
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_what_is_repaired_is_there(site: Path) -> None:
    """Each repair changes a page, so none outlives the fault of the theme that it is for."""
    conf = builder_of("conf")
    pages = [(site / name).read_text(encoding="utf-8") for name in ("index.html", "api.html", "search.html")]
    for _, named in conf.UNNAMED:
        text = named.format_map(conf.LABELS["en"]).replace(r"\1", "")
        assert any(text in page for page in pages), text
    assert 'class="parameter"' in pages[1]


def test_a_chinese_page_says_so(site: Path) -> None:
    assert 'lang="zh-CN"' in (site / "zh" / "page.html").read_text(encoding="utf-8")
    assert 'lang="en"' in (site / "index.html").read_text(encoding="utf-8")


def test_what_scrolls_is_reached_by_the_keyboard_and_nothing_else(show: Callable[..., Any]) -> None:
    page = show("index.html")
    assert page.locator("article [tabindex='0']").evaluate_all("(all) => all.map((one) => one.tagName)") == ["PRE"]
    page.locator("article pre").evaluate("(code) => (code.textContent = 'short')")
    page.evaluate("dispatchEvent(new Event('resize'))")
    assert page.locator("article [tabindex='0']").count() == 0


def test_one_field_filters_the_tables_of_the_same_columns(show: Callable[..., Any]) -> None:
    page = show("index.html")
    assert page.locator("input.rows").count() == 1, "the table of sizes has no field"
    page.locator("input.rows").fill("field seen")
    assert page.locator("output.rows").inner_text() == "2 / 12"
    left = [text.split() for text in page.locator("article tbody tr:visible").all_inner_texts()]
    assert left == [["a", "1"], ["claim1", "field", "seen"], ["claim3", "field", "seen"]]
    assert page.get_by_role("heading", name="One").is_hidden(), "a section without a row goes"
    assert page.get_by_role("heading", name="Three").is_visible()
    page.locator("input.rows").fill("")
    assert page.locator("article tbody tr:visible").count() == 13
    assert page.get_by_role("heading", name="One").is_visible()
