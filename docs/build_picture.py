"""Takes the picture of README: the page of `gonio measure` on its file with planted faults, with an open row.

`python docs/build_picture.py` writes docs/images/measure-light.png and measure-dark.png; it needs Chromium and
Playwright (`make browser`). README chooses between them by the reader's colour scheme.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import tempfile
from contextlib import chdir
from pathlib import Path

from playwright.sync_api import sync_playwright

import gonio

ROOT = Path(__file__).resolve().parents[1]
LAYER, SIZE = "conv2", {"width": 1360, "height": 3000}  # the whole page, so that its navigation stays at the top


def planted(folder: Path) -> Path:
    """The file that the first block of README makes."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.findall(r"^```python\n(.*?)^```", text, flags=re.S | re.M)[0]
    (folder / "make.py").write_text(block, encoding="utf-8")
    with chdir(folder):
        runpy.run_path("make.py")
    return folder / "broken.pt"


def main() -> None:
    """From the heading of the findings to the charts of the open row."""
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        file = Path(name) / "page.html"
        file.write_text(gonio.measure(planted(file.parent)).to_html(), encoding="utf-8")
        chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport=SIZE, color_scheme=scheme)
            page.goto(file.as_uri())
            page.get_by_role("button", name=LAYER).first.click()
            top = page.get_by_role("heading", name="Findings").bounding_box()["y"] - 24
            axis = page.get_by_text("smallest", exact=True).first.bounding_box()
            bottom = axis["y"] + axis["height"] + 8
            clip = {"x": 0, "y": top, "width": SIZE["width"], "height": bottom - top}
            page.screenshot(path=ROOT / "docs" / "images" / f"measure-{scheme}.png", clip=clip)
        browser.close()


if __name__ == "__main__":
    main()
