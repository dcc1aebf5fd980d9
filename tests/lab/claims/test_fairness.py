"""What is no fair test is refused by name; what is one gets its verdict in the words of its scope."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gonio.errors import InvalidArgumentError
from gonio.lab.claims import CHOICE_SEEDS, Claim, ClaimResult, Runs, families, load_claims
from gonio.lab.claims.claim import read_claim
from gonio.lab.claims.fairness import (
    FIELD_EXAMPLES,
    chosen,
    controlled,
    false_verdicts,
    noise,
    obstacle,
    planned_obstacle,
)
from gonio.lab.claims.result import judged, not_tried
from gonio.lab.judging.statistics import Evidence, half_width, judge

SEEDS = range(12)
PENALTY = {"penalty": [{"where": "type:Conv2d", "use": "SelfOrthogonality", "strength": "{dose}"}]}
DOSES = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0]
BASE: dict[str, Any] = {"name": "planted", "seed": "000", "claim": "It is better.", "source": "A paper."}


METHOD = {"name": "method", "recipe": {"init": [{"where": "type:Conv2d", "use": "he_"}]}}


def claim(*, arms: Any = ({"name": "plain"}, METHOD), setting: Any = None, **fields: Any) -> Claim:
    """A claim on accuracy with tuned rates; `fields` change the claim, `setting` its experiment."""
    full = {"tune": 8, "arms": list(arms), **(setting or {})}
    return read_claim({**BASE, "fair": {"floor": 80.0}, **fields, "full": full}, origin="planted")


def dosed(doses: Any = DOSES) -> tuple[dict[str, Any], ...]:
    return {"name": "plain"}, {"name": "method", "doses": doses, "recipe": PENALTY}


def runs(arms: Mapping[str, float], *, spread: float = 0.2, reached: Any = None, **fields: Any) -> Runs:
    """Scores around the means of the arms, with choice seeds; the task's scores are those of `reached`."""
    draw = np.random.Generator(np.random.PCG64(3))
    seeds = (*CHOICE_SEEDS, *SEEDS)
    scores = {arm: {seed: mean + spread * draw.normal() for seed in seeds} for arm, mean in arms.items()}
    task = {arm: dict.fromkeys(seeds, mean) for arm, mean in (reached or {}).items()}
    return Runs(**{"scores": scores, "unit": "%", "reached": task or scores, "reached_unit": "%", **fields})


def controls(base: float) -> dict[str, float]:
    return {"again": base, "longer": base}


FAIR = {"plain": 90.0, "method": 93.0, **controls(90.0)}
SPREADS = {"plain": 6.0, "method": 4.0, **controls(6.0)}
EQUAL = dict.fromkeys(SPREADS, 95.0)
ANGLES: dict[str, Any] = {"measure": "angle_spread", "direction": "smaller", "setting": {"tune": 0}}
DOSED = {"plain": 90.0, **{f"method-{dose:g}": 91.0 for dose in DOSES}, **controls(90.0)}


def without(means: Mapping[str, float], name: str) -> dict[str, float]:
    return {arm: mean for arm, mean in means.items() if arm != name}


PLANTED = [
    # an arm does not train
    (claim(), runs({**FAIR, "plain": 10.0, **controls(10.0)}), "plain reaches .* %; the claim asks for 80"),
    (claim(), runs({**FAIR, "method": 10.0}), "An arm does not train: method"),
    (claim(), runs(FAIR, reached={**FAIR, "method": 79.0}), "method reaches 79 %; the claim asks for 80"),
    (claim(), replace(runs(FAIR), reached=without(FAIR, "method") and {"plain": dict.fromkeys(SEEDS, 90.0)}),
     "method diverges"),
    (claim(), runs(without(FAIR, "method"), failures={"method": "NotApplicableError: no layer fits"}),
     "An arm failed: method: NotApplicableError: no layer fits"),
    (claim(measure="trains", fair={"floor": 40.0, "untrained": "it is about training"}),
     runs({"plain": 0.0, "method": 0.0, **controls(0.0)}, spread=0.0, reached=dict.fromkeys(FAIR, 10.0)),
     "An arm does not train"),
    (claim(measure="bits_per_byte", direction="smaller", fair={"ceiling": 4.0}),
     runs({"plain": 7.9, "method": 3.0, **controls(7.9)}, unit="bits"), "plain reaches .* bits|plain reaches"),
    (claim(fair={}), runs(FAIR), "states no score that its arms must reach"),
    (claim(fair={"floor": 80.0, "margin": 1.0}, **ANGLES), Runs(scores={"plain": {0: 1.0}}), "were not recorded"),
    # unequal footing
    (claim(fair={"floor": 40.0, "margin": 1.0}, **ANGLES), runs(SPREADS, reached={**EQUAL, "method": 81.0}),
     "not on an equal footing: method and plain are 14 points apart"),
    (claim(fair={"floor": 40.0, "margin": 1.0}, **ANGLES), runs(SPREADS, reached={**EQUAL, "plain": 93.5}),
     "1.5 points apart, more than 1"),
    (claim(fair={"floor": 40.0}, **ANGLES), runs(SPREADS, reached=EQUAL), "states no margin"),
    (claim(fair={"floor": 40.0, "margin": 1.0}, measure="robust_accuracy", setting={"tune": 0}),
     runs(SPREADS, reached={**EQUAL, "method": 90.0}), "not on an equal footing"),
    # one dose
    (claim(arms=({"name": "plain"}, {"name": "method", "recipe": {"penalty": [{"use": "L2", "strength": 0.1}]}}),
           setting={"tune": 0}, fair={"floor": 80.0, "untuned": "a reason"}), runs(FAIR), "One strength of method"),
    (claim(arms=({"name": "plain"}, {"name": "method", "recipe": {"clip_qk": {"limit": 100.0}}}),
           setting={"tune": 0}, fair={"floor": 80.0, "untuned": "a reason"}), runs(FAIR), "One strength of method"),
    (claim(arms=dosed([0.1, 1.0])), runs({**DOSED}), "method has 2 doses; give it 6"),
    (claim(arms=dosed()), runs({**DOSED, "method-3": 94.0}), "best dose of method is the largest, 3"),
    # rates that were not tuned
    (claim(setting={"tune": 0}), runs(FAIR), "needs 8 trials or more"),
    (claim(setting={"tune": 4}), runs(FAIR), "needs 8 trials or more"),
    (claim(), runs(FAIR, searched={"plain": {"lr": 0.99}}), "best lr of plain lies at the high end"),
    (claim(), runs(FAIR, searched={"method": {"lr": -0.97}}), "best lr of method lies at the low end"),
    # too short
    (claim(), runs({**FAIR, "longer": 92.0}), "Training is too short: twice as long moves plain by .* points"),
    (claim(), runs({**FAIR, "longer": 85.0}), "Training is too short"),
    (claim(), runs(without(FAIR, "longer")), "not run with a control that trains longer"),
    # no control, no real size
    (claim(), runs(without(FAIR, "again")), "control that draws other random numbers"),
    (claim(scope="field"), runs(FAIR, examples=3000), "Field scope needs 10,000 training examples; found 3,000"),
]  # fmt: skip


@pytest.mark.parametrize(("planted", "found", "said"), PLANTED)
def test_an_unfair_claim_is_refused_by_name(planted: Claim, found: Runs, said: str) -> None:
    assert planted.full is not None
    assert re.search(said, obstacle(planted, planted.full, found))
    (one,) = judged([result(planted, found)])
    assert one.verdict == "not a fair test"


BY_THE_PLAN = "states no|One strength|doses; give it|needs 8 trials|Field scope"


@pytest.mark.parametrize(("planted", "found", "said"), PLANTED)
def test_what_a_plan_alone_makes_unfair_is_known_before_the_runs(planted: Claim, found: Runs, said: str) -> None:
    assert planted.full is not None
    early, late = (
        planned_obstacle(planted, planted.full, examples=found.examples),
        obstacle(planted, planted.full, found),
    )
    assert early == (late if re.search(BY_THE_PLAN, late) else "")


@pytest.mark.parametrize("full", [False, True])
def test_every_experiment_of_the_catalogue_can_be_fair(full: bool) -> None:
    for one in load_claims(()):
        if one.budget != "none" and (one.full if full else one.quick) is not None:
            assert planned_obstacle(one, one.setting(full=full), examples=FIELD_EXAMPLES) == "", one.name


def test_the_same_experiments_are_fair_without_what_was_planted() -> None:
    """The negative control of the test above."""
    for planted, found in (
        (claim(), runs(FAIR, searched={"plain": {"lr": 0.9}})),
        (claim(arms=dosed()), runs({**DOSED, "method-0.3": 94.0})),
        (claim(fair={"floor": 40.0, "margin": 1.0}, **ANGLES), runs(SPREADS, reached={**EQUAL, "method": 94.5})),
        (claim(scope="field"), runs(FAIR, examples=10_000)),
        (claim(fair={"floor": 80.0, "untuned": "a reason", "speed": "a reason"}, setting={"tune": 0}),
         runs(without(FAIR, "longer"))),
        (claim(measure="trains", fair={"floor": 40.0, "untrained": "it is about training"}),
         runs({"plain": 0.0, "method": 100.0, **controls(0.0)}, reached={**FAIR, "plain": 10.0})),
    ):  # fmt: skip
        assert planted.full is not None
        assert obstacle(planted, planted.full, found) == ""


def result(planted: Claim, found: Runs) -> ClaimResult:
    return replace(not_tried(planted, ""), full=True, plan="a hash", runs=found, planned=48)


@pytest.mark.parametrize(
    ("scope", "gain", "word"),
    [("small", 3.0, "seen"), ("small", -3.0, "opposite seen"), ("small", 0.0, "not seen"), ("mechanism", 3.0, "seen"),
     ("field", 3.0, "reproduced"), ("field", -3.0, "contradicted"), ("field", 0.0, "no useful effect"),
     ("identity", 3.0, "holds"), ("identity", -3.0, "fails")],
)  # fmt: skip
def test_a_verdict_has_the_words_of_its_scope(scope: str, gain: float, word: str) -> None:
    found = runs({**FAIR, "method": 90.0 + gain}, examples=20_000)
    assert judged([result(claim(scope=scope), found)])[0].verdict == word


def test_noise_is_that_of_the_control() -> None:
    """It is half of the t interval of again − baseline, scaled by the factors of the contrast."""
    found, planted = runs(FAIR, spread=3.0), claim()
    assert planted.full is not None
    pairs = [found.scores["again"][seed] - found.scores["plain"][seed] for seed in SEEDS]
    assert noise(planted.full, found) == pytest.approx(float(half_width(np.asarray(pairs))))
    half = planted.full.model_copy(update={"contrast": {"method": 0.5, "plain": -0.5}})
    assert noise(half, found) == pytest.approx(float(half_width(np.asarray(pairs))) / 2)
    assert noise(planted.full, replace(found, scores=without(found.scores, "again"))) is None


def test_a_claim_in_the_noise_is_too_noisy_and_a_clear_one_is_not() -> None:
    wide = runs({**FAIR, "method": 90.5}, spread=4.0)
    (unclear,) = judged([result(claim(fair={"floor": 80.0, "speed": "a reason"}), wide)])
    assert unclear.verdict == "too noisy"
    assert "With other random numbers alone the interval would be ±" in unclear.evidence.reason
    (clear,) = judged(
        [result(claim(fair={"floor": 60.0, "speed": "a reason"}), runs({**FAIR, "method": 120.0}, spread=4.0))]
    )
    assert clear.verdict == "seen"


def test_false_verdicts_of_a_control_are_at_the_level_of_the_test() -> None:
    """Two halves of one set of runs differ at 5 % of the draws, up to the steps of an exact test; 4 standard errors."""
    planted = claim()
    assert planted.full is not None
    for spread in (0.2, 3.0):
        assert 0.0 < false_verdicts(planted.full, runs(FAIR, spread=spread)) < 0.05 + 4 * 0.011


# --- doses --------------------------------------------------------------------------------------------------------


def test_the_best_dose_is_chosen_on_seeds_that_are_not_judged() -> None:
    planted, found = claim(arms=dosed()), runs(DOSED, spread=0.0)
    assert planted.full is not None
    lucky = {arm: dict(of) for arm, of in found.scores.items()}
    lucky["method-0.1"] |= dict.fromkeys(CHOICE_SEEDS, 99.0)  # on the choice seeds alone
    lucky["method-0.3"] |= dict.fromkeys(SEEDS, 99.0)  # on the judged seeds alone
    assert chosen(planted, planted.full, replace(found, scores=lucky)) == {"method": "method-0.1"}
    one = result(planted, replace(found, scores=lucky))
    assert one.contrast == {"method-0.1": 1.0, "plain": -1.0}
    assert set(one.values) == {*SEEDS}
    assert all(value == pytest.approx(1.0) for value in one.values.values())


def test_the_strongest_dose_keeps_the_score() -> None:
    """0.3 is within the margin of the baseline, 1 and 3 are not, whatever the property says."""
    planted = claim(arms=dosed(), fair={"floor": 40.0, "margin": 1.0}, measure="angle_spread", direction="smaller",
                    setting={"tune": 0, "choose": "strongest"})  # fmt: skip
    kept = {**DOSED, "method-0.3": 89.2, "method-1": 70.0, "method-3": 30.0}
    found = runs(dict.fromkeys(DOSED, 5.0), reached=kept)
    assert planted.full is not None
    assert chosen(planted, planted.full, found) == {"method": "method-0.3"}


def test_the_best_dose_of_a_property_is_that_of_the_task() -> None:
    planted = claim(arms=dosed(), fair={"floor": 40.0, "margin": 9.0}, measure="angle_spread", direction="smaller",
                    setting={"tune": 0})  # fmt: skip
    found = runs({**DOSED, "method-1": 0.1}, reached={**DOSED, "method-0.03": 95.0})
    assert planted.full is not None
    assert chosen(planted, planted.full, found) == {"method": "method-0.03"}


def test_doses_become_arms_of_one_side() -> None:
    planted = claim(arms=dosed())
    assert planted.full is not None
    assert planted.full.sides == ("plain", "method")
    assert [arm.level for arm in planted.full.arms] == [None, *DOSES]
    assert planted.full.arms[1].built_recipe.to_dict()["penalty"][0]["strength"] == 0.01


# --- controls -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "added"),
    [({}, ["again", "longer"]), ({"fair": {"speed": "a reason"}}, ["again"]), ({"scope": "identity"}, []),
     ({"measure": "signal_gain", "setting": {"tune": 0}}, ["again"])],
)  # fmt: skip
def test_controls_repeat_the_baseline(fields: dict[str, Any], added: list[str]) -> None:
    planted = claim(**fields)
    assert planted.full is not None
    arms = controlled(planted, planted.full, epochs=7)
    assert [arm.name for arm in arms[2:]] == added
    for arm in arms[2:]:
        assert (arm.built_recipe.to_dict() | {"name": ""}) == (
            planted.full.arms[0].built_recipe.to_dict() | {"name": ""}
        )
        assert arm.redraw is (arm.name == "again")
        assert arm.training.epochs == (14 if arm.name == "longer" else None)


def test_the_baseline_is_the_side_that_the_contrast_subtracts() -> None:
    planted = claim(setting={"contrast": {"plain": 1.0, "method": -1.0}})
    assert planted.full is not None
    assert planted.full.baseline.name == "method"


def test_an_arm_may_not_take_the_name_of_a_control() -> None:
    with pytest.raises(InvalidArgumentError, match="again is the name of a control"):
        claim(arms=({"name": "plain"}, {"name": "again"}))


# --- families -----------------------------------------------------------------------------------------------------


def test_a_claim_that_is_added_changes_no_other_verdict() -> None:
    one, other = result(claim(name="first"), runs(FAIR)), result(claim(name="second"), runs({**FAIR, "method": 91.5}))
    alone, together = judged([one])[0], judged([one, other])[0]
    assert alone.evidence == together.evidence


def test_a_member_of_a_family_is_corrected_for_all_of_it_wherever_it_is_tried() -> None:
    name = families()["robustness"][0]
    (one,) = judged([result(claim(name=name), runs(FAIR))])
    assert one.evidence.p_holm == pytest.approx(len(families()["robustness"]) * one.evidence.p)


def test_what_is_unfair_counts_as_untried_in_its_family() -> None:
    values = tuple(float(value) for value in range(1, 13))
    seen = Evidence(values=values, direction="larger", sesoi=1.0, unit="")
    fair, unfair = judge([seen, replace(seen, obstacle="It is unfair.")], size=5)
    assert fair.p_holm == pytest.approx(5 * 2 / 2**12)
    assert (unfair.verdict, unfair.p_holm) == ("not a fair test", 1.0)


def test_simulated_catalogues_of_true_nulls_keep_the_error_of_a_family() -> None:
    """100 catalogues in which no claim is true: a family with a false verdict in at most 5 % of them, by chance 10."""
    draw = np.random.Generator(np.random.PCG64(44))
    sizes = [len(of) for of in families().values()]
    wrong = dict.fromkeys(sizes, 0)
    for _ in range(100):
        for size in set(sizes):
            null = [Evidence(values=tuple(draw.normal(size=12)), direction="larger", sesoi=0.05, unit="")
                    for _ in range(size)]  # fmt: skip
            found = {seen.verdict for seen in judge(null)}
            wrong[size] += bool(found & {"reproduced", "contradicted"})
    assert max(wrong.values()) <= 10  # 5 ± 2.2, so that the largest of several stays below
