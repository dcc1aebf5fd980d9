"""The second forms of operations, and the predicate that chooses them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from catalog import seeded
from gonio import nn as gnn
from gonio.execution import ordinary_eager
from gonio.nn import kernels
from tolerances import close


@pytest.mark.parametrize("name", ["Ball", "Tanh"])
def test_scaling_in_place_keeps_nothing_but_the_result_of_the_size_of_the_product(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a learned radius, where the slope is as large as the product; for a tanh of it on small maps too."""
    layer = gnn.DecoupledConv2d(4, 32, 3, magnitude=getattr(gnn.magnitude, name)(learn_radius=True))
    x = seeded(2, 4, 9, 9).requires_grad_()

    def large_tensors_kept() -> int:
        kept: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            kept[t.data_ptr()] = t.numel()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            output = layer(x)
        return sum(size == output.numel() for size in kept.values())

    assert (large_tensors_kept() > 1) is (name == "Ball"), "a control: the plain form keeps the product too"
    monkeypatch.setattr(kernels, "LARGE", 0)
    assert large_tensors_kept() <= 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_slope_of_tanh_and_its_elasticity(dtype: torch.dtype) -> None:
    """From norms that count as 0 to the flat end, against derivatives in float64; finite where tanh underflows."""
    norm = torch.logspace(-9, 3, 25, dtype=dtype)
    slope, elasticity = kernels.slope_and_elasticity_of_tanh(norm, alpha=0.5, radius=torch.tensor(2.0, dtype=dtype))
    exact = norm.double().requires_grad_()
    value = 0.5 * torch.tanh(exact / 2)
    value.sum().backward()
    torch.testing.assert_close(slope.double(), (value / exact).detach(), **close(dtype))
    expected = exact.grad * exact.detach() / value.detach()
    # 1 - t² is 0 where tanh rounds to 1: an error of its rounding times ‖x‖/ρ
    torch.testing.assert_close(elasticity.double(), expected, rtol=1e-5, atol=20 * torch.finfo(dtype).eps)
    tiny, huge = torch.tensor([1e-9], dtype=dtype), torch.tensor(1e38, dtype=dtype)
    _, at_zero = kernels.slope_and_elasticity_of_tanh(tiny, alpha=1.0, radius=huge)
    torch.testing.assert_close(at_zero, torch.ones_like(at_zero))


def test_second_forms_are_for_eager_execution_alone() -> None:
    """A compiler, an export, a transform, forward mode and fake tensors get the plain form."""
    x, seen = torch.ones(2), []

    def noted(x: Tensor) -> Tensor:
        seen.append(ordinary_eager(x))
        return x * 1

    noted(x)
    torch.func.vmap(noted)(x)
    torch.func.jvp(noted, (x,), (x,))
    torch.func.grad(lambda x: noted(x).sum())(x)
    with torch.autograd.forward_ad.dual_level():
        noted(torch.autograd.forward_ad.make_dual(x, x))
    with torch._subclasses.FakeTensorMode():
        noted(torch.ones(2))
    assert seen == [True, False, False, False, False, False]

    def chosen(x: Tensor) -> Tensor:
        return x * (2 if ordinary_eager(x) else 3)

    torch._dynamo.reset()
    assert torch.compile(chosen, backend="eager", fullgraph=True)(x).tolist() == [3, 3]
    assert torch.jit.trace(chosen, x, check_trace=False)(x).tolist() == [3, 3]
