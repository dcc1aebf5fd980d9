"""Pickles read as data: of an object an inert record is made, and nothing is called.

Python's own unpickler in Python (`pickle._Unpickler`) with a closed list of opcodes. The one in C allocates what a
pickle of a few bytes claims. `REDUCE`, `NEWOBJ` and `BUILD` here make and fill records, so that no class has to be
imported, and none of its methods runs. `REDUCE` calls whatever is named, as hostile pickles do: it is refused for all
names but those of a closed list. `NEWOBJ` makes an object of a class, of another one only where the reader takes such
records.

An archive of torch is such a pickle and the bytes of its storages; it is read from any part of a file.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import torch
from torch import Tensor

from gonio.escaping import plain
from gonio.measuring.reading.entry import dtype_name
from gonio.measuring.reading.opened import fill, read_tensor

_OPCODES = (  # noqa: SIM905
    "PROTO FRAME STOP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT SHORT_BINUNICODE BINUNICODE "
    "SHORT_BINBYTES BINBYTES EMPTY_TUPLE EMPTY_LIST EMPTY_DICT EMPTY_SET MARK TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND "
    "APPENDS SETITEM SETITEMS ADDITEMS FROZENSET BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET GLOBAL STACK_GLOBAL"
).split()
MOST_ENTRIES = 1 << 20  # of the state of a module
LARGEST_PICKLE = 1 << 30  # bytes; the metadata of a million pieces of tensors has 200 MB
_ATTRIBUTE_DICTS = (  # Lightning's, of its versions
    "pytorch_lightning.utilities.parsing.AttributeDict",
    "lightning_fabric.utilities.data.AttributeDict",
    "lightning.pytorch.utilities.parsing.AttributeDict",
    "lightning.fabric.utilities.data.AttributeDict",
)
_CONTAINERS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": dict,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "collections.defaultdict": lambda *_: {},
    **dict.fromkeys(_ATTRIBUTE_DICTS, dict),
}
_TENSOR = "torch._utils._rebuild_tensor_v2"
_WITH_DTYPE = "torch._utils._rebuild_tensor_v3"  # of a dtype without a storage class; it is the last argument but one
_SUBCLASS = (
    "torch._tensor._rebuild_from_type_v2"  # of a tensor with attributes: (function, class, arguments, attributes)
)
_WRAPPER = "torch._utils._rebuild_wrapper_subclass"  # of a subclass without a storage: its attributes are all
_PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
STORAGES = {
    "torch.DoubleStorage": "float64",
    "torch.FloatStorage": "float32",
    "torch.HalfStorage": "float16",
    "torch.LongStorage": "int64",
    "torch.IntStorage": "int32",
    "torch.ShortStorage": "int16",
    "torch.CharStorage": "int8",
    "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool",
    "torch.BFloat16Storage": "bfloat16",
    "torch.storage.UntypedStorage": "uint8",
}
OF_TORCH = frozenset(
    {*STORAGES, *_CONTAINERS, *_PARAMETERS, _TENSOR, _WITH_DTYPE, _SUBCLASS}
    | {"torch.Size", "torch.Tensor", "torch.device"}
)
_AO, _MX = "torchao.quantization", "torchao.prototype.mx_formats"
# Subclasses that are stored by their parts, as torchao writes them into safetensors too.
STORED_BY_PARTS = frozenset(
    {
        *(f"{_AO}.{name}" for name in ("Float8Tensor", "Int4Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor")),
        *(f"{_MX}.{name}" for name in ("mx_tensor.MXTensor", "nvfp4_tensor.NVFP4Tensor")),
    }
)
# Those, and the classes of their settings.
OF_SUBCLASSES = STORED_BY_PARTS | {
    *(_WRAPPER, "torch.serialization._get_layout", "torchao.float8.inference.Float8MMConfig"),
    *(f"{_AO}.granularity.{name}" for name in ("PerAxis", "PerGroup", "PerRow", "PerTensor")),
    *(f"{_AO}.quant_primitives.{name}" for name in ("MappingType", "ZeroPointDomain")),
    f"{_AO}.quantize_.common.kernel_preference.KernelPreference",
    f"{_AO}.quantize_.workflows.float8.float8_tensor.QuantizeTensorToFloat8Kwargs",
    f"{_AO}.quantize_.workflows.int8.int8_tensor.QuantizeTensorToInt8Kwargs",
    *(f"{_MX}.{name}" for name in ("mx_tensor.QuantizeTensorToMXKwargs", "config.ScaleCalculationMode")),
    f"{_MX}.nvfp4_tensor.QuantizeTensorToNVFP4Kwargs",
}
_ARRAYS = frozenset(f"{module}.multiarray._reconstruct" for module in ("numpy.core", "numpy._core"))
_BUILT_IN = "bool bytearray bytes complex dict float int list long object range slice str tuple".split()  # noqa: SIM905
_NODES = "Any Boolean Bytes Enum Float Integer Path String".split()  # noqa: SIM905
# Classes of the settings that trainers save beside a model: their objects become records, which nothing looks into.
OF_SETTINGS = frozenset(
    {
        *(f"builtins.{name}" for name in _BUILT_IN),
        *(f"omegaconf.nodes.{name}Node" for name in _NODES),
        *(f"omegaconf.{name}" for name in ("base.ContainerMetadata", "base.Metadata")),
        *(f"omegaconf.{name}" for name in ("dictconfig.DictConfig", "listconfig.ListConfig")),
        *(f"{module}.{kind}Path" for module in ("pathlib", "pathlib._local")
          for kind in ("", "Pure", "Posix", "PurePosix", "Windows", "PureWindows")),
        *(f"datetime.{name}" for name in ("date", "datetime", "time", "timedelta", "timezone")),
        *(f"{module}.multiarray.{name}" for module in ("numpy.core", "numpy._core")
          for name in ("_reconstruct", "scalar")),
        *("numpy.dtype", "numpy.ndarray", "_codecs.encode"),
        *("argparse.Namespace", "types.SimpleNamespace", "typing.Any", "functools.partial"),
        *("collections.Counter", "collections.deque"),
    }
)  # fmt: skip


@dataclass(frozen=True)
class _Class:
    """The name of a class or function, in the place of the object itself; `known`: whether it is on the list."""

    name: str
    known: bool = True


@dataclass(eq=False)
class Record:
    """What a pickle says of an object: the name of its class, the arguments, the state and the items.

    Attributes:
        known: whether the class is on the list.
        items, values: of a subclass of dict, and of one of list or set.
    """

    name: str
    args: tuple[Any, ...]
    state: Any = None
    known: bool = True
    items: dict[Any, Any] = field(default_factory=dict)
    values: list[Any] = field(default_factory=list)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def append(self, value: Any) -> None:
        self.values.append(value)

    add = append  # lists and sets are filled one by one

    def __getitem__(self, key: str) -> Any:
        """An attribute of the object."""
        if not isinstance(self.state, dict) or key not in self.state:
            raise ValueError(f"an object of {self.name} has no attribute {key}")
        return self.state[key]


def parts_of(value: Any) -> dict[str, StoredPart] | None:
    """The tensors of a subclass that is stored by its parts; None for anything else."""
    if not isinstance(value, Record) or value.name != _SUBCLASS or len(value.args) != 4:
        return None
    function, kind, _, facts = value.args
    if getattr(function, "name", "") != _WRAPPER or getattr(kind, "name", "") not in STORED_BY_PARTS:
        return None
    return {name: one for name, one in dict(facts).items() if isinstance(one, StoredPart)}


ARRAY = "an array of NumPy, which is not read from a file of torch"


def is_array(value: Any) -> bool:
    """Whether a record is that of an array of NumPy; random states of trainers have them inside of tuples too."""
    return isinstance(value, Record) and value.name in _ARRAYS


class ModuleState(dict[str, Any]):
    """The state dict of a module that was pickled whole; `name`: its class."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


def state_of_module(value: Record) -> ModuleState | None:
    """What the state dict of a pickled module has, from the tables of `torch.nn.Module`; None for another object.

    Raises:
        ValueError: if it has more entries than any model.
    """
    if not _is_module(value):
        return None
    found, left = ModuleState(value.name), [("", value)]
    while left:
        at, module = left.pop()
        passing = module.state.get("_non_persistent_buffers_set", ())
        buffers = {name: one for name, one in module.state["_buffers"].items() if name not in passing}
        held = {f"{at}{name}": one for name, one in (module.state["_parameters"] | buffers).items() if one is not None}
        found.update(held)
        if len(found) + len(left) > MOST_ENTRIES:
            raise ValueError(f"its modules have more than {MOST_ENTRIES} tensors")
        children = [(f"{at}{name}.", one) for name, one in module.state["_modules"].items() if _is_module(one)]
        left += reversed(children)
    return found


def _is_module(value: Any) -> bool:
    tables = ("_parameters", "_buffers", "_modules")
    state = value.state if isinstance(value, Record) else None
    return isinstance(state, dict) and all(isinstance(state.get(table), dict) for table in tables)


class _Unpickler(pickle._Unpickler):
    """The unpickler of opcodes that make plain data."""

    stack: list[Any]
    append: Callable[[Any], None]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        getattr(pickle, code)[0]: pickle._Unpickler.dispatch[getattr(pickle, code)[0]] for code in _OPCODES
    }

    def __init__(self, file: BinaryIO, allowed: Collection[str], *, objects: bool = False) -> None:
        super().__init__(file)
        self._allowed, self._objects, self._last = allowed, objects, ""

    def find_class(self, module: str, name: str) -> Any:
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"
        known = getattr(torch, name, None) if module == "torch" else None
        if isinstance(known, (torch.dtype, torch.layout)):
            return known
        if full not in self._allowed:
            of_tensors = self._last == _WRAPPER
            if of_tensors or not self._objects:
                raise _refused(full, of_tensors)
            return _Class(full, known=False)
        self._last = full
        return _Class(full)

    def object_made(self) -> None:
        """`NEWOBJ`."""
        if isinstance(made := self.stack[-2], _Class) and not made.known:
            self.stack[-2:] = [Record(made.name, (), known=False)]
        else:
            self.called()

    def called(self) -> None:
        """`REDUCE`."""
        args = self.stack.pop()
        made = self.stack[-1]
        if not isinstance(made, _Class) or not isinstance(args, tuple):
            raise pickle.UnpicklingError("it calls what is no class of the list")
        if not made.known:
            raise _refused(made.name)
        if made.name == "torch.Size":
            self.stack[-1] = tuple(args[0])
        elif made.name in _CONTAINERS:
            self.stack[-1] = _CONTAINERS[made.name](*args)
        elif made.name in _PARAMETERS and args and isinstance(args[0], (StoredPart, Record)):
            self.stack[-1] = args[0]
        elif made.name in (_TENSOR, _WITH_DTYPE):
            self.stack[-1] = StoredPart.of(args, args[6] if made.name == _WITH_DTYPE else None)
        elif made.name == _SUBCLASS and [getattr(one, "name", "") for one in args[:2]] == [_TENSOR, "torch.Tensor"]:
            self.stack[-1] = StoredPart.of(args[2])
        elif made.name == _SUBCLASS and not getattr(args[1], "known", False):
            raise _refused(getattr(args[1], "name", ""), of_tensors=True)
        else:
            self.stack[-1] = Record(made.name, args)

    def filled(self) -> None:
        """`BUILD`."""
        state = self.stack.pop()
        if isinstance(self.stack[-1], Record):
            self.stack[-1].state = state
        elif not isinstance(self.stack[-1], dict):  # an OrderedDict may carry attributes, which are not read
            raise pickle.UnpicklingError("it changes what is no object of the list")

    def stored(self) -> None:
        """`BINPERSID`: ("storage", class, key, location, entries)."""
        word, kind, key, _, _ = self.stack.pop()
        if isinstance(kind, _Class) and not kind.known:  # of a quantised tensor
            raise _refused(kind.name)
        if word != "storage" or not isinstance(kind, _Class) or kind.name not in STORAGES or not isinstance(key, str):
            raise pickle.UnpicklingError("it names a storage that is none of torch")
        self.append((STORAGES[kind.name], key))

    dispatch[pickle.REDUCE[0]], dispatch[pickle.NEWOBJ[0]] = called, object_made
    dispatch[pickle.BUILD[0]] = filled
    dispatch[pickle.BINPERSID[0]] = stored


def _refused(name: str, of_tensors: bool = False) -> pickle.UnpicklingError:
    what = "a tensor of the subclass" if of_tensors else "an object of"
    return pickle.UnpicklingError(f"it holds {what} {plain(name, longest=200)}")


def unpickled(file: BinaryIO, allowed: Collection[str], *, objects: bool = False) -> Any:
    """The content of a pickle as plain data and records.

    Args:
        allowed: the names of classes and functions of which records are made.
        objects: whether records are made of objects of other classes too; other functions are never called.

    Raises:
        Exception: almost any for a damaged or hostile pickle, never with an effect.
    """
    return _Unpickler(file, allowed, objects=objects).load()


# --- archives of torch -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredPart:
    """A tensor of an archive: the storage that holds it, and its place there in entries."""

    dtype: str
    key: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], own: torch.dtype | None = None) -> StoredPart:
        """A tensor by the arguments of its function; of a storage of bytes with a dtype of its own."""
        (dtype, key), offset, shape, strides = args[:4]
        dtype = dtype_name(own) if isinstance(own, torch.dtype) else dtype
        if any(type(n) is not int or n < 0 for n in (offset, *shape, *strides)) or len(shape) != len(strides):
            raise ValueError("a tensor's place is no list of natural numbers")
        return cls(dtype, key, offset, tuple(shape), tuple(strides))

    @property
    def itemsize(self) -> int:
        return int(getattr(torch, self.dtype).itemsize)

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.itemsize

    @property
    def reach(self) -> int:
        """The byte of the storage after the last one that is used."""
        last = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return (self.offset + last + 1) * self.itemsize if prod(self.shape) else 0

    @property
    def contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclass
class Archive:
    """An archive that `torch.save` wrote, in a part of a file.

    Attributes:
        allowed, objects: as for :func:`unpickled`.
        content: what was saved, with a :class:`StoredPart` for each tensor.
    """

    path: Path
    begin: int = 0
    length: int | None = None
    allowed: Collection[str] = OF_TORCH
    objects: bool = False
    content: Any = None
    _records: dict[str, zipfile.ZipInfo] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = self.path.stat().st_size
        end = size if self.length is None else self.begin + self.length
        if not 0 <= self.begin <= end <= size:
            raise ValueError(f"the file ends {end - size} bytes before this part does")
        with self.path.open("rb") as file, zipfile.ZipFile(FilePart(file, self.begin, end - self.begin)) as archive:
            infos = archive.infolist()
            if any(i.compress_type != zipfile.ZIP_STORED or not 0 <= i.file_size <= end - self.begin for i in infos):
                raise ValueError("its archive unfolds to more than its size, as none of torch.save does")
            home = next((i.filename.removesuffix("data.pkl") for i in infos if i.filename.endswith("data.pkl")), None)
            if home is None:
                raise ValueError("it is no archive of torch.save")
            self._records = {info.filename.removeprefix(f"{home}data/"): info for info in infos}
            order = next((archive.read(info) for info in infos if info.filename == f"{home}byteorder"), b"little")
            if order != b"little":
                raise ValueError("its numbers are stored with the highest byte first")
            pickled = io.BytesIO(archive.read(f"{home}data.pkl"))
            self.content = unpickled(pickled, self.allowed, objects=self.objects)

    def holds(self, part: StoredPart) -> bool:
        """Whether a tensor's record has its bytes, and it has no more entries than they are."""
        info = self._records.get(part.key)
        return info is not None and part.reach <= info.file_size and part.bytes <= info.file_size

    def place(self, part: StoredPart) -> tuple[int, int]:
        """The first byte of the tensor's storage in the file, and the byte after the last one."""
        info = self._records[part.key]
        with self.path.open("rb") as file:
            begin = record_start(file, info, self.begin)
        return begin, begin + info.file_size

    def tensor(self, part: StoredPart) -> Tensor:
        """A tensor, whose record is compared with its checksum."""
        found = torch.empty(part.shape, dtype=getattr(torch, part.dtype), device="cpu")
        self.read(part, found)
        return found

    def entries(self, part: StoredPart) -> Tensor:
        """The entries of a tensor in a row, read from their place; the record's checksum is not compared."""
        if not part.contiguous:
            return self.tensor(part).reshape(-1)
        begin = self.place(part)[0] + part.offset * part.itemsize
        return read_tensor(self.path, begin, part.bytes, part.dtype, (prod(part.shape),))

    def read(self, part: StoredPart, target: Tensor) -> None:
        """Fill a tensor of the same shape and dtype, and compare the record with its checksum."""
        info = self._records.get(part.key)
        if info is None:
            raise ValueError(f"its archive lacks the record {plain(part.key, longest=40)}")
        if part.reach > info.file_size:
            raise ValueError(f"a tensor takes {part.reach} bytes, of which {info.file_size} are stored")
        whole = part.contiguous and target.is_contiguous() and part.bytes == info.file_size
        if whole:
            raw = target.reshape(-1).view(torch.uint8)
        else:
            raw = torch.empty(info.file_size, dtype=torch.uint8, device="cpu")
        view = raw.numpy().data
        with self.path.open("rb", buffering=0) as file:
            file.seek(record_start(file, info, self.begin))
            fill(file, view)
        if info.CRC and zlib.crc32(view) != info.CRC:  # 0 where torch was told to write none
            raise ValueError("its bytes differ from their checksum")
        if not whole:
            target.copy_(raw.view(getattr(torch, part.dtype)).as_strided(part.shape, part.strides, part.offset))


def record_start(file: BinaryIO, info: zipfile.ZipInfo, begin: int = 0) -> int:
    """The byte at which a record begins: after its local header, its name and its extra field."""
    file.seek(begin + info.header_offset + 26)
    return begin + info.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))


class FilePart(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        self._file, self._begin, self._length, self._at = file, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        if self._at < 0:
            raise OSError("a place before the beginning")
        return self._at

    def readinto(self, target: Any) -> int:
        size = max(min(len(target), self._length - self._at), 0)
        self._file.seek(self._begin + self._at)
        got = self._file.readinto(memoryview(target)[:size])  # type: ignore[attr-defined]
        self._at += got
        return int(got)
