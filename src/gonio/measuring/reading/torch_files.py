"""Checkpoints of torch: tensors and plain containers, read when they are measured; no code in a file ever runs."""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError, UnreadableFileError, listing
from gonio.escaping import plain, shorten
from gonio.measuring.reading.entry import StoredTensor, is_blown_up, stored_entries
from gonio.measuring.reading.hqq_files import open_layers
from gonio.measuring.reading.opened import TORCH, Opened, damaged, intact, misnamed
from gonio.measuring.reading.optimizers import Raw, fitted, optimizers_in
from gonio.measuring.reading.pickles import (
    OF_SETTINGS,
    OF_SUBCLASSES,
    OF_TORCH,
    Archive,
    ModuleState,
    Record,
    StoredPart,
    parts_of,
    state_of_module,
)
from gonio.measuring.reading.state_dicts import Found, by_form, leaves, open_state, state_in
from gonio.messages import Message, say

SUFFIXES = TORCH
_CLASS = re.compile(r"GLOBAL ([\w.]{1,200}) (?:was not an allowed global|whose module)")  # in errors of torch's reader
_OTHER = re.compile(r"it holds (an object of|a tensor of the subclass) ([\w.]{1,200})")  # of the reader of pickles here
_OPCODE = "Unsupported operand"  # in errors of torch's reader: of a protocol of pickle that it does not take
_PARTS_OF_A_PROCESS = "must be imported to load DTensors"  # in errors of torch's reader
MOST_FILES = 64  # beside a model, in which the state of an optimizer is looked for
_DEPTH = 64  # of containers in which objects that are not read are looked for
_DIVIDED = "tensor_model_parallel_size"  # of the settings that Megatron stores
REMAP = 256 << 20  # bytes of tensors after which a checkpoint is mapped again


class _Mapped:
    """A torch file whose tensors are read when they are measured.

    Torch maps an archive into memory, and pages once read count as this process's memory while the map lasts: after
    every :data:`REMAP` bytes the file is loaded again. Files of the old format are loaded whole.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._zipped, self._touched = path, _is_archive(path), 0
        self.content = _unpickled(path, mapped=self._zipped)

    def read(self, at: tuple[Any, ...]) -> Tensor:
        """The tensor at a place, the keys from the content on."""
        if self._zipped and self._touched > REMAP:
            self.content = None  # releases the old map before the new one is made
            self.content, self._touched = _unpickled(self._path, mapped=True), 0
        tensor = self.content
        for key in at:
            tensor = tensor[key]
        _check_stored(tensor)
        self._touched += tensor.nbytes if tensor.layout == torch.strided else 0
        held: Tensor = tensor
        return held

    def stored(self, at: tuple[Any, ...], value: Any) -> StoredTensor | None:
        """The tensor at a place; None for a value that is no tensor."""
        return StoredTensor.of(value, partial(self.read, at)) if isinstance(value, Tensor) else None


def open_torch(path: Path, key: str = "") -> Opened:
    """The tensors of a torch checkpoint, read when they are measured, and the states of optimizers in it."""
    mapped = _Mapped(path)
    if not key and (layers := open_layers(mapped.content, mapped.read)) is not None:
        return layers
    classes = sorted({one.name for _, one in leaves(mapped.content, _DEPTH) if isinstance(one, Record)})  # not read
    try:
        found = state_in(mapped.content, what=repr(path.name), key=key)
    except InvalidArgumentError as error:
        raw = [] if key else optimizers_in(mapped.content, mapped.stored)
        arrays = any(name.startswith("numpy.") for name in classes)
        if arrays and not any(by_form(mapped.content)):
            do = "Save them as tensors, each by torch.from_numpy(array)."
            raise UnreadableFileError(str(path), "its weights are arrays of numpy, which are not read", do) from error
        if not raw:
            raise
        refusal = error.with_traceback(None)  # whose frames hold the content, and so the first map
        return Opened({}, refusal=refusal, optimizer=fitted(raw, {}, in_order=True))
    raw = optimizers_in(mapped.content, mapped.stored)
    at, prefix = found.at, found.prefix  # the reader must not hold what was found: it would keep the first map
    opened = open_state(found, raw, lambda name: mapped.read((*at, f"{prefix}{name}" if prefix else name)))
    notes = [say("not read: objects of {names}", names=listing(classes, limit=3))] if classes else []
    notes += [*of_module(found.whole), *of_parallel(mapped.content)]
    return replace(opened, notes=(*opened.notes, *notes))


def of_module(state: Any) -> tuple[Message, ...]:
    """That a state dict was made from a module that was saved whole; none for another one."""
    if not isinstance(state, ModuleState):
        return ()
    return (say("an object of {name} is read as its parameters and buffers, without its code", name=plain(state.name)),)


def of_parallel(content: Any) -> tuple[Message, ...]:
    """That a file may hold parts of layers, by the setting that Megatron stores beside them; none for another one."""
    for name, value in leaves(content, _DEPTH):
        held = value.state if isinstance(value, Record) and isinstance(value.state, dict) else {}  # argparse.Namespace
        place, number = (f"{name}.{_DIVIDED}", held.get(_DIVIDED)) if held else (name, value)
        if place.rpartition(".")[2] == _DIVIDED and type(number) is int and number > 1:
            told = {"name": plain(place, longest=80), "n": number}
            return (
                say("its training divided layers over {n} processes ({name}): they may be parts of layers", **told),
            )
    return ()


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


def state_of_torch(path: Path, key: str = "") -> tuple[Found, Any]:
    """The state dict of a torch checkpoint, to be loaded into a model, and the content of the file.

    Args:
        key: its place, where there are several.

    Raises:
        UnreadableFileError: as :func:`load_torch`, for keys that are not text, and for a tensor with more entries
            than the file stores.
        InvalidArgumentError: if it holds no named tensors.
    """
    content = load_torch(path)
    found = state_in(content, what=repr(path.name), key=key)
    try:
        for name, value in found.state.items():
            if not isinstance(name, str):
                raise ValueError(f"the key {shorten(repr(name))} is not text")
            _check_stored(value)
    except ValueError as error:
        raise UnreadableFileError(str(path), f"it is no state dict: {error}", "Save model.state_dict().") from error
    return found, content


def _check_stored(value: Any) -> None:
    """Refuse a tensor with far more entries than its storage, by a stride of 0."""
    if isinstance(value, Tensor) and value.layout == torch.strided and is_blown_up(value):
        raise ValueError(f"a tensor has {value.numel():,} entries, of which {stored_entries(value):,} are stored")


def mapped_content(path: Path) -> Any:
    """The content of a torch file: tensors and plain containers, mapped into memory; values are read when used.

    Raises:
        UnreadableFileError: as :func:`load_torch`.
    """
    return _unpickled(path, mapped=_is_archive(path))


def optimizer_files(folder: Path, model: Collection[Path]) -> tuple[dict[Path, list[Raw]], list[Path]]:
    """The torch files beside a model that hold states of optimizers, and those that are cut off or empty.

    Files of other content, and with objects that are not read, are no part of a checkpoint's weights or state.
    """
    found: dict[Path, list[Raw]] = {}
    broken = []
    others = [one for one in sorted(folder.iterdir()) if one.suffix in SUFFIXES and one.is_file() and one not in model]
    for path in others[:MOST_FILES]:
        try:
            mapped = _Mapped(path)
            raw = optimizers_in(mapped.content, mapped.stored)
        except UnreadableFileError:
            with path.open("rb") as file:
                start = file.read(2)
            broken += [path] if not start or (start == b"PK" and not zipfile.is_zipfile(path)) else []
            continue
        if raw:
            found[path] = raw
    return found, broken


def _unpickled(path: Path, *, mapped: bool) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol")  # of another program: refused below
            warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # torch's own, of its quantised tensors
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a hostile pickle provokes almost any of them
        other = error
        if (_CLASS.search(str(error)) or _OPCODE in str(error)) and zipfile.is_zipfile(path):
            try:
                return _as_data(path)
            except Exception as raised:
                other = raised
        try:
            why = _why_not(path, error, other)
        except OSError as refused:
            raise damaged(path, refused) from error
        raise (misnamed(path) or UnreadableFileError(str(path), *why)) from error


def _as_data(path: Path) -> Any:
    """The content of an archive with objects, which become records; its tensors are mapped into memory.

    A module becomes its state dict, a subclass of dict or list the plain one, and a tensor subclass under a name the
    tensors that it is made of, under the keys that torchao gives them.

    Raises:
        Exception: almost any for another archive, and for one that has no tensor beside its objects.
    """
    archive = Archive(path, allowed=OF_TORCH | OF_SETTINGS | OF_SUBCLASSES, objects=True)
    file, storages = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size), {}
    known: dict[int, Any] = {}  # containers that were read, so that one in many places is read once

    def tensor_of(part: StoredPart) -> Tensor:
        if not archive.holds(part):
            raise ValueError("a tensor has more bytes than its record")
        if part.key not in storages:
            storages[part.key] = file[slice(*archive.place(part))]
        empty = torch.empty(0, dtype=getattr(torch, part.dtype), device="cpu")
        return empty.set_(storages[part.key], part.offset, part.shape, part.strides)

    def by_parts(name: Any, value: Any) -> Iterator[tuple[Any, Any]]:
        parts = parts_of(value)
        path, _, last = str(name).rpartition(".")
        keys = {part: f"{path}._{last}_{part}".removeprefix(".") for part in parts or ()}
        yield from [(name, value)] if parts is None else ((keys[part], one) for part, one in parts.items())

    def read(value: Any) -> Any:
        if isinstance(value, StoredPart):
            return tensor_of(value)
        if id(value) not in known:
            known[id(value)] = read_container(value)
        return known[id(value)]

    def read_container(value: Any) -> Any:
        if isinstance(value, Record):
            value = state_of_module(value) or value.items or value.values or value
        if isinstance(value, dict):
            made = ModuleState(value.name) if isinstance(value, ModuleState) else {}
            made.update({key: read(one) for name, held in value.items() for key, one in by_parts(name, held)})
            return made
        return type(value)(map(read, value)) if isinstance(value, (list, tuple)) else value

    content = read(archive.content)
    held = [one for _, one in leaves(content, _DEPTH)]
    foreign = [one.name for one in held if isinstance(one, Record) and not one.known]
    if foreign and not any(isinstance(one, Tensor) for one in held):
        raise ValueError(f"it holds an object of {foreign[0]}")
    return content


def _why_not(path: Path, error: Exception, other: Exception) -> tuple[str, str]:
    """Why torch does not read a file, and the reader of archives with settings neither, and what to do."""
    with path.open("rb") as file:
        start = file.read(4)
    if not start:
        return "it is empty (0 bytes)", "Save it again."
    if start.startswith(b"PK") and not zipfile.is_zipfile(path):
        return "it is damaged: the end of the archive is missing", "Copy, download or save it again."
    if not start.startswith((b"PK", b"\x80")):
        return f"it is damaged or no checkpoint of torch: it begins with {start!r}", "Save model.state_dict()."
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # the text after the colon may follow on a line of its own, and before it torch advises to run the file's code
    _, known_error, told = " ".join(lines).partition("WeightsUnpickler error: ")
    known = [f"{known_error}{told.partition(' Check the documentation')[0].strip()}"] if known_error else []
    said = (known or lines or [type(error).__name__])[0]
    do = "Code in a file is never run here: save model.state_dict(), best as .safetensors."
    held = _OTHER.search(str(other))
    own = _CLASS.search(str(error)) if other is error else None
    if _PARTS_OF_A_PROCESS in str(error):
        return (
            say("it holds only the part of each tensor that one process had (DTensor)"),
            say("Save them together by torch.distributed.checkpoint, or the full_tensor() of each."),
        )
    if held and held[1].startswith("a tensor"):
        do = say("Code in a file is never run here: save plain tensors, such as the dequantize() of each.")
        return say("it holds more than tensors and plain containers: tensors of the subclass {name}", name=held[2]), do
    if named := held[2] if held else own[1] if own else "":
        return f"it holds more than tensors and plain containers: an object of {named}", do
    if other is not error:
        return (
            f"it is damaged: {plain(str(other) or type(other).__name__, longest=300)}",
            "Copy, download or save it again.",
        )
    return f"it is damaged or holds more than tensors and plain containers ({said[:300]})", do


def _is_archive(path: Path) -> bool:
    """Whether the file is a zip archive.

    Raises:
        UnreadableFileError: for TorchScript and programs of torch.export, and for an archive with compressed records,
            or one that unpacks to more than its size. torch.save stores without compression, so that no file of it
            does; torch maps a compressed record into memory as if its bytes were the values.
    """
    with intact(path):
        if not zipfile.is_zipfile(path):
            return False
        with zipfile.ZipFile(path) as archive:
            infos, names = archive.infolist(), archive.namelist()
        unfolded = sum(info.file_size for info in infos)
        scripted = any(name.count("/") == 1 and name.endswith("/constants.pkl") for name in names)
        saved = any(name.endswith("data.pkl") for name in names)
        exported = any(name.endswith(("serialized_exported_program.json", "/archive_format")) for name in names)
    if exported and not saved:
        do = "Load it with torch.export.load, and save its state_dict."
        raise UnreadableFileError(str(path), "it is a program of torch.export: code beside its tensors", do)
    if scripted:
        do = "Load it with torch.jit.load, and save its state_dict()."
        raise UnreadableFileError(str(path), "it is a TorchScript archive: code beside its tensors", do)
    if unfolded > path.stat().st_size:
        said = f"its archive would unfold to {unfolded} bytes"
        raise UnreadableFileError(str(path), said, "Such a file is not written by torch.save.")
    if saved and any(info.compress_type != zipfile.ZIP_STORED for info in infos):
        said = "the records of its archive are compressed, as torch.save does not write them"
        raise UnreadableFileError(str(path), said, "Read it with torch.load, and save it again with torch.save.")
    return True
