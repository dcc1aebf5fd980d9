"""All live models of the bank, and the page's data: `python -m bank.live.cases docs/bank-live.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from bank.live import generative, scales, sequences, structures, timm_models, transformers_models
from bank.live.case import Case
from bank.live.verbs import outcomes

CASES: list[Case] = [
    *structures.CASES,
    *scales.CASES,
    *generative.CASES,
    *sequences.CASES,
    *timm_models.CASES,
    *transformers_models.CASES,
]


def write(path: Path) -> list[str]:
    """The outcomes of all cases as JSON, one line each; gives the faults, with which nothing is written.

    Cases without a fault lie beside it until all are there, so that a run which was stopped goes on.
    """
    part = path.with_suffix(".part")
    lines = part.read_text(encoding="utf-8").splitlines() if part.exists() else []
    rows, faults = {row["case"]: row for row in map(json.loads, lines)}, []
    with part.open("a", encoding="utf-8") as file:
        for case in CASES:
            if case.name in rows:
                continue
            rows[case.name] = row = {"case": case.name, "origin": case.origin, "outcomes": outcomes(case)}
            wrong = [f"{case.name}: {verb}: {said}" for verb, said in row["outcomes"].items() if said[:5] == "fault"]
            faults += wrong
            if not wrong:
                print(json.dumps(row, ensure_ascii=False), file=file, flush=True)
    if not faults:
        written = ",\n".join(json.dumps(rows[case.name], ensure_ascii=False) for case in CASES)
        path.write_text(f"[\n{written}\n]\n", encoding="utf-8")
        part.unlink()
    return faults


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit("\n".join(write(Path(sys.argv[1]))) or 0)
