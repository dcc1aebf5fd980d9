"""The code blocks of a markdown page, executed in order in one folder, by sybil.

- ```python blocks of a page share one namespace;
- lines of ```console and ```bash blocks that start with `gonio` (after an optional `$ `) run as
  commands and must succeed, or exit with the code that a trailing `# exits N` states;
- `make` lines are held against the Makefile by `make -n`; other commands (pip, git, cd) are not run.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from sybil import Document, Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

__all__ = ["ROOT", "commands", "is_long", "run_page"]

ROOT = Path(__file__).resolve().parents[2]
GONIO = [sys.executable, "-c", "import sys; from gonio.cli import main; sys.argv[0] = 'gonio'; sys.exit(main())"]
TIMEOUT = 900


def commands(block: str) -> list[tuple[list[str], int]]:
    """(words, expected exit code) of each command line; `\\` continues a line."""
    found = []
    for line in block.replace("\\\n", " ").splitlines():
        text = line.strip().removeprefix("$ ").strip()
        exits = re.search(r"#\s*exits (\d+)", text)
        words = shlex.split(text, comments=True) if text else []
        if words and words[0] in {"gonio", "make"}:
            found.append((words, int(exits[1]) if exits else 0))
    return found


def is_long(words: list[str]) -> bool:
    """A comparison trains networks; what reads its folder can only follow it."""
    return words[0] == "gonio" and words[1:2] in (["compare"], ["report"], ["status"]) and "--dry-run" not in words


def execute(words: list[str], folder: Path, *, code: int) -> None:
    """Run one command line of a page as a reader would, in the page's folder."""
    if words[0] == "make":
        if shutil.which("make") is None:
            return
        line, folder = ["make", "-n", *words[1:]], ROOT
    else:
        line = [*GONIO, *words[1:]]
    result = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    said = f"{shlex.join(words)} exited with {result.returncode}, not {code}\n{result.stdout}{result.stderr}"
    assert result.returncode == code, said


def _sybil(folder: Path, *, long: bool) -> Sybil:
    def console(example: Example) -> None:
        for words, code in commands(str(example.parsed)):
            if long or not is_long(words):
                execute(words, folder, code=code)

    shells = [CodeBlockParser(language=name, evaluator=console) for name in ("console", "bash")]
    return Sybil(parsers=[PythonCodeBlockParser(), SkipParser(), *shells], path=str(ROOT))


def run_page(page: Path, folder: Path, *, long: bool = False, names: dict[str, Any] | None = None) -> int:
    """Execute a page; the number of blocks that ran. Raises what the first wrong block raises."""
    document: Document = _sybil(folder, long=long).parse(page)
    document.namespace.update(names or {})
    count = 0
    for example in document.examples():
        example.evaluate()
        count += 1
    return count
