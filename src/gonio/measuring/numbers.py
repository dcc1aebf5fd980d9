"""Which tensors hold numbers that can be measured, and how to read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Numbers", "numbers_of"]

PACKED = {torch.uint8, torch.int8, torch.int32}
INTEGERS = {*PACKED, torch.int16, torch.int64, torch.uint16, torch.uint32, torch.uint64}


@dataclass(frozen=True)
class Numbers:
    """A tensor's numbers as an ordinary dense floating-point tensor, or why there are none.

    Attributes:
        skipped: whether a weight was left out that should have been measured; a counter is no loss.
    """

    tensor: Tensor | None
    reason: str = ""
    skipped: bool = True
    notes: tuple[str, ...] = ()


def numbers_of(tensor: Tensor) -> Numbers:
    """The numbers that can be measured in any kind of tensor; never raises for its kind."""
    notes: tuple[str, ...] = ()
    if hasattr(tensor, "full_tensor"):  # a DTensor: a local shard's norms are not the layer's
        tensor, notes = tensor.full_tensor(), ("gathered from all ranks",)
    if tensor.is_meta:
        return Numbers(None, "on the meta device: it has a shape and no values")
    if tensor.is_quantized or type(tensor).dequantize is not Tensor.dequantize:
        return _dequantized(tensor)
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else f"sparse ({_kind(tensor.layout)})"
        return Numbers(None, f"{kind}: filters are not stored whole")
    if not tensor.is_floating_point():
        return _no_floats(tensor)
    if not tensor.numel():
        return Numbers(None, f"empty: shape {tuple(tensor.shape)}", skipped=False)
    if tensor.element_size() == 1:  # few operations take such floats, and those of 4 bits none
        try:
            tensor.detach().flatten()[:1].float()
        except RuntimeError:
            return Numbers(None, f"packed as {_kind(tensor.dtype)}")
        notes = (*notes, "8-bit floats, read as float32")
    return Numbers(tensor.detach(), notes=notes)


def _dequantized(tensor: Tensor) -> Numbers:
    try:
        plain = tensor.dequantize()
    except (RuntimeError, NotImplementedError, TypeError) as error:
        return Numbers(None, f"quantised ({type(tensor).__name__}), and cannot be dequantised here: {error}")
    return Numbers(plain.detach(), notes=(f"dequantised from {_kind(tensor.dtype)}",))


def _no_floats(tensor: Tensor) -> Numbers:
    kind = _kind(tensor.dtype)
    if tensor.is_complex():
        return Numbers(None, "complex: angles between complex filters are not defined here")
    if tensor.dtype in PACKED and tensor.ndim >= 2:
        return Numbers(None, f"{kind}: packed or quantised weights, whose scale is not known here")
    if tensor.dtype == torch.bool or tensor.dtype in INTEGERS:
        return Numbers(None, "a counter" if tensor.ndim == 0 else f"{kind}, not weights", skipped=False)
    return Numbers(None, f"packed as {kind}")


def _kind(value: torch.dtype | torch.layout) -> str:
    return str(value).removeprefix("torch.")
