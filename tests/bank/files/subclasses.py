"""Weights whose parts a file stores by the names of a tensor subclass or of a quantised layer: HQQ, quanto, torchao.

The numbers are packed one by one from the definition of each format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from bank.files.case import Case, File, normal, stored

HQQ, QUANTO, AO, CT = "HQQ", "quanto", "torchao", "compressed-tensors"
RNG = np.random.default_rng(5)


def text(word: str) -> Tensor:
    return torch.tensor([ord(letter) for letter in word], dtype=torch.uint8)


def hqq(bits: int, by: int, size: int, *, refused: str = "", **changes: Any) -> Callable[[Path], File]:
    """As HQQ 0.2.8 saves a layer: the first code of each number is that of the first rows, in the highest bits."""

    def file(folder: Path) -> File:
        rows, columns = (32 * 64 // size, size) if by == 1 else (size, 32 * 64 // size)
        codes = RNG.integers(0, 2**bits, (rows, columns))
        per, top = (10, 27) if bits == 3 else (8 // bits, 8 - bits)
        high = -(-rows // per)
        words = np.zeros((high, columns), dtype=np.int64)
        for row in range(rows):
            words[row % high] += codes[row] << (top - bits * (row // high))
        shape = (rows, 1) if by == 1 else (1, columns)
        scale, zero = (RNG.uniform(0.5, 1, shape).astype(np.float32) for _ in range(2))
        state = {
            "l.W_q": torch.tensor(words).to(torch.int32 if bits == 3 else torch.uint8),
            "l.scale": torch.tensor(scale), "l.zero": torch.tensor(zero), "l.bias": torch.zeros(32),
            "l.shape": torch.tensor([32, 64]), "l.nbits": torch.tensor(bits, dtype=torch.int32),
            "l.group_size": torch.tensor(size, dtype=torch.int32), "l.axis": torch.tensor(by, dtype=torch.int32),
            "l.packing": text("3bit_32" if bits == 3 else f"{bits}bit_u8"),
            "l.unpack_view_dtype": text("torch.uint8"), "l.view_as_float": torch.tensor(0, dtype=torch.uint8),
            **{f"l.{name}": value for name, value in changes.items()},
        }  # fmt: skip
        about = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": bits}}, "skip_modules": []}
        source = stored(folder, state, {"quantization_config": about})
        if refused:
            return File(source=source, refused={"l.weight": refused}, fresh=False)
        values = ((codes - zero.astype(float)) * scale).reshape(32, 64)
        return File(source=source, weights={"l.weight": torch.tensor(values)}, fresh=False)

    return file


def quanto(bits: int, shape: tuple[int, ...], groups: int, *, bias: bool = True, whole: bool = False) -> Any:
    """As optimum-quanto 0.2.7 saves a packed weight: the first code of each byte is that of the first rows, in the
    lowest bits; `groups` are those of a row."""

    def file(folder: Path) -> File:
        rows = shape[0] * groups
        codes = RNG.integers(0, 2**bits, (rows, math.prod(shape[1:]) // groups))
        high = -(-rows * bits // 8)
        packed = np.zeros((high, codes.shape[1]), dtype=np.uint8)
        for row in range(rows):
            packed[row % high] |= (codes[row] << (bits * (row // high))).astype(np.uint8)
        inner = shape[1:] if groups == 1 else packed.shape[1:]
        each = (rows, *[1] * len(inner))
        scale, shift = RNG.uniform(0.5, 1, (rows, 1)), RNG.uniform(1, 2, (rows, 1))
        shift = shift.round() if whole else shift.astype(np.float32)
        scale = scale.astype(np.float32)
        state = {
            "l.weight._data._data": torch.tensor(packed).reshape(high, *inner),
            "l.weight._scale": torch.tensor(scale).reshape(each),
            "l.weight._shift": torch.tensor(shift).reshape(each).to(torch.int8 if whole else torch.float32),
            **({"l.bias": torch.zeros(shape[0])} if bias else {}),
        }
        about = {"quant_method": "quanto", "weights": f"int{bits}", "activations": None}
        source = stored(folder, state, {"quantization_config": about})
        if not bias:
            return File(source=source, refused={"l.weight": "no bias tells how many outputs it has"}, fresh=False)
        values = (codes - shift) * scale.astype(float) if whole else codes * scale.astype(float) - shift
        return File(source=source, weights={"l.weight": torch.tensor(values).reshape(shape)}, fresh=False)

    return file


# --- torchao ----------------------------------------------------------------------------------------------------------

FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def described(folder: Path, parts: Mapping[str, Tensor], kind: str, **facts: Any) -> Path:
    """The parts of the weight `l.weight` as torchao 0.18 writes them, with its description in the header."""
    about = {"_type": kind, "_data": facts, "_tensor_data_names": list(parts)}
    held = {f"l._weight_{name}": part for name, part in parts.items()} | {"l.bias": torch.zeros(256)}
    texts = {"l.weight": json.dumps(about), "l.bias": json.dumps({"_type": "Tensor"})}
    save_file(held, folder / "model.safetensors", metadata={**texts, "tensor_names": '["l.weight", "l.bias"]'})
    return folder


def tiled(scales: np.ndarray) -> np.ndarray:
    """Scales in the order of NVIDIA's kernels: of each tile of 128 rows and 4 columns, row r + 32 k at (r, 4 k)."""
    tall, wide = -(-scales.shape[0] // 128), -(-scales.shape[1] // 4)
    flat = np.zeros((tall * wide, 32, 16), dtype=scales.dtype)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            at = row % 128
            flat[row // 128 * wide + column // 4, at % 32, at // 32 * 4 + column % 4] = scales[row, column]
    return flat.reshape(32 * tall, 16 * wide)


def six_bits(code: int, exponent: int) -> float:
    """Sign, exponent and mantissa of a float of 6 bits."""
    mantissa, bias = 5 - exponent, 2 ** (exponent - 1) - 1
    power, rest = (code & 31) >> mantissa, (code & (2**mantissa - 1)) / 2**mantissa
    size = math.ldexp(1 + rest, power - bias) if power else math.ldexp(rest, 1 - bias)
    return -size if code & 32 else size


def blocks(kind: str, *, tiles: bool, told: bool = True) -> Callable[[Path], File]:
    """MXTensor with floats of 4, 6 and 8 bits, and NVFP4Tensor with a scale of the tensor."""

    def file(folder: Path) -> File:
        rows, columns, size = 136, 192, 16 if kind == "nvfp4" else 32
        powers = RNG.integers(120, 131, (rows, columns // size))
        scales = 2.0 ** (powers - 127)
        if kind in ("mxfp4", "nvfp4"):
            codes = RNG.integers(0, 16, (rows, columns))
            values = np.array([FP4[code & 7] * (-1 if code & 8 else 1) for code in codes.reshape(-1)])
            qdata = torch.tensor((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))
        elif kind == "mxfp8":
            qdata = normal(rows, columns).to(torch.float8_e4m3fn)
            values = qdata.double().numpy()
        else:
            codes = RNG.integers(0, 64, (rows, columns))
            values = np.array([six_bits(int(code), int(kind[-3])) for code in codes.reshape(-1)])
            qdata = torch.tensor(codes.astype(np.uint8))
        held = torch.tensor(tiled(powers) if tiles else powers)
        scale = torch.exp2(held.float() - 127) * (held > 0)
        scale = scale.to(torch.float8_e4m3fn) if kind == "nvfp4" else held.to(torch.uint8).view(torch.float8_e8m0fnu)
        parts = {"qdata": qdata, "scale": scale}
        factor = 0.75 if kind == "nvfp4" else 1.0
        if kind == "nvfp4":
            parts["per_tensor_scale"] = torch.tensor(factor)
        facts = {"elem_dtype": kind.removeprefix("mx")} if told else {}
        source = described(folder, parts, "NVFP4Tensor" if kind == "nvfp4" else "MXTensor", **facts)
        if not told:
            return File(source=source, refused={"l.weight": "floats of 6 bits"}, fresh=False)
        weight = values.reshape(rows, columns) * scales.repeat(size, 1) * factor
        return File(source=source, weights={"l.weight": torch.tensor(weight)}, fresh=False)

    return file


def int4(stack: tuple[int, ...], rows: int, groups: int, *, told: bool = True) -> Callable[[Path], File]:
    """Int4Tensor: codes from −8 to 7 in the halves of a byte, scales and offsets as (groups, outputs)."""

    def file(folder: Path) -> File:
        codes = RNG.integers(-8, 8, (*stack, rows, 64))
        qdata = (codes[..., ::2] & 15 | (codes[..., 1::2] & 15) << 4).astype(np.uint8).view(np.int8)
        scale, zero = (RNG.normal(size=(*stack, groups, rows)).astype(np.float32) for _ in range(2))
        parts = {"qdata": torch.tensor(qdata), "scale": torch.tensor(scale), "zero_point": torch.tensor(zero)}
        if told:
            source = described(folder, parts, "Int4Tensor", block_size=[1, 64 // groups])
        else:
            source = folder / "model.pt"
            torch.save({f"l._weight_{name}": part for name, part in parts.items()}, source)
        if not told:
            said = "how l._weight_zero_point shifts it is not known"
            return File(source=source, refused={"l._weight_qdata": said}, fresh=False)
        spread = [part.swapaxes(-1, -2).repeat(64 // groups, -1).astype(float) for part in (scale, zero)]
        weight = torch.tensor(codes * spread[0] + spread[1])
        return File(source=source, weights={"l.weight": weight}, fresh=False)

    return file


def mxfp6(folder: Path) -> File:
    """As compressed-tensors 0.20 packs floats of 2 bits of exponent and 3 of mantissa: four codes in three bytes."""
    codes, powers = RNG.integers(0, 64, (16, 96)), RNG.integers(120, 131, (16, 3))
    packed = [sum(int(code) << (6 * place) for place, code in enumerate(four)) for four in codes.reshape(-1, 4)]
    in_bytes = np.array([list(word.to_bytes(3, "little")) for word in packed], dtype=np.uint8).reshape(16, 72)
    state = {"w.weight_packed": torch.tensor(in_bytes), "w.weight_scale": torch.tensor(powers.astype(np.uint8))}
    values = np.array([six_bits(int(code), 2) for code in codes.reshape(-1)]).reshape(16, 96)
    about = {"quant_method": "compressed-tensors", "format": "mxfp6-pack-quantized"}
    weight = torch.tensor(values * (2.0 ** (powers - 127)).repeat(32, 1))
    source = stored(folder, state, {"quantization_config": about})
    return File(source=source, weights={"w.weight": weight}, fresh=False)


NOT_FIT = torch.ones(7, 1)
CASES: dict[str, Case] = {
    **{f"HQQ of {bits} bits": Case(HQQ, hqq(bits, 1, 64)) for bits in (1, 2, 3, 4, 8)},
    "HQQ, groups of columns": Case(HQQ, hqq(4, 0, 16)),
    "HQQ, short groups of 3 bits": Case(HQQ, hqq(3, 1, 16)),
    "HQQ, another packing": Case(HQQ, hqq(4, 1, 64, refused="packing '5bit_u8' is not read", packing=text("5bit_u8"))),
    "HQQ, scales that do not fit": Case(HQQ, hqq(4, 1, 64, refused="do not fit its shape", scale=NOT_FIT)),
    "HQQ, an axis that is none": Case(HQQ, hqq(4, 1, 64, refused="axis cannot be read", axis=torch.tensor(5))),
    "HQQ, a shape of floats": Case(
        HQQ, hqq(4, 1, 64, refused="no natural numbers", shape=torch.tensor([torch.nan, 2.0]))),
    "quanto's 4 bits": Case(QUANTO, quanto(4, (32, 64), 1)),
    "quanto's 2 bits": Case(QUANTO, quanto(2, (30, 64), 1)),
    "quanto's 4 bits, groups": Case(QUANTO, quanto(4, (32, 256), 2)),
    "quanto's 2 bits, whole zero points": Case(QUANTO, quanto(2, (32, 256), 2, whole=True)),
    "quanto's 4 bits of a convolution": Case(QUANTO, quanto(4, (9, 8, 3, 3), 1)),
    "quanto's 4 bits without a bias": Case(QUANTO, quanto(4, (32, 256), 2, bias=False)),
    **{f"torchao's {kind.upper()}{' in tiles' * tiles}": Case(AO, blocks(kind, tiles=tiles), float8=True)
       for kind in ("mxfp4", "mxfp8", "mxfp6_e2m3", "mxfp6_e3m2", "nvfp4") for tiles in (False, True)},
    "torchao's floats of 6 bits, not told": Case(AO, blocks("mxfp6_e3m2", tiles=False, told=False), float8=True),
    "torchao's int4": Case(AO, int4((), 32, 2)),
    "torchao's int4 of experts": Case(AO, int4((3,), 16, 4)),
    "torchao's int4, groups as many as outputs": Case(AO, int4((), 4, 4)),
    "torchao's int4, not told": Case(AO, int4((), 4, 4, told=False)),
    "MXFP6": Case(CT, mxfp6),
}  # fmt: skip
