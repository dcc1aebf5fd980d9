"""Claims as studies: they run, resume after a kill, and give the same numbers."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gonio import lab
from gonio.errors import InvalidArgumentError, PlanChangedError
from gonio.lab.claims import Claim, ClaimOptions, as_data, from_data, judge_claims, load_claim, plan_claim, try_claims
from gonio.lab.claims.claim import read_claim
from gonio.lab.showing.claims import claims_html, claims_json, claims_text
from html_reader import Page
from lab.showing.samples import printed

SMALL = {"name": "deep-mlp", "depth": 2, "width": 16}


def claim(**fields: Any) -> Claim:
    data = {
        "name": "demo",
        "seed": "001",
        "claim": "The <b>L2</b> penalty falls.",
        "source": "A paper.",
        "measure": "penalty_change",
        "direction": "smaller",
        "sesoi": 0.5,
        "scope": "identity",
        "quick": {
            "model": SMALL,
            "training": {"epochs": 1},
            "arms": [{"name": "trained"}],
            "contrast": {"trained": 1.0},
            "seeds": 3,
        },
        **fields,
    }
    return read_claim(data, origin="demo")


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("claims")
    not_tried = read_claim(
        {"name": "large", "seed": "003", "claim": "At scale.", "source": "A paper.", "not_tried": "Needs ImageNet."},
        origin="large",
    )
    return folder, try_claims([claim(), not_tried], folder, jobs=2)


def test_the_finding_has_a_number_per_seed(tried: tuple[Path, Any]) -> None:
    _, found = tried
    first, second = found.results
    assert set(first.scores["trained"]) == {0, 1, 2}
    assert all(value < 0 for value in first.values.values())
    assert (first.missing, first.failed, first.seconds > 0) == (0, 0, True)
    assert second.verdict == "not tried"
    assert found.headline.startswith("1 claim tried on this machine: identities: 1 ")


def test_each_claim_is_a_study_that_compare_can_read(tried: tuple[Path, Any]) -> None:
    folder, _ = tried
    study = lab.Study.open(folder / "demo")
    assert [run.status for run in study.runs()] == ["finished"] * 3
    assert study.plan.measure.name == "penalty_change"
    assert study.without_costs() == []


def test_a_finished_claim_is_not_run_again_and_a_lost_run_is(tried: tuple[Path, Any], tmp_path: Path) -> None:
    folder, found = tried
    before = (folder / "demo" / "study.db").stat().st_mtime_ns
    again = judge_claims([claim()], folder)
    assert again.results[0].values == found.results[0].values
    assert (folder / "demo" / "study.db").stat().st_mtime_ns == before
    with closing(sqlite3.connect(folder / "demo" / "study.db")) as database, database:  # as if killed
        database.execute("DELETE FROM runs WHERE seed = 1")
    assert judge_claims([claim()], folder).results[0].missing == 1
    resumed = try_claims([claim()], folder, jobs=1)
    assert resumed.results[0].values == found.results[0].values


def test_seeds_are_added_and_another_experiment_is_refused(tmp_path: Path) -> None:
    try_claims([claim()], tmp_path, options=ClaimOptions(seeds=1), jobs=1)
    more = try_claims([claim()], tmp_path, options=ClaimOptions(seeds=2), jobs=1)
    assert len(more.results[0].values) == 2
    with pytest.raises(PlanChangedError, match="sesoi"):
        try_claims([claim(sesoi=0.25)], tmp_path, jobs=1)


def test_a_failed_run_has_no_score_and_is_counted(tmp_path: Path) -> None:
    """int8 with a shift needs a chain that is positively homogeneous, which tanh is not."""
    broken = claim(
        measure="int8_accuracy",
        options={"spread": 2.0},
        quick={
            "model": {**SMALL, "activation": "tanh"},
            "training": {"epochs": 1},
            "arms": [{"name": "shifted"}, {"name": "plain", "measure": {"spread": 0.0}}],
            "seeds": 2,
        },
    )
    one = try_claims([broken], tmp_path, jobs=2).results[0]
    assert (one.failed, one.refused, one.verdict) == (2, 2, "undecided")
    assert one.runs.failures["shifted"].startswith("NotApplicableError: moving scale: cannot be applied")
    assert one.values == {}
    study = lab.Study.open(tmp_path / "demo")
    assert any("its outputs change" in (run.error or "") for run in study.runs())


def test_settings_of_an_arm_reach_its_runs(tmp_path: Path) -> None:
    """More epochs in one arm alone: its curve is longer."""
    arms = [{"name": "short"}, {"name": "long", "training": {"epochs": 3}, "model": {"depth": 1}}]
    longer = claim(
        measure="loss_after",
        options={"epochs": 1},
        quick={"model": SMALL, "training": {"epochs": 1}, "arms": arms, "seeds": 1},
    )
    try_claims([longer], tmp_path, jobs=2)
    runs = lab.Study.open(tmp_path / "demo").runs()
    assert {run.recipe: len(run.curve["val_score"]) for run in runs} == {"short": 1, "long": 3}


def test_an_arm_may_start_with_lsuv() -> None:
    """Its first layer has outputs of variance 1 on the examples; the other arm keeps torch's own, which are smaller."""
    from gonio.lab.running.training import build
    from gonio.lab.tasks import resolve

    arms = [{"name": "plain"}, {"name": "lsuv", "lsuv": 64}]
    plan = plan_claim(claim(quick={"model": SMALL, "arms": arms, "seeds": 3}))
    task = resolve("digits")
    examples = task.outputs(lambda x: x, task.train.inputs[:64])
    plain, started = (build(plan, task, entry, 0)[0][:2](examples).std().item() for entry in plan.recipes)
    assert started == pytest.approx(1, abs=0.01)  # lsuv_'s own tolerance
    assert plain < 0.8
    assert "lsuv" not in plan.recipes[0].setting


def test_a_measure_of_the_start_trains_nothing(tmp_path: Path) -> None:
    start = claim(
        measure="signal_gain",
        quick={"model": SMALL, "arms": [{"name": "plain"}], "contrast": {"plain": 1.0}, "seeds": 1},
    )
    try_claims([start], tmp_path, jobs=1)
    (run,) = lab.Study.open(tmp_path / "demo").runs()
    assert run.curve == {}
    assert run.score is not None


def test_page_json_and_text_hold_every_number_and_escape_names(tried: tuple[Path, Any]) -> None:
    _, found = tried
    page = claims_html(found)
    assert "<b>L2</b>" not in page
    assert "&lt;b&gt;L2&lt;/b&gt;" in page
    assert "Needs ImageNet." in page
    assert "<svg" in page
    assert len(Page(page).may_run()) == 1
    data = json.loads(claims_json(found))
    assert data == json.loads(json.dumps(as_data(found)))
    assert set(data["claims"][0]["runs"]["scores"]["trained"]) == {"0", "1", "2"}
    assert found.headline in printed(claims_text(found), width=100)


def test_findings_survive_their_json(tried: tuple[Path, Any]) -> None:
    _, found = tried
    assert from_data(json.loads(claims_json(found))) == found


@pytest.mark.parametrize("name", ["ln-hurts-conv", "bn-falls", "warm-up-held", "muon-text", "som-without-bn"])
def test_a_score_is_better_where_its_measure_says_so_whatever_the_claim_says(name: str) -> None:
    """Tuning and the score of a diverged run depend on it."""
    bits = "text" in name or "held" in name
    plan = plan_claim(load_claim(name), ClaimOptions(full=True, task="bytes" if bits else "digits"))
    assert plan.direction == ("min" if bits else "max")


def test_tuning_needs_a_score() -> None:
    data = load_claim("som-accuracy").model_dump(mode="json", exclude_unset=True)
    with pytest.raises(InvalidArgumentError, match="tune needs a measure that is a score; angle_spread has no better"):
        read_claim({**data, "measure": "angle_spread"}, origin="x.yaml")
