"""One Chromium for all tests of pages in a browser; they are skipped where it, Playwright or axe-core is missing."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from browser.pages import PAGES

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
MISSING = [name for name in ("playwright", "axe_playwright_python") if importlib.util.find_spec(name) is None]
WIDTHS, SCHEMES = (1440, 768, 390), ("light", "dark")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lacking = [*([] if CHROMIUM else ["Chromium (apt install chromium, or CHROMIUM=/path)"]), *MISSING]
    if lacking:
        why = pytest.mark.skip(reason=f"needs {', '.join(lacking)}: make browser")
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(why)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The file of a page by name, made once."""
    folder = tmp_path_factory.mktemp("pages")

    def file(name: str) -> Path:
        path = folder / f"{name}.html"
        if not path.exists():
            path.write_text(PAGES[name](), encoding="utf-8")
        return path

    return file


@pytest.fixture
def visit(chromium: Any, files: Callable[[str], Path]) -> Iterator[Callable[..., Any]]:
    """Open a page by name. A message on the console, a dialog or a request fails the test."""
    contexts, said = [], []

    def opened(name: str, *, width: int = 1440, **options: Any) -> Any:
        context = chromium.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: None if request.url.startswith("file:") else said.append(request.url))
        page.goto(files(name).as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert said == []


@pytest.fixture(scope="session")
def violations() -> Callable[..., list[str]]:
    """What axe-core finds on a page by all rules, or by one such as `color-contrast`."""
    folder = Path(importlib.util.find_spec("axe_playwright_python").submodule_search_locations[0])  # type: ignore[union-attr,index]
    axe = (folder / "axe.min.js").read_text(encoding="utf-8")

    def found(page: Any, rule: str = "") -> list[str]:
        page.evaluate(axe)
        options = {"resultTypes": ["violations"], **({"runOnly": {"type": "rule", "values": [rule]}} if rule else {})}
        result = page.evaluate("(options) => axe.run(document, options)", options)
        return [f"{v['id']}: {json.dumps(v['nodes'][0]['html'])}" for v in result["violations"]]

    return found
