"""The server from which the processes of a study are forked: it has imported torch, so a run starts in 40 ms instead
of 3 s. This file imports nothing large, so that the server can import beside the program that starts it.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import forkserver, set_forkserver_preload

# torch.optim imports torch._dynamo when the first optimizer is made.
_PRELOAD = ("torch", "torch._dynamo", "torch.optim", "sklearn.datasets", "gonio.lab")
_IS_SERVER = "GONIO_FORK_SERVER"
_SETTINGS = {
    _IS_SERVER: "1",
    "OMP_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # the driver is asked, so processes can be forked
}


@contextmanager
def running(*modules: str) -> Iterator[None]:
    """The server runs, and a process that is started in the block never sees a SIGINT.

    A terminal sends SIGINT to every process, and only the parent handles it. In the parent a signal during the block
    arrives at its end.

    Args:
        modules: more that the server imports, if it is started now.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with _environment(_SETTINGS):
            set_forkserver_preload([__name__, *modules])
            forkserver.ensure_running()
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set variables while the server is started, which keeps them for its processes."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _preload() -> None:
    """Import what the processes need.

    That makes a million objects that stay. The garbage collector would go through them again and again, which takes a
    third of the time; afterwards it passes over them, also in the forked processes.
    """
    gc.disable()
    for name in _PRELOAD:
        with suppress(ImportError):  # a process that needs it says so
            import_module(name)
    gc.freeze()
    gc.enable()


if os.environ.pop(_IS_SERVER, None):  # the server imports this file first
    _preload()
