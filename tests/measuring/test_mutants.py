"""Mutated safetensors headers: a clear error or a result, never a crash, never a hang."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from measuring.mutants import main

TESTS = Path(__file__).resolve().parents[1]
LIMIT = 600  # seconds for a batch that takes some 5; the machine may be busy


def outcomes(lines: str) -> Counter[str]:
    return Counter(line.split()[1] for line in lines.splitlines())


def test_500_mutated_headers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(tmp_path, 0, 500)
    found = outcomes(capsys.readouterr().out)
    assert found.total() == 500
    assert found["refused"] > 100
    assert found["measured"] >= 5  # some mutations, as in a name, leave a file that is in order


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 10_000, 1000))
def test_10_000_mutated_headers_neither_crash_nor_hang(first: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "measuring.mutants", str(tmp_path), str(first), "1000"]
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, (done.stdout.splitlines()[-1:], done.stderr[-2000:])
    assert outcomes(done.stdout).total() == 1000
