"""Several models from one base: cosines, signs and what a mean keeps, against references and chance; findings."""

from __future__ import annotations

import csv
import io
import json
import re
from math import sqrt
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from catalog import seeded
from changes.references import agreement
from gonio.errors import InvalidArgumentError
from gonio.measuring import changes, difference, measure
from html_reader import Page


def base() -> dict[str, Tensor]:
    return {"h.0.fc.weight": seeded(30, 40), "h.1.fc.weight": seeded(20, 30, seed=1), "head.bias": seeded(20, seed=2)}


def tuned(seed: int, *, size: float = 0.1, along: float = 0.0) -> dict[str, Tensor]:
    """The base with a random change, part of which all seeds share."""
    made = base()
    for i, name in enumerate(made):
        own, shared = (seeded(*made[name].shape, seed=s + i) for s in (100 * seed, 9000))
        made[name] = made[name] + size * (own + along * shared)
    return made


def test_cosines_signs_and_what_a_mean_keeps_are_those_of_the_reference() -> None:
    models = [tuned(1, along=0.5), tuned(2, along=-0.7, size=0.3), tuned(3)]
    for i, name in enumerate(("h.0.fc.weight", "h.1.fc.weight")):
        models[i][name][:5] = base()[name][:5]  # not changed there: these entries have no sign
    found = changes(base(), *models)
    for name in base():
        exact = agreement([model[name] - base()[name] for model in models])
        row = found[name]
        for mine, theirs in ((row.cosines, exact["cosines"]), (row.signs, exact["signs"])):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), atol=1e-5, rtol=0)
        assert row.kept == pytest.approx(exact["kept"], rel=1e-5)
        assert row.chance == pytest.approx(1 / sqrt(base()[name].numel()))
    flat = [torch.cat([(model[n] - base()[n]).flatten() for n in base()]) for model in models]
    torch.testing.assert_close(
        torch.tensor(found.whole.cosines), torch.tensor(agreement(flat)["cosines"]), atol=1e-5, rtol=0
    )
    assert found.whole.kept == pytest.approx(agreement(flat)["kept"], rel=1e-5)


def test_each_model_has_its_own_differences() -> None:
    found = measure(base(), tuned(1), tuned(2))
    for model, alone in zip(found.models, (tuned(1), tuned(2)), strict=True):
        assert model == difference(base(), alone)
    assert found.names == ("state dict (1)", "state dict (2)")


def test_unrelated_changes_are_at_chance_and_cause_no_finding() -> None:
    spread = []
    for seed in range(1, 25):
        found = changes(base(), tuned(2 * seed), tuned(2 * seed + 1))
        spread.append(found.whole.cosine_mean / found.whole.chance)
        assert found.all_findings == ()
        assert found.whole.kept == pytest.approx(found.whole.kept_random, abs=4 * found.whole.chance)
    assert 0.6 < torch.tensor(spread).std() < 1.4
    assert abs(sum(spread) / 24) < 0.8


def test_changes_that_cancel_are_found() -> None:
    found = changes(base(), tuned(1, along=2.0), tuned(2, along=-2.0), tuned(3))
    assert [finding.code for finding in found.findings] == ["G504"]
    said = found.findings[0].found
    assert re.match(r"the changes of state dict \(1\) and state dict \(2\) have a cosine of -0\.[78]", said)
    assert "their mean keeps" in said
    assert found["h.0.fc"].cosine_min < -0.6
    assert found.whole.kept < found.whole.kept_random


def test_a_model_that_did_not_change_a_tensor_has_no_cosine_there() -> None:
    model = tuned(1)
    model["h.1.fc.weight"] = base()["h.1.fc.weight"]
    found = changes(base(), model, tuned(2), tuned(3))
    row = found["h.1.fc"]
    assert row.cosines[0] == (None, None, None)
    assert row.cosine_mean == row.cosines[1][2]
    assert row.relative[0] == 0
    two = changes(base(), model, tuned(2))
    assert "h.1.fc" not in two
    assert two.whole.entries == 30 * 40 + 20


def test_changes_that_share_no_tensor_are_told_model_by_model() -> None:
    """They were called changes that could not be compared, although each was."""
    unchanged = changes(base(), base(), base())
    assert not unchanged.tensors
    assert "more than one of the 2 models" in unchanged.verdict
    assert unchanged.verdict.count("Nothing changed") == 2
    assert "changed, by" in changes(base(), base(), tuned(1)).verdict


def test_it_prints_exports_and_makes_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    found = changes(base(), tuned(1, along=2.0), tuned(2, along=-2.0))
    text = str(found)
    assert max(map(len, text.splitlines())) <= 90
    assert "Cosines of the changes (by chance 0 ± 0.023):" in text
    assert "warn  G504" in text
    made = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert made["schema"] == "gonio.changes/1"
    assert made["models"][0]["schema"] == "gonio.difference/1"
    assert len(list(csv.DictReader(io.StringIO(found.to_csv())))) == 3
    assert "<script" not in found._repr_html_()
    assert len(Page(found.to_html()).may_run()) == 1
    for html in (found.to_html(), found._repr_html_()):
        page = Page(html)
        assert "Do the changes agree?" in page.text
        assert "G504" in page.text
    assert "| all tensors |" in found.to_markdown()
    assert re.match(r"<h\.0\.fc: mean cosine -0\.[78]", repr(found["h.0.fc"]))


def test_models_files_and_folders_mix(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    start = {k: v.clone() for k, v in model.state_dict().items()}
    for number in (1, 2):
        torch.save({k: v + number * torch.ones_like(v) for k, v in start.items()}, tmp_path / f"{number}.pt")
    found = measure(model, tmp_path / "1.pt", tmp_path / "2.pt")
    assert found.whole.cosine_mean == pytest.approx(1.0, abs=1e-6)
    assert found.whole.kept == pytest.approx(1.0, abs=1e-6)


def test_one_model_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"two models or more with their base; found 1\. Add one\."):
        changes(base(), tuned(1))
    with pytest.raises(InvalidArgumentError, match=r"compares two sources; found a Tensor"):
        measure(base(), tuned(1), torch.ones(2))


def test_the_verdict_counts_findings_of_a_model_in_the_layers_that_changed() -> None:
    start = {"a.weight": torch.eye(4), "b.weight": torch.eye(4)}
    found = measure(start, *({**start, "a.weight": factor * torch.eye(4)} for factor in (9, -9)))
    assert [f.code for f in found.all_findings].count("G502") == 2
    assert "in 1 of 1 changed tensor" in found.verdict
    assert "other tensor" not in found.verdict
