"""Penalties and holds per head, and scale-shift on pairs of blocks: against slices by hand in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gonio
from catalog import seeded
from gonio import regularizers as R
from gonio.penalty import Penalty
from measuring.test_heads import X, fused, separate, slices
from surgery.test_symmetries import Block

both = pytest.mark.parametrize("make", [separate, fused])


def found_in(model: nn.Module) -> Any:
    return gonio.surgery.anatomy(model, example=X)


def defect(x: Tensor) -> Tensor:
    """‖W Wᵀ − I‖²/4 of one matrix: the orthogonality term by its formula."""
    return R.Orthogonality(1.0).value(x)


@both
def test_heads_are_matrices_of_their_own(make: Any) -> None:
    model = make()
    penalty = Penalty(model, [(None, R.Orthogonality(1e-2))], heads=found_in(model))
    heads = [slices(model, head) for head in range(4)]
    parts = [query for query, *_ in heads] + [part for head in (0, 2) for part in heads[head][1:3]]
    expected = 1e-2 * sum(float(defect(part)) for part in [*parts, model.o.weight.detach()])
    assert float(penalty().detach()) == pytest.approx(expected, rel=1e-12)
    whole = float(Penalty(model, [(None, R.Orthogonality(1e-2))])().detach())
    assert abs(whole / expected - 1) > 1e-3


@both
def test_the_gradient_of_heads_is_that_of_their_slices(make: Any) -> None:
    model, twin = make(), make()
    penalty = Penalty(model, [(None, R.Orthogonality(1e-2))], heads=found_in(model))
    penalty().backward()
    if hasattr(twin, "qkv"):
        q, k, v = twin.qkv.weight.split((16, 8, 8))
    else:
        q, k, v = twin.q.weight, twin.k.weight, twin.v.weight
    parts = [*q.split(4), *k.split(4), *v.split(4), twin.o.weight]
    torch.stack([1e-2 * R.Orthogonality(1.0).value(part) for part in parts]).sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)
    through_graph = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    Penalty(model, [(None, R.Orthogonality(1e-2))], heads=found_in(model)).add_grads_()
    for ours, theirs in zip([p.grad for p in model.parameters() if p.grad is not None], through_graph, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


# --- scale-shift on pairs ---------------------------------------------------------------------------------------------


def log_norms(model: Any) -> float:
    """Σ log of the norms of both sides of each pair, by hand: heads share keys and values two by two."""
    total = 0.0
    for group in range(2):
        a, b = (slices(model, 2 * group + n) for n in range(2))
        sides = [torch.cat([a[0], b[0]]), a[1], a[2], torch.cat([a[3], b[3]], 1)]
        total += sum(float(side.norm().log()) for side in sides)
    return total


@both
def test_scale_shift_is_the_logarithm_of_pairs(make: Any) -> None:
    model = make()
    penalty = Penalty(model, [(None, R.ScaleShift(1.0, floor=1e-6))], heads=found_in(model))
    assert float(penalty().detach()) == pytest.approx(log_norms(model), rel=1e-12)
    assert "pair of values and outputs, by head" in str(penalty)
    model.zero_grad()
    penalty().backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    penalty.add_grads_()
    for ours, theirs in zip([p.grad for p in model.parameters() if p.grad is not None], grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@both
def test_scale_that_moves_between_heads_changes_no_pair(make: Any) -> None:
    model = make()
    before = model(X).detach()

    def value(of: nn.Module, heads: Any) -> float:
        return float(Penalty(of, [(None, R.ScaleShift(1.0, floor=1e-6))], heads=heads)().detach())

    found, moved = found_in(model), copy.deepcopy(model)
    start, whole = value(model, found), value(model, None)
    with torch.no_grad():
        fused_ = hasattr(moved, "qkv")
        rows, bias = (moved.qkv.weight, moved.qkv.bias) if fused_ else (moved.v.weight, moved.v.bias)
        first = 24 if fused_ else 0
        rows[first : first + 4] *= 5  # the values of heads 0 and 1
        bias[first : first + 4] *= 5
        moved.o.weight[:, :8] /= 5
        rows, bias = (moved.qkv.weight, moved.qkv.bias) if fused_ else (moved.q.weight, moved.q.bias)
        rows[8:16] *= 3  # the queries of heads 2 and 3
        bias[8:16] *= 3
        rows, bias = (moved.qkv.weight, moved.qkv.bias) if fused_ else (moved.k.weight, moved.k.bias)
        first = 20 if fused_ else 4
        rows[first : first + 4] /= 3
        bias[first : first + 4] /= 3
    torch.testing.assert_close(moved(X).detach(), before, rtol=1e-12, atol=1e-12)
    assert value(moved, found) == pytest.approx(start, rel=1e-12)
    assert abs(value(moved, None) - whole) > 1e-2  # single weights are fooled by it


@pytest.mark.parametrize("power", [1, 2])
def test_units_are_pairs_by_the_degree_of_the_activation(power: int) -> None:
    """s rows and s⁻² columns of a squared ReLU: the row counts twice."""
    model = Block(act=lambda x: x.relu() ** power)
    found = found_in(model)
    penalty = Penalty(model, [("re:up|down", R.ScaleShift(1.0, floor=1e-6))], heads=found)
    rows, columns = model.up.weight.detach().norm(dim=1), model.down.weight.detach().norm(dim=0)
    assert float(penalty().detach()) == pytest.approx(float((power * rows.log() + columns.log()).sum()), rel=1e-12)
    start = float(penalty().detach())
    gonio.balance_(model, example=X)
    assert float(penalty().detach()) == pytest.approx(start, rel=1e-10)


def test_a_gate_is_a_weight_of_its_own_and_stays() -> None:
    model = Block(act=torch.nn.functional.silu, gated=True)
    penalty = Penalty(model, [(None, R.ScaleShift(1.0, floor=1e-6))], heads=found_in(model))
    penalty()
    assert penalty.values()["gate.weight/ScaleShift"] == pytest.approx(float(model.gate.weight.detach().norm().log()))


def test_the_scale_before_a_norm_of_queries_is_not_penalised() -> None:
    import torch.nn.functional as F

    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT).softmax(-1) @ v

    model = Block(attend)
    shown = str(Penalty(model, [(None, R.ScaleShift(1e-3))], heads=found_in(model)))
    for name in ("q.weight[query]", "k.weight[key]"):
        (line,) = [line for line in shown.splitlines() if name in line]
        assert line.endswith("skipped: its scale does not matter: a norm follows queries or keys")
    kept = Penalty(model, [(None, R.ScaleShift(1e-3, before_norm="keep"))], heads=found_in(model))
    assert len(kept) == 6
    plain = Penalty(model, [(None, R.Orthogonality(1e-3))], heads=found_in(model))
    assert "skipped" not in str(plain)


def test_balancing_changes_no_pair_and_lowers_the_sum_of_squares() -> None:
    """balance_ moves scale by channel, and pairs are invariant by head: the sum of logarithms can only fall."""
    model = fused()
    heads = found_in(model)
    l2 = sum(float(p.detach().square().sum()) for p in model.parameters() if p.ndim > 1)
    start = log_norms(model)
    gonio.balance_(model, example=X)
    assert log_norms(model) <= start + 1e-9
    assert sum(float(p.detach().square().sum()) for p in model.parameters() if p.ndim > 1) < l2
    assert float(Penalty(model, [(None, R.ScaleShift(1.0, floor=1e-6))], heads=heads)().detach()) == pytest.approx(
        log_norms(model), rel=1e-12
    )


def test_many_blocks_are_one_sum() -> None:
    """ScaleShift of a weight in blocks is the sum over its blocks, and so is its gradient."""
    from gonio.geometry import Layout

    for blocks in (1, 3, 30):
        w = seeded(30, 7, dtype=torch.float64).requires_grad_()
        term = R.ScaleShift(1.0, direction_strength=0.3, floor=0.5)
        parts = w.chunk(blocks)
        expected = sum((term(part) for part in parts), torch.zeros(()))
        (gradient,) = torch.autograd.grad(expected, w)
        value = term(w, Layout(blocks=blocks))
        torch.testing.assert_close(value, expected.to(value))
        torch.testing.assert_close(torch.autograd.grad(value, w)[0], gradient)


# --- hold_ ------------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("step", ["free", "fixed"])
def test_each_head_keeps_its_norm(make: Any, step: Any) -> None:
    model = make()
    before = [[float(part.norm()) for part in slices(model, head)] for head in range(4)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = gonio.hold_(model, optimizer, step=step, heads=found_in(model))
    name = "qkv" if hasattr(model, "qkv") else "q"
    assert held.state_dict()[f"{name}.weight"].numel() == (8 if name == "qkv" else 4)
    for _ in range(3):
        optimizer.zero_grad()
        model(X).square().sum().backward()
        optimizer.step()
    for head in range(4):
        after = [float(part.norm()) for part in slices(model, head)[:3]]
        assert after == pytest.approx(before[head][:3], rel=1e-9)
        assert float(slices(model, head)[3].norm()) != pytest.approx(before[head][3], rel=1e-4)  # columns are free
    held.undo_()


def test_heads_that_are_not_consecutive_rows_are_held_with_their_weight() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (4, 2)).permute(0, 3, 1, 2) for layer in (m.q, m.k, m.v))
        return m.o(((q @ k.mT).softmax(-1) @ v).permute(0, 2, 3, 1).flatten(2))

    from surgery.net import Net

    model = Net(forward, q=nn.Linear(8, 8), k=nn.Linear(8, 8), v=nn.Linear(8, 8), o=nn.Linear(8, 8)).double()
    found = found_in(model)
    assert found.attention[0].query[0][0].rows == ((0, 1), (2, 3), (4, 5), (6, 7))
    held = gonio.hold_(model, torch.optim.SGD(model.parameters(), lr=0.1), heads=found)
    assert held.state_dict()["q.weight"].numel() == 1
    held.undo_()
    penalty = Penalty(model, [("q", R.Orthogonality(1.0))], heads=found)
    expected = sum(float(defect(model.q.weight.detach()[n::2])) for n in range(2))
    assert float(penalty().detach()) == pytest.approx(expected, rel=1e-12)
