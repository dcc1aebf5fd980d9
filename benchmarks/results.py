"""What a benchmark found, as data: one JSON file per topic."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

__all__ = ["FOLDER", "Key", "Measured", "Ratio", "Report", "RowResult", "merged", "path_of", "ratio", "read", "write"]

FOLDER = Path(__file__).resolve().parent / "results"
Key = tuple[str, str, str]  # table, case and mode, which together name a row


@dataclass(frozen=True)
class Ratio:
    """Median over rounds of candidate/floor, with the quartiles between which half of the rounds lie."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Ratio:
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


def ratio(found: Ratio) -> str:
    """Median and quartiles."""
    return f"{found.median:.2f} ({found.low:.2f}–{found.high:.2f})"


@dataclass(frozen=True)
class Measured:
    """One candidate in one row.

    Attributes:
        name: of the candidate.
        wall: elapsed time as a ratio to the floor's in the same round.
        cpu: processor time as a ratio to the floor's.
        milliseconds: elapsed time of one call, median over rounds; for orientation only.
        peak_mib: memory newly allocated at the worst moment of one call.
        deviation: largest difference of the results from the first candidate's, as a part of the largest entry.
        beside: elapsed time of the first candidate as a ratio to this one's in the same round; None for the first.
    """

    name: str
    wall: Ratio
    cpu: Ratio
    milliseconds: float
    peak_mib: float
    deviation: float | None = None
    beside: Ratio | None = None


@dataclass(frozen=True)
class RowResult:
    """All candidates on one case, interleaved."""

    case: str
    mode: str
    table: str
    floor: Measured
    candidates: tuple[Measured, ...]
    rounds: int
    dropped: int
    disturbed: bool  # too few quiet rounds: all were kept

    @property
    def key(self) -> Key:
        return self.table, self.case, self.mode


@dataclass(frozen=True)
class Report:
    """One run of one topic."""

    topic: str
    title: str
    floor: str  # what the floor is, in words
    quick: bool
    threads: int
    sample_seconds: float
    allocator: dict[str, str]
    machine: dict[str, str | int]
    versions: dict[str, str]
    rows: tuple[RowResult, ...]

    @property
    def conditions(self) -> Report:
        """Everything but the rows: figures share a table only where this is equal."""
        return replace(self, rows=())


_ADAPTER = TypeAdapter(Report)


def path_of(topic: str, *, quick: bool = False, folder: Path = FOLDER) -> Path:
    """Quick runs are for trying out and go to a folder that is not kept."""
    return folder / "local" / f"{topic}.json" if quick else folder / f"{topic}.json"


def write(report: Report, *, folder: Path = FOLDER) -> Path:
    path = path_of(report.topic, quick=report.quick, folder=folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_ADAPTER.dump_json(report, indent=1) + b"\n")
    return path


def merged(new: Report, old: Report, order: Sequence[Key]) -> Report:
    """Rows measured one after another as one report: those of `old` that `new` has not, in the topic's order.

    Raises:
        ValueError: if the two were measured under different conditions.
    """
    if new.conditions != old.conditions:
        fields = vars(new)
        differ = [name for name in fields if name != "rows" and fields[name] != getattr(old, name)]
        raise ValueError(f"{new.topic} was measured before with other {', '.join(differ)}; measure all rows anew")
    rows = {row.key: row for row in (*old.rows, *new.rows)}
    return replace(new, rows=tuple(rows[key] for key in order if key in rows))


def read(path: Path) -> Report:
    return _ADAPTER.validate_json(path.read_bytes())
