"""The page in a real browser, where one is installed: no dialog, no request, no horizontal scrolling."""

from __future__ import annotations

import html as escaping
import shutil
import subprocess
from pathlib import Path

import pytest

from gonio.report import write_html
from report.samples import results
from report.test_page import PAYLOADS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"),
    *("--disable-component-update", "--disable-sync"),
]
# The frame tells its width to the page around it, which writes both widths into its own title.
FRAME = """<iframe src="{page}" width="{width}" height="900" onload="
  const d = this.contentDocument.documentElement;
  document.title = 'overflow=' + (d.scrollWidth - d.clientWidth) + ' width=' + d.clientWidth"></iframe>"""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")]


def dom(page: Path, tmp_path: Path, *flags: str) -> str:
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *flags, "--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_payloads_stay_text(tmp_path: Path) -> None:
    made = results(tuple(PAYLOADS), seeds=1, layers=1)
    shown = dom(write_html(made, tmp_path / "page.html"), tmp_path)
    assert "<script" not in shown
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in shown
    assert escaping.unescape(shown).count("alert(1)") > len(PAYLOADS)


@pytest.mark.parametrize("width", [375, 768, 1600])
def test_nothing_is_wider_than_the_window(width: int, tmp_path: Path) -> None:
    write_html(results(("a-recipe-with-quite-a-long-name-" * 4, "b")), tmp_path / "page.html")
    (tmp_path / "frame.html").write_text(FRAME.format(page="page.html", width=width))
    shown = dom(tmp_path / "frame.html", tmp_path, "--window-size=1700,1000", "--allow-file-access-from-files")
    assert f"overflow=0 width={width}" in shown or f"overflow=0 width={width - 15}" in shown
