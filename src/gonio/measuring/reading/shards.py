"""Files by their names: the reader of each kind, an index that names the file of each tensor, and numbered parts."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import isfinite
from pathlib import Path, PurePosixPath
from typing import Any

from gonio.errors import GonioError, InvalidArgumentError, RefusedFileError, UnreadableFileError, listing
from gonio.escaping import plain, shorten
from gonio.measuring.reading.entry import TensorEntry
from gonio.measuring.reading.flax_files import open_flax
from gonio.measuring.reading.gguf_files import open_gguf
from gonio.measuring.reading.hdf5_files import open_hdf5
from gonio.measuring.reading.numpy_files import open_numpy
from gonio.measuring.reading.onnx_files import open_onnx
from gonio.measuring.reading.opened import Opened, Problem, link_to_nothing, misnamed, of_system, packed_in
from gonio.measuring.reading.safetensors_files import open_safetensors
from gonio.measuring.reading.torch_files import SUFFIXES, open_torch
from gonio.messages import Message, counted, say

OTHERS: dict[str, Callable[[Path], Opened]] = {
    ".safetensors": open_safetensors,
    ".gguf": open_gguf,
    ".onnx": open_onnx,
    **dict.fromkeys((".keras", ".h5", ".hdf5"), open_hdf5),
    ".msgpack": open_flax,
    ".npz": open_numpy,
}
_INDEX = re.compile(r".+\.index(\.[\w-]+)?\.json")  # of a variant its name comes before the end: `index.fp16.json`
KINDS = (".safetensors", ".safetensors.index.json", *SUFFIXES, *(kind for kind in OTHERS if kind != ".safetensors"))


def is_index(path: Path) -> bool:
    """Whether a file is an index of shards, by its name."""
    return _INDEX.fullmatch(path.name) is not None


def open_single(path: Path, key: str = "") -> Opened:
    """The tensors of one file that is no index.

    Args:
        key: of one state dict of several in a checkpoint of torch.

    Raises:
        UnreadableFileError: its kind is not known, or it is damaged.
        InvalidArgumentError: a key, but the file is not of torch.
    """
    if path.suffix in SUFFIXES:
        return open_torch(path, key)
    if path.suffix not in OTHERS:
        known = f"its kind {path.suffix!r} is not known", f"Known kinds: {', '.join(KINDS)}."
        raise UnreadableFileError(str(path), *(packed_in(path) or known))
    without_key(key, path)
    return OTHERS[path.suffix](path)


def without_key(key: str, *files: Path) -> None:
    """Refuse a key for files that hold one state dict."""
    if key:
        found = listing([plain(file.name) for file in files], limit=3)
        raise InvalidArgumentError(
            "a key names a state dict in a checkpoint of torch", found, say("Leave the key out.")
        )


# --- several files ----------------------------------------------------------------------------------------------------

LARGEST_INDEX = 100 << 20  # bytes; the index of a model of a million tensors is smaller
PART = re.compile(r"(.+)-(\d+)-of-(\d+)(\.[a-z]+)")


def open_shards(index: Path) -> Opened:
    """The tensors of all shards that an index names. A missing or damaged shard takes only its own tensors with it."""
    wanted, doubled, _ = weight_map(index)
    shards = {shard: _shard(index.parent / shard, shard) for shard in dict.fromkeys(wanted.values())}
    held = {shard: opened for shard, opened in shards.items() if isinstance(opened, Opened)}
    whole = Opened.of_parts([_placed(opened, shard, wanted) for shard, opened in held.items()])
    missing, names = [], set(whole.names)
    for name, shard in wanted.items():
        if name not in names:
            said = shards[shard]
            reason = said if isinstance(said, str) else f"the shard {plain(shard)} does not hold it"
            missing.append(TensorEntry.unread(name, reason))
    gone = missing_in(index, shards)
    unread = [
        Problem("G701", name, said) for name, said in shards.items() if name not in gone and isinstance(said, str)
    ]
    problems = [
        *unread,
        *misplaced(wanted, doubled, {shard: _tensors(one, wanted) for shard, one in held.items()}, gone),
    ]
    notes: tuple[str, ...] = ()
    if any(problem.code == "G703" for problem in problems):
        notes = (say("where index and shards differ, the index is followed; of two places in it, the last"),)
    return replace(
        whole,
        stored={name: whole.stored[name] for name in wanted if name in whole.stored},
        others=(*missing, *whole.others),
        notes=(*notes, *whole.notes),
        problems=(*problems, *whole.problems),
    )


def _placed(opened: Opened, shard: str, wanted: Mapping[str, str]) -> Opened:
    """What a shard holds of the tensors that the index places in it."""
    stored = {name: tensor for name, tensor in opened.stored.items() if wanted.get(name) == shard}
    others = tuple(other for other in opened.others if wanted.get(other.name) == shard)
    return replace(opened, stored=stored, others=others)


def _tensors(opened: Opened, wanted: Collection[str]) -> list[str]:
    """The names of a shard's tensors, and of anything else that the index names."""
    return [*opened.stored, *(one.name for one in opened.others if one.shape is not None or one.name in wanted)]


def missing_in(index: Path, shards: Iterable[str]) -> dict[str, Message]:
    """The shards that are not there; of a link to nothing, what it is."""
    files = {shard: index.parent / shard for shard in shards}
    return {
        shard: link_to_nothing(file) or say("the shard is missing")
        for shard, file in files.items()
        if not file.is_file()
    }


def placed_in(shard: str, wanted: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the tensors that an index places in a shard."""
    return tuple(name for name, place in wanted.items() if place == shard)


def misplaced(
    wanted: Mapping[str, str], doubled: Sequence[str], held: Mapping[str, Collection[str]], gone: Mapping[str, Message]
) -> Iterator[Problem]:
    """Where an index and its shards differ: shards and tensors that are missing, tensors stored twice or not named.

    Args:
        wanted, doubled: as :func:`weight_map` gives them.
        held: the names of the tensors of each shard that can be read. `gone`: as :func:`missing_in` gives it.
    """
    for shard, count in Counter(wanted.values()).items():
        if shard in gone:
            told = {"tensors": counted(count, "tensor"), "why": gone[shard]}
            lost = placed_in(shard, wanted)
            yield Problem("G702", shard, say("{why}; the index places {tensors} in it", **told), lost)
    places: dict[str, list[str]] = {}
    for shard, names in held.items():
        for name in names:
            places.setdefault(name, []).append(plain(shard))
    for name, shard in wanted.items():
        if shard in held and shard not in gone and name not in held[shard]:
            instead = say("; {file} holds it", file=places[name][0]) if name in places else ""
            said = say(
                "not in {shard_name}, where the index places it{instead}", shard_name=plain(shard), instead=instead
            )
            yield Problem("G702", name, said)
    for name in doubled:
        yield Problem("G703", name, say("named twice in the index"))
    for name, seen in places.items():
        if len(seen) > 1:
            where = listing(sorted(seen), limit=4)
            yield Problem("G703", name, say("stored in {count} shards: {seen}", count=len(seen), seen=where))
        elif name not in wanted:
            yield Problem("G703", name, say("in {seen}, but not in the index", seen=seen[0]))


def _shard(path: Path, name: str) -> Opened | str:
    """What a shard holds, or the reason why there is nothing."""
    if not path.is_file():
        return f"its shard {plain(name)} is missing"
    try:
        opened = open_single(path)
        if opened.refusal is not None:
            raise opened.refusal
        return opened
    except RefusedFileError:
        raise
    except GonioError as error:
        return f"its shard {plain(name)} cannot be read: {error}"


def weight_map(index: Path) -> tuple[dict[str, str], list[str], int | None]:
    """Tensor → shard, the names that occur twice in the index, and the bytes of all tensors where it states them."""
    if index.stat().st_size > LARGEST_INDEX:
        raise UnreadableFileError(str(index), f"it is larger than {LARGEST_INDEX} bytes", "It is no index.")
    try:
        content, doubled = parsed(index.read_text(encoding="utf-8"))
        placed = {str(name): str(shard) for name, shard in content["weight_map"].items()}
        stated = content["metadata"].get("total_size") if isinstance(content.get("metadata"), dict) else None
    except Exception as error:
        said = f"it is not an index with a weight_map ({str(error)[:300]})"
        refused = of_system(index, error) or misnamed(index)
        raise refused or UnreadableFileError(str(index), said, "Name the shards one by one.") from error
    for shard in set(placed.values()):
        if said := _elsewhere(index, shard):
            do = "Shards lie beside their index, or in folders there."
            raise UnreadableFileError(str(index), f"{said}: {shorten(repr(shard))}", do)
    size = int(stated) if isinstance(stated, (int, float)) and isfinite(stated) else None
    return placed, [name for name in doubled if name in placed], size


def _elsewhere(index: Path, shard: str) -> str:
    """Why the name of a shard is not that of a file in the folder of its index; empty if it is.

    The file itself may be a link, as in the caches of hubs; a folder on the way to it that leads elsewhere is none.
    """
    path = PurePosixPath(shard)
    if not path.parts or "\\" in shard or "\0" in shard:
        return "it names a shard by what is no path of a file"
    if path.is_absolute() or ".." in path.parts:
        return "it names a file outside its folder"
    if len(path.parts) == 1:
        return ""
    try:
        inside = (index.parent / path).parent.resolve().is_relative_to(index.parent.resolve())
    except (OSError, RuntimeError):  # a name that is too long, links in a circle
        return "it names a shard by what is no path of a file"
    return "" if inside else "it names a file outside its folder, by a link"


def parsed(text: str | bytes) -> tuple[Any, list[str]]:
    """The content of JSON, and the keys that occur twice in one of its objects."""
    doubled: list[str] = []

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        doubled.extend(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        return dict(pairs)

    return json.loads(text, object_pairs_hook=once), doubled


def open_parts(files: list[Path]) -> Opened:
    """The tensors of parts without an index; the names of the parts tell how many there should be."""
    parts: list[Opened] = []
    notes = ["the parts have no index: what is missing cannot be told"]
    times: Counter[str] = Counter()
    for file in filter(Path.is_file, files):
        opened = _shard(file, file.name)
        if isinstance(opened, str):
            raise UnreadableFileError(str(file), opened, "Copy or download it again.")
        twice = [plain(name) for name in opened.names if name in times]
        notes += [f"in several parts, read from the first: {listing(twice, limit=4)}"] if twice else []
        times.update(opened.names)
        parts.append(opened)
    whole = Opened.of_parts(parts)
    return replace(whole, notes=(*notes, *whole.notes), problems=(*of_parts(files, times), *whole.problems))


def of_parts(files: Sequence[Path], times: Mapping[str, int]) -> Iterator[Problem]:
    """What is wrong with parts without an index; their names say how many there are.

    Args:
        times: in how many of them a tensor of each name is.
    """
    expected = max(int(part[3]) for file in files if (part := PART.fullmatch(file.name)))
    there, said = [file for file in files if file.is_file()], say("it is missing")
    if expected != len(there):
        yield Problem("G702", "", say("{count} of {expected} parts are there", count=len(there), expected=expected))
    yield from (Problem("G702", file.name, link_to_nothing(file) or said) for file in files if file not in there)
    yield from (Problem("G703", name, say("stored in {n} files", n=n)) for name, n in times.items() if n > 1)


# Where transformers finds one of these, it does not look for an index; diffusers reads the index of its own first.
_BEFORE_INDEX = frozenset(("model.safetensors", "pytorch_model.bin"))


def shards_of(files: Iterable[Path]) -> set[str]:
    """The names of the shards of the indices among these files."""
    shards: set[str] = set()
    for index in filter(is_index, files):
        with suppress(GonioError):  # whoever reads the index says what is wrong with it
            shards |= {*weight_map(index)[0].values()}
    return shards


def is_passed_over(index: Path) -> bool:
    """Whether a file is an index beside the same model in one file, which is none of its shards and is read instead."""
    single = index.with_name(index.name.removesuffix(".index.json"))
    if not is_index(index) or single.name not in _BEFORE_INDEX or not single.is_file():
        return False
    return single.name not in shards_of([index])


def around(files: Sequence[Path], *, of_folder: bool) -> Iterator[Problem]:
    """What is wrong beside the files of a model: a second model in its folder, a download that has not ended.

    transformers leaves an index where a model is saved again in one file, and that file where it is saved again in
    shards. The first is harmless: no shard is left.

    Args:
        of_folder: whether the folder was named, not the file.
    """
    first = files[0]
    index = first if is_index(first) else Path(f"{first}.index.json")
    single = Path(str(index).removesuffix(".index.json"))  # of the index of a variant, itself
    shards = shards_of([index] if index.is_file() else [])
    there = [index.parent / shard for shard in sorted(shards) if (index.parent / shard).is_file()]
    if of_folder and there and single != index and single.is_file() and single.name not in shards:
        names = {"single": plain(single.name), "index": plain(index.name), "read": plain(first.name)}
        said = say("{single} and {index} with shards are two models: {read} is read, other programs differ", **names)
        yield Problem("G703", single.name, said)
    for file in (*files, *(there if first == index else ())):
        if Path(f"{file}.aria2").is_file():
            said = say("its download has not ended: {name}.aria2 is beside it", name=plain(file.name))
            yield Problem("G715", file.name, said)


def are_parts(files: Sequence[Path], *, of_folder: bool) -> bool:
    """Whether files are parts of a model without an index: several, or the only one that a folder has of several."""
    return any(map(Path.is_file, files)) and (len(files) > 1 or (of_folder and bool(of_one_part(files[0]))))


def of_one_part(path: Path) -> tuple[Message, ...]:
    """A note on a file that its name calls one of several parts; none for another one."""
    part = PART.fullmatch(path.name)
    if part is None or int(part[3]) < 2:
        return ()
    return (say("one of {n} parts: the others are read with it if their folder or index is named", n=int(part[3])),)
