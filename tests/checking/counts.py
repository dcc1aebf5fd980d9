"""How many planted damages `check` names and how many healthy files it passes: the table of docs/howto/check.md.

`PYTHONPATH=tests python -m checking.counts` (`make planted`) counts again and writes planted.json and the table.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

from bank.live.transformers_models import CASES
from checking.containers import FORMATS, PACKED, State
from checking.plants import KINDS, cases, found, named

RESULT = Path(__file__).with_name("planted.json")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "check.md"
MARKS = ("<!-- planted -->", "<!-- /planted -->")
SEEDS = (0, 1)
# Formats whose writers take weights of every shape and dtype.
HEALTHY = tuple(name for name in FORMATS if name not in (*PACKED, "ZeRO", "shards with an index"))


def damages() -> dict[str, dict[str, list[int]]]:
    """(named rightly, planted) by kind and format."""
    made: dict[str, dict[str, list[int]]] = {kind: {} for kind in KINDS}
    for kind, form in cases():
        with tempfile.TemporaryDirectory() as folder:
            whys = [named(kind, form, seed, Path(folder) / str(seed)) for seed in SEEDS]
        made[kind][form] = [sum(not why for why in whys), len(whys)]
    return made


def healthy() -> Iterator[tuple[str, str, set[tuple[str, str]]]]:
    """Family, format and false alarms of each model of the bank, in one format after the other."""
    for case, form in zip(CASES, cycle(HEALTHY), strict=False):
        model, _ = case.fresh()
        state: State = {name: value.detach() for name, value in model.state_dict().items() if value.numel()}
        with tempfile.TemporaryDirectory() as folder:
            yield str(model.config.model_type), form, found(FORMATS[form](state, Path(folder)))[1]


def counts() -> dict[str, Any]:
    checked = list(healthy())
    files = dict(sorted(Counter(form for _, form, _ in checked).items()))
    families, alarms = len({family for family, *_ in checked}), sum(bool(said) for *_, said in checked)
    return {"damages": damages(), "healthy": {"families": families, "files": files, "alarms": alarms}}


def table(made: dict[str, Any]) -> str:
    """A row per kind of damage, and below it the sums."""
    rows = ["| damage | formats | named | planted |", "|---|---|---|---|"]
    total = Counter[str]()
    for kind, forms in made["damages"].items():
        right, planted = (sum(pair[at] for pair in forms.values()) for at in (0, 1))
        total.update(right=right, planted=planted)
        which = "all" if len(forms) == len(FORMATS) else str(len(forms)) if len(forms) > 4 else ", ".join(forms)
        rows.append(f"| {kind} | {which} | {right} | {planted} |")
    rows.append(f"| all {len(made['damages'])} kinds | {len(FORMATS)} | {total['right']} | {total['planted']} |")
    about = made["healthy"]
    said = f"{sum(about['files'].values())} files of small models of transformers with random weights"
    said = (
        f"False alarms: {about['alarms']} in {said}, of {about['families']} families in {len(about['files'])} formats."
    )
    return "\n".join([*rows, "", said])


def with_table(page: str) -> str:
    """The page with the table of the committed counts."""
    before, _, rest = page.partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    return f"{before}{MARKS[0]}\n{table(json.loads(RESULT.read_text(encoding='utf-8')))}\n{MARKS[1]}{after}"


def main() -> None:
    RESULT.write_text(json.dumps(counts(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
