"""What `gonio doctor` does about planted damages, and whether it leaves healthy networks alone.

    python -m benchmarks.doctor [healthy networks] [damaged networks]

The damages are those of `planted_damage.py`; the networks are those of `treated_networks.py`, with numbers that no rule
was written with. Their validation split proves a treatment, their test split scores it. The result is
benchmarks/results/doctor.json, from which `benchmarks.tables` fills a page's `doctor` block, and the rates that
`gonio explain` shows.

A damage counts as detected if measuring it with training inputs reports what was not reported before it was planted. A
run that is stopped goes on where it was: delete the file to start anew.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from itertools import combinations
from math import sqrt
from typing import Any

import torch

import gonio
from benchmarks.planted_damage import planted
from benchmarks.results import FOLDER
from benchmarks.treated_networks import network, score
from gonio.lab import Treatment
from gonio.measuring import Finding
from gonio.measuring.findings.rules import rule_texts

RESULT = FOLDER / "doctor.json"
RATES = FOLDER.parents[1] / "src/gonio/measuring/findings/treatments.json"
NEAR = 1.0  # points of accuracy
REMEDIES = [remedy for each in rule_texts().values() for remedy in each.prescription.remedies]
EXACT = {remedy.verb for remedy in REMEDIES if remedy.proof == "same function"}
FIRST_DAMAGED, FIRST_HEALTHY = 3003, 4004  # numbers that no rule was written with; multiples of the number of kinds
OUTCOMES = ("restored", "retrained", "same score", "function kept", "in part", "not restored", "refused", "worse")
GOOD = OUTCOMES[:3]


def codes(found: Any) -> set[tuple[str, str]]:
    return {(finding.code, finding.path) for finding in found.findings}


def outcome(well: float, damaged: float, treated: float, kept: list[str], *, stated: bool) -> str:
    """What became of a detected damage, in points of the score.

    `kept`: the verbs; if all of them promise the same function, no better score is. `stated`: what is left is reported.
    """
    if treated < damaged - NEAR:
        return "worse"
    if not kept:
        return "refused"
    if treated >= well - NEAR:
        if damaged >= well - NEAR:
            return "same score"
        return "retrained" if "retrain_" in kept else "restored"
    return "function kept" if set(kept) <= EXACT else "in part" if stated else "not restored"


def reasons(treated: Treatment, new: set[tuple[str, str]]) -> list[tuple[Finding, str]]:
    """The findings of the damage that are left, each with the reason why nothing was done or kept."""
    tried = {code: step.proof for step in treated.steps if step.verdict != "kept" for code in step.codes}
    left = [finding for finding in treated.after.findings if (finding.code, finding.path) in new]
    untreated = {(finding.code, finding.path): why for finding, why in treated.untreated}
    whys = [untreated.get((finding.code, finding.path), tried.get(finding.code, "")) for finding in left]
    return [(finding, why) for finding, why in zip(left, whys, strict=True) if why]


def names(finding: Finding, path: str) -> bool:
    """Whether a finding is of a layer: by its path, or in its words if it is of the whole model."""
    return finding.path.startswith(path) or (not finding.path and f"{path} (" in finding.found)


def tried(number: int) -> list[dict[str, Any]]:
    """One record for each detected damage of one network; none if it has not learnt."""
    made: list[dict[str, Any]] = []
    well = network(number)
    if not well.learnt:
        return made
    before = codes(gonio.doctor(well.model, task=well.task).before)
    for case in planted(well.model, well.task.train.inputs):
        damaged = score(case.model, well.task)
        treated = gonio.doctor(case.model, task=well.task)
        new = codes(treated.before) - before
        if not new:
            continue
        after, left = score(treated.model, well.task), reasons(treated, new)
        kept = [step.verb for step in treated.kept]
        made.append(
            {
                "damage": case.damage.name,
                "place": case.place,
                "architecture": well.architecture,
                "codes": sorted({code for code, _ in new}),
                "kept": kept,
                "scores": [round(value, 3) for value in (well.score, damaged, after)],
                "outcome": outcome(well.score, damaged, after, kept, stated=bool(left)),
                "layer named": any(names(finding, case.path) for finding, _ in left),
            }
        )
    return made


def left_alone(number: int) -> dict[str, Any] | None:
    """What is done to a network without a damage, and its scores before and after; None if it has not learnt."""
    well = network(number)
    if not well.learnt:
        return None
    treated = gonio.doctor(well.model, task=well.task)
    scores = [round(score(each, well.task), 3) for each in (well.model, treated.model)]
    return {"architecture": well.architecture, "kept": [step.verb for step in treated.kept], "scores": scores}


def wilson(hits: int, cases: int) -> tuple[float, float]:
    """The 95 % interval of a share (E. B. Wilson, JASA 22, 1927)."""
    z, p = 1.959964, hits / cases
    centre, half = p + z * z / (2 * cases), z * sqrt(p * (1 - p) / cases + z * z / (4 * cases * cases))
    low, high = ((centre + side) / (1 + z * z / cases) for side in (-half, half))
    return max(low, 0.0), min(high, 1.0)


def table(found: dict[str, Any]) -> str:
    """The result as a page's table: one line per kind of damage, then the shares with their intervals."""
    records = [record for each in found["damaged"].values() for record in each]
    lines = [f"| damage | detected | {' | '.join(OUTCOMES)} |", f"|---|--:|{'--:|' * len(OUTCOMES)}"]
    for name in dict.fromkeys(record["damage"] for record in records):
        seen = Counter(record["outcome"] for record in records if record["damage"] == name)
        lines.append(f"| {name} | {seen.total()} | {' | '.join(str(seen[each] or '–') for each in OUTCOMES)} |")
    lines += ["", "| of all detected damages | number | share | 95 % interval |", "|---|--:|--:|--:|"]
    shares = _shares(records, [case for case in found["healthy"].values() if case])
    for what, hits, cases in (*shares, agreement(list(found["damaged"].values()))):
        if cases:
            low, high = wilson(hits, cases)
            lines.append(f"| {what} | {hits} of {cases} | {hits / cases:.1%} | {low:.1%} to {high:.1%} |")
    networks = Counter(each[0]["architecture"] for each in found["damaged"].values() if each)
    listed = ", ".join(f"{count} {name}" for name, count in networks.items())
    return "\n".join([*lines, "", f"{networks.total()} damaged networks ({listed}). torch {found['torch']}."])


def agreement(networks: list[list[dict[str, Any]]]) -> tuple[str, int, int]:
    """How often the same verbs were kept for one damage at one place of two networks of an architecture."""
    verbs: dict[tuple[str, str, str], list[frozenset[str]]] = {}
    for record in (record for records in networks for record in records):
        case = record["architecture"], record["damage"], record["place"]
        verbs.setdefault(case, []).append(frozenset(record["kept"]))
    pairs = [pair for each in verbs.values() for pair in combinations(each, 2)]
    what = "the same treatment kept, of pairs of one damage in two networks of an architecture"
    return what, sum(a == b for a, b in pairs), len(pairs)


def _shares(records: list[dict[str, Any]], well: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    counts = Counter(record["outcome"] for record in records)
    refused = [record for record in records if record["outcome"] == "refused"]
    costly = [record for record in records if record["scores"][1] < record["scores"][0] - NEAR]
    after = Counter(record["outcome"] for record in costly)
    named = sum(record["layer named"] for record in refused)
    near = sum(counts[each] for each in GOOD)
    claimed = len(records) - counts["refused"] - counts["function kept"]
    cost = "of those that cost more than a point: "
    return [
        *((each, counts[each], len(records)) for each in OUTCOMES),
        ("restored, retrained or same score", near, len(records)),
        ("restored, retrained, same score, or refused", near + counts["refused"], len(records)),
        (cost + "restored", after["restored"], len(costly)),
        (cost + "restored or retrained", after["restored"] + after["retrained"], len(costly)),
        (cost + "refused", after["refused"], len(costly)),
        (
            "restored, retrained or same score, of those with a treatment that claims more than the same function",
            near,
            claimed,
        ),
        ("the damaged layer named, of those refused", named, len(refused)),
        ("healthy networks changed", sum(bool(case["kept"]) for case in well), len(well)),
        ("healthy networks made worse", sum(case["scores"][1] < case["scores"][0] - 0.5 for case in well), len(well)),
    ]


def rates(found: dict[str, Any]) -> dict[str, dict[str, int]]:
    """By rule, what became of the damages with its finding, for `gonio explain`."""
    records = [record for each in found["damaged"].values() for record in each]
    made = {}
    for code in sorted({code for record in records for code in record["codes"]}):
        seen = Counter(record["outcome"] for record in records if code in record["codes"])
        made[code] = {"cases": seen.total(), "near": sum(seen[each] for each in GOOD), "refused": seen["refused"]}
    return made


def main(words: list[str]) -> None:
    """Measure, and store after each network; a further run goes on where this one was stopped."""
    torch.set_num_threads(1)
    count, damaged = (int(words[0]), int(words[1])) if words else (520, 22)
    result: dict[str, Any] = {"torch": torch.__version__, "damaged": {}, "healthy": {}}
    if RESULT.exists() and "damaged" in (there := json.loads(RESULT.read_text(encoding="utf-8"))):
        result = there
    jobs = [(place / damaged, "damaged", FIRST_DAMAGED + place) for place in range(damaged)]
    jobs += [(place / count, "healthy", FIRST_HEALTHY + place) for place in range(count)]
    for _, part, number in sorted(jobs):  # alternately, so that a run that is stopped has some of both
        if str(number) not in result[part]:
            result[part][str(number)] = (tried if part == "damaged" else left_alone)(number)
            store(result)
    RATES.write_text(json.dumps(rates(result), indent=1) + "\n", encoding="utf-8")


def store(result: dict[str, Any]) -> None:
    """Write the result so far, and say how far it is."""
    draft = RESULT.with_suffix(".part")
    draft.write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    draft.replace(RESULT)
    done = f"{len(result['damaged'])} damaged and {len(result['healthy'])} healthy networks"
    print(done, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
