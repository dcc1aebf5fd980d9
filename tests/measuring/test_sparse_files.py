"""Weights that compressed-tensors stores without their zeros, with a bit for each entry."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gonio import check
from gonio.measuring import difference, measure
from gonio.measuring.changes.sources import base_entries, values_of

State = dict[str, Tensor]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed(path: str, weight: Tensor, mask: Tensor, *, offsets: bool) -> State:
    """The tensors of `sparse-bitmask`, or without offsets those of `sparse-24-bitmask`, bit by bit."""
    rows = mask.reshape(-1, mask.shape[-1])
    wide = -(-rows.shape[1] // 8)
    bits = torch.zeros(len(rows), wide, dtype=torch.uint8)
    values: list[Tensor] = []
    begin = []
    for i, row in enumerate(rows.tolist()):
        begin.append(len(values))
        for j, kept in enumerate(row):
            if kept:
                bits[i, j // 8] += 2 ** (j % 8)
                values.append(weight.reshape(rows.shape)[i, j])
    compressed = torch.stack(values)
    state = {f"{path}.compressed": compressed, f"{path}.bitmask": bits.reshape(*mask.shape[:-1], wide)}
    shape = torch.tensor(weight.shape)
    if offsets:
        return state | {f"{path}.shape": shape, f"{path}.row_offsets": torch.tensor(begin).reshape(mask.shape[:-1])}
    state[f"{path}.compressed"] = compressed.reshape(len(rows), -1)
    return state | {f"{path}.shape": shape.reshape(-1, 1)}


def two_of_four(*shape: int) -> Tensor:
    """A mask with two bits in each four entries."""
    order = draw(*shape, seed=3).reshape(-1, 4).argsort(1)
    return (order < 2).reshape(shape)


def written(folder: Path, state: State, kind: str = "sparse-bitmask", **more: Any) -> Path:
    save_file({name: value.contiguous() for name, value in state.items()}, folder / "model.safetensors")
    about = {"quant_method": "compressed-tensors", "sparsity_config": {"format": kind, "targets": ["Linear"]}, **more}
    (folder / "config.json").write_text(json.dumps({"quantization_config": about}))
    return folder


def read(folder: Path, name: str) -> Tensor:
    values = values_of(base_entries(folder)[name], "")
    assert isinstance(values, Tensor), values
    return values.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(5, 13), (3, 8), (4, 3, 3, 5), (2, 9)])
def test_values_stand_where_their_bits_are(shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path) -> None:
    weight, mask = draw(*shape).to(dtype), draw(*shape, seed=1) > 0
    mask[..., -1] = True
    mask[0] = False  # rows without values
    folder = written(tmp_path, packed("a", weight, mask, offsets=True) | {"b.weight": draw(5, 7)})
    expected = (weight * mask).double()
    assert torch.equal(read(folder, "a.weight"), expected)
    rows = measure(folder)
    assert (rows["a"].status, rows["a"].shape) == ("measured", shape)
    assert rows["a"].frobenius == pytest.approx(float(expected.norm()), rel=1e-6)
    assert not [row.name for row in rows.values() if row.status == "skipped"]
    assert check(folder).intact
    assert difference(folder, folder)["a"].status == "equal"


@pytest.mark.parametrize("shape", [(5, 12), (3, 8), (16, 20)])
def test_two_values_of_four(shape: tuple[int, int], tmp_path: Path) -> None:
    weight, mask = draw(*shape).half(), two_of_four(*shape)
    weight[0, 0] = 0.0  # a bit may stand for a zero
    folder = written(tmp_path, packed("a", weight, mask, offsets=False), "sparse-24-bitmask")
    assert torch.equal(read(folder, "a.weight"), (weight * mask).double())


@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("scales", [(6, 1), (1,)])
def test_codes_without_zeros_have_a_scale(codes: torch.dtype, scales: tuple[int, ...], tmp_path: Path) -> None:
    held, mask = (30 * draw(6, 20)).round().clamp(-127, 127).to(codes), two_of_four(6, 20)
    scale = draw(*scales, seed=2).abs() + 0.5
    state = packed("a", held.view(torch.uint8), mask, offsets=False)
    state["a.compressed"] = state["a.compressed"].view(codes)
    about = {"format": "int-quantized" if codes == torch.int8 else "float-quantized"}
    folder = written(tmp_path, {**state, "a.weight_scale": scale}, "sparse-24-bitmask", **about)
    expected = held.double() * mask * scale.double()
    torch.testing.assert_close(read(folder, "a.weight"), expected, rtol=1e-6, atol=0)
    row = measure(folder)["a"]
    assert any("dequantised from" in note for note in row.notes)
    alone = written(tmp_path, state, "sparse-24-bitmask", **about)
    row = measure(alone)["a"]
    if codes == torch.int8:
        assert row.reason == "int8 with a bit for each entry, and no scale"
    else:
        assert torch.equal(read(alone, "a.weight"), held.double() * mask)


def test_the_structure_tells_without_a_configuration(tmp_path: Path) -> None:
    weight, mask = draw(5, 13), draw(5, 13, seed=1) > 0
    folder = written(tmp_path, packed("a", weight, mask, offsets=True))
    (folder / "config.json").unlink()
    assert torch.equal(read(folder, "a.weight"), (weight * mask).double())


def swapped(state: State, name: str, value: Tensor) -> None:
    state[name] = value


DAMAGED: dict[str, tuple[Callable[[State], object], str]] = {
    "a bit more": (lambda s: s["a.bitmask"].bitwise_or_(1), "a mask needs"),
    "a bit outside": (lambda s: s["a.bitmask"][1, 1].fill_(int(s["a.bitmask"][1, 1]) ^ 128), "a mask needs"),
    "a value less": (lambda s: swapped(s, "a.compressed", s["a.compressed"][:-1]), "a mask needs"),
    "offsets of other rows": (lambda s: s["a.row_offsets"].add_(1), "a mask needs"),
    "offsets of other numbers": (lambda s: swapped(s, "a.row_offsets", s["a.row_offsets"].float()), "do not fit"),
    "too few offsets": (lambda s: swapped(s, "a.row_offsets", s["a.row_offsets"][:2]), "do not fit"),
    "no offsets": (lambda s: s.pop("a.row_offsets"), "its values are not half as many as its entries"),
    "a larger shape": (lambda s: swapped(s, "a.shape", torch.tensor([5, 1 << 40])), "its mask does not fit its shape"),
    "a huge shape": (lambda s: swapped(s, "a.shape", torch.tensor([1 << 62, 1 << 62])), "its mask does not fit"),
    "a shape of nothing": (lambda s: swapped(s, "a.shape", torch.tensor([0, 13])), "its shape is none"),
    "a negative shape": (lambda s: swapped(s, "a.shape", torch.tensor([-5, -13])), "its shape is none"),
    "a shape of floats": (lambda s: swapped(s, "a.shape", torch.tensor([5.0, 13.0])), "its shape is none"),
    "a long shape": (lambda s: swapped(s, "a.shape", torch.ones(99, dtype=torch.int64)), "its shape is none"),
    "a weight beside": (lambda s: swapped(s, "a.weight", torch.ones(5, 13)), "it has a weight beside it"),
    "integers": (lambda s: swapped(s, "a.compressed", s["a.compressed"].int()), "int32 with a bit for each"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_parts_that_do_not_fit_are_named(name: str, tmp_path: Path) -> None:
    damage, said = DAMAGED[name]
    state = packed("a", draw(5, 13), draw(5, 13, seed=1) > 0, offsets=True)
    damage(state)
    reasons = [row.reason for row in measure(written(tmp_path, state)).values() if row.status == "skipped"]
    assert any(said in reason for reason in reasons), reasons
    check(tmp_path)


def test_another_format_is_not_guessed(tmp_path: Path) -> None:
    state = packed("a", draw(5, 13), draw(5, 13, seed=1) > 0, offsets=True)
    row = measure(written(tmp_path, state, "sparse-new"))["a"]
    assert row.reason == "the quantisation has the sparsity_config sparse-new, which is not read"


def test_other_tensors_of_these_names_are_left_alone() -> None:
    state = {"a.compressed": draw(5, 3), "a.shape": torch.tensor([5, 3]), "b.weight": draw(5, 7)}
    assert {row.name for row in measure(state).values()} == set(state)
