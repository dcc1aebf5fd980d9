"""`apply`, `fold`, `measure` and `reproduce` are killed at random moments: files are whole or absent, inputs stay.

`GONIO_KILLS` is the number of kills (60); `make soak` takes 2,000. `reproduce` gets few of them: each of its processes
imports torch, and what it writes is studies, which test_kills.py kills.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cli.shell import invoke
from gonio.models import digits_cnn
from lab.claims.test_cli import CLAIM
from lab.processes import exit_code, forked

KILLS = int(os.environ.get("GONIO_KILLS", "60"))
SHARES = {"apply": 0.3, "fold": 0.3, "measure": 0.35, "reproduce": 0.05}
Read = Callable[[Path], Any]


def checkpoint(folder: Path) -> Path:
    torch.manual_seed(0)
    path = folder / "model.safetensors"
    save_file(digits_cnn().state_dict(), path)
    return path


def figures(path: Path) -> Any:
    """What a measurement found, without the moment at which it did."""
    found = json.loads(path.read_text(encoding="utf-8"))
    found.pop("created", None)
    return found


def verdicts(path: Path) -> Any:
    return [claim["evidence"] for claim in json.loads(path.read_text(encoding="utf-8"))["claims"]]


def words_of(command: str, given: Path, out: Path) -> tuple[list[str], Read]:
    """The command that writes `out`, and how to read what it wrote."""
    if command == "apply":
        return ["apply", "orthogonal-init", str(given), "--model", "digits-cnn", "-o", str(out)], Path.read_bytes
    if command == "fold":
        return ["fold", str(given), "--model", "digits-cnn", "-o", str(out)], Path.read_bytes
    if command == "measure":
        return ["measure", str(given), "--json", str(out), "--journal", f"{out}.jsonl"], figures
    return ["reproduce", str(given), "--jobs", "1", "-o", f"{out}.studies", "--json", str(out)], verdicts


def begun(words: list[str]) -> int:
    def to_its_end() -> int:
        done = invoke(*words)
        if done.exit_code:
            os.write(2, done.output.encode())
        return done.exit_code

    return forked(to_its_end)


@pytest.mark.slow
@pytest.mark.parametrize("command", SHARES)
def test_a_killed_command_leaves_a_whole_file_or_none(command: str, tmp_path: Path) -> None:
    given = checkpoint(tmp_path)
    if command == "reproduce":
        given = tmp_path / "tiny.yaml"
        given.write_text(CLAIM, encoding="utf-8")
    before, draw = given.read_bytes(), random.Random(len(command))
    suffix = ".safetensors" if command in ("apply", "fold") else ".json"
    words, read = words_of(command, given, tmp_path / f"expected{suffix}")
    start = time.monotonic()
    assert exit_code(begun(words)) == 0
    duration, expected = time.monotonic() - start, read(tmp_path / f"expected{suffix}")
    kills = number = 0
    while kills < KILLS * SHARES[command]:
        out = tmp_path / f"{number}{suffix}"
        words, _ = words_of(command, given, out)
        number += 1
        for _ in range(3):  # the second and third go on where the first was killed
            child = begun(words)
            time.sleep(draw.uniform(0, duration))
            os.kill(child, signal.SIGKILL)  # a child that has ended stays until it is waited for
            code = exit_code(child)
            assert code in (0, -signal.SIGKILL), "the command raised"
            kills += code != 0
            assert not out.exists() or read(out) == expected
            assert given.read_bytes() == before
        assert exit_code(begun(words)) == 0
        assert read(out) == expected
