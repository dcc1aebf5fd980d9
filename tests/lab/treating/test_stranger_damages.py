"""What the doctor makes of strangers' damages, which no rule was developed on; the list is `stranger_damages.py`."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gonio
from lab.treating.stranger_damages import CASES, Case
from lab.treating.stranger_networks import STRANGERS, base_of, given, healthy, score

RECORD = Path(__file__).with_name("stranger_damages.json")
PAGE = Path(__file__).parents[3] / "docs" / "doctor.md"
POINT = 1.0  # of the score
QUICK = (
    "plain-highest_bit_of_an_exponent",
    "separable-norm_without_its_entries",
    "modern-gain_of_layer_norm_zeroed",
    "dense-truncated_tensor",
    "gated-gates_in_another_order",
)
Row = dict[str, Any]


def bits(model: nn.Module) -> dict[str, bytes]:
    return {
        name: bytes(tensor.detach().clone().reshape(-1).view(torch.uint8).tolist())
        for name, tensor in model.state_dict().items()
    }


def scores(case: Case) -> Row:
    """The scores of one damage, in points."""
    of = {"healthy": score(case.network, healthy(case.network)), "damaged": score(case.network, case.damaged())}
    return {"network": case.network, "damage": case.damage.__name__} | {name: round(x, 2) for name, x in of.items()}


def treated(case: Case) -> Row:
    """What the doctor makes of one damage; the given model stays, and undo gives it back bit for bit."""
    model = case.damaged()
    before = bits(model)
    found = gonio.doctor(model, task=given(case.network), base=copy.deepcopy(base_of(case.network)))
    assert found.model is not None
    told = {
        "treated": round(score(case.network, found.model), 2),
        "found": sorted({finding.code for finding in found.before.findings}),
        "left": sorted({finding.code for finding in found.after.findings}),
        "kept": [step.verb for step in found.kept],
    }
    assert bits(model) == before
    if found.kept:
        found.undo_()
    assert bits(found.model) == before
    return scores(case) | told


def outcome(row: Row) -> str:
    cost, gained = row["healthy"] - row["damaged"], row["treated"] - row["damaged"]
    if gained < -POINT:
        return "worse"
    if not row["found"]:
        return "not found"
    if cost <= POINT:
        return "nothing lost"
    if not row["kept"]:
        return "refused"
    if row["treated"] >= row["healthy"] - POINT:
        return "retrained" if "retrain_" in row["kept"] else "restored"
    return "in part" if row["left"] else "not restored"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_damage_is_one_of_a_healthy_network(case: Case) -> None:
    """The healthy network works, and the damage does not make it better by more than a point."""
    found = scores(case)
    assert found["healthy"] > (80 if case.network != "reader" else -220)
    assert found["damaged"] <= found["healthy"] + POINT


@pytest.mark.parametrize("case", [case for case in CASES if case.name in QUICK], ids=lambda case: case.name)
def test_some_damages_end_as_recorded(case: Case) -> None:
    """The kinds that took a change of the rules, one that they cannot see, and one that they could see before."""
    assert outcome(treated(case)) == outcome(recorded()[case.name])


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.name not in QUICK], ids=lambda case: case.name)
def test_no_treatment_harms(case: Case) -> None:
    assert outcome(treated(case)) != "worse"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("network", [name for name in STRANGERS if name != "reader"])
def test_a_healthy_network_stays_as_it_is(network: str, seed: int) -> None:
    model = copy.deepcopy(healthy(network, seed))
    found = gonio.doctor(model, task=given(network), base=copy.deepcopy(base_of(network, seed)))
    assert not [finding for finding in found.before.findings if finding.level == "error"]
    assert found.model is not None
    assert score(network, found.model) >= score(network, model) - POINT / 2


def recorded() -> dict[str, Row]:
    """The rows that were treated, by case."""
    rows = json.loads(RECORD.read_text())
    return {f"{row['network']}-{row['damage']}": row for row in rows if "treated" in row}


def test_the_page_has_the_recorded_counts() -> None:
    rows = recorded()
    counts = Counter(map(outcome, rows.values()))
    found = len(rows) - counts["not found"]
    said = (
        f"{len({row['damage'] for row in rows.values()})} kinds of damages of {len(STRANGERS)} networks, "
        f"{len(rows)} in all: {found} had a finding, and {found - counts['nothing lost']} of these had lost more than "
        f"a point. {counts['restored']} were restored, {counts['retrained']} retrained, {counts['in part']} repaired "
        f"in part, {counts['not restored']} repaired in part with no finding left, {counts['refused']} refused, and "
        f"{counts['worse']} made worse."
    )
    assert said in " ".join(PAGE.read_text().split()), said


if __name__ == "__main__":
    RECORD.write_text(json.dumps([treated(case) for case in CASES], indent=1) + "\n")
