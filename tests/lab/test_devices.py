"""Devices without having one: names, what each process sees, refusals, and the meter on a stand-in for a GPU."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gonio.errors import InvalidArgumentError
from gonio.lab.planning.planner import make_plan
from gonio.lab.running.cost import Gauge, peak_bytes
from gonio.lab.running.engines import Devices, Local
from gonio.lab.running.training import prepare_process


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_the_default_is_the_accelerator_if_there_is_one(monkeypatch: pytest.MonkeyPatch, two_gpus: None) -> None:
    assert Devices.named(None) == Devices("cuda", ("0", "1"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert Devices.named(None) == Devices("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert Devices.named(None) == Devices("cpu")


def test_one_gpu_by_its_number_and_those_that_this_process_may_use(
    monkeypatch: pytest.MonkeyPatch, two_gpus: None
) -> None:
    assert Devices.named("cuda:1") == Devices("cuda", ("1",))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert Devices.named("cuda") == Devices("cuda", ("5", "7"))
    assert Devices.named("cuda:1") == Devices("cuda", ("7",))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuda", "the device 'cuda' must be on this machine; found 0 such devices"),
        ("cuda:3", "the device 'cuda:3' must be on this machine; found 0"),
        ("mps", "the device 'mps' must be on this machine"),
        ("cpu:1", "a device is cpu, cuda, cuda:N or mps; found 'cpu:1'"),
        ("cuda:", "found 'cuda:'"),
        ("cuda:-1", "found 'cuda:-1'"),
    ],
)
def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(InvalidArgumentError, match=message):
        Devices.named(name)


def seen() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def test_each_process_sees_a_gpu_of_its_own() -> None:
    engine = Local(devices=Devices("cuda", ("5", "7")))
    assert engine.slots == 2
    calls = [engine.start(seen) for _ in range(2)]
    assert sorted(call.result() for call in calls) == ["5", "7"]
    busy = engine.start(seen)
    ended = engine.start(seen)
    other = ended.result()
    assert engine.start(seen).result() == other  # the one that is free again
    assert {busy.result(), other} == {"5", "7"}
    assert Local(jobs=3, devices=Devices("cuda", ("5", "7"))).slots == 6
    assert Local(devices=Devices("mps")).slots == 1
    assert Local(jobs=1).start(seen).result() == os.environ.get("CUDA_VISIBLE_DEVICES")


def test_the_page_says_what_is_bit_equal_on_an_accelerator() -> None:
    # planning builds the model on the CPU alone, so it can be done without the device
    plan = make_plan([], seeds=1, device="cuda")
    assert plan.device == "cuda"
    assert "are drawn on the CPU and are bit-equal on every device; sums are not" in plan.notes[-1]
    assert not any("bit-equal" in note for note in make_plan([], seeds=1).notes)


def test_a_precision_that_the_device_cannot_compute_in_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"precision fp16 needs a device that computes in it; found meta2?"):
        make_plan([], seeds=1, device="meta2", training={"precision": "fp16"})


def test_operations_without_a_deterministic_form_are_warned_about_on_a_device_alone() -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    threads = torch.get_num_threads()
    try:
        prepare_process("cuda")
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        prepare_process("cpu")
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.set_num_threads(threads)


class Event:
    """An event whose time is the number of calls before it, in seconds."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def record(self) -> None:
        self._calls.append("record")
        self.at = len(self._calls)

    def elapsed_time(self, other: Event) -> float:
        assert self._calls[-1] == "synchronize"  # else the events have not happened yet
        return 1000.0 * (other.at - self.at)


def stand_in(calls: list[str], *, counts: bool = True) -> Any:
    """As `torch.cuda`, and as `torch.mps` without a peak of the allocator."""
    module: dict[str, Any] = {
        "synchronize": lambda: calls.append("synchronize"),
        "Event": lambda enable_timing: Event(calls),
    }
    if counts:
        module["reset_peak_memory_stats"] = lambda: calls.append("reset")
        module["memory_allocated"] = lambda: 100
        module["max_memory_allocated"] = lambda: 350
    return SimpleNamespace(**module)


@pytest.mark.parametrize(("counts", "peak"), [(True, 250), (False, None)])
def test_an_accelerator_is_measured_by_its_events_and_its_allocator(
    monkeypatch: pytest.MonkeyPatch, counts: bool, peak: int | None
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch, "get_device_module", lambda device: stand_in(calls, counts=counts))
    with Gauge(torch.device("cuda")) as gauge:
        calls.append("step")
    assert gauge.seconds == 2.0
    assert gauge.peak == peak
    assert calls == ["synchronize", *["reset"] * counts, "record", "step", "record", "synchronize"]
    assert peak_bytes(lambda: None, torch.device("cuda")) == (peak or 0)
