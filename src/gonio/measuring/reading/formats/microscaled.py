"""Weights in MXFP4: two 4-bit floats per byte, and a power of 2 for every 32 of them."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from gonio.measuring.reading.entry import StoredTensor
from gonio.measuring.reading.formats import Format, StoredTensors, StoredWeight, computed
from gonio.measuring.reading.formats.bitsandbytes import halves

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _microscaled(name: str, stored: StoredTensors, _: Mapping[str, Any]) -> StoredWeight | None:
    path = name.removesuffix("_blocks")
    codes, scales = stored[name], stored.get(f"{path}_scales")
    if path == name or scales is None or codes.dtype != "uint8" or codes.shape[:-1] != scales.shape:
        return None
    if len(codes.shape) not in (3, 4) or codes.shape[-1] != 16:
        return None
    *matrices, rows, groups = codes.shape[:-1]
    shape = (prod(matrices) * rows, groups * 32)
    made = computed(_mxfp4_values, codes, scales, shape, shape=shape)
    return StoredWeight(path, (name, f"{path}_scales"), made, "dequantised from 4 bits (MXFP4)", prod(matrices))


def _mxfp4_values(codes: StoredTensor, scales: StoredTensor, shape: tuple[int, int]) -> Tensor:
    """Sign, 2 bits of exponent and 1 of mantissa, times 2^(scale − 127); the low half of each byte first.

    References:
        [1] Open Compute Project, "OCP microscaling formats (MX) specification", version 1.0, 2023, §5.3 and §6.3.
    """
    powers = scales.load().to(torch.int32) - 127
    return torch.ldexp(fp4_values(halves(codes.load(), high_first=False)), powers.unsqueeze(-1)).reshape(shape)


def fp4_values(codes: Tensor) -> Tensor:
    """The numbers that codes of 4 bits stand for: a sign, 2 bits of exponent and 1 of mantissa."""
    return torch.tensor([*_FP4, *(-value for value in _FP4)])[codes]


FORMATS = (Format(_microscaled, ("_blocks",)),)
