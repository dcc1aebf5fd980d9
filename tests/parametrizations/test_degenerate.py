"""Weights at which a norm, a gain or a decomposition is 0, tiny or large: value and two derivatives stay finite."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gonio
from catalog import seeded
from gonio import parametrizations as P
from gonio.errors import NotApplicableError
from parametrizations.layers import MEMBERS, make

FULL = (torch.float32, torch.float64)
DTYPES = (*FULL, torch.bfloat16, torch.float16)


def smallest(weight: Tensor) -> float:
    """A subnormal number of the dtype."""
    return torch.finfo(weight.dtype).tiny / 4


def _first_row(weight: Tensor, factor: float) -> Tensor:
    return torch.cat([weight[:1] * factor, weight[1:]])


WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "zero row": lambda w: _first_row(w, 0),
    "all zero": torch.zeros_like,
    "subnormal row": lambda w: _first_row(w.sign(), smallest(w)),
    "all subnormal": lambda w: w.sign() * smallest(w),
    "tiny": lambda w: w * torch.finfo(w.dtype).tiny * 64,
    "rows of very different size": lambda w: _first_row(w, 1e-4),
    "two equal rows": lambda w: torch.cat([w[:1], w[:1], w[2:]]),
    "constant": torch.ones_like,
    "large": lambda w: w * (1e3 if w.dtype is torch.float16 else 1e15),
}


def derivatives(map_: Callable[[Tensor], Tensor], raw: Tensor, *, twice: bool) -> list[Tensor]:
    raw = raw.detach().requires_grad_()
    weight = map_(raw)
    cotangent = seeded(*weight.shape, seed=7, dtype=weight.dtype)
    (first,) = torch.autograd.grad((weight * cotangent).sum(), raw, create_graph=twice)
    if not twice:
        return [weight, first]
    (second,) = torch.autograd.grad((first * seeded(*raw.shape, seed=8, dtype=raw.dtype)).sum(), raw, allow_unused=True)
    return [weight, first] if second is None else [weight, first, second]


@pytest.mark.grid(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("what", WEIGHTS)
@pytest.mark.parametrize("name", ["linear", "grouped conv2d", "transposed conv2d"])
@pytest.mark.parametrize("member", MEMBERS)
def test_value_and_derivatives_are_finite(member: str, name: str, what: str, dtype: torch.dtype) -> None:
    """Attached there, and trained to there from elsewhere (with the singular vectors of another weight)."""
    raw = WEIGHTS[what](make(name).weight.detach().to(dtype))
    there, elsewhere = make(name).to(dtype), make(name, seed=3).to(dtype)
    with torch.no_grad():
        there.weight.copy_(raw)
    for layer in (there, elsewhere):
        P.attach(layer, "weight", MEMBERS[member].make())
        map_ = P.parametrization_of(layer)
        found = derivatives(map_, raw, twice=dtype in FULL and what not in ("subnormal row", "all subnormal", "tiny"))
        assert all(bool(t.isfinite().all()) for t in found), [float(t.abs().max()) for t in found]
        P.tick_(layer)
        assert all(bool(t.isfinite().all()) for t in (*layer.parameters(), *layer.buffers(), layer.weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("member", [member for member in MEMBERS if "at_most" not in member])
def test_the_scale_of_what_is_trained_is_forgotten(member: str, dtype: torch.dtype) -> None:
    """Over the range of the dtype: no ε of another dtype hides in a norm. A cap keeps the scale of what is below it."""
    layer = make("linear").to(dtype)
    P.attach(layer, "weight", MEMBERS[member].make())
    map_, raw = P.parametrization_of(layer), layer._parameters["weight"].detach()
    expected = map_(raw)
    for exponent in (-10, -5, 5, 10) if dtype is torch.float16 else (-30, -12, 12, 30):
        torch.testing.assert_close(map_(raw * 2.0**exponent), expected)


@pytest.mark.parametrize("kind", [P.SpectralNorm, P.Orthogonal])
def test_a_weight_that_cannot_be_decomposed_is_refused_in_words(kind: type[P.Parametrization]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[1].weight[0, 0] = torch.nan
    parameters = dict(model.named_parameters())
    with pytest.raises(NotApplicableError, match=r"'Linear\.weight'; it has values that are not finite"):
        gonio.parametrize_(model, kind())
    assert all(value is parameters[name] for name, value in model.named_parameters())
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]
