"""Checkpoints of torch: tensors and plain containers, read when they are measured; no code in a file ever runs."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gonio.errors import UnreadableFileError
from gonio.escaping import shorten
from gonio.measuring.reading.entry import stored_entries
from gonio.measuring.reading.safetensors_files import damaged
from gonio.measuring.reading.state_dicts import Found, Opened, open_state, state_in

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")  # scripts of torch's own examples write model.pth.tar
_CLASS = re.compile(r"GLOBAL ([\w.]{1,200}) was not an allowed global")  # in errors of torch's reader
REMAP = 256 << 20  # bytes of tensors after which a checkpoint is mapped again


def open_torch(path: Path, key: str = "") -> Opened:
    """The tensors of a torch checkpoint, read when they are measured.

    Torch maps an archive into memory, and pages once read count as this process's memory while the map lasts:
    after every :data:`REMAP` bytes the file is loaded again. Files of the old format are loaded whole.
    """
    zipped = _is_archive(path)

    def load() -> Found:
        return state_in(_unpickled(path, mapped=zipped), what=repr(path.name), key=key)

    found, touched = load(), 0

    def read(name: Any) -> Tensor:
        nonlocal found, touched
        if zipped and touched > REMAP:
            del found  # releases the old map before the new one is made
            found, touched = load(), 0
        tensor: Tensor = found.state[name]
        _check_stored(tensor)
        touched += tensor.nbytes if tensor.layout == torch.strided else 0
        return tensor

    return open_state(found, read)


def load_torch(path: Path) -> Any:
    """The content of a torch file: tensors and plain containers, in memory.

    Raises:
        UnreadableFileError: if the file is damaged, holds more than data, or unpacks to more than its size.
    """
    _is_archive(path)
    content = _unpickled(path, mapped=False)
    try:
        for value in content.values() if isinstance(content, dict) else [content]:
            _check_stored(value)
    except ValueError as error:
        raise UnreadableFileError(str(path), str(error), "Save the tensor's clone().") from error
    return content


def state_of_torch(path: Path) -> tuple[Found, Any]:
    """The state dict of a torch checkpoint, to be loaded into a model, and the content of the file.

    Raises:
        UnreadableFileError: as :func:`load_torch`, for keys that are not text, and for a tensor with more entries
            than the file stores.
        InvalidArgumentError: if it holds no named tensors.
    """
    content = load_torch(path)
    found = state_in(content, what=repr(path.name))
    try:
        for name, value in found.state.items():
            if not isinstance(name, str):
                raise ValueError(f"the key {shorten(repr(name))} is not text")
            _check_stored(value)
    except ValueError as error:
        raise UnreadableFileError(str(path), f"it is no state dict: {error}", "Save model.state_dict().") from error
    return found, content


def _check_stored(value: Any) -> None:
    """Refuse a tensor with more entries than its storage: a kilobyte can claim terabytes by a stride of 0."""
    if isinstance(value, Tensor) and value.layout == torch.strided and value.numel() > stored_entries(value):
        raise ValueError(f"a tensor has {value.numel():,} entries, of which {stored_entries(value):,} are stored")


def mapped_content(path: Path) -> Any:
    """The content of a torch file: tensors and plain containers, mapped into memory; values are read when used.

    Raises:
        UnreadableFileError: as :func:`load_torch`.
    """
    return _unpickled(path, mapped=_is_archive(path))


def _unpickled(path: Path, *, mapped: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a hostile pickle provokes almost any of them
        try:
            why = _why_not(path, error)
        except OSError as refused:
            why = f"the system refuses it ({refused.strerror})", "Check the permissions."
        raise UnreadableFileError(str(path), *why) from error


def _why_not(path: Path, error: Exception) -> tuple[str, str]:
    """Why torch does not read a file, and what to do."""
    with path.open("rb") as file:
        start = file.read(4)
    if not start:
        return "it is empty (0 bytes)", "Save it again."
    if start.startswith(b"PK") and not zipfile.is_zipfile(path):
        return "it is damaged: the end of the archive is missing", "Copy, download or save it again."
    if not start.startswith((b"PK", b"\x80")):
        return f"it is damaged or no checkpoint of torch: it begins with {start!r}", "Save model.state_dict()."
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    known = [line for line in lines if line.startswith("WeightsUnpickler error")]
    said = (known or lines or [type(error).__name__])[0]
    do = "Code in a file is never run here: save model.state_dict(), best as .safetensors."
    held = _CLASS.search(said)
    if held:
        return f"it holds more than tensors and plain containers: an object of {held[1]}", do
    return f"it is damaged or holds more than tensors and plain containers ({said[:300]})", do


def _is_archive(path: Path) -> bool:
    """Whether the file is a zip archive.

    Raises:
        UnreadableFileError: for TorchScript, and for another archive that unpacks to more than its size. torch.save
            stores without compression, so that no file of it does.
    """
    try:
        if not zipfile.is_zipfile(path):
            return False
        with zipfile.ZipFile(path) as archive:
            unfolded = sum(info.file_size for info in archive.infolist())
            scripted = any(name.count("/") == 1 and name.endswith("/constants.pkl") for name in archive.namelist())
    except Exception as error:
        raise damaged(path, error) from error
    if scripted:
        do = "Load it with torch.jit.load, and save its state_dict()."
        raise UnreadableFileError(str(path), "it is a TorchScript archive: code beside its tensors", do)
    if unfolded > path.stat().st_size:
        said = f"its archive would unfold to {unfolded} bytes"
        raise UnreadableFileError(str(path), said, "Such a file is not written by torch.save.")
    return True
