"""Quantised weights that lie in several tensors: which tensors belong together, and what they stand for.

A format is read where it is defined by its own names and shapes. What is packed in another way keeps its row, with
the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor

from gonio.measuring import dequantise
from gonio.measuring.stored import Stored

__all__ = ["Packed", "packed_weights"]

_STATES = ("bitsandbytes__nf4", "bitsandbytes__fp4")
_LARGEST_STATE = 1 << 16  # bytes of the description of a 4-bit weight


@dataclass(frozen=True)
class Packed:
    """A weight that lies in several tensors.

    Attributes:
        name: of the weight; `parts`: of the tensors that it is made of.
        stored: its shape, and how it is computed from its parts.
        matrices: how many are stacked on dim 0.
        note: in which format it is, and what was assumed.
    """

    name: str
    parts: tuple[str, ...]
    stored: Stored
    note: str
    matrices: int = 1


def packed_weights(stored: Mapping[str, Stored], quantization: Mapping[str, Any]) -> list[Packed]:
    """Every weight among the tensors that lies in several of them, in a format that is known.

    Args:
        quantization: the `quantization_config` of the model's `config.json`, or nothing.
    """
    found = []
    for name in stored:
        for reader in _READERS:
            packed = reader(name, stored, quantization)
            if packed is not None:
                found.append(packed)
                break
    return found


def _parts(stored: Mapping[str, Stored], *names: str) -> dict[str, Stored] | None:
    return {name: stored[name] for name in names} if all(name in stored for name in names) else None


def _four_bits(name: str, stored: Mapping[str, Stored], _: Mapping[str, Any]) -> Packed | None:
    """bitsandbytes: two codes per byte, a table of 16 values, one scale per block, itself quantised or not."""
    state = next((key for kind in _STATES if (key := f"{name}.quant_state.{kind}") in stored), None)
    parts = _parts(stored, name, f"{name}.absmax", f"{name}.quant_map")
    if state is None or parts is None or stored[state].entries > _LARGEST_STATE:
        return None
    about = _described(stored[state])
    if about is None:
        return None
    nested = _parts(stored, f"{name}.nested_absmax", f"{name}.nested_quant_map") or {}
    load = partial(dequantise.four_bits, {k.removeprefix(name): v for k, v in {**parts, **nested}.items()}, about)
    shape = tuple(about["shape"])
    names = (*parts, *nested, state)
    return Packed(name, names, Stored(shape, "float32", load), f"dequantised from 4 bits ({state.rpartition('__')[2]})")


def _described(state: Stored) -> dict[str, Any] | None:
    """What bitsandbytes says of a weight, in JSON, if it says all that is needed."""
    try:
        about = json.loads(bytes(state.load().to(torch.uint8).tolist()))
        shape, block = about["shape"], about["blocksize"]
        fits = all(isinstance(v, int) and v >= 0 for v in shape) and isinstance(block, int) and block > 0
    except (ValueError, TypeError, KeyError, RuntimeError, RecursionError, OSError):
        return None
    return about if fits else None


def _scaled(name: str, stored: Mapping[str, Stored], _: Mapping[str, Any]) -> Packed | None:
    """8-bit floats or integers with a scale for all, for each row, or for each block of both dimensions."""
    weight = stored[name]
    if len(weight.shape) != 2 or not weight.dtype.startswith(("float8", "int8")):
        return None
    for suffix in ("_scale_inv", "_scale"):
        scale = stored.get(f"{name}{suffix}")
        if scale is not None and _fits(weight.shape, scale.shape):
            load = partial(dequantise.scaled, weight, scale)
            made = Stored(weight.shape, "float32", load)
            return Packed(name, (name, f"{name}{suffix}"), made, f"dequantised from {weight.dtype} and its scale")
    return None


def _fits(weight: tuple[int, ...], scale: tuple[int, ...]) -> bool:
    if prod(scale) == 1:
        return True
    if scale in ((weight[0],), (weight[0], 1)):
        return True
    return len(scale) == 2 and tuple(ceil(n / dequantise.BLOCK) for n in weight) == scale


def _by_row(name: str, stored: Mapping[str, Stored], _: Mapping[str, Any]) -> Packed | None:
    """bitsandbytes: int8, and the largest absolute value of each row."""
    weight, largest = stored[name], stored.get(f"{name.removesuffix('weight')}SCB")
    if not name.endswith("weight") or largest is None or weight.dtype != "int8" or len(weight.shape) != 2:
        return None
    if largest.shape != weight.shape[:1]:
        return None
    scb = f"{name.removesuffix('weight')}SCB"
    load = partial(dequantise.by_row, weight, largest)
    return Packed(name, (name, scb), Stored(weight.shape, "float32", load), "dequantised from int8 (bitsandbytes)")


def _grouped(name: str, stored: Mapping[str, Stored], about: Mapping[str, Any]) -> Packed | None:
    """GPTQ and AWQ: codes packed in int32, a scale and a zero point for each group of inputs and output."""
    path = name.removesuffix("qweight")
    parts = _parts(stored, name, f"{path}qzeros", f"{path}scales")
    if path == name or parts is None or any(len(part.shape) != 2 for part in parts.values()):
        return None
    codes, scales = stored[name].shape, stored[f"{path}scales"].shape
    read: Callable[..., Tensor]
    if codes[1] == scales[1]:
        groups = stored.get(f"{path}g_idx")
        bits = about.get("bits") if groups is None else _bits(32 * codes[0], prod(groups.shape))
        inputs, read = (0 if not bits else 32 * codes[0] // bits), dequantise.gptq
        said = "GPTQ" if "checkpoint_format" in about else "GPTQ, its zero points stored less one"
        extra = {} if groups is None else {f"{path}g_idx": groups}
    else:
        bits, inputs, read = _bits(32 * codes[1], scales[1]), codes[0], dequantise.awq
        said, extra = "AWQ", {}
    if bits not in (2, 4, 8) or not scales[0] or (bits != 4 and read is dequantise.awq):
        return None
    parts = {**parts, **extra}
    load = partial(read, {key.removeprefix(path): part for key, part in parts.items()}, bits, about)
    made = Stored((scales[1], inputs), "float32", load)
    return Packed(f"{path}weight", tuple(parts), made, f"dequantised from {bits} bits ({said})")


def _bits(stored: int, numbers: int) -> int | None:
    return stored // numbers if numbers and stored % numbers == 0 else None


def _microscaled(name: str, stored: Mapping[str, Stored], _: Mapping[str, Any]) -> Packed | None:
    """MXFP4: two 4-bit floats per byte, and a power of 2 for every 32 of them."""
    path = name.removesuffix("_blocks")
    codes, scales = stored[name], stored.get(f"{path}_scales")
    if path == name or scales is None or codes.dtype != "uint8" or codes.shape[:-1] != scales.shape:
        return None
    if len(codes.shape) not in (3, 4) or codes.shape[-1] != 16:
        return None
    *matrices, rows, groups = codes.shape[:-1]
    shape = (prod(matrices) * rows, groups * 32)
    load = partial(dequantise.mxfp4, codes, scales, shape)
    made = Stored(shape, "float32", load)
    return Packed(path, (name, f"{path}_scales"), made, "dequantised from 4 bits (MXFP4)", prod(matrices))


Reader = Callable[[str, Mapping[str, Stored], Mapping[str, Any]], Packed | None]
_READERS: tuple[Reader, ...] = (_four_bits, _by_row, _scaled, _grouped, _microscaled)
