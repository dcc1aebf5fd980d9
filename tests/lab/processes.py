"""Studies as processes that can be killed, and what is left of them afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import IO

from gonio.lab import Study

# Goes on with the plan that lies in the folder, as a terminal would.
SCRIPT = """
import sys
from gonio.lab import Study, run
from gonio.errors import Interrupted

if __name__ == "__main__":
    try:
        run(Study.open(sys.argv[1]).plan, sys.argv[1], jobs=2)
    except Interrupted as error:
        print(error, file=sys.stderr)
        sys.exit(75)
    except KeyboardInterrupt:
        sys.exit(130)
"""


def continue_study(folder: Path, errors: IO[str] | int = subprocess.PIPE, **variables: str) -> subprocess.Popen[str]:
    """Continue a study in a process and session of its own, with these environment variables."""
    script = folder.parent / "study.py"
    script.write_text(SCRIPT)
    command, environment = [sys.executable, str(script), str(folder)], {**os.environ, **variables}
    return subprocess.Popen(command, stderr=errors, text=True, start_new_session=True, env=environment)


def forked(work: Callable[[], int]) -> int:
    """The number of a process that this one forks; it ends with the code that the work returns, 1 if it raises.

    A fork server that an earlier test began is no child of it; it begins one of its own.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            vars(forkserver._forkserver).update(vars(forkserver.ForkServer()))
            code = work()
        finally:
            os._exit(code)
    return child


def exit_code(child: int) -> int:
    """Of a forked process, when it has ended; minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def wait_for_runs(folder: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Until the study has so many rows, or its process has ended."""
    while process.poll() is None:
        if (folder / "plan.json").exists() and len(Study.open(folder).runs()) >= count:
            return
        time.sleep(0.02)


def alive(session: int) -> list[str]:
    """The processes of a session that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, number = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it ended while we looked
            continue
        if int(number) == session and state != "Z":
            found.append(path.parent.name)
    return found


def patience(seconds: float, *, pause: float) -> Iterator[None]:
    """Pauses for so many seconds in all, of those in which this process runs.

    A busy machine may stop it for minutes, together with the processes that it waits for; a clock would count these.
    """
    for _ in range(round(seconds / pause)):
        yield
        time.sleep(pause)


def wait_for_silence(session: int) -> list[str]:
    """What is left of a session's processes after at most 200 s."""
    for _ in patience(200, pause=0.05):
        if not alive(session):
            break
    return alive(session)
