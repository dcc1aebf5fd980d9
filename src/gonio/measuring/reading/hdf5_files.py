"""HDF5 files and archives of Keras (`.h5`, `.hdf5`, `.keras`), by the package `h5py`.

Only numbers that lie in the file itself are read: links to other files, external and virtual storage, objects, and
filters that HDF5 would load from a shared library are refused. Which dimension holds the outputs follows from
the classes of the layers in Keras's configuration; other files of HDF5 do not tell it.

References: HDF5 file format specification 3.0; keras.src.saving.saving_lib and legacy_h5_format of Keras.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor

from gonio.errors import import_extra
from gonio.escaping import plain
from gonio.geometry import Layout
from gonio.measuring.reading.entry import (
    EMBEDDING,
    FEW_DIMENSIONS,
    Axes,
    StoredTensor,
    dtype_named,
    no_dtype,
    wrong_size,
)
from gonio.measuring.reading.opened import MOST_UNFOLDED, Listing, Opened, intact
from gonio.measuring.reading.pickles import FilePart, record_start

ARCHIVE = ".keras"
_LARGEST_CONFIG = 1 << 26  # bytes
_LARGEST_CHUNK = 1 << 24  # bytes
_FILTERS = {1: "deflate", 2: "shuffle", 3: "fletcher32", 4: "szip", 5: "nbit", 6: "scaleoffset"}  # of HDF5 itself
_FILTERS |= {32000: "lzf"}  # of h5py itself
_DEPTH = 32  # of groups, and of models in a configuration
_WEIGHTS, _CONFIG = "model.weights.h5", "config.json"
_CONVOLUTIONS = {f"Conv{n}D{kind}": (n, bool(kind)) for n in (1, 2, 3) for kind in ("", "Transpose")}


def open_hdf5(path: Path) -> Opened:
    """The datasets of a file or of Keras's archive; no values are read yet.

    Raises:
        UnreadableFileError: if it is damaged, or an archive without weights of HDF5.
        MissingExtraError: if the package `h5py` is not installed.
    """
    h5py = import_extra("h5py", "reading HDF5 files", package="h5py", extra="hdf5")
    with intact(path), _opened(path, h5py) as file:
        config = _archived_config(path) if path.suffix == ARCHIVE else _attribute(file, "model_config")
        return _datasets(path, h5py, file, dict(_layers(config, 0)))


@contextmanager
def _opened(path: Path, h5py: ModuleType) -> Iterator[Any]:
    """The file, or the one in an archive of Keras, which stores it without compression."""
    if path.suffix != ARCHIVE:
        with h5py.File(path, "r", locking=False) as file:
            yield file
        return
    with zipfile.ZipFile(path) as archive, path.open("rb") as raw:
        info = archive.getinfo(_WEIGHTS)
        if info.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"its {_WEIGHTS} is compressed, as Keras does not write it")
        begin = record_start(raw, info)
        if begin + info.file_size > path.stat().st_size:
            raise ValueError(f"its {_WEIGHTS} ends after the file does")
        with h5py.File(FilePart(raw, begin, info.file_size), "r") as file:
            yield file


def _archived_config(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(_CONFIG)
        if info.file_size > _LARGEST_CONFIG:
            raise ValueError(f"its {_CONFIG} would unfold to {info.file_size} bytes")
        return json.loads(archive.read(info))


def _attribute(held: Any, name: str) -> Any:
    """The JSON in an attribute; None without one."""
    found = held.attrs.get(name)
    found = found.decode() if isinstance(found, bytes) else found
    return json.loads(found) if isinstance(found, str) else None


def _layers(config: Any, depth: int) -> Iterator[tuple[str, tuple[str, Mapping[str, Any]]]]:
    """(name, (class, configuration)) of Keras's own layers in a model's configuration; a name of two layers is none."""
    inner = config.get("config") if isinstance(config, dict) else None
    layers = inner.get("layers") if isinstance(inner, dict) else None
    if not isinstance(layers, list) or depth > _DEPTH:
        return
    for layer in layers:
        facts = layer.get("config") if isinstance(layer, dict) else None
        if isinstance(facts, dict) and isinstance(facts.get("name"), str):
            own = layer.get("module", "keras.layers") == "keras.layers" and not layer.get("registered_name")
            yield facts["name"], (str(layer.get("class_name")) if own else "", facts)
            yield from _layers(layer, depth + 1)


def _datasets(path: Path, h5py: ModuleType, file: Any, layers: Mapping[str, tuple[str, Mapping[str, Any]]]) -> Opened:
    found = Listing()
    for place, held, layer in _walk(h5py, file):
        name = place.replace("/", ".")
        if isinstance(held, str):
            found.refuse(name, held)
            continue
        shape, dtype = tuple(held.shape or ()), _dtype(held)
        code, said = _refusal(held, shape, dtype, path.stat().st_size)
        if said:
            found.refuse(name, said, code, shape=shape, dtype=dtype)
            continue
        optimizer = place.startswith(("optimizer_weights/", "optimizer/vars/")) and len(file) > 1
        axes = Axes(reason="of an optimizer") if optimizer else _axes(layers.get(layer), layer, shape)
        load = partial(_read, path, h5py, place, shape, dtype)
        (found.beside if optimizer else found.stored)[name] = StoredTensor(shape, dtype, load, axes=axes)
    return found.opened(*found.of_optimizer)


def _walk(h5py: ModuleType, file: Any) -> Iterator[tuple[str, Any, str]]:
    """(path, dataset or why it is not read, name of Keras's layer) of everything in a file."""
    stack: list[tuple[str, Any, str, int]] = [("", file, "", 0)]
    seen: dict[Any, str] = {h5py.h5o.get_info(file.id).addr: "/"}
    while stack:
        at, group, layer, depth = stack.pop()
        inner = []
        for name in group:
            place, link = f"{at}/{name}".removeprefix("/"), group.get(name, getlink=True)
            if not isinstance(link, h5py.HardLink):
                yield place, "a link, which is not followed", ""
                continue
            held = group[name]
            address = h5py.h5o.get_info(held.id).addr
            if address in seen or depth > _DEPTH:
                yield place, f"the same as {plain(seen.get(address, at), longest=200)}", ""
            elif isinstance(held, h5py.Group):
                own = held.attrs.get("name") if name == "vars" else None  # of Keras 3
                own = own if isinstance(own, str) else name if at == "model_weights" else layer  # of older ones
                inner.append((place, held, own, depth + 1))
            elif isinstance(held, h5py.Dataset):
                yield place, held, layer
            seen.setdefault(address, place)
        stack += reversed(inner)


def _dtype(held: Any) -> str:
    """The dtype's name in torch; Keras stores bfloat16 as two bytes with an attribute."""
    if held.dtype.kind == "V" and held.dtype.itemsize == 2 and held.attrs.get("dtype") == "bfloat16":
        return "bfloat16"
    return str(held.dtype.name)


def _refusal(held: Any, shape: tuple[int, ...], dtype: str, whole: int) -> tuple[str, str]:
    """(code of a rule or none, why a dataset is not read); empty if it is."""
    if held.dtype.hasobject or held.dtype.kind in "OSU":
        return "", "text, objects or references, which are not read"
    if dtype_named(dtype) is None:
        return "", no_dtype(dtype)
    if held.shape is None:
        return "", "an empty dataset"
    if held.is_virtual or held.external:
        return "G704", "its values are in another file, which is not opened"
    settings = held.id.get_create_plist()
    filters = [settings.get_filter(number)[0] for number in range(settings.get_nfilters())]
    if foreign := [number for number in filters if number not in _FILTERS]:
        return "", f"its filter {foreign[0]} would be loaded from a shared library, which is not done"
    size, held_size = prod(shape) * held.dtype.itemsize, held.id.get_storage_size()
    if size and not held_size:
        return "G702", f"no values are stored for its {prod(shape)} entries"
    if held_size > whole:
        return "G704", f"{held_size} bytes are stored for it, of a file of {whole}"
    if size > held_size * (MOST_UNFOLDED if filters else 1):
        return "G704", wrong_size(held_size, prod(shape), size)
    if held.chunks and prod(held.chunks) * held.dtype.itemsize > max(_LARGEST_CHUNK, 2 * size):
        return "G704", f"its chunks have {prod(held.chunks)} entries, more than the dataset"
    return "", ""


def _axes(layer: tuple[str, Mapping[str, Any]] | None, name: str, shape: tuple[int, ...]) -> Axes:
    """The dimensions of a weight of a layer of Keras, by its class and the number of its dimensions."""
    n = len(shape)
    if n < 2:
        return Axes(reason=FEW_DIMENSIONS[n])
    kind, facts = layer or ("", {})
    groups = facts.get("groups", 1)
    if kind == "Dense" and n == 2:
        return Axes((1, 0), "linear", Layout(), notes=("Dense of Keras, stored with its inputs first",))
    if kind == "Embedding" and n == 2:
        return Axes((0, 1), EMBEDDING, Layout(), notes=("Embedding of Keras",))
    if kind in _CONVOLUTIONS and n == _CONVOLUTIONS[kind][0] + 2 and type(groups) is int and groups > 0:
        transposed = _CONVOLUTIONS[kind][1]
        order = (n - 1, n - 2, *range(n - 2))  # of (positions, inputs, outputs), and of (positions, outputs, inputs)
        said = f"{'transposed ' if transposed else ''}{n - 2}-d convolution"
        notes = (f"{kind} of Keras, stored with its positions first",)
        return Axes(order, said, Layout(transposed=transposed, groups=groups), notes=notes)
    if kind:
        return Axes(reason=f"of a layer {plain(kind, longest=80)}, whose dimensions are not known here")
    what = f"of {plain(name, longest=80)}, whose class" if name else "which dimension holds its outputs"
    return Axes(reason=f"{what} the file does not tell")


def _read(path: Path, h5py: ModuleType, place: str, shape: tuple[int, ...], dtype: str) -> Tensor:
    with intact(path), _opened(path, h5py) as file:
        held = file[place]
        raw = numpy.empty(shape, held.dtype.newbyteorder("=") if dtype != "bfloat16" else held.dtype)
        if raw.size:
            held.read_direct(raw)
    if dtype == "bfloat16":
        return torch.from_numpy(raw.view(numpy.int16)).view(torch.bfloat16)
    return torch.from_numpy(raw)
