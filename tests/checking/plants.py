"""Damages by kind, each for the formats in which it makes sense, with what `check` must say of it."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gonio
from checking.containers import FORMATS, HEADED, OTHER, PACKED, VICTIM, State, data_file, weights
from gonio.errors import GonioError

REFUSED = "refused"
UNREAD = frozenset({"G712"})  # what follows for the values of a tensor whose file is damaged
BROKEN = frozenset({REFUSED, "G701", "G702", "G703", "G704", "G705", "G711"})
UNPACKED = tuple(name for name in FORMATS if name not in PACKED)
LAYER = VICTIM.removesuffix(".weight")


Plant = Callable[[Path, np.random.Generator, State], object]


@dataclass(frozen=True)
class Kind:
    """One kind of damage.

    Attributes:
        formats: in which it is planted.
        values: changes the weights before they are written. `files`: changes the source.
        expected: the codes of which one must be found; all that are found must be among `expected` and `further`.
        place: part of the path that a finding must name; "" for any.
        against: whether the file is held against the fingerprints of the healthy one.
    """

    formats: Sequence[str]
    expected: frozenset[str]
    values: Callable[[State, np.random.Generator], Any] | None = None
    files: Plant | None = None
    place: str = ""
    further: frozenset[str] = frozenset()
    against: bool = False


def codes(*names: str) -> frozenset[str]:
    return frozenset(names)


# --- values ----------------------------------------------------------------------------------------------------------


def at(draw: np.random.Generator) -> tuple[int, int]:
    return int(draw.integers(24)), int(draw.integers(40))


def one_value(value: float) -> Callable[[State, np.random.Generator], None]:
    def plant(state: State, draw: np.random.Generator) -> None:
        state[VICTIM][at(draw)] = value

    return plant


def rows(value: float | None, count: int) -> Callable[[State, np.random.Generator], None]:
    def plant(state: State, draw: np.random.Generator) -> None:
        chosen = draw.choice(24, count + 1, replace=False).tolist()
        state[VICTIM][chosen[:count]] = state[VICTIM][chosen[count]].clone() if value is None else value

    return plant


def scaled(state: State, draw: np.random.Generator) -> None:
    state[VICTIM] *= 100.0 if draw.integers(2) else 0.005


def swapped(state: State, draw: np.random.Generator) -> None:
    state[VICTIM], state[OTHER] = state[OTHER], state[VICTIM]


def written_twice(state: State, draw: np.random.Generator) -> None:
    """All matrices of the victim's layer are those of the one before."""
    number = int(LAYER[7])
    for name in ("down", "up"):
        state[f"layers.{number}.{name}.weight"] = state[f"layers.{number - 1}.{name}.weight"].clone()


def resized(state: State, draw: np.random.Generator) -> None:
    state[VICTIM] = torch.cat([state[VICTIM], state[VICTIM][:8]] if draw.integers(2) else [state[VICTIM][:16]])


def exponent_bit(state: State, draw: np.random.Generator) -> None:
    """The highest bit of the exponent of the largest entry below 1."""
    victim = state[VICTIM]
    entry = victim.abs().where(victim.abs() < 1, 0).argmax()
    integers, bit = {2: (torch.int16, 1 << 14), 4: (torch.int32, 1 << 30)}[victim.element_size()]
    victim.view(integers).view(-1)[entry] ^= bit


def changed_bit(state: State, draw: np.random.Generator) -> None:
    value = state[VICTIM]
    value[at(draw)] += 2.0 ** -int(draw.integers(3, 6))


def renamed(state: State, draw: np.random.Generator) -> None:
    items = [(f"layers.{LAYER[7]}.old.weight" if name == VICTIM else name, value) for name, value in state.items()]
    state.clear()
    state.update(items)


def other_bytes(state: State, draw: np.random.Generator) -> None:
    """The bytes of each number in the other order."""
    state[VICTIM] = torch.from_numpy(state[VICTIM].numpy().byteswap())


def other_type(state: State, draw: np.random.Generator) -> None:
    state[VICTIM] = state[VICTIM].to(torch.float16 if state[VICTIM].dtype != torch.float16 else torch.float32)


# --- files -----------------------------------------------------------------------------------------------------------


def cut_off(source: Path, draw: np.random.Generator, state: State) -> None:
    file = data_file(source)
    raw = file.read_bytes()
    file.write_bytes(raw[: int(len(raw) * draw.uniform(0.3, 0.95))])


def emptied(source: Path, draw: np.random.Generator, state: State) -> None:
    data_file(source).write_bytes(b"")


def pointer(source: Path, draw: np.random.Generator, state: State) -> None:
    """What Git LFS leaves where a file was not downloaded."""
    file = data_file(source)
    text = (
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{draw.bytes(32).hex()}\nsize {file.stat().st_size}\n"
    )
    file.write_text(text)


def zeros(source: Path, draw: np.random.Generator, state: State) -> None:
    """A block of a disk that was never written, in the middle of the file."""
    file = data_file(source)
    raw = bytearray(file.read_bytes())
    middle = int(len(raw) * draw.uniform(0.4, 0.6))
    raw[middle : middle + 4096] = bytes(len(raw[middle : middle + 4096]))
    file.write_bytes(raw)


def flipped(source: Path, draw: np.random.Generator, state: State) -> None:
    """One bit of the values on the disk."""
    file = data_file(source)
    raw, value = bytearray(file.read_bytes()), state[VICTIM]
    start = raw.find(value.numpy().tobytes()[:64])
    if start < 0:  # packed in codes, of which the middle of the file has some
        start = len(raw) // 2
    raw[start + int(draw.integers(64))] ^= 1 << int(draw.integers(8))
    file.write_bytes(raw)


def header(change: Callable[[dict[str, Any]], object]) -> Plant:
    """A change of the header of a safetensors file."""

    def plant(source: Path, draw: np.random.Generator, state: State) -> None:
        file = data_file(source)
        raw = file.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        content = json.loads(raw[8 : 8 + length])
        change(content)
        text = json.dumps(content).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    return plant


def header_byte(source: Path, draw: np.random.Generator, state: State) -> None:
    file = data_file(source)
    raw = bytearray(file.read_bytes())
    (length,) = struct.unpack("<Q", raw[:8])
    place = 8 + int(draw.integers(len(raw[8 : 8 + length].rstrip())))
    raw[place] ^= 1 << int(draw.integers(7))
    file.write_bytes(raw)


def victim(content: dict[str, Any]) -> dict[str, Any]:
    return next(entry for name, entry in content.items() if name.startswith(LAYER))


def overlapping(content: dict[str, Any]) -> None:
    first = next(entry for name, entry in content.items() if name.startswith("layers.0"))
    victim(content)["data_offsets"] = [n + 8 for n in first["data_offsets"]]


def other_dtype(content: dict[str, Any]) -> None:
    entry = victim(content)
    entry["dtype"] = "F32" if entry["dtype"] in ("F64", "I64") else "F64"


def other_shape(content: dict[str, Any]) -> None:
    victim(content)["shape"][0] += 1


def appended(source: Path, draw: np.random.Generator, state: State) -> None:
    with data_file(source).open("ab") as file:
        file.write(draw.bytes(int(draw.integers(64, 4096))))


def parts_of(source: Path) -> list[Path]:
    return sorted([*source.glob("*optim*"), *source.glob("*.distcp"), *source.parent.glob("model-*.safetensors")])


def missing(source: Path, draw: np.random.Generator, state: State) -> None:
    held = parts_of(source)
    held[int(draw.integers(len(held)))].unlink()


def doubled(source: Path, draw: np.random.Generator, state: State) -> None:
    first, second = parts_of(source)[:2]
    shutil.copy(*((first, second) if draw.integers(2) else (second, first)))


def index(change: Callable[[dict[str, str]], object]) -> Plant:
    def plant(source: Path, draw: np.random.Generator, state: State) -> None:
        content = json.loads(source.read_text())
        change(content["weight_map"])
        source.write_text(json.dumps(content))

    return plant


SHARDS = ("shards with an index",)
KINDS: dict[str, Kind] = {
    "NaN": Kind(list(FORMATS), codes("G001"), one_value(float("nan")), place=LAYER),
    "infinity": Kind(UNPACKED, codes("G001"), one_value(-float("inf")), place=LAYER),
    "a tensor of zeros": Kind(list(FORMATS), codes("G709", "G101"), lambda s, _: s[VICTIM].zero_(), place=LAYER,
                              further=codes("G001")),
    "a constant tensor": Kind(UNPACKED, codes("G706"), lambda s, _: s[VICTIM].fill_(0.17), place=LAYER),
    "constant rows": Kind(UNPACKED, codes("G708"), rows(0.25, 1), place=LAYER),
    "rows of zeros": Kind(UNPACKED, codes("G102"), rows(0.0, 5), place=LAYER),
    "equal rows": Kind(UNPACKED, codes("G203"), rows(None, 1), place=LAYER),
    "one layer × 100 or / 200": Kind(list(FORMATS), codes("G709"), scaled, place=LAYER),
    "a flipped bit of an exponent": Kind(UNPACKED, codes("G721"), exponent_bit, place=LAYER),
    "bytes in the other order": Kind(UNPACKED, codes("G001", "G709", "G721"), other_bytes, place=LAYER),
    "swapped layers": Kind(list(FORMATS), codes("G710"), swapped, place=LAYER, against=True),
    "one layer written twice": Kind(list(FORMATS), codes("G716"), written_twice, place=LAYER[:8]),
    "a tensor of another size": Kind(list(FORMATS), codes("G710"), resized, place=LAYER, against=True,
                                     further=codes("G203")),
    "another dtype": Kind([f for f in UNPACKED if f != "ZeRO"], codes("G710"), other_type, place=LAYER, against=True),
    "one changed value": Kind(UNPACKED, codes("G710"), changed_bit, place=LAYER, against=True),
    "a renamed tensor": Kind(list(FORMATS), codes("G710"), renamed, place=LAYER, against=True),
    "cut off": Kind(list(FORMATS), BROKEN - {"G705"}, files=cut_off),
    "an empty file": Kind(list(FORMATS), BROKEN, files=emptied),
    "a pointer of Git LFS": Kind(list(FORMATS), BROKEN, files=pointer),
    "a block of zeros": Kind(list(FORMATS), BROKEN | {"G710"}, files=zeros, against=True,
                             further=codes("G001", "G101", "G102", "G709", "G708", "G203", "G706", "G721")),
    "a flipped bit of the data": Kind(list(FORMATS), BROKEN | {"G710"}, files=flipped, against=True,
                                      further=codes("G001", "G709", "G203", "G708", "G721")),
    "a flipped bit of the header": Kind(HEADED, BROKEN | {"G710"}, files=header_byte, against=True,
                                        further=codes("G001", "G709", "G706", "G203", "G708", "G102", "G721")),
    "overlapping offsets": Kind(HEADED, codes("G704"), files=header(overlapping),
                                further=codes("G705", "G203", "G708")),
    "a wrong dtype in the header": Kind(HEADED, codes("G704"), files=header(other_dtype), place=LAYER),
    "a wrong shape in the header": Kind(HEADED, codes("G704"), files=header(other_shape), place=LAYER),
    "unused bytes": Kind((*HEADED, "GGUF"), codes("G705"), files=appended),
    "a missing part": Kind((*SHARDS, "torch.distributed", "ZeRO"), BROKEN - {"G703", "G705", "G711"}, files=missing),
    "a part twice": Kind((*SHARDS, "ZeRO"), codes("G702", "G703", "G710"), files=doubled, against=True),
    "an index that names an absent tensor": Kind(SHARDS, codes("G702"), place="gone", files=index(
        lambda held: held.update(gone=next(iter(held.values()))))),
    "a tensor that the index does not name": Kind(SHARDS, codes("G703"), place=LAYER, files=index(
        lambda held: held.pop(VICTIM))),
}  # fmt: skip


def cases() -> Iterator[tuple[str, str]]:
    """Kind and format of each planted damage."""
    return ((kind, name) for kind, planted in KINDS.items() for name in planted.formats)


def found(source: Path, against: Any = None) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """Code and path of all findings, and of the errors and warnings; of a file that is refused the error."""
    try:
        made = gonio.check(source, against=against, jobs=1)
    except GonioError as error:
        return {(REFUSED, str(error))}, {(REFUSED, str(error))}
    return tuple({(f.code, f.path) for f in made.findings if f.level not in left} for left in ((), ("info",)))


def named(kind: str, form: str, seed: int, folder: Path) -> str:
    """Why a planted damage is not named rightly; empty if it is."""
    plant, draw = KINDS[kind], np.random.default_rng([seed, *kind.encode()])
    state = weights(seed, torch.float16 if seed % 2 and form != "ZeRO" else torch.float32)
    (folder / "healthy").mkdir(parents=True)
    source = FORMATS[form](dict(state), folder / "healthy")
    before, alarms = found(source)
    if alarms:
        return f"false alarms: {sorted(alarms)}"
    known = gonio.check(source, jobs=1).fingerprints if plant.against else None
    if plant.values is not None:
        changed = {name: value.clone() for name, value in state.items()}
        plant.values(changed, draw)
        (folder / "damaged").mkdir()
        source = FORMATS[form](changed, folder / "damaged")
    elif plant.files is not None:
        plant.files(source, draw, state)
    said = found(source, known)[0] - before
    right = [path for code, path in said if code in plant.expected and plant.place in path]
    right = [path for path in right if (REFUSED, path) not in said or source.name in path]
    others = {code for code, _ in said} - plant.expected - plant.further - UNREAD
    return "" if right and not others else f"found {sorted(said)}"
