"""The pages of the documentation are those that the committed results give."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from docs.pages import ROOT, builder_of
from gonio.lab.claims import claim_names, load_claim
from gonio.lab.claims.fairness import obstacle
from gonio.lab.showing.claims import claims_csv


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    return builder_of("build_claims")


def test_the_pages_are_up_to_date(builder: ModuleType) -> None:
    stale = [path.name for path, text in builder.pages().items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run python docs/build_claims.py"


def test_every_claim_has_its_place_and_every_picture_is_shown() -> None:
    pages = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "claims").glob("*.md")}
    headings = [name for text in pages.values() for name in re.findall(r"^## (\S+)$", text, flags=re.M)]
    assert sorted(headings) == sorted(claim_names())
    shown = {name for text in pages.values() for name in re.findall(r"images/(\S+)\.svg", text)}
    assert shown == {path.stem for path in (ROOT / "docs" / "claims" / "images").glob("*.svg")}


@pytest.mark.slow
def test_a_changed_number_makes_a_page_stale(
    builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = json.loads(builder.RESULTS.read_text(encoding="utf-8"))
    scores = next(row for row in whole["claims"] if row["plan"])["runs"]["scores"]
    scores[next(iter(scores))]["0"] += 1.0
    (tmp_path / "full.json").write_text(json.dumps(whole), encoding="utf-8")
    monkeypatch.setattr(builder, "RESULTS", tmp_path / "full.json")
    assert any(path.read_text(encoding="utf-8") != text for path, text in builder.pages().items())


def test_a_claim_of_equality_shows_its_effect(builder: ModuleType) -> None:
    """In the table of all claims and in the Chinese one, whatever its verdict."""
    same = [name for name, one in builder.committed.findings().items() if one.claim.direction == "same"]
    assert len(same) >= 5
    for page in ("docs/claims/README.md", "docs/zh/claims.md"):
        rows = (ROOT / page).read_text(encoding="utf-8").splitlines()
        shown = {name: next(row for row in rows if f"#{name})" in row) for name in same}
        figure = re.compile(r"[+−][\d.e-]+ .*\([+−]|\b0 \S+ ?\((?:within|不超过) ±1e-9\)")
        assert [name for name, row in shown.items() if not figure.search(row)] == []
        assert [row for row in rows if re.search(r"e-1\d (?:%|points)", row)] == [], "rounding is no effect"


def test_the_two_studies_of_decoupled_operators_name_each_other() -> None:
    names = ("claims/decoupled.md", "howto/decoupled-evidence.md")
    claims, study = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in names)
    assert "../howto/decoupled-evidence.md" in claims
    assert "../claims/decoupled.md#operator-grid" in study


def test_the_page_of_corrections_names_tests_and_claims_that_exist(builder: ModuleType) -> None:
    text, chinese = (
        (ROOT / "docs" / folder / "corrections.md").read_text(encoding="utf-8") for folder in ("claims", "zh")
    )
    assert re.findall(r"`(test_\w+)`", chinese) == re.findall(r"`(test_\w+)`", text)
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) >= 25
    assert [name for name in sorted(named) if f"def {name}(" not in sources] == []
    linked = re.findall(r"\(([\w-]+)\.md#([\w-]+)\)", text)
    assert linked
    assert [name for page, name in linked if builder.committed.PAGE[load_claim(name).seed] != page] == []


def test_the_verdicts_follow_from_the_committed_contrasts(builder: ModuleType) -> None:
    """Judged again by the rules of now, every committed claim has the verdict and the reason that are stored."""
    stored = json.loads(builder.RESULTS.read_text(encoding="utf-8"))["claims"]
    whole = builder.committed.results()
    assert [(one.evidence.verdict, one.evidence.reason) for one in whole.results] == [
        (row["evidence"]["verdict"], row["evidence"]["reason"]) for row in stored
    ]
    for one in whole.tried:
        assert list(one.values.values()) == pytest.approx(list(one.evidence.values))
        fair = one.evidence.verdict != "not a fair test"
        assert fair is not bool(obstacle(one.claim, one.setting, one.runs))


def test_only_a_claim_of_field_scope_is_reproduced_or_contradicted() -> None:
    words = re.compile(r"\| (identity|mechanism|small) \| (reproduced|contradicted|no useful effect) \|")
    for page in ("README.md", "docs/claims/README.md", "docs/index.md"):
        assert not words.search((ROOT / page).read_text(encoding="utf-8"))


def test_a_claim_of_its_own_run_replaces_its_older_result(
    builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = builder.committed.results()
    one = whole.tried[0]
    alone, rest = (
        replace(whole, results=tuple(each for each in whole.results if (each is one) is mine)) for mine in (True, False)
    )
    (tmp_path / "one.json").write_text(builder.claims_json(alone), encoding="utf-8")
    (tmp_path / "full.json").write_text(builder.claims_json(rest), encoding="utf-8")
    monkeypatch.setattr(builder, "RESULTS", tmp_path / "full.json")
    builder.add([tmp_path / "one.json"])
    current = tuple(each for each in whole.results if builder.committed.is_current(each))
    assert builder.committed.results(tmp_path / "full.json").results == current
    (tmp_path / "one.json").write_text(builder.claims_json(replace(alone, versions={"torch": "1.0"})), encoding="utf-8")
    with pytest.raises(SystemExit, match="run the whole catalogue"):
        builder.add([tmp_path / "one.json"])


def test_a_result_of_another_experiment_is_not_shown(builder: ModuleType, tmp_path: Path) -> None:
    whole = builder.committed.results()
    one = whole.tried[0]
    assert builder.committed.is_current(one)
    changed = replace(one, claim=one.claim.model_copy(update={"sesoi": 2 * one.claim.sesoi}))
    assert not builder.committed.is_current(changed)
    (tmp_path / "full.json").write_text(builder.claims_json(replace(whole, results=(changed,))), encoding="utf-8")
    assert builder.committed.findings(tmp_path / "full.json") == {}


def test_the_csv_states_differences_of_percentages_in_points(builder: ModuleType) -> None:
    rows = list(csv.DictReader(io.StringIO(claims_csv(builder.committed.results()))))
    units = {row["unit"] for row in rows}
    assert "points" in units
    assert "%" not in units
