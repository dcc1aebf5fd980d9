"""The short forms of tanh and arcsin that compiled kernels use, and tanh of large tensors, against many digits."""

from __future__ import annotations

from collections.abc import Callable

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

from gonio.nn import elementary
from gonio.nn.angular import Sigmoid
from gonio.nn.arcsine import bounded_asin
from gonio.nn.magnitude import Tanh
from tolerances import close

ERROR = 4e-7  # documented: 3e-7 of the fit, and the rounding of the result to float32

NUMBERS = torch.cat([torch.linspace(-1, 1, 2001), torch.logspace(-30, 1.5, 500), torch.tensor([0.0, -0.0, 1e30])])


def compiled(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    torch._dynamo.reset()
    found: Callable[[Tensor], Tensor] = torch.compile(function, backend="aot_eager", fullgraph=True)
    return found


def relative_error(found: Tensor, function: Callable[[mpmath.mpf], mpmath.mpf], at: Tensor) -> float:
    with mpmath.workdps(30):
        true = [function(mpmath.mpf(value)) for value in at.double().tolist()]
        parts = [abs(mpmath.mpf(f) / t - 1) for f, t in zip(found.tolist(), true, strict=True) if t != 0]
        return float(max(parts))


def test_the_rational_tanh() -> None:
    value = compiled(elementary.tanh)(NUMBERS)
    assert relative_error(value, mpmath.tanh, NUMBERS) < ERROR
    assert float(value.abs().max()) == 1.0  # a bound that rounding does not exceed
    assert compiled(elementary.tanh)(torch.tensor([np.nan])).isnan().all()


def test_tanh_of_large_tensors_in_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """By expm1; small tensors keep torch's kernel."""
    monkeypatch.setattr(elementary, "_LARGE", 100)
    both = torch.cat([NUMBERS, -NUMBERS])
    value = elementary.tanh(both)
    assert relative_error(value, mpmath.tanh, both) < ERROR
    assert float(value.abs().max()) == 1.0
    assert not torch.equal(value, torch.tanh(both)), "a control: another kernel"
    assert elementary.tanh(torch.full((200,), np.nan)).isnan().all()
    assert torch.equal(elementary.tanh(NUMBERS[:99]), torch.tanh(NUMBERS[:99]))


def test_derivatives_of_tanh_of_large_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two, as torch's, with nothing kept but the result; forward mode and torch.func too."""
    monkeypatch.setattr(elementary, "_LARGE", 100)
    x = torch.linspace(-5, 5, 301, requires_grad=True)
    found, expected = ([], [])
    for derivatives, function in ((found, elementary.tanh), (expected, torch.tanh)):
        for _ in range(2):
            derivatives.append(torch.autograd.grad((derivatives or [function(x)])[-1].sum(), x, create_graph=True)[0])
    torch.testing.assert_close(found, expected, **close(torch.float32))
    flat = x.detach()
    torch.testing.assert_close(torch.func.grad(lambda t: elementary.tanh(t).sum())(flat), expected[0].detach())
    tangent = torch.autograd.forward_ad
    with tangent.dual_level():
        dual = tangent.unpack_dual(elementary.tanh(tangent.make_dual(flat, torch.ones_like(flat))))
        torch.testing.assert_close(dual.tangent, expected[0].detach())


def test_the_polynomial_arcsine() -> None:
    cosines = NUMBERS[NUMBERS.abs() <= 1]
    value = compiled(elementary.arcsin)(cosines)
    assert relative_error(value, mpmath.asin, cosines) < ERROR


def test_their_derivatives_are_those_of_eager_mode() -> None:
    for function in (bounded_asin, elementary.tanh, Sigmoid(), Tanh()):
        x = torch.linspace(-0.999, 0.999, 101, requires_grad=True)
        grads = [torch.autograd.grad(f(x).sum(), x)[0] for f in (compiled(function), function)]
        torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_precisions_keep_torchs_kernels(dtype: torch.dtype) -> None:
    x = torch.linspace(-1, 1, 101, dtype=dtype)
    for function, kernel in ((elementary.tanh, torch.tanh), (elementary.arcsin, torch.asin)):
        assert torch.equal(compiled(function)(x), kernel(x))
        assert torch.equal(function(x.float()), kernel(x.float()))  # as does eager mode


def test_the_arcsine_of_compilers_has_second_derivatives() -> None:
    c = torch.tensor([-0.9, -0.5, 0.0, 0.3, 0.7], dtype=torch.float64)
    for dtype in (torch.float64, torch.float32):
        x = c.to(dtype)
        slope = compiled(torch.func.vmap(torch.func.grad(bounded_asin)))(x)
        bend = compiled(torch.func.vmap(torch.func.grad(torch.func.grad(bounded_asin))))(x)
        torch.testing.assert_close(slope.double(), (1 - c**2) ** -0.5, rtol=1e-5, atol=0)
        torch.testing.assert_close(bend.double(), c * (1 - c**2) ** -1.5, rtol=1e-4, atol=1e-4)


class _Both(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return elementary.tanh(x) + bounded_asin(x)


def test_an_exported_program_holds_the_functions_by_name() -> None:
    """An exchange format has operators of its own for them, and its runtimes have kernels."""
    program = torch.export.export(_Both(), (torch.linspace(-1, 1, 5),))
    called = {str(node.target) for node in program.graph.nodes}
    assert {"aten.tanh.default", "aten.asin.default"} <= called


def test_the_arcsine_of_compilers_at_its_ends() -> None:
    c = torch.tensor([1.0, -1.0, 1.0 + 2e-7, 0.0], requires_grad=True)
    value = compiled(bounded_asin)(c)
    torch.testing.assert_close(value.detach(), torch.tensor([torch.pi / 2, -torch.pi / 2, torch.pi / 2, 0.0]))
    (grad,) = torch.autograd.grad(value.sum(), c)
    assert bool(grad.isfinite().all() and (grad[:3] >= 900).all())
    assert grad[3] == 1
