"""What `gonio check` and `gonio measure` say of adapters that are in order, and of faults that were planted in them.

    python -m benchmarks.adapter_faults [seeds]

The adapters are those of `adapters.py`, with and without their base. An adapter is in order if its training, at a usual
learning rate, improved the score on its task and left at least half of the base's on the task of the base. Faults are
planted in those of them that change all layers. A fault is found if a warning or an error is reported that the same
adapter did not have before, or if the adapter is refused. The result is benchmarks/results/adapter_faults.json, from
which `benchmarks.tables` fills a page's `adapter_faults` block. peft needs builds of torch and torchvision of one kind.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import gonio
from benchmarks.adapters import HIGH, SEEDS, Tuning, base_of, trained, tunings
from benchmarks.false_alarms import upper
from benchmarks.machine import versions
from benchmarks.results import FOLDER
from gonio.errors import GonioError

__all__ = ["FAULTS", "RESULT", "Fault", "alarms", "main", "table"]

RESULT = FOLDER / "adapter_faults.json"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
State = dict[str, Tensor]
WAYS = ("check", "measure", "measure with the base")


class NotHereError(Exception):
    """The adapter has no such part."""


@dataclass(frozen=True)
class Fault:
    """One kind of fault: `plant` changes the files of an adapter, or raises NotHereError.

    Attributes:
        hidden: why nothing in the files shows it; empty if something should.
    """

    name: str
    plant: Callable[[Path], None]
    hidden: str = ""


def in_weights(change: Callable[[State, list[str]], None], part: str = "lora_B") -> Callable[[Path], None]:
    """A change of the tensors; it gets the sorted keys of one part, of which the middle one is the victim's."""

    def plant(folder: Path) -> None:
        state = load_file(folder / WEIGHTS)
        keys = sorted(key for key in state if f".{part}" in key and not key.endswith("bias"))
        if not keys:
            raise NotHereError
        change(state, keys)
        save_file({key: tensor.contiguous() for key, tensor in state.items()}, folder / WEIGHTS)

    return plant


def victim(keys: list[str]) -> str:
    return keys[len(keys) // 2]


def one_value(value: float) -> Callable[[State, list[str]], None]:
    def change(state: State, keys: list[str]) -> None:
        tensor = state[victim(keys)]
        tensor.view(-1)[tensor.numel() // 2] = value

    return change


def times(factor: float, *, every: bool = False) -> Callable[[State, list[str]], None]:
    def change(state: State, keys: list[str]) -> None:
        for key in keys if every else [victim(keys)]:
            state[key] = state[key] * factor

    return change


def zeroed(state: State, keys: list[str]) -> None:
    alike = [key for key in keys if state[key].shape == state[victim(keys)].shape]
    if len(alike) < 4:
        raise NotHereError  # without others to compare with, an adapter that was not trained is one that starts
    state[victim(keys)].zero_()


def half_zeroed(state: State, keys: list[str]) -> None:
    tensor = state[victim(keys)]
    tensor[: len(tensor) // 2] = 0


def without_partner(state: State, keys: list[str]) -> None:
    del state[victim(keys)]


def of_other_rank(state: State, keys: list[str]) -> None:
    key = victim(keys)
    state[key] = torch.cat([state[key], state[key]], dim=1)


def of_other_base(state: State, keys: list[str]) -> None:
    key = victim(keys)
    state[key] = torch.cat([state[key], state[key].roll(1, 0)])


def renamed(state: State, keys: list[str]) -> None:
    path = victim(keys).rpartition(".lora_B")[0]
    for key in [key for key in state if key.startswith(f"{path}.")]:
        state[key.replace(path, f"{path}_old")] = state.pop(key)


def in_config(**values: Any) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        content = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if content["peft_type"] != "LORA":
            raise NotHereError
        content |= {name: value(content[name]) if callable(value) else value for name, value in values.items()}
        (folder / CONFIG).write_text(json.dumps(content), encoding="utf-8")

    return plant


def cut_off(folder: Path) -> None:
    raw = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(raw[: len(raw) // 2])


def without_config(folder: Path) -> None:
    (folder / CONFIG).unlink()


def unreadable_config(folder: Path) -> None:
    raw = (folder / CONFIG).read_text(encoding="utf-8")
    (folder / CONFIG).write_text(raw[: len(raw) // 2], encoding="utf-8")


FAULTS = (
    Fault("one value of B NaN", in_weights(one_value(float("nan")))),
    Fault("one value of A infinite", in_weights(one_value(float("inf")), "lora_A")),
    Fault("one value of OFT's blocks NaN", in_weights(one_value(float("nan")), "oft_R")),
    Fault("B of one layer × 1000", in_weights(times(1e3))),
    Fault("B of all layers × 1000", in_weights(times(1e3, every=True))),
    Fault("`lora_alpha` × 1000", in_config(lora_alpha=lambda alpha: 1000 * alpha)),
    Fault("B of one of at least four like layers 0", in_weights(zeroed)),
    Fault("half of the rows of B 0", in_weights(half_zeroed), hidden="B begins at 0"),
    Fault("B of one layer is missing", in_weights(without_partner)),
    Fault("A and B of different ranks", in_weights(of_other_rank)),
    Fault("made for a layer of another size", in_weights(of_other_base)),
    Fault("made for a layer of another name", in_weights(renamed)),
    Fault("file cut off", cut_off),
    Fault("no adapter_config.json", without_config),
    Fault("adapter_config.json cut off", unreadable_config),
    Fault("signs of B reversed", in_weights(times(-1.0)), hidden="as likely as before"),
)


def alarms(folder: Path, base: Mapping[str, Tensor], way: str) -> set[tuple[str, str]]:
    """Code and path of the warnings and errors; of an adapter that is refused, what the exception is."""
    try:
        if way == "check":
            findings = gonio.check(folder).findings
        elif way == "measure":
            findings = gonio.measure(folder).findings
        else:
            findings = gonio.measure(base, folder).findings
    except GonioError as error:
        return {("refused", type(error).__name__)}
    return {(finding.code, finding.path) for finding in findings if finding.level != "info"}


def in_order(tuning: Tuning, scores: Mapping[str, Any]) -> bool:
    before, after, old, kept = (scores[name] for name in ("before", "after", "old_before", "old_after"))
    if scores["direction"] == "min":  # bits per byte: eight are a uniform guess
        before, after, old, kept = (8 - value for value in (before, after, old, kept))
    return tuning.usual and after > before and kept >= old / 2


def planted(
    folder: Path, base: Mapping[str, Tensor], before: Mapping[str, set[tuple[str, str]]]
) -> Iterator[dict[str, Any]]:
    """One record per fault that can be planted: by which way it was found, and the codes."""
    for fault in FAULTS:
        with TemporaryDirectory() as place:
            copy = Path(place) / "adapter"
            shutil.copytree(folder, copy)
            try:
                fault.plant(copy)
            except NotHereError:
                continue
            found: dict[str, list[str]] = {}
            for way in WAYS:
                if new := alarms(copy, base, way) - before[way]:
                    found[way] = sorted({code for code, _ in new})
        yield {"fault": fault.name, "found": found}


def main(words: list[str]) -> None:
    healthy: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    faults: list[dict[str, Any]] = []
    for tuning in tunings(int(words[0]) if words else SEEDS):
        folder, scores = trained(tuning)
        base = base_of(tuning.base, tuning.seed).state_dict()
        before = {way: alarms(folder, base, way) for way in WAYS}
        record = {**scores, "alarms": {way: sorted({code for code, _ in found}) for way, found in before.items()}}
        (healthy if in_order(tuning, scores) else others).append(record)
        if in_order(tuning, scores) and tuning.targets == "all":
            made = {name: getattr(tuning, name) for name in ("base", "kind")}
            faults += [made | each for each in planted(folder, base, before)]
        print(f"{tuning.name}: {record['alarms']}", file=sys.stderr, flush=True)
    hidden = [fault.name for fault in FAULTS if fault.hidden]
    found = {"healthy": healthy, "others": others, "faults": faults, "hidden": hidden, "versions": versions()}
    RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(table(found))


# --- the table ----------------------------------------------------------------------------------------------------


def table(found: Mapping[str, Any]) -> str:
    """A line per fault; then the adapters in order, and those at a high rate."""
    records, healthy, others = found["faults"], found["healthy"], found["others"]
    lines = [
        f"| fault | planted | {' | '.join(f'found by {way}' for way in WAYS)} | found | rules |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    for name in dict.fromkeys(record["fault"] for record in records):
        mine = [record["found"] for record in records if record["fault"] == name]
        ways = [sum(way in each for each in mine) for way in WAYS]
        codes = Counter(code for each in mine for code in {code for codes in each.values() for code in codes})
        said = ", ".join(sorted(codes, key=lambda code: (-codes[code], code))) or "–"
        mark = " ¹" if name in found["hidden"] else ""
        lines.append(f"| {name}{mark} | {len(mine)} | {' | '.join(map(str, ways))} | {sum(map(bool, mine))} | {said} |")
    seen = [record for record in records if record["fault"] not in found["hidden"]]
    caught = sum(bool(record["found"]) for record in seen)
    alone = [record for record in healthy if record["alarms"]["check"] or record["alarms"]["measure"]]
    with_base = [record for record in healthy if record["alarms"][WAYS[2]]]
    codes = sorted({code for record in with_base for code in record["alarms"][WAYS[2]]})
    high = [record for record in others if record["alarms"][WAYS[2]]]
    kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(record["kind"] for record in healthy).items())
    below = f"{100 * upper(len(alone), len(healthy)):.2g} %, 95 %"
    used = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    said = (
        f"{caught} of {len(seen)} faults found ({caught / len(seen):.1%}). {len(healthy)} adapters in order ({kinds}, "
        f"of {len({record['base'] for record in healthy})} kinds of networks): {len(alone)} have a warning "
        f"of their own (the true rate is below {below}), {len(with_base)} one beside their base"
        f"{' (' + ', '.join(codes) + ')' if codes else ''}. Of {len(others)} more, at a rate of {HIGH:g}, or which "
        f"lost the base's score or did not gain, {len(high)} have one beside their base. ¹ B begins at 0, and its "
        f"sign is arbitrary: no file shows it. {used}."
    )
    return "\n".join([*lines, "", said])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
