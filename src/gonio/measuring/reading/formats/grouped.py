"""Codes packed in integers of 32 bits, a scale and a zero point for each group of inputs: GPTQ, AWQ, and MLX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.measuring.reading.codes import unpacked
from gonio.measuring.reading.entry import StoredTensor
from gonio.measuring.reading.formats import FileTensors, Format, StoredTensors, StoredWeight, computed, present

_BITS = (2, 3, 4, 8)


def _grouped(name: str, stored: StoredTensors, about: Mapping[str, Any]) -> StoredWeight | None:
    path = name.removesuffix("qweight")
    parts = present(stored, name, f"{path}qzeros", f"{path}scales")
    if path == name or parts is None or any(len(part.shape) != 2 for part in parts.values()):
        return None
    codes, scales, zeros = (stored[f"{path}{last}"].shape for last in ("qweight", "scales", "qzeros"))
    groups, told = stored.get(f"{path}g_idx"), about.get("bits")
    read: Callable[..., Tensor]
    if codes[1] == scales[1]:
        bits = told if groups is None else _bits(32 * codes[0], groups.entries)
        bits = bits if isinstance(bits, int) and bits in _BITS else 0
        inputs, read = (32 * codes[0] // bits if bits else 0), _gptq_values
        known = "checkpoint_format" in about or "format" in about or about.get("sym") is True
        said = "GPTQ" if known else "GPTQ, its zero points stored less one"
        parts |= {} if groups is None else {f"{path}g_idx": groups}
        if groups is None and about.get("desc_act"):
            return StoredWeight(f"{path}weight", tuple(parts), None, "the order of its groups (g_idx) is not stored")
    else:
        bits, inputs, read, said = _bits(32 * codes[1], scales[1]), codes[0], _awq_values, "AWQ"
    if bits not in _BITS or not scales[0] or (bits != 4 and read is _awq_values):
        return None
    if why := _contradiction(about, bits, inputs, scales[0], zeros == (scales[0], -(-scales[1] * bits // 32))):
        return StoredWeight(f"{path}weight", tuple(parts), None, f"packed in {bits} bits ({said}), and {why}")
    named = {key.removeprefix(path): part for key, part in parts.items()}
    made = computed(read, named, bits, about, shape=(scales[1], inputs))
    return StoredWeight(f"{path}weight", tuple(parts), made, f"dequantised from {bits} bits ({said})")


def _contradiction(about: Mapping[str, Any], bits: int, inputs: int, groups: int, zeros: bool) -> str:
    """Where the configuration and the shapes contradict each other; empty if nowhere.

    Args:
        zeros: whether the shape of the zero points is that of the scales.
    """
    told, size = about.get("bits", about.get("w_bit")), about.get("group_size", about.get("q_group_size"))
    if told is not None and told != bits:
        return f"its configuration states {repr(told)[:20]} bits"
    if not zeros:
        return "its zero points do not fit its scales"
    if size is None or size == -1:
        return "" if size is None or groups == 1 else "its configuration states one group"
    if type(size) is not int or size < 1 or -(-inputs // size) != groups:
        return f"its {groups} groups are not of the {str(size)[:20]} inputs that its configuration states"
    return ""


def _bits(stored: int, numbers: int) -> int | None:
    return stored // numbers if numbers and stored % numbers == 0 else None


def _gptq_values(parts: StoredTensors, bits: int, about: Mapping[str, Any]) -> Tensor:
    """(code − zero) · scale of its group, codes packed along the inputs; as (outputs, inputs).

    The first version of the format stores zero − 1, and readers add 1; the second one, `gptq_v2`, stores zero. Some
    tools write the second and name the first. The zero point of symmetric codes is known, so that their values tell.

    References:
        [1] E. Frantar et al., "GPTQ: accurate post-training quantization for generative pre-trained
        transformers", 2022. arXiv 2210.17323
    """
    codes = unpacked(parts["qweight"].load().int().mT, bits)  # (outputs, inputs)
    zeros = unpacked(parts["qzeros"].load().int(), bits).mT.float()  # (outputs, groups)
    middle, less_one = 2 ** (bits - 1), (about.get("checkpoint_format") or about.get("format")) != "gptq_v2"
    if about.get("sym") is True and (zeros[0, 0] in (middle - 1, middle)) and (zeros == zeros[0, 0]).all():
        less_one = bool(zeros[0, 0] == middle - 1)
    if less_one:
        zeros = (zeros + 1) % 2**bits  # a zero point of 0 is stored as the largest code
    scales = parts["scales"].load().mT.float()
    group = _in_turn(codes.shape[1], scales.shape[1], about) if "g_idx" not in parts else parts["g_idx"].load().long()
    ends = (int(group.min()), int(group.max())) if len(group) else (0, 0)
    if not 0 <= ends[0] <= ends[1] < scales.shape[1]:
        found = f"{ends[0]} to {ends[1]}"
        raise InvalidArgumentError(f"g_idx names one of {scales.shape[1]} groups", found, "The tensors do not fit.")
    return (codes - zeros[:, group]).mul_(scales[:, group])


_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in its int32 of the code of each output


def _awq_values(parts: StoredTensors, bits: int, about: Mapping[str, Any]) -> Tensor:
    """(code − zero) · scale of its group, codes packed along the outputs, interleaved; as (outputs, inputs).

    References:
        [1] J. Lin et al., "AWQ: activation-aware weight quantization for LLM compression and acceleration",
        2023. arXiv 2306.00978
    """
    packed = (unpacked(parts[name].load().int(), bits).unflatten(-1, (-1, 8)) for name in ("qweight", "qzeros"))
    codes, zeros = (numbers[..., list(_AWQ_ORDER)].flatten(-2).float() for numbers in packed)
    scales = parts["scales"].load().float()
    group = _in_turn(codes.shape[0], scales.shape[0], about)
    return (codes - zeros[group]).mul_(scales[group]).mT


def _in_turn(inputs: int, groups: int, about: Mapping[str, Any]) -> Tensor:
    """The group of each input, in order; the last group may have fewer inputs than the stated size."""
    size = about.get("group_size", about.get("q_group_size"))
    return torch.arange(inputs, device="cpu") // (size if type(size) is int and size > 0 else -(-inputs // groups))


# --- MLX: codes along the inputs, an offset for each group ------------------------------------------------------------

_AFFINE_BITS = (2, 3, 4, 5, 6, 8)


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
    if bits not in _AFFINE_BITS or type(size) is not int or codes.shape[-1] * 32 != groups * size * bits:
        return StoredWeight(name, (name,), None, "uint32, and no configuration tells bits and groups that fit")
    *matrices, rows = codes.shape[:-1]
    shape = (prod(matrices) * rows, groups * size)
    made = computed(_affine_values, codes, scales, offsets, bits, shape, shape=shape)
    parts = (name, f"{path}.scales", f"{path}.biases")
    return StoredWeight(name, parts, made, f"dequantised from {bits} bits (MLX)", prod(matrices))


def _affine_values(
    codes: StoredTensor, scales: StoredTensor, offsets: StoredTensor, bits: int, shape: tuple[int, int]
) -> Tensor:
    """code · scale + offset of its group; the first code in the lowest bits, and codes may end in the next number.

    References: [1] MLX, documentation of `mlx.core.quantize`, mode "affine".
    """
    numbers = unpacked(codes.load(), bits).float()
    grouped = numbers.unflatten(-1, (scales.shape[-1], -1))
    factors, shifts = (part.load().float().unsqueeze(-1) for part in (scales, offsets))
    return grouped.mul_(factors).add_(shifts).reshape(shape)


FORMATS = (Format(_affine, dtypes=("uint32",), quantised=False), Format(_grouped, ("qweight",)))
