"""The exports as LaTeX are compiled, where a TeX is installed: a study, studies of several tasks, claims."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import gonio
from gonio.escaping import _TEX, tex_cell
from gonio.lab import across
from gonio.lab.claims import from_data
from gonio.lab.showing.claims import claims_latex
from gonio.lab.showing.exports import MULTI_TASK_FORMATS
from lab.showing.test_multi_task import study_of
from lab.showing.test_tables import full

COMMITTED = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "claims" / "full.json"
HEAD = "\\documentclass{article}\n\\usepackage{booktabs}\n\\begin{document}\n"
HOSTILE = r"a & b \\ % \end{tabular} \input{x} ~^_#$ {" + "é"


def hostile() -> str:
    results = gonio.lab.showing.example()
    return gonio.lab.showing.to_latex(replace(results, effects=(replace(results.effects[0], recipe=HOSTILE),)))


EXPORTS: dict[str, Callable[[], str]] = {
    "study": lambda: gonio.lab.showing.to_latex(full()),
    "hostile name": hostile,
    "several tasks": lambda: MULTI_TASK_FORMATS["tex"](across([study_of("easy"), study_of("hard")])),
    "claims": lambda: claims_latex(from_data(json.loads(COMMITTED.read_text(encoding="utf-8")))),
    "every escaped character": lambda: "".join(map(tex_cell, _TEX)) + "\n",
}


def engine() -> list[str]:
    """The command of the TeX that is installed; skips without one."""
    if found := shutil.which("pdflatex"):
        return [found, "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape"]
    if found := shutil.which("tectonic"):
        return [found, "--untrusted", "--only-cached"]
    pytest.skip("needs pdflatex with booktabs (Debian: texlive-latex-recommended) or tectonic")


@pytest.mark.parametrize("name", EXPORTS)
def test_an_export_compiles(name: str, tmp_path: Path) -> None:
    command = engine()
    (tmp_path / "page.tex").write_text(f"{HEAD}{EXPORTS[name]()}\\end{{document}}\n", encoding="utf-8")
    done = subprocess.run(
        [*command, "page.tex"], cwd=tmp_path, capture_output=True, text=True, errors="replace", timeout=120
    )
    said = [line for line in done.stdout.splitlines() if line.startswith(("!", "l."))]
    assert done.returncode == 0, "\n".join(said or [done.stderr])
    assert (tmp_path / "page.pdf").stat().st_size > 1000


@pytest.mark.parametrize("bad", [r"\begin{tabular}{l} a & b \\ \end{tabular}", "a } b", "√"])
def test_what_is_wrong_does_not_compile(bad: str, tmp_path: Path) -> None:
    command = engine()
    (tmp_path / "page.tex").write_text(f"{HEAD}{bad}\n\\end{{document}}\n", encoding="utf-8")
    done = subprocess.run([*command, "page.tex"], cwd=tmp_path, capture_output=True, timeout=120, check=False)
    assert done.returncode != 0
