"""Every measurement of every benchmark, one line per topic, commit and machine: benchmarks/results/history.jsonl.

    python -m benchmarks.history          write docs/benchmark-history.md and its pictures
    python -m benchmarks.history --check  exit 1 and name gonio's rows that grew by more than 5 % beyond their spread

`python -m benchmarks` appends to the file. Two measurements are compared only if machine, versions, allocator and
threads are equal; what was measured elsewhere starts a line of its own. Machines of one name still differ: gonio's
growth is taken relative to that of the other candidates of the row.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.results import FOLDER, Ratio, Report, RowResult

ROOT = Path(__file__).resolve().parents[1]
FILE = FOLDER / "history.jsonl"
PAGE = ROOT / "docs" / "benchmark-history.md"
PICTURES = ROOT / "docs" / "images"
OURS = "gonio"  # candidates whose name begins so
GROWTH = 1.05  # a ratio that grew by less is no finding
SHOWN = 8  # lines of a picture: those that moved most
HEAD = """<!-- Written by `python -m benchmarks.history` from benchmarks/results/history.jsonl; do not edit. -->
# Benchmarks over time

The rows of gonio that moved most, by commit: the median ratio to the floor as a part of the first one, with its
quartiles; beside the name, the last ratio. Only measurements under the same conditions are joined: machine, versions,
allocator, threads.
"""


@dataclass(frozen=True)
class Entry:
    """One topic as it was measured at one commit.

    Attributes:
        commit: short hash; `+` follows if the tree had changes.
        day: of the measurement. conditions: what must be equal for a comparison.
        ratios: median and quartiles of each candidate of each row, by "table · case, mode" and name.
    """

    topic: str
    commit: str
    day: str
    conditions: dict[str, Any]
    ratios: dict[str, dict[str, Ratio]]


def entry_of(report: Report, *, commit: str, day: str) -> Entry:
    """The entry of a report."""
    conditions = {
        "machine": report.machine,
        "versions": {name: v for name, v in report.versions.items() if name != "gonio"},
        "allocator": "tuned" if report.allocator else "default",
        "threads": report.threads,
    }
    ratios = {_name(row): {m.name: m.wall for m in row.candidates} for row in report.rows}
    return Entry(report.topic, commit, day, conditions, ratios)


def _name(row: RowResult) -> str:
    return f"{row.table} · {row.case}, {row.mode}" if row.table else f"{row.case}, {row.mode}"


def append(report: Report, *, file: Path = FILE) -> None:
    """Add a report at the present commit."""
    add(entry_of(report, commit=commit(), day=date.today().isoformat()), file=file)


def add(entry: Entry, *, file: Path = FILE) -> None:
    """Add an entry; one of the same topic, commit and conditions is replaced."""
    key = (entry.topic, entry.commit, entry.conditions)
    write([*(old for old in read(file) if (old.topic, old.commit, old.conditions) != key), entry], file=file)


def commit() -> str:
    """The present commit; `+` follows if the tree has changes."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks/*.py")
    return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")


def read(file: Path = FILE) -> list[Entry]:
    """All entries, the oldest first."""
    if not file.exists():
        return []
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [Entry(**{**row, "ratios": _each(lambda of: Ratio(*of), row["ratios"])}) for row in rows]


def write(entries: Iterable[Entry], *, file: Path = FILE) -> None:
    """One line of JSON each, with four digits."""
    rows = [
        {**asdict(entry), "ratios": _each(lambda of: [float(f"{v:.4g}") for v in vars(of).values()], entry.ratios)}
        for entry in entries
    ]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    file.write_text(text, encoding="utf-8")


def _each(change: Callable[[Any], Any], ratios: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row: {name: change(of) for name, of in found.items()} for row, found in ratios.items()}


def series(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Entries that may be compared, in order: of one topic, under the same conditions."""
    found: list[list[Entry]] = []
    for entry in entries:
        same = [s for s in found if (s[0].topic, s[0].conditions) == (entry.topic, entry.conditions)]
        same[0].append(entry) if same else found.append([entry])
    return found


@dataclass(frozen=True)
class Grown:
    """A row of gonio's that became slower; `others`: growth of the other candidates, median."""

    topic: str
    row: str
    before: Ratio
    after: Ratio
    others: float
    commits: tuple[str, str]

    def __str__(self) -> str:
        spans = [f"{r.median:.2f} ({r.low:.2f}–{r.high:.2f})" for r in (self.before, self.after)]
        moved = f"{spans[0]} at {self.commits[0]}, {spans[1]} at {self.commits[1]}"
        return f"{self.topic}: {self.row}: {moved}; the other candidates ×{self.others:.2f}"


def grown(entries: Sequence[Entry]) -> list[Grown]:
    """Rows whose last ratio is more than 5 % above the one before, also relative to the other candidates' growth, and
    whose quartiles do not overlap."""
    pairs = [line[-2:] for line in series(entries) if len(line) > 1]
    found = [
        Grown(
            new.topic, f"{row} · {name}", old.ratios[row][name], ratio, _drift(old, new, row), (old.commit, new.commit)
        )
        for old, new in pairs
        for row, name, ratio in ours(new)
        if name in old.ratios.get(row, {})
    ]
    return [
        one
        for one in found
        if one.after.median > GROWTH * one.before.median * max(one.others, 1.0) and one.after.low > one.before.high
    ]


def ours(entry: Entry) -> list[tuple[str, str, Ratio]]:
    """Row, candidate and ratio of gonio's candidates."""
    return [(r, name, of) for r, found in entry.ratios.items() for name, of in found.items() if name.startswith(OURS)]


def _drift(old: Entry, new: Entry, row: str) -> float:
    """Median growth of the candidates of a row that are not gonio's; 1 if there are none."""
    before, after = old.ratios[row], new.ratios[row]
    shared = [name for name in after if name in before and not name.startswith(OURS)]
    return statistics.median(after[name].median / before[name].median for name in shared) if shared else 1.0


# --- the page ---------------------------------------------------------------------------------------------


def page(entries: Sequence[Entry]) -> str:
    """The page: what grew, and a picture for each series of two measurements or more."""
    slower = grown(entries)
    lines = [HEAD, "## Slower than before", ""]
    lines += [f"- {row}" for row in slower] or ["No row grew by more than 5 % beyond its spread."]
    for at, line in enumerate(joined(entries)):
        conditions = line[0].conditions
        machine, torch = conditions["machine"], conditions["versions"]["torch"]
        lines += ["", f"## {line[0].topic.replace('_', ' ')}, {machine['processor']}", ""]
        lines += [f"torch {torch}, {conditions['threads']} threads, {conditions['allocator']} allocator."]
        lines += ["", f"![Ratios of {line[0].topic} over commits](images/{_picture(at)})"]
    return "\n".join(lines) + "\n"


def joined(entries: Sequence[Entry]) -> list[list[Entry]]:
    """The series with two measurements or more that share a row of gonio's."""
    return [line for line in series(entries) if len(line) > 1 and moved(line)]


def _picture(at: object) -> str:
    return f"history-{at}.svg"


def moved(line: Sequence[Entry]) -> dict[str, list[Ratio]]:
    """The ratios of gonio's rows that are in every entry, the largest change of the median first."""
    each = [{f"{row} · {name}": ratio for row, name, ratio in ours(entry)} for entry in line]
    found = {name: [ratios[name] for ratios in each] for name in each[0] if all(name in ratios for ratios in each)}

    def change(name: str) -> float:
        medians = [ratio.median for ratio in found[name]]
        return max(medians) / min(medians)

    return {name: found[name] for name in sorted(found, key=change, reverse=True)[:SHOWN]}


def draw(line: Sequence[Entry], path: Path) -> None:
    """A line per row over the commits, relative to the first, with its quartiles."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    rows = moved(line)
    style = {"svg.hashsalt": "gonio", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}
    with mpl.rc_context(style):
        figure = Figure(figsize=(9, 0.5 + 0.32 * max(len(rows), 6)), layout="constrained")
        axes = figure.add_subplot()
        at = range(len(line))
        for name, ratios in rows.items():
            median, low, high = (
                [getattr(r, key) / ratios[0].median for r in ratios] for key in ("median", "low", "high")
            )
            (drawn,) = axes.plot(at, median, "o-", markersize=3, label=f"{name}: {ratios[-1].median:.2f}")
            axes.fill_between(at, low, high, alpha=0.15, color=drawn.get_color())
        axes.set_xticks(at, [entry.commit for entry in line], rotation=30, ha="right")
        axes.set_ylabel("relative to the first")
        axes.grid(axis="y", linewidth=0.4)
        figure.legend(loc="outside right upper", frameon=False)
        figure.savefig(path, metadata={"Date": None})


def main(arguments: Sequence[str]) -> int:
    entries = read()
    slower = grown(entries)
    for row in slower:
        print(row)
    if "--check" in arguments:
        return 1 if slower else 0
    PICTURES.mkdir(parents=True, exist_ok=True)
    for old in PICTURES.glob(_picture("*")):
        old.unlink()
    for at, line in enumerate(joined(entries)):
        draw(line, PICTURES / _picture(at))
    PAGE.write_text(page(entries), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
