"""An input of a model, from a shape or a file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from gonio.errors import GonioError, InvalidArgumentError, UnreadableFileError
from gonio.seeding import generator
from gonio.surgery.equivalent import outputs

__all__ = ["check_runs", "read_batch"]

_SUFFIXES = (".pt", ".pth", ".npy", ".safetensors")
_MOST = 2**31  # numbers in a batch; more is a slip of the finger


def read_batch(words: str, *, option: str) -> Any:
    """A batch: `2x3x224x224` for standard normal numbers, the same in every call, or a file.

    A file holds one tensor (`.pt`, `.npy`, `.safetensors`), or named tensors, which become keyword arguments.

    Raises:
        InvalidArgumentError: if the words are neither a shape nor a file.
        UnreadableFileError: if the file is damaged or holds anything else.
    """
    path = Path(words)
    if path.suffix in _SUFFIXES:
        return _from_file(path)
    sizes = words.split("x")
    if not all(size.isascii() and size.isdigit() and int(size) > 0 for size in sizes) or _count(sizes) > _MOST:
        raise InvalidArgumentError(
            f"{option} takes positive sizes joined by x, or a file ({', '.join(_SUFFIXES)})",
            repr(words),
            "Write e.g. 2x3x224x224.",
        )
    return torch.randn([int(size) for size in sizes], generator=generator(0, "batch"))


def check_runs(model: nn.Module, batch: Any, *, option: str) -> None:
    """A batch that the model cannot take is the user's mistake, and is said so.

    Raises:
        InvalidArgumentError: with what the model raised.
    """
    try:
        outputs(model, batch)
    except GonioError:
        raise
    except Exception as error:  # whatever a user's model raises
        found = (str(error).splitlines() or [type(error).__name__])[0]
        raise InvalidArgumentError(f"{option} must be an input that the model takes", found, "Correct it.") from error


def _count(sizes: list[str]) -> int:
    return math.prod(int(size) for size in sizes)


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise UnreadableFileError(str(path), "there is no such file", "Check the path.")
    try:
        content = _loaded(path)
    except Exception as error:  # a hostile or damaged file provokes almost anything
        why = f"it is damaged or holds more than tensors ({(str(error).splitlines() or [''])[0][:200]})"
        raise UnreadableFileError(str(path), why, "Save one tensor, or a dict of tensors.") from error
    named = isinstance(content, dict) and content and all(isinstance(value, Tensor) for value in content.values())
    if not (isinstance(content, Tensor) or named):
        raise UnreadableFileError(
            str(path), f"it holds a {type(content).__name__}", "Save one tensor, or a dict of them."
        )
    return next(iter(content.values())) if named and len(content) == 1 else content


def _loaded(path: Path) -> Any:
    if path.suffix == ".npy":
        return torch.from_numpy(numpy.load(path, allow_pickle=False))
    if path.suffix == ".safetensors":
        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)
