"""All cases of the bank of files, by name."""

from __future__ import annotations

from bank.files import adapters, checkpoints, layouts, names, norms, quantised
from bank.files.case import Case

CASES: dict[str, Case] = {**norms.CASES, **quantised.CASES, **adapters.CASES, **names.CASES, **checkpoints.CASES, **layouts.CASES}
