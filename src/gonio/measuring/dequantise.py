"""Numbers from codes: the formats in which quantised weights are stored, each by its definition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.measuring.stored import Stored, dtype_named

__all__ = ["BLOCK", "awq", "by_row", "four_bits", "gptq", "mxfp4", "scaled"]

BLOCK = 128  # rows and columns of a block with one scale, of 8-bit floats
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in its int32 the code of each output lies
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def four_bits(parts: Mapping[str, Stored], about: Mapping[str, Any]) -> Tensor:
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


def by_row(weight: Stored, largest: Stored) -> Tensor:
    """code / 127 · largest absolute value of the row.

    References:
        [1] T. Dettmers et al., "LLM.int8(): 8-bit matrix multiplication for transformers at scale", 2022, §2.1.
        arXiv 2208.07339
    """
    return weight.load().float().mul_(largest.load().float()[:, None] / 127)


def scaled(weight: Stored, scale: Stored) -> Tensor:
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


def gptq(parts: Mapping[str, Stored], bits: int, about: Mapping[str, Any]) -> Tensor:
    """(code − zero) · scale of its group, codes packed along the inputs; as (outputs, inputs).

    The format's first version stores zero − 1, which its readers add again; its second one, `gptq_v2`, zero.

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


def awq(parts: Mapping[str, Stored], bits: int, about: Mapping[str, Any]) -> Tensor:
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
    """Which group each input is in, all of one size."""
    return torch.arange(inputs) // -(-inputs // groups)


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """The codes in the last dimension's int32 numbers, the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((packed.int().unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(-2)


def _interleaved(packed: Tensor, bits: int) -> Tensor:
    codes = _unpacked(packed, bits).unflatten(-1, (-1, len(_AWQ_ORDER)))
    return codes[..., list(_AWQ_ORDER)].flatten(-2).float()


def mxfp4(codes: Stored, scales: Stored, shape: tuple[int, int]) -> Tensor:
    """Sign, 2 bits of exponent and 1 of mantissa, times 2^(scale − 127); the low half of each byte first.

    References:
        [1] Open Compute Project, "OCP microscaling formats (MX) specification", version 1.0, 2023, §5.3 and §6.3.
    """
    table = torch.tensor([*_FP4, *(-value for value in _FP4)])
    numbers = table[_halves(codes.load(), high_first=False)]
    powers = scales.load().to(torch.int32) - 127
    return torch.ldexp(numbers, powers.unsqueeze(-1)).reshape(shape)
