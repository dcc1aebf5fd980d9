"""The bank of files: each verb is right on what other tools write, or refuses it by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from bank.files.case import File, floats, normal
from bank.files.members import CASES
from bank.files.names import pair
from bank.files.verbs import outcomes

pytestmark = pytest.mark.filterwarnings("ignore")  # of the tools
PAGE = Path(__file__).parents[3] / "docs" / "bank-files.json"
WRITTEN = {row["case"]: row for row in json.loads(PAGE.read_text())}
OLDEST = torch.__version__.startswith("2.6.")


def kind(said: str) -> str:
    return said.partition(":")[0]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if c.slow else n for n, c in CASES.items()])
def test_a_file_is_read_right_or_refused_by_name(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    if case.float8 and OLDEST:
        pytest.skip("torch 2.6 cannot index float8 tensors")
    found = outcomes(case.make(tmp_path))
    written = WRITTEN[name]["outcomes"]
    assert {verb: kind(said) for verb, said in found.items()} == {verb: kind(said) for verb, said in written.items()}


def test_the_written_outcomes_are_those_of_the_bank() -> None:
    """`make bank` writes them."""
    assert list(WRITTEN) == list(CASES)
    for name, row in WRITTEN.items():
        assert row["origin"] == CASES[name].origin
        assert {kind(said) for said in row["outcomes"].values()} <= {"right", "refused", "not read", "left"}
        assert not any("/tmp" in said for said in row["outcomes"].values())


STATE = {"a.weight": normal(8, 6), "b.weight": normal(4, 8, seed=1)}
RIGHT = File(source=STATE, weights=floats(STATE))
EQUAL, SPARSE = {"a.weight": torch.full((8, 6), 0.1)}, {"a.weight": torch.ones(2, 2).to_sparse()}
WRONG: dict[str, tuple[File, str]] = {
    "other values": (replace(RIGHT, weights={n: 1.001 * w for n, w in RIGHT.weights.items()}), "deviates"),
    "another shape": (replace(RIGHT, weights={**RIGHT.weights, "a.weight": floats(STATE)["a.weight"].mT}), "a.weight"),
    "a weight that is none": (replace(RIGHT, weights={"a.weight": floats(STATE)["a.weight"]}), "is no weight"),
    "a weight that is absent": (replace(RIGHT, weights={**RIGHT.weights, "c.weight": torch.eye(2).double()}), "no row"),
    "a refusal that is none": (replace(RIGHT, refused={"a.weight": "complex"}), "a.weight was read"),
    "another reason": (File(source=SPARSE, refused={"a.weight": "complex"}), "sparse"),
    "an error that is none": (replace(RIGHT, error="damaged"), "not refused"),
    "a finding": (File(source=EQUAL, weights=floats(EQUAL)), r"G\d\d\d a: "),
    "an adapter that changes more": (
        File(source=pair("a", alpha=torch.tensor(2.0)), base={"a.weight": normal(32, 16)},
             weights=floats({"a.weight": normal(32, 16)})), "deviates"),
    "another layout": (replace(RIGHT, live=nn.ModuleDict({"a": nn.Linear(8, 6), "b": nn.Linear(8, 4)})), "layout of a"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_case_fails(name: str) -> None:
    file, said = WRONG[name]
    assert outcomes(RIGHT)["measure"] == "right: 2 weights"
    with pytest.raises(AssertionError, match=said):
        outcomes(file)
