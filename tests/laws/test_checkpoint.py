"""Law: activation checkpointing changes no bit, and reading a weight changes no state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from catalog import PARAMETRIZATIONS, REGULARIZERS, RegularizerCase, seeded
from laws.support import (
    MODULES,
    Checkpointed,
    ModuleCase,
    assert_all_equal,
    clone,
    control,
    differentiate,
    law,
    over,
    parametrized,
    trainable,
)

STEPS = 4
READS = 100
REENTRANT = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])


def trajectory(module: nn.Module, shape: tuple[int, ...]) -> list[Tensor]:
    """Gradients of every step of a short training, then the final parameters and buffers."""
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    seen = []
    for step in range(STEPS):
        x = seeded(*shape, seed=step).requires_grad_()
        output = module(x)
        grads = _backward(output, [x, *trainable(module)])
        optimizer.step()
        optimizer.zero_grad()
        seen += grads
    return [*seen, *(t.detach().clone() for t in module.state_dict().values())]


def _backward(output: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    # The reentrant mode works with .backward() alone, not with torch.autograd.grad.
    (output * seeded(*output.shape, seed=7)).sum().backward()
    return [torch.zeros_like(t) if t.grad is None else t.grad.clone() for t in tensors]


def check_module(case: ModuleCase, reentrant: bool) -> None:
    plain = case.make()
    checkpointed = Checkpointed(clone(plain), reentrant)
    expected = trajectory(plain, case.shape)
    assert_all_equal(trajectory(checkpointed, case.shape), expected, "checkpointed training")


def check_regularizer(case: RegularizerCase, reentrant: bool) -> None:
    grads = []
    for recompute in (False, True):
        x = seeded(*case.shape).requires_grad_()
        value = case.make().value
        total = checkpoint(value, 1.0 * x, use_reentrant=reentrant) if recompute else value(1.0 * x)
        grads += _backward(total, [x])
    assert_all_equal(grads[1:], grads[:1], "checkpointed penalty")


def check_reading(module: nn.Module) -> None:
    module.train()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    first = module.weight.detach().clone()
    for _ in range(READS):
        assert torch.equal(module.weight, first), "two reads of the weight differ"
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key]), f"reading the weight changed {key!r}"
    gradient = differentiate(module.weight, trainable(module))
    assert_all_equal(differentiate(module.weight, trainable(module)), gradient, "gradient of a second read")


@pytest.mark.matrix("checkpoint")
@REENTRANT
@over(MODULES)
def test_module_under_checkpoint(case: ModuleCase, reentrant: bool) -> None:
    check_module(case, reentrant)


@pytest.mark.matrix("checkpoint")
@REENTRANT
@over(REGULARIZERS)
def test_regularizer_under_checkpoint(case: RegularizerCase, reentrant: bool) -> None:
    check_regularizer(case, reentrant)


test_reading_changes_nothing = law(lambda case: check_reading(parametrized(case)), PARAMETRIZATIONS)

# --- negative controls ----------------------------------------------------------------------------


def test_the_laws_refuse_a_power_iteration_inside_forward() -> None:
    """torch's own spectral norm advances u and v at each read, hence twice per checkpointed step."""
    layer = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(5, 4))
    case = ModuleCase(name="spectral norm of torch", make=lambda: clone(layer), shape=(3, 5))
    with pytest.raises(AssertionError, match=r"checkpointed training: tensor \d+ differs"):
        check_module(case, reentrant=False)
    with pytest.raises(AssertionError, match=r"two reads of the weight differ|reading the weight changed"):
        check_reading(layer)


def test_the_law_refuses_statistics_counted_twice() -> None:
    case = ModuleCase(name="batch norm of torch", make=lambda: nn.BatchNorm1d(5), shape=(3, 5))
    with pytest.raises(AssertionError, match=r"checkpointed training: tensor \d+ differs"):
        check_module(case, reentrant=False)


def test_the_law_accepts_a_plain_linear_layer() -> None:
    for reentrant in (False, True):
        check_module(control(), reentrant)
