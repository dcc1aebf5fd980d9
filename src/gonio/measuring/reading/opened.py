"""What a reader of a format makes of a file, and what all of them do: read bytes, and name what is wrong with them."""

from __future__ import annotations

import errno
import os
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import RawIOBase
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError, RefusedFileError, UnreadableFileError, listing
from gonio.escaping import plain, redact
from gonio.measuring.reading.entry import StoredTensor, TensorEntry, dtype_named
from gonio.measuring.reading.optimizers import OptimizerContents
from gonio.messages import Message, are, counted, say


@dataclass(frozen=True)
class Problem:
    """Something wrong with a file, or with a tensor's place; the code is of a rule on files.

    Attributes:
        tensors: of a problem of a file, the names of the tensors that cannot be read for it.
    """

    code: str
    path: str
    found: str
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True)
class HeaderFacts:
    """What the header of a file states of the model in it; None of what it does not state.

    Attributes:
        layers: its blocks; `optional`: the number of those that may be left out, as of layers that predict further
            tokens. `width`: of the vectors between them. `vocabulary`: the tokens.
        tensors: of all parts together, of a model in several files.
    """

    layers: int | None = None
    optional: int = 0
    width: int | None = None
    vocabulary: int | None = None
    tensors: int | None = None


class Watched:
    """Files as they are now, to be compared with what they are when all of them have been read.

    Example:
        >>> from gonio.measuring.reading.opened import Watched
        >>> Watched([]).changed()
        []
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._before = {file: _stamp(file) for file in files}

    def changed(self) -> list[Problem]:
        """A problem for each file that was replaced, written to or removed since."""
        said = say("it changed while it was read; check it again when it is whole")
        return [Problem("G701", file.name, said) for file, before in self._before.items() if _stamp(file) != before]


def _stamp(file: Path) -> tuple[int, ...] | None:
    """What tells that a file is another one than before, or was written to; None of a folder, or where it is gone."""
    try:
        about = file.stat()
    except OSError:
        return None
    return None if file.is_dir() else (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns)


@dataclass
class CutOff:
    """Tensors that end after the file that holds them, by the name of the file: one problem per file.

    Example:
        >>> from gonio.measuring.reading.opened import CutOff
        >>> cut = CutOff()
        >>> cut.add("a.safetensors", 100, 140, "w")
        'cut off: the file ends 40 bytes before it does'
        >>> next(cut.problems()).found
        'cut off: 100 of 140 bytes are there, without the end of 1 tensor: w'
    """

    files: dict[str, tuple[int, dict[str, int]]] = field(default_factory=dict)

    def add(self, file: str, size: int, end: int, tensor: str) -> Message:
        """Add a tensor that should end at the byte `end` of a file of this size; returns what is wrong with it."""
        self.files.setdefault(file, (size, {}))[1][tensor] = end
        return say("cut off: the file ends {value} bytes before it does", value=end - size)

    def problems(self) -> Iterator[Problem]:
        """One problem for each file, with its size and its tensors."""
        for file, (size, ends) in self.files.items():
            names = listing([plain(name, longest=200) for name in sorted(ends, key=ends.__getitem__)], limit=4)
            found = say(
                "cut off: {size:,} of {whole:,} bytes are there, without the end of {tensors}: {names}",
                size=size,
                whole=max(ends.values()),
                tensors=counted(len(ends), "tensor"),
                names=names,
            )
            yield Problem("G704", file, found, tuple(ends))


@dataclass(frozen=True)
class Opened:
    """The tensors of files or of a state dict.

    Attributes:
        stored: the model's tensors. `others`: an entry with a reason for everything else of the model.
        notes: how they were read.
        beside: tensors that are not the model's, as the state of an optimizer.
        problems: what is wrong with the files, as far as it is seen without reading values.
        refusal: why it cannot be told which tensors are the model's; then all are `beside`.
        optimizer: the states of optimizers, parameter by parameter.
        metadata: texts in the header of a single file. `header`: what it states of the model.
    """

    stored: dict[str, StoredTensor]
    others: tuple[TensorEntry, ...] = ()
    notes: tuple[str, ...] = ()
    beside: dict[str, StoredTensor] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    refusal: InvalidArgumentError | None = None
    optimizer: OptimizerContents = field(default_factory=OptimizerContents)
    metadata: dict[str, str] = field(default_factory=dict)
    header: HeaderFacts | None = None

    @property
    def names(self) -> list[str]:
        """Of everything of the model."""
        return [*self.stored, *(other.name for other in self.others)]

    @classmethod
    def of_parts(cls, parts: Sequence[Opened]) -> Opened:
        """Several files as one; of a name in two of them, what the first one holds."""
        stored = {name: tensor for part in reversed(parts) for name, tensor in part.stored.items()}
        others = {other.name: other for part in reversed(parts) for other in part.others if other.name not in stored}
        return cls(
            stored,
            tuple(others.values()),
            tuple(dict.fromkeys(note for part in parts for note in part.notes)),
            {name: tensor for part in reversed(parts) for name, tensor in part.beside.items()},
            tuple(problem for part in parts for problem in part.problems),
            optimizer=sum((part.optimizer for part in parts), OptimizerContents()),
            header=next((part.header for part in parts if part.header is not None), None),
        )


@dataclass
class Listing:
    """What a reader of a format has found so far: every tensor of a file is here, or named with the reason.

    Attributes:
        stored, others, beside, problems: as of :class:`Opened`. `cut`: the tensors that end after their file.
    """

    stored: dict[str, StoredTensor] = field(default_factory=dict)
    others: list[TensorEntry] = field(default_factory=list)
    beside: dict[str, StoredTensor] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    cut: CutOff = field(default_factory=CutOff)

    def problem(self, code: str, path: str, found: str) -> None:
        """Something wrong with a file, or with a tensor's place."""
        self.problems.append(Problem(code, path, found))

    def refuse(
        self, name: str, reason: str, code: str = "", *, shape: tuple[int, ...] | None = None, dtype: str = ""
    ) -> None:
        """A tensor that is not read; with a code the reason is a problem of the file."""
        self.others.append(TensorEntry.unread(name, reason, shape, dtype))
        if code:
            self.problem(code, name, reason)

    @property
    def of_optimizer(self) -> list[str]:
        """The note on an optimizer's tensors beside the model; none without one."""
        return [f"not weights but the optimizer's: {len(self.beside)} tensors"] if self.beside else []

    def opened(self, *notes: str, optimizer: OptimizerContents | None = None) -> Opened:
        """All of it, with notes on how it was read."""
        problems = tuple(self.problems)
        states = OptimizerContents() if optimizer is None else optimizer
        return Opened(self.stored, tuple(self.others), notes, self.beside, problems, optimizer=states)


MOST_UNFOLDED = 1100  # bytes of values to a byte in which they are compressed; deflate reaches 1032


def naturals(value: Any) -> tuple[int, ...]:
    """The sizes of a tensor as a file states them.

    Raises: ValueError for anything else than a list of natural numbers.
    """
    if not isinstance(value, (tuple, list)) or any(type(n) is not int or not 0 <= n < 1 << 62 for n in value):
        raise ValueError("a size is no list of natural numbers")
    return tuple(value)


# --- bytes of a file --------------------------------------------------------------------------------------------------


def read_tensor(path: Path, offset: int, size: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """The tensor of these bytes of a file, in a dtype of torch."""
    dtype = dtype_named(name)
    if dtype is None:
        raise UnreadableFileError(str(path), f"torch has no dtype {name}", "Convert the tensor first.")
    data = torch.empty(size, dtype=torch.uint8, device="cpu")
    with path.open("rb", buffering=0) as file, intact(path):
        file.seek(offset)
        fill(file, data.numpy().data)
    return data.view(dtype).reshape(shape)


def fill(file: RawIOBase, target: memoryview) -> None:
    """Read the next bytes of a file into all of a buffer.

    Raises:
        EOFError: if the file ends before.
    """
    done = 0
    while done < len(target):  # one call reads 2 GiB at most
        got = file.readinto(target[done:])
        if not got:
            raise EOFError("it ends before this tensor does")
        done += got


def gaps(ends: list[tuple[int, int, str]], data: int, file: str, *, alignment: int = 1) -> Iterator[Problem]:
    """Tensors that overlap, and bytes between and after them that belong to none.

    Args:
        ends: (first byte, byte after the last one, name) of each tensor, sorted. `data`: bytes that there are.
        alignment: tensors begin at multiples of it, so that fewer bytes than this may lie between two.
    """
    reached, last = 0, ""
    for begin, end, name in ends:
        if begin < reached:
            count = min(reached, end) - begin
            yield Problem("G704", name, f"overlaps {plain(last)}: {count} bytes belong to both")
        elif begin - reached >= alignment:
            yield Problem("G705", file, f"{begin - reached} bytes before {plain(name)} belong to no tensor")
        if end > reached:
            reached, last = end, name
    if data - reached >= alignment:
        yield Problem("G705", file, f"{data - reached} bytes after the last tensor belong to none")


@contextmanager
def intact(path: Path) -> Iterator[None]:
    """Inside, an exception means that a file is damaged: a hostile one provokes almost any of them."""
    try:
        yield
    except Exception as error:
        raise damaged(path, error) from error


# Of errors of the system that say nothing of the content of a file.
_OF_SYSTEM = {errno.EACCES, errno.EPERM, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.ENXIO, errno.ENODEV}


def of_system(path: Path, error: BaseException) -> RefusedFileError | None:
    """The error for a file that the system does not read; None where its content is at fault."""
    if not isinstance(error, OSError) or error.errno not in _OF_SYSTEM:
        return None
    do = say("Check the permissions.") if error.errno in (errno.EACCES, errno.EPERM) else say("Check the disk.")
    return RefusedFileError(str(path), say("the system refuses it ({why})", why=os.strerror(error.errno)), do)


def damaged(path: Path, error: BaseException) -> UnreadableFileError:
    """The error for a file that its reader refuses, or whose content is of another kind.

    Raises:
        RefusedFileError: where the system does not read it, so that nothing is known of its content.
    """
    if (refused := of_system(path, error)) is not None:
        raise refused
    said = f"it is not an intact file of its kind ({str(error)[:300]})"
    return misnamed(path) or UnreadableFileError(str(path), said, say("Copy or download it again."))


# --- files of another kind --------------------------------------------------------------------------------------------

# The endings of each kind; the first is suggested.
TORCH = (".pt", ".pth", ".bin", ".ckpt", ".tar")  # scripts of torch's own examples write model.pth.tar
_KERAS, _ARRAYS = (".keras",), (".npz",)
_SAFETENSORS, _GGUF, _HDF5 = (".safetensors",), (".gguf",), (".h5", ".hdf5", ".keras")
_TELLING = frozenset((*TORCH, *_KERAS, *_ARRAYS, *_SAFETENSORS, *_GGUF, *_HDF5, ".onnx", ".json"))


def misnamed(path: Path) -> UnreadableFileError | None:
    """The error for a file whose first bytes are of another kind than its name says; None where they do not tell.

    It is asked after the reader of the name's kind has failed. Another reader is not tried: the name would still
    mislead every other program.
    """
    if path.suffix not in _TELLING:
        return None
    try:
        if (instead := _stand_in(path)) is not None:
            return UnreadableFileError(str(path), *instead)
        found = _kind(path)
    except Exception:  # a damaged archive may raise anything; the reader's own error says that it is damaged
        return None
    if found is None or path.suffix in found[1]:
        return None
    kind, endings = found
    why = say("its content is that of {kind}, and its name ends in {suffix}", kind=kind, suffix=path.suffix)
    return UnreadableFileError(str(path), why, say("Rename it to {name}.", name=path.with_suffix(endings[0]).name))


def _stand_in(path: Path) -> tuple[str, str] | None:
    """What a file is that came in the place of a checkpoint, and what to do; None for any other."""
    with path.open("rb") as file:
        start = file.read(512)
    if start.startswith(b"version https://git-lfs.github.com/spec/"):
        return say("it is a pointer of Git LFS, not the file itself"), say("Fetch the file: git lfs pull.")
    if start.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return say("it is a page of HTML, as a server sends instead of a file"), say("Download the file again.")
    return packed_in(path)


def packed_in(path: Path) -> tuple[str, str] | None:
    """That a file is an archive of files (tar, also compressed), and what to do; None for any other."""
    try:
        with tarfile.open(path) as archive:
            packed = archive.next() is not None  # a file of zeros is an empty archive too
    except Exception:  # a damaged compressed one may raise anything
        packed = False
    if not packed:
        return None
    return say("it is an archive of files (tar)"), say("Unpack it, and name the checkpoint in it.")


def _kind(path: Path) -> tuple[str, tuple[str, ...]] | None:
    """The kind of a file and its endings, by its first bytes; None for an unknown one."""
    with path.open("rb") as file:
        start, size = file.read(9), path.stat().st_size
    if start.startswith(b"GGUF"):
        return say("a GGUF file"), _GGUF
    if start.startswith(b"\x89HDF\r\n\x1a\n"):
        return say("an HDF5 file"), _HDF5
    if start.startswith(b"PK\x03\x04"):
        return _archive(path)
    if start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return say("a file of torch, or another pickle"), TORCH
    if start[8:9] == b"{" and 2 <= int.from_bytes(start[:8], "little") <= size - 8:
        return say("a safetensors file"), _SAFETENSORS
    return None


def _archive(path: Path) -> tuple[str, tuple[str, ...]] | None:
    """The kind of a zip archive, by the names of its members."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    if any(name.endswith("/data.pkl") for name in names):
        return say("a file of torch"), TORCH
    if "model.weights.h5" in names:
        return say("a Keras archive"), _KERAS
    if names and all(name.endswith(".npy") for name in names):
        return say("a NumPy archive"), _ARRAYS
    return None


# --- files that are absent --------------------------------------------------------------------------------------------


def link_to_nothing(path: Path) -> Message | None:
    """That a path, or a folder on the way to it, is a symbolic link to nothing, and to what; None for another path."""
    told: dict[str, str] = {}
    try:
        link = next((one for one in (path, *path.parents) if one.is_symlink() and not one.exists()), None)
        if link is None:
            return None
        told = {"target": plain(redact(link.readlink()), longest=200)}
        link.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return say("it is a link to {target}, which leads back to it", **told)
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):  # a name that is too long, a folder that cannot be read
            return None
    if link is None or link == path:
        return say("it is a link to {target}, where there is nothing", **told)
    return say("its folder {name} is a link to {target}, where there is nothing", name=plain(link.name), **told)


# --- values that are absent -------------------------------------------------------------------------------------------

_EMPTY = (0,)  # what a sharded training leaves of a parameter whose values lie in other processes


def without_values(tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> list[Problem]:
    """A problem if no tensor has a value, or if some have none and others with the same end of their name have.

    A layer without inputs or outputs has a side of 0 beside others, and no shape `(0,)`; its bias may have it. Bytes of
    a layer's own (`_extra_state`) are often none.

    Args:
        tensors: shape and dtype of each.

    Example:
        >>> from gonio.measuring.reading.opened import without_values
        >>> shapes = {"a.weight": (0,), "b.weight": (3, 4), "b.bias": (3,)}
        >>> found = without_values({name: (shape, "float32") for name, shape in shapes.items()})
        >>> [problem.found for problem in found]
        ['1 of 3 tensors is empty, unlike others called weight: a.weight']
    """
    shapes = {name: shape for name, (shape, _) in tensors.items()}
    if not any(prod(shape) for shape in shapes.values()):
        every = counted(len(tensors), "tensor")
        found = say("none of {tensors} has a value", tensors=every) if tensors else say("it holds no tensor")
        return [Problem("G715", "", found)]
    filled = {_end(name) for name, shape in shapes.items() if prod(shape) > 1}
    narrow = {name.rpartition(".")[0] for name, shape in shapes.items() if len(shape) > 1 and not prod(shape)}
    floats = (name for name, (_, dtype) in tensors.items() if dtype.startswith(("float", "bfloat")))
    empty = [name for name in floats if shapes[name] == _EMPTY and _end(name) in filled]
    empty = [name for name in empty if name.rpartition(".")[0] not in narrow]
    if not empty:
        return []
    found = say(
        "{n} of {tensors} {are} empty, unlike others called {ends}: {names}",
        n=len(empty),
        tensors=counted(len(tensors), "tensor"),
        are=are(len(empty)),
        ends=listing([plain(end, longest=200) for end in sorted({_end(name) for name in empty})], limit=4),
        names=listing([plain(name, longest=200) for name in empty], limit=4),
    )
    return [Problem("G715", "", found, tuple(empty))]


def _end(name: str) -> str:
    return name.rpartition(".")[2]
