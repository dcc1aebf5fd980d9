"""Weights packed number by number from the definition of each stored format, with the numbers that they stand for."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROWS, COLUMNS = 16, 64
RNG = np.random.default_rng(0)
NF4 = np.linspace(-1, 1, 16).astype(np.float32) ** 3  # any table of 16 values
Packed = tuple[dict[str, Tensor], np.ndarray, dict[str, Any]]


def nibbles(codes: np.ndarray, *, high_first: bool) -> np.ndarray:
    pairs = codes.reshape(-1, 2)
    first, second = (pairs[:, 0], pairs[:, 1]) if high_first else (pairs[:, 1], pairs[:, 0])
    return (first.astype(np.uint8) << 4) | second.astype(np.uint8)


def as_bytes(description: dict[str, Any]) -> Tensor:
    return torch.tensor(list(json.dumps(description).encode()), dtype=torch.uint8)


def four_bits(nested: bool) -> Packed:
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


def int8_rows() -> Packed:
    codes, largest = RNG.integers(-127, 128, (ROWS, COLUMNS)), RNG.uniform(1, 2, ROWS).astype(np.float32)
    state = {"w.weight": torch.tensor(codes, dtype=torch.int8), "w.SCB": torch.tensor(largest)}
    return state, codes * largest[:, None] / 127, {}


def float8(scale_shape: tuple[int, ...], suffix: str) -> Packed:
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


def without_gaps(codes: np.ndarray, bits: int) -> Tensor:
    """Codes of the last axis one after the other, the lowest bits first; the last number is filled up with zeros.

    As compressed-tensors 0.20 packs them; a code may lie in two numbers.
    """
    single = ((codes[..., None] >> np.arange(bits)) & 1).reshape(len(codes), -1).astype(np.uint8)
    filled = np.pad(single, ((0, 0), (0, -single.shape[1] % 32)))
    return torch.tensor(np.packbits(filled, axis=1, bitorder="little").view(np.int32))


def in_three_bits(codes: np.ndarray) -> Tensor:
    """32 codes of the last axis in three numbers, as GPTQ packs them: the eleventh and the 22nd lie in two."""
    shape = (*codes.shape[:-1], 3 * codes.shape[-1] // 32)
    words = [0] * math.prod(shape)
    for number, code in enumerate(codes.reshape(-1).tolist()):
        block, place = divmod(number, 32)
        if place < 10:
            words[3 * block] |= code << (3 * place)
        elif place == 10:
            words[3 * block] |= (code & 3) << 30
            words[3 * block + 1] |= code >> 2
        elif place < 21:
            words[3 * block + 1] |= code << (3 * (place - 11) + 1)
        elif place == 21:
            words[3 * block + 1] |= (code & 1) << 31
            words[3 * block + 2] |= code >> 1
        else:
            words[3 * block + 2] |= code << (3 * (place - 22) + 2)
    return torch.tensor(np.array(words, dtype=np.uint32).view(np.int32).reshape(shape))


def gptq(bits: int, version: int, *, order: bool) -> Packed:
    size, rows = 16, 2 * ROWS if bits == 3 else ROWS
    pack = in_three_bits if bits == 3 else partial(in_int32, bits=bits)
    codes = RNG.integers(0, 2**bits, (rows, COLUMNS))
    zeros = RNG.integers(1, 2**bits, (COLUMNS // size, rows))
    scales = RNG.uniform(0.5, 1, (COLUMNS // size, rows)).astype(np.float32)
    group = RNG.permutation(COLUMNS) // size if order else np.arange(COLUMNS) // size
    state = {
        "w.qweight": pack(codes).mT.contiguous(),
        "w.qzeros": pack(zeros - (1 if version == 1 else 0)),
        "w.scales": torch.tensor(scales),
    }
    about = {"bits": bits, **({} if version == 1 else {"checkpoint_format": "gptq_v2"})}
    if order:
        state["w.g_idx"] = torch.tensor(group, dtype=torch.int32)
    values = [[(codes[o, i] - zeros[group[i], o]) * scales[group[i], o] for i in range(COLUMNS)] for o in range(rows)]
    return state, np.array(values), about


def symmetric_gptq(bits: int, *, named: int, written: int, size: int = 16) -> Packed:
    """Symmetric codes, whose zero point is the middle one, with zero points of another version than the named one."""
    middle, rows = 2 ** (bits - 1), ROWS
    codes, zeros = RNG.integers(0, 2**bits, (rows, COLUMNS)), np.full((COLUMNS // size, rows), middle)
    scales = RNG.uniform(0.5, 1, (COLUMNS // size, rows)).astype(np.float32)
    state = {
        "w.qweight": in_int32(codes, bits).mT.contiguous(),
        "w.qzeros": in_int32(zeros - (written == 1), bits),
        "w.scales": torch.tensor(scales),
    }
    values = (codes - middle) * scales.repeat(size, 0).T
    return state, values, {"bits": bits, "sym": True, "checkpoint_format": "gptq" if named == 1 else "gptq_v2"}


def gptq_of_nonnegative_weights() -> Packed:
    """Groups without a negative weight have the zero point 0, which the first version stores as the largest code."""
    codes, scales = RNG.integers(0, 16, (ROWS, COLUMNS)), RNG.uniform(0.5, 1, (1, ROWS)).astype(np.float32)
    zeros = np.arange(ROWS)[None] % 3
    state = {
        "w.qweight": in_int32(codes, 4).mT.contiguous(),
        "w.qzeros": in_int32((zeros - 1) % 16, 4),
        "w.scales": torch.tensor(scales),
    }
    return state, (codes - zeros.T) * scales.T, {"bits": 4, "sym": False}


def affine(bits: int, size: int, *shape: int) -> Packed:
    """Codes in a stream of bits along the inputs, as MLX packs them: each in the lowest free bits of its row."""
    columns = 96 if size == 32 else 128
    codes = RNG.integers(0, 2**bits, (*shape, columns)).astype(object)
    streams = [sum(int(code) << (bits * place) for place, code in enumerate(row)) for row in codes.reshape(-1, columns)]
    words = [[stream >> (32 * word) & 0xFFFFFFFF for word in range(columns * bits // 32)] for stream in streams]
    scales, offsets = (RNG.normal(size=(*shape, columns // size)).astype(np.float32) for _ in range(2))
    state = {
        "w.weight": torch.tensor(np.array(words, dtype=np.uint32).reshape(*shape, -1)),
        "w.scales": torch.tensor(scales),
        "w.biases": torch.tensor(offsets),
    }
    values = codes.astype(float) * scales.repeat(size, -1) + offsets.repeat(size, -1)
    return state, values.reshape(-1, columns), {"group_size": size, "bits": bits}


def awq() -> Packed:
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


def mxfp4(experts: int) -> Packed:
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    codes = RNG.integers(0, 16, (experts, ROWS, COLUMNS))
    powers = RNG.integers(120, 131, (experts, ROWS, COLUMNS // 32))
    blocks = nibbles(codes, high_first=False).reshape(experts, ROWS, COLUMNS // 32, 16)
    state = {"w_blocks": torch.tensor(blocks), "w_scales": torch.tensor(powers.astype(np.uint8))}
    flat = zip(codes.reshape(-1), powers.repeat(32), strict=True)
    return state, np.array([math.ldexp(table[c], int(p) - 127) for c, p in flat]).reshape(-1, COLUMNS), {}


# --- compressed-tensors and modelopt ---------------------------------------------------------------------------------

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def compressed(**weights: Any) -> dict[str, Any]:
    """The `quantization_config` that compressed-tensors writes."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def packed_integers(
    bits: int, groups: int, *, symmetric: bool = True, order: bool = False, columns: int = 64
) -> Packed:
    """`pack-quantized`: codes plus half their range, the lowest bits first; zero points packed along the outputs."""
    half = 2 ** (bits - 1)
    codes = RNG.integers(-half, half, (ROWS, columns))
    scales = RNG.uniform(0.5, 1, (ROWS, groups)).astype(np.float32)
    zeros = np.zeros((ROWS, groups), int) if symmetric else RNG.integers(-half, half, (ROWS, groups))
    group = np.arange(columns) // (columns // groups)
    group = RNG.permutation(group) if order else group
    state = {
        "w.weight_packed": without_gaps(codes + half, bits),
        "w.weight_scale": torch.tensor(scales),
        "w.weight_shape": torch.tensor([ROWS, columns]),
    }
    if not symmetric:
        state["w.weight_zero_point"] = without_gaps((zeros + half).T, bits).mT.contiguous()
    if order:
        state["w.weight_g_idx"] = torch.tensor(group, dtype=torch.int32)
    values = (codes - zeros[:, group]) * scales[:, group]
    about = compressed(num_bits=bits, type="int", symmetric=symmetric, strategy="group" if groups > 1 else "channel")
    return state, values, about


def packed_floats(kind: str) -> Packed:
    """4-bit floats: the low half of each byte first; a scale for 16 of them and one for all, or a power of 2 for 32."""
    codes, size = RNG.integers(0, 16, (ROWS, COLUMNS)), 32 if kind == "mxfp4" else 16
    data = torch.tensor(nibbles(codes.reshape(-1), high_first=False)).reshape(ROWS, COLUMNS // 2)
    if kind == "mxfp4":
        powers = RNG.integers(120, 131, (ROWS, COLUMNS // size))
        scales, factor = 2.0 ** (powers - 127), 1.0
        state = {"w.weight_packed": data, "w.weight_scale": torch.tensor(powers.astype(np.uint8))}
    else:
        stored = torch.tensor(RNG.uniform(1, 400, (ROWS, COLUMNS // size))).to(torch.float8_e4m3fn)
        scales, factor = stored.double().numpy(), 0.01
        if kind == "nvfp4":
            state = {"w.weight_packed": data, "w.weight_scale": stored, "w.weight_global_scale": torch.tensor([100.0])}
        else:  # modelopt
            state = {"w.weight": data, "w.weight_scale": stored, "w.weight_scale_2": torch.tensor(0.01)}
            state["w.input_scale"] = torch.tensor(0.5)
    values = FP4[codes] * scales.repeat(size, 1) * factor
    if kind == "modelopt":
        return state, values, {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": None}
    return state, values, {**compressed(num_bits=4, type="float"), "format": f"{kind}-pack-quantized"}


def with_bits(kind: str, dtype: torch.dtype | None = None) -> Packed:
    """`sparse-bitmask` and `sparse-24-bitmask`: the values that are kept, and a bit for each entry, the lowest first.

    Args:
        dtype: of codes with a scale for each row.
    """
    mask = np.argsort(RNG.normal(size=(ROWS, COLUMNS // 4, 4)), -1).reshape(ROWS, COLUMNS) < 2
    mask &= np.array(kind == "sparse-24-bitmask") | (RNG.uniform(size=mask.shape) < 0.5)
    held = torch.tensor(RNG.integers(-100, 100, mask.shape) * (0.01 if dtype is None else 1.0)).to(
        dtype or torch.float32
    )
    kept = torch.tensor(mask).nonzero(as_tuple=True)
    state = {"w.bitmask": torch.tensor(np.packbits(mask, 1, bitorder="little"))}
    values = torch.stack([held.view(torch.uint8 if dtype else torch.float32)[i, j] for i, j in zip(*kept, strict=True)])
    state["w.compressed"] = values.view(held.dtype)
    state["w.shape"] = torch.tensor([ROWS, COLUMNS])
    about = {**compressed(num_bits=8), "format": "dense", "sparsity_config": {"format": kind, "targets": ["Linear"]}}
    if kind == "sparse-bitmask":
        state["w.row_offsets"] = torch.tensor(mask.sum(1).cumsum() - mask.sum(1))
    else:
        state = {**state, "w.compressed": state["w.compressed"].reshape(ROWS, -1), "w.shape": state["w.shape"][:, None]}
    weight = held.double().numpy() * mask
    if dtype is None:
        return state, weight, about
    scale = RNG.uniform(0.5, 1, (ROWS, 1)).astype(np.float32)
    about["format"] = "int-quantized" if dtype == torch.int8 else "float-quantized"
    return {**state, "w.weight_scale": torch.tensor(scale)}, weight * scale, about
