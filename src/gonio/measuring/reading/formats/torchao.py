"""Tensor subclasses of torchao, which a file stores by their parts: `_weight_qdata`, `_weight_scale` and others.

Shapes and dtypes of the parts tell which subclass it is, but for the kind of 6-bit floats, which the header of a
safetensors file states.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from gonio.measuring.reading.codes import fp4_values, fp6_values, unpacked
from gonio.measuring.reading.entry import StoredTensor
from gonio.measuring.reading.formats import FileTensors, Format, StoredWeight, computed
from gonio.measuring.reading.formats.scaled import coded

_CODES, _POWERS = "_qdata", "float8_e8m0fnu"
_BLOCK = {_POWERS: 32, "float8_e4m3fn": 16}  # of MX and of NVFP4
_SIXES = {"fp6_e2m3": 2, "fp6_e3m2": 3}  # bits of the exponent
_HEIGHT, _WIDTH = 128, 4  # of the tiles in which kernels want scales


def _subclass(name: str, stored: FileTensors, config: Mapping[str, Any]) -> StoredWeight | None:
    path, _, last = name.rpartition(".")
    stem, codes = last.removesuffix(_CODES), stored[name]
    scale = stored.layers[path].get(f"{stem}_scale")
    if not last.startswith("_") or scale is None or len(codes.shape) < 2:
        return None
    parts = {
        key: one for key, one in stored.layers[path].items() if key.startswith(f"{stem}_") and key != f"{stem}{_CODES}"
    }
    parts = {key.removeprefix(f"{stem}_"): one for key, one in parts.items()}
    own = f"{path}.{stem[1:]}".lstrip(".")
    used = (name, *(f"{path}.{stem}_{part}".lstrip(".") for part in parts))
    zero = parts.get("zero_point")
    if zero is not None and zero.dtype.startswith(("float", "bfloat")) and _is_int4(codes, scale, zero):
        shape = (*codes.shape[:-1], 2 * codes.shape[-1])
        made = computed(_int4_values, codes, scale, zero, shape=shape)
        return StoredWeight(own, used, made, "dequantised from 4 bits (torchao)")
    eight = codes.dtype in ("float8_e4m3fn", "float8_e5m2")
    if scale.dtype == _POWERS or (scale.dtype == "float8_e4m3fn" and codes.dtype == "uint8"):
        return _of_blocks(own, used, codes, parts) if eight or codes.dtype == "uint8" else None
    return coded(name, own, used[0].removesuffix(_CODES), stored, config) if codes.dtype != "uint8" else None


# --- floats of 4, 6 and 8 bits with a scale for each block of inputs -------------------------------------------------


def _of_blocks(
    own: str, used: tuple[str, ...], codes: StoredTensor, parts: Mapping[str, StoredTensor]
) -> StoredWeight | None:
    """MXTensor and NVFP4Tensor; scales are a matrix, or tiles of one in the order in which kernels want them."""
    scale, factor = parts["scale"], parts.get("per_tensor_scale")
    block, facts = _BLOCK[scale.dtype], codes.described.get("_data")
    told = facts.get("elem_dtype") if isinstance(facts, dict) else None
    exponent = _SIXES.get(told, 0) if isinstance(told, str) else 0
    sizes = {1: codes.shape, 2: (*codes.shape[:-1], 2 * codes.shape[-1])}
    fits = {n: shape for n, shape in sizes.items() if scale.shape in _scales_of(shape, block)}
    said = f"{codes.dtype}, and how {used[0].removesuffix(_CODES)}_scale scales it is not known"
    if len(fits) != 1 or (factor is not None and factor.entries != 1) or "zero_point" in parts:
        return StoredWeight(own, used, None, said)
    ((each, shape),) = fits.items()
    if each == 1 and codes.dtype == "uint8" and not exponent:
        return StoredWeight(own, used, None, "floats of 6 bits, of which the file does not tell the bits of exponents")
    if (each == 2) != (codes.dtype == "uint8" and not exponent):
        return StoredWeight(own, used, None, said)
    bits, called = (8, "MXFP8") if codes.dtype != "uint8" else (6, "MXFP6") if each == 1 else (4, "MXFP4")
    called = "NVFP4" if block == _BLOCK["float8_e4m3fn"] else called
    made = computed(_block_values, codes, scale, factor, block, shape, exponent, shape=shape)
    return StoredWeight(own, used, made, f"dequantised from {bits} bits ({called} of torchao)")


def _scales_of(shape: tuple[int, ...], block: int) -> list[tuple[int, ...]]:
    """The shapes that scales of this weight can have: a matrix, and tiles; empty where blocks do not divide it."""
    if shape[-1] % block or not prod(shape):
        return []
    rows, columns = prod(shape[:-1]), shape[-1] // block
    tall, wide = -(-rows // _HEIGHT), -(-columns // _WIDTH)
    return [(*shape[:-1], columns), (32 * tall, 16 * wide)]


def _block_values(
    codes: StoredTensor,
    scale: StoredTensor,
    factor: StoredTensor | None,
    block: int,
    shape: tuple[int, ...],
    exponent: int,
) -> Tensor:
    """float · scale of its block, times the scale of the tensor.

    References: [1] Open Compute Project, "OCP microscaling formats (MX) specification", version 1.0, 2023, §5.
    """
    held = codes.load()
    if held.dtype != torch.uint8:
        values = held.float()
    elif exponent:
        values = fp6_values(held, exponent)
    else:
        values = fp4_values(unpacked(held, 4))
    rows, columns = prod(shape[:-1]), shape[-1] // block
    factors = scale.load().float()
    if factors.shape != (*shape[:-1], columns):
        factors = _untiled(factors, rows, columns)
    if factor is not None:
        factors = factors * factor.load().float().reshape(())
    return values.reshape(rows, columns, block).mul_(factors.reshape(rows, columns, 1)).reshape(shape)


def _untiled(tiles: Tensor, rows: int, columns: int) -> Tensor:
    """The scales as a matrix: tiles of 128 × 4, in each of which rows r, r + 32, r + 64, r + 96 stand side by side.

    References: [1] NVIDIA, cuBLAS documentation, "1D block scaling factors layout".
    """
    tall, wide = -(-rows // _HEIGHT), -(-columns // _WIDTH)
    cut = tiles.reshape(tall, wide, 32, 4, _WIDTH)  # row of tiles, column of tiles, r, number of 32 rows, column
    return cut.permute(0, 3, 2, 1, 4).reshape(tall * _HEIGHT, wide * _WIDTH)[:rows, :columns]


# --- Int4Tensor ------------------------------------------------------------------------------------------------------


def _is_int4(codes: StoredTensor, scale: StoredTensor, zero: StoredTensor) -> bool:
    """Whether scales and zero points are (groups, outputs) of codes (outputs, inputs / 2), and not the other way."""
    *stack, rows, half = codes.shape
    fits = codes.dtype in ("int8", "uint8") and len(scale.shape) == len(codes.shape) and scale.shape == zero.shape
    if not fits or scale.shape[:-2] != tuple(stack) or scale.shape[-1] != rows or not scale.shape[-2]:
        return False
    kind = codes.described.get("_type")
    return not 2 * half % scale.shape[-2] and (scale.shape[-2] != rows if kind is None else kind == "Int4Tensor")


def _int4_values(codes: StoredTensor, scale: StoredTensor, zero: StoredTensor) -> Tensor:
    """code · scale + offset of its group, the code from −8 to 7, the low half of each byte first.

    References: [1] torchao, `Int4Tensor`; the codes are those of `int4_row_quantize_zp` of FBGEMM.
    """
    numbers = unpacked(codes.load(), 4).float()
    numbers = torch.where(numbers > 7, numbers - 16, numbers)
    factors, shifts = (part.load().float().mT.unsqueeze(-1) for part in (scale, zero))
    return numbers.unflatten(-1, (factors.shape[-2], -1)).mul_(factors).add_(shifts).flatten(-2)


FORMATS = (Format(_subclass, (_CODES,)),)
