"""The switch of versions of the site: shown where there are two, from a folder and from a server, and nowhere else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from docs.pages import builder_of

SCRIPT = Path(__file__).parents[2] / "docs" / "_static" / "versions.js"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
BOTH = [{"version": "0.2.0", "url": "./"}, {"version": "0.1.0", "url": "../old/"}]

browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "site" / "zh").mkdir(parents=True)
    return tmp_path / "site"


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site.parent))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/site"
        server.shutdown()


def write(site: Path, known: object, listed: str | None) -> None:
    """A page of the site and one in a folder of it, with the list of the build, and the list of the server."""
    for name, root in (("index.html", "./"), ("zh/start.html", "../")):
        (site / name).write_text(
            f'<!DOCTYPE html><html lang="en" data-content_root="{root}"><a class="sidebar-brand">gonio</a>'
            f"<script>window.gonioVersions = {json.dumps(known)};</script><script>{SCRIPT.read_text()}</script></html>"
        )
    if listed is not None:
        (site / "versions.json").write_text(listed)


def switch(url: str, folder: Path) -> list[tuple[str, str, bool]] | None:
    """The options of the switch: text, address, whether it is the one of this page; None where there is none."""
    words = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", "--virtual-time-budget=3000"]
    shown = subprocess.run(
        [str(CHROMIUM), *words, "--dump-dom", url], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    found = re.search(r"<select.*?</select>", shown, re.DOTALL)
    if found is None:
        return None
    options = re.findall(r'<option value="([^"]*)"([^>]*)>([^<]*)', found[0])
    return [(text, address, "selected" in about) for address, about, text in options]


def test_a_build_lists_its_version_first_and_once() -> None:
    pytest.importorskip("sphinx")
    pytest.importorskip("latex2mathml")
    versions = builder_of("conf").versions
    assert versions("0.2.0", "") == BOTH[:1]
    assert versions("0.2.0", json.dumps([{"version": "0.1.0", "url": "../old/"}])) == BOTH
    assert versions("0.2.0", json.dumps(BOTH)) == BOTH
    with pytest.raises(json.JSONDecodeError, match="Expecting value"):
        versions("0.2.0", "<html>")


@browser
def test_from_a_folder_the_list_of_the_build_is_shown(site: Path, tmp_path: Path) -> None:
    write(site, BOTH, None)
    shown = switch((site / "zh" / "start.html").as_uri(), tmp_path / "profile")
    old = (site.parent / "old" / "index.html").as_uri()
    assert shown == [("0.2.0", (site / "index.html").as_uri(), True), ("0.1.0", old, False)]


@browser
def test_from_a_server_its_list_is_shown(site: Path, address: str, tmp_path: Path) -> None:
    write(site, BOTH[:1], json.dumps([*BOTH, {"version": "x", "url": "javascript:alert(1)"}, 3]))
    shown = switch(f"{address}/zh/start.html", tmp_path / "profile")
    assert shown == [("0.2.0", f"{address}/", True), ("0.1.0", f"{address.removesuffix('site')}old/", False)]


@browser
@pytest.mark.slow
@pytest.mark.parametrize("listed", [json.dumps(BOTH[:1]), "<html>", "{}", None])
def test_one_version_has_no_switch(site: Path, address: str, tmp_path: Path, listed: str | None) -> None:
    write(site, BOTH[:1], listed)
    assert switch(f"{address}/index.html", tmp_path / "a") is None
    assert switch((site / "index.html").as_uri(), tmp_path / "b") is None
