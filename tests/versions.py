"""The tests of the library and of its commands with the oldest and with the newest packages.

    python tests/versions.py [oldest] [newest] [--folder FOLDER]

`oldest` installs the lowest versions that pyproject.toml names, all at once; `newest` installs the newest of
everything, pre-releases included. Both are without the packages that only some tests need, whose tests are skipped.
FOLDER keeps the environments, so that a second call installs nothing. Each takes up to 7 GB on Linux, because torch's
wheels need the CUDA packages even where there is no GPU. The outcome goes to tests/versions_outcome.txt.

Warnings that point at a line of gonio are errors, as in `make test`; those that other packages give each other are not.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUTCOME = ROOT / "tests" / "versions_outcome.txt"
RESOLUTION = {
    "oldest": ("--resolution", "lowest-direct"),
    "newest": ("--resolution", "highest", "--prerelease", "allow", "--upgrade"),
}
TESTED = (
    *("geometry", "init", "nn", "parametrizations", "regularizers", "penalty", "optim", "surgery", "measuring"),
    *("changes", "recipes", "cli", "laws", "test_package.py"),
)
# sympy, which torch imports, does not work with the pre-releases of mpmath 1.4
NEEDED = ("pytest>=8.2", "hypothesis>=6.100", "mpmath>=1.3,<1.4.0a0", "sybil>=9.0", "pandas>=2.2")
SHOWN = ("torch", "numpy", "scipy", "scikit-learn", "matplotlib", "typer", "click", "rich", "pydantic", "safetensors")
WARNINGS = "default\nerror:::gonio(\\.|$)"
VERSIONS = """
import sys
from importlib.metadata import distributions
found = {each.name.lower(): each.version for each in distributions()}
for name in sys.argv[1:]: print(name, found.get(name, "none"))
"""


def python_of(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def environment(folder: Path, kind: str) -> Path:
    """The Python of an environment with the oldest or newest packages; a finished one is used again."""
    place = folder / f"{kind}-{platform.python_version()}"
    python, done = python_of(place), place / "installed"
    if not done.exists():
        venv.create(place, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "uv"], check=True)
        wanted = ("-e", f"{ROOT}[lab]", *NEEDED)
        install = ("-m", "uv", "pip", "install", "--quiet", "--python", python)
        subprocess.run([python, *install, *RESOLUTION[kind], *wanted], check=True)
        done.touch()
    return python


def outcome(python: Path, kind: str) -> list[str]:
    """The versions, the last line of each folder's tests, and the names of those that failed."""
    settings = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    versions = subprocess.run([python, "-c", VERSIONS, *SHOWN], capture_output=True, text=True, check=True)
    machine = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    lines = [f"{kind}, {datetime.date.today()}, {machine}: {', '.join(versions.stdout.splitlines())}"]
    for name in TESTED:
        print(f"{kind}: tests/{name}", file=sys.stderr, flush=True)
        command = [python, "-m", "pytest", f"tests/{name}", "-q", "--tb=no", "-p", "no:cacheprovider"]
        found = subprocess.run(
            [*command, "-o", f"filterwarnings={WARNINGS}"],
            cwd=ROOT,
            env=settings,
            capture_output=True,
            text=True,
            check=False,
        ).stdout.splitlines()
        lines += [f"  {name}: {found[-1].strip('= ') if found else 'no output'}"]
        lines += [f"    {line[:160]}" for line in found if line.startswith(("FAILED", "ERROR"))]
    return lines


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="The tests with the oldest and with the newest packages.")
    parser.add_argument("kinds", nargs="*", choices=[*RESOLUTION, []], help="oldest, newest, or both")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "gonio-versions")
    options = parser.parse_args(words)
    kinds = options.kinds or list(RESOLUTION)
    reports = [outcome(environment(options.folder, kind), kind) for kind in kinds]
    OUTCOME.write_text("\n".join(line for report in reports for line in report) + "\n", encoding="utf-8")
    return int(any("failed" in line or "error" in line for report in reports for line in report))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
