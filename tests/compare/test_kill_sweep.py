"""The built-in study, killed twenty times at random moments, against one that nothing happened to."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from compare.processes import start_study, wait_for_runs, wait_for_silence
from gonio.compare import BUILT_IN_RECIPES, RunRecord, Study, make_plan, run

KILLS = 20


@pytest.mark.slow
def test_twenty_kills_lose_no_run_and_leave_none_stuck(tmp_path: Path) -> None:
    draw = random.Random(20)
    folder = tmp_path / "killed"
    kept: dict[tuple[str, int], RunRecord] = {}
    for kill in range(KILLS):
        process = start_study(folder, list(BUILT_IN_RECIPES))
        # Every other kill waits for rows, so that the study gets on however slow the machine; the rest
        # come while it starts or in its first runs.
        if kill % 2:
            wait_for_runs(folder, len(kept) + draw.randint(1, 3), process)
        time.sleep(draw.uniform(0, 2 if kill % 2 else 8))
        process.kill()
        process.communicate()
        assert wait_for_silence(process.pid) == []
        if not (folder / "plan.json").exists():
            continue
        found = {(record.recipe, record.seed): record for record in Study.open(folder).runs()}
        assert {key: found.get(key) for key in kept} == kept
        kept = found
    assert len(kept) >= KILLS // 2
    continued = run(make_plan(), folder)
    reference = run(make_plan(), tmp_path / "reference")
    assert [record.status for record in reference.runs()] == ["finished"] * 48
    assert continued.runs() == reference.runs()
