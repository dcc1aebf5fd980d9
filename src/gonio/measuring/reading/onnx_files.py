"""ONNX models: initialisers, constants and their external data, by the package `onnx`.

Which dimension of a tensor holds the outputs follows from the operators that use it. A file is parsed as a whole, so
that the tensors in it are in memory together (2 GiB at most, the limit of protobuf); external data are read one by one.

References: onnx/onnx, docs/IR.md, docs/ExternalData.md, docs/Operators.md.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gonio.errors import GonioError, UnreadableFileError, import_extra, listing
from gonio.escaping import plain
from gonio.geometry import Layout
from gonio.measuring.reading.codes import unpacked
from gonio.measuring.reading.entry import FEW_DIMENSIONS, TABLE, Axes, StoredTensor, dtype_name, dtype_named, wrong_size
from gonio.measuring.reading.onnx_quantised import OF_RUNTIME, STANDARD, OperatorGraph, dequantise
from gonio.measuring.reading.opened import Listing, Opened, gaps, intact, link_to_nothing, read_tensor

_LARGEST = 1 << 31  # bytes, of a message of protobuf
_DTYPES = {
    "FLOAT": "float32",
    "DOUBLE": "float64",
    "FLOAT8E4M3FN": "float8_e4m3fn",
    "FLOAT8E4M3FNUZ": "float8_e4m3fnuz",
    "FLOAT8E5M2": "float8_e5m2",
    "FLOAT8E5M2FNUZ": "float8_e5m2fnuz",
    "FLOAT8E8M0": "float8_e8m0fnu",
}
# The field of the values that are not raw, and how many of its numbers an entry has.
_FIELDS = {
    **dict.fromkeys(("float32",), ("float_data", 1)),
    **dict.fromkeys(("float64",), ("double_data", 1)),
    **dict.fromkeys(("int64",), ("int64_data", 1)),
    **dict.fromkeys(("uint32", "uint64"), ("uint64_data", 1)),
    "complex64": ("float_data", 2),
    "complex128": ("double_data", 2),
}
_NIBBLES = {"INT4": torch.int8, "UINT4": torch.uint8}  # two entries to a byte, and the dtype in which they are read
_PACKED = ("INT2", "UINT2", "FLOAT4E2M1", "FLOAT6E2M3", "FLOAT6E3M2")  # several entries to a byte, not read
_ALIGNMENT = 1 << 16  # bytes to which runtimes align external data
_DEPTH = 8  # of operators that pass a weight on
_ON_THE_RIGHT = {  # of products x · W
    ("MatMul", 1),
    *((name, 1) for name in ("MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul")),
    ("QLinearMatMul", 3),
}
_UNSAID = "no operator tells which dimension holds its outputs"


@dataclass
class _Reader(Listing):
    """What is found while the tensors of a model are listed.

    Attributes:
        ranges: of each file of external data (first byte, byte after the last one) → the tensor's name.
        users: for each value of a graph (operator, number of the input, prefix of its graph) of those that use it.
    """

    path: Path = field(kw_only=True)
    onnx: ModuleType = field(kw_only=True)
    ranges: dict[Path, dict[tuple[int, int], str]] = field(default_factory=dict)
    users: dict[str, list[tuple[Any, int, str]]] = field(default_factory=dict)

    def add(self, name: str, tensor: Any) -> None:
        """A tensor by its header, or why its values cannot be read."""
        if name in self.stored or any(entry.name == name for entry in self.others):
            self.problem("G703", name, f"twice in {plain(self.path.name)}")
            return
        kind = self.onnx.TensorProto.DataType.Name(tensor.data_type)
        dtype, shape = _DTYPES.get(kind, kind.lower()), tuple(tensor.dims)
        known = None if kind in _PACKED else dtype_named("uint8" if kind in _NIBBLES else dtype)
        laid = (-(-prod(shape) // 2),) if kind in _NIBBLES else shape  # of what is stored
        code, said, load, file = "G704", "", None, self.path.name
        if kind == "UNDEFINED" or any(n < 0 for n in shape) or tensor.HasField("segment"):
            said = f"its type is {kind} and its shape {list(shape)}"
        elif known is None:
            code, said = "", "texts are no numbers" if kind == "STRING" else f"its dtype {dtype} is not read"
        elif tensor.data_location == self.onnx.TensorProto.EXTERNAL:
            code, said, load, file = self._external(name, tensor, laid, known)
        else:
            said, load = self._inside(tensor, laid, known)
            load = partial(_from_bytes_in_numbers, tensor) if kind in _NIBBLES and not tensor.raw_data else load
            if not said and prod(shape) == 1 and known.is_floating_point and _is_infinite(load):
                # where the search for a largest or smallest number begins
                code, said = "", "a single infinite number, a constant of the graph"
        if said or load is None:
            self.refuse(name, said, code, shape=shape, dtype=dtype)
        else:
            values, axes = _NIBBLES.get(kind), self._axes(name, shape)
            load = load if values is None else partial(_of_nibbles, load, shape, values)
            read_as = "" if values is None else dtype_name(values)
            self.stored[name] = StoredTensor(shape, dtype, load, read_as, file=file, axes=axes)

    def _inside(self, tensor: Any, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[str, Any]:
        size, entries = prod(shape) * dtype.itemsize, prod(shape)
        if tensor.HasField("raw_data"):
            held = len(tensor.raw_data)
            said = "" if held == size else wrong_size(held, entries, size)
            return said, partial(_from_bytes, tensor, dtype, shape)
        name, times = _FIELDS.get(dtype_name(dtype), ("int32_data", 1))
        held = len(getattr(tensor, name))
        said = "" if held == entries * times else f"{held} numbers are stored for {entries} entries"
        return said, partial(_from_numbers, self.path, self.onnx, tensor, dtype, shape)

    def _external(
        self, name: str, tensor: Any, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[str, str, Any, str]:
        """(code, what is wrong, function that reads it, file) of a tensor in another file of the folder.

        The code is empty where the file has its own problem.
        """
        facts = {entry.key: entry.value for entry in tensor.external_data}
        location, size = facts.get("location", ""), prod(shape) * dtype.itemsize
        pure, home = PurePosixPath(location), self.path.parent.resolve()
        file = home / pure if location and "\0" not in location else home
        homes = {home, self.path.resolve().parent}  # in a hub's cache both are links to files of one folder
        if pure.is_absolute() or ".." in pure.parts or "\\" in location or homes.isdisjoint(file.resolve().parents):
            return "G704", f"its values are outside the folder: {plain(location, longest=80)}", None, ""
        if not file.is_file():
            name, link = plain(location, longest=80), link_to_nothing(file)
            return "G702", f"its file {name} is missing" if link is None else f"its file {name}: {link}", None, ""
        offset, length = facts.get("offset", "0"), facts.get("length", str(size))
        if not all(word.isascii() and word.isdigit() and len(word) < 19 for word in (offset, length)):
            return "G704", "its offset or length is no natural number", None, ""
        begin, held = int(offset), file.stat().st_size
        self.ranges.setdefault(file, {}).setdefault((begin, begin + size), name)
        if int(length) != size:
            return "G704", wrong_size(int(length), prod(shape), size), None, ""
        if begin + size > held:
            return "", self.cut.add(plain(file.name), held, begin + size, name), None, ""
        said = dtype_name(dtype)
        return "", "", partial(read_tensor, file, begin, size, said, shape), file.name

    # --- axes --------------------------------------------------------------------------------------------------------

    def _axes(self, name: str, shape: tuple[int, ...]) -> Axes:
        if len(shape) < 2:
            return Axes(reason=FEW_DIMENSIONS[len(shape)])
        found = list(self.uses(name, tuple(range(len(shape)))))
        if not found or any(axes != found[0] for axes in found) or found[0].order is None:
            users = sorted({node.op_type for node, *_ in self.users.get(name, [])})
            used = f" (used by {listing([plain(user) for user in users], limit=4)})" if users else ""
            return Axes(reason=f"{_UNSAID}{used}")
        return found[0]

    def uses(self, name: str, dims: tuple[int, ...], depth: int = _DEPTH) -> Iterator[Axes]:
        """What each operator that uses a weight says; `dims` are its stored dimensions in the order there."""
        for node, number, prefix in self.users.get(name, []):
            known = node.domain in STANDARD or (node.domain == "com.microsoft" and node.op_type in OF_RUNTIME)
            facts = {fact.name: fact for fact in node.attribute} if known else None
            if facts is not None and node.op_type in ("Identity", "Cast", "Transpose") and depth and node.output:
                turned = facts["perm"].ints if "perm" in facts else range(len(dims))[::-1]
                turned = turned if node.op_type == "Transpose" else range(len(dims))
                if sorted(turned) == list(range(len(dims))):
                    yield from self.uses(f"{prefix}{node.output[0]}", tuple(dims[dim] for dim in turned), depth - 1)
                    continue
            yield Axes() if facts is None else _of_operator(node.op_type, number, dims, facts)


def _of_operator(operator: str, number: int, dims: tuple[int, ...], facts: dict[str, Any]) -> Axes:
    """What an operator says of the dimensions of its weight (docs/Operators.md of ONNX)."""
    group = max(int(facts["group"].i), 1) if "group" in facts else 1
    match operator, number, len(dims):
        case ("Gemm", 1, 2) | ("QGemm", 3, 2):
            straight = "transB" in facts and facts["transB"].i != 0
            return _matrix(dims if straight else dims[::-1])
        case _, _, 2 if (operator, number) in _ON_THE_RIGHT:
            return _matrix(dims[::-1])
        case "MatMul" | "MatMulInteger" | "QLinearMatMul", 0, 2:
            return _matrix(dims)
        case "Gather", 0, 2 if "axis" not in facts or facts["axis"].i == 0:
            return _matrix(dims)
        case "GatherBlockQuantized", 0, 2 if "gather_axis" not in facts or facts["gather_axis"].i == 0:
            return _matrix(dims)
        case ("Conv" | "ConvInteger", 1, n) | ("QLinearConv", 3, n) if n > 2:
            return Axes(dims, f"{n - 2}-d convolution", Layout(groups=group))
        case "ConvTranspose", 1, n if n > 2:
            return Axes(dims, f"transposed {n - 2}-d convolution", Layout(transposed=True, groups=group))
    return Axes()


def _matrix(order: tuple[int, ...]) -> Axes:
    # One kind, because an embedding may be the matrix of the last layer too, with the same rows.
    notes = () if order == (0, 1) else ("stored with its inputs first",)
    return Axes(order, TABLE, Layout(), notes=notes)


def open_onnx(path: Path) -> Opened:
    """The tensors of an ONNX model; external data are not read yet.

    Raises:
        UnreadableFileError: if the file is no model of ONNX.
        MissingExtraError: if the package `onnx` is not installed.
    """
    onnx = import_extra("onnx", "reading ONNX models", package="onnx", extra="onnx")
    import_extra("onnx.numpy_helper", "reading ONNX models", package="onnx", extra="onnx")
    if path.stat().st_size > _LARGEST:
        said = f"it is larger than {_LARGEST} bytes, the limit of protobuf"
        raise UnreadableFileError(str(path), said, "Save it with external data.")
    with intact(path):
        model = onnx.ModelProto.FromString(path.read_bytes())
        if not model.HasField("graph") or not model.ir_version:
            raise ValueError("it holds no graph of ONNX")
        reader, makers = _Reader(path=path, onnx=onnx), dict[str, tuple[Any, int]]()
        graphs = list(_graphs(model))
        for prefix, graph, names in graphs:
            for node in graph.node:
                for number, name in enumerate(node.input):
                    reader.users.setdefault(names.get(name, name), []).append((node, number, prefix))
                makers |= {f"{prefix}{name}": (node, number) for number, name in enumerate(node.output) if name}
        for prefix, graph, _ in graphs:
            for name, tensor in _tensors(prefix, graph, reader):
                reader.add(name, tensor)
        dequantise(OperatorGraph(reader.stored, reader.users, makers), reader.uses)
    reader.problems += reader.cut.problems()
    for file, ranges in reader.ranges.items():
        ends = sorted((begin, end, name) for (begin, end), name in ranges.items() if begin < end)
        reader.problems += gaps(ends, file.stat().st_size, file.name, alignment=_ALIGNMENT)
    return reader.opened()


def _is_infinite(load: Callable[[], Tensor]) -> bool:
    """Whether a single number is infinite; one that cannot be read is named when its value is asked for."""
    try:
        return bool(load().isinf())
    except GonioError:
        return False


def _graphs(model: Any) -> Iterator[tuple[str, Any, Mapping[str, str]]]:
    """(prefix, graph, names) of all graphs and functions; the prefix is the name of the node that holds an inner one.

    `names` is of each value that operators see, their own or one of a graph around, the name with its prefix.
    """
    stack: list[tuple[str, Any, ChainMap[str, str]]] = [("", model.graph, ChainMap())]
    stack += [(f"{function.name}.", function, ChainMap()) for function in model.functions]
    for number, info in enumerate(model.training_info):
        parts = ("initialization", "algorithm")
        stack += [(f"training_info.{number}.{part}.", getattr(info, part), ChainMap()) for part in parts]
    while stack:
        prefix, graph, around = stack.pop()
        made = [tensor.name for tensor in getattr(graph, "initializer", ())]
        made += [name for node in graph.node for name in node.output]
        names = around.new_child({name: f"{prefix}{name}" for name in made})  # a copy for each graph would be quadratic
        yield prefix, graph, names
        for number, node in enumerate(graph.node):
            for fact in node.attribute:
                inner = [*([fact.g] if fact.HasField("g") else []), *fact.graphs]
                own = _name_of(prefix, number, node)
                stack += [(f"{own}.{fact.name}.{i}.", one, names) for i, one in enumerate(inner)]


def _name_of(prefix: str, number: int, node: Any) -> str:
    return f"{prefix}{node.name or f'{node.op_type}_{number}'}"


def _tensors(prefix: str, graph: Any, reader: _Reader) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of one graph."""
    for tensor in getattr(graph, "initializer", ()):
        yield f"{prefix}{tensor.name}", tensor
    for sparse in getattr(graph, "sparse_initializer", ()):
        reader.refuse(f"{prefix}{sparse.values.name}", "sparse: filters are not stored whole")
    for number, node in enumerate(graph.node):
        own = _name_of(prefix, number, node)
        for fact in node.attribute:
            constant = node.op_type == "Constant" and fact.name == "value" and node.output
            if fact.HasField("t"):
                yield (f"{prefix}{node.output[0]}" if constant else f"{own}.{fact.name}"), fact.t
            yield from ((f"{own}.{fact.name}.{i}", tensor) for i, tensor in enumerate(fact.tensors))


def _from_bytes_in_numbers(tensor: Any) -> Tensor:
    held = torch.tensor(list(tensor.int32_data), dtype=torch.int32, device="cpu")
    return held.bitwise_and(0xFF).to(torch.uint8)


def _of_nibbles(load: Callable[[], Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Entries of 4 bits, the low bits of a byte first; those with a sign in two's complement.

    References: onnx/onnx, onnx/onnx.proto, TensorProto.int32_data and raw_data; numpy_helper.to_array of the package.
    """
    codes = unpacked(load(), 4).reshape(-1)[: prod(shape)].to(dtype)
    codes = codes - 16 * (codes > 7).to(dtype) if dtype.is_signed else codes
    return codes.reshape(shape)


def _from_bytes(tensor: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    raw = torch.frombuffer(bytearray(tensor.raw_data) or bytearray(dtype.itemsize), dtype=torch.uint8)
    return raw[: prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def _from_numbers(path: Path, onnx: ModuleType, tensor: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    with intact(path):
        raw = onnx.numpy_helper.to_array(tensor).tobytes()
        if len(raw) != prod(shape) * dtype.itemsize:
            raise ValueError(f"{len(raw)} bytes for {prod(shape)} entries")
    return torch.frombuffer(bytearray(raw) or bytearray(dtype.itemsize), dtype=dtype)[: prod(shape)].reshape(shape)
