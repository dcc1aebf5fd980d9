"""Weights of MLX: codes packed in uint32 along the inputs, a scale and an offset for each group of them."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from gonio.measuring.reading.entry import StoredTensor
from gonio.measuring.reading.formats import FileTensors, Format, StoredWeight, computed
from gonio.measuring.reading.formats.grouped import unpacked

_BITS = (2, 3, 4, 5, 6, 8)


def _affine(name: str, stored: FileTensors, config: Mapping[str, Any]) -> StoredWeight | None:
    path, _, last = name.rpartition(".")
    layer, codes = stored.layers[path], stored[name]
    scales, offsets = layer.get("scales"), layer.get("biases")
    if last != "weight" or scales is None or len(codes.shape) < 2 or codes.shape[:-1] != scales.shape[:-1]:
        return None
    about = config.get(path)
    about = {**config, **about} if isinstance(about, dict) else config
    mode = about.get("mode") or "affine"
    if mode != "affine" or offsets is None or offsets.shape != scales.shape:
        said = "a uint32 weight without offsets (biases)" if mode == "affine" else f"the mode {str(mode)[:40]}"
        return StoredWeight(name, (name,), None, f"{said}, which is not read")
    bits, size, groups = about.get("bits"), about.get("group_size"), scales.shape[-1]
    if bits not in _BITS or type(size) is not int or codes.shape[-1] * 32 != groups * size * bits:
        return StoredWeight(name, (name,), None, "uint32, and no configuration tells bits and groups that fit")
    *matrices, rows = codes.shape[:-1]
    shape = (prod(matrices) * rows, groups * size)
    made = computed(_values, codes, scales, offsets, bits, shape, shape=shape)
    parts = (name, f"{path}.scales", f"{path}.biases")
    return StoredWeight(name, parts, made, f"dequantised from {bits} bits (MLX)", prod(matrices))


def _values(
    codes: StoredTensor, scales: StoredTensor, offsets: StoredTensor, bits: int, shape: tuple[int, int]
) -> Tensor:
    """code · scale + offset of its group; the first code in the lowest bits, and codes may end in the next number.

    References: [1] MLX, documentation of `mlx.core.quantize`, mode "affine".
    """
    numbers = unpacked(codes.load().view(torch.int32), bits).float()
    grouped = numbers.unflatten(-1, (scales.shape[-1], -1))
    factors, shifts = (part.load().float().unsqueeze(-1) for part in (scales, offsets))
    return grouped.mul_(factors).add_(shifts).reshape(shape)


FORMATS = (Format(_affine, dtypes=("uint32",), quantised=False),)
