"""A tensor before it is measured: its name, how it is stored, and a function that reads its values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import torch
from torch import Tensor

from gonio.geometry import Layout

PADDING = "one row is padding and stays 0"  # the note on an embedding with padding_idx


@dataclass(frozen=True)
class Entry:
    """A tensor to measure.

    Attributes:
        name: its key in the state dict, without the names that wrappers add.
        kind: the layer's class, or what the shape suggests.
        layout: how it is stored; None for a tensor without filters.
        load: reads the tensor; called once. The tensor is released before the next one is read.
        reason: why it has no filters, or why it cannot be measured at all.
        notes: remarks for the reader, for example that the layout was inferred from the shape.
        shape, dtype: as far as they are known without reading the tensor; None and "" for a computed weight.
        role: "part" of a weight that is computed from several tensors, or of an "adapter": neither is a weight of the
            plain model. "unknown" for a weight whose values are not known: `load` gives NaN, `reason` says why.
        weight_name: of a computed weight, its name in the plain model, if `name` is another one.
        inferred: whether the layout follows from name and shape alone, so that the values are held against it.
    """

    name: str
    kind: str
    layout: Layout | None
    load: Callable[[], Tensor] | None
    reason: str = ""
    notes: tuple[str, ...] = ()
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    role: Literal["", "part", "adapter", "unknown"] = ""
    weight_name: str = ""
    inferred: bool = False

    @property
    def path(self) -> str:
        """The layer's path for its weight, the full name for any other tensor."""
        return self.name.removesuffix(".weight")

    def read(self) -> Tensor | None:
        """The tensor; None for one that cannot be measured at all."""
        return None if self.load is None else self.load()

    def unknown(self, reason: str) -> Entry:
        """The same tensor with values that are not known."""
        shape = self.shape or ()
        return replace(self, load=lambda: torch.full(shape, torch.nan), reason=reason, role="unknown", notes=())


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file or state dict: its header, and a function that reads its values.

    Attributes:
        dtype: torch's name for it, without `torch.`; the file's own name for one that torch does not have.
    """

    shape: tuple[int, ...]
    dtype: str
    load: Callable[[], Tensor]

    @property
    def entries(self) -> int:
        return prod(self.shape)

    @classmethod
    def of(cls, tensor: Tensor, load: Callable[[], Tensor] | None = None) -> StoredTensor:
        """A tensor in memory, or one that `load` reads again."""
        return cls(*header_of(tensor), load or (lambda: tensor))

    def entry(
        self, name: str, kind: str, layout: Layout | None, reason: str = "", notes: tuple[str, ...] = ()
    ) -> Entry:
        return Entry(name, kind, layout, self.load, reason, notes, self.shape, self.dtype)


def dtype_named(name: str) -> torch.dtype | None:
    """The dtype of this name; None if torch has none."""
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None


def header_of(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    """Shape and dtype; `((), "")` for a tensor subclass that raises when they are read."""
    try:
        return tuple(int(n) for n in tensor.shape), _named(tensor.dtype)
    except Exception:  # subclasses run code of their own here
        return (), ""


def stored_entries(tensor: Tensor) -> int:
    """The entries in a strided tensor's storage; fewer than `numel()` for an expanded one."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


LARGEST_EXPANDED = 1 << 24  # entries up to which a tensor of a model may repeat those that it stores
PACKED = {torch.uint8, torch.int8, torch.int32}
INTEGERS = {*PACKED, torch.int16, torch.int64, torch.uint16, torch.uint32, torch.uint64}


@dataclass(frozen=True)
class Numbers:
    """A tensor's values as an ordinary dense floating-point tensor, or the reason why there are none.

    Attributes:
        skipped: whether the tensor is a weight that should have been measured; False for a counter, for example.
    """

    tensor: Tensor | None
    reason: str = ""
    skipped: bool = True
    notes: tuple[str, ...] = ()


def numbers_of(tensor: Tensor) -> Numbers:
    """The measurable values of any kind of tensor; never raises because of the kind."""
    notes: tuple[str, ...] = ()
    if hasattr(tensor, "full_tensor"):  # a DTensor: a local shard's norms are not the layer's
        tensor, notes = tensor.full_tensor(), ("gathered from all ranks",)
    if tensor.is_meta:
        return Numbers(None, "on the meta device: it has a shape and no values")
    if tensor.is_quantized or type(tensor).dequantize is not Tensor.dequantize:
        return _dequantized(tensor)
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else f"sparse ({_named(tensor.layout)})"
        return Numbers(None, f"{kind}: filters are not stored whole")
    if not tensor.is_floating_point():
        return _no_floats(tensor)
    if tensor.numel() > LARGEST_EXPANDED and stored_entries(tensor) < tensor.numel():
        return Numbers(None, f"expanded: {tensor.numel():,} entries, of which {stored_entries(tensor):,} are stored")
    if not tensor.numel():
        return Numbers(None, f"empty: shape {tuple(tensor.shape)}", skipped=False)
    if tensor.element_size() == 1:  # torch has few operations for such floats, and none for those of 4 bits
        try:
            tensor.detach().flatten()[:1].float()
        except RuntimeError:
            return Numbers(None, f"packed as {_named(tensor.dtype)}")
        notes = (*notes, "8-bit floats, read as float32")
    return Numbers(tensor.detach(), notes=notes)


def _dequantized(tensor: Tensor) -> Numbers:
    try:
        plain = tensor.dequantize()
    except (RuntimeError, NotImplementedError, TypeError) as error:
        return Numbers(None, f"quantised ({type(tensor).__name__}), and cannot be dequantised here: {error}")
    return Numbers(plain.detach(), notes=(f"dequantised from {_named(tensor.dtype)}",))


def _no_floats(tensor: Tensor) -> Numbers:
    kind = _named(tensor.dtype)
    if tensor.is_complex():
        return Numbers(None, "complex: angles between complex filters are not defined here")
    if tensor.dtype in PACKED and tensor.ndim >= 2:
        return Numbers(None, f"{kind}: packed or quantised weights, whose scale is not known here")
    if tensor.dtype == torch.bool or tensor.dtype in INTEGERS:
        return Numbers(None, "a counter" if tensor.ndim == 0 else f"{kind}, not weights", skipped=False)
    return Numbers(None, f"packed as {kind}")


def _named(value: torch.dtype | torch.layout) -> str:
    return str(value).removeprefix("torch.")
