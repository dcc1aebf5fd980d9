"""Weights rounded to integers with one scale per tensor, per channel or per group, simulated in floating point."""

from __future__ import annotations

from math import sqrt
from typing import Literal, get_args

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.geometry.blocks import row_blocks
from gonio.geometry.norms import Array, as_real, check_finite, widen

Scales = Literal["tensor", "channel"] | int
"""What shares a scale: all entries, those of a row, or so many consecutive entries of a row."""

Mapping = Literal["symmetric", "asymmetric"]
"""Whether 0 is the middle of the integers, or the integers reach from the smallest entry to the largest one."""


@torch.no_grad()
def fake_quantize(weight: Array, *, bits: int = 8, per: Scales = "channel", mapping: Mapping = "symmetric") -> Tensor:
    r"""The weight after rounding to signed integers and back, with a scale from the largest entry.

    .. math::
        q = \operatorname{clamp}\big(\operatorname{round}(w / s) + z,\, -2^{b-1},\, 2^{b-1} - 1\big), \qquad
        \hat w = s\,(q - z)

    Symmetric, :math:`s = \max |w| / ((2^b - 1)/2)` and z = 0. Asymmetric, with
    :math:`m = \min(\min w, 0)` and :math:`M = \max(\max w, 0)`, :math:`s = (M - m)/(2^b - 1)` and
    :math:`z = -2^{b-1} - \operatorname{round}(m / s)`. These are the integers of torchao's `Int8WeightOnlyConfig`
    and `IntxWeightOnlyConfig`, which have both mappings.

    Args:
        weight: rows (…, n, d), a channel each; a filter of a convolution is a row of ``weight.flatten(1)``.
        bits: b, from 2 to 8.
        per: what shares a scale: `tensor`, `channel` (a row), or the number of consecutive entries of a row.
        mapping: `symmetric`, or `asymmetric` with an integer zero point z.

    Returns: A tensor of the weight's shape and dtype, without a gradient; zeros stay zeros.
    Raises: InvalidArgumentError for other bits, scales or mappings, for groups that do not divide d, for a tensor
        that has no rows, or for non-finite entries.

    Example:
        >>> gonio.geometry.fake_quantize(torch.tensor([[1.0, 0.3, -0.75], [10.0, 4.0, 0.0]]), bits=4)
        tensor([[ 0.9333,  0.2667, -0.8000],
                [ 9.3333,  4.0000,  0.0000]])

    Source: torchao, `quant_primitives.py`, `MappingType.SYMMETRIC` and `MappingType.ASYMMETRIC`.
    Differs: torchao bounds the scale of int8 from below by 1.2e-7; here a scale may be as small as the numbers allow.
    """
    x = _checked(weight, bits, per, mapping, "fake_quantize")
    wide = widen(x)
    return _rounded(wide, bits, per, _ends(wide, mapping), mapping).to(x.dtype)


@torch.no_grad()
def quantization_error(
    weight: Array, *, bits: int = 8, per: Scales = "channel", mapping: Mapping = "symmetric"
) -> float:
    r"""Relative error of :func:`fake_quantize`, :math:`\lVert \hat W - W \rVert / \lVert W \rVert`; 0 for zeros.

    For entries of one distribution it is the quotient of the largest and the root mean square entry times
    :math:`1 / (\sqrt{3}\,(2^b - 1))`, to a good approximation: one large entry costs all that share its scale.

    Invariances: a factor of all entries that share a scale.
    Cost: three reads of the weight, in blocks.
    Raises: InvalidArgumentError, as :func:`fake_quantize`.

    Example:
        >>> rows = torch.tensor([[1.0, 0.5, 0.25], [16.0, 8.0, 4.0]])
        >>> [f"{gonio.geometry.quantization_error(rows, bits=4, per=per):.1%}" for per in ("tensor", "channel")]
        ['9.1%', '6.7%']
    """
    x = _checked(weight, bits, per, mapping, "quantization_error")
    x = x.reshape(1, -1) if x.ndim < 2 else x
    matrices = x.flatten(0, -3) if x.ndim > 2 else x.unsqueeze(0)
    ends = [_ends(rows, mapping) for m in matrices for _, rows in row_blocks(m)] if x.numel() else []
    least, largest = (min(float(a) for a, _ in ends), max(float(b) for _, b in ends)) if ends else (0.0, 0.0)
    lost, total, size = 0.0, 0.0, max(-least, largest)  # the square of 1e200 overflows
    for matrix in matrices if largest > least else ():
        for _, rows in row_blocks(matrix):
            exact, whole = rows.double(), (rows.new_tensor(least), rows.new_tensor(largest))
            lost += float(((_rounded(rows, bits, per, whole, mapping).double() - exact) / size).square().sum())
            total += float((exact / size).square().sum())
    return sqrt(lost / total) if total > 0 else 0.0


def _checked(weight: Array, bits: int, per: Scales, mapping: Mapping, function: str) -> Tensor:
    x = as_real(weight)
    if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 8:
        raise InvalidArgumentError(f"{function}(bits=) is a whole number from 2 to 8", repr(bits), "Pass 4 or 8.")
    if mapping not in get_args(Mapping):
        do = "Choose one of them."
        raise InvalidArgumentError(f"{function}(mapping=) is 'symmetric' or 'asymmetric'", repr(mapping), do)
    size = per if isinstance(per, int) and not isinstance(per, bool) else 0
    if per not in ("tensor", "channel") and size < 1:
        do = 'Pass "tensor", "channel" or the size of a group.'
        raise InvalidArgumentError(f"{function}(per=) says what shares a scale", repr(per), do)
    if per != "tensor" and x.ndim < 2:
        raise InvalidArgumentError(f"{function}() takes rows (…, n, d)", f"shape {tuple(x.shape)}", "Add a dimension.")
    if size and x.shape[-1] % size:
        found = f"groups of {size} in rows of {x.shape[-1]}"
        raise InvalidArgumentError(f"{function}(per=) is a size that divides the length of a row", found, "Choose one.")
    check_finite(x, function)
    return x


def _ends(x: Tensor, mapping: Mapping, dims: tuple[int, ...] | None = None) -> tuple[Tensor, Tensor]:
    """The values at the ends of the integers, of all entries or along a dimension."""
    if not x.numel():
        return x.new_zeros(()), x.new_zeros(())
    keep = dims is not None
    if mapping == "symmetric":
        largest = x.abs().amax(dims or (), keepdim=keep)
        return -largest, largest
    return x.amin(dims or (), keepdim=keep).clamp(max=0), x.amax(dims or (), keepdim=keep).clamp(min=0)


def _rounded(x: Tensor, bits: int, per: Scales, ends: tuple[Tensor, Tensor], mapping: Mapping) -> Tensor:
    """The rounded values of rows; `ends` are those of the whole tensor."""
    if per != "tensor" and x.numel():
        x = x.unflatten(-1, (-1, x.shape[-1] if per == "channel" else per))
        ends = _ends(x, mapping, (-1,))
    half = 2 ** (bits - 1)
    step = (ends[1] - ends[0]) / (2**bits - 1) if mapping == "asymmetric" else ends[1] / ((2**bits - 1) / 2)
    step = step.masked_fill(step == 0, 1)
    rounded = (x / step).round_()
    if mapping == "symmetric":
        rounded = rounded.clamp_(-half, half - 1).mul_(step)
    else:
        zero = (-half - (ends[0] / step).round()).clamp(-half, half - 1)
        rounded = rounded.add_(zero).clamp_(-half, half - 1).sub_(zero).mul_(step)
    return rounded if per == "tensor" or not x.numel() else rounded.flatten(-2)
