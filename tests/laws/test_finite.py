"""Law: finite in, finite out, for value and gradient, at every degenerate point."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from catalog import REGULARIZERS, RegularizerCase, seeded
from laws.support import FULL, HALF, MODULES, ModuleCase, assert_finite, control, differentiate, law_by_dtype, run


def _zero_row(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(x[:1]), x[1:]])


def _duplicated(x: Tensor) -> Tensor:
    return torch.cat([x[:1], x[:1], x[2:]])


def _tiny(x: Tensor) -> Tensor:
    return x * (1e-6 if x.dtype in HALF else 1e-30)


def _shifted(x: Tensor) -> Tensor:
    """A mean far above the spread: E[x²] − E[x]² has no digits left."""
    return x + (100.0 if x.dtype in HALF else 1e5)


def _zero_patch(x: Tensor) -> Tensor:
    """The last position of every spatial axis, or the last feature, is zero."""
    x = x.clone()
    x[..., -max(1, x.shape[-1] // 2) :] = 0
    return x


INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda x: x,
    "zero": torch.zeros_like,
    "zero sample": _zero_row,
    "zero patch": _zero_patch,
    "constant": torch.ones_like,
    "mean 1e5": _shifted,
    "tiny": _tiny,
    "one sample": lambda x: x[:1],
}
WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda w: w,
    "zero": torch.zeros_like,
    "zero filter": _zero_row,
    "zero column": lambda w: _zero_row(w.transpose(0, 1)).transpose(0, 1) if w.ndim > 1 else w,
    "duplicated filters": _duplicated,
    "tiny": _tiny,
}
# Further points at which a penalty of a weight or of outputs is finite.
TENSORS = {
    **WEIGHTS,
    "one row": lambda x: x[:1],
    "one column": lambda x: x[:, :1],
    "constant": torch.ones_like,
    "mean 1e5": _shifted,
}


def degenerate(case: ModuleCase, dtype: torch.dtype) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Every special weight with a random input, every special input with a random weight, and both zero."""
    pairs = [("random", i) for i in INPUTS] + [(w, "random") for w in WEIGHTS] + [("zero", "zero")]
    for weight, signal in pairs:
        module = case.make().to(dtype)
        raw = module._parameters.get("weight")
        if raw is not None:
            raw.data.copy_(WEIGHTS[weight](raw.data))
        yield f"weight: {weight}, input: {signal}", module, INPUTS[signal](seeded(*case.shape, dtype=dtype))


def check_module(case: ModuleCase, dtype: torch.dtype) -> None:
    for what, module, x in degenerate(case, dtype):
        assert_finite(run(module, x), what)
        module.eval()
        assert_finite(run(module, x), f"{what}, evaluation mode")


def check_regularizer(case: RegularizerCase, dtype: torch.dtype) -> None:
    for name, change in TENSORS.items():
        x = change(seeded(*case.shape, dtype=dtype)).detach().requires_grad_()
        value = case.make().value(x)
        assert_finite([value, *differentiate(value, [x])], name)


def check_large(case: RegularizerCase, dtype: torch.dtype) -> None:
    """Squares of a hundred overflow float16; the sum must be accumulated in a wider type."""
    x = 300 * seeded(*case.shape, dtype=dtype)
    assert_finite([case.make().value(x)], f"entries of size 300 in {dtype}")


test_module_is_finite = pytest.mark.grid(2)(law_by_dtype(check_module, MODULES))
test_regularizer_is_finite = law_by_dtype(check_regularizer, REGULARIZERS)
test_regularizer_does_not_overflow = law_by_dtype(check_large, REGULARIZERS, HALF)

# --- negative controls ----------------------------------------------------------------------------


class _Unsafe(nn.Linear):
    """Unit filters by plain division: 0/0 at a zero filter."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight / self.weight.norm(dim=1, keepdim=True), self.bias)


class _Squares:
    def value(self, x: Tensor) -> Tensor:
        return x.square().sum()


def test_the_law_accepts_a_plain_linear_layer() -> None:
    for dtype in (*FULL, *HALF):
        check_module(control(), dtype)


def test_the_law_refuses_division_by_a_zero_norm() -> None:
    with pytest.raises(AssertionError, match=r"weight: zero, .*not finite"):
        check_module(control(_Unsafe), torch.float32)


def test_the_law_refuses_overflow_in_half_precision() -> None:
    case = RegularizerCase(name="squares", make=_Squares, shape=(64, 64), reference=lambda x: x.square().sum())
    check_large(case, torch.bfloat16)
    with pytest.raises(AssertionError, match=r"300 in torch\.float16: tensor 0 is not finite"):
        check_large(case, torch.float16)
