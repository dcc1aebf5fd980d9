"""The JSON of measurements holds exactly the keys, of exactly the types, that its page lists."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from torch import nn

import gonio
from docs.pages import ROOT
from gonio.measuring import Suppression, difference, measure, outline

ROW = re.compile(r"^\| `(\w+)` \| ([^|]+) \|", flags=re.M)
TYPES = {
    "text": lambda v: isinstance(v, str),
    "integer": lambda v: type(v) is int,
    "number": lambda v: type(v) in (int, float),
    "object": lambda v: isinstance(v, dict),
    "null": lambda v: v is None,
    "list of text": lambda v: isinstance(v, list) and all(isinstance(x, str) for x in v),
    "list of integers": lambda v: isinstance(v, list) and all(type(x) is int for x in v),
    "list of two integers": lambda v: isinstance(v, list) and [type(x) for x in v] == [int, int],
    "list of 180 integers": lambda v: isinstance(v, list) and [type(x) for x in v] == [int] * 180,
    "list of numbers": lambda v: isinstance(v, list) and all(type(x) in (int, float) for x in v),
    "list of objects": lambda v: isinstance(v, list) and all(isinstance(x, dict) for x in v),
}


def documented() -> dict[str, dict[str, str]]:
    """Heading → key → type."""
    page = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
    parts = re.split(r"^##+ (.+)$", page, flags=re.M)[1:]
    return {title: dict(ROW.findall(text)) for title, text in zip(parts[::2], parts[1::2], strict=True)}


def check(found: dict[str, Any], heading: str) -> None:
    expected = documented()[heading]
    assert list(found) == list(expected), heading
    for key, value in found.items():
        kinds = expected[key].strip().split(" or ")
        assert any(TYPES[kind](value) for kind in kinds), f"{heading}: {key} is {expected[key]}, found {value!r}"


@pytest.fixture(scope="module")
def everything() -> dict[str, Any]:
    """A measurement in which every object of the schema has a member, and figures of every kind."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), gonio.nn.SwitchableNorm2d(8), nn.Conv2d(8, 8, 3, groups=8)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 5)),
    )
    x = torch.randn(16, 3, 8, 8)
    model(x)
    with torch.no_grad():
        model.register_buffer("spare", torch.full((2,), float("nan")))  # takes no part in the signal
        model[9].weight[0] = 0
        model[9].weight[1] = 0
    found = measure(model, batch=x, also=("operator_norm",))
    read: dict[str, Any] = json.loads(Suppression(ignore=("G102", "G405")).applied(found, model).to_json())
    return read


def test_measurements(everything: dict[str, Any]) -> None:
    check(everything, "gonio.measurements/1")
    assert everything["schema"] == "gonio.measurements/1"
    for heading in ("tensors", "findings", "signals"):
        assert everything[heading], heading
        for row in everything[heading]:
            check(row, heading)
    check(everything["scale"], "scale")
    check(everything["suppressed"], "suppressed")
    for row in everything["suppressed"]["findings"]:
        check(row, "findings")
    (shares,) = everything["mixtures"].values()
    assert list(shares) == ["mean", "var"]
    assert all(sum(share.values()) == pytest.approx(1) for share in shares.values())
    assert list(everything["versions"]) == ["gonio", "torch", "python"]


def test_every_figure_occurs_in_the_example(everything: dict[str, Any]) -> None:
    """Or else a wrong type in the table would not be seen."""
    for heading in ("tensors", "signals"):
        empty = {key for key in documented()[heading] if all(row[key] is None for row in everything[heading])}
        assert not empty, heading


def test_a_difference() -> None:
    after = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    found = json.loads(difference(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)), after).to_json())
    check(found, "gonio.difference/1")
    assert found["schema"] == "gonio.difference/1"
    for row in found["tensors"]:
        check(row, "tensors of a difference")


def test_an_outline() -> None:
    found = json.loads(json.dumps(outline(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))).to_dict()))
    check(found, "gonio.outline/1")
    assert found["schema"] == "gonio.outline/1"
    for row in found["tensors"]:
        check(row, "tensors of an outline")


def test_a_key_that_is_not_documented_is_found() -> None:
    """Negative control."""
    found = {**dict.fromkeys(documented()["findings"], ""), "more": 1}
    with pytest.raises(AssertionError, match="findings"):
        check(found, "findings")
    with pytest.raises(AssertionError, match="code is text"):
        check({**dict.fromkeys(documented()["findings"], ""), "code": 1}, "findings")
