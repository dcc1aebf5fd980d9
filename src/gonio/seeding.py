"""Random generators derived from a seed and names, independent of the global generator."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["RandomInput", "derive_seed", "generator"]
__dir__ = __all__.copy  # the public names alone


def derive_seed(seed: int, *names: str | int) -> int:
    """A 63-bit seed that depends only on `seed` and the names.

    Different names give independent streams; the same names give the same stream in every process and on
    every platform. Layers that two recipes leave unchanged therefore start bit-equal.

    Example:
        >>> derive_seed(0, "conv1") == derive_seed(0, "conv1")
        True
        >>> derive_seed(0, "conv1") == derive_seed(0, "conv2")
        False
    """
    # The length of each part is a prefix, so that ("ab", "c") and ("a", "bc") differ.
    parts = [str(seed), *(str(name) for name in names)]
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *names: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """A new `torch.Generator` on `device`, seeded by :func:`derive_seed`.

    Generators of different devices give different numbers for the same seed.

    Example:
        >>> a = torch.rand(2, generator=generator(0, "data"))
        >>> b = torch.rand(2, generator=generator(0, "data"))
        >>> torch.equal(a, b)
        True
    """
    return torch.Generator(device=device).manual_seed(derive_seed(seed, *names))


def normal(shape: Sequence[int], seed: int, *names: str | int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers of the CPU, which depend on `seed`, the names, shape and dtype alone: the same for every device.

    Example:
        >>> from gonio.seeding import normal
        >>> torch.equal(normal((2, 3), 0, "start"), normal((2, 3), 0, "start"))
        True
    """
    return torch.randn(tuple(shape), generator=generator(seed, *names), dtype=dtype, device="cpu")


_STATE = threading.Lock()


@contextmanager
def state_kept(devices: Sequence[torch.device | int] | None = ()) -> Iterator[None]:
    """Whatever the block draws, the global generators of the CPU and of these devices are as before afterwards.

    None for all devices of the accelerator, if it has generators.

    As :func:`torch.random.fork_rng`, which can stop for good where two threads enter it: torch reads a state under a
    lock of its own, and may wait there for the interpreter, which the other thread keeps while it waits for that lock.

    Example:
        >>> from gonio.seeding import state_kept
        >>> before = torch.get_rng_state()
        >>> with state_kept():
        ...     drawn = torch.rand(3)
        >>> torch.equal(before, torch.get_rng_state())
        True
    """
    if devices is None and not hasattr(torch.get_device_module(), "get_rng_state"):
        devices = ()  # as of a device that is out of torch's tree
    kept = torch.random.fork_rng(None if devices is None else [*devices])
    with _STATE:
        kept.__enter__()
    try:
        yield
    finally:
        with _STATE:
            kept.__exit__(None, None, None)


@dataclass(frozen=True)
class RandomInput:
    """An input of standard normal numbers in the place of data, the same ones for the same sizes and seed.

    A model runs on its `value`, which shows whether it runs and whether two models compute the same function. Its
    statistics are not those of any data: :func:`gonio.doctor` averages nothing over it.

    Example:
        >>> given = gonio.seeding.RandomInput((2, 8))
        >>> given.value.shape, torch.equal(given.value, gonio.seeding.RandomInput((2, 8)).value)
        (torch.Size([2, 8]), True)
    """

    sizes: tuple[int, ...]
    seed: int = 0

    @property
    def value(self) -> Tensor:
        """The numbers, with these sizes."""
        return normal(self.sizes, self.seed, "batch")
