"""A study with a damaged file gives its results, or is refused, or names what is missing; never other results.

Results are the runs, effects, choices of tuning and the plan's hash. The parts of plan.json that the hash leaves out
(notes, versions, command, history, chance) have no checksum: damages there can go unnoticed.

`GONIO_DAMAGES` is the number of damages (1,000).
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gonio.errors import GonioError
from gonio.lab import Study, make_plan, make_script_plan, run
from lab.plans import OWN, TINY

DAMAGES = int(os.environ.get("GONIO_DAMAGES", "1000"))


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A built-in, a tuned and a script study."""
    pytest.importorskip("optuna", reason="the extra `tune` is not installed")
    folder = tmp_path_factory.mktemp("studies")
    tiny = f"{TINY}:task"
    plans = {
        "built-in": make_plan(["orthogonal-init"], task=tiny, seeds=3),
        "tuned": make_plan(["scale-shift"], task=tiny, seeds=2, tune=3),
        "script": make_script_plan(["scale-shift"], script=f"{OWN}:score_of_seed", seeds=4),
    }
    return [run(plan, folder / name, jobs=2).path for name, plan in plans.items()]


def outcome(folder: Path) -> tuple[str, Any]:
    """`read` with all that a report is made of, `named` if something is said to be missing, or `refused`."""
    try:
        study = Study.open(folder)
        results, runs = study.results(), study.runs()
        if study.damaged():
            return "named", {(record.recipe, record.seed): record for record in runs}
    except GonioError as error:
        return "refused", str(error)
    return "read", (study.plan.hash, runs, results.effects, results.tuning)


def damaged(content: bytes, draw: random.Random) -> bytes:
    """One bit flipped, one byte replaced, a block of zeros, or the end cut off."""
    changed, at = bytearray(content), draw.randrange(len(content))
    match draw.randrange(4):
        case 0:
            changed[at] ^= 1 << draw.randrange(8)
        case 1:
            changed[at] = draw.randrange(256)
        case 2:
            changed[at : at + 512] = bytes(len(changed[at : at + 512]))
        case _:
            del changed[at:]
    return bytes(changed)


def check(copy: Path, wanted: Any) -> str:
    """How a damaged copy ends; raises if it gives other results than the intact study."""
    how, found = outcome(copy)
    if how == "read":
        assert found == wanted, f"other results from {copy}"
    elif how == "named":
        whole = {(record.recipe, record.seed): record for record in wanted[1]}
        assert all(whole[key] == record for key, record in found.items()), f"another run in {copy}"
    return how


@pytest.mark.slow
def test_damaged_files_give_the_results_or_are_refused(studies: list[Path], tmp_path: Path) -> None:
    draw = random.Random(0)
    wanted = {folder: outcome(folder) for folder in studies}
    assert {how for how, _ in wanted.values()} == {"read"}
    ends: Counter[tuple[str, str]] = Counter()
    for number in range(DAMAGES):
        intact = studies[number % len(studies)]
        copy = tmp_path / "copy"
        shutil.copytree(intact, copy)
        files = sorted(path for path in copy.rglob("*") if path.is_file() and path.stat().st_size)
        file = files[number // len(studies) % len(files)]
        file.write_bytes(damaged(file.read_bytes(), draw))
        ends[file.name, check(copy, wanted[intact][1])] += 1
        shutil.rmtree(copy)
    assert sum(ends.values()) == DAMAGES
    for how in ("read", "named", "refused"):
        assert ends["study.db", how] > 0, ends
    assert ends["plan.json", "refused"] > 0, ends


@pytest.mark.slow
def test_another_result_is_found(tmp_path: Path) -> None:
    """Negative control: a study whose runs are those of other seeds."""
    script = f"{OWN}:score_of_seed"
    one, other = (
        run(make_script_plan([], script=script, seeds=seeds), tmp_path / str(seeds[0]), jobs=1).path
        for seeds in ((0, 1), (2, 3))
    )
    with pytest.raises(AssertionError, match="other results from"):
        check(other, outcome(one)[1])
