"""Law: memory format survives, frozen parameters stay frozen, garbage state is reset."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from catalog import PARAMETRIZATIONS, ParametrizationCase, seeded
from laws.support import (
    MODULES,
    ModuleCase,
    assert_all_equal,
    assert_finite,
    assert_near,
    clone,
    law,
    over,
    parametrized,
    run,
)

GARBAGE = 1e30


def check_channels_last(case: ModuleCase) -> None:
    """Same numbers in either layout, and the output is laid out as the input is."""
    module = case.make()
    x = seeded(*case.shape)
    expected = run(clone(module), x)
    module = module.to(memory_format=torch.channels_last)
    y = x.contiguous(memory_format=torch.channels_last)
    output = clone(module)(y)
    kept = output.is_contiguous(memory_format=torch.channels_last)
    assert kept, f"channels_last in, strides {output.stride()} out"
    for index, (a, e) in enumerate(zip(run(module, y), expected, strict=True)):
        assert_near(a, e, torch.float32, what=f"tensor {index} in channels_last")


def check_frozen(case: ModuleCase) -> None:
    """Frozen parameters get no gradient; the gradient of the input stays the same."""
    module = case.make()
    x = seeded(*case.shape)
    expected = run(clone(module), x)[:2]
    module.requires_grad_(False)
    frozen = run(module, x)[:2]
    for name, a, e in zip(("output", "input gradient"), frozen, expected, strict=True):
        assert_near(a, e, torch.float32, what=f"{name} of the frozen module")
    assert all(p.grad is None and not p.requires_grad for p in module.parameters())


def check_reset(case: ModuleCase) -> None:
    """`to_empty` leaves garbage; `reset_parameters` of every module replaces all of it."""
    module = case.make()
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.fill_(GARBAGE if tensor.is_floating_point() else 7)
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    left = [name for name, t in module.state_dict().items() if bool((t == GARBAGE).any())]
    assert not left, f"reset_parameters left garbage in {left}"
    assert_finite(run(module, seeded(*case.shape)), "module after a reset")


IMAGES = [case for case in MODULES if case.channels_last]


test_channels_last = law(check_channels_last, IMAGES)
test_frozen_parameters = law(check_frozen, MODULES)
test_reset_replaces_garbage = law(check_reset, MODULES)


@over(PARAMETRIZATIONS)
def test_attach_keeps_frozen(case: ParametrizationCase) -> None:
    layer = case.layer().requires_grad_(False)
    module = parametrized(dataclasses.replace(case, layer=lambda: layer))
    assert not any(p.requires_grad for p in module.parameters()), "attaching thawed a frozen weight"
    assert not module.weight.requires_grad


# --- negative controls ----------------------------------------------------------------------------


class _Contiguous(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).contiguous()


class _Stale(nn.Conv2d):
    """Uses a buffer that no reset touches."""

    def __init__(self, *arguments: int) -> None:
        super().__init__(*arguments)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class _Detaching(nn.Conv2d):
    """Loses the gradient of the input when the weight is frozen."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.weight.requires_grad else 0.5 * x + 0.5 * x.detach())


def _case(make: type[nn.Conv2d]) -> ModuleCase:
    return ModuleCase(name=make.__name__, make=lambda: make(3, 4, 3), shape=(2, 3, 6, 6), channels_last=True)


def test_the_laws_accept_a_plain_convolution() -> None:
    for check in (check_channels_last, check_frozen, check_reset):
        check(_case(nn.Conv2d))


@pytest.mark.parametrize(
    ("check", "layer", "message"),
    [
        (check_channels_last, _Contiguous, r"channels_last in, strides .* out"),
        (check_frozen, _Detaching, "input gradient of the frozen module differs"),
        (check_reset, _Stale, r"left garbage in \['scale'\]"),
    ],
)
def test_the_laws_refuse(check: Callable[[ModuleCase], None], layer: type[nn.Conv2d], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check(_case(layer))


def test_bit_equality_is_tested() -> None:
    with pytest.raises(AssertionError, match="tensor 0 differs by 1e-"):
        assert_all_equal([torch.tensor([1e-9])], [torch.zeros(1)], "control")
