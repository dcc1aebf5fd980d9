"""How a figure is measured.

Candidates run interleaved, in shuffled order, inside one process; one *round* times each of them once
for about 60 ms. The ratio to the floor is taken within a round, so that whatever slows a machine for
seconds slows both. A sample during which other processes used more than 30 % of a core is taken
again, and a round that stays disturbed is dropped. Reported is the median ratio over rounds with its
quartiles. After 12 rounds the candidates are made anew, in another order: where their memory lies
changes the time of the same code by 1 to 2 %, which rounds do not average.
"""

from __future__ import annotations

import random
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.machine import busy_seconds
from benchmarks.memory import peak_mib
from benchmarks.results import Measured, Ratio, RowResult

__all__ = [
    "Candidate",
    "Clock",
    "Operation",
    "Row",
    "Settings",
    "backward_of",
    "deviation",
    "forward_of",
    "measure",
    "operation_of",
    "sample",
]

Operation = Callable[[], Sequence[Tensor]]
TICK = 0.01  # the resolution of /proc/stat in seconds


@dataclass(frozen=True)
class Candidate:
    """One way of doing the work. `make` sets up and returns what is timed; that returns its results."""

    name: str
    make: Callable[[], Operation]
    compiled: bool = False  # takes a compiler's time to set up: left out of quick runs


@dataclass(frozen=True)
class Row:
    """Candidates for the same work, and the floor that none can be expected to beat."""

    case: str
    mode: str
    floor: Candidate
    candidates: tuple[Candidate, ...]
    table: str = "main"


def _processor_seconds() -> float:
    """Of this process and of the ended programs that it started."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@dataclass(frozen=True)
class Clock:
    """Where times come from; a test puts its own."""

    wall: Callable[[], float] = time.perf_counter
    cpu: Callable[[], float] = _processor_seconds
    busy: Callable[[], float | None] = busy_seconds


@dataclass(frozen=True)
class Settings:
    """How long and how carefully to measure.

    Attributes:
        rounds: of samples that are wanted.
        fresh: rounds after which the candidates are made anew.
        sample_seconds: duration of one sample.
        quiet: part of a core that others may use during a sample.
        retries: of a disturbed sample.
        least: quiet rounds without which all rounds are kept and the row is marked as disturbed.
        seed: of the order of candidates.
    """

    rounds: int = 11
    fresh: int = 12
    sample_seconds: float = 0.06
    quiet: float = 0.3
    retries: int = 4
    least: int = 5
    seed: int = 0
    clock: Clock = field(default_factory=Clock)


@dataclass(frozen=True)
class Sample:
    """Time of one call, averaged over a sample, and whether the machine was quiet."""

    wall: float
    cpu: float
    quiet: bool


def sample(operation: Operation, repeats: int, settings: Settings) -> Sample:
    """Time `repeats` calls."""
    clock = settings.clock
    busy, cpu, wall = clock.busy(), clock.cpu(), clock.wall()
    for _ in range(repeats):
        operation()
    wall, cpu, after = clock.wall() - wall, clock.cpu() - cpu, clock.busy()
    others = 0.0 if busy is None or after is None else max(0.0, after - busy - cpu - TICK)
    return Sample(wall / repeats, cpu / repeats, others <= settings.quiet * wall)


def _quiet_sample(operation: Operation, repeats: int, settings: Settings) -> Sample:
    found = sample(operation, repeats, settings)
    for _ in range(settings.retries):
        if found.quiet:
            break
        found = sample(operation, repeats, settings)
    return found


def _repeats(operation: Operation, settings: Settings) -> int:
    """Calls that fill a sample, from the faster of two single calls; one call that fills it is enough."""
    single = sample(operation, 1, settings).wall
    if single < settings.sample_seconds:
        single = min(single, sample(operation, 1, settings).wall)
    return max(1, round(settings.sample_seconds / max(single, 1e-9)))


def _made(
    candidates: Sequence[Candidate], order: random.Random
) -> tuple[dict[str, Operation], dict[str, list[Tensor]]]:
    """Operations of candidates, made in shuffled order, and the results of their first calls."""
    torch._dynamo.reset()  # a graph of another row would make this one's shapes dynamic
    made = {candidate.name: candidate.make() for candidate in order.sample(candidates, len(candidates))}
    operations = {candidate.name: made[candidate.name] for candidate in candidates}
    results = {}
    for name, operation in operations.items():
        # The first call compiles and fills caches; it alone is compared, so that calls may accumulate.
        results[name] = [result.detach().clone() for result in operation()]
        operation()
    return operations, results


def _rounds(
    operations: dict[str, Operation], count: int, order: random.Random, settings: Settings
) -> list[dict[str, Sample]]:
    """Every operation once per round, in an order that is shuffled anew."""
    repeats = {name: _repeats(operation, settings) for name, operation in operations.items()}
    found = []
    for _ in range(count):
        names = list(operations)
        order.shuffle(names)
        found.append({name: _quiet_sample(operations[name], repeats[name], settings) for name in names})
    return found


def deviation(result: Sequence[Tensor], reference: Sequence[Tensor]) -> float | None:
    """Largest difference as a part of the reference's largest entry, over all results; None without results."""
    parts = []
    for a, b in zip(result, reference, strict=True):
        a, b = a.double(), b.double()
        parts.append(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)))
    return max(parts, default=None)


def _summary(
    name: str, row: Row, rounds: list[dict[str, Sample]], operation: Operation, differs: float | None
) -> Measured:
    floor, first = row.floor.name, row.candidates[0].name
    walls = [r[name].wall / r[floor].wall for r in rounds]
    cpus = [r[name].cpu / max(r[floor].cpu, 1e-9) for r in rounds]
    milliseconds = 1e3 * statistics.median(r[name].wall for r in rounds)
    beside = None if name in (floor, first) else Ratio.of([r[first].wall / r[name].wall for r in rounds])
    return Measured(name, Ratio.of(walls), Ratio.of(cpus), milliseconds, peak_mib(operation), differs, beside)


def measure(row: Row, settings: Settings) -> RowResult:
    """Run one row."""
    chosen, order = (row.floor, *row.candidates), random.Random(settings.seed)
    operations, results = _made(chosen, order)
    reference = results[row.candidates[0].name]
    differs = {name: None if name == row.floor.name else deviation(r, reference) for name, r in results.items()}
    del results, reference
    rounds = _rounds(operations, min(settings.rounds, settings.fresh), order, settings)
    while len(rounds) < settings.rounds:
        del operations
        operations, _ = _made(chosen, order)
        rounds += _rounds(operations, min(settings.rounds - len(rounds), settings.fresh), order, settings)
    clean = [r for r in rounds if all(s.quiet for s in r.values())]
    disturbed = len(clean) < min(settings.least, settings.rounds)
    kept = rounds if disturbed else clean
    floor, *candidates = (_summary(name, row, kept, operation, differs[name]) for name, operation in operations.items())
    dropped = len(rounds) - len(kept)
    return RowResult(row.case, row.mode, row.table, floor, tuple(candidates), len(kept), dropped, disturbed)


def backward_of(forward: Callable[[], Tensor], inputs: Sequence[Tensor], cotangent: Tensor | None = None) -> Operation:
    """Forward and backward of a function as an operation: the output and the gradients of `inputs`."""

    def operation() -> Sequence[Tensor]:
        output = forward()
        return [output, *torch.autograd.grad(output, inputs, cotangent)]

    return operation


def forward_of(forward: Callable[[], Tensor]) -> Operation:
    """Forward alone, without recording for backward."""

    def operation() -> Sequence[Tensor]:
        with torch.no_grad():
            return [forward()]

    return operation


def operation_of(forward: Callable[[], Tensor], inputs: Sequence[Tensor], mode: str) -> Operation:
    """Forward alone (mode "F") or forward and backward ("FB") with a fixed random cotangent."""
    if mode == "F":
        return forward_of(forward)
    output = forward().detach()
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)) if output.dim() else None
    return backward_of(forward, inputs, cotangent)
