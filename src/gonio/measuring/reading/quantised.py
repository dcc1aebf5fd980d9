"""Quantised weights stored as several tensors: which tensors belong together, and the values that they encode.

Each format has a function that recognises it by names and shapes and one that computes its values. A tensor packed
in another way keeps its row, with the reason.
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

from gonio.errors import InvalidArgumentError
from gonio.measuring.reading.entry import Stored, dtype_named


@dataclass(frozen=True)
class Packed:
    """A weight stored as several tensors.

    Attributes:
        name: of the weight; `parts`: the names of its tensors.
        stored: its shape, and how it is computed from its parts.
        note: its format, and what was assumed.
        matrices: how many are stacked on dim 0.
    """

    name: str
    parts: tuple[str, ...]
    stored: Stored
    note: str
    matrices: int = 1


def packed_weights(stored: Mapping[str, Stored], quantization: Mapping[str, Any]) -> list[Packed]:
    """Every weight among the tensors that is stored as several of them in a known format.

    Args:
        quantization: the `quantization_config` of the model's `config.json`, or an empty mapping.
    """
    found = []
    for name in stored:
        packed = (reader(name, stored, quantization) for reader in _READERS)
        found += [first] if (first := next(filter(None, packed), None)) else []
    return found


def _parts(stored: Mapping[str, Stored], *names: str) -> dict[str, Stored] | None:
    return {name: stored[name] for name in names} if all(name in stored for name in names) else None


# --- bitsandbytes, 4 bits: two codes per byte, a table of 16 values, one scale per block, itself quantised or not ---

_STATES = ("bitsandbytes__nf4", "bitsandbytes__fp4")
_LARGEST_STATE = 1 << 16  # bytes of the description of a 4-bit weight


def _four_bits(name: str, stored: Mapping[str, Stored], _: Mapping[str, Any]) -> Packed | None:
    state = next((key for kind in _STATES if (key := f"{name}.quant_state.{kind}") in stored), None)
    parts = _parts(stored, name, f"{name}.absmax", f"{name}.quant_map")
    if state is None or parts is None or stored[state].entries > _LARGEST_STATE:
        return None
    about = _description(stored[state])
    if about is None:
        return None
    nested = _parts(stored, f"{name}.nested_absmax", f"{name}.nested_quant_map") or {}
    load = partial(_four_bit_values, {k.removeprefix(name): v for k, v in {**parts, **nested}.items()}, about)
    made = Stored(tuple(about["shape"]), "float32", load)
    return Packed(name, (*parts, *nested, state), made, f"dequantised from 4 bits ({state.rpartition('__')[2]})")


def _description(state: Stored) -> dict[str, Any] | None:
    """The JSON in which bitsandbytes describes a weight, if it is complete."""
    try:
        about = json.loads(bytes(state.load().to(torch.uint8).tolist()))
        shape, block = about["shape"], about["blocksize"]
        fits = all(isinstance(v, int) and v >= 0 for v in shape) and isinstance(block, int) and block > 0
    except (ValueError, TypeError, KeyError, RuntimeError, RecursionError, OSError):
        return None
    return about if fits else None


def _four_bit_values(parts: Mapping[str, Stored], about: Mapping[str, Any]) -> Tensor:
    """table[code] · scale of the block, the high half of each byte first.

    Scales that are quantised themselves are table[code] · scale of their block + offset.

    References:
        [1] T. Dettmers et al., "QLoRA: efficient finetuning of quantized LLMs", 2023, §3. arXiv 2305.14314
    """
    read = {key: part.load() for key, part in parts.items()}
    scales = read[".absmax"].flatten()
    if ".nested_absmax" in read:
        steps = read[".nested_quant_map"].flatten()[scales.long()]
        blocks = read[".nested_absmax"].flatten().repeat_interleave(int(about["nested_blocksize"]))
        scales = steps * blocks[: len(steps)] + float(about["nested_offset"])
    made = read[".quant_map"].flatten().float()[_halves(read[""].flatten().view(torch.uint8), high_first=True)]
    entries, size = torch.Size(about["shape"]).numel(), int(about["blocksize"])
    _check("4-bit blocks of scales", -(-entries // size), len(scales))
    _check("4-bit codes", entries + entries % 2, len(made))
    whole = entries // size * size
    made[:whole].view(-1, size).mul_(scales[: whole // size, None])
    if whole < entries:
        made[whole:entries].mul_(scales[-1])
    stored_as = dtype_named(str(about.get("dtype"))) or torch.float32
    return made[:entries].to(stored_as).reshape(*about["shape"])


def _halves(codes: Tensor, *, high_first: bool) -> Tensor:
    """Both 4-bit codes of each byte, side by side."""
    high, low = (codes >> 4).int(), (codes & 15).int()
    return torch.stack((high, low) if high_first else (low, high), -1).flatten(-2)


def _check(what: str, expected: int, found: int) -> None:
    if expected != found:
        raise InvalidArgumentError(f"dequantising needs {expected} {what}", f"{found}", "The tensors do not fit.")


# --- bitsandbytes, int8, and the largest absolute value of each row --------------------------------------------------


def _by_row(name: str, stored: Mapping[str, Stored], _: Mapping[str, Any]) -> Packed | None:
    weight, scb = stored[name], f"{name.removesuffix('weight')}SCB"
    largest = stored.get(scb)
    if not name.endswith("weight") or largest is None or weight.dtype != "int8" or len(weight.shape) != 2:
        return None
    if largest.shape != weight.shape[:1]:
        return None
    made = Stored(weight.shape, "float32", partial(_row_values, weight, largest))
    return Packed(name, (name, scb), made, "dequantised from int8 (bitsandbytes)")


def _row_values(weight: Stored, largest: Stored) -> Tensor:
    """code / 127 · largest absolute value of the row.

    References:
        [1] T. Dettmers et al., "LLM.int8(): 8-bit matrix multiplication for transformers at scale", 2022, §2.1.
        arXiv 2208.07339
    """
    return weight.load().float().mul_(largest.load().float()[:, None] / 127)


# --- 8-bit floats or integers, and one scale, one per row, or one per block of both dimensions -----------------------

BLOCK = 128  # rows and columns of a block


def _scaled(name: str, stored: Mapping[str, Stored], _: Mapping[str, Any]) -> Packed | None:
    weight = stored[name]
    if len(weight.shape) != 2 or not weight.dtype.startswith(("float8", "int8")):
        return None
    for suffix in ("_scale_inv", "_scale"):
        scale = stored.get(f"{name}{suffix}")
        if scale is not None and _fits(weight.shape, scale.shape):
            made = Stored(weight.shape, "float32", partial(_scaled_values, weight, scale))
            return Packed(name, (name, f"{name}{suffix}"), made, f"dequantised from {weight.dtype} and its scale")
    return None


def _fits(weight: tuple[int, ...], scale: tuple[int, ...]) -> bool:
    blocks = tuple(ceil(n / BLOCK) for n in weight)
    return prod(scale) == 1 or scale in ((weight[0],), (weight[0], 1), blocks)


def _scaled_values(weight: Stored, scale: Stored) -> Tensor:
    """code · scale, of all, of the row, or of the block of 128 × 128."""
    numbers, factors = weight.load().float(), scale.load().float()
    if factors.numel() == 1:
        return numbers.mul_(factors.reshape(()))
    if factors.ndim == 1 or factors.shape[1] == 1:
        return numbers.mul_(factors.reshape(-1, 1))
    for i, row in enumerate(factors):
        rows = numbers[i * BLOCK : (i + 1) * BLOCK]
        rows.mul_(row.repeat_interleave(BLOCK)[: rows.shape[1]])
    return numbers


# --- GPTQ and AWQ: codes packed in int32, a scale and a zero point for each group of inputs and output ---------------


def _grouped(name: str, stored: Mapping[str, Stored], about: Mapping[str, Any]) -> Packed | None:
    path = name.removesuffix("qweight")
    parts = _parts(stored, name, f"{path}qzeros", f"{path}scales")
    if path == name or parts is None or any(len(part.shape) != 2 for part in parts.values()):
        return None
    codes, scales = stored[name].shape, stored[f"{path}scales"].shape
    read: Callable[..., Tensor]
    if codes[1] == scales[1]:
        groups = stored.get(f"{path}g_idx")
        bits = about.get("bits") if groups is None else _bits(32 * codes[0], prod(groups.shape))
        inputs, read = (0 if not bits else 32 * codes[0] // bits), _gptq_values
        said = "GPTQ" if "checkpoint_format" in about else "GPTQ, its zero points stored less one"
        parts |= {} if groups is None else {f"{path}g_idx": groups}
    else:
        bits, inputs, read, said = _bits(32 * codes[1], scales[1]), codes[0], _awq_values, "AWQ"
    if bits not in (2, 4, 8) or not scales[0] or (bits != 4 and read is _awq_values):
        return None
    load = partial(read, {key.removeprefix(path): part for key, part in parts.items()}, bits, about)
    made = Stored((scales[1], inputs), "float32", load)
    return Packed(f"{path}weight", tuple(parts), made, f"dequantised from {bits} bits ({said})")


def _bits(stored: int, numbers: int) -> int | None:
    return stored // numbers if numbers and stored % numbers == 0 else None


def _gptq_values(parts: Mapping[str, Stored], bits: int, about: Mapping[str, Any]) -> Tensor:
    """(code − zero) · scale of its group, codes packed along the inputs; as (outputs, inputs).

    The first version of the format stores zero − 1, and readers add 1; the second one, `gptq_v2`, stores zero.

    References:
        [1] E. Frantar et al., "GPTQ: accurate post-training quantization for generative pre-trained
        transformers", 2022. arXiv 2210.17323
    """
    codes = _unpacked(parts["qweight"].load().mT, bits)  # (outputs, inputs)
    zeros = _unpacked(parts["qzeros"].load(), bits).mT.float()  # (outputs, groups)
    if about.get("checkpoint_format") != "gptq_v2":
        zeros = zeros + 1
    scales = parts["scales"].load().mT.float()
    group = parts["g_idx"].load().long() if "g_idx" in parts else _in_turn(codes.shape[1], scales.shape[1])
    return (codes - zeros[:, group]).mul_(scales[:, group])


_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in its int32 of the code of each output


def _awq_values(parts: Mapping[str, Stored], bits: int, about: Mapping[str, Any]) -> Tensor:
    """(code − zero) · scale of its group, codes packed along the outputs, interleaved; as (outputs, inputs).

    References:
        [1] J. Lin et al., "AWQ: activation-aware weight quantization for LLM compression and acceleration",
        2023. arXiv 2306.00978
    """
    codes, zeros = (_interleaved(parts[name].load(), bits) for name in ("qweight", "qzeros"))
    scales = parts["scales"].load().float()
    group = _in_turn(codes.shape[0], scales.shape[0])
    return (codes - zeros[group]).mul_(scales[group]).mT


def _in_turn(inputs: int, groups: int) -> Tensor:
    """The group of each input, where all groups have one size."""
    return torch.arange(inputs) // -(-inputs // groups)


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """The codes in the last dimension's int32 numbers, the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((packed.int().unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(-2)


def _interleaved(packed: Tensor, bits: int) -> Tensor:
    codes = _unpacked(packed, bits).unflatten(-1, (-1, len(_AWQ_ORDER)))
    return codes[..., list(_AWQ_ORDER)].flatten(-2).float()


# --- MXFP4: two 4-bit floats per byte, and a power of 2 for every 32 of them -----------------------------------------

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _microscaled(name: str, stored: Mapping[str, Stored], _: Mapping[str, Any]) -> Packed | None:
    path = name.removesuffix("_blocks")
    codes, scales = stored[name], stored.get(f"{path}_scales")
    if path == name or scales is None or codes.dtype != "uint8" or codes.shape[:-1] != scales.shape:
        return None
    if len(codes.shape) not in (3, 4) or codes.shape[-1] != 16:
        return None
    *matrices, rows, groups = codes.shape[:-1]
    shape = (prod(matrices) * rows, groups * 32)
    made = Stored(shape, "float32", partial(_mxfp4_values, codes, scales, shape))
    return Packed(path, (name, f"{path}_scales"), made, "dequantised from 4 bits (MXFP4)", prod(matrices))


def _mxfp4_values(codes: Stored, scales: Stored, shape: tuple[int, int]) -> Tensor:
    """Sign, 2 bits of exponent and 1 of mantissa, times 2^(scale − 127); the low half of each byte first.

    References:
        [1] Open Compute Project, "OCP microscaling formats (MX) specification", version 1.0, 2023, §5.3 and §6.3.
    """
    table = torch.tensor([*_FP4, *(-value for value in _FP4)])
    numbers = table[_halves(codes.load(), high_first=False)]
    powers = scales.load().to(torch.int32) - 127
    return torch.ldexp(numbers, powers.unsqueeze(-1)).reshape(shape)


Reader = Callable[[str, Mapping[str, Stored], Mapping[str, Any]], Packed | None]
_READERS: tuple[Reader, ...] = (_four_bits, _by_row, _scaled, _grouped, _microscaled)
