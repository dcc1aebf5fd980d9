"""Weights of compressed-tensors and modelopt: integers packed in int32, or floats of 4 or 6 bits with block scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gonio.measuring.reading.codes import fp4_values, fp6_values, unpacked
from gonio.measuring.reading.formats import FileTensors, Format, StoredTensors, StoredWeight, computed, numbers_in

_BITS = range(2, 9)
_PARTS = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale")


def _packed(name: str, stored: FileTensors, config: Mapping[str, Any]) -> StoredWeight | None:
    path, layer = name.removesuffix("weight_packed"), stored.layers[name.rpartition(".")[0]]
    parts = {last: tensor for last, tensor in layer.items() if last.startswith("weight_")}
    codes, scales = stored[name], parts.get("weight_scale")
    if scales is None or parts.get("weight_packed") is not codes:
        return None
    if len(codes.shape) != 2 or len(scales.shape) != 2 or scales.shape[0] != codes.shape[0]:
        return None
    unknown = sorted(set(parts) - set(_PARTS))
    if unknown:
        return StoredWeight(f"{path}weight", (name,), None, f"packed, and its part {unknown[0]} is not read")
    found = _floats(parts) if codes.dtype == "uint8" else _integers(parts, _stated_bits(config))
    if found is None:
        return None
    bits, columns = found
    load = _float_values if codes.dtype == "uint8" else _integer_values
    made = computed(load, parts, bits, columns, shape=(codes.shape[0], columns))
    said = "compressed-tensors" if codes.dtype == "int32" else f"MXFP{bits}" if scales.dtype == "uint8" else "NVFP4"
    used = (name, *(f"{path}{part}" for part in parts if part != "weight_packed"))
    return StoredWeight(f"{path}weight", used, made, f"dequantised from {bits} bits ({said})")


def _stated_bits(config: Mapping[str, Any]) -> set[int]:
    """The bits of weights that the configuration's groups of layers state; empty where it states none."""
    groups = config.get("config_groups")
    groups = groups.values() if isinstance(groups, dict) else ()
    weights = [group.get("weights") for group in groups if isinstance(group, dict)]
    stated = [about.get("num_bits") for about in weights if isinstance(about, dict)]
    return {bits for bits in stated if type(bits) is int}


def _integers(parts: StoredTensors, stated: set[int]) -> tuple[int, int] | None:
    """Bits and columns of packed integers, if all shapes fit each other and what the configuration states.

    Codes follow each other without a gap. Files with whole codes alone in each word have more words for 3, 5, 6 and 7
    bits, so that none of these fits; seven bits in four to a word look like eight, which the configuration excludes.
    """
    shape = parts.get("weight_shape")
    if shape is None or shape.entries != 2 or shape.dtype not in ("int32", "int64"):
        return None
    if parts["weight_packed"].dtype != "int32":
        return None
    if (told := numbers_in(shape)) is None:
        return None
    (rows, words), (row, columns) = parts["weight_packed"].shape, told
    bits = [n for n in _BITS if -(-columns * n // 32) == words and n in (stated or _BITS)]
    groups, zeros, order = parts["weight_scale"].shape[1], parts.get("weight_zero_point"), parts.get("weight_g_idx")
    if row != rows or len(bits) != 1 or not groups or columns % groups or "weight_global_scale" in parts:
        return None
    if zeros is not None and (zeros.dtype, zeros.shape) != ("int32", (-(-rows * bits[0] // 32), groups)):
        return None
    return None if order is not None and order.shape != (columns,) else (bits[0], columns)


def _integer_values(parts: StoredTensors, bits: int, columns: int) -> Tensor:
    """(code − zero) · scale of its group; codes and zeros are stored plus half their range, zeros along the outputs."""
    codes = unpacked(parts["weight_packed"].load(), bits)[:, :columns].float() - 2 ** (bits - 1)
    scales = parts["weight_scale"].load().float()
    if "weight_g_idx" in parts:
        group = parts["weight_g_idx"].load().long()
    else:
        group = torch.arange(columns, device="cpu") // (columns // scales.shape[1])
    if "weight_zero_point" in parts:
        zeros = unpacked(parts["weight_zero_point"].load().mT, bits).mT[: len(codes)].float() - 2 ** (bits - 1)
        codes = codes - zeros[:, group]
    return codes.mul_(scales[:, group])


def _modelopt(key: str, stored: StoredTensors, _: Mapping[str, Any]) -> StoredWeight | None:
    name = key.removesuffix("_scale_2")
    codes, scales = stored.get(name), stored.get(f"{name}_scale")
    if codes is None or scales is None or codes.dtype != "uint8" or len(codes.shape) != 2 or stored[key].entries != 1:
        return None
    parts = {"weight_packed": codes, "weight_scale": scales, "factor": stored[key]}
    found = _floats(parts)
    if found is None:
        return None
    made = computed(_float_values, parts, *found, shape=(codes.shape[0], found[1]))
    return StoredWeight(name, (name, f"{name}_scale", key), made, "dequantised from 4 bits (NVFP4)")


def _floats(parts: StoredTensors) -> tuple[int, int] | None:
    """Bits and columns of floats of 4 or 6 bits, if all shapes fit each other."""
    (rows, stored), scales = parts["weight_packed"].shape, parts["weight_scale"]
    divisor, alone = parts.get("weight_global_scale"), scales.dtype == "uint8"
    if set(parts) & {"weight_zero_point", "weight_g_idx", "weight_shape"} or len(scales.shape) != 2:
        return None
    block = 32 if alone else 16
    bits = next((n for n in (4, 6) if scales.shape[1] * block * n == 8 * stored), 0)
    if scales.shape[0] != rows or not bits or (alone and divisor is not None) or (bits == 6 and not alone):
        return None
    fits = alone or (scales.dtype == "float8_e4m3fn" and ("factor" in parts or divisor is not None))
    return (bits, 8 * stored // bits) if fits and (divisor is None or divisor.entries == 1) else None


def _float_values(parts: StoredTensors, bits: int, columns: int) -> Tensor:
    """Float of 4 or 6 bits · scale of its block, divided by `weight_global_scale`, or times `weight_scale_2`.

    References: [1] NVIDIA, "Pretraining large language models with NVFP4", 2025, arXiv 2509.25149, section 2.
    """
    scales = parts["weight_scale"].load()
    scales = torch.exp2(scales.float() - 127) if scales.dtype == torch.uint8 else scales.float()
    if "weight_global_scale" in parts:
        scales = scales / parts["weight_global_scale"].load().float().reshape(())
    if "factor" in parts:
        scales = scales * parts["factor"].load().float().reshape(())
    codes = unpacked(parts["weight_packed"].load(), bits)[:, :columns]
    values = fp4_values(codes) if bits == 4 else fp6_values(codes, 2)
    return values.unflatten(-1, (scales.shape[1], -1)).mul_(scales.unsqueeze(-1)).flatten(-2)


FORMATS = (Format(_packed, ("weight_packed",)), Format(_modelopt, (".weight_scale_2",)))
