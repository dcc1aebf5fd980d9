"""Ten thousand shapes, layouts, dtypes and gains for every public function: finite, and written everywhere."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from geometry.examples import THOROUGH
from gonio import init
from gonio.errors import LEAST, InvalidArgumentError
from gonio.geometry import Layout
from gonio.init.gain import ACTIVATIONS

pytestmark = pytest.mark.slow

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
VIEWS = ["filters", "taps", "last_two"]
DISTRIBUTIONS = ["normal", "uniform", "truncated_normal", "rademacher"]
# name: the options of the function
FILLS: dict[str, dict[str, list[Any]]] = {
    "variance_scaling_": {"preserve": ["norm", "rms", "both"], "distribution": DISTRIBUTIONS},
    "xavier_": {"distribution": ["normal", "uniform"]},
    "he_": {"preserve": ["norm", "rms"]},
    "lecun_": {},
    "orthogonal_": {"preserve": [None, "norm", "rms"], "view": VIEWS},
    "delta_orthogonal_": {},
}
NUMBERS = st.floats(-4, 4).filter(lambda number: number == 0 or abs(number) >= LEAST)  # float32 has their squares
GAINS = st.one_of(NUMBERS, st.sampled_from(sorted(ACTIVATIONS)), st.sampled_from(list(ACTIVATIONS.values())))


@st.composite
def weights(draw: st.DrawFn, *, isometric: bool) -> tuple[Tensor, Layout]:
    """An unwritten weight and a layout that fits; for an isometry a kernel and no fewer outputs than inputs."""
    groups, blocks = draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (3, 1), (1, 3)]))
    dims = draw(st.integers(1 if isometric else 0, 3))
    transposed = draw(st.booleans())
    first, second = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    out, in_ = (max(first, second), min(first, second)) if isometric else (first, second)
    rows, cols = (in_, out) if transposed else (out, in_)
    shape = (groups * blocks * rows, cols, *[draw(st.integers(1, 3)) for _ in range(dims)])
    stride = tuple(draw(st.integers(1, 3)) for _ in range(dims)) if draw(st.booleans()) else ()
    layout = Layout(transposed=transposed, groups=groups, blocks=blocks, stride=stride)
    return torch.full(shape, torch.nan, dtype=draw(st.sampled_from(DTYPES))), layout


@pytest.mark.parametrize("name", FILLS)
def test_fills(name: str) -> None:
    options = st.fixed_dictionaries({key: st.sampled_from(values) for key, values in FILLS[name].items()})

    @THOROUGH
    @given(weights(isometric=name == "delta_orthogonal_"), GAINS, st.integers(0, 2**32), options)
    def check(case: tuple[Tensor, Layout], gain: Any, seed: int, chosen: dict[str, Any]) -> None:
        weight, layout = case
        generator = torch.Generator().manual_seed(seed)
        assert getattr(init, name)(weight, gain=gain, layout=layout, generator=generator, **chosen) is weight
        assert weight.isfinite().all()

    check()


@THOROUGH
@given(weights(isometric=False), GAINS, st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 4))
def test_mup(case: tuple[Tensor, Layout], gain: Any, seed: int, rows: int, columns: int) -> None:
    weight, layout = case
    base = (layout.matrices * rows, columns, *weight.shape[2:])
    generator = torch.Generator().manual_seed(seed)
    assert init.mup_(weight, base=base, gain=gain, layout=layout, generator=generator) is weight
    assert weight.isfinite().all()


@THOROUGH
@given(weights(isometric=False))
def test_fans(case: tuple[Tensor, Layout]) -> None:
    weight, layout = case
    fan = init.fans(weight.shape, layout)
    assert 0 < fan.fan_in < float("inf")
    assert 0 < fan.fan_out < float("inf")


@THOROUGH
@given(
    st.sampled_from(sorted(ACTIVATIONS)), st.floats(0.01, 100), st.floats(-5, 5), st.floats(0.01, 100), st.floats(-5, 5)
)
def test_gain(name: str, inner: float, shift: float, outer: float, offset: float) -> None:
    """Of any activation, stretched and shifted before and after."""

    def function(z: Tensor) -> Tensor:
        return outer * ACTIVATIONS[name](inner * z + shift) + offset

    seen = function(torch.linspace(-5.5, 5.5, 101, dtype=torch.float64))  # all but one number in 1e8
    sizes = {"rms": seen.abs().max(), "std": seen.max() - seen.min()}
    moments = {}
    for kind, size in sizes.items():
        try:
            moments[kind] = 1 / init.gain(function, kind=kind)
        except InvalidArgumentError:  # right of constants alone: a ReLU moved far to the left
            assert float(size) < 1e-10
            return
    assert 0 < moments["std"] <= moments["rms"] * (1 + 1e-9) < float("inf")


def test_every_public_function_is_here() -> None:
    public = {name for name in init.__all__ if inspect.isfunction(getattr(init, name))}
    assert public == {*FILLS, "mup_", "fans", "gain"}
