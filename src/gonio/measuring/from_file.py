"""The tensors of a file: safetensors (also in shards) and torch checkpoints. No code in a file ever runs."""

from __future__ import annotations

import json
import os
import zipfile
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from gonio.errors import UnreadableFileError
from gonio.measuring.entry import Entry
from gonio.measuring.from_state import entries_of_shapes, entries_of_state, state_in

__all__ = ["entries_of_file"]

LARGEST_INDEX = 100 << 20  # bytes; the index of a model of a million tensors is smaller
REMAP = 64 << 20  # bytes
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def entries_of_file(path: str | os.PathLike[str]) -> tuple[list[Entry], tuple[str, ...]]:
    """The entries of a file or of a folder that holds one model, and notes on how it was read.

    `.safetensors`, `.safetensors.index.json` with its shards, `.pt`, `.pth`, `.bin`, `.ckpt`. Torch files
    are loaded with `weights_only`, which builds tensors and plain containers and nothing else.

    Raises:
        UnreadableFileError: if the file is missing, damaged, of an unknown kind, or holds more than data.
    """
    target = Path(path)
    if target.is_dir():
        target = _in_folder(target)
    if not target.is_file():
        raise UnreadableFileError(str(path), "there is no such file", "Check the path.")
    if target.name.endswith(".index.json"):
        return _sharded(target), ()
    if target.suffix == ".safetensors":
        return _safetensors(target), ()
    if target.suffix in SUFFIXES:
        state, key = state_in(_torch(target), what=repr(target.name))
        return entries_of_state(state), (f"read from {key!r} of the checkpoint",) if key else ()
    known = ", ".join((".safetensors", ".safetensors.index.json", *SUFFIXES))
    raise UnreadableFileError(str(path), f"its kind {target.suffix!r} is not known", f"Known kinds: {known}.")


def _in_folder(folder: Path) -> Path:
    """The one model of a folder, an index before single files."""
    for pattern in ("*.safetensors.index.json", "*.safetensors", "*.bin.index.json", "*.bin", "*.pt", "*.pth"):
        found = sorted(folder.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(f.name for f in found[:8])
            raise UnreadableFileError(str(folder), f"it holds several: {names}", "Name one of them.")
    raise UnreadableFileError(str(folder), "it holds no checkpoint", "Name a .safetensors or .pt file.")


def _safetensors(path: Path) -> list[Entry]:
    file = _Safetensors(path)
    return entries_of_shapes(file.shapes, {name: partial(file.read, name) for name in file.shapes})


class _Safetensors:
    """A safetensors file that is read tensor by tensor.

    Its reader maps the file, and pages once touched stay in memory while the map does; so the file is
    opened anew after every :data:`REMAP` bytes. The reader checks the header against the file's length.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.mapped = path, 0
        self.file = self.open()
        try:
            self.shapes = {name: tuple(self.file.get_slice(name).get_shape()) for name in self.file.keys()}  # noqa: SIM118
        except Exception as error:
            raise _damaged(path, error) from error

    def open(self) -> Any:
        try:
            return safe_open(self.path, framework="pt", device="cpu")
        except Exception as error:  # the reader's own errors, OSError, and what a hostile header provokes
            raise _damaged(self.path, error) from error

    def read(self, name: str) -> Tensor:
        if self.mapped > REMAP:
            self.file, self.mapped = self.open(), 0
        tensor: Tensor = self.file.get_tensor(name)
        self.mapped += tensor.nbytes
        return tensor


def _damaged(path: Path, error: BaseException) -> UnreadableFileError:
    return UnreadableFileError(
        str(path), f"it is not an intact file of its kind ({error})", "Copy or download it again."
    )


def _sharded(index: Path) -> list[Entry]:
    """Tensor by tensor through all shards that the index names, which must lie beside it."""
    shards = _weight_map(index)
    files: dict[str, Any] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    loads: dict[str, Any] = {}
    missing: list[Entry] = []
    for name, shard in shards.items():
        reason = _shard(index.parent, shard, files)
        held = files.get(shard)
        if reason or held is None or name not in held:
            reason = reason or f"the shard {shard} does not hold it"
            missing.append(Entry(name, "", None, None, reason))
            continue
        shapes[name], loads[name] = held[name]
    return entries_of_shapes(shapes, loads) + missing


def _weight_map(index: Path) -> dict[str, str]:
    if index.stat().st_size > LARGEST_INDEX:
        raise UnreadableFileError(str(index), f"it is larger than {LARGEST_INDEX} bytes", "It is no index.")
    try:
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        pairs = {str(name): str(shard) for name, shard in shards.items()}
    except Exception as error:
        raise UnreadableFileError(
            str(index), f"it is not an index with a weight_map ({error})", "Name the shards one by one."
        ) from error
    outside = [s for s in set(pairs.values()) if PurePosixPath(s).name != s or "\\" in s or s in ("", ".", "..")]
    if outside:
        raise UnreadableFileError(
            str(index), f"it names a file outside its folder: {outside[0]!r}", "Shards lie beside their index."
        )
    return pairs


def _shard(folder: Path, shard: str, files: dict[str, Any]) -> str:
    """Open a shard once: name → (shape, how to read it). Returns why it cannot be read."""
    if shard in files:
        return ""
    path = folder / shard
    if not path.is_file():
        return f"its shard {shard} is missing"
    if path.suffix == ".safetensors":
        file = _Safetensors(path)
        files[shard] = {name: (shape, partial(file.read, name)) for name, shape in file.shapes.items()}
        return ""
    state, _ = state_in(_torch(path), what=repr(shard))
    files[shard] = {n: (tuple(t.shape), partial(_same, t)) for n, t in state.items() if isinstance(t, Tensor)}
    return ""


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _torch(path: Path) -> Any:
    """A torch checkpoint as plain data; the file is mapped, so that tensors are read when used."""
    zipped = _zipped(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
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
        raise _damaged(path, error) from error
    if unfolded > path.stat().st_size:
        raise UnreadableFileError(
            str(path), f"its archive would unfold to {unfolded} bytes", "Such a file is not written by torch.save."
        )
    return True
