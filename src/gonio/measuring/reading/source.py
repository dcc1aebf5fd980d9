"""Everything that can be measured: a model, a state dict, a file, or a folder that holds a model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from gonio.errors import InvalidArgumentError, UnreadableFileError
from gonio.escaping import redact
from gonio.measuring.reading.adapters import entries_of_adapters
from gonio.measuring.reading.entry import Entry, in_memory
from gonio.measuring.reading.formats import SUFFIXES, stored_in_safetensors, stored_in_torch
from gonio.measuring.reading.model import entries_of_model
from gonio.measuring.reading.rotations import entries_of_rotations
from gonio.measuring.reading.shards import Shards, are_parts, stored_in_shards, stored_without_index
from gonio.measuring.reading.state_dict import (
    Configs,
    Contents,
    entries_of_mapping,
    entries_of_stored,
    other_entries,
    packed_linears,
    state_in,
)

Source = nn.Module | Mapping[str, Any] | str | os.PathLike[str]

LARGEST_JSON = 1 << 20  # bytes, of a configuration; those of large models have some thousands


def name_of(source: Source) -> str:
    """The name of the source in tables."""
    if isinstance(source, nn.Module):
        return type(source).__name__
    return redact(os.fspath(source)) if isinstance(source, (str, os.PathLike)) else "state dict"


def contents_of(source: Source, base: Source | None = None) -> Contents:
    """The source's tensors and, for each adapter, its product and sum.

    Args:
        base: of a source that holds adapters, the model that they adapt.

    Raises:
        InvalidArgumentError, UnreadableFileError: as :func:`gonio.measure`.
    """
    found = _contents(source)
    if base is not None and not found.adapters and not found.rotations:
        raise InvalidArgumentError(
            "measure(base=) adds adapters to the weights that they adapt",
            f"{name_of(source)} without adapters",
            "Pass the adapters first and the model that they adapt as base, or no base.",
        )
    held = {} if base is None else {entry.path: entry for entry in _contents(base).entries}
    adapted = [*entries_of_adapters(found.adapters, held), *entries_of_rotations(found.rotations, held)]
    return replace(found, entries=[*found.entries, *adapted])


def _contents(source: Source) -> Contents:
    if isinstance(source, nn.Module):
        return Contents(entries_of_model(source), [])
    if isinstance(source, (str, os.PathLike)):
        return _of_file(source)
    if not isinstance(source, Mapping):
        raise InvalidArgumentError(
            "measure() takes a model, a state dict or a path",
            type(source).__name__,
            "For one tensor use the functions of gonio.geometry.",
        )
    state = state_in(source, what="the mapping")
    return entries_of_mapping(state.state, state.notes)


def _of_file(path: str | os.PathLike[str]) -> Contents:
    """The tensors of a file or of a folder that holds one model.

    Reads `.safetensors`, `.safetensors.index.json` with its shards, `.pt`, `.pth`, `.bin`, `.ckpt`. Torch files are
    loaded with `weights_only`, which builds tensors and plain containers only. A `config.json` beside the file
    describes its quantisation, an `adapter_config.json` the scale of its adapters.

    Raises:
        UnreadableFileError: if the file is missing, damaged, of an unknown kind, or holds more than data.
    """
    target = Path(path)
    if target.is_dir():
        found = _in_folder(target)
        if isinstance(found, list):
            return _of_shards(stored_without_index(found), _beside(found[0]))
        target = found
    if not target.is_file():
        raise UnreadableFileError(str(path), "there is no such file", "Check the path.")
    if target.name.endswith(".index.json"):
        return _of_shards(stored_in_shards(target), _beside(target))
    if target.suffix == ".safetensors":
        return entries_of_stored(stored_in_safetensors(target), configs=_beside(target))
    if target.suffix in SUFFIXES:
        return _of_torch(target)
    known = ", ".join((".safetensors", ".safetensors.index.json", *SUFFIXES))
    raise UnreadableFileError(str(path), f"its kind {target.suffix!r} is not known", f"Known kinds: {known}.")


def _in_folder(folder: Path) -> Path | list[Path]:
    """The one model of a folder, an index before single files; or its parts, where the index is missing."""
    for pattern in ("*.safetensors.index.json", "*.safetensors", "*.bin.index.json", "*.bin", "*.pt", "*.pth"):
        found = sorted(folder.glob(pattern))
        if len(found) == 1:
            return found[0]
        if are_parts(found):
            return found
        if found:
            names = ", ".join(f.name for f in found[:8])
            raise UnreadableFileError(str(folder), f"it holds several: {names}", "Name one of them.")
    raise UnreadableFileError(str(folder), "it holds no checkpoint", "Name a .safetensors or .pt file.")


def _beside(path: Path) -> Configs:
    """The configurations in the file's folder; that of adapters belongs to files named `adapter_model…`."""
    quantization = _small_json(path.parent / "config.json").get("quantization_config")
    adapter = _small_json(path.parent / "adapter_config.json") if path.name.startswith("adapter_model") else {}
    return Configs(quantization if isinstance(quantization, dict) else {}, adapter)


def _small_json(path: Path) -> dict[str, Any]:
    """The object in a small JSON file; an empty one if there is no such file, or if it holds anything else."""
    try:
        if not path.is_file() or path.stat().st_size > LARGEST_JSON:
            return {}
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _of_shards(shards: Shards, configs: Configs) -> Contents:
    stored, missing, notes = shards
    found = entries_of_stored(stored, configs=configs, notes=notes)
    gone = [Entry(name, "", None, None, reason) for name, reason in missing.items()]
    return replace(found, entries=found.entries + gone)


def _of_torch(path: Path) -> Contents:
    state, stored = stored_in_torch(path)
    stored |= in_memory(packed_linears(state.state))
    found = entries_of_stored(stored, configs=_beside(path), notes=state.notes)
    return replace(found, entries=found.entries + other_entries(state.state))
