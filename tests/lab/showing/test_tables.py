"""Headlines, tables and what each export shows of them."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace

import pytest

import gonio
from gonio.lab import AttackConfig
from gonio.lab.judging.results import Amount, RecipeTuning, Robust, SecondaryMetric, TimeToScore
from gonio.lab.plan import Tuning
from gonio.lab.showing import html, text, to_csv, to_latex, to_markdown
from gonio.lab.showing.tables import (
    Scale,
    added,
    attacks,
    costs,
    further,
    headline,
    hidden_gradients,
    mark,
    others,
    p_value,
    partial,
    reached,
    threat_text,
    tuning,
    tuning_text,
    won,
)
from gonio.messages import local
from lab.showing.samples import effect, printed, results


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
        (("undecided",), "Undecided whether r0 helps or hurts: +0.10 points (95 % interval −0.10 to +0.30).", ""),
        (("no useful effect",), "r0 has no useful effect: +0.10 points (95 % interval −0.10 to +0.30).", ""),
        (("undecided", "helps"), "r1 helps: +0.61 points (95 % interval +0.41 to +0.81).", "r0: undecided."),
        (
            ("helps", "helps", "hurts", "undecided"),
            "2 of 4 recipes help, most r1: +0.61 points (95 % interval +0.41 to +0.81).",
            "Of the other 2: 1 hurting and 1 undecided.",
        ),
        (
            ("undecided", "hurts", "no useful effect"),
            "r1 hurts: −0.69 points (95 % interval −0.89 to −0.49).",
            "Of the other 2: 1 undecided and 1 with no useful effect.",
        ),
        (
            ("undecided", "undecided", "no useful effect"),
            "None of the 3 recipes is shown to help or to hurt: 2 undecided and 1 with no useful effect.",
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


def test_a_minus_is_a_minus_sign_a_missing_number_a_dash_and_no_p_value_zero() -> None:
    scale = Scale("points", 2)
    assert scale.signed(-0.5) == scale.score(-0.5) == "−0.50"
    assert scale.signed(None) == scale.score(None) == "–"
    assert scale.interval(None, 1.0) == partial(results()) == ""
    assert (p_value(0.0), p_value(0.9999)) == ("< 0.001", "1.00")


def test_verdicts_differ_by_more_than_colour() -> None:
    verdicts = ("helps", "hurts", "no useful effect", "undecided", "not a fair test", "unknown")
    assert len({mark(v)[0] for v in verdicts}) == len(verdicts)


def full():
    """Results with everything that is optional."""
    effects = (
        effect(
            "orthogonal-init", parameters=Amount(40506, 40506), flops=Amount(2e9, 3e9), reach=TimeToScore(8, 8, 0.5)
        ),
        effect(
            "decoupled-tanh", parameters=Amount(1000, 1012), reach=TimeToScore(8, 3, None), changes=("init a", "swap b")
        ),
    )
    tuning = tuple(
        RecipeTuning(name, 20, failed, 0, {"lr": 0.1}, {"lr": 0.2}, 97.5, 97.0, 240.0)
        for name, failed in (("baseline", 0), ("orthogonal-init", 2), ("decoupled-tanh", 0))
    )
    means = {"clean": 96.0, "transfer": 90.0, "fgsm": 50.0, "pgd": 30.0, "worst": 29.0}
    robust = (
        Robust("baseline", means, 8),
        Robust("orthogonal-init", means, 8, 1.25, -0.5, 3.0),
        Robust("decoupled-tanh", means, 8, -2.0, -3.0, -1.0, {"random <noise> misleads more than PGD": 3}),
    )
    further = (
        SecondaryMetric("baseline", "log loss", "nats", 0.25),
        SecondaryMetric("orthogonal-init", "log loss", "nats", 0.21, 8, -0.04, -0.06, -0.02),
        SecondaryMetric("decoupled-tanh", "log loss", "nats", None),
        SecondaryMetric("baseline", "<b>f1", "", 1234.5),
    )
    changes = {"tuning": Tuning(trials=20), "threat": AttackConfig(epsilon=0.1, low=0.0, high=1.0)}
    return results(effects=effects, tuning=tuning, robustness=robust, further=further, plan_changes=changes)


def test_further_metrics_have_four_digits_of_the_largest_and_no_verdict() -> None:
    table = further(full())
    assert table.rows == (
        ("baseline", "log loss, nats", "0.2500", "", ""),
        ("orthogonal-init", "log loss, nats", "0.2100", "−0.0400", "−0.0600 to −0.0200"),
        ("decoupled-tanh", "log loss, nats", "–", "–", ""),
        ("baseline", "<b>f1", "1234", "", ""),
    )
    assert "no verdict" in table.notes[0]
    page = html(full())
    assert '<section id="further"' in page
    assert "&lt;b&gt;f1" in page
    assert "<b>f1" not in page
    assert '<section id="further"' not in html(results())
    assert "| orthogonal-init | log loss, nats | 0.2100 |" in to_markdown(full())


def test_costs() -> None:
    first, second = costs(full()).rows
    assert first[1:] == ("none", "+1 G (+50.0 %)", "×0.50 (in 8 of 8 seeds)", "4 min, 4 min of it tuning")
    assert second[1:4] == ("+12 (+1.2 %)", "–", "not reached (in 3 of 8 seeds)")
    assert costs(results()).rows == ()
    assert reached(TimeToScore(3, 3, None)) == "reached (in 3 of 3 seeds)"
    assert reached(TimeToScore(1, 1, 2.0)) == "×2.00 (in 1 of 1 seed)"


def test_tuning_and_attacks() -> None:
    rows = tuning(full()).rows
    assert [row[1] for row in rows] == ["20", "20 (2 failed)", "20"]
    assert rows[0][:4] == ("baseline", "20", "lr 0.1", "lr 0.2")
    assert "20 trials per recipe on seed 1000003" in tuning_text(full())
    assert threat_text(full()).startswith("each input value changed by at most 0.1, within 0 to 1; 200 examples")
    assert (tuning_text(results()), threat_text(results()), tuning(results()).rows) == ("", "", ())
    assert [row[-2:] for row in attacks(full()).rows] == [
        ("", ""), ("+1.2", "−0.5 to +3.0"), ("−2.0", "−3.0 to −1.0"),
    ]  # fmt: skip
    assert hidden_gradients(full()) == {"decoupled-tanh": ["random <noise> misleads more than PGD (in 3 of 8 runs)"]}


def test_the_page_shows_them_and_escapes_what_it_shows() -> None:
    page, plain = html(full()), html(results())
    for said in ("Costs</h2>", "Tuning</h2>", "Robustness</h2>", "confounded: init a, swap b"):
        assert page.count(said) == 1
        assert said not in plain or said == "Costs</h2>"
    assert "random &lt;noise&gt; misleads" in page


def test_the_page_shows_the_evidence_and_curves_over_measured_times() -> None:
    evident = effect("orthogonal-init", failed=1, rho=-0.25, improvement=0.875)
    page = html(results(effects=(evident, effect("decoupled-tanh", step_time=None))))
    for cell in ("−0.25", "0.30", "7 of 8"):
        assert f'<td class="num">{cell}</td>' in page
    assert page.count("at equal time") == 1
    assert page.count("over time, in epochs of the baseline:") == 1
    assert "at equal time" not in html(results(effects=(effect("orthogonal-init", step_time=None),)))


def test_every_export_shows_attacks_and_confounding() -> None:
    markdown, tex = to_markdown(full()), to_latex(full())
    for made, minus in ((markdown, "−2.0"), (tex, "$-$2.0")):
        assert "helps (confounded)" in made
        assert "smoothed" not in made  # which was not made
        assert minus in made
    assert "| recipe | undisturbed | transfer | FGSM | PGD | worst of all | difference in the worst |" in markdown
    assert "| baseline | 96.0 | 90.0 | 50.0 | 30.0 | 29.0 |" in markdown
    assert "- decoupled-tanh: random &lt;noise&gt; misleads more than PGD (in 3 of 8 runs)" in markdown
    assert tex.count(r"\begin{tabular}") == 4
    assert "within 0 to 1; 200 examples" in markdown
    assert "within 0 to 1; 200 examples" in tex
    rows = list(csv.DictReader(io.StringIO(to_csv(full()))))
    assert [(row["right_pgd"], row["right_pgd_baseline"]) for row in rows] == [("30.0", "30.0")] * 2
    assert [(row["worst_low"], row["worst"], row["worst_high"]) for row in rows][1] == ("-3.0", "-2.0", "-1.0")
    assert [row["changes"] for row in rows] == ["", "init a; swap b"]
    assert rows[1]["hidden_gradients"] == "random <noise> misleads more than PGD (3)"
    assert rows[0]["right_noise"] == ""
    without = replace(full(), robustness=())
    assert "undisturbed" not in to_markdown(without) + to_latex(without)
    assert {row["right_pgd"] for row in csv.DictReader(io.StringIO(to_csv(without)))} == {""}


def test_the_terminal_shows_attacks_and_confounding() -> None:
    without = replace(full(), robustness=(), further=())
    attacked, plain = (printed(text(made), width=140) for made in (full(), without))
    for said in (
        "Accuracy under attack, %",
        "log loss, nats",
        "decoupled-tanh: random <noise> misleads more than PGD (in 3 of 8 runs)",
    ):
        assert said in attacked
        assert said not in plain
    assert "helps (confounded)" in attacked


def test_a_baseline_that_does_not_train_is_the_headline() -> None:
    reason = "The baseline does not train: its mean accuracy is 10 %, and a constant prediction has 10 %."
    found = results(effects=tuple(effect(name, verdict="not a fair test", reason=reason) for name in "ab"))
    assert headline(found) == reason
    assert reason in html(found)


def test_ties_are_counted_apart() -> None:
    tied = effect("a", differences=(0.0, 0.0, 1.0, -1.0), n=4, improvement=0.5)
    assert won(tied) == "1 of 4, 2 ties"
    assert won(effect("b", mean=None)) == "–"


@pytest.mark.parametrize(
    ("more", "text"), [(999, "+999"), (999_499, "+999 k"), (999_999, "+1 M"), (-1_234_567, "−1.23 M"), (0, "none")]
)
def test_a_number_that_is_rounded_up_takes_the_next_unit(more: int, text: str) -> None:
    assert added(Amount(0, more)) == text


def test_counts_of_pairs_and_of_seeds_are_translated() -> None:
    tied = effect("a", differences=(0.0, 0.0, 1.0, -1.0), n=4, improvement=0.5)
    with gonio.language("zh"):
        texts = [local(won(tied)), local(reached(TimeToScore(3, 3, None)))]
    assert [re.findall(r"[a-z]+", text) for text in texts] == [[], []]
