"""Ten thousand awkward inputs for every public function: finite value, finite gradient."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from geometry.examples import NUMBER, THOROUGH, awkward, awkward_matrices
from gonio import geometry
from gonio.geometry import Layout, conv_norm

pytestmark = pytest.mark.slow

Function = Callable[[Tensor], Sequence[Tensor]]


def one(function: Callable[..., Tensor], *arguments: Any, **options: Any) -> Function:
    return lambda x: [function(x, *arguments, **options)]


def fields(function: Callable[[Tensor], Any], *names: str) -> Function:
    return lambda x: [getattr(function(x), name) for name in names]


def bound(function: Callable[[Tensor], Any]) -> Function:
    """An upper bound may be infinite, and is a number."""
    return lambda x: [1 / (1 + torch.as_tensor(function(x)))]


DEFECTS = ("entrywise", "frobenius", "spectral")


def rolled_angle(x: Tensor) -> Sequence[Tensor]:
    return [geometry.angle_between(x, x.roll(1, -2))]


def scale_invariant(function: Function) -> Function:
    """Its gradient grows as the inverse of the matrix: asked for where the dtype has numbers for that."""

    def of_representable(x: Tensor) -> Sequence[Tensor]:
        sizes = x.detach().abs().amax((-2, -1)).double()
        assume(not ((sizes > 0) & (sizes < 64 / torch.finfo(x.dtype).max)).any())
        return function(x)

    return of_representable


def of_layers(function: Callable[[list[Tensor]], Tensor]) -> Function:
    """Each row a layer; the gradient, of size geometric mean / norm, is asked for where the dtype has such numbers."""

    def of_representable(x: Tensor) -> Sequence[Tensor]:
        norms = x.detach().double().norm(dim=-1)
        mean = norms.log().mean().mul(2).exp()  # 0 beside a layer of zeros
        assume(not (mean > 0 and 2 * mean / norms.min() > torch.finfo(x.dtype).max / 4))
        return [function(list(x))]

    return of_representable


OF_STACKS = ["normalize", "filter_norms", "cosines", "angles", "coherence", "alignment", "alignment_zscore"]
OF_STACKS += ["sign_similarity", "singular_values"]
# name: a function of a matrix or of a stack of matrices
OF_MATRICES: dict[str, Function] = {
    **{name: one(getattr(geometry, name)) for name in OF_STACKS},
    "safe_norm": one(geometry.safe_norm, -1),
    "angle_between": rolled_angle,
    "spectral_norm": one(geometry.spectral_norm, steps=4),
    "stable_rank": scale_invariant(one(geometry.stable_rank)),
    "effective_rank": scale_invariant(one(geometry.effective_rank)),
    "spectrum": scale_invariant(fields(geometry.spectrum, "values", "stable_rank", "effective_rank")),
    # its gradient grows as the cube of the weight, beyond float16 from 30 on
    "orthogonality_defect": lambda x: fields(geometry.orthogonality_defect, *DEFECTS)(
        x / x.detach().abs().amax().clamp_min(1)
    ),
    "matrix_view": one(geometry.matrix_view, view="last_two"),
    "unview": lambda x: [geometry.unview(geometry.matrix_view(x), x.shape)],
    "least_scale": of_layers(geometry.least_scale),
    "scale_imbalance": of_layers(geometry.scale_imbalance),
}
# Discontinuous or unbounded by definition: their values alone.
WITHOUT_GRADIENT: dict[str, Function] = {
    "sign_hash": one(geometry.sign_hash, 16),
    "near_duplicates": fields(partial(geometry.near_duplicates, cosine=0.9), "cosines"),
    "condition_number": lambda x: [1 / geometry.condition_number(x)],
    "top_subspace": lambda x: fields(partial(geometry.top_subspace, k=min(x.shape)), "left", "values", "right")(x),
    "principal_angles": lambda x: one(geometry.principal_angles, x.flip(0)[:, : len(x)])(x[:, : len(x)]),
    "intruder_dimensions": lambda x: fields(partial(geometry.intruder_dimensions, x.flip(0), k=1), "cosines")(x),
    "fake_quantize": one(geometry.fake_quantize, bits=4),
    "quantization_error": lambda x: [torch.tensor(geometry.quantization_error(x, bits=4))],
    "operator_norm_bound": bound(geometry.operator_norm_bound),
    "nonnegative_norm": bound(lambda x: geometry.nonnegative_norm(lambda v: v @ x.double().abs().mT, x[0])),
    "logit_bound": bound(lambda x: geometry.logit_bound(x[None], x.flip(0)[None])),
    "match": lambda x: fields(partial(geometry.match, x.flip(0)), "cosines")(x),
}
OF_ONE_MATRIX = {"least_scale", "scale_imbalance", "near_duplicates"}
OF_ONE_MATRIX |= {"fake_quantize", "quantization_error", "operator_norm_bound", "nonnegative_norm", "logit_bound"}
OF_ONE_MATRIX |= {"top_subspace", "principal_angles", "intruder_dimensions", "match"}
OF_CONVOLUTIONS = {
    "conv_spectral_norm": lambda w, size, layout: geometry.conv_spectral_norm(w, size, layout=layout),
    "conv_spectral_norm_bound": lambda w, size, layout: geometry.conv_spectral_norm_bound(w, size=size, layout=layout),
    "conv_spectral_norm_certificate": lambda w, _, layout: geometry.conv_spectral_norm_certificate(w, layout=layout),
    "operator_matrix": geometry.operator_matrix,
    "unview_operator": lambda w, size, layout: geometry.unview_operator(
        geometry.operator_matrix(w, size, layout), w.shape, size, layout
    ),
}
ESTIMATE = "conv_spectral_norm_estimate"
OF_NUMBERS = {"random_angle_density", "alignment_deviation", "expected_coherence", "marchenko_pastur", "welch_bound"}


def check_finite(values: Sequence[Tensor], x: Tensor | None = None) -> None:
    """Values, and the gradient of their mean, are numbers."""
    for value in values:
        assert value.isfinite().all(), value
        if x is not None:
            (gradient,) = torch.autograd.grad(value.float().mean(), x, retain_graph=True)
            assert gradient.isfinite().all(), gradient


@pytest.mark.parametrize("name", [*OF_MATRICES, *WITHOUT_GRADIENT])
def test_of_matrices(name: str) -> None:
    function = OF_MATRICES.get(name) or WITHOUT_GRADIENT[name]

    @THOROUGH
    @given(awkward_matrices(rows=2 if name == "coherence" else 1, groups=name not in OF_ONE_MATRIX))
    def check(matrix: Tensor) -> None:
        matrix.requires_grad_(name in OF_MATRICES)
        check_finite(function(matrix), matrix if name in OF_MATRICES else None)

    check()


def convolution(seed: int) -> tuple[Tensor, tuple[int, ...], Layout]:
    """A weight, grid and layout that belong together; the grid holds the dilated kernel."""
    rng = np.random.default_rng(seed)
    dims, groups, out, in_ = (int(rng.integers(1, most + 1)) for most in (2, 2, 3, 3))
    kernel, stride, dilation = (tuple(map(int, rng.integers(1, most + 1, dims))) for most in (3, 2, 2))
    size = tuple(s * -(-((k - 1) * d + 1) // s) for k, s, d in zip(kernel, stride, dilation, strict=True))
    layout = Layout(transposed=bool(rng.integers(2)), groups=groups, stride=stride, dilation=dilation)
    return awkward((groups * out, in_, *kernel), seed), size, layout


@pytest.mark.parametrize("name", [*OF_CONVOLUTIONS, ESTIMATE])
def test_of_convolutions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv_norm, "SMALL", 0)  # or such kernels would be handed to the exact search

    @THOROUGH
    @given(NUMBER)
    def check(seed: int) -> None:
        weight, size, layout = convolution(seed)
        if name == ESTIMATE:
            check_finite([geometry.conv_spectral_norm_estimate(weight, size, layout=layout)])
        else:
            weight.requires_grad_()
            check_finite([OF_CONVOLUTIONS[name](weight, size, layout)], weight)

    check()


@THOROUGH
@given(st.lists(st.floats(-1, 4), max_size=4), st.integers(2, 10**9))
def test_random_angle_density(theta: list[float], dim: int) -> None:
    angles = torch.tensor(theta, dtype=torch.float64, requires_grad=True)
    density = geometry.random_angle_density(angles, dim)
    check_finite([density])
    assert (density >= 0).all()


@THOROUGH
@given(st.integers(2, 10**9), st.integers(2, 10**9))
def test_laws_of_chance(n: int, d: int) -> None:
    assert 0 < geometry.alignment_deviation(n, d) < 2
    assert 0 <= geometry.welch_bound(n, d) < geometry.expected_coherence(n, d) * (1 + 1e-6) + 1e-12
    assert geometry.expected_coherence(n, d) <= 1 + 1e-9


@THOROUGH
@given(st.integers(1, 10**6), st.integers(1, 10**6), st.floats(1e-30, 1e30), st.lists(st.floats(0, 3), max_size=4))
def test_marchenko_pastur(rows: int, cols: int, std: float, at: list[float]) -> None:
    law = geometry.marchenko_pastur(rows, cols, std=std)
    assert 0 <= law.lower <= law.upper
    density = law.density(law.upper * torch.tensor(at, dtype=torch.float64))
    check_finite([density])
    assert (density >= 0).all()


def test_every_public_function_is_here() -> None:
    public = {name for name in geometry.__all__ if inspect.isfunction(getattr(geometry, name))}
    assert public == {*OF_MATRICES, *WITHOUT_GRADIENT, *OF_CONVOLUTIONS, ESTIMATE, *OF_NUMBERS, "layout_of"}
