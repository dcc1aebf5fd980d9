"""Law: value and gradient equal an independent float64 reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from catalog import (
    LAYERS,
    PARAMETRIZATIONS,
    REGULARIZERS,
    LayerCase,
    ParametrizationCase,
    RegularizerCase,
    seeded,
)
from laws.support import (
    FULL,
    HALF,
    assert_near,
    clone,
    differentiate,
    law,
    law_by_dtype,
    parametrized,
    perturbed,
    trainable,
)


def check_layer(case: LayerCase, dtype: torch.dtype) -> None:
    layer = perturbed(case.make()).to(dtype)
    oracle = clone(layer).double()
    x = seeded(*case.shape, dtype=dtype).requires_grad_()
    x64 = x.detach().double().requires_grad_()
    output, expected = layer(x), case.reference(oracle, x64)
    assert output.dtype is dtype, f"{dtype} in, {output.dtype} out"
    assert_near(output, expected, dtype)
    if dtype in HALF:
        return
    names = ["input", *(name for name, p in layer.named_parameters() if p.requires_grad)]
    grads = differentiate(output, [x, *trainable(layer)])
    expected_grads = differentiate(expected, [x64, *trainable(oracle)])
    for name, grad, expected_grad in zip(names, grads, expected_grads, strict=True):
        assert_near(grad, expected_grad, dtype, what=f"gradient of {name}")


def check_regularizer(case: RegularizerCase, dtype: torch.dtype) -> None:
    regularizer = case.make()
    x = seeded(*case.shape, dtype=dtype).requires_grad_()
    x64 = x.detach().double().requires_grad_()
    value, expected = regularizer.value(x), case.reference(x64)
    assert value.shape == (), f"a penalty is a scalar; got shape {tuple(value.shape)}"
    assert_near(value, expected, dtype)
    if dtype in FULL:
        assert_near(differentiate(value, [x])[0], differentiate(expected, [x64])[0], dtype, what="gradient")


def check_strength(case: RegularizerCase) -> None:
    x = seeded(*case.shape, dtype=torch.float64)
    regularizer = dataclasses.replace(case.make(), strength=2.5)
    assert_near(regularizer(x), 2.5 * regularizer.value(x), torch.float64, what="strength x value")


def check_parametrization(case: ParametrizationCase, dtype: torch.dtype) -> None:
    layer = parametrized(case, dtype)
    raw = layer._parameters["weight"]
    raw64 = raw.detach().double().requires_grad_()
    effective, expected = layer.weight, case.reference(case.layer(), raw64)
    assert_near(effective, expected, dtype)
    if dtype in FULL:
        assert_near(differentiate(effective, [raw])[0], differentiate(expected, [raw64])[0], dtype, what="gradient")


test_layer_equals_its_reference = law_by_dtype(check_layer, LAYERS)
test_regularizer_equals_its_reference = law_by_dtype(check_regularizer, REGULARIZERS)
test_strength_multiplies_the_value = law(check_strength, REGULARIZERS)
test_parametrization_equals_its_reference = law_by_dtype(check_parametrization, PARAMETRIZATIONS, FULL)

# --- negative controls ----------------------------------------------------------------------------


class _Detached(nn.Linear):
    """Right value, gradient of the input lost in one term."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(0.5 * x + 0.5 * x.detach())


class _Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 1.001 * super().forward(x)


@dataclasses.dataclass(frozen=True)
class _Squares:
    """Sum of squares; ignores its strength."""

    strength: float

    def value(self, x: Tensor) -> Tensor:
        return x.square().sum()

    def __call__(self, x: Tensor) -> Tensor:
        return self.value(x)


def _linear_case(layer: type[nn.Linear]) -> LayerCase:
    return LayerCase(
        name=layer.__name__,
        make=lambda: layer(5, 3),
        shape=(4, 5),
        reference=lambda oracle, x: x @ oracle.weight.T + oracle.bias,
    )


def test_the_law_accepts_a_plain_linear_layer() -> None:
    for dtype in (*FULL, *HALF):
        check_layer(_linear_case(nn.Linear), dtype)


@pytest.mark.parametrize(("layer", "message"), [(_Scaled, "value differs"), (_Detached, "gradient of input differs")])
def test_the_law_refuses_a_wrong_value_or_gradient(layer: type[nn.Linear], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_layer(_linear_case(layer), torch.float32)


def test_the_law_refuses_an_ignored_strength() -> None:
    case = RegularizerCase(
        name="squares", make=lambda: _Squares(1.0), shape=(3, 4), reference=lambda x: x.square().sum()
    )
    check_regularizer(case, torch.float64)
    with pytest.raises(AssertionError, match="strength x value differs"):
        check_strength(case)
