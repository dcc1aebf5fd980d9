"""Rows per head: norms and changes of heads against slices by hand, with shared keys and values and fused weights."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gonio
from catalog import seeded
from surgery.net import Net

X = seeded(2, 5, 8, dtype=torch.float64)
ROLES = ("query", "key", "value", "output")


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Four heads of four on two of keys and values."""
    q = q.unflatten(-1, (4, 4)).transpose(1, 2)
    k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2).repeat_interleave(2, 1) for y in (k, v))
    return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)


def separate() -> nn.Module:
    layers = {"q": nn.Linear(8, 16), "k": nn.Linear(8, 8), "v": nn.Linear(8, 8), "o": nn.Linear(16, 8)}
    return _random(Net(lambda m, x: m.o(attend(m.q(x), m.k(x), m.v(x))), **layers))


def fused() -> nn.Module:
    """Queries, keys and values in one weight."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.o(attend(*m.qkv(x).split((16, 8, 8), -1)))

    return _random(Net(forward, qkv=nn.Linear(8, 32), o=nn.Linear(16, 8)))


def _random(model: nn.Module) -> nn.Module:
    for seed, p in enumerate(model.parameters()):
        p.data = seeded(*p.shape, seed=seed, dtype=torch.float64) * (0.5 + seed % 3)
    return model


def slices(model: Any, head: int) -> tuple[Tensor, ...]:
    """The rows of one head of four and of its keys and values, and its columns, by hand."""
    if hasattr(model, "qkv"):
        query, key, value = model.qkv.weight.detach().split((16, 8, 8))
    else:
        query, key, value = (getattr(model, name).weight.detach() for name in "qkv")
    own, shared = slice(4 * head, 4 * head + 4), slice(4 * (head // 2), 4 * (head // 2) + 4)
    return query[own], key[shared], value[shared], model.o.weight.detach()[:, own]


both = pytest.mark.parametrize("make", [separate, fused])


@both
def test_the_norms_of_heads_are_those_of_their_rows_and_columns(make: Any) -> None:
    model = make()
    heads = gonio.measure(model, batch=X).heads
    assert [(head.path, head.head, head.kv_head) for head in heads] == [("", n, n // 2) for n in range(4)]
    for head in heads:
        expected = [float(part.norm()) for part in slices(model, head.head)]
        assert [getattr(head, role) for role in ROLES] == pytest.approx(expected, rel=1e-12)


@both
def test_the_change_of_a_head_is_that_of_its_rows_and_columns(make: Any) -> None:
    before = make()
    after = copy.deepcopy(before)
    with torch.no_grad():
        rows = after.qkv.weight if hasattr(after, "qkv") else after.q.weight
        rows[4:8] += 0.1  # the queries of head 1
        after.o.weight[:, 12:] *= 2  # the outputs of head 3
    found = gonio.measure(before, after)
    for head in found.heads:
        pairs = list(zip(slices(before, head.head), slices(after, head.head), strict=True))
        shares = [float((b - a).norm() / a.norm()) for a, b in pairs]
        assert [getattr(head, role) for role in ROLES] == pytest.approx(shares, rel=1e-12)
        moved, was = (
            sum(float(x.square().sum()) for x in xs) for xs in ([b - a for a, b in pairs], [a for a, _ in pairs])
        )
        assert head.relative == pytest.approx((moved / was) ** 0.5, rel=1e-12)
    assert [head.head for head in found.heads if head.relative] == [1, 3]
    assert "2 of 4 heads changed, most" in str(found)
    assert [head["head"] for head in json.loads(found.to_json())["heads"]] == [0, 1, 2, 3]


def test_heads_are_compared_with_a_state_dict_under_other_names() -> None:
    model = separate()
    before = {f"model.{name}": value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.k.weight[4:] *= 3  # the keys of heads 2 and 3
    for found in (gonio.measure(before, model), gonio.measure(model, before)):
        assert [head.head for head in found.heads if head.key] == [2, 3]
    assert gonio.measure(before, model).heads[2].key == pytest.approx(2.0)


def test_a_head_that_was_zero_has_no_relative_change() -> None:
    before = separate()
    with torch.no_grad():
        before.o.weight[:, :4] = 0
    after = copy.deepcopy(before)
    with torch.no_grad():
        after.o.weight[:, :4] = 1
    for was in (before, before.state_dict()):
        (head, *_) = gonio.measure(was, after).heads
        assert head.output is None
        assert head.relative == pytest.approx(32**0.5 / sum(float(x.square().sum()) for x in slices(before, 0)) ** 0.5)


def test_many_blocks_have_few_rows_in_a_terminal_and_all_in_exports() -> None:
    layers = [nn.TransformerEncoderLayer(8, 2, 8, batch_first=True) for _ in range(14)]
    found = gonio.measure(nn.Sequential(*layers))
    assert len(found.heads) == 28
    assert "and 2 more blocks: to_dict() has all heads" in str(found)
    assert len(found.to_dict()["heads"]) == 28


@pytest.mark.parametrize(
    "model", [nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), nn.Conv2d(3, 4, 3)], ids=["mlp", "conv"]
)
def test_models_without_attention_have_no_heads(model: nn.Module) -> None:
    assert gonio.measure(model).heads == ()
    assert gonio.measure(model, copy.deepcopy(model)).heads == ()
