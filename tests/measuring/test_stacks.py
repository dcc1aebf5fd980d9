"""Small tensors of one shape are measured at once: their rows are those of tensors that are measured one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import gonio
from catalog import seeded
from gonio.geometry.blocks import GramMatrix
from gonio.geometry.spectra import singular_values_of_each
from gonio.measuring.figures import tensor as figures
from gonio.measuring.figures.tensor import TensorMeasurement, alike
from gonio.measuring.reading.source import contents_of

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = [(12, 20), (20, 12), (16, 16), (1, 9), (9, 1), (2, 2), (300, 8), (10, 4, 3), (16, 3, 3, 3), (6, 2, 1, 2, 3)]


def rows(source: Any) -> tuple[TensorMeasurement, ...]:
    return gonio.measure(source).tensors


@pytest.fixture
def stacked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tensors that are measured at once, as they come."""
    seen: list[int] = []
    each = figures._filters_of_each

    def counted(matrices: Tensor, norms: Tensor) -> Any:
        seen.append(len(matrices))
        return each(matrices, norms)

    monkeypatch.setattr(figures, "_filters_of_each", counted)
    return seen


def one_by_one(source: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[TensorMeasurement, ...]:
    with monkeypatch.context() as patch:
        patch.setattr(figures, "SMALL", 0)
        return rows(source)


def same(found: Sequence[TensorMeasurement], expected: Sequence[TensorMeasurement]) -> str:
    """The first figure that differs by more than rounding; empty if none does."""
    for one, other in zip(found, expected, strict=True):
        # of parallel rows: angles are roots of a rounding error, and all pairs are the closest
        parallel = all(each.angle_mean is not None and each.angle_mean < 0.05 for each in (one, other))
        for field in fields(TensorMeasurement):
            a, b = getattr(one, field.name), getattr(other, field.name)
            if field.name == "angle_histogram" and a != b:  # an angle at the edge of a degree
                if sum(abs(x - y) for x, y in zip(a, b, strict=True)) > 2:
                    return f"{one.name}: {field.name}"
            elif parallel and field.name in ("angle_mean", "angle_std", "closest"):
                continue
            elif not _close(a, b):
                return f"{one.name}: {field.name} {a} {b}"
    return ""


def _close(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_close, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return a == b or math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-5)
    return bool(a == b)


def damaged(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """Ordinary tensors of a shape, and one of each kind that is not."""
    made = {f"layers.{i}.weight": seeded(*shape, seed=i).to(dtype) for i in range(4)}

    def changed(name: str, change: Callable[[Tensor], object]) -> None:
        made[f"{name}.weight"] = seeded(*shape, seed=len(made)).to(dtype)
        change(made[f"{name}.weight"])

    changed("nan", lambda w: w[-1].fill_(float("nan")))
    changed("infinite", lambda w: w[0].fill_(float("-inf")))
    changed("zero", lambda w: w.zero_())
    changed("zero row", lambda w: w[0].zero_())
    changed("constant", lambda w: w.fill_(-0.25))
    changed("gains", lambda w: w.fill_(1.25))
    changed("equal rows", lambda w: w.copy_(w[:1].clone().expand_as(w)))
    changed("opposite rows", lambda w: w[-1:].copy_(-w[:1]))
    changed("tiny", lambda w: w.mul_(2.0**-12))
    changed("large", lambda w: w.mul_(2.0**10))
    changed("positive", lambda w: w.abs_())
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_those_of_single_tensors(
    shape: tuple[int, ...], dtype: torch.dtype, stacked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = damaged(shape, dtype)
    expected = one_by_one(state, monkeypatch)
    assert not stacked
    assert same(rows(state), expected) == ""
    assert len(stacked) == (shape[0] <= 256)
    assert not stacked or stacked[0] >= 4


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(20, 12),
        lambda: nn.ConvTranspose2d(6, 10, 3),
        lambda: nn.Conv2d(8, 12, 3, groups=4),
        lambda: nn.LSTM(6, 5),
        lambda: nn.Embedding(30, 8, padding_idx=3),
    ],
    ids=["linear", "transposed", "grouped", "lstm", "embedding"],
)
def test_layers_of_models_too(make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleList([make() for _ in range(4)])
    assert same(rows(model), one_by_one(model, monkeypatch)) == ""


def test_a_mistake_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"{i}.weight": seeded(12, 20, seed=i) for i in range(4)}
    expected, each = one_by_one(state, monkeypatch), figures._filters_of_each
    monkeypatch.setattr(figures, "_filters_of_each", lambda matrices, norms: each(matrices.flip(0), norms))
    assert same(rows(state), expected).startswith("0.weight: ")


def test_parts_are_of_one_kind_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "STACK", 3 * 96)
    state = {f"a.{i}.weight": seeded(12, 8, seed=i) for i in range(7)}
    state |= {f"b.{i}.weight": seeded(8, 12, seed=i) for i in range(2)} | {"c.weight": seeded(12, 8).half()}
    state |= {"norm": torch.ones(8), "large.weight": seeded(300, 300)}
    entries = contents_of(state).entries
    parts = list(alike(entries, range(len(entries))))
    assert sorted(n for part in parts for n in part) == list(range(len(entries)))
    assert sorted(map(len, parts)) == [1, 1, 1, 1, 2, 3, 3]
    assert all(len({(entries[n].shape, entries[n].dtype) for n in part}) == 1 for part in parts)


def test_a_tensor_that_cannot_be_read_leaves_the_others(tmp_path: Path, stacked: list[int]) -> None:
    path = tmp_path / "a.safetensors"
    save_file({f"layers.{i}.weight": seeded(12, 8, seed=i) for i in range(5)}, path)
    whole, entries = rows(path), contents_of(path).entries
    assert stacked == [5]

    def broken() -> Tensor:
        raise OSError("the disk is gone")

    object.__setattr__(entries[2], "load", broken)
    found = figures.measure_tensors(entries)
    assert found[2].reason == "cannot be read: the disk is gone"
    assert [row for n, row in enumerate(found) if n != 2] == [row for n, row in enumerate(whole) if n != 2]


def test_a_journal_repeats_at_most_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "STACK", 3 * 96)
    path, journal = tmp_path / "a.safetensors", tmp_path / "j"
    save_file({f"layers.{i}.weight": seeded(12, 8, seed=i) for i in range(8)}, path)
    whole = gonio.measure(path)

    def stop(done: int, total: int) -> None:
        if done == 6:
            raise InterruptedError("stopped")

    with pytest.raises(InterruptedError, match="stopped"):
        gonio.measure(path, journal=journal, progress=stop)
    seen: list[int] = []
    again = gonio.measure(path, journal=journal, progress=lambda done, _: seen.append(done))
    assert seen == [8]
    assert again.to_dict() == whole.to_dict()


def test_small_singular_values_of_a_stack_are_exact() -> None:
    """A matrix of low rank beside others: its values come from a decomposition of itself."""
    stack = seeded(3, 20, 30, dtype=torch.float64)
    stack[1, 5:] = stack[1, :5].repeat(3, 1) * 2
    found = singular_values_of_each(stack, GramMatrix.of(stack))
    torch.testing.assert_close(found.flip(1), torch.linalg.svdvals(stack), rtol=1e-9, atol=1e-12)
