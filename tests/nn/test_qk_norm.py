"""QKNormLinear: heads against a float64 reference, the bound of logits, the layout of rows, states and errors."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from catalog import norms, seeded
from gonio import nn as gnn
from gonio.errors import InvalidArgumentError
from gonio.geometry import logit_bound
from tolerances import close, exact

IN, SIZE = 6, 4


def ranges(start: int, count: int, *, size: int = SIZE, step: int = 0) -> list[tuple[int, int]]:
    """Heads of `size` rows, each `step` rows after the one before."""
    step = step or size
    return [(start + n * step, start + n * step + size) for n in range(count)]


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "queries": (12, {"query": ranges(0, 3)}),
    "keys": (8, {"key": ranges(0, 2)}),
    "fused": (36, {"query": ranges(0, 3), "key": ranges(12, 3)}),
    "fused, grouped": (32, {"query": ranges(0, 4), "key": ranges(16, 2)}),
    "by head": (36, {"query": ranges(0, 3, step=12), "key": ranges(4, 3, step=12)}),
    "by group": (32, {"query": [*ranges(0, 2), *ranges(16, 2)], "key": ranges(8, 2, step=16)}),
    "keys of another size": (18, {"query": ranges(0, 2), "key": ranges(8, 2, size=3)}),
    "gaps": (25, {"query": [(3, 7), (14, 18)], "key": [(8, 12)]}),
    "one row": (3, {"query": [(1, 2)]}),
    "in another order": (12, {"query": [(8, 12), (0, 4), (4, 8)]}),
}  # fmt: skip


def made(name: str, **options: Any) -> gnn.QKNormLinear:
    torch.manual_seed(0)
    rows, heads = LAYOUTS[name]
    layer = gnn.QKNormLinear(IN, rows, **heads, **options)
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter += 0.3 * seeded(*parameter.shape, seed=seed, dtype=parameter.dtype)
    return layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_outputs_are_those_of_the_formula(name: str, bias: bool) -> None:
    layer = made(name, bias=bias, eps=1e-2, dtype=torch.float64)
    x = seeded(2, 5, IN, dtype=torch.float64)
    torch.testing.assert_close(layer(x), norms.qk_norm(layer, x), **exact(torch.float64))


@pytest.mark.parametrize("name", LAYOUTS)
def test_other_rows_are_those_of_the_linear_layer(name: str) -> None:
    layer, x = made(name), seeded(7, IN)
    heads = {row for each in (*layer.query, *layer.key) for row in range(*each)}
    others = sorted(set(range(layer.out_features)) - heads)
    assert torch.equal(layer(x)[:, others], F.linear(x, layer.weight, layer.bias)[:, others])


@pytest.mark.parametrize("shape", [(IN,), (1, IN), (2, 3, IN), (0, IN), (2, 1, 3, IN)])
def test_shapes(shape: tuple[int, ...]) -> None:
    assert made("by head")(seeded(*shape)).shape == (*shape[:-1], 36)


@pytest.mark.parametrize(("name", "segments"), [("queries", 1), ("fused", 3), ("by head", 3), ("by group", 3)])
def test_heads_of_one_kind_are_normalised_together(name: str, segments: int) -> None:
    """However many there are: the order of the rows repeats."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        made(name)(seeded(2, IN))
    calls = {each.key: each.count for each in seen.key_averages()}
    assert calls["aten::rms_norm"] == min(segments, 2)
    assert ("aten::cat" in calls) == (segments > 1)


@pytest.mark.parametrize("name", ["fused", "fused, grouped", "by head"])
@pytest.mark.parametrize("factor", [1e-4, 1.0, 1e4])
def test_logits_stay_below_the_bound(name: str, factor: float) -> None:
    layer = made(name, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.mul_(factor)
    y = layer(seeded(50, IN, dtype=torch.float64))
    q, k = (torch.stack([y[:, start:stop] for start, stop in heads]) for heads in (layer.query, layer.key))
    k = k.repeat_interleave(len(q) // len(k), 0)
    bound = SIZE**0.5 * (layer.query_gain * layer.key_gain).abs().max()
    assert (q @ k.mT).abs().max() / SIZE**0.5 <= bound
    one = torch.eye(SIZE)[None]
    gains = {"query_gain": layer.query_gain.detach(), "key_gain": layer.key_gain.detach()}
    torch.testing.assert_close(logit_bound(one, one, **gains)[0], bound.detach(), rtol=1e-6, atol=0)
    assert (q.norm(dim=-1) <= SIZE**0.5 * layer.query_gain.abs().max()).all()


def test_a_zero_head_is_zero_and_has_a_finite_gradient() -> None:
    layer = gnn.QKNormLinear(IN, 8, bias=False, query=[(0, 4)], key=[(4, 8)])
    with torch.no_grad():
        layer.weight[:4] = 0
    y = layer(seeded(3, IN))
    y.sum().backward()
    assert (y[:, :4] == 0).all()
    assert all(bool(p.grad.isfinite().all()) for p in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision(dtype: torch.dtype, autocast: bool) -> None:
    """Squares are summed in float32: outputs of 300 have a square beyond float16."""
    layer, x = made("fused"), 300 * seeded(4, IN)
    expected = layer(x)
    with torch.autocast("cpu", dtype, enabled=autocast):
        y = layer(x) if autocast else layer.to(dtype)(x.to(dtype))
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), expected, **close(dtype))


def test_state_has_the_keys_of_a_linear_layer_and_the_gains() -> None:
    layer = made("fused")
    assert list(layer.state_dict()) == ["weight", "bias", "query_gain", "key_gain"]
    plain = nn.Linear(IN, 36)
    assert layer.load_state_dict(plain.state_dict(), strict=False).missing_keys == ["query_gain", "key_gain"]
    assert torch.equal(layer.weight, plain.weight)
    stored = io.BytesIO()
    torch.save(layer, stored)
    stored.seek(0)
    again, x = torch.load(stored, weights_only=False), seeded(2, IN)
    assert torch.equal(again(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_gains_start_at_one_and_exist_for_the_kinds_that_a_layer_has() -> None:
    layer = gnn.QKNormLinear(IN, 8, query=ranges(0, 2))
    assert layer.key_gain is None
    assert torch.equal(layer.query_gain, torch.ones(SIZE))
    with torch.no_grad():
        layer.query_gain.zero_()
    layer.reset_parameters()
    assert torch.equal(layer.query_gain, torch.ones(SIZE))
    empty = gnn.QKNormLinear(IN, 8, key=ranges(0, 2), device="meta").to_empty(device="cpu")
    empty.reset_parameters()
    assert torch.equal(empty.key_gain, torch.ones(SIZE))
    assert empty(seeded(2, IN)).isfinite().all()


def test_the_same_seed_draws_the_weight_of_a_linear_layer() -> None:
    weights: list[Tensor] = []
    for layer in (lambda: nn.Linear(IN, 8), lambda: gnn.QKNormLinear(IN, 8, query=ranges(0, 2))):
        torch.manual_seed(3)
        weights.append(layer().weight)
    assert torch.equal(*weights)


def test_it_describes_itself() -> None:
    layer = gnn.QKNormLinear(6, 12, query=[(0, 4), (4, 8)], key=[(8, 12)], eps=1e-5)
    assert repr(layer) == (
        "QKNormLinear(in_features=6, out_features=12, bias=True, query=2 heads of 4, key=1 head of 4, eps=1e-05)"
    )


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ({}, "normalises the rows of heads, given as query or key; found neither"),
        ({"query": [(0, 4), (3, 7)]}, "each row belongs to one head; found"),
        ({"query": [(0, 4)], "key": [(2, 6)]}, "each row belongs to one head; found"),
        ({"query": [(0, 4), (4, 6)]}, r"QKNormLinear\(query=\) takes heads of one size"),
        ({"key": [(4, 13)]}, r"QKNormLinear\(key=\) takes half-open ranges of the 12 rows; found \[\(4, 13\)\]"),
        ({"key": [(4, 4)]}, "half-open ranges"),
        ({"key": [(-4, 0)]}, "half-open ranges"),
        ({"query": [(0, 4)], "eps": 0.0}, "eps must be positive; found 0.0"),
        ({"query": [(0, 4)], "eps": float("nan")}, "eps must be positive; found nan"),
    ],
)
def test_wrong_arguments_are_refused(heads: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        gnn.QKNormLinear(IN, 12, **heads)
