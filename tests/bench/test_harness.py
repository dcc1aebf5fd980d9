"""The statistics of the harness on times that are known, and its memory on tensors of known size."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from benchmarks.harness import Candidate, Clock, Operation, Row, Settings, deviation, measure, operation_of
from benchmarks.machine import allocator, busy_seconds, describe, versions
from benchmarks.memory import highest, peak_mib
from benchmarks.results import Ratio
from torch import Tensor


class Time:
    """A machine whose operations take exactly as long as they are told."""

    def __init__(self) -> None:
        self.wall = self.cpu = self.busy = 0.0
        self.drift = 1.0  # everything is slower by this factor
        self.others: list[float] = []  # seconds that others use during the next calls

    def clock(self) -> Clock:
        return Clock(wall=lambda: self.wall, cpu=lambda: self.cpu, busy=lambda: self.busy)

    def operation(self, seconds: float, *, threads: int = 1) -> Operation:
        def call() -> Sequence[Tensor]:
            self.wall += seconds * self.drift
            self.cpu += threads * seconds * self.drift
            stolen = self.others.pop() if self.others else 0.0
            self.busy += threads * seconds * self.drift + stolen
            return [torch.ones(2)]

        return call

    def row(self, *seconds: float, threads: int = 1) -> Row:
        floor, *rest = (
            Candidate(f"c{i}", lambda s=s: self.operation(s, threads=threads)) for i, s in enumerate(seconds)
        )
        return Row("case", "F", floor, tuple(rest))

    def settings(self, rounds: int = 5, **options: float) -> Settings:
        return Settings(rounds=rounds, clock=self.clock(), **options)


def test_ratios_are_those_of_the_times() -> None:
    time = Time()
    found = measure(time.row(0.001, 0.002, 0.0005), time.settings())
    assert [m.wall.median for m in found.candidates] == pytest.approx([2.0, 0.5])
    assert found.floor.wall.median == 1.0
    first, second = found.candidates
    assert (found.floor.beside, first.beside) == (None, None)
    assert second.beside == Ratio(*[pytest.approx(4.0)] * 3)
    assert found.floor.milliseconds == pytest.approx(1.0)
    assert (found.rounds, found.dropped, found.disturbed) == (5, 0, False)


def test_a_machine_that_slows_down_changes_no_ratio() -> None:
    time = Time()
    row = time.row(0.001, 0.002)

    def slowing() -> Operation:
        inner = time.operation(0.002)

        def call() -> Sequence[Tensor]:
            time.drift *= 1.0002
            return inner()

        return call

    found = measure(Row("case", "F", row.floor, (Candidate("slowing", slowing),)), time.settings(rounds=9))
    assert found.candidates[0].wall.median == pytest.approx(2.0, rel=0.05)
    assert found.floor.milliseconds > 1.02  # it did slow down


def test_processor_time_is_apart_from_elapsed_time() -> None:
    time = Time()
    two = time.row(0.001, 0.001, threads=2)
    floor = Candidate("one thread", lambda: time.operation(0.001))
    found = measure(Row("case", "F", floor, two.candidates), time.settings())
    assert found.candidates[0].wall.median == pytest.approx(1.0)
    assert found.candidates[0].cpu.median == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("others", "rounds", "kept", "dropped", "disturbed"),
    [
        # Calls per candidate: 2 to warm up, 2 to find the repeats. The first sample of round 1 is disturbed.
        pytest.param([0.05, *[0.0] * 8], 5, 5, 0, False, id="a disturbed sample is taken again"),
        pytest.param([*[0.05] * 5, *[0.0] * 8], 7, 6, 1, False, id="so are its four retries: the round is dropped"),
        pytest.param([0.05] * 1000, 5, 5, 0, True, id="a machine that is never quiet is reported"),
    ],
)
def test_what_others_use_of_the_machine(
    others: list[float], rounds: int, kept: int, dropped: int, disturbed: bool
) -> None:
    time = Time()
    time.others = others
    found = measure(time.row(0.06, 0.06), time.settings(rounds=rounds))
    assert (found.rounds, found.dropped, found.disturbed) == (kept, dropped, disturbed)


def test_a_machine_that_does_not_count_is_quiet() -> None:
    time = Time()
    clock = Clock(wall=lambda: time.wall, cpu=lambda: time.cpu, busy=lambda: None)
    found = measure(time.row(0.06, 0.03), Settings(rounds=5, clock=clock))
    assert not found.disturbed
    assert found.candidates[0].wall.median == pytest.approx(0.5)


def test_order_is_shuffled_and_repeatable() -> None:
    orders = []
    for seed in (0, 0, 1):
        time, calls = Time(), []

        def logged(name: str, time: Time = time, calls: list[str] = calls) -> Operation:
            inner = time.operation(0.06)
            return lambda: (calls.append(name), inner())[1]

        names = ["a", "b", "c"]
        floor, *rest = (Candidate(name, lambda name=name: logged(name)) for name in names)
        measure(Row("case", "F", floor, tuple(rest)), Settings(rounds=6, clock=time.clock(), seed=seed))
        orders.append("".join(calls))
    assert orders[0] == orders[1] != orders[2]


def test_candidates_are_made_anew_and_each_making_counts() -> None:
    """The second making of a candidate is three times as slow, as memory in another place might be."""
    time = Time()
    made: list[str] = []

    def making(name: str, seconds: float) -> Operation:
        made.append(name)
        return time.operation(seconds * (3 if name == "slow" and made.count(name) > 1 else 1))

    floor, slow = (Candidate(name, lambda n=name: making(n, 0.001)) for name in ("floor", "slow"))
    found = measure(Row("case", "F", floor, (slow,)), time.settings(rounds=7, fresh=3))
    assert [sorted(made[i : i + 2]) for i in (0, 2, 4)] == [["floor", "slow"]] * 3
    assert (len(made), found.rounds, found.floor.name) == (6, 7, "floor")
    assert [found.candidates[0].wall.low, found.candidates[0].wall.high] == pytest.approx([1, 3])
    assert len({tuple(made[i : i + 2]) for i in (0, 2, 4)}) == 2, "the order of making is the same each time"


def test_quartiles() -> None:
    assert Ratio.of([3.0, 1.0, 2.0, 5.0, 4.0]) == Ratio(3.0, 2.0, 4.0)
    assert Ratio.of([1.5]) == Ratio(1.5, 1.5, 1.5)


def test_deviation_is_relative_to_the_largest_entry() -> None:
    assert deviation([torch.tensor([10.0, 1.1])], [torch.tensor([10.0, 1.0])]) == pytest.approx(0.01)
    with pytest.raises(ValueError, match="zip"):
        deviation([], [torch.ones(1)])


def test_peak_memory_counts_what_is_alive_together() -> None:
    mib = 2**18  # float32 entries in one MiB
    x = torch.ones(mib)
    assert highest([5, 3, -5, 4, -7]) == 8
    assert peak_mib(lambda: x + 1) == pytest.approx(1.0, abs=0.01)
    assert peak_mib(lambda: (x + 1) + 1) == pytest.approx(2.0, abs=0.01)
    assert peak_mib(lambda: x.add_(1)) == pytest.approx(0.0, abs=0.01)
    held = [torch.ones(mib)]

    def replaced() -> None:  # what it holds is released first, and was allocated before the profiler ran
        held.clear()
        held.append(x + 1)

    assert peak_mib(replaced) == pytest.approx(0.0, abs=0.01)


def test_operations_return_output_and_gradients() -> None:
    x = torch.ones(3, requires_grad=True)
    assert not operation_of(lambda: 2 * x, [x], "F")()[0].requires_grad
    output, grad = operation_of(lambda: (2 * x).sum(), [x], "FB")()
    assert output.item() == 6
    assert torch.equal(grad, torch.full((3,), 2.0))
    assert len(operation_of(lambda: 2 * x, [x], "FB")()) == 2


def test_the_machine_is_described_without_its_name() -> None:
    assert {"processor", "cores", "system"} <= set(describe())
    assert {"python", "torch", "gonio"} <= set(versions())
    assert set(allocator()) <= {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"}
    first, second = busy_seconds(), busy_seconds()
    assert first is None or 0 < first <= second
