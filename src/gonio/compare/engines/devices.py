"""The devices of this machine: on which kind a study computes, and which one each of its processes sees."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from gonio.errors import InvalidArgumentError

__all__ = ["KINDS", "Devices"]

KINDS = ("cpu", "cuda", "mps")


@dataclass(frozen=True)
class Devices:
    """What the runs of a study compute on.

    Attributes:
        kind: `cpu`, `cuda` or `mps`; part of a plan, because results of different kinds differ in their last bits.
        visible: one value of `CUDA_VISIBLE_DEVICES` for each GPU; each process sees one of them, as its first. Empty
            if there is nothing to share out.

    Example:
        >>> gonio.compare.engines.Devices.named("cpu")
        Devices(kind='cpu', visible=())
    """

    kind: str = "cpu"
    visible: tuple[str, ...] = ()

    @classmethod
    def named(cls, name: str | None) -> Devices:
        """The devices of a name: `cpu`, `mps`, `cuda` (all GPUs) or `cuda:N`; None: the accelerator if there is one.

        Raises:
            InvalidArgumentError: there is no such device on this machine.
        """
        if name is None:
            return cls.named(next((kind for kind in ("cuda", "mps") if _count(kind)), "cpu"))
        kind, colon, number = name.partition(":")
        if kind not in KINDS or (colon and not (kind == "cuda" and number.isdecimal())):
            raise InvalidArgumentError("a device is cpu, cuda, cuda:N or mps", repr(name), "Choose one of them.")
        count = _count(kind)
        if count <= int(number or 0):
            found = f"{count} such device{'' if count == 1 else 's'} that this torch {torch.__version__} can use"
            raise InvalidArgumentError(f"the device {name!r} must be on this machine", found, "Choose another, or cpu.")
        if kind != "cuda":
            return cls(kind)
        listed = os.environ.get("CUDA_VISIBLE_DEVICES")  # of a shared machine: this process may use these alone
        names = listed.split(",") if listed else [str(index) for index in range(count)]
        return cls(kind, (names[int(number)],) if number else tuple(names[:count]))


def _count(kind: str) -> int:
    """How many devices of a kind there are; asking does not start CUDA in this process."""
    if kind == "cuda":
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # the driver is asked, so processes can be forked
        return torch.cuda.device_count()
    return int(kind == "cpu" or torch.backends.mps.is_available())
