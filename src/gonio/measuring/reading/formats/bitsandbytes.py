"""Weights of bitsandbytes: 4 bits with a table of 16 values and a scale per block, or int8 with a scale per row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.measuring.reading.codes import unpacked
from gonio.measuring.reading.entry import StoredTensor, dtype_named
from gonio.measuring.reading.formats import Format, StoredTensors, StoredWeight, computed, present

_STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
_LARGEST_STATE = 1 << 16  # bytes of the description of a 4-bit weight


def _four_bits(state: str, stored: StoredTensors, config: Mapping[str, Any]) -> StoredWeight | None:
    name, _, kind = state.rpartition(".quant_state.")
    parts = present(stored, name, f"{name}.absmax", f"{name}.quant_map")
    if parts is None or stored[state].entries > _LARGEST_STATE:
        return None
    try:  # the JSON in which bitsandbytes describes the weight
        about = json.loads(bytes(stored[state].load().to(torch.uint8).tolist()))
        shape, block = tuple(about["shape"]), about["blocksize"]
        if not (all(isinstance(v, int) and v >= 0 for v in shape) and isinstance(block, int) and block > 0):
            return None
    except (ValueError, TypeError, KeyError, RuntimeError, RecursionError, OSError):
        return None
    parts |= present(stored, f"{name}.nested_absmax", f"{name}.nested_quant_map") or {}
    made = computed(_four_bit_values, {k.removeprefix(name): v for k, v in parts.items()}, about, shape=shape)
    return StoredWeight(name, (*parts, state), made, f"dequantised from 4 bits ({kind.rpartition('__')[2]})")


def _four_bit_values(parts: StoredTensors, about: Mapping[str, Any]) -> Tensor:
    """table[code] · scale of the block, the high half of each byte first.

    Scales that are quantised themselves are table[code] · scale of their block + offset.

    References:
        [1] T. Dettmers et al., "QLoRA: efficient finetuning of quantized LLMs", 2023, §3. arXiv 2305.14314
    """
    read = {key: part.load() for key, part in parts.items()}
    scales = read[".absmax"].flatten()
    if ".nested_absmax" in read:
        steps = read[".nested_quant_map"].flatten()[scales.long()]
        coarse = read[".nested_absmax"].flatten()[
            torch.arange(len(steps), device="cpu") // int(about["nested_blocksize"])
        ]
        scales = steps * coarse + float(about["nested_offset"])
    codes = unpacked(read[""].flatten(), 4).unflatten(-1, (-1, 2)).flip(-1).flatten()
    made = read[".quant_map"].flatten().float()[codes.int()]
    entries, size = prod(about["shape"]), about["blocksize"]
    _check("4-bit blocks of scales", -(-entries // size), len(scales))
    _check("4-bit codes", entries + entries % 2, len(made))
    whole = entries // size * size
    made[:whole].view(-1, size).mul_(scales[: whole // size, None])
    if whole < entries:
        made[whole:entries].mul_(scales[-1])
    stored_as = dtype_named(str(about.get("dtype"))) or torch.float32
    return made[:entries].to(stored_as).reshape(*about["shape"])


def _check(what: str, expected: int, found: int) -> None:
    if expected != found:
        raise InvalidArgumentError(f"dequantising needs {expected} {what}", f"{found}", "The tensors do not fit.")


# --- bitsandbytes, int8, and the largest absolute value of each row --------------------------------------------------


def _by_row(scb: str, stored: StoredTensors, _: Mapping[str, Any]) -> StoredWeight | None:
    name = f"{scb.removesuffix('SCB')}weight"
    weight = stored.get(name)
    if weight is None or weight.dtype != "int8" or len(weight.shape) != 2 or stored[scb].shape != weight.shape[:1]:
        return None
    made = computed(_row_values, weight, stored[scb], shape=weight.shape)
    return StoredWeight(name, (name, scb), made, "dequantised from int8 (bitsandbytes)")


def _row_values(weight: StoredTensor, largest: StoredTensor) -> Tensor:
    """code / 127 · largest absolute value of the row.

    References:
        [1] T. Dettmers et al., "LLM.int8(): 8-bit matrix multiplication for transformers at scale", 2022, §2.1.
        arXiv 2208.07339
    """
    return weight.load().float().mul_(largest.load().float()[:, None] / 127)


FORMATS = (Format(_four_bits, _STATES), Format(_by_row, (".SCB",)))
