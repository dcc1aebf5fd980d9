"""Write the tables of README and docs/ from benchmarks/results/*.json.

    python -m benchmarks.tables            write
    python -m benchmarks.tables --check    exit 1 when a page holds other figures than the results

A page asks for a table with `<!-- benchmark TOPIC [TABLE] [time|memory|deviation] -->`; what stands from
there to `<!-- /benchmark -->` is replaced.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path

from benchmarks import (
    adapter_faults,
    doctor,
    files,
    fine_tuning,
    large_checkpoints,
    live_page,
    optimizer_states,
    orthogonal_conv,
    other_ways,
    planted_damage,
    quantisation,
    shipped_networks,
    study,
    usual_networks,
)
from benchmarks.results import FOLDER, Key, Measured, Report, RowResult, path_of, ratio, read

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(<!-- benchmark (?P<ask>[^>]+?) -->\n).*?(\n?<!-- /benchmark -->)", flags=re.S)
MISSING = "*No such rows were measured: `make bench`.*"
Cell = Callable[[Measured, RowResult], str]


def memory_cell(measured: Measured, row: RowResult) -> str:
    """MiB, and the ratio to the floor where it has any."""
    mib, floor = measured.peak_mib, row.floor.peak_mib
    return f"{mib:.1f}" if measured is row.floor or not floor else f"{mib:.1f} (×{mib / floor:.2f})"


def deviation_cell(measured: Measured, row: RowResult) -> str:
    return "–" if measured.deviation is None else f"{measured.deviation:.1e}"


CELLS: dict[str, Cell] = {
    "time": lambda measured, row: ratio(measured.wall),
    "memory": memory_cell,
    "deviation": deviation_cell,
}
_MODULES = (
    adapter_faults,
    doctor,
    files,
    fine_tuning,
    large_checkpoints,
    live_page,
    optimizer_states,
    orthogonal_conv,
    other_ways,
    planted_damage,
    quantisation,
    shipped_networks,
    study,
    usual_networks,
)
OWN = {module.RESULT.stem: module.table for module in _MODULES}  # that are no ratios to a floor
FLOORS: dict[str, tuple[str, Cell]] = {  # title and cells of the floor's column; it has no result to deviate
    "time": ("floor ms", lambda floor, row: f"{floor.milliseconds:.2f}"),
    "memory": ("floor MiB", memory_cell),
}


def markdown(report: Report, *, table: str | None, what: str) -> str:
    """A table with one line per case and mode, one column per candidate, and how it was measured."""
    rows = [row for row in report.rows if table in (None, row.table)]
    if not rows:
        return MISSING
    topic = import_module(f"benchmarks.{report.topic}")
    all_goals: Mapping[Key, str] = getattr(topic, "GOALS", {})  # what rows are to reach, as ratios or as times
    names = list(dict.fromkeys(m.name for row in rows for m in row.candidates))
    peer: str | None = getattr(topic, "PEER", None)  # beside which gonio is held
    peer = peer if what == "time" and peer in names else None
    goals = {row.key: goal for row in rows if what == "time" and (goal := all_goals.get(row.key))}
    titles = [FLOORS[what][0], *names] if what in FLOORS else names
    titles = [*titles, *([f"gonio / {peer}"] if peer else []), *(["goal"] if goals else [])]
    head = [f"| | {' | '.join(titles)} |", f"|---|{'--:|' * len(titles)}"]
    lines = (_line(row, names, what, goals, peer) for row in rows)
    return "\n".join([*head, *lines, "", _caption(report, rows, what)])


def _line(row: RowResult, names: Sequence[str], what: str, goals: Mapping[Key, str], peer: str | None) -> str:
    found = {measured.name: CELLS[what](measured, row) for measured in row.candidates}
    floor = [FLOORS[what][1](row.floor, row)] if what in FLOORS else []
    mark = " ¹" if row.disturbed else ""
    paired = [ratio(m.beside) if m.beside else "–" for m in row.candidates if m.name == peer] or ["–"] * bool(peer)
    goal = [goals.get(row.key, "–")] if goals else []
    cells = [*floor, *(found.get(name, "–") for name in names), *paired, *goal]
    return f"| {row.case}, {row.mode}{mark} | {' | '.join(cells)} |"


def _caption(report: Report, rows: Sequence[RowResult], what: str) -> str:
    kept = [row.rounds for row in rows]
    count = f"{min(kept)}–{max(kept)}" if min(kept) < max(kept) else f"{kept[0]}"
    rounds = f"median (quartiles) of {count} rounds of {1e3 * report.sample_seconds:.0f} ms"
    measured = {
        "time": f"Time as a ratio to the floor, {rounds}",
        "memory": "MiB newly allocated at the peak of one call",
        "deviation": "Largest difference from the first candidate's result, as a part of that one's largest entry",
    }[what]
    malloc = "tuned malloc" if report.allocator else "default malloc"
    names = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    text = (
        f"{measured}. F: forward, FB: forward and backward. Floor: {report.floor}. "
        f"{report.machine['processor']}, {_count(report.threads, 'thread')}, {malloc}; {names}."
    )
    noisy = " ¹ Other programs were running." if any(row.disturbed for row in rows) else ""
    return f"{text}{noisy}{' From a quick run.' if report.quick else ''}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def block(ask: str, folder: Path) -> str | None:
    """The table that a marker asks for; None if its topic was not measured."""
    topic, *rest = ask.split()
    what = next((word for word in rest if word in CELLS), "time")
    tables = [word for word in rest if word not in CELLS]
    path = path_of(topic, folder=folder)
    if not path.exists():
        return None
    if topic in OWN:
        return OWN[topic](json.loads(path.read_text(encoding="utf-8")))
    return markdown(read(path), table=tables[0] if tables else None, what=what)


def filled(page: str, folder: Path = FOLDER) -> str:
    """A page with its tables written anew; what stands where nothing is measured is left."""

    def replaced(match: re.Match[str]) -> str:
        table = block(match["ask"], folder)
        return match[0] if table is None else f"{match[1]}{table}\n{match[3].lstrip()}"

    return BLOCK.sub(replaced, page)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main(arguments: Sequence[str]) -> int:
    texts = {path: path.read_text(encoding="utf-8") for path in pages() if path.exists()}
    changed = {path: filled(text) for path, text in texts.items() if filled(text) != text}
    if "--check" in arguments:
        if changed:
            print(f"other figures than the results: {', '.join(p.name for p in changed)}", file=sys.stderr)
        return int(bool(changed))
    for path, text in changed.items():
        path.write_text(text, encoding="utf-8")
    print(f"{len(changed)} pages changed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
