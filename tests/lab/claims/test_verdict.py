"""Verdicts on synthetic numbers, with the error rates that they state."""

from __future__ import annotations

import numpy as np
import pytest

from gonio.lab.claims import VERDICTS, Evidence, judge
from gonio.lab.judging.statistics import contrasts

RISE = (2.0, 3.0, 2.5, 2.2, 2.8, 3.1, 2.4, 2.6)


def seen(values: tuple[float, ...], **fields: object) -> Evidence:
    return Evidence(**{"values": values, "direction": "larger", "sesoi": 1.0, "unit": "%", **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("evidence", "verdict", "reason"),
    [
        (seen(RISE), "reproduced", "Larger in 8 of 8 seeds, by 2.58 on average"),
        (seen(tuple(-x for x in RISE)), "contradicted", "Smaller in 8 of 8 seeds"),
        (seen(RISE, direction="smaller"), "contradicted", "Larger in 8 of 8 seeds"),
        (seen(tuple(-x for x in RISE), direction="smaller"), "reproduced", "8 of 8 seeds"),
        (seen(RISE, sesoi=5.0), "no useful effect", "the effect is real, but smaller"),
        (seen((0.1, -0.1, 0.2, -0.2, 0.1, -0.1)), "no useful effect", "lies within ±1 point"),
        (seen(RISE, sesoi=2.6), "undecided", "the mean is below 2.6 points"),
        (seen((3.0, -2.0, 4.0, -3.0, 2.0, 1.0)), "undecided", r"About \d+ seeds would decide"),
        (seen((2.0, 2.1)), "undecided", "There are 2 seeds with all runs, too few"),
        (seen(()), "undecided", "There are 0 seeds"),
        (seen(RISE, obstacle="No arm trains."), "not a fair test", "No arm trains"),
        (seen((0.0,) * 8, sesoi=0.0), "undecided", "no smallest effect of interest is named"),
        (seen((0.1, 0.12, 0.09, 0.11), direction="same"), "reproduced", "lies within ±1 point"),
        (seen((0.0,) * 6, direction="same"), "reproduced", r"lies within ±1 point \(p = 0.031 after Holm"),
        (seen((0.0,) * 5, direction="same"), "undecided", r"p = 0.062 after Holm\). About 6 seeds would decide"),
        (seen((0.1 + 0.2, 0.3, 0.3), direction="same"), "undecided", "p = 0.250 after Holm"),
        (seen((4.0,) * 3, direction="same"), "undecided", "lies outside"),
        (seen((0.0,) * 5), "undecided", "use 6 seeds or more"),
        (seen((0.0,) * 6), "no useful effect", "lies within"),
        (seen(RISE, direction="same"), "contradicted", "outside of ±1 point"),
        (seen((3.0, -2.0, 4.0, -3.0), direction="same"), "undecided", "partly outside"),
    ],
)
def test_each_rule_gives_its_verdict(evidence: Evidence, verdict: str, reason: str) -> None:
    import re

    (found,) = judge([evidence])
    assert found.verdict == verdict
    assert found.verdict in VERDICTS
    assert re.search(reason, found.reason)


def test_equal_values_of_an_identity_are_enough_because_it_has_no_noise() -> None:
    zeros = (0.0,) * 3
    (holds,) = judge([seen(zeros, direction="same")], exact=True)
    assert (holds.verdict, holds.p) == ("reproduced", 0.0)
    assert judge([seen((4.0,) * 3, direction="same")], exact=True)[0].verdict == "contradicted"
    assert judge([seen(zeros)], exact=True)[0].verdict == "no useful effect"


def test_the_correction_counts_all_claims_of_the_run() -> None:
    alone = judge([seen(RISE)])[0]
    among = judge([seen(RISE), *[seen((3.0, -2.0, 4.0, -3.0, 2.0, 1.0, -2.0, 0.5))] * 9])[0]
    assert alone.p_holm == pytest.approx(2 / 2**8)
    assert among.p_holm == pytest.approx(10 * 2 / 2**8)
    assert (alone.verdict, among.verdict) == ("reproduced", "undecided")
    assert "use 9 seeds or more" in among.reason


def test_no_claims_no_verdicts() -> None:
    assert judge([]) == []


def test_contrasts_need_every_arm() -> None:
    scores = {("a", 0): 3.0, ("b", 0): 1.0, ("c", 0): 10.0, ("a", 1): 2.0, ("c", 1): 10.0}
    assert contrasts(scores, {"a": 1, "b": -1, "c": 0.5}, [0, 1]) == {0: 7.0}


def test_a_recipe_that_does_nothing_is_never_reproduced_in_100_simulated_runs() -> None:
    """The control: at most 2.5 % of single claims may come out reproduced by chance; with Holm over 8, 0.3 %."""
    draw = np.random.Generator(np.random.PCG64(16))
    verdicts = [
        found.verdict
        for _ in range(100)
        for found in judge([seen(tuple(draw.normal(0.0, 1.0, 10)), sesoi=0.25) for _ in range(8)])[:1]
    ]
    assert verdicts.count("reproduced") == 0
    assert verdicts.count("contradicted") == 0


def test_claims_of_equality_are_corrected_like_the_others() -> None:
    """18 true effects just inside of the margin: a false contradiction of any in at most 5 % of the families."""
    draw = np.random.Generator(np.random.PCG64(18))
    wrong = 0
    for _ in range(200):
        family = [seen(tuple(draw.normal(0.999, 1.0, 12)), direction="same") for _ in range(18)]
        wrong += any(found.verdict == "contradicted" for found in judge(family))
    assert wrong <= 12  # 0.25 % of 18 claims each: 5 % of 200 families plus two standard errors
    far = [seen(tuple(draw.normal(3.0, 1.0, 12)), direction="same") for _ in range(18)]
    assert sum(found.verdict == "contradicted" for found in judge(far)) >= 15


def test_a_comparison_is_the_sentence_that_the_recipe_is_better() -> None:
    """One engine: the effect of a study has the statistics and the verdict of its contrast, in other words."""
    from gonio.lab.judging.results import summarise
    from gonio.lab.judging.statistics import WORDS
    from lab.plans import plan_of, runs_of

    for differences in (RISE, tuple(-x for x in RISE), (0.1, -0.1) * 4, (3.0, -2.0, 4.0, -3.0) * 2):
        plan = plan_of(seeds=8)
        base = [90.0 + seed for seed in range(8)]
        ours = [score + change for score, change in zip(base, differences, strict=True)]
        (effect,) = summarise(plan, runs_of("baseline", base) + runs_of("r0", ours), [], []).effects
        (found,) = judge([seen(effect.differences, sesoi=plan.sesoi)])
        assert effect.verdict == WORDS.get(found.verdict, found.verdict)
        assert (effect.mean, effect.p_holm, effect.reason) == (found.mean, found.p_holm, found.reason)


def test_a_real_effect_is_reproduced_in_most_simulated_runs() -> None:
    draw = np.random.Generator(np.random.PCG64(17))
    verdicts = [judge([seen(tuple(draw.normal(2.0, 1.0, 10)))])[0].verdict for _ in range(100)]
    assert verdicts.count("reproduced") >= 95
