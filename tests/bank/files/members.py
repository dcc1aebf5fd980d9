"""All cases of the bank of files, by name."""

from __future__ import annotations

from bank.files import adapters, checkpoints, kinds, layouts, names, norms, quantised, subclasses
from bank.files.case import Case

_CHAPTERS = (norms, layouts, kinds, quantised, subclasses, adapters, names, checkpoints)
CASES: dict[str, Case] = {name: case for chapter in _CHAPTERS for name, case in chapter.CASES.items()}
if len(CASES) != sum(len(chapter.CASES) for chapter in _CHAPTERS):
    raise ValueError("two cases of the bank have one name")
