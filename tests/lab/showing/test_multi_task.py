"""Tables for papers, and tables over several tasks."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import gonio
from cli.shell import invoke
from gonio.errors import InvalidArgumentError
from gonio.escaping import tex_cell
from gonio.lab import Results, RunRecord, Study, across
from gonio.lab.judging.multi_task import Across, interquartile_mean
from gonio.lab.judging.results import summarise
from gonio.lab.showing.exports import MULTI_TASK_FORMATS, multi_task_text
from lab.plans import plan_of
from lab.showing.samples import printed, run

SCORES = {
    "easy": ([90.0, 91.0, 92.0, 93.0], [91.0, 91.5, 93.0, 92.5]),
    "hard": ([50.0, 52.0, 48.0, 51.0], [56.0, 55.0, 49.0, 50.0]),
}


def runs_of(name: str, scores: list[float]) -> list[RunRecord]:
    return [run(name, seed, score=score) for seed, score in enumerate(scores)]


def study_of(task: str, **changes: object) -> Results:
    plan = plan_of(seeds=4, task=task, **{"sesoi": 2.0 if task == "hard" else 0.5, **changes})
    base, ours = SCORES[task]
    return summarise(plan, runs_of("baseline", [*base]) + runs_of("r0", [*ours]), [], [])


def both(**changes: object) -> list[Results]:
    return [study_of("easy"), study_of("hard", **changes)]


def test_iqm_is_the_mean_without_the_outer_quarters() -> None:
    values = np.random.Generator(np.random.PCG64(0)).standard_normal((3, 20))
    expected = [np.sort(row)[5:15].mean() for row in values]
    np.testing.assert_allclose(interquartile_mean(values), expected, rtol=1e-12)


def test_tasks_are_put_on_one_scale() -> None:
    (found,) = across(both())
    scaled = [2.0, 1.0, 2.0, -1.0, 3.0, 1.5, 0.5, -0.5]  # easy / 0.5, hard / 2
    assert (found.recipe, found.tasks, found.pairs) == ("r0", ("easy", "hard"), (4, 4))
    assert found.iqm == pytest.approx(np.sort(scaled)[2:6].mean())
    assert found.improvement == 0.75
    assert found.effects == pytest.approx((np.mean(scaled[:4]), np.mean(scaled[4:])))
    assert found.verdicts == ("undecided", "undecided")
    assert found.profile == pytest.approx([np.mean([d > least for d in scaled]) for least in (-2, -1, 0, 1, 2)])
    assert found.iqm_low < found.iqm < found.iqm_high
    assert 0 <= found.improvement_low < 0.75 < found.improvement_high <= 1


def test_a_score_that_falls_turns_the_sign() -> None:
    (up,), (down,) = across(both()), across([study_of("easy", direction="min"), study_of("hard", direction="min")])
    assert down.iqm == pytest.approx(-up.iqm)
    assert down.improvement == pytest.approx(1 - up.improvement)


def test_the_bootstrap_stays_within_its_tasks() -> None:
    """Against scipy's, which resamples each sample by itself too."""

    def estimate(a: np.ndarray, b: np.ndarray, axis: int) -> np.ndarray:
        return stats.trim_mean(np.concatenate((a, b), axis=axis), 0.25, axis=axis)

    easy, hard = np.array([2.0, 1.0, 2.0, -1.0]), np.array([3.0, 1.5, 0.5, -0.5])
    expected = stats.bootstrap(
        (easy, hard), estimate, method="percentile", n_resamples=20_000, rng=np.random.default_rng(0)
    ).confidence_interval
    (found,) = across(both())
    # the ends of percentile intervals of 5,000 and 20,000 samples; their standard error is below 0.02
    assert (found.iqm_low, found.iqm_high) == pytest.approx((expected.low, expected.high), abs=0.1)


def test_only_recipes_of_every_study_are_shown() -> None:
    plan = plan_of(recipes=2, seeds=4, task="hard", sesoi=2.0)
    wide = summarise(plan, runs_of("baseline", [*SCORES["hard"][0]]) + runs_of("r1", [*SCORES["hard"][1]]), [], [])
    assert across([study_of("easy"), wide]) == ()


@pytest.mark.parametrize(
    ("studies", "message"),
    [
        ([study_of("easy")], "at least two studies; found 1"),
        ([study_of("easy"), study_of("easy")], "are different studies; found one of them twice"),
        (both(sesoi=0.0), "by their smallest effects of interest; found none for hard. Plan that study with --sesoi"),
    ],
)
def test_what_cannot_be_put_together(studies: list[Results], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        across(studies)


def test_every_format_holds_the_same_numbers() -> None:
    found = across(both())
    (one,) = found
    data = json.loads(MULTI_TASK_FORMATS["json"](found))
    read = {key: tuple(value) if isinstance(value, list) else value for key, value in data["recipes"][0].items()}
    assert Across(**read) == one
    (row,) = csv.DictReader(io.StringIO(MULTI_TASK_FORMATS["csv"](found)))
    assert (row["tasks"], row["pairs"], float(row["iqm"])) == ("easy; hard", "4; 4", one.iqm)
    shown = f"{one.iqm:+.2f}"
    markdown = MULTI_TASK_FORMATS["md"](found).splitlines()
    assert len({line.count("|") for line in markdown[2:5]}) == 1
    assert shown in markdown[4]
    assert "| r0 | hard | 4 | +1.12 | undecided |" in markdown
    assert "| r0 | 100 % | 88 % | 75 % | 50 % | 12 % |" in markdown
    assert tex_cell(shown) in MULTI_TASK_FORMATS["tex"](found)
    on_terminal = printed(multi_task_text(both()), width=110)
    assert shown in on_terminal
    assert "stratified bootstrap" in on_terminal


def test_the_command_takes_several_studies(tmp_path: Path) -> None:
    for task in SCORES:
        study = Study.create(tmp_path / task, plan_of(seeds=4, task=task))
        for entry, scores in zip(study.plan.recipes, SCORES[task], strict=True):
            for record in runs_of(entry.name, [*scores]):
                study.add(entry, record, {})
    folders = [str(tmp_path / task) for task in SCORES]
    assert "IQM" in invoke("report", *folders).stdout
    assert invoke("report", *folders, "--md", "-").stdout.startswith("Over all tasks:\n\n| recipe | tasks |")
    refused = invoke("report", *folders, "--html", "-")
    assert (refused.exit_code, "a page is of one study; found 2 studies" in refused.stderr) == (2, True)
    assert r"\begin{tabular}" in invoke("report", folders[0], "--tex", "-").stdout


# --- LaTeX ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (r"\input{/etc/passwd}", r"\textbackslash{}input\{/etc/passwd\}"),
        ("50 % & more", r"50 \% \& more"),
        ("a_b^c~d#e$f$", r"a\_b\textasciicircum{}c\textasciitilde{}d\#e\$f\$"),
        ("two\nlines\\\\", r"two lines\textbackslash{}\textbackslash{}"),
        ("%\u202ecomment", r"\%comment"),
        (None, ""),
    ],
)
def test_no_tex_cell_is_a_command(text: str | None, said: str) -> None:
    assert tex_cell(text) == said


def test_the_latex_table_has_the_same_number_of_cells_in_every_line() -> None:
    results = gonio.lab.showing.example()
    hostile = replace(results, effects=(replace(results.effects[0], recipe=r"a & b \\ % \end{tabular}"),))
    lines = gonio.lab.showing.to_latex(hostile).splitlines()
    rows = [line for line in lines if line.endswith(r"\\")]
    assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {6}
    assert len(rows) == 4  # two tables of a head and a row
    assert [line for line in lines if line.startswith(r"\end")] == [r"\end{tabular}"] * 2
    assert all(line.startswith(("%", "\\")) or line in rows for line in lines)
