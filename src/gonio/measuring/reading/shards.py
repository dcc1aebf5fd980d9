"""A model in several files: an index that names the file of each tensor, or parts numbered by their names."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from gonio.errors import GonioError, UnreadableFileError, listing
from gonio.escaping import plain, shorten
from gonio.measuring.reading.entry import Stored
from gonio.measuring.reading.formats import stored_in_safetensors, stored_in_torch

LARGEST_INDEX = 100 << 20  # bytes; the index of a model of a million tensors is smaller
_PART = re.compile(r"(.+)-(\d+)-of-(\d+)(\.[a-z]+)")

Shards = tuple[dict[str, Stored], dict[str, str], tuple[str, ...]]


def stored_in_shards(index: Path) -> Shards:
    """The tensors of all shards that an index names; the missing ones with the reason; and notes.

    If a shard is missing or damaged, only its own tensors are missing.

    Raises:
        UnreadableFileError: if the file is no index, or names a file outside its folder.
    """
    wanted, doubled = _weight_map(index)
    files = {shard: _opened(index.parent / shard) for shard in dict.fromkeys(wanted.values())}
    stored, missing = {}, {}
    for name, shard in wanted.items():
        held = files[shard]
        if isinstance(held, str):
            missing[name] = held
        elif name not in held:
            missing[name] = f"the shard {plain(shard)} does not hold it"
        else:
            stored[name] = held[name]
    notes = [f"the index names {plain(name)} twice; the last place is read" for name in doubled[:5]]
    return stored, missing, (*notes, *_strays(wanted, files))


def _strays(wanted: Mapping[str, str], files: Mapping[str, dict[str, Stored] | str]) -> list[str]:
    """Notes on tensors of the shards that the index does not name, or names in another shard."""
    held = [(name, shard) for shard, names in files.items() if not isinstance(names, str) for name in names]
    unnamed = [f"{plain(name)} (in {plain(shard)})" for name, shard in held if name not in wanted]
    elsewhere = [f"{plain(name)} (in {plain(shard)} too)" for name, shard in held if wanted.get(name, shard) != shard]
    said = {
        "in the shards but not in the index, and not read": unnamed,
        "in several shards, read where the index says": elsewhere,
    }
    return [f"{what}: {listing(names, limit=4)}" for what, names in said.items() if names]


def _opened(path: Path) -> dict[str, Stored] | str:
    """The tensors of a shard, or the reason why there are none."""
    if not path.is_file():
        return f"its shard {plain(path.name)} is missing"
    try:
        return stored_in_safetensors(path) if path.suffix == ".safetensors" else stored_in_torch(path)[1]
    except GonioError as error:
        return f"its shard {plain(path.name)} cannot be read: {error}"


def _weight_map(index: Path) -> tuple[dict[str, str], list[str]]:
    """Tensor → shard, and the names that occur twice in the index."""
    if index.stat().st_size > LARGEST_INDEX:
        raise UnreadableFileError(str(index), f"it is larger than {LARGEST_INDEX} bytes", "It is no index.")
    doubled: list[str] = []
    try:
        content = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=lambda pairs: _once(pairs, doubled))
        pairs = {str(name): str(shard) for name, shard in content["weight_map"].items()}
    except Exception as error:
        raise UnreadableFileError(
            str(index), f"it is not an index with a weight_map ({str(error)[:300]})", "Name the shards one by one."
        ) from error
    outside = [s for s in set(pairs.values()) if PurePosixPath(s).name != s or "\\" in s or s in ("", ".", "..")]
    if outside:
        raise UnreadableFileError(
            str(index),
            f"it names a file outside its folder: {shorten(repr(outside[0]))}",
            "Shards lie beside their index.",
        )
    return pairs, [name for name in doubled if name in pairs]


def _once(pairs: list[tuple[str, Any]], doubled: list[str]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        doubled += [name for name, times in Counter(name for name, _ in pairs).items() if times > 1]
    return made


def are_parts(files: list[Path]) -> bool:
    """Whether these are the parts of one model by their names, `…-00001-of-00002.safetensors`."""
    found = [_PART.fullmatch(file.name) for file in files]
    return bool(found) and len({(m[1], m[3], m[4]) if m else None for m in found}) == 1 and found[0] is not None


def stored_without_index(files: list[Path]) -> Shards:
    """The tensors of parts without an index; the names of the parts tell how many there should be."""
    stored: dict[str, Stored] = {}
    notes = ["the parts have no index: what is missing cannot be told"]
    for file in files:
        held = _opened(file)
        if isinstance(held, str):
            raise UnreadableFileError(str(file), held, "Copy or download it again.")
        twice = [plain(name) for name in held if name in stored]
        notes += [f"in several parts, read from the first: {listing(twice, limit=4)}"] if twice else []
        stored = {**held, **stored}
    match = _PART.fullmatch(files[0].name)
    if match and int(match[3]) != len(files):
        notes.append(f"{len(files)} of {int(match[3])} parts are there")
    return stored, {}, tuple(notes)
