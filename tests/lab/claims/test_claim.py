"""Claims as data: the schema is closed, and everything in the catalogue loads and plans."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from gonio.errors import ClaimError, InvalidArgumentError, UnknownNameError
from gonio.lab import StudyPlan, TrainingConfig
from gonio.lab.claims import (
    CHOICE_SEEDS,
    SEEDS,
    ClaimOptions,
    claim_names,
    families,
    load_claim,
    load_claims,
    plan_claim,
    shipped_files,
)
from gonio.lab.claims import claim as claim_module
from gonio.lab.claims.claim import TrainingFields, read_claim
from gonio.lab.claims.experiment import _WHERE, FULL_SEEDS

ARMS = [{"name": "a"}, {"name": "b", "training": {"epochs": 3}}]
VALID: dict[str, Any] = {
    "name": "demo",
    "seed": "002",
    "claim": "A sentence.",
    "source": "A paper.",
    "quick": {"arms": ARMS},
}


def changed(**fields: Any) -> dict[str, Any]:
    return {**VALID, **fields}


def quick(**fields: Any) -> dict[str, Any]:
    return changed(quick={"arms": ARMS, **fields})


def test_the_second_arm_minus_the_first_is_tested_by_default() -> None:
    claim = read_claim(VALID, origin="demo")
    assert claim.quick is not None
    assert claim.quick.decisive == {"b": 1.0, "a": -1.0}
    assert claim.budget == "quick"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (changed(seed="005"), "seed: .005., but expected .000."),
        (changed(surprise=1), "surprise: there is no such key"),
        (changed(sesoi=0.0), "sesoi: 0.0, but expected greater than 0"),
        (changed(sesoi="1"), "sesoi: .1., but expected a valid number"),
        (changed(direction="up"), "direction: .up., but expected"),
        (changed(measure="luck"), "there is no measure named 'luck'"),
        (changed(fair={"floor": 60.0, "ceiling": 90.0}), "floor where larger scores are better, or .*; found both"),
        (changed(options={"least": 3}), "has the options none; found least"),
        (changed(measure="trains", options={"least": True}), "'least' of the measure 'trains' is a number; found True"),
        (changed(measure="loss_after", options={"epochs": 1.5}), "'epochs' .* is a valid integer; found 1.5"),
        (changed(not_tried="too large"), "has an experiment, quick or full, or says under not_tried"),
        ({k: v for k, v in VALID.items() if k != "quick"}, "has an experiment, quick or full, or says"),
        (quick(arms=[]), "needs arms with different names"),
        (quick(arms=[{"name": "a"}]), "one arm needs a contrast"),
        (quick(arms=[{"name": "a"}, {"name": "a"}]), "needs arms with different names"),
        (quick(contrast={"c": 1.0}), "arms that do not exist: c"),
        (quick(contrast={"a": 0.0, "b": 0.0}), "factors of 0 alone compares nothing"),
        (quick(contrast={"a": 1.0, "b": 1.0}), "between arms must sum to 0"),
        (quick(contrast={"b": 1.0}), "between arms must sum to 0, .*; found {'b': 1.0}"),
        (quick(contrast={"a": 100.0, "b": -100.0}), "factors of a contrast lie between -1 and 1 .* found {'a': 100.0"),
        (quick(contrast={"a": 0.01, "b": -0.01}), "the positive ones sum to 1 or more, or effects are not of the size"),
        (changed(measure="signal_gain", quick={"arms": ARMS, "contrast": {"a": -1.0}}), "must sum to 0"),
        (quick(arms=[{"name": "a"}, {"name": "b"}]), "the arms a and b are the same; one of them needs redraw"),
        (quick(arms=[{"name": "a"}, {"name": "b", "recipe": "no-such-recipe"}]), "no recipe named"),
        (quick(arms=[{"name": "a"}, {"name": "b", "recipe": {"swap": [{"use": "Nothing"}]}}]), "Nothing"),
        (
            quick(arms=[{"name": "a"}, {"name": "b", "training": {"lr": -1.0}}]),
            "lr must be a positive number; found -1",
        ),
        (quick(arms=[{"name": "a"}, {"name": "b", "measure": {"x": 1}}]), "has the options none; found x"),
        (quick(seeds=0), "seeds: 0, but expected greater"),
        (["a list"], "but expected a mapping"),
    ],
)
def test_mistakes_are_named(data: Any, message: str) -> None:
    with pytest.raises(ClaimError, match=message):
        read_claim(data, origin="demo")


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (
            changed(quick={"arms": ARMS, "training": {"epoch": 3}}),
            "quick.training.epoch: there is no such key (did you",
        ),
        (changed(fair={"flor": 3}), "fair.flor: there is no such key (did you mean floor?). Correct the file."),
        (changed(measure="acuracy"), "found measure: there is no measure named 'acuracy' (did you mean accuracy, "),
        (changed(name="has space"), "name: 'has space', but expected small letters, digits and . + - alone."),
        (changed(claim=""), "claim: '', but expected at least 1 character. Correct the file."),
        (changed(sesoi="five"), "sesoi: 'five', but expected a valid number. Correct the file."),
        ({**VALID, "source": None}, "source: None, but expected text."),
        ({k: v for k, v in VALID.items() if k != "name"}, "name: it is missing. Correct the file."),
    ],
)
def test_a_mistake_is_told_in_words_of_a_claim(data: Any, told: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(told)) as caught:
        read_claim(data, origin="demo")
    assert not any(word in str(caught.value) for word in ("Value error", "Input", "permitted"))


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (
            {"depht": 3},
            r"found TypeError: deep_mlp\(\) got an unexpected keyword argument 'depht' \(depht=3\)\. Correct",
        ),
        ({"depth": "x"}, r"deep_mlp\(depth=\) is a whole number from 1 to 1000; found 'x'"),
        (
            {"depth": -1},
            r"deep_mlp\(depth=\) is a whole number from 1 to 1000; found -1\. Change it \(depth=-1\)\. Correct",
        ),
        ({"depth": 0}, r"from 1 to 1000; found 0\."),
        ({"depth": 10**11}, r"from 1 to 1000; found 100000000000\."),
        ({"depth": True}, r"from 1 to 1000; found True\."),
        ({"width": -1}, r"deep_mlp\(width=\) is a whole number from 1 to 65536; found -1"),
        ({"width": 0}, r"from 1 to 65536; found 0"),
        ({"width": 60_000}, r"at most 100,000,000 parameters; found 32,40.,...,...\. Make it smaller"),
        (
            {"pixels": 3},
            r"found RuntimeError: mat1 and mat2 shapes cannot be multiplied \(2x64 and 3x64\) \(pixels=3\)",
        ),
        ({"norm": 3}, r"deep_mlp\(norm=\) is a name; found 3"),
        ({"norm": "bath"}, r"there is no norm named 'bath' \(did you mean batch\?\) \(norm='bath'\)\. Correct"),
        ({"num_classes": 3}, r"the task decides the sizes; found num_classes"),
        ({"name": "deep-mlpp"}, r"there is no model named 'deep-mlpp' \(did you mean deep-mlp, deep-cnn\?\)\. Correct"),
        ({"name": "byte-transformer"}, r"byte-transformer; found RuntimeError: Expected tensor for argument"),
    ],
)
def test_a_model_that_cannot_be_built_or_run_is_a_mistake_of_the_claim(model: dict[str, Any], told: str) -> None:
    claim = read_claim(changed(quick={"arms": ARMS, "model": {"name": "deep-mlp", **model}}), origin="demo")
    with pytest.raises(ClaimError, match=rf"the arm a of demo must build and run the model .*{told}"):
        plan_claim(claim)


def test_a_claim_chooses_everything_of_a_training() -> None:
    assert set(TrainingFields.model_fields) == {each.name for each in fields(TrainingConfig)}
    chosen = {"schedule": "constant", "clip": 1.0, "betas": [0.8, 0.95], "channels_last": True, "accumulate": 2}
    training = plan_claim(read_claim(quick(training=chosen), origin="demo")).trained
    assert {name: getattr(training, name) for name in chosen} == chosen | {"betas": (0.8, 0.95)}


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"batch_size": 10**6}, "batch_size must be at most the 200 training examples of 'digits'"),
        ({"warm_up": 3.5}, r"warm_up must be shorter than the 3 epochs; found 3\.5"),
        ({"batch_size": 4, "accumulate": 4}, "accumulate needs two examples in each part; found 4 parts of 4"),
    ],
)
def test_an_arm_that_cannot_be_trained_is_refused_before_any_runs(training: dict[str, Any], message: str) -> None:
    with pytest.raises(ClaimError, match=f"the arm [ab] of demo must train as it says; found {message}"):
        plan_claim(read_claim(quick(training=training), origin="demo"))


def test_a_task_that_does_not_exist_is_a_mistake_of_the_claim() -> None:
    claim = read_claim(quick(task="digit"), origin="demo")
    with pytest.raises(ClaimError, match=r"demo must name a task; found there is no task named 'digit' \(did you mean"):
        plan_claim(claim)
    with pytest.raises(UnknownNameError, match="no task named 'digit'"):
        plan_claim(read_claim(VALID, origin="demo"), ClaimOptions(task="digit"))


@pytest.mark.parametrize("part", [{"task": "net.py:make"}, {"model": {"name": "net.py:make"}}])
def test_a_claim_cannot_name_code(part: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text("open('CANARY', 'w')\n", encoding="utf-8")
    with pytest.raises(ClaimError, match=r"'net\.py:make' names code, which only --task and --model"):
        plan_claim(read_claim(quick(**part), origin="demo"))
    assert not Path("CANARY").exists()


@pytest.mark.parametrize(
    "part",
    [
        {"contrast": {"a|b": True, "c": -1}, "arms": [*ARMS, {"name": "c"}]},
        {"arms": [{"name": "a"}, {"name": "b", "doses": [True, 2], "recipe": {}}]},
        {"arms": [{"name": "a"}, {"name": "b", "training": {"lr": True}}]},
        {"seeds": True},
        {"tune": True},
    ],
)
def test_true_is_no_number_of_a_claim(part: dict[str, Any]) -> None:
    with pytest.raises(ClaimError, match=r"True, but expected a (valid|number)"):
        read_claim(quick(**part), origin="demo")


def test_all_problems_are_in_one_error() -> None:
    with pytest.raises(InvalidArgumentError, match=r"seed: .*; sesoi: "):
        read_claim(changed(seed="x", sesoi=-1), origin="demo")


def test_an_unknown_name_gets_the_closest_ones() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean gain-tanh"):
        load_claim("gain-tan")


@pytest.mark.parametrize("name", claim_names())
def test_every_claim_of_the_catalogue_has_a_plan(name: str) -> None:
    claim = load_claim(name)
    assert claim.name == name
    for setting, full in ((claim.quick, False), (claim.full, True)):
        if setting is None or setting.task in _WHERE:
            continue
        plan = plan_claim(claim, ClaimOptions(full=full))
        judged = {*plan.seeds} - {*CHOICE_SEEDS}
        assert len(judged) >= (FULL_SEEDS if full else 8)
        assert (len(judged) < len(plan.seeds)) is setting.dosed
        added = [entry.name for entry in plan.recipes][len(setting.arms) :]
        assert added in ([], ["again"], ["again", "longer"])
        assert bool(added) is (claim.scope != "identity")
        assert len({entry.hash for entry in plan.recipes}) == len(plan.recipes)
        again = StudyPlan.from_dict(plan.to_dict())
        assert (again, again.hash) == (plan, plan.hash)
        assert sum(setting.decisive.values()) == pytest.approx(0) or len(setting.decisive) == 1
        assert all(arm.level is not None for arm in setting.arms) or claim.picture != "levels"


def test_an_effect_of_every_seed_can_pass_holm_over_its_family() -> None:
    """In the full run and in the quick one, which has fewer seeds; identities are not corrected."""
    member = {claim: len(of) for of in families().values() for claim in of}
    for claim in load_claims():
        for full in (False, True):
            if claim.budget == "none" or claim.scope == "identity":
                continue
            own = claim.setting(full=full).seeds
            seeds = max(own, FULL_SEEDS) if full else own
            assert member.get(claim.name, 1) * 2 / 2**seeds < 0.05, claim.name


def test_a_claim_that_is_tried_is_in_one_family_at_most() -> None:
    """The control is a family of its own, as is a claim that is added later: it changes no verdict."""
    members = [claim for of in families().values() for claim in of]
    assert len(members) == len(set(members))
    tried = {claim.name for claim in load_claims() if claim.budget != "none" and claim.scope != "identity"}
    assert {*members} <= tried - {"nothing-helps"}


def test_the_quick_claims_cover_every_seed_document_but_for_named_ones() -> None:
    found = {claim.seed for claim in load_claims() if claim.budget == "quick"}
    assert found <= set(SEEDS)
    assert len([claim for claim in load_claims() if claim.budget == "quick"]) >= 6


def test_another_model_is_refused_where_the_arms_are_arguments_of_the_own_one() -> None:
    with pytest.raises(InvalidArgumentError, match="differ in arguments of deep-mlp; found --model digits-cnn"):
        plan_claim(load_claim("gain-tanh"), ClaimOptions(model="digits-cnn"))


def test_another_model_and_other_seeds() -> None:
    plan = plan_claim(load_claim("orthogonality-spread"), ClaimOptions(model="digits-cnn", seeds=3, first_seed=7))
    assert (plan.model, plan.seeds) == ("digits-cnn", (*CHOICE_SEEDS, 7, 8, 9))
    assert plan.recipes[1].setting == {"arm": {"name": "orthogonality-0.0003"}}


def test_the_device_is_part_of_the_plan_and_of_the_command() -> None:
    plans = [plan_claim(load_claim("som-mean"), ClaimOptions(device=device)) for device in ("cpu", "cuda:1")]
    assert [plan.device for plan in plans] == ["cpu", "cuda"]
    assert [plan.command for plan in plans] == ["gonio reproduce som-mean", "gonio reproduce som-mean --device cuda:1"]
    assert plans[0].hash != plans[1].hash


def test_every_claim_of_the_catalogue_has_a_chinese_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader refuses a claim of the catalogue without one; a claim of a user needs none."""
    for claim in load_claims():
        assert len(re.findall(r"[\u4e00-\u9fff]", claim.claim_zh)) >= 5, claim.name
    text = (claim_module._CATALOG / "som-mean.yaml").read_text(encoding="utf-8")
    text = re.sub(r"claim_zh: .*\n", "", text)
    (tmp_path / "som-mean.yaml").write_text(text.replace("name: som-mean", "name: mine"), encoding="utf-8")
    assert load_claim(tmp_path / "som-mean.yaml").claim_zh == ""
    monkeypatch.setattr(claim_module, "_CATALOG", tmp_path)
    with pytest.raises(InvalidArgumentError, match=r"must have a Chinese sentence; found no claim_zh\. Add"):
        load_claim(tmp_path / "som-mean.yaml")


def test_an_installed_package_ships_claims_that_are_read_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "a_paper"
    (package / "claims").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('it was imported')", encoding="utf-8")
    text = (
        (claim_module._CATALOG / "som-mean.yaml").read_text(encoding="utf-8").replace("name: som-mean", "name: moves")
    )
    (package / "claims" / "moves.yaml").write_text(text, encoding="utf-8")
    info = tmp_path / "a_paper-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: a-paper\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[gonio.claims]\npaper = a_paper.claims\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [*shipped_files()] == ["paper:moves"]
    assert load_claim("paper:moves").name == "moves"
    with pytest.raises(UnknownNameError, match="Did you mean paper:moves"):
        load_claim("paper:mobes")
