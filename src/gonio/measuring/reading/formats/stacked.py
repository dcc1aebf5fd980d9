"""Weights of HQQ and of quanto: codes packed along the first dimension, a scale and a zero point for each group.

The codes of a byte are those of rows far apart: the first ones of all bytes are the first rows, and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from gonio.errors import GonioError
from gonio.measuring.reading.entry import StoredTensor
from gonio.measuring.reading.formats import FileTensors, Format, StoredTensors, StoredWeight, computed

_LARGEST_FACT = 64  # entries of a tensor that is a number, a shape or a word
# Of each packing of HQQ: the dtype that is packed, and the lowest bit of each code in the order of the rows.
_PACKINGS = {
    "8bit_u8": (8, torch.uint8, (0,)),
    "4bit_u8": (4, torch.uint8, (4, 0)),
    "3bit_32": (3, torch.int32, tuple(range(27, -1, -3))),
    "2bit_u8": (2, torch.uint8, (6, 4, 2, 0)),
    "1bit_u8": (1, torch.uint8, tuple(range(7, -1, -1))),
}
_FACTS = ("shape", "group_size", "axis", "packing")
_SETTINGS = (  # of the quantisation, which the values do not depend on
    *("unpack_view_dtype", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config"),
    *("channel_wise", "optimize", "round_zero", "nbits", "view_as_float", "quant_scale", "quant_zero"),
)


def _hqq(name: str, stored: FileTensors, _: Mapping[str, Any]) -> StoredWeight | None:
    path = name.removesuffix("W_q")
    layer = stored.layers[path.removesuffix(".")]
    if (path and not path.endswith(".")) or any(part not in layer for part in (*_FACTS, "scale", "zero")):
        return None
    try:
        held = [layer[fact] for fact in _FACTS]
        facts = [one.load().flatten().tolist() if one.entries <= _LARGEST_FACT else [] for one in held]
    except (GonioError, RuntimeError, ValueError, OSError):  # a damaged file
        facts = []
    used = (name, *(f"{path}{last}" for last in (*_FACTS, *_SETTINGS, "scale", "zero") if last in layer))
    if why := _untold(layer, facts):
        return StoredWeight(f"{path}weight", used, None, f"packed by HQQ, and {why}")
    shape, (size,), (axis,), packing = facts
    bits, dtype, places = _PACKINGS[_word(packing)]
    parts = {last: layer[last] for last in ("W_q", "scale", "zero")}
    made = computed(_hqq_values, parts, dtype, places, tuple(shape), axis, size, shape=tuple(shape))
    return StoredWeight(f"{path}weight", used, made, f"dequantised from {bits} bits (HQQ)")


def _word(letters: list[int]) -> str:
    return "".join(chr(letter % 128) for letter in letters)


def _untold(layer: StoredTensors, facts: list[list[Any]]) -> str:
    """What keeps a weight of HQQ from being computed; empty if its facts are there and fit each other."""
    if any(type(n) is not int or n < 0 for fact in facts for n in fact) or not all(facts):
        return "its shape, groups or packing are no natural numbers"
    if not facts or any(len(fact) != 1 for fact in facts[1:3]) or facts[2][0] > 1 or len(facts[0]) < 2:
        return "its shape, groups or axis cannot be read"
    shape, (size,), (axis,), packing = facts
    if _word(packing) not in _PACKINGS:
        return f"its packing {_word(packing)!r} is not read"
    _, dtype, places = _PACKINGS[_word(packing)]
    if not size or prod(shape) % size:
        return "its groups do not divide it"
    rows, columns = (prod(shape) // size, size) if axis == 1 else (size, prod(shape) // size)
    stored = layer["W_q"]
    held = stored.entries * getattr(torch, stored.dtype).itemsize // dtype.itemsize
    each = (rows, 1) if axis == 1 else (1, columns)
    if held != -(-rows // len(places)) * columns or layer["scale"].shape != each or layer["zero"].shape != each:
        return "its codes, scales and zero points do not fit its shape"
    return ""


def _hqq_values(
    parts: StoredTensors, dtype: torch.dtype, places: tuple[int, ...], shape: tuple[int, ...], axis: int, size: int
) -> Tensor:
    """(code − zero) · scale of its group; the groups are the rows (axis 1) or the columns (axis 0) of a matrix.

    References: [1] H. Badri and A. Shaji, "Half-quadratic quantization of large machine learning models", 2023.
    """
    groups = prod(shape) // size
    rows, columns = (groups, size) if axis == 1 else (size, groups)
    codes = unstacked(parts["W_q"].load().contiguous().view(dtype).reshape(-1, columns), places)[:rows].float()
    return codes.sub_(parts["zero"].load().float()).mul_(parts["scale"].load().float()).reshape(shape)


def unstacked(packed: Tensor, places: tuple[int, ...]) -> Tensor:
    """The codes of all numbers at their first place, then those at the second one, and so on, along dim 0.

    Args:
        places: the lowest bit of each code.
    """
    width = 8 * packed.element_size() // len(places)  # 3 for ten codes in 32 bits
    return torch.cat([(packed >> place) & (2**width - 1) for place in places])


# --- quanto -----------------------------------------------------------------------------------------------------------

_INNER = "._data._data"
_QUANTO = {4: (0, 4), 2: (0, 2, 4, 6)}  # the lowest bit of each code in the order of the rows


def _quanto(name: str, stored: FileTensors, _: Mapping[str, Any]) -> StoredWeight | None:
    """As optimum-quanto stores `qint4` and `qint2`: neither the bits nor the shape of the weight are in the file.

    The bits follow from the number of scales. Where groups are shorter than rows, the bias tells how many outputs
    there are.
    """
    own = name.removesuffix(_INNER)
    codes, scale, shift = stored[name], stored.get(f"{own}._scale"), stored.get(f"{own}._shift")
    if scale is None or shift is None or codes.dtype != "uint8" or len(codes.shape) < 2:
        return None
    used = (name, f"{own}._scale", f"{own}._shift")

    def refused(why: str) -> StoredWeight:
        return StoredWeight(own, used, None, f"packed by quanto, and {why}")

    shape: tuple[int, ...]
    rows = scale.shape[0] if scale.shape else 0
    each = (rows, *[1] * (len(codes.shape) - 1))
    bits = [n for n, places in _QUANTO.items() if rows and -(-rows // len(places)) == codes.shape[0]]
    if scale.shape != each or shift.shape != each or len(bits) != 1:
        return refused("its scales do not tell how many bits a code has")
    bias = stored.get(f"{own.removesuffix('weight')}bias")
    outputs = bias.shape[0] if bias is not None and len(bias.shape) == 1 else 0
    if len(codes.shape) == 2 and outputs != rows:
        if not outputs or rows % outputs:
            return refused("no bias tells how many outputs it has")
        shape, said = (outputs, rows * codes.shape[1] // outputs), "quanto, as a matrix: its other dimensions are lost"
    else:
        shape, said = (rows, *codes.shape[1:]), "quanto"
    made = computed(_quanto_values, codes, scale, shift, _QUANTO[bits[0]], shape, shape=shape)
    return StoredWeight(own, used, made, f"dequantised from {bits[0]} bits ({said})")


def _quanto_values(
    codes: StoredTensor, scale: StoredTensor, shift: StoredTensor, places: tuple[int, ...], shape: tuple[int, ...]
) -> Tensor:
    """scale · code − shift of its group; a shift of integers is a zero point: scale · (code − shift).

    References: [1] optimum-quanto 0.2.7, `optimum/quanto/tensor/qbits.py`.
    """
    factors, shifts = scale.load().float(), shift.load()
    numbers = unstacked(codes.load(), places)[: len(factors)].float()
    if shifts.is_floating_point():
        return numbers.mul_(factors).sub_(shifts.float()).reshape(shape)
    return numbers.sub_(shifts.float()).mul_(factors).reshape(shape)


FORMATS = (Format(_hqq, ("W_q",)), Format(_quanto, (_INNER,)))
