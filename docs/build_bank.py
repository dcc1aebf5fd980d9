"""Writes docs/reads-and-edits.md: what gonio reads and edits of other people's models and files, and what it refuses.

`python docs/build_bank.py` writes it from docs/bank-live.json and docs/bank-files.json, which the banks of the tests
write (`make bank`); with `--check` it fails if the page differs. Each file is a list of
`{"case": …, "origin": …, "outcomes": {verb: "same function" | "works" | "right: …" | "left: …" | "refused: …"}}`.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "reads-and-edits.md"
LEFT = ("left", "refused")  # kinds of outcomes in which nothing was done, with the reason behind a colon
REASONS = 4  # reasons of refusals that are shown for a verb, the most frequent ones first

HEAD = """\
# What it reads and edits, and what it refuses

Other people's models and files, each through every verb. The page is written by `make bank` from the outcomes of the
tests in `tests/bank`; a row is one line there.
"""


@dataclass(frozen=True)
class Part:
    """One section of the page: a bank, with the sentences that say what its outcomes mean."""

    title: str
    source: str
    about: str


PARTS = (
    Part(
        "Live models",
        "bank-live.json",
        """\
Small models with random weights: of timm and transformers as these libraries build them, and written in the test suite
as a kind of model is written elsewhere. A verb that promises the same function was checked in float64, within 1e-9 of
the largest output (1e-5 for models of transformers, whose norms compute in float32). Each edit was undone to the bit:
classes, parameters and their order, hooks, state, outputs in evaluation and in training. A refusal is one sentence and
leaves the model as it was. `fresh` says that `gonio.measure` has no finding above `info` on the model as its
constructor leaves it.
""",
    ),
    Part(
        "Files",
        "bank-files.json",
        """\
Small files as their own tools write them. The weights that the tool itself computes from a file are the reference.
""",
    ),
)


def page() -> str:
    """The page from the banks whose outcomes are there."""
    parts = [(part, DOCS / part.source) for part in PARTS]
    texts = [_section(part, json.loads(path.read_text(encoding="utf-8"))) for part, path in parts if path.exists()]
    return "\n".join([HEAD, *texts])


def _section(part: Part, rows: list[dict[str, Any]]) -> str:
    origins = Counter(row["origin"] for row in rows)
    counted = ", ".join(f"{name} ({count})" for name, count in sorted(origins.items(), key=lambda each: -each[1]))
    found = [f"## {part.title}", "", part.about, f"{len(rows)} cases: {counted}.", "", *_verbs(rows), ""]
    return "\n".join([*found, *_refusals(rows), *_cases(rows)])


def _verbs(rows: list[dict[str, Any]]) -> list[str]:
    """How often each verb did what."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        for verb, outcome in row["outcomes"].items():
            counts[verb][outcome.partition(":")[0]] += 1
    met = dict.fromkeys(kind for count in counts.values() for kind in count)
    kinds = [*(kind for kind in met if kind not in LEFT), *(kind for kind in LEFT if kind in met)]
    lines = [f"| verb | {' | '.join(kinds)} |", f"|---|{'--:|' * len(kinds)}"]
    return [*lines, *(f"| `{v}` | {' | '.join(str(n[k] or '') for k in kinds)} |" for v, n in counts.items())]


def _refusals(rows: list[dict[str, Any]]) -> list[str]:
    """The most frequent reasons of each verb, with names and numbers of single models left out."""
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        for verb, outcome in row["outcomes"].items():
            kind, _, said = outcome.partition(": ")
            if kind in LEFT:
                reasons[verb][_general(said)] += 1
    if not reasons:
        return []
    found = [f"### Why it refuses: {sum(sum(each.values()) for each in reasons.values())} refusals", ""]
    for verb, counted in reasons.items():
        shown = "; ".join(f"{reason} ({count})" for reason, count in counted.most_common(REASONS))
        more = len(counted) - REASONS
        found.append(f"* `{verb}`: {shown}{f'; and {more} more' if more > 0 else ''}")
    return [*found, ""]


def _general(message: str) -> str:
    """The first sentence of a refusal, without what belongs to one model."""
    text = re.sub(r"'[^']*'|\([^)]*\)", "…", message)
    text = re.sub(r"^[^ ]+: ", "", re.split(r"\. (?=[A-Z])", text)[0].rstrip("."))
    return re.sub(r"[|<>*_`\[\]]", lambda match: "\\" + match[0], re.sub(r"(… ?)+", "… ", text).strip())


def _cases(rows: list[dict[str, Any]]) -> list[str]:
    """One line per case: what is refused."""
    lines = ["### Case by case", "", "| origin | case | done | refused |", "|---|---|--:|---|"]
    for row in rows:
        refused = [f"`{verb}`" for verb, outcome in row["outcomes"].items() if outcome.partition(":")[0] in LEFT]
        done = len(row["outcomes"]) - len(refused)
        lines.append(f"| {row['origin']} | {row['case']} | {done} | {', '.join(refused)} |")
    return [*lines, ""]


def main() -> None:
    text = page()
    if "--check" in sys.argv[1:]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
            sys.exit(f"{PAGE.name}: not what the banks give; run python docs/build_bank.py")
        return
    PAGE.write_text(text, encoding="utf-8")
    print(f"{PAGE.name}: {len(text.splitlines())} lines")


if __name__ == "__main__":
    main()
