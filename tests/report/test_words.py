"""The headline says what the table says, no more."""

from __future__ import annotations

import pytest

from gonio.report.wording import Scale, headline, mark, others, p_value, partial
from report.samples import effect, results


def outcome(*verdicts: str, **changes):
    names = tuple(f"r{i}" for i in range(len(verdicts)))
    means = {"helps": 0.6, "hurts": -0.7}
    effects = tuple(
        effect(n, mean=means.get(v, 0.1) + 0.01 * i, verdict=v)
        for i, (n, v) in enumerate(zip(names, verdicts, strict=True))
    )
    return results(names, effects=effects, runs=(), **changes)


@pytest.mark.parametrize(
    ("verdicts", "said", "rest"),
    [
        ((), "There are no results yet.", ""),
        (("helps",), "r0 helps: +0.60 points (95 % interval +0.40 to +0.80).", ""),
        (("hurts",), "r0 hurts: −0.70 points (95 % interval −0.90 to −0.50).", ""),
        (("no evidence",), "No evidence that r0 helps or hurts: +0.10 points (95 % interval −0.10 to +0.30).", ""),
        (("underpowered",), "Too few seeds to say whether r0 helps.", ""),
        (
            ("no useful effect",),
            "r0 has no useful effect: +0.10 points (95 % interval −0.10 to +0.30).",
            "",
        ),
        (
            ("no evidence", "helps"),
            "r1 helps: +0.61 points (95 % interval +0.41 to +0.81).",
            "r0: no evidence.",
        ),
        (
            ("helps", "helps", "hurts", "no evidence"),
            "2 of 4 recipes help, most r1: +0.61 points (95 % interval +0.41 to +0.81).",
            "Of the other 2: 1 hurting and 1 with no evidence.",
        ),
        (
            ("no evidence", "hurts", "underpowered"),
            "r1 hurts: −0.69 points (95 % interval −0.89 to −0.49).",
            "Of the other 2: 1 with no evidence and 1 with too few seeds to tell.",
        ),
        (
            ("no evidence", "no evidence", "no useful effect"),
            "None of the 3 recipes is shown to help or to hurt: 2 with no evidence and 1 with no useful effect.",
            "",
        ),
    ],
)
def test_headline(verdicts: tuple[str, ...], said: str, rest: str) -> None:
    made = outcome(*verdicts)
    assert headline(made) == said
    assert others(made) == rest


@pytest.mark.parametrize(
    ("sesoi", "decimals"), [(0.5, 2), (1.0, 2), (0.2, 2), (0.1, 3), (0.01, 4), (20.0, 0), (0.0, 2), (1e-9, 6)]
)
def test_digits_follow_the_smallest_effect_of_interest(sesoi: float, decimals: int) -> None:
    assert Scale.of(results(plan_changes={"sesoi": sesoi})).decimals == decimals


def test_a_minus_is_a_minus_sign_and_a_missing_number_a_dash() -> None:
    scale = Scale("points", 2)
    assert scale.signed(-0.5) == "−0.50"
    assert scale.score(-0.5) == "−0.50"
    assert scale.signed(None) == scale.score(None) == "–"
    assert scale.interval(None, 1.0) == ""


def test_p_values_never_read_as_zero() -> None:
    assert p_value(0.0) == "< 0.001"
    assert p_value(0.9999) == "1.00"


def test_verdicts_differ_by_more_than_colour() -> None:
    verdicts = ("helps", "hurts", "no useful effect", "no evidence", "underpowered", "unknown")
    assert len({mark(v)[0] for v in verdicts}) == len(verdicts)


def test_nothing_is_said_to_be_missing_when_nothing_is() -> None:
    assert partial(results()) == ""
