"""The global random state, which calls of other people's modules may not change, in many threads at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Threads that enter a context again and again while the collector finds tensors in cycles, after which it says so.
MANY_THREADS = """
import gc, os, sys, threading, time
import torch
from gonio.seeding import state_kept

enter = state_kept if sys.argv[1] == "gonio" else lambda: torch.random.fork_rng(devices=[])
gc.set_threshold(2)
end = time.monotonic() + float(sys.argv[2])

class Cycle:
    pass

def work():
    while time.monotonic() < end:
        one = Cycle()
        one.itself, one.tensor = one, torch.ones(3)
        with enter():
            torch.rand(1)

threads = [threading.Thread(target=work, daemon=True) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("ended", flush=True)
os._exit(0)
"""


def in_threads(whose: str, seconds: float, patience: float) -> str:
    command = [sys.executable, "-c", MANY_THREADS, whose, str(seconds)]
    return subprocess.run(command, capture_output=True, text=True, timeout=patience, check=True).stdout.strip()


def test_threads_that_keep_the_random_state_do_not_wait_for_each_other_for_good() -> None:
    assert in_threads("gonio", 2, 300) == "ended"


@pytest.mark.slow
def test_those_of_torch_do() -> None:
    """Negative control; once it fails, torch's own context is enough."""
    with pytest.raises(subprocess.TimeoutExpired, match="timed out after 60 seconds"):
        in_threads("torch", 10, 60)
