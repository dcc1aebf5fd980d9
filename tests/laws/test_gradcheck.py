"""Law: derivatives agree with finite differences, and a second derivative is right or refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.gradcheck import GradcheckError

from catalog import (
    LAYERS,
    PARAMETRIZATIONS,
    REGULARIZERS,
    LayerCase,
    ParametrizationCase,
    RegularizerCase,
    seeded,
)
from gonio.errors import SecondDerivativeError
from laws.support import clone, law, parametrized, perturbed

Problem = tuple[Callable[..., Tensor], tuple[Tensor, ...]]  # a function and the float64 point to test it at


def layer_problem(case: LayerCase) -> Problem:
    layer = perturbed(case.make()).double()
    names = [name for name, parameter in layer.named_parameters() if parameter.requires_grad]
    point = [dict(layer.named_parameters())[name].detach() for name in names]

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        # A copy: finite differences must not move running statistics.
        return torch.func.functional_call(clone(layer), dict(zip(names, parameters, strict=True)), (x,))

    return function, (seeded(*case.shape, dtype=torch.float64), *point)


def regularizer_problem(case: RegularizerCase) -> Problem:
    return case.make().value, (seeded(*case.shape, dtype=torch.float64),)


def parametrization_problem(case: ParametrizationCase) -> Problem:
    layer = parametrized(case).double()
    return layer.weight_parametrization.forward, (layer._parameters["weight"].detach(),)


def check_first(problem: Problem) -> None:
    function, point = problem
    assert gradcheck(function, tuple(p.requires_grad_() for p in point), fast_mode=True)


def check_second(problem: Problem) -> None:
    """A custom backward either is differentiable itself or says that it is not."""
    function, point = problem
    with contextlib.suppress(SecondDerivativeError):
        assert gradgradcheck(function, tuple(p.requires_grad_() for p in point), fast_mode=True)


SMOOTH = [case for case in REGULARIZERS if case.smooth]


test_layer_gradient = law(lambda case: check_first(layer_problem(case)), LAYERS)
test_layer_second_derivative = law(lambda case: check_second(layer_problem(case)), LAYERS)
test_regularizer_gradient = law(lambda case: check_first(regularizer_problem(case)), SMOOTH)
test_regularizer_second_derivative = law(lambda case: check_second(regularizer_problem(case)), SMOOTH)
test_parametrization_gradient = law(lambda case: check_first(parametrization_problem(case)), PARAMETRIZATIONS)
test_parametrization_second_derivative = law(lambda case: check_second(parametrization_problem(case)), PARAMETRIZATIONS)

# --- negative controls ----------------------------------------------------------------------------


class _Cube(torch.autograd.Function):
    """x^3; `factor` 3 is the right derivative. The backward hides its dependence on x from autograd."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, factor: float) -> Tensor:
        ctx.slope = factor * x.detach() ** 2
        return x**3

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.slope, None


def _cube(factor: float) -> Problem:
    return lambda x: _Cube.apply(x, factor).sum(), (seeded(4, dtype=torch.float64),)


def test_the_law_accepts_plain_torch() -> None:
    layer = LayerCase(name="linear", make=lambda: nn.Linear(3, 2), shape=(2, 3), reference=lambda m, x: m(x))
    check_first(layer_problem(layer))
    check_second(layer_problem(layer))


def test_the_law_refuses_a_wrong_derivative() -> None:
    check_first(_cube(3.0))
    with pytest.raises(GradcheckError, match="Jacobian mismatch"):
        check_first(_cube(2.9))


def test_the_law_refuses_a_silently_wrong_second_derivative() -> None:
    with pytest.raises((RuntimeError, AssertionError), match=r"Jacobian mismatch|not.*grad|Numerical"):
        check_second(_cube(3.0))
