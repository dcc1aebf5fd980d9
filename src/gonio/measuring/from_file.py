"""The tensors of a file: safetensors (also in shards) and torch checkpoints. No code in a file ever runs."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from gonio.errors import UnreadableFileError
from gonio.measuring.entry import Entry
from gonio.measuring.from_state import Configs, Contents, entries_of_stored, other_entries, packed_linears
from gonio.measuring.safetensors_file import stored_in_safetensors
from gonio.measuring.shards import Shards, are_parts, stored_in_shards, stored_without_index
from gonio.measuring.stored import in_memory, small_json
from gonio.measuring.torch_file import stored_in_torch

__all__ = ["SUFFIXES", "entries_of_file"]

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def entries_of_file(path: str | os.PathLike[str]) -> Contents:
    """The entries of a file or of a folder that holds one model, and notes on how it was read.

    `.safetensors`, `.safetensors.index.json` with its shards, `.pt`, `.pth`, `.bin`, `.ckpt`. Torch files
    are loaded with `weights_only`, which builds tensors and plain containers and nothing else. Of a
    `config.json` beside it the quantisation is read, of an `adapter_config.json` the adapters' scale.

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
    """The configurations in the file's folder; those of adapters belong to files that are called so."""
    quantization = small_json(path.parent / "config.json").get("quantization_config")
    adapter = small_json(path.parent / "adapter_config.json") if path.name.startswith("adapter_model") else {}
    return Configs(quantization if isinstance(quantization, dict) else {}, adapter)


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
