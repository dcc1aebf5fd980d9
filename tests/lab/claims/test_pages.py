"""The pages of the documentation are those that the committed results give."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from docs.pages import ROOT, builder_of
from gonio.lab.claims import claim_names, load_claim


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


def test_a_changed_number_makes_a_page_stale(
    builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in builder.RESULTS.glob("*.json"):
        text = path.read_text(encoding="utf-8").replace('"direction": "smaller"', '"direction": "larger"')
        (tmp_path / path.name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(builder, "RESULTS", tmp_path)
    assert any(path.read_text(encoding="utf-8") != text for path, text in builder.pages().items())


def test_a_claim_of_equality_shows_its_effect(builder: ModuleType) -> None:
    """In the table of all claims and in the Chinese one, whatever its verdict."""
    found, _ = builder._findings()
    same = [name for name, one in found.items() if one.claim.direction == "same"]
    assert len(same) >= 10
    for page in ("docs/claims/README.md", "docs/zh/claims.md"):
        rows = (ROOT / page).read_text(encoding="utf-8").splitlines()
        shown = {name: next(row for row in rows if f"#{name})" in row) for name in same}
        assert [name for name, row in shown.items() if not re.search(r"[+−][\d.e-]+ .*\([+−]", row)] == []


def test_the_two_studies_of_decoupled_operators_name_each_other() -> None:
    claims, study = (
        (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("claims/003.md", "howto/decoupled-evidence.md")
    )
    assert "../howto/decoupled-evidence.md" in claims
    assert "../claims/003.md#operator-grid" in study


def test_the_page_of_corrections_names_tests_and_claims_that_exist() -> None:
    text, chinese = (
        (ROOT / "docs" / folder / "corrections.md").read_text(encoding="utf-8") for folder in ("claims", "zh")
    )
    assert re.findall(r"`(test_\w+)`", chinese) == re.findall(r"`(test_\w+)`", text)
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) >= 25
    assert [name for name in sorted(named) if f"def {name}(" not in sources] == []
    linked = re.findall(r"\((\d+)\.md#([\w-]+)\)", text)
    assert linked
    assert [name for seed, name in linked if load_claim(name).seed != seed] == []


def test_the_verdicts_follow_from_the_committed_contrasts(builder: ModuleType) -> None:
    whole = builder.from_data(json.loads((builder.RESULTS / "full.json").read_text(encoding="utf-8")))
    stored = json.loads((builder.RESULTS / "full.json").read_text(encoding="utf-8"))["claims"]
    assert [one.verdict for one in whole.results] == [row["judgement"]["verdict"] for row in stored]
    assert all(list(one.values.values()) == pytest.approx(list(one.evidence.values)) for one in whole.tried)


def test_a_claim_of_its_own_run_joins_the_full_run(
    builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (builder.RESULTS / "full.json").read_text(encoding="utf-8")
    whole = builder.from_data(json.loads(text))
    one = next(found for found in whole.results if found.verdict == "reproduced")
    alone = builder.from_data(builder.as_data(replace(whole, results=(one,))))
    assert alone.results[0].evidence.p_holm < one.evidence.p_holm
    (tmp_path / "one.json").write_text(builder.claims_json(alone), encoding="utf-8")
    rest = replace(whole, results=tuple(found for found in whole.results if found is not one))
    (tmp_path / "full.json").write_text(builder.claims_json(rest), encoding="utf-8")
    monkeypatch.setattr(builder, "RESULTS", tmp_path)
    builder.add(tmp_path / "one.json")
    assert builder.from_data(json.loads((tmp_path / "full.json").read_text(encoding="utf-8"))) == whole
    (tmp_path / "one.json").write_text(builder.claims_json(replace(alone, versions={"torch": "1.0"})), encoding="utf-8")
    with pytest.raises(SystemExit, match="run the whole catalogue"):
        builder.add(tmp_path / "one.json")
