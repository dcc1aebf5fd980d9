"""A zoo of hostile models, state dicts and files: each gets the right verdict, and none a crash or a hang."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from gonio.errors import GonioError
from gonio.measuring import Measurements, measure
from measuring.zoo_files import FILES, STATES
from measuring.zoo_models import MODELS, NAMES, Verdict


def test_the_zoo_has_more_than_120_animals() -> None:
    assert len(MODELS) + len(STATES) + len(FILES) >= 120


def judge(found: Measurements, verdict: Verdict | None) -> None:
    assert all(t.status == "measured" or t.reason for t in found)
    if verdict is None:
        assert len(found) == 0
        return
    row = found[verdict.path]
    assert row.status == verdict.status, row.reason
    assert row.reason.startswith(verdict.reason)
    said = {finding.code: finding.found for finding in found.findings if finding.path == row.path}
    assert ("G001" in said) == (verdict.code == "G001")
    if verdict.code:
        assert verdict.said in said[verdict.code]


def shown(found: Measurements) -> None:
    """Every form is there, with no control character, no live markup, no formula."""
    page, markdown, csv = found.to_html(), found.to_markdown(), found.to_csv()
    texts = [str(found), found.to_json(), csv, markdown, page, found.coverage, repr(found)]
    for text in texts:
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u200b\u202a-\u202e\u2066-\u2069\ud800-\udfff]", text)
    json.loads(texts[1])
    assert "<script" not in page
    assert "<script" not in markdown
    assert 'onmouseover="' not in page
    assert not re.search(r"^[=+@]", csv, re.M)


@pytest.mark.filterwarnings("ignore:.*lazy.*:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", MODELS)
def test_a_hostile_model(name: str) -> None:
    make, verdict = MODELS[name]
    state = torch.get_rng_state()
    model = make()
    torch.set_rng_state(state)
    found = measure(model)
    judge(found, verdict)
    shown(found)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", STATES)
def test_a_hostile_state_dict(name: str) -> None:
    make, verdict = STATES[name]
    found = measure(make())
    judge(found, verdict)
    shown(found)


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file(name: str, tmp_path: Path) -> None:
    make, verdict = FILES[name]
    path: Any = make(tmp_path)
    if isinstance(verdict, str):
        with pytest.raises(GonioError, match=verdict):
            measure(path)
    else:
        found = measure(path)
        judge(found, verdict)
        shown(found)
    assert not (tmp_path / "canary").exists()


def test_every_hostile_name_is_in_a_state_dict_too() -> None:
    found = measure({f"{name}.weight": torch.eye(3) for name in NAMES.values()})
    assert len(found.layers) == len(NAMES)
    shown(found)
