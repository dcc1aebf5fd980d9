"""Law: an init has its property in every dtype, follows its generator and touches nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from catalog import INITS, InitCase
from laws.support import HALF, global_states, law, law_by_dtype
from tolerances import close


def drawn(case: InitCase, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    weight = torch.empty(case.shape, dtype=dtype)
    returned = case.function(weight, generator=torch.Generator().manual_seed(seed), **case.options)
    assert returned is weight, "an init fills and returns the tensor that it was given"
    return weight


def check_property(case: InitCase, dtype: torch.dtype) -> None:
    weight = drawn(case, dtype=dtype)
    assert weight.dtype is dtype
    assert bool(weight.isfinite().all()), f"{case.name} left a non-finite entry in {dtype}"
    case.check(weight.double(), dtype)


def check_dtypes_agree(case: InitCase) -> None:
    """The same generator gives the same matrix in each dtype, up to rounding."""
    full = drawn(case)
    for dtype in HALF:
        torch.testing.assert_close(drawn(case, dtype=dtype).float(), full, **close(dtype))


def check_generator(case: InitCase) -> None:
    assert torch.equal(drawn(case, seed=1), drawn(case, seed=1)), "one generator state, two tensors"
    if case.random:
        assert not torch.equal(drawn(case, seed=1), drawn(case, seed=2)), "the generator is ignored"


def check_isolation(case: InitCase) -> None:
    """Neither the global generators nor the kind of the parameter change."""
    parameter = nn.Parameter(torch.empty(case.shape))
    before = global_states()
    case.function(parameter, generator=torch.Generator().manual_seed(0), **case.options)
    for name, state in global_states().items():
        assert state == before[name], f"the global generator of {name} moved"
    assert parameter.requires_grad, "the parameter does not require its gradient any more"
    assert parameter.grad_fn is None, "the draw was recorded by autograd"


test_property = law_by_dtype(check_property, INITS)
test_dtypes_agree = law(check_dtypes_agree, INITS)
test_generator_decides = law(check_generator, INITS)
test_nothing_else_moves = law(check_isolation, INITS)

# --- negative controls ----------------------------------------------------------------------------


def _global(weight: Tensor, *, generator: torch.Generator) -> Tensor:
    return nn.init.normal_(weight)


def _normal(weight: Tensor, *, generator: torch.Generator) -> Tensor:
    return nn.init.normal_(weight, generator=generator)


def _unit_variance(weight: Tensor, dtype: torch.dtype) -> None:
    assert 0.9 < float(weight.var()) < 1.1, f"variance {float(weight.var()):.3g}"


CASE = InitCase(name="global", function=_global, shape=(64, 64), check=_unit_variance)


def test_the_laws_accept_a_normal_draw() -> None:
    case = InitCase(name="normal", function=_normal, shape=(64, 64), check=_unit_variance)
    check_property(case, torch.float64)
    check_generator(case)
    check_isolation(case)


def test_the_laws_refuse_the_global_generator() -> None:
    with pytest.raises(AssertionError, match="one generator state, two tensors"):
        check_generator(CASE)
    with pytest.raises(AssertionError, match="the global generator of torch moved"):
        check_isolation(CASE)


def test_the_law_refuses_a_wrong_variance() -> None:
    case = InitCase(
        name="wide",
        function=lambda w, *, generator: w.normal_(std=2.0, generator=generator),
        shape=(64, 64),
        check=_unit_variance,
    )
    with pytest.raises(AssertionError, match=r"variance 3\.9"):
        check_property(case, torch.float32)
