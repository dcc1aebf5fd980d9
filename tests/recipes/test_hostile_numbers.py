"""Numbers that no training could use are refused before a recipe is applied, for every option of every method."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import gonio
from gonio.errors import InvalidArgumentError, RecipeError
from gonio.nn import angular, magnitude
from gonio.recipes import Recipe
from gonio.recipes.catalogue import Entry, catalogue, objects_of

HUGE = (1e300, -1e300, 1e39, 1e-300, 10**400)


def numbers(entry: Entry) -> Iterator[str]:
    """The options that take a float."""
    yield from (name for name, option in entry.options.items() if "float" in str(option.plain) and name != "factors")


def cases() -> Iterator[Any]:
    for verb in ("init", "parametrize", "penalty"):
        for name, entry in catalogue(verb).items():
            for option in numbers(entry):
                given = {"use": name, **dict.fromkeys(entry.required, 0.01)}
                yield pytest.param(verb, given, option, id=f"{verb} {name} {option}")
    for kind, key in ((magnitude.Magnitude, "magnitude"), (angular.Angular, "angular")):
        for name, entry in objects_of(kind).items():
            for option in numbers(entry):
                yield pytest.param("swap", {"use": "DecoupledConv2d", key: name}, option, id=f"{key} {name} {option}")


def recipe(verb: str, given: dict[str, Any], option: str, value: Any) -> Recipe:
    key = next((key for key in ("magnitude", "angular") if key in given), None)
    rule = {**given, option: value} if key is None else {**given, key: {given[key]: {option: value}}}
    return Recipe.from_dict({"name": "mine", verb: [{"where": "type:Conv2d", **rule}]})


@pytest.mark.parametrize(("verb", "given", "option"), [*cases()])
def test_numbers_without_a_square_in_float32_are_refused_before_a_recipe_is_applied(
    verb: str, given: dict[str, Any], option: str
) -> None:
    recipe(verb, given, option, 1.0)
    for value in HUGE:
        with pytest.raises(RecipeError, match=f"{option}|finite|float"):
            recipe(verb, given, option, value).plan(nn.Sequential(nn.Conv2d(2, 2, 3)))


@pytest.mark.parametrize("value", [1e-12, 1e12])
def test_a_floor_within_them_gives_finite_gradients(value: float) -> None:
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    term = gonio.regularizers.ScaleShift(1.0, floor=value)(weight)
    term.backward()
    assert term.isfinite()
    assert weight.grad is not None
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda R: R.ScaleShift(1.0, floor=1e300), r"ScaleShift\(floor=\) is between 1e-19 and 1e\+19"),
        (lambda R: R.L2(1e10, every=10**10), r"L2\(strength × every=\) is between"),
        (lambda R: R.L2(0.1, every=10**400), r"L2\(every=\) is between .* found a number of over 300 digits"),
        (lambda R: R.NormPower(0.1, power=1e18), r"power=\) must be from 1 to 16"),
        (lambda R: R.SRIP(0.1, iterations=10**9), r"iterations from 1 to 1000"),
        (lambda R: R.SelfOrthogonality(0.1, probes=2**40), r"probes from 2 to 1048576"),
        (lambda R: R.Milestones((1,), (-1.0,)), r"finite factors >= 0; found -1"),
        (lambda R: R.Milestones((1,), (math.nan,)), r"finite factors >= 0; found nan"),
    ],
)
def test_regularizers(make: Any, found: str) -> None:
    with pytest.raises(InvalidArgumentError, match=found):
        make(gonio.regularizers)


@pytest.mark.parametrize(
    ("act", "found"),
    [
        (lambda m, o: gonio.hold_(m, o, radius=1e300), r"hold_\(radius=\) is between"),
        (lambda m, o: gonio.clip_qk_(m, o, limit=1e300), r"clip_qk_\(limit=\) is between"),
        (lambda m, o: gonio.init_(m, gonio.init.he_, bias=1e39), r"init_\(bias=\) is between"),
        (lambda m, o: gonio.nn.project_weights_(m, norm=1e300), r"project_weights_\(norm=\) is between"),
    ],
)
def test_verbs_refuse_them_before_they_change_anything(act: Any, found: str) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    before = model[0].weight.detach().clone()
    with pytest.raises(InvalidArgumentError, match=found):
        act(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert torch.equal(model[0].weight, before)
