"""What `gonio doctor` does about planted damages, and whether it leaves healthy networks alone.

    python -m benchmarks.doctor [healthy networks] [damaged networks]

The damages are those of `planted_damage.py`; the networks have numbers that no rule was written with. 148 images that a
network was not trained on prove a treatment, 149 others score it. The result is benchmarks/results/doctor.json, from
which `benchmarks.tables` fills a page's `doctor` block.

A damage counts as detected if measuring it with training images reports what was not reported before it was planted.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from math import sqrt
from typing import Any

import torch
from torch import nn

import gonio
from benchmarks.healthy_networks import LEARNT, TRAINED_ON, digits, healthy
from benchmarks.planted_damage import planted
from benchmarks.results import FOLDER
from gonio.lab import Split, Task, TrainingConfig, accuracy

RESULT = FOLDER / "doctor.json"
NEAR = 1.0  # points of accuracy
FIRST_DAMAGED, FIRST_HEALTHY = 3003, 4000  # numbers that no rule was written with; 3003 and 3004 have batch norms
OUTCOMES = ("restored", "same score", "not restored", "refused", "worse")


def task() -> Task:
    """The images that the networks were trained on, to calibrate; further ones to prove, and others to score."""
    images, classes = digits()
    middle = TRAINED_ON + (len(images) - TRAINED_ON) // 2
    parts = (slice(TRAINED_ON), slice(TRAINED_ON, middle), slice(middle, None))
    train, validation, test = (Split(images[part], classes[part]) for part in parts)
    return Task(
        name="digits", train=train, validation=validation, test=test, model="digits-cnn", sizes={}, sesoi=NEAR,
        training=TrainingConfig(epochs=1, batch_size=64, lr=0.05),
    )  # fmt: skip


@torch.no_grad()
def score(model: nn.Module, data: Task) -> float:
    """Accuracy in per cent on images that proved nothing; 0 if an output is not finite."""
    outputs = model.eval()(data.test.inputs)
    return accuracy(outputs, data.test.targets) if bool(torch.isfinite(outputs).all()) else 0.0


def codes(found: Any) -> set[tuple[str, str]]:
    return {(finding.code, finding.path) for finding in found.findings}


def outcome(well: float, damaged: float, treated: float, kept: bool) -> str:
    """What became of a detected damage, in points of accuracy."""
    if treated < damaged - NEAR:
        return "worse"
    if not kept:
        return "refused"
    if treated < well - NEAR:
        return "not restored"
    return "restored" if damaged < well - NEAR else "same score"


def tried(number: int, data: Task) -> list[dict[str, Any]]:
    """One record for each detected damage of one network."""
    made = []
    name, model, _ = healthy(number)
    well, before = score(model, data), codes(gonio.doctor(model, task=data).before)
    for case in planted(model):
        damaged = score(case.model, data)
        treated = gonio.doctor(case.model, task=data)
        new = codes(treated.before) - before
        if not new:
            continue
        after = score(treated.model, data)
        made.append(
            {
                "damage": case.damage.name,
                "place": case.place,
                "architecture": name,
                "codes": sorted({code for code, _ in new}),
                "kept": [step.verb for step in treated.kept],
                "scores": [round(value, 3) for value in (well, damaged, after)],
                "outcome": outcome(well, damaged, after, bool(treated.kept)),
            }
        )
    return made


def left_alone(number: int, data: Task) -> dict[str, Any] | None:
    """What is done to a network without a damage, and its scores before and after; None if it has not learnt."""
    name, model, trained = healthy(number)
    if trained < LEARNT:
        return None
    treated = gonio.doctor(model, task=data)
    scores = [round(score(each, data), 3) for each in (model, treated.model)]
    return {"architecture": name, "kept": [step.verb for step in treated.kept], "scores": scores}


def wilson(hits: int, cases: int) -> tuple[float, float]:
    """The 95 % interval of a share (E. B. Wilson, JASA 22, 1927)."""
    z, p = 1.959964, hits / cases
    centre, half = p + z * z / (2 * cases), z * sqrt(p * (1 - p) / cases + z * z / (4 * cases * cases))
    return (centre - half) / (1 + z * z / cases), (centre + half) / (1 + z * z / cases)


def table(found: dict[str, Any]) -> str:
    """The result as a page's table: one line per kind of damage, then the shares with their intervals."""
    records = found["damages"]
    lines = [f"| damage | detected | {' | '.join(OUTCOMES)} |", f"|---|--:|{'--:|' * len(OUTCOMES)}"]
    for name in dict.fromkeys(record["damage"] for record in records):
        seen = Counter(record["outcome"] for record in records if record["damage"] == name)
        lines.append(f"| {name} | {seen.total()} | {' | '.join(str(seen[each] or '–') for each in OUTCOMES)} |")
    counts = Counter(record["outcome"] for record in records)
    lines += ["", "| of all detected damages | number | share | 95 % interval |", "|---|--:|--:|--:|"]
    well = found["healthy"]
    changed = sum(bool(case["kept"]) for case in well)
    worse = sum(case["scores"][1] < case["scores"][0] - 0.5 for case in well)
    rows = [(each, counts[each], len(records)) for each in OUTCOMES]
    treated = len(records) - counts["refused"]
    rows += [("restored or same score, of those treated", counts["restored"] + counts["same score"], treated)]
    if well:
        rows += [("healthy networks changed", changed, len(well))]
        rows += [("healthy networks made worse", worse, len(well))]
    for what, hits, cases in rows:
        low, high = wilson(hits, cases)
        lines.append(f"| {what} | {hits} of {cases} | {hits / cases:.1%} | {low:.1%} to {high:.1%} |")
    networks = ", ".join(dict.fromkeys(record["architecture"] for record in records))
    damaged = f"{found['damaged networks']} damaged networks ({networks})"
    return "\n".join([*lines, "", f"{damaged}. torch {found['torch']}."])


def main(words: list[str]) -> None:
    """Measure, and store after each network, so that a run that is stopped keeps what it has measured."""
    torch.set_num_threads(1)
    count, damaged = (int(words[0]), int(words[1])) if words else (120, 12)
    data = task()
    result: dict[str, Any] = {"torch": torch.__version__, "damaged networks": 0, "healthy": [], "damages": []}
    for number in range(FIRST_DAMAGED, FIRST_DAMAGED + damaged):
        result["damages"] += tried(number, data)
        result["damaged networks"] += 1
        store(result)
    for number in range(FIRST_HEALTHY, FIRST_HEALTHY + count):
        if (record := left_alone(number, data)) is not None:
            result["healthy"].append(record)
            store(result)


def store(result: dict[str, Any]) -> None:
    """Write the result so far, and say how far it is."""
    draft = RESULT.with_suffix(".part")
    draft.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    draft.replace(RESULT)
    done = f"{result['damaged networks']} damaged and {len(result['healthy'])} healthy networks"
    print(done, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
