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


def tried(networks: int, data: Task) -> list[dict[str, Any]]:
    """One record for each detected damage."""
    made = []
    for number in range(3000, 3000 + networks):
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
        print(f"{number - 2999} of {networks} networks damaged", file=sys.stderr, flush=True)
    return made


def left_alone(networks: int, data: Task) -> dict[str, Any]:
    """What is done to networks without a damage, and the scores before and after it."""
    learnt, changed = 0, []
    for number in range(4000, 4000 + networks):
        name, model, trained = healthy(number)
        if trained < LEARNT:
            continue
        learnt += 1
        treated = gonio.doctor(model, task=data)
        if treated.kept:
            scores = [round(score(each, data), 3) for each in (model, treated.model)]
            changed.append({"architecture": name, "kept": [s.verb for s in treated.kept], "scores": scores})
        if learnt % 20 == 0:
            print(f"{learnt} healthy networks", file=sys.stderr, flush=True)
    return {"networks": learnt, "changed": changed}


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
    worse = sum(case["scores"][1] < case["scores"][0] - 0.5 for case in well["changed"])
    rows = [(each, counts[each], len(records)) for each in OUTCOMES]
    treated = len(records) - counts["refused"]
    rows += [("restored or same score, of those treated", counts["restored"] + counts["same score"], treated)]
    rows += [("healthy networks changed", len(well["changed"]), well["networks"])]
    rows += [("healthy networks made worse", worse, well["networks"])]
    for what, hits, cases in rows:
        low, high = wilson(hits, cases)
        lines.append(f"| {what} | {hits} of {cases} | {hits / cases:.1%} | {low:.1%} to {high:.1%} |")
    return "\n".join([*lines, "", f"{found['damaged networks']} damaged networks. torch {found['torch']}."])


def main(words: list[str]) -> None:
    torch.set_num_threads(1)
    count, damaged = (int(words[0]), int(words[1])) if words else (120, 12)
    data = task()
    damages = tried(damaged, data)
    result = {
        "torch": torch.__version__,
        "damaged networks": damaged,
        "healthy": left_alone(count, data),
        "damages": damages,
    }
    RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(RESULT.name)


if __name__ == "__main__":
    main(sys.argv[1:])
