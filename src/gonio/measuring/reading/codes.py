"""Numbers of a few bits: how codes are unpacked from bytes, and the floats of 4 and 6 bits that they may stand for."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """The codes in the bytes of the last dimension, one after the other, the lowest bits first; as bytes.

    Wider integers are their bytes, the lowest first. A code may lie in two bytes; then there are as many codes as the
    last eight of them need, and those that were not stored are 0.

    Example:
        >>> from gonio.measuring.reading.codes import unpacked
        >>> unpacked(torch.tensor([0x4321], dtype=torch.int32), 4).tolist()
        [1, 2, 3, 4, 0, 0, 0, 0]
        >>> unpacked(torch.tensor([0b10_001_000, 0b0_100_011_0], dtype=torch.uint8), 3).tolist()
        [0, 1, 2, 3, 4, 0, 0, 0]
    """
    raw = packed.contiguous().view(torch.uint8)
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device="cpu")
        return (raw.unsqueeze(-1) >> shifts & (2**bits - 1)).flatten(-2)
    filled = nn.functional.pad(raw, (0, -raw.shape[-1] % bits)).unflatten(-1, (-1, bits)).long()
    words = (filled << (8 * torch.arange(bits, device="cpu"))).sum(-1)  # eight codes, in so many bytes as one has bits
    return torch.stack([(words >> bits * n & (2**bits - 1)).to(torch.uint8) for n in range(8)], -1).flatten(-2)


def fp4_values(codes: Tensor) -> Tensor:
    """The numbers that codes of 4 bits stand for: a sign, 2 bits of exponent and 1 of mantissa."""
    return torch.tensor([*_FP4, *(-value for value in _FP4)], device="cpu")[codes.int()]


def fp6_values(codes: Tensor, exponent: int) -> Tensor:
    """The numbers that codes of 6 bits stand for: a sign, 2 or 3 bits of exponent, and the others of mantissa.

    References:
        [1] Open Compute Project, "OCP microscaling formats (MX) specification", version 1.0, 2023, §5.3.2.
    """
    mantissa = 5 - exponent
    bias, steps = 2 ** (exponent - 1) - 1, torch.arange(32, device="cpu")
    powers, rest = (steps >> mantissa), (steps & (2**mantissa - 1)) / 2**mantissa
    table = torch.where(
        powers > 0, torch.ldexp(1 + rest, powers - bias), torch.ldexp(rest, torch.tensor(1 - bias, device="cpu"))
    )
    return torch.cat((table, -table))[codes.int()]
