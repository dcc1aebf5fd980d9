"""The tests of the methods under the oldest and the newest torch, each in an environment of its own.

    python tests/versions.py [FOLDER [VERSION …]]

FOLDER keeps the environments, so that a second call installs nothing. Without versions: the one that pyproject.toml
names as the oldest, and the newest that the package index offers. Each environment takes up to 6 GB, because torch's
wheels for Linux need the CUDA packages even where there is no GPU. The outcome goes to tests/versions_outcome.txt.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUTCOME = ROOT / "tests" / "versions_outcome.txt"
PACKAGES = (
    "geometry",
    "init",
    "nn",
    "parametrizations",
    "regularizers",
    "penalty",
    "optim",
    "surgery",
    "measuring",
    "laws",
)
NEEDED = (
    *("pytest>=8.2", "hypothesis>=6.100", "mpmath>=1.3", "sybil>=9.0"),
    *("matplotlib>=3.8", "pandas>=2.2", "scipy>=1.11", "scikit-learn>=1.4"),
)


def dependencies() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return list(project["dependencies"])


def oldest() -> str:
    required = next(line for line in dependencies() if line.startswith("torch"))
    return re.search(r">=\s*([\d.]+)", required)[1]  # type: ignore[index]


def environment(folder: Path, version: str) -> Path:
    """The Python of an environment with this version of torch; "newest" for the newest."""
    python = folder / f"torch-{version}" / "bin" / "python"
    if not python.exists():
        venv.create(folder / f"torch-{version}", with_pip=True)
        torch = "torch" if version == "newest" else f"torch=={version}.*"
        others = [line for line in dependencies() if not line.startswith("torch")]
        subprocess.run([python, "-m", "pip", "install", "--quiet", torch, *others, *NEEDED], check=True)
    return python


def outcome(python: Path) -> list[str]:
    """torch's version, the last line of each package's tests, and the names of those that failed."""
    version = subprocess.run(
        [python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True, check=True
    ).stdout.strip()
    lines = [f"torch {version}, Python {sys.version.split()[0]}"]
    for package in PACKAGES:
        print(f"torch {version}: tests/{package}", file=sys.stderr, flush=True)  # noqa: T201
        command = [python, "-m", "pytest", f"tests/{package}", "-q", "--tb=no", "-p", "no:cacheprovider"]
        found = subprocess.run(
            command,
            cwd=ROOT,
            env={"PYTHONPATH": "src", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        ).stdout.splitlines()
        lines += [f"  {package}: {found[-1].strip('= ') if found else 'no output'}"]
        lines += [f"    {line[:160]}" for line in found if line.startswith(("FAILED", "ERROR"))]
    return lines


def main(words: list[str]) -> int:
    folder = Path(words[0]) if words else Path(tempfile.gettempdir()) / "gonio-versions"
    reports = [outcome(environment(folder, version)) for version in words[1:] or [oldest(), "newest"]]
    OUTCOME.write_text("\n".join(line for report in reports for line in report) + "\n", encoding="utf-8")
    return int(any("failed" in line or "error" in line for report in reports for line in report))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
