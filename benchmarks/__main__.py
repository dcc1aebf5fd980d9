"""`python -m benchmarks [TOPIC …] [--quick] [--rows REGEX]`: measure, write benchmarks/results/TOPIC.json and add it to
history.jsonl.

With `--rows` the other rows of the file stay, if they were measured under the same conditions.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import benchmarks
from benchmarks import history
from benchmarks.harness import Row, Settings, measure
from benchmarks.machine import TUNED_MALLOC, allocator, describe, restart_with, versions
from benchmarks.results import Report, RowResult, merged, path_of, read, write

QUICK = Settings(rounds=3, sample_seconds=0.01, retries=0)


def topics() -> list[str]:
    """Modules of this package that have rows."""
    files = sorted(Path(benchmarks.__path__[0]).glob("*.py"))
    return [file.stem for file in files if "\ndef rows(" in file.read_text(encoding="utf-8")]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("topics", nargs="*", metavar="TOPIC", help=f"of {', '.join(topics())}; all by default")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, 3 short rounds, nothing compiled")
    parser.add_argument("--rows", default="", metavar="REGEX", help="only rows whose 'table case mode' it is found in")
    parser.add_argument("--rounds", type=int, default=Settings.rounds, help="samples per candidate")
    parser.add_argument("--threads", type=int, default=describe()["cores"], help="of torch; all cores by default")
    parser.add_argument("--malloc", choices=["tuned", "default"], default="tuned", help="settings of glibc's allocator")
    found = parser.parse_args(arguments)
    unknown = sorted(set(found.topics) - set(topics()))
    if unknown:
        parser.error(f"no topic {', '.join(unknown)}; there are {', '.join(topics())}")
    return found


def without_compiled(row: Row) -> Row:
    kept = tuple(candidate for candidate in row.candidates if not candidate.compiled)
    return Row(row.case, row.mode, row.floor, kept, row.table)


def run(topic: ModuleType, settings: Settings, *, quick: bool, threads: int, rows: str = "") -> Report:
    """Measure the rows of a topic that are asked for."""
    report = _report(topic, settings, quick=quick, threads=threads)
    found = []
    for row in topic.rows(quick=quick):
        if not re.search(rows, f"{row.table} {row.case} {row.mode}"):
            continue
        found.append(measure(without_compiled(row) if quick else row, settings))
        print(line(found[-1]), file=sys.stderr, flush=True)
    return replace(report, rows=tuple(found))


def _report(topic: ModuleType, settings: Settings, *, quick: bool, threads: int) -> Report:
    """What is known before anything is measured."""
    return Report(
        topic=topic.__name__.rsplit(".", 1)[-1],
        title=topic.TITLE,
        floor=topic.FLOOR,
        quick=quick,
        threads=threads,
        sample_seconds=settings.sample_seconds,
        allocator=allocator(),
        machine=describe(),
        versions=versions(),
        rows=(),
    )


def line(row: RowResult) -> str:
    cells = [f"{m.name} {m.wall.median:.2f} ({m.peak_mib:.1f} MiB)" for m in row.candidates]
    noise = " [disturbed]" if row.disturbed else f" [{row.dropped} rounds dropped]" if row.dropped else ""
    return f"{row.case} {row.mode}: floor {row.floor.milliseconds:.2f} ms; {', '.join(cells)}{noise}"


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    environment = {"OMP_NUM_THREADS": str(options.threads), "KINETO_LOG_LEVEL": "99"}
    if options.malloc == "tuned":
        environment |= TUNED_MALLOC
    restart_with(environment, "benchmarks", list(arguments))
    settings = QUICK if options.quick else Settings(rounds=options.rounds)
    for name in options.topics or topics():
        topic = importlib.import_module(f"benchmarks.{name}")
        path = path_of(name, quick=options.quick)
        old = read(path) if options.rows and path.exists() else None
        if old is not None:  # before the measurement, not after it
            merged(_report(topic, settings, quick=options.quick, threads=options.threads), old, ())
        report = run(topic, settings, quick=options.quick, threads=options.threads, rows=options.rows)
        if old is not None:
            keys = [(row.table, row.case, row.mode) for row in topic.rows(quick=options.quick)]
            report = merged(report, old, keys)
        print(os.path.relpath(write(report)))
        if not options.quick:
            history.append(report)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
