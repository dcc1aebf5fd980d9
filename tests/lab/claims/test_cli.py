"""`gonio reproduce` as a command: what it lists, writes and refuses."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from cli.shell import invoke, shell
from gonio.cli.reproduce import _check_complete, _too_few
from gonio.lab.claims import Claim, ClaimResults, claim_names, families, load_claim, recorded, try_claims
from gonio.lab.claims.result import not_tried
from gonio.lab.record import RunRecord
from gonio.lab.showing.claims import claim_explanation

CLAIM = """
name: tiny
claim: Every step multiplies the norm of v by the square root of 1 + c².
source: A paper.
measure: norm_growth_error
direction: same
sesoi: 0.01
scope: identity
quick:
  model: {name: deep-mlp, depth: 1, width: 8}
  arms: [{name: weight-norm, recipe: {parametrize: [{where: "type:Linear", use: WeightNorm}]}}]
  contrast: {weight-norm: 1.0}
  seeds: 3
"""


@pytest.fixture
def claim(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(CLAIM, encoding="utf-8")
    return str(path)


def test_a_claim_file_is_tried_resumed_and_exported(claim: str, tmp_path: Path) -> None:
    words = ["reproduce", claim, "--jobs", "2", "-o", str(tmp_path / "out"), "--json", str(tmp_path / "all.json")]
    first, second = shell(*words), invoke(*words)
    assert (first.returncode, second.exit_code) == (0, 0)
    assert "1 claim tried on this machine: identities: 1 holds" in first.stdout
    assert first.stdout == second.stdout
    assert (tmp_path / "out" / "claims.html").is_file()
    line = next(line for line in first.stderr.splitlines() if line.startswith("  ✓ holds (identity): "))
    assert line in " ".join(first.stdout.split("\n")), "the verdict comes when the claim has run, and again at the end"
    assert first.stderr.endswith("and gonio reproduce CLAIM --model FILE.py:FUNCTION\n")
    data = json.loads((tmp_path / "all.json").read_text(encoding="utf-8"))
    assert len(data["claims"][0]["evidence"]["values"]) == 3
    exported = json.loads(invoke("report", str(tmp_path / "out" / "tiny"), "--json", "-").stdout)
    assert exported["claims"] == data["claims"]


def test_identities_come_first_each_with_its_verdict(claim: str, tmp_path: Path) -> None:
    start = tmp_path / "start.yaml"
    start.write_text(CLAIM.replace("name: tiny", "name: later").replace("identity", "mechanism"), encoding="utf-8")
    claims: list[Claim] = [load_claim(str(path)) for path in (start, claim)]
    seen: list[str] = []
    found = try_claims(claims, tmp_path / "out", jobs=2, each=lambda one: seen.append(one.claim.name))
    assert seen == ["tiny", "later"]
    assert [one.claim.name for one in found.results] == ["later", "tiny"], "results keep the order of the call"


def test_verdicts_are_in_chinese(claim: str, tmp_path: Path) -> None:
    words = ["reproduce", claim, "--jobs", "2", "-o", str(tmp_path / "out"), "--lang", "zh"]
    shown = " ".join(invoke(*words).stdout.split())
    assert "✓ 成立（恒等式）：" in shown
    assert "95% 区间位于 ±0.01百分点之内（经 Holm 校正 p < 0.001）。" in shown
    page = (tmp_path / "out" / "claims.html").read_text(encoding="utf-8")
    assert "95% 区间位于 ±0.01百分点之内" in page
    assert "The 95 % interval" not in page
    assert '<h2 id="h-other">其他来源</h2>' in page, "a claim that names no document is on the page as well"


def test_a_claim_that_names_no_document_is_explained_by_its_source_alone(claim: str) -> None:
    assert "source: A paper.\n" in claim_explanation(load_claim(claim))
    assert "(001: scale of weights)" in claim_explanation(load_claim("l2-is-fooled"))


def test_a_device_that_is_not_there_is_refused_before_anything_is_written(claim: str, tmp_path: Path) -> None:
    found = invoke("reproduce", claim, "--device", "cuda:7", "-o", str(tmp_path / "out"))
    assert found.exit_code == 2
    assert "the device 'cuda:7' must be on this machine" in found.stderr
    assert not (tmp_path / "out").exists()


def test_every_claim_is_listed_and_explained() -> None:
    listed = invoke("reproduce", "--list").stdout
    assert all(name in listed for name in claim_names())
    assert invoke("list", "claims").stdout.count("\n") == len(claim_names())
    page = (Path(__file__).parents[3] / "docs" / "claims" / "README.md").read_text(encoding="utf-8")
    for name in ("orthogonality-spread", "bn-evens-directions"):
        verdict, effect = recorded(name)
        row = next(line for line in page.splitlines() if f"#{name})" in line)
        assert f" {verdict} |" in row, "the lists give the verdict of the documentation"
        assert re.search(rf"{name} +{verdict} ", listed)
        assert re.search(rf"{name} +{verdict} ", invoke("list", "claims").stdout)
        assert f"verdict here: {verdict}; {effect}\n" in invoke("explain", name).stdout
    text = invoke("explain", "gain-tanh").stdout
    assert "Saxe" in text
    assert "gonio reproduce gain-tanh" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("depth: 1", "depth: -1", "deep_mlp(depth=) is a whole number from 1 to 1000; found -1."),
        ("depth: 1", "depth: 0", "deep_mlp(depth=) is a whole number from 1 to 1000; found 0."),
        ("width: 8", "width: 99999999", "deep_mlp(width=) is a whole number from 1 to 65536; found 99999999."),
        ("sesoi: 0.01", "sesoi: x", "tiny.yaml must be a claim; found sesoi: 'x', but expected a valid number."),
        ("name: deep-mlp", "name: net.py:make", "'net.py:make' names code, which only --task and --model"),
        ("use: WeightNorm", "use: WeihtNorm", "did you mean WeightNorm"),
    ],
)
def test_an_invalid_claim_is_refused_before_anything_runs(
    claim: str, tmp_path: Path, before: str, after: str, told: str
) -> None:
    Path(claim).write_text(CLAIM.replace(before, after), encoding="utf-8")
    found = invoke("reproduce", claim, "-o", str(tmp_path / "out"))
    assert (found.exit_code, found.stdout) == (3, "")
    assert told in found.stderr
    assert found.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_dry_run_trains_nothing_to_the_end(claim: str, tmp_path: Path) -> None:
    found = shell("reproduce", claim, "--dry-run", "-o", str(tmp_path / "out"))
    assert found.returncode == 0
    assert "tiny: 1 arm × 3 seeds" in found.stdout
    assert not (tmp_path / "out").exists()


def test_a_dry_run_says_what_is_not_tried_and_what_cannot_be_decided(claim: str) -> None:
    found = invoke("reproduce", "bn-imagenet", claim, "--dry-run")
    assert found.exit_code == 0
    assert "bn-imagenet: not tried: " in found.stdout
    assert re.search(r"^in all about [1-9]\d* (s|min) with \d+ runs? at a time$", found.stdout, re.MULTILINE)
    assert "in all about" not in invoke("reproduce", "bn-imagenet", "--dry-run").stdout
    assert "can decide it" not in found.stdout, "an identity is not tested by its signs"
    member = load_claim("som-spread")
    size = len(families()["angles"])
    least = next(n for n in range(2, 40) if size * 2.0 ** (1 - n) < 0.05)
    assert _too_few(member, least - 1) == f"; {least} seeds or more can decide it"
    assert _too_few(member, least) == ""


def test_times_below_two_minutes_are_in_seconds_and_one_run_is_singular(claim: str) -> None:
    found = invoke("reproduce", claim, "--dry-run", "--jobs", "1").stdout
    assert re.search(r"^in all about [1-9]\d* s with 1 run at a time$", found, re.MULTILINE), found


def test_a_task_of_ones_own_that_fails_is_named_and_no_defect(claim: str, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text('def rings():\n    raise TypeError("no rings")\n', encoding="utf-8")
    named = f"{tmp_path / 'fails.py'}:rings"
    for words in (["--dry-run"], ["-o", str(tmp_path / "out")]):
        found = invoke("reproduce", claim, "--task", named, *words)
        assert found.exit_code == 3
        assert f"{named} raised TypeError: no rings (fails.py, line 2, in rings)" in found.stderr
        assert "Traceback" not in found.stderr


def test_data_that_no_task_reads_are_refused(claim: str, tmp_path: Path) -> None:
    for words in (["--dry-run"], ["-o", str(tmp_path / "out")], ["--task", "digits", "--dry-run"]):
        found = invoke("reproduce", claim, "--data", "nowhere", *words)
        assert found.exit_code == 2
        assert "--data is for tasks on cifar10, fashion-mnist" in found.stderr
        assert "found --data nowhere for digits. Leave --data out." in found.stderr
    assert not (tmp_path / "out").exists()


def test_a_plan_that_cannot_be_fair_is_named_before_its_runs(claim: str, tmp_path: Path) -> None:
    content = CLAIM.replace("scope: identity", "scope: small").replace("direction: same", "direction: larger")
    content = content.replace("norm_growth_error", "accuracy").replace("arms: [", "arms: [{name: plain}, ")
    content = content.replace("  contrast: {weight-norm: 1.0}\n", "  training: {epochs: 1}\n")
    Path(claim).write_text(content, encoding="utf-8")
    said = "tiny cannot be a fair test as it is planned: The claim states no score that its arms must reach"
    assert said in invoke("reproduce", claim, "--dry-run").stdout
    found = invoke("reproduce", claim, "-o", str(tmp_path / "out"), "--jobs", "1")
    assert 0 <= found.stderr.find(said) < found.stderr.find("runs"), found.stderr


def test_exports_of_a_claim_have_its_verdict_and_its_numbers(claim: str, tmp_path: Path) -> None:
    """The study of one claim and the folder of several; text, CSV, markdown and LaTeX say what the page says."""
    out = tmp_path / "out"
    first = invoke("reproduce", claim, "--jobs", "2", "-o", str(out))
    effect = re.search(r"\+[\d.e-]+ %", first.stdout)
    assert effect is not None
    for folder in (out, out / "tiny"):
        for option in ("--csv", "--md", "--tex", "--json", "--html"):
            text = invoke("report", str(folder), option, "-").stdout
            assert "holds" in text, option
            assert "Every step multiplies the norm" in text, option
    assert effect[0].split()[0] in invoke("report", str(out), "--md", "-").stdout
    latex = invoke("report", str(out), "--tex", "-").stdout
    assert latex.count(r"\caption{") == latex.count(r"\begin{table}") == 1
    assert "weight-norm &" in latex


def test_a_claim_on_a_model_of_ones_own_is_labelled(claim: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = invoke("reproduce", claim, "--jobs", "1", "--seeds", "1", "--model", "residual-mlp", "-o", str(out)).stdout
    assert "model of your own: residual-mlp" in " ".join(said.split())
    page = (out / "claims.html").read_text(encoding="utf-8")
    assert "model residual-mlp in place of the claim" in page
    assert f"gonio reproduce {claim} --model residual-mlp --seeds 1" in page, "a name would not be found"


def test_a_second_call_keeps_the_claims_of_the_first_on_the_page(claim: str, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(CLAIM.replace("tiny", "second"), encoding="utf-8")
    for path in (claim, str(other)):
        assert invoke("reproduce", path, "--jobs", "1", "--seeds", "1", "-o", str(tmp_path / "out")).exit_code == 0
    page = (tmp_path / "out" / "claims.html").read_text(encoding="utf-8")
    assert 'id="tiny"' in page
    assert 'id="second"' in page


@pytest.mark.parametrize(
    ("failed", "refused", "said"),
    [
        (3, 0, "3 of 4 runs failed; rerun the same command to try again\n"),
        (3, 3, "runs that were refused, as they would be again: 3 of 4 runs\n"),
        (3, 1, "2 of 4 runs failed; rerun the same command to try again\n"
         "runs that were refused, as they would be again: 1 of 4 runs\n"),
    ],
)  # fmt: skip
def test_only_what_could_succeed_is_to_be_tried_again(
    failed: int, refused: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one = replace(not_tried(load_claim("bn-imagenet"), ""), planned=4, failed=failed, refused=refused)
    with pytest.raises(typer.Exit, match="4"):
        _check_complete(ClaimResults((one,), {}, ""))
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("status", "error", "refused"),
    [
        ("failed", "NotApplicableError: no layer fits (swap.py:3)", True),
        ("failed", "RuntimeError: out of memory (own.py:7)", False),
        ("failed", None, False),
        ("diverged", "NotApplicableError: x", False),
    ],
)
def test_a_run_that_gonio_refuses_is_told_from_one_that_fails(status: str, error: str | None, refused: bool) -> None:
    assert RunRecord("a", 0, status, error=error).refused is refused  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "content", ["[]", "{", '{"claim": {"name": 3}, "full": true}', '{"claim": {}, "full": 1}', "[" * 9000]
)
def test_a_hostile_claim_beside_a_study_is_one_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "claim.json").write_text(content, encoding="utf-8")
    found = invoke("report", str(tmp_path))
    assert found.exit_code == 3
    assert "its claim.json is not a claim" in " ".join((found.stdout + found.stderr).split())
