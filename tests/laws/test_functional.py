"""Law: torch.func sees the same derivatives as autograd, or is refused loudly.

An opaque operator gives a silent zero under jvp and an unrelated error under vmap; a library whose
layers meet ensembles and meta-learning must do better.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from catalog import PARAMETRIZATIONS, REGULARIZERS, ParametrizationCase, RegularizerCase, seeded
from gonio.errors import SecondDerivativeError
from laws.support import MODULES, ModuleCase, assert_near, clone, control, over, parametrized
from tolerances import exact

Problem = tuple[Callable[[Tensor], Tensor], Tensor]  # a scalar function and a float64 point
REFUSALS = ("setup_context", "vmap", "jvp", "forward AD", "second derivative of", "not supported", "not implemented")


def module_problem(case: ModuleCase) -> Problem:
    module = case.make().double()
    x = seeded(*case.shape, dtype=torch.float64)
    cotangent = seeded(*clone(module)(x).shape, seed=7, dtype=torch.float64)

    def function(x: Tensor) -> Tensor:
        return (clone(module)(x) * cotangent).sum()  # a copy: running statistics must not move here

    return function, x


def regularizer_problem(case: RegularizerCase) -> Problem:
    return case.make().value, seeded(*case.shape, dtype=torch.float64)


def parametrization_problem(case: ParametrizationCase) -> Problem:
    layer = parametrized(case).double()
    raw = layer._parameters["weight"].detach()
    cotangent = seeded(*raw.shape, seed=7, dtype=torch.float64)
    return lambda raw: (layer.weight_parametrization(raw) * cotangent).sum(), raw


def expected_gradient(problem: Problem) -> Tensor:
    function, point = problem
    point = point.clone().requires_grad_()
    return torch.autograd.grad(function(point), point)[0]


def refused(work: Callable[[], Tensor]) -> Tensor | None:
    """The result, or None if a transform was refused in words that say so."""
    try:
        return work()
    except (RuntimeError, NotImplementedError) as error:
        if not any(word in str(error) for word in REFUSALS):
            raise
        return None


def check_grad(problem: Problem) -> None:
    function, point = problem
    found = refused(lambda: torch.func.grad(function)(point))
    if found is not None:
        assert_near(found, expected_gradient(problem), torch.float64, kind=exact, what="torch.func.grad")


def check_jvp(problem: Problem) -> None:
    function, point = problem
    tangent = seeded(*point.shape, seed=9, dtype=torch.float64)
    expected = (expected_gradient(problem) * tangent).sum()
    found = refused(lambda: torch.func.jvp(function, (point,), (tangent,))[1])
    if found is not None:
        assert_near(found, expected, torch.float64, what="torch.func.jvp")


def check_vmap(problem: Problem) -> None:
    function, point = problem
    points = torch.stack([point, 2 * point, point.flip(0)])
    found = refused(lambda: torch.func.vmap(function)(points))
    if found is not None:
        expected = torch.stack([function(p) for p in points])
        assert_near(found, expected, torch.float64, what="torch.func.vmap")


CHECKS = [check_grad, check_jvp, check_vmap]
each = pytest.mark.parametrize("check", CHECKS, ids=["grad", "jvp", "vmap"])


@pytest.mark.matrix("func")
@each
@over([case for case in MODULES if not case.couples_batch])
def test_module(case: ModuleCase, check: Callable[[Problem], None]) -> None:
    check(module_problem(case))


@pytest.mark.matrix("func")
@each
@over(REGULARIZERS)
def test_regularizer(case: RegularizerCase, check: Callable[[Problem], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """None is refused: a transform gets the plain form."""
    monkeypatch.setattr("laws.test_functional.REFUSALS", ())
    check(regularizer_problem(case))


@pytest.mark.matrix("func")
@over([case for case in REGULARIZERS if case.smooth])
def test_second_derivatives_of_a_regularizer(case: RegularizerCase) -> None:
    """Forward over reverse, as `torch.func.hessian`; or a refusal in one sentence."""
    function, point = regularizer_problem(case)
    if type(case.make()).__name__ == "SRIP":
        with pytest.raises(SecondDerivativeError, match="the vector of the power iteration is held fixed"):
            torch.func.hessian(function)(point)
        return
    found = torch.func.hessian(function)(point)
    expected = torch.autograd.functional.hessian(function, point)
    assert_near(found, expected, torch.float64, what="hessian")


@pytest.mark.matrix("func")
@each
@over(PARAMETRIZATIONS)
def test_parametrization(case: ParametrizationCase, check: Callable[[Problem], None]) -> None:
    check(parametrization_problem(case))


# --- negative controls ----------------------------------------------------------------------------


class _WrongTangent(torch.autograd.Function):
    """x^2 with a forward-mode derivative of zero, as an opaque operator has."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad

    @staticmethod
    def jvp(ctx: torch.autograd.function.FunctionCtx, tangent: Tensor) -> Tensor:
        return torch.zeros_like(tangent)


def test_the_laws_accept_a_plain_linear_layer() -> None:
    problem = module_problem(control())
    for check in CHECKS:
        check(problem)


def test_the_law_refuses_a_silent_zero() -> None:
    problem = (lambda x: _WrongTangent.apply(x).sum(), seeded(3, dtype=torch.float64))
    check_grad(problem)
    with pytest.raises(AssertionError, match=r"torch\.func\.jvp differs"):
        check_jvp(problem)


def test_the_law_refuses_an_unrelated_error() -> None:
    with pytest.raises(RuntimeError, match="shape"):
        check_vmap((lambda x: x.reshape(7), seeded(3, dtype=torch.float64)))
