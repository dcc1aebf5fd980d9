"""`gonio compare` as a program: from the command to the first run, the cores during the runs, from the last run to the
end, and the whole command beside its runs.

    python -m benchmarks.study [--quick] [--rounds N]

Starts and ends are seen from outside: workers are the processes that the command's fork server starts (in /proc,
looked at every 20 ms), the last run has ended with the line "48 of 48 runs", and the worker after it measures the
costs. The processor seconds of the runs are those in the study. A round is a new process that imports what the command
imports before it plans, and then the command in a new folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks import history
from benchmarks.machine import busy_seconds, describe, versions
from benchmarks.results import Ratio, path_of
from gonio.lab import Study

RESULT = path_of("study")
ROUNDS = 3
LOOK = 0.02  # seconds between two looks at the processes
QUICK = ("orthogonal-init", "--seeds", "1", "--epochs", "1")
IMPORTS = "import gonio.cli, gonio.lab, gonio.lab.showing"
SECONDS, PERCENT = "{:.2f} s", "{:.1f} %"
FIGURES = {  # how each is shown, and its goal
    "imports alone": (SECONDS, "–"),
    "from the command to the first run, without imports": (SECONDS, "1.5 s"),
    "idle cores, from the first run to the last": (PERCENT, "3 %"),
    "cores with other work than runs meanwhile": (PERCENT, "–"),
    "step time and memory": (SECONDS, "–"),
    "results and page": (SECONDS, "3 s"),
    "whole command above its runs on all cores": (PERCENT, "10 %"),
    "whole command": (SECONDS, "–"),
}
Span = tuple[float, float]
Line = tuple[float, str]


@dataclass(frozen=True)
class Times:
    """What was seen of one command, in seconds since its start."""

    first_run: float
    last_run: float
    costs: float  # the end of their measurement
    end: float
    busy: float  # processor seconds of the machine from the first run to the last


def figures(times: Times, runs: Sequence[float], *, workers: int, imports: float) -> dict[str, float]:
    """One value for each of FIGURES; `runs`: processor seconds of each run."""
    share, elapsed = sum(runs) / workers, times.last_run - times.first_run
    values = (
        imports,
        times.first_run - imports,
        100 * (1 - times.busy / workers / elapsed),
        100 * (times.busy / workers - share) / elapsed,
        times.costs - times.last_run,
        times.end - times.costs,
        100 * (times.end / share - 1),
        times.end,
    )
    return dict(zip(FIGURES, values, strict=True))


def seen(spans: Sequence[Span], lines: Sequence[Line], busy: Mapping[float, float], *, runs: int, end: float) -> Times:
    """The times of a command whose workers were seen from and until `spans`, and which wrote `lines`.

    Raises:
        ValueError: the command did not say that its last run has ended.
    """
    last = [at for at, line in lines if line.startswith(f"{runs} of {runs} runs")]
    if not last:
        raise ValueError(f"the command did not write '{runs} of {runs} runs'")
    first = min(spans)[0]
    until = max((at for at in busy if at <= last[0]), default=first)
    return Times(first, last[0], max(last[0], max(spans)[1]), end, busy[until] - busy[first])


def _children(pid: int) -> list[int]:
    with suppress(OSError):  # it has ended
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def watched(command: Sequence[str], *, runs: int) -> Times:
    """Run the command and look at its workers and its messages."""
    spans: dict[int, Span] = {}
    lines: list[Line] = []
    busy: dict[float, float] = {}
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:

        def read() -> None:
            lines.extend((time.perf_counter() - began, line) for line in process.stderr or ())

        reader = threading.Thread(target=read)
        reader.start()
        while process.poll() is None:
            now = time.perf_counter() - began
            busy[now] = busy_seconds() or 0.0
            for worker in (w for child in _children(process.pid) for w in _children(child)):
                spans[worker] = (spans.get(worker, (now, now))[0], now)
            time.sleep(LOOK)
        end = time.perf_counter() - began
        reader.join()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, stderr="".join(line for _, line in lines))
    return seen(list(spans.values()), lines, busy, runs=runs, end=end)


def one_round(options: Sequence[str]) -> dict[str, float]:
    """The figures of one command."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
    imports = time.perf_counter() - start
    program = Path(sys.executable).with_name("gonio")
    with tempfile.TemporaryDirectory() as folder:
        size = 2 if options else 48
        times = watched([sys.executable, str(program), "compare", *options, "-o", folder], runs=size)
        seconds = [run.seconds or 0.0 for run in Study.open(folder).runs()]
    return figures(times, seconds, workers=int(describe()["cores"]), imports=imports)


def entry(found: Mapping[str, Any], *, commit: str, day: str) -> history.Entry:
    """The entry of a result: seconds, and 1 + the share that is a percentage."""
    values = {name: [one[name] for one in found["rounds"]] for name in FIGURES}
    ratios = {
        name: {"gonio": Ratio.of([1 + v / 100 for v in values[name]] if shown == PERCENT else values[name])}
        for name, (shown, _) in FIGURES.items()
    }
    conditions = {
        "machine": found["machine"],
        "versions": {name: v for name, v in found["versions"].items() if name != "gonio"},
        "allocator": "default",
        "threads": 1,
    }
    return history.Entry("study", commit, day, conditions, ratios)


def table(found: Mapping[str, Any]) -> str:
    """A line per figure: median over the rounds, least and most, and the goal."""
    lines = ["| | gonio | goal |", "|---|--:|--:|"]
    for name, (shown, goal) in FIGURES.items():
        values = [one[name] for one in found["rounds"]]
        low, median, high = (shown.format(of(values)) for of in (min, statistics.median, max))
        lines.append(f"| {name} | {median} ({low}–{high}) | {goal} |")
    machine, rounds = found["machine"], len(found["rounds"])
    names = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    caption = (
        f"`{found['command']}`, median (least–most) of {rounds} round{'s' if rounds != 1 else ''}. "
        f"{machine['processor']}, {machine['cores']} cores, default malloc; {names}."
    )
    return "\n".join([*lines, "", caption])


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.study", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two runs of one epoch, once; nothing is kept")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="studies, of a minute and a half each")
    options = parser.parse_args(arguments)
    study = QUICK if options.quick else ()
    rounds = []
    for _ in range(1 if options.quick else options.rounds):
        rounds.append(one_round(study))
        print("; ".join(f"{name} {shown.format(rounds[-1][name])}" for name, (shown, _) in FIGURES.items()))
    command = " ".join(["gonio compare", *study])
    found = {"command": command, "machine": describe(), "versions": versions(), "rounds": rounds}
    path = path_of("study", quick=options.quick)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if not options.quick:
        history.add(entry(found, commit=history.commit(), day=date.today().isoformat()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
