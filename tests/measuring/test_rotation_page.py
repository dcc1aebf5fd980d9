"""The page of a training: why rotations differ from predictions, advice, and its markup."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import nn

import gonio
from gonio.errors import InvalidArgumentError
from gonio.measuring import Equilibrium
from gonio.measuring.showing.training import training_page
from gonio.measuring.training.advice import advice, layer_rotations
from gonio.pages.tables import number
from html_reader import Page
from measuring.nets import tracked


def rows(layer: str, rotations: list[float], predicted: float | None = None, rates: Any = 0.1) -> list[dict[str, Any]]:
    rates = rates if isinstance(rates, list) else [rates] * len(rotations)
    more = {} if predicted is None else {"predicted_rotation": predicted}
    return [
        {"step": 10 * i, "layer": layer, "rotation": rotation, "learning_rate": rate, **more}
        for i, (rotation, rate) in enumerate(zip(rotations, rates, strict=True), 1)
    ]


CAUSES = {
    "fits": "fits",
    "not scale-": "not invariant",
    "not known ": "not traced",
    "not settle": "not settled",
    "schedule: ": "schedule",
    "gradients ": "correlated",
}


@pytest.mark.parametrize(
    ("rotation", "invariant", "steps", "rates", "reason"),
    [
        (0.011, {"a"}, 10, 0.1, "fits"),
        (0.011, set(), 10, 0.1, "fits"),
        (0.05, set(), 10, 0.1, "not scale-invariant: no normalisation layer directly after it"),
        (0.05, None, 10, 0.1, "not known to be scale-invariant: the model cannot be traced"),
        (0.05, {"a"}, 500, 0.1, "not settled: it takes about 1000 steps"),
        (0.05, {"a"}, 30, [0.2] * 18 + [0.1] * 2, "schedule: the learning rate changed within the last 30 steps"),
        (0.05, {"a"}, 30, [0.2] * 10 + [0.1] * 10, "gradients of different steps are correlated: noise does not"),
    ],
)
def test_why_a_rotation_differs(rotation: float, invariant: Any, steps: float, rates: Any, reason: str) -> None:
    known = None if invariant is None else frozenset(invariant)
    (found,) = layer_rotations(rows("a", [rotation] * 20, 0.01, rates), known, {"a": Equilibrium(0.01, steps)})
    assert found.reason.startswith(reason)
    assert found.cause == CAUSES[reason[:10]]
    assert found.ratio == pytest.approx(rotation / 0.01)


def test_without_a_prediction_its_reason_is_given() -> None:
    (found,) = layer_rotations(rows("a", [0.1]), None, {"a": Equilibrium(None, reason="no weight decay")})
    assert (found.predicted, found.ratio, found.reason) == (None, None, "no weight decay")


def test_the_later_half_counts() -> None:
    (found,) = layer_rotations(rows("a", [9.0, 9.0, 0.3, 0.4], 0.1), None, {})
    assert found.rotation == pytest.approx((0.125) ** 0.5)


def said(found: list[dict[str, Any]], **predictions: Equilibrium) -> list[str]:
    return advice(layer_rotations(found, frozenset(predictions), predictions), found)


def test_layers_that_turn_unevenly() -> None:
    even = rows("a", [0.01] * 4) + rows("b", [0.02] * 4) + rows("c", [0.05] * 4)
    assert said(even) == []
    assert said(even + rows("d", [0.5] * 4))[0].startswith("d turns 14 times as fast as the median layer")
    assert said(even + rows("d", [0.001] * 4))[0].startswith("d turns 15 times as slowly as the median")


def test_decay_that_does_nothing() -> None:
    found = rows("a", [0.1] * 4, 0.01)
    assert said(found, a=Equilibrium(0.01, 1e5))[0].startswith("Weight decay does nothing yet for a: the norms")
    assert said(found, a=Equilibrium(0.01, 1.0)) == []


def test_a_warm_up_that_is_too_short() -> None:
    assert said(rows("a", [0.5, 0.5] + [0.05] * 18))[0].startswith("Layers turned 10 times as fast in the first tenth")
    assert said(rows("a", [0.01] * 2 + [0.05] * 18)) == []
    assert said(rows("a", [0.5, 0.5] + [0.05] * 18, rates=[1.0] * 2 + [0.1] * 18)) == [], "a larger rate explains it"


def test_a_held_layer_at_rate_0_does_not_turn_and_the_page_says_why() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    rest = [*model[1].parameters(), *model[2].parameters()]
    optimizer = torch.optim.SGD([{"params": model[0].parameters(), "lr": 0.0}, {"params": rest}], lr=0.1)
    gonio.hold_(model, optimizer, where="0", step="fixed")
    tracker = gonio.Tracker(model, optimizer=optimizer, every=1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    (found,) = (row for row in tracker.rotations if row.layer == "0")
    assert (found.predicted, found.reason) == (None, "the learning rate is 0")
    assert found.reason in tracker.to_html()


def test_the_page() -> None:
    bare = tracked(steps=0)
    assert bare._repr_html_() is None
    with pytest.raises(InvalidArgumentError, match=r"shows steps of an optimizer; found no row of one"):
        bare.to_html()
    tracker = tracked(steps=8)
    page = tracker.to_html()
    assert "<h1>How this training turned</h1>" in page
    assert "Steps 2 to 8." in page
    assert not re.search(r"https?://|nan|inf\b", Page(page).text)
    assert [row.layer for row in tracker.rotations] == ["0", "3"]
    for row in tracker.rotations:
        assert row.reason in page
    assert page.count("<svg") == 2 + 2  # curves over time, and two lanes over depth
    fragment = tracker._repr_html_()
    assert fragment.startswith('<div class="gonio">')


def test_angles_are_in_degrees_and_the_verdict_comes_first() -> None:
    tracker = tracked(steps=6)
    page = tracker.to_html()
    assert page.index('class="verdict"') < page.index('class="note"')
    assert f"<td>{number(math.degrees(tracker.rotations[0].rotation))}</td>" in page


def test_a_reason_that_all_layers_share_is_said_once() -> None:
    measured = [row for layer in "abc" for row in rows(layer, [0.05] * 10, 0.01)]
    expected = dict.fromkeys("abc", Equilibrium(0.01, 5.0))
    page = training_page(measured, layer_rotations(measured, None, expected), whole=True)
    assert page.count("the model cannot be traced") == 1
    assert "All layers: not known to be scale-invariant" in page


def test_the_reason_of_a_prediction_is_no_cause() -> None:
    """A registered optimizer may say what it likes: its words decide no advice."""
    (found,) = layer_rotations(rows("a", [0.1] * 4), None, {"a": Equilibrium(None, reason="not settled, fits")})
    assert (found.cause, found.reason) == ("no prediction", "not settled, fits")
