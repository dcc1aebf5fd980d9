"""Weights of 8 bits with scales: one, one per row, column, expert or block, or a power of 2 for every 32 (MXFP8).

And MXFP4: two 4-bit floats per byte, and a power of 2 for every 32 of them.

The keys of scales and of zero points are registered here. An 8-bit weight beside a tensor that may be its scale or its
zero point, and whose key is not registered, is refused: without them it would be measured at the wrong size.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from gonio.measuring.reading.codes import fp4_values, unpacked
from gonio.measuring.reading.entry import StoredTensor
from gonio.measuring.reading.formats import FileTensors, Format, StoredTensors, StoredWeight, computed

BLOCK = 128  # rows and columns of a block where neither the shapes nor the configuration tell
LARGEST_BLOCK = 1 << 20
_OF_WEIGHTS = ("{n}_scale_inv", "{n}_scale", "{n}.scale")  # which have the whole key of a weight
SCALES = (*_OF_WEIGHTS, "{p}scale_{l}", "{p}scale_inv", "{p}scales", "{p}scale")
ZEROS = ("{n}_zero_point", "{n}.zero_point", "{p}zero_point")
# The ends of the codes' keys of tensor subclasses that a file stores by their parts: of quanto, of torchao.
_INNER, _CODES = "._data", "_qdata"
# Scales of activations, beside those of weights.
ACTIVATIONS = ("input_scale", "scale_input", "input_scale_ub", "output_scale", "scale_output", "act_scale")


def scaled(name: str, stored: FileTensors, config: Mapping[str, Any]) -> StoredWeight | None:
    """A weight of codes of 8 bits, or why it is not read; None where nothing may scale it."""
    path, last = f"{name.rpartition('.')[0]}.".lstrip("."), name.rpartition(".")[2]
    if len(stored[name].shape) < 2 or name.endswith(_CODES):
        return None
    if name.endswith(_INNER):
        own = name.removesuffix(_INNER)
        return coded(name, own, f"{own}.", stored, config)
    scales, zeros = ([key.format(n=name, p=path, l=last) for key in kinds] for kinds in (SCALES, ZEROS))
    return _of_keys(name, name, scales, zeros, stored, config)


def coded(name: str, own: str, parts: str, stored: FileTensors, config: Mapping[str, Any]) -> StoredWeight | None:
    """A weight of 8 bits that a tensor subclass stores by its parts; None where the weight itself is there.

    Args:
        own: the name of the weight. `parts`: the beginning of the keys of its scale and zero point.
    """
    if own in stored:
        return None
    keys, zeros = [f"{parts}_scale"], [f"{parts}_zero_point"]
    config = {**config, **_exact(stored[name].shape, stored.get(keys[0]))}
    return _of_keys(name, own, keys, zeros, stored, config)


def _of_keys(
    name: str, own: str, keys: list[str], zeros: list[str], stored: FileTensors, config: Mapping[str, Any]
) -> StoredWeight | None:
    weight, path = stored[name], f"{name.rpartition('.')[0]}.".lstrip(".")
    known = [key for key in keys if key in stored and key != name]
    fitting = [key for key in known if _blocks(weight.shape, stored[key], config) is not None]
    if len(fitting) == 1 and len(known) == 1:
        key = fitting[0]
        zero, unknown = _zero_point(path, name, key, zeros, stored)
        others = [other for other in _may_scale(path, name, stored, config) if other not in (key, zero)]
        second = [other for other in others if other.startswith(f"{name}_")]
        if second:
            return StoredWeight(name, (name,), None, f"{weight.dtype}, and how {second[0]} scales it is not known")
        if zero and own != name and not stored[zero].dtype.startswith("int"):  # added to weights, not taken off codes
            unknown = unknown or zero
        if unknown:
            return StoredWeight(name, (name,), None, f"{weight.dtype}, and how {unknown} shifts it is not known")
        blocks = _blocks(weight.shape, stored[key], config)
        made = computed(_values, weight, stored[key], stored.get(zero), blocks, shape=weight.shape)
        said = f"dequantised from {weight.dtype} and its scale{' and zero point' if zero else ''}"
        return StoredWeight(own, (name, key, *([zero] if zero else [])), made, said)
    beside = known or _may_scale(path, name, stored, config) or _further(path, name, stored, config)
    if not beside:
        return None
    return StoredWeight(name, (name,), None, f"{weight.dtype}, and how {beside[0]} scales it is not known")


def _exact(shape: tuple[int, ...], scale: StoredTensor | None) -> dict[str, list[int]]:
    """The blocks of a matrix whose scales divide it without a rest, in the form of a configuration."""
    sizes = () if scale is None else scale.shape
    if len(shape) != 2 or len(sizes) != 2 or 0 in sizes or any(of % n for of, n in zip(shape, sizes, strict=True)):
        return {}
    return {"weight_block_size": [of // n for of, n in zip(shape, sizes, strict=True)]}


def _zero_point(path: str, name: str, scale: str, registered: list[str], stored: FileTensors) -> tuple[str, str]:
    """The key of the zero points, and that of a tensor which may be some; each is empty where there is none.

    Zero points have the shape of the scales. With one scale only the registered keys are taken for one.
    """
    layer = [f"{path}{last}" for last in stored.layers.get(path.removesuffix("."), {})]
    shape, one = stored[scale].shape, stored[scale].entries == 1
    beside = [key for key in (*layer, f"{name}.zero_point") if key in stored and key not in (name, scale)]
    known = [key for key in beside if key in registered]
    if known:
        zero = stored[known[0]]
        fits = len(known) == 1 and (zero.shape == shape or (one and zero.entries == 1))
        return (known[0], "") if fits else ("", known[0])
    others = [key for key in beside if stored[key].shape == shape and not one]
    others = [key for key in others if key.rpartition(".")[2] not in ("bias", *ACTIVATIONS)]
    own = {kind.format(n=key) for key in layer if key != name for kind in _OF_WEIGHTS}  # scales of other weights
    others = [key for key in others if key not in own]
    return "", others[0] if others else ""


def _may_scale(path: str, name: str, stored: FileTensors, config: Mapping[str, Any]) -> list[str]:
    """The tensors of a weight's layer or under its own name with the shape of a scale: no bias, none of activations."""
    weight, none = stored[name], ("bias", *ACTIVATIONS)
    layer = [f"{path}{last}" for last in stored.layers[path.removesuffix(".")] if last not in none]
    keys = (*layer, *(f"{name}.{last}" for last in stored.layers.get(name, {})))
    found = [key for key in keys if key != name and stored[key].dtype != weight.dtype]
    return [key for key in found if _blocks(weight.shape, stored[key], config) is not None]


def _further(path: str, name: str, stored: FileTensors, config: Mapping[str, Any]) -> list[str]:
    """The tensors with the shape of a scale in layers inside of a weight's layer, as in a quantiser, or beside it."""
    layer = path.removesuffix(".")
    parent, _, last = layer.rpartition(".")
    found = [f"{each}.{end}" for each in stored.inside.get(layer, ()) for end in stored.layers[each]] if layer else []
    found += [f"{parent}.{end}".lstrip(".") for end in stored.layers.get(parent, ()) if end.startswith(f"{last}_")]
    found = [key for key in found if not key.endswith(("bias", *ACTIVATIONS))]
    return [key for key in found if _blocks(stored[name].shape, stored[key], config) is not None]


def _blocks(shape: tuple[int, ...], scale: StoredTensor, config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The entries of the weight in each dimension that share a scale; None if the shapes do not fit."""
    floating = scale.dtype.startswith(("float", "bfloat"))
    if not floating and scale.dtype != "uint8":
        return None
    if scale.entries == 1:
        return shape if floating else None
    sizes = scale.shape if len(scale.shape) == len(shape) else (*scale.shape, *[1] * (len(shape) - len(scale.shape)))
    if len(sizes) != len(shape) or not all(0 < n <= of for n, of in zip(sizes, shape, strict=True)):
        return None
    if not floating:  # exponents of 2 are stored as bytes in the microscaling formats alone, for 32 inputs each
        micro = sizes[:-1] == shape[:-1] and shape[-1] == 32 * sizes[-1]
        return (*[1] * (len(shape) - 1), 32) if micro else None
    stated = config.get("weight_block_size")
    stated = stated if isinstance(stated, list) and len(stated) == 2 else [BLOCK, BLOCK]
    if not all(isinstance(n, int) and 0 < n <= LARGEST_BLOCK for n in stated):
        return None
    made = []
    for axis, (of, n) in enumerate(zip(shape, sizes, strict=True)):
        block = stated[axis - len(shape)] if axis >= len(shape) - 2 else 1
        if n in (1, of):
            made.append(of // n)
        elif -(-of // block) == n:
            made.append(block)
        elif of % n == 0 and "weight_block_size" not in config and not _is_padded(of, n):
            made.append(of // n)
        else:
            return None
    return tuple(made)


def _is_padded(of: int, n: int) -> bool:
    """Whether blocks of a power of 2, the last of them not full, may be meant instead of equal ones of another size."""
    size = 1 << (of // n - 1).bit_length()
    return size != of // n and -(-of // size) == n


def _values(weight: StoredTensor, scale: StoredTensor, zero: StoredTensor | None, blocks: tuple[int, ...]) -> Tensor:
    """(code − zero) · scale of its block.

    References:
        [1] P. Micikevicius et al., "FP8 formats for deep learning", 2022, §3. arXiv 2209.05433. [2] Open Compute
        Project, "OCP microscaling formats (MX) specification", version 1.0, 2023, §5.2 (MXFP8).
    """
    numbers, factors = weight.load().float(), scale.load()
    if zero is not None:
        numbers.sub_(_spread(zero.load().float(), numbers.shape, blocks))
    factors = torch.exp2(factors.float() - 127) if factors.dtype == torch.uint8 else factors.float()
    if factors.numel() == 1:
        return numbers.mul_(factors.reshape(()))
    factors = _spread(factors, numbers.shape, blocks[:-1])
    size, columns = blocks[-1], numbers.shape[-1]
    if factors.shape[-1] in (1, columns):
        return numbers.mul_(factors)
    for i in range(factors.shape[-1]):
        numbers[..., i * size : (i + 1) * size].mul_(factors[..., i : i + 1])
    return numbers


def _spread(part: Tensor, shape: tuple[int, ...], blocks: tuple[int, ...]) -> Tensor:
    """Numbers of blocks at each of their entries, along the first dimensions, of which blocks are given."""
    if part.numel() == 1:
        return part.reshape(())
    part = part.reshape(*part.shape, *[1] * (len(shape) - part.ndim))
    for axis, size in enumerate(blocks):
        if part.shape[axis] > 1:
            part = part.repeat_interleave(size, axis).narrow(axis, 0, shape[axis])
    return part


# --- MXFP4 ------------------------------------------------------------------------------------------------------------


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
    return torch.ldexp(fp4_values(unpacked(codes.load(), 4)), powers.unsqueeze(-1)).reshape(shape)


FORMATS = (Format(scaled, dtypes=("float8", "int8")), Format(_microscaled, ("_blocks",)))
