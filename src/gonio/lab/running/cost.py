"""Cost of a recipe per training step: time and peak memory as ratios to the baseline's.

Absolute seconds depend on the machine and its load. So the models alternate in one process, block by block, and
each block gives one ratio. On the CPU time is that of the process; on an accelerator it is the time between two events
of its queue, and memory is what its allocator reports.
"""

from __future__ import annotations

import gc
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from gonio.execution import device_of
from gonio.lab.judging.results import CostRow
from gonio.lab.plan import RecipeEntry, StudyPlan
from gonio.lab.running.training import TrainingStep, batches, build, make_optimizer, task_of
from gonio.lab.tasks.task import Task

_WARM_UP = 5  # steps; allocators and kernel selection settle in the first two
_BLOCKS = 21  # odd, so that the median is one of them
_TURN = 0.03  # seconds of the baseline per block: 100 times the clock's and scheduler's grain
_LONGEST = 12.0  # seconds for all blocks; at least 5 are made
_MEMORY_BLOCKS = 3
_CPU = torch.device("cpu")

# torch's counter supports the attention kernels of GPUs only; on the CPU the shapes are the first arguments too
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda *s, **_: int(sdpa_flop_count(*s[:3])),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *s, **_: int(
        sdpa_backward_flop_count(*s[:4])
    ),
}


def measure_costs(plan: StudyPlan, entries: Sequence[RecipeEntry]) -> list[CostRow]:
    """Time and memory of one training step of each recipe over the baseline's, and the sizes of both.

    A step is forward, loss and penalty, backward, optimizer, on one batch and one thread. Memory is the peak of the
    allocator during a step, above its level before: activations, gradients and temporaries.
    """
    task, device = task_of(plan), torch.device(plan.device)
    baseline, *steps = [training_step(plan, task, entry) for entry in (plan.baseline, *entries)]
    hashes = [entry.hash for entry in entries]
    rows: list[CostRow] = []
    blocks = time_blocks([baseline, *steps], device, least=5, until=time.monotonic() + _LONGEST)
    for block, (first, *seconds) in enumerate(blocks):
        rows += [(h, "step_time", block, each / first) for h, each in zip(hashes, seconds, strict=True)]
    with silent_stderr():
        for block in range(_MEMORY_BLOCKS):
            base, *peaks = [peak_bytes(step, device) for step in (baseline, *steps)]
            rows += [(h, "memory", block, peak / base) for h, peak in zip(hashes, peaks, strict=True) if peak and base]
    for entry, step in zip((plan.baseline, *entries), (baseline, *steps), strict=True):
        model, applied, _ = build(plan, task, entry, plan.seeds[0])
        applied.hold_(make_optimizer(model, plan.training_of(entry)))  # may add learned magnitudes
        rows.append((entry.hash, "parameters", 0, sum(p.numel() for p in model.parameters())))
        rows.append((entry.hash, "flops", 0, step_flops(step)))
    return rows


@contextmanager
def silent_stderr() -> Iterator[None]:
    """Suppress the profiler's C++ log, several lines per use."""
    saved = os.dup(2)
    try:
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def training_step(plan: StudyPlan, task: Task, entry: RecipeEntry) -> Callable[[], None]:
    """A function that runs one training step of a warmed-up model of the recipe."""
    seed, training = plan.seeds[0], plan.training_of(entry)
    model, applied, _ = build(plan, task, entry, seed)
    task = task.on(device_of(model))
    taken = TrainingStep(model, task, training, applied.penalty, hold=applied.hold_)
    batch = next(batches(task, training.batch_size, seed=seed, epoch=0, training=training))
    model.train()

    def step() -> None:
        taken(*batch)

    for _ in range(_WARM_UP):
        step()
    return step


def time_blocks(
    steps: Sequence[Callable[[], None]], device: torch.device, *, least: int, until: float
) -> list[list[float]]:
    """The seconds of each function in each block: at least so many blocks, and no more after this moment of the clock.

    A block runs each of them as often, so that the first takes at least 0.03 s.
    """
    count = max(1, math.ceil(_TURN / _seconds(steps[0], 3, device) * 3))
    blocks: list[list[float]] = []
    while len(blocks) < _BLOCKS and (len(blocks) < least or time.monotonic() < until):
        # The order rotates, so that no model always runs after the same one.
        turn = len(blocks) % len(steps)
        order = [*range(turn, len(steps)), *range(turn)]
        seconds = {index: _seconds(steps[index], count, device) / count for index in order}
        blocks.append([seconds[index] for index in range(len(steps))])
    return blocks


def _seconds(step: Callable[[], None], count: int, device: torch.device) -> float:
    with Gauge(device) as gauge:
        for _ in range(count):
            step()
    return gauge.seconds


class Gauge:
    """What a block of code costs on a device.

    Attributes:
        seconds: CPU time of this process; on an accelerator the time between two events of its queue.
        peak: bytes that the accelerator's allocator held at most, above its level before; None where it does not
            count, as on the CPU.

    Example:
        >>> from gonio.lab.running.cost import Gauge
        >>> with Gauge(torch.device("cpu")) as gauge:
        ...     _ = torch.ones(10).sum()
        >>> gauge.seconds >= 0, gauge.peak
        (True, None)
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0
        self.peak: int | None = None
        self._module = None if device.type == "cpu" else torch.get_device_module(device)

    def __enter__(self) -> Gauge:
        if self._module is None:
            self._began = time.process_time()
            return self
        self._module.synchronize()
        with suppress(AttributeError):  # Apple's allocator has no peak
            self._module.reset_peak_memory_stats()
            self._level = self._module.memory_allocated()
        event = getattr(self._module, "Event", None) or self._module.event.Event
        self._events = event(enable_timing=True), event(enable_timing=True)
        self._events[0].record()
        return self

    def __exit__(self, *_: object) -> None:
        if self._module is None:
            self.seconds = time.process_time() - self._began
            return
        self._events[1].record()
        self._module.synchronize()
        self.seconds = self._events[0].elapsed_time(self._events[1]) / 1000
        with suppress(AttributeError):
            self.peak = self._module.max_memory_allocated() - self._level


def step_flops(step: Callable[[], None]) -> int:
    """Floating-point operations of the matrix products, convolutions and attentions of one step.

    Elementwise operations are not counted: their cost is memory traffic, which the step time includes.
    """
    with FlopCounterMode(display=False, custom_mapping=_ATTENTION) as counter:
        step()
    return int(counter.get_total_flops())


@contextmanager
def _no_garbage() -> Iterator[None]:
    """The collector frees nothing meanwhile: torch takes what an earlier profile saw allocated off the level."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def peak_bytes(step: Callable[[], None], device: torch.device = _CPU) -> int:
    """Peak bytes of the device's allocator during `step`, above its level before; 0 where it does not count."""
    if device != _CPU:
        with Gauge(device) as gauge:
            step()
        return gauge.peak or 0
    activities = [torch.profiler.ProfilerActivity.CPU]
    with _no_garbage(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    held = peak = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak
