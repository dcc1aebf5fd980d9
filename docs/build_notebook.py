"""Writes docs/examples/gonio.ipynb, the first page of the gallery as a notebook that installs gonio, for Colab.

`python docs/build_notebook.py` writes it; with `--check` it fails if the file differs from what it would write. The
first cell installs the wheel beside the notebook (in Colab: one that was uploaded), else the released package.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
PAGE, NOTEBOOK = DOCS / "gallery" / "find-what-is-unusual.md", DOCS / "examples" / "gonio.ipynb"
CELL = re.compile(r"^```\{code-cell\}\n(?::[^\n]*\n)*(.*?)^```$", flags=re.M | re.S)
LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")  # they lead to no file beside the notebook
INSTALL = """from pathlib import Path

wheel = max(map(str, Path().glob("gonio-*.whl")), default="gonio")
%pip install --quiet "{wheel}" matplotlib"""


def cells(page: str) -> Iterator[dict[str, Any]]:
    """The cells of a page, the installation after its title."""
    text = page.partition("---\n# ")[2]
    title, _, text = text.partition("\n")
    yield _cell("markdown", f"# {title}")
    yield _cell("code", INSTALL)
    end = 0
    for found in CELL.finditer(text):
        if said := text[end : found.start()].strip():
            yield _cell("markdown", LINK.sub(r"\1", said))
        yield _cell("code", found[1].rstrip())
        end = found.end()
    if said := text[end:].strip():
        yield _cell("markdown", LINK.sub(r"\1", said))


def _cell(kind: str, source: str) -> dict[str, Any]:
    made: dict[str, Any] = {"cell_type": kind, "metadata": {}, "source": source.splitlines(keepends=True)}
    return made | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def notebook(page: str) -> str:
    """The notebook as JSON, format 4.4."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content = {"cells": [*cells(page)], "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 4}
    return json.dumps(content, ensure_ascii=False, indent=1) + "\n"


def main(words: list[str]) -> int:
    made = notebook(PAGE.read_text(encoding="utf-8"))
    if "--check" in words:
        return int(NOTEBOOK.read_text(encoding="utf-8") != made)
    NOTEBOOK.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
