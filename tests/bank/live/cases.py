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
    """The outcomes of all cases as JSON, one line each; gives the faults, with which nothing is written."""
    rows, faults = [], []
    for case in CASES:
        found = outcomes(case)
        faults += [f"{case.name}: {verb}: {said}" for verb, said in found.items() if said.startswith("fault")]
        rows.append({"case": case.name, "origin": case.origin, "outcomes": found})
    if not faults:
        lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return faults


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit("\n".join(write(Path(sys.argv[1]))) or 0)
