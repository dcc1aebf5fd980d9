"""Cases of the initialisations, each with the property that it asserts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from catalog.cases import InitCase
from gonio import init


def _has_variance(expected: float) -> Callable[[Tensor, torch.dtype], None]:
    """Mean 0 and the asked variance, within what 64 · 32 draws show."""

    def check(weight: Tensor, dtype: torch.dtype) -> None:
        assert abs(float(weight.mean())) < 5 * (expected / weight.numel()) ** 0.5
        assert abs(float(weight.var()) / expected - 1) < 0.2, f"variance {float(weight.var()):.3g}"

    return check


def _has_singular_values(expected: float) -> Callable[[Tensor, torch.dtype], None]:
    def check(weight: Tensor, dtype: torch.dtype) -> None:
        values = torch.linalg.svdvals(weight.flatten(1))
        error = float((values / expected - 1).abs().max())
        assert error < 10 * min(weight.shape[0], weight[0].numel()) * torch.finfo(dtype).eps, f"off by {error:.2g}"

    return check


def _has_isometric_centre(weight: Tensor, dtype: torch.dtype) -> None:
    _has_singular_values(1.0)(weight[..., 1, 1], dtype)
    assert float(weight.square().sum()) == float(weight[..., 1, 1].square().sum()), "a tap beside the centre"


INITS = [
    InitCase(name=name, function=function, shape=(64, 32), check=_has_variance(variance), options=options)
    for name, function, variance, options in [
        ("variance_scaling_ norm", init.variance_scaling_, 1 / 64, {"preserve": "norm"}),
        ("variance_scaling_ rms", init.variance_scaling_, 1 / 32, {"preserve": "rms"}),
        ("variance_scaling_ uniform", init.variance_scaling_, 1 / 32, {"distribution": "uniform"}),
        ("variance_scaling_ truncated", init.variance_scaling_, 1 / 32, {"distribution": "truncated_normal"}),
        ("variance_scaling_ signs", init.variance_scaling_, 1 / 32, {"distribution": "rademacher"}),
        ("xavier_", init.xavier_, 2 / 96, {}),
        ("he_", init.he_, 2 / 32, {}),
        ("lecun_", init.lecun_, 1 / 32, {}),
        ("mup_ hidden", init.mup_, 1 / 32, {"base": (16, 8)}),
        ("mup_ output", init.mup_, 8 / 32**2, {"base": (64, 8)}),
    ]
]
INITS += [
    InitCase(name="orthogonal_", function=init.orthogonal_, shape=(12, 20), check=_has_singular_values(1.0)),
    InitCase(
        name="orthogonal_ gain",
        function=init.orthogonal_,
        shape=(9, 3, 2, 2),
        check=_has_singular_values(2.0),
        options={"gain": 2.0},
    ),
    InitCase(
        name="delta_orthogonal_", function=init.delta_orthogonal_, shape=(6, 4, 3, 3), check=_has_isometric_centre
    ),
]
