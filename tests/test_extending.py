"""Mistakes in methods of the user's own, written after `docs/extending`, are refused in one sentence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import gonio
from gonio import parametrizations as P
from gonio import regularizers as R
from gonio.errors import InvalidArgumentError
from gonio.nn import magnitude


@dataclass(frozen=True, kw_only=True)
class Returning(R.WeightRegularizer):
    what: Any = None

    def _evaluate(self, weight: Any, layout: Any, state: Any) -> Any:
        return self.what(weight)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda w: None, "found None"),
        (lambda w: w.square().sum(), r"found tensor\(.*Return gonio\.regularizers\.Evaluation\(value\)"),
        (lambda w: R.Evaluation(1.0), r"found an Evaluation of 1\.0"),
        (lambda w: R.Evaluation(w.square()), r"found an Evaluation of a tensor of the shape \(3, 4\)"),
        (lambda w: R.Evaluation(torch.tensor(3)), r"found an Evaluation of tensor\(3\)"),
    ],
)
def test_a_regularizer_that_returns_something_else_is_refused(what: Any, message: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    asked = rf"Returning\._evaluate\(\) returns an Evaluation of a floating-point scalar; {message}"
    with pytest.raises(InvalidArgumentError, match=asked):
        gonio.Penalty(model, [(nn.Linear, Returning(0.1, what=what))])()
    good = gonio.Penalty(model, [(nn.Linear, Returning(0.1, what=lambda w: R.Evaluation(w.square().sum())))])
    assert good().item() == pytest.approx(0.1 * model[0].weight.square().sum().item())


@pytest.mark.parametrize("what", [lambda w: w.detach().square().sum(), lambda w: torch.tensor(w.square().sum().item())])
def test_a_regularizer_without_a_gradient_is_refused(what: Any) -> None:
    """Beside other terms of the loss it would have had no effect, without a word."""
    model = nn.Sequential(nn.Linear(4, 3))
    penalty = gonio.Penalty(model, [(nn.Linear, Returning(0.1, what=lambda w: R.Evaluation(what(w))))])
    with pytest.raises(InvalidArgumentError, match=r"autograd traces to the weight; found a value without a gradient"):
        penalty()
    with torch.no_grad():
        assert penalty().item() == pytest.approx(0.1 * model[0].weight.square().sum().item())


class Twice(P.Parametrization):
    options = ("factor",)

    def __init__(self, factor: Any = 2.0, forward: Any = None, back: Any = None) -> None:
        super().__init__()
        self.factor, self.forward_, self.back = factor, forward, back

    def weight_of(self, raw: torch.Tensor) -> torch.Tensor:
        return self.forward_(raw) if self.forward_ else raw * self.factor

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return self.back(weight) if self.back else weight / self.factor

    def holds(self, weight: torch.Tensor) -> bool:
        return True


def run_with(model: nn.Module, own: P.Parametrization) -> None:
    gonio.parametrize_(model, own)
    model(torch.ones(1, 4))


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (Twice(forward=lambda raw: None), r"Twice\.weight_of\(\) returns a tensor; found None"),
        (Twice(forward=lambda raw: raw[:2]), r"of the shape \(3, 4\) and dtype torch\.float32; found \(2, 4\)"),
        (Twice(forward=lambda raw: raw.double()), r"weight_of\(\) returns .*; found \(3, 4\) and torch\.float64"),
        (Twice(back=lambda weight: None), r"Twice\.right_inverse\(\) returns a tensor; found None"),
        (Twice(back=lambda weight: weight[:1]), r"right_inverse\(\) returns .* found \(1, 4\)"),
        (Twice(torch.ones(4)), r"options names attributes that are plain numbers or strings; found factor=tensor"),
    ],
)
def test_a_parametrization_that_returns_something_else_is_refused(own: P.Parametrization, message: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(InvalidArgumentError, match=message):
        run_with(model, own)


def test_an_option_without_an_attribute_is_refused() -> None:
    class Missing(Twice):
        options = ("factor", "speed")

    model = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(InvalidArgumentError, match=r"Missing\.options names .*; found no 'speed'\. Set it in __init__"):
        gonio.parametrize_(model, Missing())
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("wrong", ["learn", "positive"])
def test_a_magnitude_that_names_no_coefficient_is_refused(wrong: str) -> None:
    @dataclass(frozen=True)
    class Learned(magnitude.Magnitude):
        learn_speed: bool = field(default=True, kw_only=True)

        def slope(self, norm: Any, *, alpha: Any) -> Any:
            return alpha

    @dataclass(frozen=True)
    class Positive(magnitude.Magnitude):
        positive = ("speed",)

        def slope(self, norm: Any, *, alpha: Any) -> Any:
            return alpha

    with pytest.raises(InvalidArgumentError, match=r"learn_NAME and `positive` name coefficients.*; found speed\."):
        {"learn": Learned, "positive": Positive}[wrong]()
