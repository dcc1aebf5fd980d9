"""Quantised weights in each stored format, packed here number by number from the format's definition."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gonio.measuring import measure

ROWS, COLUMNS = 16, 64
RNG = np.random.default_rng(0)
NF4 = np.linspace(-1, 1, 16).astype(np.float32) ** 3  # any table of 16 values
Case = tuple[dict[str, Tensor], np.ndarray, dict[str, Any]]


def nibbles(codes: np.ndarray, *, high_first: bool) -> np.ndarray:
    pairs = codes.reshape(-1, 2)
    first, second = (pairs[:, 0], pairs[:, 1]) if high_first else (pairs[:, 1], pairs[:, 0])
    return (first.astype(np.uint8) << 4) | second.astype(np.uint8)


def as_bytes(description: dict[str, Any]) -> Tensor:
    return torch.tensor(list(json.dumps(description).encode()), dtype=torch.uint8)


def four_bits(nested: bool) -> Case:
    codes = RNG.integers(0, 16, ROWS * COLUMNS)
    blocks = ROWS * COLUMNS // 32
    about: dict[str, Any] = {"quant_type": "nf4", "blocksize": 32, "dtype": "float32", "shape": [ROWS, COLUMNS]}
    state = {"w.weight": torch.tensor(nibbles(codes, high_first=True)).reshape(-1, 1)}
    state["w.weight.quant_map"] = torch.tensor(NF4)
    if nested:
        steps, table = RNG.integers(0, 256, blocks), RNG.normal(size=256).astype(np.float32)
        coarse = RNG.uniform(1, 2, blocks // 8).astype(np.float32)
        about |= {"nested_blocksize": 8, "nested_offset": 3.5}
        state["w.weight.absmax"] = torch.tensor(steps.astype(np.uint8))
        state["w.weight.nested_absmax"], state["w.weight.nested_quant_map"] = torch.tensor(coarse), torch.tensor(table)
        scales = np.array([table[steps[b]] * coarse[b // 8] + 3.5 for b in range(blocks)])
    else:
        scales = RNG.uniform(1, 2, blocks).astype(np.float32)
        state["w.weight.absmax"] = torch.tensor(scales)
    state["w.weight.quant_state.bitsandbytes__nf4"] = as_bytes(about)
    values = np.array([NF4[codes[i]] * scales[i // 32] for i in range(ROWS * COLUMNS)])
    return state, values.reshape(ROWS, COLUMNS), {}


def int8_rows() -> Case:
    codes, largest = RNG.integers(-127, 128, (ROWS, COLUMNS)), RNG.uniform(1, 2, ROWS).astype(np.float32)
    state = {"w.weight": torch.tensor(codes, dtype=torch.int8), "w.SCB": torch.tensor(largest)}
    return state, codes * largest[:, None] / 127, {}


def float8(scale_shape: tuple[int, ...], suffix: str) -> Case:
    rows, columns = (200, 300) if scale_shape == (2, 3) else (ROWS, COLUMNS)
    codes = torch.tensor(RNG.normal(size=(rows, columns))).to(torch.float8_e4m3fn)
    scale = RNG.uniform(1, 2, scale_shape).astype(np.float32)
    numbers = codes.double().numpy()
    values = np.empty_like(numbers)
    for i in range(rows):
        for j in range(columns):
            place = (i // 128, j // 128) if scale_shape == (2, 3) else (i, 0)[: len(scale_shape)]
            values[i, j] = numbers[i, j] * (scale.item() if scale.size == 1 else scale[place])
    return {"w.weight": codes, f"w.weight{suffix}": torch.tensor(scale)}, values, {}


def in_int32(codes: np.ndarray, bits: int, order: list[int] | None = None) -> Tensor:
    """Consecutive codes of the last axis in one number, the first in the lowest bits."""
    per = 32 // bits
    grouped = codes.reshape(*codes.shape[:-1], -1, per)[..., order or list(range(per))]
    words = np.zeros(grouped.shape[:-1], dtype=np.uint32)
    for place in range(per):
        words |= grouped[..., place].astype(np.uint32) << np.uint32(bits * place)
    return torch.tensor(words.view(np.int32))


def gptq(bits: int, version: int, *, order: bool) -> Case:
    size = 16
    codes = RNG.integers(0, 2**bits, (ROWS, COLUMNS))
    zeros = RNG.integers(1, 2**bits, (COLUMNS // size, ROWS))
    scales = RNG.uniform(0.5, 1, (COLUMNS // size, ROWS)).astype(np.float32)
    group = RNG.permutation(COLUMNS) // size if order else np.arange(COLUMNS) // size
    state = {
        "w.qweight": in_int32(codes, bits).mT.contiguous(),
        "w.qzeros": in_int32(zeros - (1 if version == 1 else 0), bits),
        "w.scales": torch.tensor(scales),
    }
    about = {"bits": bits, **({} if version == 1 else {"checkpoint_format": "gptq_v2"})}
    if order:
        state["w.g_idx"] = torch.tensor(group, dtype=torch.int32)
    values = [[(codes[o, i] - zeros[group[i], o]) * scales[group[i], o] for i in range(COLUMNS)] for o in range(ROWS)]
    return state, np.array(values), about


def awq() -> Case:
    size, order = 16, [0, 2, 4, 6, 1, 3, 5, 7]
    codes = RNG.integers(0, 16, (COLUMNS, ROWS))
    zeros = RNG.integers(0, 16, (COLUMNS // size, ROWS))
    scales = RNG.uniform(0.5, 1, (COLUMNS // size, ROWS)).astype(np.float32)
    state = {
        "w.qweight": in_int32(codes, 4, order),
        "w.qzeros": in_int32(zeros, 4, order),
        "w.scales": torch.tensor(scales),
    }
    values = [[(codes[i, o] - zeros[i // size, o]) * scales[i // size, o] for i in range(COLUMNS)] for o in range(ROWS)]
    return state, np.array(values), {}


def mxfp4(experts: int) -> Case:
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    codes = RNG.integers(0, 16, (experts, ROWS, COLUMNS))
    powers = RNG.integers(120, 131, (experts, ROWS, COLUMNS // 32))
    blocks = nibbles(codes, high_first=False).reshape(experts, ROWS, COLUMNS // 32, 16)
    state = {"w_blocks": torch.tensor(blocks), "w_scales": torch.tensor(powers.astype(np.uint8))}
    flat = zip(codes.reshape(-1), powers.repeat(32), strict=True)
    return state, np.array([math.ldexp(table[c], int(p) - 127) for c, p in flat]).reshape(-1, COLUMNS), {}


FORMATS: dict[str, Callable[[], Case]] = {
    "bitsandbytes 4-bit": lambda: four_bits(nested=False),
    "bitsandbytes 4-bit, nested": lambda: four_bits(nested=True),
    "bitsandbytes int8": int8_rows,
    "float8, one scale": lambda: float8((1,), "_scale"),
    "float8, a scale per row": lambda: float8((ROWS, 1), "_scale"),
    "float8, a scale per block": lambda: float8((2, 3), "_scale_inv"),
    "GPTQ 4-bit": lambda: gptq(4, 1, order=True),
    "GPTQ 8-bit": lambda: gptq(8, 1, order=True),
    "GPTQ 2-bit": lambda: gptq(2, 2, order=True),
    "GPTQ 4-bit, version 2, groups in order": lambda: gptq(4, 2, order=False),
    "AWQ": awq,
    "MXFP4": lambda: mxfp4(1),
    "MXFP4 experts": lambda: mxfp4(3),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_stored_format_gives_the_numbers_that_it_stands_for(name: str, tmp_path: Path) -> None:
    state, values, about = FORMATS[name]()
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": about}))
    found = measure(tmp_path)
    plain = measure({"w.weight": torch.tensor(values)})["w"]
    row = found["w"]
    assert row.status == "measured"
    assert "dequantised from" in row.notes[0]
    assert row.frobenius == pytest.approx(plain.frobenius, rel=1e-5)
    assert row.norm_quantiles == pytest.approx(plain.norm_quantiles, rel=1e-5)
    if name != "MXFP4 experts":
        assert row.sigma_max == pytest.approx(plain.sigma_max, rel=1e-5)
        assert row.alignment == pytest.approx(plain.alignment, rel=1e-4)
    else:
        assert (row.groups, row.filters, row.dim) == (3, ROWS, COLUMNS)
    parts = [t for t in found.values() if t.reason.startswith("a part of the quantised w")]
    assert len(parts) == len(state) - 1


DAMAGE: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "no description": lambda s: s.pop("w.weight.quant_state.bitsandbytes__nf4"),
    "a description of another shape": lambda s: s.update(
        {"w.weight.quant_state.bitsandbytes__nf4": as_bytes({"shape": [999, 999], "blocksize": 32})}
    ),
    "a description that is no JSON": lambda s: s.update({"w.weight.quant_state.bitsandbytes__nf4": torch.ones(9)}),
    "a block size of 0": lambda s: s.update(
        {"w.weight.quant_state.bitsandbytes__nf4": as_bytes({"shape": [ROWS, COLUMNS], "blocksize": 0})}
    ),
    "no scales": lambda s: s.pop("w.weight.absmax"),
    "too few scales": lambda s: s.update({"w.weight.absmax": torch.ones(3)}),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_packed_weight_that_cannot_be_read_has_a_row_with_the_reason(name: str) -> None:
    state, _, _ = four_bits(nested=False)
    DAMAGE[name](state)
    row = measure({**state, "v.weight": torch.eye(3)})["w"]
    assert row.status == "skipped"
    assert row.reason.startswith(("cannot be read: dequantising needs", "uint8: packed or quantised weights"))


def test_three_bits_are_not_read() -> None:
    state = {
        "w.qweight": torch.zeros(6, ROWS, dtype=torch.int32),
        "w.qzeros": torch.zeros(4, 2, dtype=torch.int32),
        "w.scales": torch.ones(4, ROWS),
        "w.g_idx": torch.zeros(64, dtype=torch.int32),
    }
    assert measure(state)["w.qweight"].reason == "int32: packed or quantised weights, whose scale is not known here"


@pytest.mark.filterwarnings("ignore")  # torch says that this package moves
def test_torch_s_quantised_layers_and_their_state_dicts_are_dequantised(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(12, 8), nn.Conv2d(3, 4, 3))
    model.qconfig = torch.ao.quantization.default_qconfig
    prepared = torch.ao.quantization.prepare(model)
    prepared[0](torch.ones(2, 12))
    prepared[1](torch.ones(2, 3, 5, 5))
    quantised = torch.ao.quantization.convert(prepared)
    torch.save(quantised.state_dict(), tmp_path / "q.pt")
    layers = {path: quantised[int(path)].weight().dequantize() for path in ("0", "1")}
    for source in (quantised, quantised.state_dict(), tmp_path / "q.pt"):
        found = measure(source)
        for path, weight in layers.items():
            plain = measure({"w.weight": weight})["w"]
            assert found[path].status == "measured", found[path].reason
            assert found[path].frobenius == pytest.approx(plain.frobenius, rel=1e-6)
            assert any("dequantised" in note for note in found[path].notes)
    dynamic = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(12, 8)), {nn.Linear}, dtype=torch.qint8)
    assert measure(dynamic)["0"].status == "measured"
