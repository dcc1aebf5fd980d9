"""Weights of HQQ and of quanto: codes packed along the first dimension, a scale and a zero point for each group.

The codes of a byte are those of rows far apart: the first ones of all bytes are the first rows, and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from gonio.measuring.reading.entry import StoredTensor, dtype_named
from gonio.measuring.reading.formats import FileTensors, Format, StoredTensors, StoredWeight, computed, numbers_in

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
_INSIDE = ("meta_scale", "meta_zero", "scale_quant_params", "zero_quant_params")  # layers of a layer


@dataclass(frozen=True)
class _Packed:
    """Codes as a matrix, whose groups are its rows (axis 1) or its columns (axis 0).

    Attributes:
        codes: packed along the rows, from the lowest bits that are `places`. `shape`: of the values.
        scale, zero: one for each group, or one for all; they may be packed themselves.
    """

    codes: StoredTensor
    scale: StoredTensor | _Packed
    zero: StoredTensor | _Packed
    shape: tuple[int, ...]
    size: int
    axis: int
    packing: str

    @property
    def matrix(self) -> tuple[int, int]:
        groups = prod(self.shape) // self.size
        return (groups, self.size) if self.axis == 1 else (self.size, groups)

    def values(self) -> Tensor:
        """(code − zero) · scale of its group.

        References: [1] H. Badri and A. Shaji, "Half-quadratic quantization of large machine learning models", 2023.
        """
        (rows, columns), (_, dtype, places) = self.matrix, _PACKINGS[self.packing]
        held = self.codes.load().contiguous().view(dtype).reshape(-1, columns)
        codes = unstacked(held, places)[:rows].float()
        parts = (one.values() if isinstance(one, _Packed) else one.load().float() for one in (self.zero, self.scale))
        zero, scale = (part.reshape((-1, 1) if self.axis == 1 else (1, -1)) for part in parts)
        return codes.sub_(zero).mul_(scale).reshape(self.shape)


def _hqq(name: str, stored: FileTensors, _: Mapping[str, Any]) -> StoredWeight | None:
    path = name.removesuffix("W_q")
    layer = stored.layers[path.removesuffix(".")]
    told = all(part in layer or f"{part}_q" in layer for part in ("scale", "zero")) and "packing" in layer
    if (path and not path.endswith(".")) or not told:
        return None
    inside = {one: stored.layers.get(f"{path}{one}", {}) for one in _INSIDE}
    parts = [last for last in (*_FACTS, *_SETTINGS, "scale", "zero", "scale_q", "zero_q") if last in layer]
    parts += [f"{one}.{last}" for one, held in inside.items() for last in held]
    used = (name, *(f"{path}{last}" for last in parts))
    try:
        packed = _told(layer, "W_q", inside)
    except ValueError as error:
        return StoredWeight(f"{path}weight", used, None, f"packed by HQQ, and {error}")
    said = f"dequantised from {_PACKINGS[packed.packing][0]} bits (HQQ)"
    return StoredWeight(f"{path}weight", used, computed(packed.values, shape=packed.shape), said)


def _told(layer: StoredTensors, codes: str, inside: Mapping[str, StoredTensors]) -> _Packed:
    """The codes of a layer with what their facts say.

    Raises:
        ValueError: with what keeps them from being computed.
    """
    stored = {fact: layer[fact] for fact in _FACTS if fact in layer and layer[fact].entries <= _LARGEST_FACT}
    facts = {fact: told for fact, one in stored.items() if (told := numbers_in(one)) is not None}
    facts = facts if len(facts) == len(stored) else {}  # of a damaged file
    if any(type(n) is not int or n < 0 for fact in facts.values() for n in fact) or not all(facts.values()):
        raise ValueError("its shape, groups or packing are no natural numbers")
    shape, axis = facts.get("shape", []), facts.get("axis", [])
    size = facts.get("group_size", [shape[1 - axis[0]] if axis in ([0], [1]) and len(shape) == 2 else 0])
    if len(shape) < 2 or len(size) != 1 or axis not in ([0], [1]) or "packing" not in facts:
        raise ValueError("its shape, groups or axis cannot be read")
    packing = "".join(chr(letter % 128) for letter in facts["packing"])
    if packing not in _PACKINGS:
        raise ValueError(f"its packing {packing!r} is not read")
    if not size[0] or prod(shape) % size[0]:
        raise ValueError("its groups do not divide it")
    parts: dict[str, StoredTensor | _Packed] = {}
    for part in ("scale", "zero"):
        if part in layer:
            parts[part] = layer[part]
        elif f"{part}_q" in layer and inside.get(f"meta_{part}"):
            parts[part] = _told({**inside[f"meta_{part}"], codes: layer[f"{part}_q"]}, codes, {})
        else:
            raise ValueError("its scales or zero points are not stored")
    made = _Packed(layer[codes], **parts, shape=tuple(shape), size=size[0], axis=axis[0], packing=packing)
    if not _fits(made):
        raise ValueError("its codes, scales and zero points do not fit its shape")
    return made


def _fits(packed: _Packed) -> bool:
    """Whether codes, scales and zero points have as many entries as the shape wants."""
    (rows, columns), (_, dtype, places) = packed.matrix, _PACKINGS[packed.packing]
    stored = dtype_named(packed.codes.dtype)
    held = packed.codes.entries * (stored.itemsize if stored else 0) // dtype.itemsize
    each = (rows, 1) if packed.axis == 1 else (1, columns)
    shapes = [part.shape for part in (packed.scale, packed.zero)]
    return held == -(-rows // len(places)) * columns and all(shape == each or prod(shape) == 1 for shape in shapes)


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
