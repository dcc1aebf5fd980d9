"""logit_bound: never below a logit, attained where the formula says so, and close for random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from catalog import seeded
from gonio.errors import InvalidArgumentError
from gonio.geometry import logit_bound
from gonio.surgery import anatomy

HEADS, SIZE, WIDTH = 4, 6, 20


def normed(x: Tensor, norm: str, gain: Tensor, shift: Tensor | None) -> Tensor:
    x = x - x.mean(-1, keepdim=True) if norm == "layer" else x
    x = x / x.square().mean(-1, keepdim=True).sqrt() * gain
    return x if shift is None else x + shift


def turned(x: Tensor, positions: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    z = torch.complex(x[..., :half], x[..., half:])
    z = z * torch.polar(torch.ones(()).double(), positions[:, None] / 10.0 ** torch.arange(half))
    return torch.cat([z.real, z.imag], -1)


def inputs(weights: Tensor, count: int, seed: int) -> Tensor:
    """Random ones, and the directions to which the weights respond most."""
    directions = torch.linalg.svd(weights.flatten(0, 1))[2]
    return torch.cat([seeded(count, weights.shape[-1], seed=seed, dtype=torch.float64), directions, -directions])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("kv", [4, 2, 1])
def test_no_logit_exceeds_the_bound(kv: int, norm: Any, biased: bool, rotary: bool, seed: int) -> None:
    query, key = (seeded(n, SIZE, WIDTH, seed=seed + n, dtype=torch.float64) for n in (HEADS, kv))
    gain = seeded(WIDTH, seed=seed, dtype=torch.float64).exp()
    shift = seeded(WIDTH, seed=seed + 9, dtype=torch.float64) if biased else None
    biases = [seeded(n, SIZE, seed=seed + 5, dtype=torch.float64) if biased else None for n in (HEADS, kv)]
    bound = logit_bound(
        query, key, norm=norm, gain=gain, shift=shift, query_bias=biases[0], key_bias=biases[1], rotary=rotary
    )
    x = normed(inputs(torch.cat([query, key]), 300, seed), norm, gain, shift)
    q, k = (
        torch.einsum("nd,hsd->hns", x, w) + (0 if b is None else b[:, None])
        for w, b in ((query, biases[0]), (key, biases[1]))
    )
    if rotary:
        q, k = (turned(t, seeded(len(x), seed=3).double() * 50) for t in (q, k))
    logits = (q @ k.repeat_interleave(HEADS // kv, 0).mT / SIZE**0.5).abs().amax((-2, -1))
    assert (logits <= bound).all()
    assert (bound < (12 if rotary or biased else 6) * logits).all()


def test_the_bound_is_attained_without_positions_and_biases() -> None:
    query, key = (seeded(1, SIZE, WIDTH, seed=n, dtype=torch.float64) for n in (1, 2))
    u, _, v = torch.linalg.svd(query[0].T @ key[0])
    x, y = u[:, 0] * WIDTH**0.5, v[0] * WIDTH**0.5
    logit = (query[0] @ x) @ (key[0] @ y) / SIZE**0.5
    torch.testing.assert_close(logit_bound(query, key)[0], logit.abs(), rtol=1e-8, atol=0)


@pytest.mark.parametrize("rotary", [False, True])
def test_norms_of_queries_and_keys_bound_the_logits_whatever_the_weights(rotary: bool) -> None:
    query, key = (1e3 * seeded(2, SIZE, WIDTH, seed=n, dtype=torch.float64) for n in (1, 2))
    gains = [seeded(SIZE, seed=n, dtype=torch.float64).exp() for n in (3, 4)]
    bound = logit_bound(query, key, query_gain=gains[0], key_gain=gains[1], rotary=rotary)
    x = inputs(torch.cat([query, key]), 500, 0)
    q, k = (normed(torch.einsum("nd,hsd->hns", x, w), "rms", g, None) for w, g in zip((query, key), gains, strict=True))
    if rotary:
        q, k = (turned(t, torch.arange(len(x)).double()) for t in (q, k))
    logits = (q @ k.mT / SIZE**0.5).abs().amax((-2, -1))
    assert (logits <= bound).all()
    assert (bound < 4 * logits).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Phi-3"])
def test_a_model_of_transformers_by_its_anatomy(name: str) -> None:
    from bank.live.transformers_models import CASES

    torch.manual_seed(0)
    model, example = next(case for case in CASES if case.name == name).make()
    model = model.double().eval()
    gain = model.model.layers[0].input_layernorm.weight
    found = anatomy(model, example=example).attention[0]
    named = dict(model.named_parameters())

    def rows(heads: Any) -> tuple[Tensor, Tensor]:
        weights = [torch.cat([named[p.tensor][p.indices] for p in parts]) for parts in heads]
        biases = [
            torch.cat([named[p.bias][p.indices] if p.bias else torch.zeros(p.count) for p in parts]) for parts in heads
        ]
        return torch.stack(weights), torch.stack(biases)

    (query, query_bias), (key, key_bias) = rows(found.query), rows(found.key)
    bound = logit_bound(query, key, gain=gain, query_bias=query_bias, key_bias=key_bias, rotary=True)
    torch.manual_seed(1)
    x = normed(torch.randn(200, 16).double(), "rms", gain, None)
    q, k = (torch.einsum("nd,hsd->hns", x, w) + b[:, None] for w, b in ((query, query_bias), (key, key_bias)))
    logits = (q @ k.repeat_interleave(found.heads // found.kv_heads, 0).mT / 8**0.5).abs().amax((-2, -1))
    assert (logits <= bound).all()
    assert (bound < 12 * logits).all()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"query": torch.ones(3, 2)}, r"takes weights \(heads, head size, width\); found \(3, 2\) and \(2, 4, 8\)"),
        ({"query": torch.ones(3, 4, 8)}, r"found \(3, 4, 8\) and \(2, 4, 8\)"),
        ({"norm": "batch"}, "norm=. is 'rms' or 'layer'; found 'batch'"),
        ({"query_gain": torch.ones(4)}, "takes query_gain and key_gain together; found one of them"),
        ({"query": torch.full((2, 4, 8), torch.nan)}, "needs finite entries; found 64 of 64 NaN or infinite"),
        ({"gain": torch.full((8,), torch.nan)}, "needs finite entries; found 8 of 8 NaN or infinite"),
        ({"shift": torch.full((8,), torch.inf)}, "needs finite entries; found 8 of 8"),
        ({"query_bias": torch.full((2, 4), torch.nan)}, "needs finite entries; found 8 of 8"),
        ({"query_gain": torch.ones(4), "key_gain": torch.full((4,), torch.nan)}, "needs finite entries; found 4 of 4"),
    ],
)
def test_errors(arguments: dict[str, Any], match: str) -> None:
    given = {"query": torch.ones(2, 4, 8), "key": torch.ones(2, 4, 8)} | arguments
    with pytest.raises(InvalidArgumentError, match=match):
        logit_bound(given.pop("query"), given.pop("key"), **given)
