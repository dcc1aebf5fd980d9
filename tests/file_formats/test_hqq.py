"""Checkpoints of HQQ: `qmodel.pt`, a mapping of layers with their codes and what these mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gonio
from gonio.measuring import difference
from gonio.measuring.changes.sources import base_entries, values_of

RNG = np.random.default_rng(0)
ROWS, COLUMNS = 24, 40
Layer = dict[str, Any]


def packed(codes: np.ndarray, bits: int) -> torch.Tensor:
    """Codes of rows far apart in one number: those of the first rows in the highest bits."""
    per, top = (10, 27) if bits == 3 else (8 // bits, 8 - bits)
    high = -(-len(codes) // per)
    words = np.zeros((high, codes.shape[1]), dtype=np.int64)
    for row, numbers in enumerate(codes):
        words[row % high] += numbers << (top - bits * (row // high))
    return torch.tensor(words).to(torch.int32 if bits == 3 else torch.uint8)


def about(bits: int, size: int | None, axis: int, shape: tuple[int, ...], **more: Any) -> Layer:
    word = "3bit_32" if bits == 3 else f"{bits}bit_u8"
    facts = {"nbits": bits, "group_size": size, "shape": torch.Size(shape), "axis": axis, "packing": word}
    return {**facts, "unpack_view_dtype": torch.uint8, "compute_dtype": torch.float16, "view_as_float": False, **more}


def quantised(
    bits: int, size: int | None, axis: int, *, shape: tuple[int, int] = (ROWS, COLUMNS), inner: bool = False
) -> tuple[Layer, np.ndarray]:
    """A layer as HQQ saves it, and its weight in float64.

    Args:
        inner: whether scales and zero points are codes of 8 bits themselves, the latter with one scale for all.
    """
    width = size or shape[1 - axis]
    groups = shape[0] * shape[1] // width
    codes = RNG.integers(0, 2**bits, (groups, width) if axis == 1 else (width, groups))
    each = (groups, 1) if axis == 1 else (1, groups)
    scale, zero = RNG.uniform(0.5, 1, each).astype(np.float32), RNG.uniform(0, 4, each).astype(np.float32)
    meta: Layer = {"scale": torch.tensor(scale), "zero": torch.tensor(zero), "quant_scale": inner, "quant_zero": inner}
    if inner:
        scales, zeros = RNG.integers(0, 256, (groups // 4, 4)), RNG.integers(0, 256, each)
        steps, shifts = (RNG.uniform(0.5, 1, (groups // 4, 1)).astype(np.float32) for _ in range(2))
        scale, zero = ((scales - shifts.astype(float)) * steps).reshape(each), (zeros - 0.25) * 0.5
        meta = {"quant_scale": True, "quant_zero": True}
        own = {"scale": torch.tensor(steps), "zero": torch.tensor(shifts)}
        meta |= {"scale_q": packed(scales, 8), "meta_scale": about(8, 4, 1, each, **own)}
        own = {"scale": torch.tensor(0.5), "zero": torch.tensor([0.25])}
        meta |= {"zero_q": packed(zeros, 8), "meta_zero": about(8, None, axis, each, **own)}
    values = ((codes - zero.astype(float)) * scale.astype(float)).reshape(shape)
    layer = {"W_q": torch.nn.Parameter(packed(codes, bits), requires_grad=False)}
    return {**layer, "meta": {**about(bits, size, axis, shape), **meta}, "bias": None}, values


def saved(folder: Path, layer: Layer) -> Path:
    content = {
        "token": torch.ones(1, 1, 5),
        "m.0": layer,
        "m.1": {"weight": torch.ones(7), "bias": torch.zeros(7)},
        "m.2": {"weight": torch.eye(5)},
    }
    torch.save(content, folder / "qmodel.pt")
    return folder / "qmodel.pt"


def checked(source: Any, expected: np.ndarray) -> None:
    values = values_of(base_entries(source)["m.0.weight"], "")
    assert isinstance(values, torch.Tensor), values
    torch.testing.assert_close(values.double(), torch.tensor(expected), rtol=2e-6, atol=1e-6)
    rows = gonio.measure(source)
    assert rows["m.0"].frobenius == pytest.approx(float(np.linalg.norm(expected)), rel=1e-6)
    assert rows["m.2"].status == "measured"
    assert not [row.name for row in rows.values() if row.status == "skipped"]


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("size", "axis"), [(20, 1), (40, 1), (12, 0), (None, 0), (None, 1)])
def test_each_width_and_grouping_is_read(bits: int, size: int | None, axis: int, tmp_path: Path) -> None:
    layer, expected = quantised(bits, size, axis)
    path = saved(tmp_path, layer)
    checked(path, expected)
    assert gonio.check(path).intact
    assert difference(path, path)["m.0"].status == "equal"
    checked(torch.load(path), expected)


@pytest.mark.parametrize("axis", [0, 1])
def test_packed_scales_and_zero_points_are_unpacked(axis: int, tmp_path: Path) -> None:
    layer, expected = quantised(4, 20, axis, inner=True)
    checked(saved(tmp_path, layer), expected)


def test_facts_beside_the_codes_are_read_as_those_in_a_mapping(tmp_path: Path) -> None:
    """As later versions save a layer."""
    layer, expected = quantised(2, 20, 1)
    flat = {**{key: value for key, value in layer.items() if key != "meta"}, **layer["meta"]}
    flat |= {"offload_meta": False, "stores_quant_config": True, "scale_quant_params": None}
    checked(saved(tmp_path, flat), expected)


def changed(**facts: Any) -> Callable[[Layer], object]:
    return lambda layer: layer["meta"].update(facts)


DAMAGED: dict[str, tuple[Callable[[Layer], object], str]] = {
    "no groups": (changed(group_size=0), "its groups do not divide it"),
    "groups that do not divide": (changed(group_size=7), "its groups do not divide it"),
    "negative groups": (changed(group_size=-20), "are no natural numbers"),
    "another axis": (changed(axis=2), "its shape, groups or axis cannot be read"),
    "another packing": (changed(packing="5bit_u8"), "its packing '5bit_u8' is not read"),
    "a shape of floats": (changed(shape=[24.0, float("nan")]), "are no natural numbers"),
    "a larger shape": (changed(shape=torch.Size((1 << 20, 20))), "do not fit its shape"),
    "a huge shape": (changed(shape=[1 << 62, 1 << 62]), "its groups do not divide it"),
    "numbers beyond 64 bits": (changed(shape=[1 << 70, 1 << 70]), "cannot be read"),
    "a shape of a thousand": (changed(shape=[1] * 1000), "cannot be read"),
    "a shape of text": (changed(shape="24 40"), "do not fit its shape"),
    "other scales": (changed(scale=torch.ones(5, 1)), "do not fit its shape"),
    "other codes": (lambda layer: layer.update(W_q=torch.zeros(3, 5, dtype=torch.uint8)), "do not fit its shape"),
    "codes of another dtype": (lambda layer: layer.update(W_q=layer["W_q"].int()), "do not fit its shape"),
    "packed zero points without facts": (
        lambda layer: layer["meta"].update(zero_q=layer["meta"].pop("zero")), "zero points are not stored",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_facts_that_do_not_fit_are_named(name: str, tmp_path: Path) -> None:
    damage, said = DAMAGED[name]
    layer, _ = quantised(4, 20, 1)
    damage(layer)
    path = saved(tmp_path, layer)
    row = gonio.measure(path)["m.0"]
    assert (row.status, said in row.reason) == ("skipped", True), row.reason
    gonio.check(path)


def test_a_mapping_of_layers_without_packed_codes_is_another_file(tmp_path: Path) -> None:
    torch.save({"a": {"weight": torch.eye(3)}, "b": {"weight": torch.eye(3)}}, tmp_path / "m.pt")
    with pytest.raises(gonio.errors.InvalidArgumentError, match="looks for named tensors"):
        gonio.measure(tmp_path / "m.pt")
