"""The script that tries claims on disjoint sets of seeds: its tables, on verdicts that are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.claims_agreement import Part, parts, table, tried, write

from gonio.lab.claims import ClaimResult, ClaimResults, Evidence, load_claim
from gonio.lab.claims.claim import read_claim

CLAIM = load_claim("nothing-helps")


def run(verdict: str) -> ClaimResults:
    seen = Evidence(values=(0.5,) * 12, direction="larger", sesoi=1.0, unit="%", verdict=verdict, mean=0.5)
    return ClaimResults((ClaimResult(CLAIM, seen),), {}, "gonio reproduce")


def test_sets_of_seeds_are_disjoint() -> None:
    for part in parts().values():
        most = max(setting.seeds for claim in part.claims for setting in (claim.quick, claim.full) if setting)
        gaps = [b - a for a, b in zip(part.first_seeds, part.first_seeds[1:], strict=False)]
        assert min(gaps) >= most
    assert len(parts()["control"].first_seeds) == 20
    assert len(parts()["quick"].first_seeds) == 5


@pytest.mark.parametrize(("verdicts", "agree"), [(("undecided",) * 2, True), (("undecided", "reproduced"), False)])
def test_verdicts_are_counted(verdicts: tuple[str, ...], agree: bool) -> None:
    row = table([(100 * at, run(verdict)) for at, verdict in enumerate(verdicts)])["nothing-helps"]
    assert row["agree"] is agree
    assert sum(row["counts"].values()) == len(verdicts)
    assert row["means"] == {"0": 0.5, "100": 0.5}


def test_one_part_keeps_the_other(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    write("quick", {"a": 1}, path)
    write("control", {"b": 2}, path)
    assert {name: part["claims"] for name, part in json.loads(path.read_text("utf-8")).items()} == {
        "quick": {"a": 1},
        "control": {"b": 2},
    }


def test_each_set_is_a_run_of_its_own_seeds(tmp_path: Path) -> None:
    arms = [{"name": "plain"}]
    setting = {
        "model": {"name": "deep-mlp", "depth": 1, "width": 8},
        "arms": arms,
        "contrast": {"plain": 1.0},
        "seeds": 2,
    }
    data = {"name": "tiny", "seed": "004", "claim": "A.", "source": "B.", "measure": "signal_gain", "quick": setting}
    claim = read_claim(data, origin="tiny")
    found = tried(Part((claim,), (0, 50)), tmp_path, jobs=2)
    seeds = [set(findings.results[0].values) for _, findings in found]
    assert [min(one) for one in seeds] == [0, 50]
    assert seeds[0].isdisjoint(seeds[1])
