"""The code blocks of a markdown page, executed in order in one folder, by sybil.

- ```python blocks and {code-cell}s of a page share one namespace, which is empty at first;
- a ```text block directly below another block is what that block prints; `…` stands for any text. Two marks before a
  number stand for figures that depend on the processor's arithmetic: `≈98%` is near what was printed, also where a
  whole number would have to be equal, and `<1e-12` is above it;
- lines of ```console and ```bash blocks that start with `gonio` (after an optional `$ `) run as
  commands and must succeed, or exit with the code that a trailing `# exits N` states;
- `make` lines are held against the Makefile by `make -n`; other commands (pip, git, cd) are not run.

`make docs` runs the pages and writes the outputs anew.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, OutputChecker
from pathlib import Path
from types import ModuleType

from sybil import Document, Example, Lexeme, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, SkipParser

from foreign import timm, torchvision, transformers

NUMBER = re.compile(r"([≈<]?)([+\-−]?(?<![\w.])\d[\d,]*\.?\d*(?:e[+-]?\d+)?)(?![\w])")
OPTION = re.compile(r"^:[\w-]+:.*", flags=re.M)  # of a {code-cell}
Output = Callable[[Example, str], None]

ROOT = Path(__file__).resolve().parents[2]
GONIO = [sys.executable, "-c", "import sys; from gonio.cli import main; sys.argv[0] = 'gonio'; sys.exit(main())"]
TIMEOUT = 900


def builder_of(name: str) -> ModuleType:
    """A script of docs/ that writes pages, as a module, which finds the others."""
    if str(ROOT / "docs") not in sys.path:
        sys.path.append(str(ROOT / "docs"))
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # a dataclass looks its module up
    spec.loader.exec_module(module)
    return module


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


def execute(words: list[str], folder: Path, *, code: int) -> str:
    """Run one command line of a page as a reader would, in the page's folder; its standard output."""
    if words[0] == "make":
        if shutil.which("make") is None:
            return ""
        line, folder = ["make", "-n", *words[1:]], ROOT
    else:
        line = [*GONIO, *words[1:]]
    result = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    said = f"{shlex.join(words)} exited with {result.returncode}, not {code}\n{result.stdout}{result.stderr}"
    assert result.returncode == code, said
    return result.stdout


def agrees(shown: str, printed: str) -> bool:
    """Equal words, and numbers that differ by no more than other processors make them differ; `…` is any text."""
    words, numbers = NUMBER.sub("#", shown).replace("…", "..."), NUMBER.findall(shown)
    if "..." in words:
        return OutputChecker().check_output(shown.replace("…", "..."), printed, ELLIPSIS | NORMALIZE_WHITESPACE)
    same = words.split() == NUMBER.sub("#", printed).split()
    return same and all(map(_near, numbers, NUMBER.findall(printed)))


def _near(shown: tuple[str, str], printed: tuple[str, str]) -> bool:
    """Within 2 % and two units of the last digit; small whole numbers are counts and must be equal.

    `≈` lifts the rule for counts, `<` makes the number a bound of an absolute value.
    """
    mark, text = shown
    a, b = (float(number.replace("−", "-").replace(",", "")) for number in (text, printed[1]))
    if printed[0] not in ("", mark):
        return False
    if mark == "<" and not printed[0]:
        return abs(b) < a
    if "." not in text and "e" not in text and abs(a) < 200 and mark != "≈":
        return a == b
    mantissa, _, power = text.partition("e")
    unit = 10.0 ** (int(power or 0) - len(mantissa.partition(".")[2]))
    return abs(a - b) <= 2 * unit + 0.02 * abs(a)


def check(example: Example, printed: str) -> None:
    """The page shows what its block printed."""
    shown = str(example.parsed)
    same = agrees(shown, printed)
    assert same, f"{example.path}:{example.line}: the page shows\n{shown}\nand its block prints\n{printed}"


def _sybil(folder: Path, *, long: bool, output: Output) -> Sybil:
    printed, end = "", -1

    def python(example: Example) -> None:
        nonlocal printed, end
        with contextlib.redirect_stdout(io.StringIO()) as buffer:
            example.parsed = Lexeme(OPTION.sub("", example.parsed), example.parsed.offset, example.parsed.line_offset)
            PythonEvaluator()(example)
        printed, end = buffer.getvalue(), example.end

    def text(example: Example) -> None:
        if end >= 0 and not example.document.text[end : example.start].strip("`\n "):
            output(example, printed)

    def console(example: Example) -> None:
        nonlocal printed, end
        found = [(words, code) for words, code in commands(str(example.parsed)) if long or not is_long(words)]
        printed = "".join([execute(words, folder, code=code) for words, code in found])
        end = example.end if printed and all(words[0] == "gonio" for words, _ in found) else -1

    blocks = {"python": python, "{code-cell}": python, "text": text, "console": console, "bash": console}
    parsers = [CodeBlockParser(language=name, evaluator=run) for name, run in blocks.items()]
    return Sybil(parsers=[*parsers, SkipParser()], path=str(ROOT))


def run_page(page: Path, folder: Path, *, long: bool = False, output: Output = check) -> int:
    """Execute a page; the number of blocks that ran. Raises what the first wrong block raises."""
    document: Document = _sybil(folder, long=long, output=output).parse(page)
    libraries = {"timm": timm, "torchvision": torchvision, "transformers": transformers, "lightning": torchvision}
    for name, load in libraries.items():
        if re.search(rf"^import {name}\b", document.text, flags=re.M):
            load()
    count = 0
    for example in document.examples():
        example.evaluate()
        count += 1
    return count


def write_outputs(page: Path) -> None:
    """Run a page and replace each output that it shows, unless `…` in it still stands for what was printed."""
    text, found = page.read_text(encoding="utf-8"), list[tuple[int, int, str]]()

    def collect(example: Example, printed: str) -> None:
        if not agrees(str(example.parsed), printed):
            found.append((example.start, example.end, printed))

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        run_page(page, Path(folder), output=collect)
    for start, end, printed in reversed(found):
        lines = "\n".join(line.rstrip() for line in printed.rstrip("\n").splitlines())
        text = f"{text[:start]}```text\n{lines}\n```{text[end:].removeprefix('```')}"
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    os.environ["COLUMNS"] = "100"
    os.environ["GONIO_CACHE"] = "off"
    for name in sys.argv[1:]:
        write_outputs(Path(name).resolve())
