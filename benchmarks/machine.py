"""What a figure depends on besides the code: the machine, its load, versions, the allocator."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import torch

__all__ = ["TUNED_MALLOC", "allocator", "busy_seconds", "describe", "restart_with", "versions"]

# With glibc's defaults every temporary above 128 KiB is mapped and faulted in anew, at up to nine times
# the cost of the arithmetic that fills it. These settings keep freed memory, as a GPU's allocator does.
TUNED_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "268435456",
}
STAT = Path("/proc/stat")


def restart_with(settings: Mapping[str, str], module: str, arguments: list[str]) -> None:
    """Run this program again under environment settings that are read once, at the start of a process."""
    if all(os.environ.get(key) == value for key, value in settings.items()):
        return
    command = [sys.executable, "-m", module, *arguments]
    os.execve(sys.executable, command, {**os.environ, **settings})


def allocator() -> dict[str, str]:
    """The allocator settings in force; empty for glibc's defaults."""
    return {key: os.environ[key] for key in TUNED_MALLOC if key in os.environ}


def busy_seconds() -> float | None:
    """Seconds that all processors of the machine have worked since it started; None where nobody counts."""
    if not STAT.exists():
        return None
    user, nice, system, _, _, interrupt, soft, steal, *_ = map(int, STAT.read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + interrupt + soft + steal) / os.sysconf("SC_CLK_TCK")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def describe() -> dict[str, str | int]:
    """The hardware, without anything that names the machine or its user."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "processor": _processor(),
        "cores": cores,
        "system": platform.system(),
        "architecture": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("gonio", "torch", "numpy", "scikit-learn", "faiss-cpu", "weightwatcher"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
