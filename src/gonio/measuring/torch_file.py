"""A torch checkpoint, read as data: no code in it ever runs."""

from __future__ import annotations

import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gonio.errors import UnreadableFileError
from gonio.measuring.checkpoint import Found, state_in
from gonio.measuring.safetensors_file import damaged
from gonio.measuring.stored import Stored, header_of

__all__ = ["stored_in_torch"]

REMAP = 256 << 20  # bytes


def stored_in_torch(path: Path) -> tuple[Found, dict[str, Stored]]:
    """The state dict of a checkpoint, without its tensors, and these, which are read when they are measured.

    Raises:
        UnreadableFileError: if the file is damaged or holds more than data.
        InvalidArgumentError: if there are no named tensors in it.
    """
    file = _TorchFile(path)
    found = file.found
    stored = {
        str(name): Stored(*header_of(value), partial(file.read, name))
        for name, value in found.state.items()
        if isinstance(value, Tensor)
    }
    others = {name: value for name, value in found.state.items() if not isinstance(value, Tensor)}
    return Found(others, found.key, found.beside), stored


class _TorchFile:
    """Torch maps an archive, and pages once touched count as this process's memory while the map lasts: the
    file is loaded anew after every :data:`REMAP` bytes. Files of the old kind are held in memory."""

    def __init__(self, path: Path) -> None:
        self.path, self.touched, self.zipped = path, 0, _zipped(path)
        self.found = self.load()

    def load(self) -> Found:
        return state_in(_unpickled(self.path, mapped=self.zipped), what=repr(self.path.name))

    def read(self, name: Any) -> Tensor:
        if self.zipped and self.touched > REMAP:
            del self.found  # the old map first, or both would count
            self.found, self.touched = self.load(), 0
        tensor: Tensor = self.found.state[name]
        self.touched += tensor.nbytes if tensor.layout == torch.strided else 0
        return tensor


def _unpickled(path: Path, *, mapped: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a hostile pickle provokes almost any of them
        raise UnreadableFileError(
            str(path),
            f"it is damaged or holds more than tensors and plain containers ({_first_line(error)})",
            "Code in a file is never run here: save model.state_dict(), best as .safetensors.",
        ) from error


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    known = [line for line in lines if line.startswith("WeightsUnpickler error")]
    return (known or lines or [type(error).__name__])[0][:300]


def _zipped(path: Path) -> bool:
    """Whether the file is an archive; one that would unfold to more than its size is refused.

    torch stores without compression, so no file of its own does that.
    """
    try:
        if not zipfile.is_zipfile(path):
            return False
        with zipfile.ZipFile(path) as archive:
            unfolded = sum(info.file_size for info in archive.infolist())
    except Exception as error:
        raise damaged(path, error) from error
    if unfolded > path.stat().st_size:
        raise UnreadableFileError(
            str(path), f"its archive would unfold to {unfolded} bytes", "Such a file is not written by torch.save."
        )
    return True
