"""The built distributions, as a stranger installs them: core dependencies only, in a hostile environment.

    python -m build && python tests/wheel.py dist/*

Each distribution is installed into an empty environment. Commands and verbs run from another folder, whose path has
spaces and umlauts, without a writable HOME, with LC_ALL=C, PYTHONOPTIMIZE=2 and, where Linux allows it, without a
network. The installed files must stay as they are, and a missing extra must be named by a command that installs it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

MODEL = """
from torch import nn

def model():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
"""
RECIPE = """
name: ours
swap:
  - {where: "type:Conv2d", use: DecoupledConv2d, magnitude: Tanh, angular: Cosine}
"""
VERBS = """
import torch
from torch import nn

import gonio
from gonio import init, nn as gnn, parametrizations as P, regularizers as R
from mine import model as make

def check(true, what):
    if not true:
        raise SystemExit(f"failed: {what}")

check(not __debug__, "PYTHONOPTIMIZE")
torch.manual_seed(0)
x, model = torch.randn(4, 3, 8, 8), make()
torch.save(model.state_dict(), "weights.pt")
before = model.eval()(x)
for verb, arguments, keywords in (
    (gonio.init_, (init.orthogonal_,), {"where": nn.Conv2d}),
    (gonio.swap_, (gnn.to_group_norm,), {"where": nn.BatchNorm2d}),
    (gonio.swap_, (gnn.DecoupledConv2d.from_conv,), {"where": nn.Conv2d}),
    (gonio.parametrize_, (P.SpectralNorm(),), {"where": nn.Conv2d}),
    (gonio.parametrize_, (P.WeightNorm(),), {"where": nn.Linear}),
    (gonio.lsuv_, (x,), {}),
    (gonio.balance_, (), {"example": x}),
    (gonio.calibrate_, ([x],), {}),
):
    edit = verb(model, *arguments, **keywords)
    check(str(edit), verb.__name__)
    edit.undo_()
    check(torch.equal(model.eval()(x), before), f"{verb.__name__} undone")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
held = gonio.hold_(model, optimizer, where=nn.Linear, norm="filters")
tracker = gonio.Tracker(model, optimizer=optimizer, every=1)
penalty = gonio.Penalty(model, [(nn.Conv2d, R.Orthogonality(1e-3)), (None, R.ScaleShift(1e-3))])
for _ in range(3):
    optimizer.zero_grad()
    (model.train()(x).square().mean() + penalty()).backward()
    optimizer.step()
check(tracker.rows, "Tracker")
tracker.undo_(), held.undo_()
check("<html" in gonio.measure(model, batch=x).to_html(), "page")
folded = gonio.fold_(model.eval(), example=x)
check(str(folded), "fold_")
"""
COMMANDS: tuple[tuple[Sequence[str], int, str], ...] = (  # words, exit code, what the output has to name
    (("--help",), 0, "measure"),
    (("measure", "weights.pt"), 0, "layers"),
    (("measure", "weights.pt", "--html", "gewichte ä.html", "--json", "gewichte.json"), 0, ""),
    (("measure", "mine.py:model"), 0, "layers"),
    (("measure", "weights.pt", "weights.pt"), 0, ""),
    (("list", "recipes"), 0, ""),
    (("list", "rules"), 0, "G102"),
    (("explain", "G102"), 0, "G102"),
    (("plan", "recipe.yaml", "--model", "mine.py:model"), 0, "DecoupledConv2d"),
    (("apply", "recipe.yaml", "weights.pt", "--model", "mine.py:model", "-o", "applied.pt"), 0, ""),
    (("measure", "no such file.pt"), 3, "no such file"),
    (("measure", "timm:resnet18"), 3, "gonio[models]"),
    (("compare", "orthogonal-init", "--seeds", "2", "-o", "study"), 3, "gonio[lab]"),
    (("reproduce", "-o", "claims"), 3, "gonio[lab]"),
)


def environment(folder: Path) -> dict[str, str]:
    """Of a locked-down account: HOME cannot be made, no locale, no variable of Python but the optimisation."""
    kept = {name: os.environ[name] for name in ("PATH", "SYSTEMROOT", "TMPDIR", "TEMP") if name in os.environ}
    hostile = {"HOME": os.devnull + "/home", "LC_ALL": "C", "PYTHONOPTIMIZE": "2", "OMP_NUM_THREADS": "1"}
    return {**kept, **hostile, "PYTHONPATH": str(folder)}


def without_network() -> list[str]:
    """The words that run a command without a network, or none where that is not allowed."""
    words = ["unshare", "--map-root-user", "--net"]
    if not shutil.which("unshare"):
        return []
    return [] if subprocess.run([*words, "true"], capture_output=True, check=False).returncode else words


def installed(distribution: Path, folder: Path) -> Path:
    """The Python of a new environment with the distribution and its core dependencies."""
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "-c", ROOT / "constraints.txt", distribution], check=True)
    subprocess.run([*pip, "check"], check=True, stdout=subprocess.DEVNULL)
    return python


def files_of(python: Path) -> dict[str, int]:
    """The files of the installed package with the time of their last change."""
    query = "import importlib.util; print(importlib.util.find_spec('gonio').submodule_search_locations[0])"
    found = subprocess.run([python, "-c", query], capture_output=True, text=True, check=True, cwd=python.parent)
    package = Path(found.stdout.strip())
    assert ROOT not in package.parents, f"{package} is the clone"
    return {str(p): p.stat().st_mtime_ns for p in package.rglob("*") if p.is_file() and p.suffix != ".pyc"}


def problems(python: Path, folder: Path) -> list[str]:
    """What went wrong: commands with another exit code or output, tracebacks, changed files."""
    (folder / "mine.py").write_text(MODEL, encoding="utf-8")
    (folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    (folder / "verbs.py").write_text(VERBS, encoding="utf-8")
    before, found = files_of(python), []
    gonio = (("-m", "gonio", *words) for words, _, _ in COMMANDS)
    runs = [(("verbs.py",), 0, ""), *zip(gonio, *list(zip(*COMMANDS, strict=True))[1:], strict=True)]
    for words, code, named in runs:
        done = subprocess.run(
            [*without_network(), str(python), *words],
            cwd=folder,
            env=environment(folder),
            capture_output=True,
            check=False,
        )
        said = (done.stdout + done.stderr).decode("utf-8", errors="replace")
        if done.returncode != code or named not in said or "Traceback" in said:
            found.append(f"{' '.join(words)}: exit {done.returncode}, not {code}, naming {named!r}\n{said[-1500:]}")
    if files_of(python) != before:
        found.append("files of the installation were changed")
    return found


def main(distributions: Sequence[str]) -> int:
    """1 if a distribution has a problem; prints each."""
    failed = 0
    for name in distributions:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "Ordner mit Lücken äöü"
            folder.mkdir()
            found = problems(installed(Path(name).resolve(), Path(temporary) / "environment"), folder)
        print("\n".join([f"{Path(name).name}: {len(found)} of {len(COMMANDS) + 1} failed", *found]))
        failed += bool(found)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
