"""Live models that others write: every verb gives the same function, or works, or refuses in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gonio
from bank.live.case import Case
from bank.live.cases import CASES
from bank.live.verbs import VERBS, Verb, outcomes
from catalog import seeded
from docs.pages import builder_of

DOCS = Path(__file__).parents[3] / "docs"
LIBRARIES = ("timm", "transformers")  # whose outcomes may differ between their versions


def written() -> dict[str, dict[str, str]]:
    rows = json.loads((DOCS / "bank-live.json").read_text(encoding="utf-8"))
    return {row["case"]: row["outcomes"] for row in rows}


def kinds(found: dict[str, str]) -> dict[str, str]:
    return {verb: said.partition(":")[0] for verb, said in found.items()}


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name, marks=() if c.quick else pytest.mark.slow) for c in CASES])
def test_every_verb_keeps_its_promise_or_refuses(case: Case) -> None:
    found = outcomes(case)
    assert {verb: said for verb, said in found.items() if said.startswith("fault")} == {}
    if case.origin not in LIBRARIES:
        assert kinds(found) == kinds(written()[case.name]), "run make bank"


def test_the_bank_is_as_large_as_it_says_and_its_page_is_current() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) >= 150
    assert sum(case.origin == "timm" for case in CASES) >= 60
    assert sum(case.origin == "transformers" for case in CASES) >= 40
    rows = written()
    own = {case.name for case in CASES if case.origin not in LIBRARIES}  # of the libraries' models it may have a part
    assert own <= set(rows) <= set(names), "run make bank"
    assert len(rows) >= 150
    assert all({"fresh", *(verb.name for verb in VERBS)} == set(row) for row in rows.values()), "run make bank"
    assert not [said for row in rows.values() for said in row.values() if said.startswith("fault")]
    builder = builder_of("build_bank")
    assert builder.PAGE.read_text(encoding="utf-8") == builder.page(), "run python docs/build_bank.py"


# --- negative controls ------------------------------------------------------------------------------


def pair() -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), seeded(3, 4)


def outcome(verb: Verb, make: Any = pair) -> str:
    return outcomes(Case("control", "control", make), (verb,))[verb.name]


class Undone:
    def undo_(self) -> None:
        pass


def scaled(model: nn.Module, x: Any) -> Undone:
    with torch.no_grad():
        model[0].weight.mul_(2)
    return Undone()


def refused(model: nn.Module, message: str, change: float = 1.0) -> None:
    with torch.no_grad():
        model[0].weight.mul_(change)
    raise gonio.errors.GonioError(message)


def test_a_changed_function_is_found() -> None:
    assert outcome(Verb("v", scaled, same=True)).startswith("fault: Fault: the function changed by ")


def test_an_undo_that_leaves_something_is_found() -> None:
    assert "fault: AssertionError: '0.weight' has other values after undo" in outcome(Verb("v", scaled))


def test_an_error_of_torch_is_found() -> None:
    assert outcome(Verb("v", lambda m, x: m(x[:, :2]))).startswith("fault: RuntimeError: mat1 and mat2")


def test_a_refusal_that_changes_the_model_or_has_several_sentences_on_lines_is_found() -> None:
    assert outcome(Verb("v", lambda m, x: refused(m, "no"))) == "refused: no"
    assert "no single sentence" in outcome(Verb("v", lambda m, x: refused(m, "no\nno")))
    assert "has other values after undo" in outcome(Verb("v", lambda m, x: refused(m, "no", 2.0)))


def test_a_finding_on_a_fresh_model_is_found() -> None:
    def dead() -> tuple[nn.Module, Any]:
        model, x = pair()
        nn.init.zeros_(model[0].weight[0])
        return model, x

    found = outcomes(Case("control", "control", dead), ())["fresh"]
    assert found.startswith("fault: Fault: G102 0: 1 of 4 filters is 0")
