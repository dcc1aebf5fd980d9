"""Findings that are suppressed are out of the findings, counted and shown; what suppresses nothing is said."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from gonio.errors import InvalidArgumentError, UnknownNameError
from gonio.measuring import Measurements, Suppression, measure
from report.html_reader import Page


def model() -> nn.Sequential:
    """A zero layer, a zero head of two layers, and a batch norm that reads batches of one sample."""
    head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    made = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), head)
    for layer in (made[0], *head):
        nn.init.zeros_(layer.weight)
    return made


def found(ignore: tuple[str, ...] = (), *per_layer: tuple[str, tuple[str, ...]]) -> Measurements:
    made = model()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(8, 6)), batch_size=2)
    return Suppression(ignore, per_layer, "gonio.toml").applied(measure(made, loader=loader), made)


def places(measured: Measurements) -> list[tuple[str, str]]:
    return [(f.code, f.path) for f in measured.findings]


EVERYTHING = [("G401", ""), ("G101", "0"), ("G101", "2.0"), ("G101", "2.1")]


@pytest.mark.parametrize(
    ("ignore", "per_layer", "left"),
    [
        ((), [], EVERYTHING),
        (("G101",), [], [("G401", "")]),
        (("g101", "G401"), [], []),
        ((), [("2.*", ("G101",))], EVERYTHING[:2]),
        ((), [("re:[02]", ("G101",))], [("G401", ""), *EVERYTHING[2:]]),
        ((), [("type:Linear", ("G101",))], [("G401", "")]),
        ((), [("type:Conv2d", ("G101",))], EVERYTHING),
        ((), [("*", ("G101", "G401"))], [("G401", "")]),  # the model as a whole is no layer
        (("G301",), [("0", ("G102",))], EVERYTHING),
    ],
)
def test_what_is_suppressed_is_no_finding(ignore: tuple[str, ...], per_layer: list, left: list) -> None:
    measured = found(ignore, *per_layer)
    assert places(measured) == left
    assert measured.suppressed is not None
    dropped = [(f.code, f.path) for f in measured.suppressed.findings]
    assert sorted([*left, *dropped]) == sorted(EVERYTHING)


def test_what_suppresses_nothing_is_named() -> None:
    measured = found(("G101", "G405"), ("2.*", ("G101", "G102")), ("hed.*", ("G101",)))
    assert measured.suppressed is not None
    assert measured.suppressed.unmatched == ("G405", "G102 for 2.*", "G101 for hed.*")


def test_every_output_says_it() -> None:
    measured = found(("G101", "G405"))
    count = "3 findings suppressed by gonio.toml"
    unmatched = "Not found, though gonio.toml suppresses it: G405."
    page = Page(measured.to_html()).text
    for shown in (str(measured), measured.to_markdown(), page):
        assert count in shown
        assert unmatched in " ".join(shown.split())
    assert "2.1: every value is 0" in page
    read = json.loads(measured.to_json())
    assert read["suppressed"]["by"] == "gonio.toml"
    assert [f["path"] for f in read["suppressed"]["findings"]] == ["0", "2.0", "2.1"]
    assert read["suppressed"]["unmatched"] == ["G405"]
    assert len(read["findings"]) == 1
    assert json.loads(measure(model()).to_json())["suppressed"] is None
    assert "suppressed" not in str(measure(model()))


def test_a_checkpoint_has_paths_but_no_types() -> None:
    state = {"head.weight": torch.zeros(3, 3), "head.bias": torch.tensor([float("nan")])}
    quiet = Suppression(per_layer=[("head", ("G101", "G001"))]).applied(measure(state))
    assert quiet.findings == ()
    assert len(Suppression(per_layer=[("head.bias", ("G001",))]).applied(measure(state)).findings) == 1
    typed = Suppression(per_layer=[("type:Linear", ("G101",))]).applied(measure(state))
    assert len(typed.findings) == 2
    assert typed.suppressed is not None
    assert typed.suppressed.unmatched == ("G101 for type:Linear",)


def test_a_code_or_selector_that_is_none_is_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"no rule named 'G10'\. Did you mean G10"):
        Suppression(("G10",))
    with pytest.raises(UnknownNameError, match="no rule named 'E501'"):
        Suppression(per_layer=[("head", ("E501",))])
    with pytest.raises(InvalidArgumentError, match="regular expression"):
        Suppression(per_layer=[("re:(", ("G101",))])
