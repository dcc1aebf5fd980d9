"""What a terminal and a pipe show while a command works: what it is about once, and a time that can be believed."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from cli.shell import COMMAND, invoke
from gonio import models
from gonio.cli.progressing import Pace, progress


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.save(models.digits_cnn().state_dict(), tmp_path / "net.pt")
    return tmp_path / "net.pt"


def screen(raw: str) -> list[str]:
    """The lines that are left on a terminal: carriage returns, cursor up and erased lines are obeyed."""
    lines, at = [""], 0
    for part in re.split(r"(\r|\n|\x1b\[[0-9;?]*[A-Za-z])", raw):
        if part == "\n":
            at += 1
            lines += [""] * (at == len(lines))
        elif part == "\x1b[1A":
            at = max(0, at - 1)
        elif part == "\x1b[2K":
            lines[at] = ""
        elif part and part != "\r" and not part.startswith("\x1b"):
            lines[at] += part
    return [line for line in lines if line.strip()]


def on_a_terminal(*words: str, columns: int) -> str:
    """What a pseudo-terminal of this width gets as stdout and stderr."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    clean = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS")}
    command = subprocess.Popen(
        [*COMMAND, *words], stdout=theirs, stderr=theirs, env={**clean, "TERM": "xterm-256color"}
    )
    os.close(theirs)
    seen = b""
    with suppress(OSError):  # raised when the other end is closed
        while chunk := os.read(ours, 100_000):
            seen += chunk
    os.close(ours)
    assert command.wait(timeout=60) == 0, seen
    return seen.decode()


@pytest.mark.slow
def test_a_check_says_once_what_is_in_a_file_on_a_terminal(file: Path) -> None:
    raw = on_a_terminal("check", str(file), columns=100)
    left = screen(raw)
    assert sum("values in 22 tensors" in line for line in left) == 1
    assert left[0].startswith("Intact: 22 tensors")
    assert not any("checking" in line for line in left)
    assert not re.search(r"checking[^\r\n]*values in", raw)  # the bar has a line of its own


def test_a_check_says_once_what_is_in_a_file_in_a_pipe(file: Path) -> None:
    result = invoke("check", file)
    assert (result.stdout + result.stderr).count("values in 22 tensors") == 1
    assert result.stderr == ""


def told(seconds: list[float], counts: list[int] | None = None) -> list[float | None]:
    """The time left after each of these steps."""
    now = 0.0
    pace = Pace(lambda: now)
    counts = counts or [1] * len(seconds)
    left, done = [], 0
    for step, count in zip(seconds, counts, strict=True):
        now, done = now + step, done + count
        left.append(pace.left(done, sum(counts)))
    return left


def test_a_slow_start_does_not_make_the_time_left() -> None:
    """An embedding of 5 s before 147 tensors that take 0.26 s on the mean, as in gpt2."""
    block = [0.0, 0.0, 0.4, 0.0, 0.3, 0.0, 0.0, 0.0, 1.2, 0.0, 1.2, 0.0]
    steps = [5.0, 0.2, *block * 12, 0.0, 0.0]
    left = told(steps)
    assert left[0] is None
    for at, one in enumerate(left):
        needed = sum(steps[at + 1 :])
        assert one is None or one < 1.3 * needed + 5, (at, one, needed)
    assert any(one is not None for one in left[: len(left) // 8])


def test_the_time_left_of_even_steps_is_exact_and_gone_at_the_end() -> None:
    assert told([2.0] * 8) == [None, None, None, None, 6.0, 4.0, 2.0, None]
    assert told([2.0, 1, 2, 3, 4, 5], [10, 10, 20, 30, 40, 50])[-2] == 5.0


def test_few_steps_of_many_tell_no_time() -> None:
    assert set(told([1.0] * 40, [1] * 39 + [10_000])) == {None}


def test_a_meter_in_a_pipe_takes_what_the_work_is_about(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("checking") as update:
        update(1, 2)
    assert capsys.readouterr().err == ""
