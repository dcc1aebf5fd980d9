"""A tensor before it is measured: the layout that its key and shape suggest, and its values, quantised or not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.geometry import Layout

PART = "part"  # the kind of a tensor that is one of several parts of a quantised weight
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
    """

    name: str
    kind: str
    layout: Layout | None
    load: Callable[[], Tensor] | None
    reason: str = ""
    notes: tuple[str, ...] = ()
    shape: tuple[int, ...] | None = None
    dtype: str = ""

    @property
    def path(self) -> str:
        """The layer's path for its weight, the full name for any other tensor."""
        return self.name.removesuffix(".weight")

    def read(self) -> Tensor | None:
        """The tensor; None for one that cannot be measured at all."""
        return None if self.load is None else self.load()


@dataclass(frozen=True)
class Stored:
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
    def of(cls, tensor: Tensor, load: Callable[[], Tensor] | None = None) -> Stored:
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


# --- layouts from keys and shapes -------------------------------------------------------------------------------------

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_RECURRENT = re.compile(r"(.*?)weight_(ih|hh)(_l\d+(?:_reverse)?)?")
_KINDS = {2: "linear or embedding", 3: "1-d convolution", 4: "2-d convolution", 5: "3-d convolution"}
_RAW = "the tensor that a parametrization computes the weight from"


def clean_names(names: Iterable[str]) -> dict[str, str]:
    """Each key without the names that wrappers add; `module.` is removed only if every key begins with it.

    Example:
        >>> from gonio.measuring.reading.entry import clean_names
        >>> clean_names(["module._orig_mod.fc.weight", "module.module.w"])
        {'module._orig_mod.fc.weight': 'fc.weight', 'module.module.w': 'module.w'}
    """
    names = list(names)
    shared = bool(names) and all(name.startswith("module.") for name in names)
    cleaned = {}
    for name in names:
        parts = (name.removeprefix("module.") if shared else name).split(".")
        cleaned[name] = ".".join(part for part in parts if part not in _WRAPPERS)
    unique = len(set(cleaned.values())) == len(cleaned)
    return cleaned if unique else {name: name for name in names}


def infer(name: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Layout | None, str, str, tuple[str, ...]]:
    """The layout that a tensor's key and shape suggest, or None; its kind; the reason for None; notes.

    A tensor of two to five dimensions called a weight is a stack of filters on dim 0: a linear layer or an
    embedding (2), a convolution (3 to 5). The shape alone does not reveal whether a convolution is grouped or
    transposed; it is read as neither, and a note says so.

    Args:
        shapes: of all tensors of the state dict; the blocks of recurrent weights follow from two of them.
    """
    shape = shapes[name]
    last = name.rsplit(".", 1)[-1]
    if len(shape) < 2:
        return None, f"{len(shape)}-d tensor", "a single number" if not shape else "a vector", ()
    if ".parametrizations." in f".{name}" and last.startswith("original"):
        return Layout(), "parametrization", "", (_RAW,)
    if ("weight" not in last and last not in ("kernel", "lora_A", "lora_B")) or len(shape) not in _KINDS:
        return None, f"{len(shape)}-d tensor", "not called a weight, so not read as filters", ()
    blocks, notes = _blocks(name, shapes)
    if len(shape) > 2:
        lone = shape[1] == 1 and shape[0] > 1
        notes = (*notes, "depthwise, or of one input channel" if lone else "groups unknown, read as 1")
    if f"{name}_parametrization._extra_state" in shapes:
        notes = (*notes, _RAW)
    return Layout(blocks=blocks), _KINDS[len(shape)], "", notes


def _blocks(name: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, tuple[str, ...]]:
    """The number of stacked matrices in packed attention and recurrent weights, and a note."""
    shape = shapes[name]
    if name.endswith("in_proj_weight") and shape[0] == 3 * shape[1]:
        return 3, ("packed attention: three matrices",)
    if found := _RECURRENT.fullmatch(name):
        hidden = shapes.get(f"{found[1]}weight_hh{found[3] or ''}", (0, 0))[-1]
        blocks = shape[0] // hidden if hidden and shape[0] % hidden == 0 else 1
        if blocks in (3, 4):
            return blocks, (f"{'LSTM' if blocks == 4 else 'GRU'}: {blocks} matrices",)
    return 1, ()


# --- weights quantised into several tensors --------------------------------------------------------------------------
#
# Each format has a function that recognises it by names and shapes and one that computes its values. A tensor packed
# in another way keeps its row, with the reason.


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
    found = (next(filter(None, (read(name, stored, quantization) for read in _READERS)), None) for name in stored)
    return [packed for packed in found if packed is not None]


def _parts(stored: Mapping[str, Stored], *names: str) -> dict[str, Stored] | None:
    return {name: stored[name] for name in names} if all(name in stored for name in names) else None


def _computed(load: Callable[..., Tensor], *arguments: Any, shape: tuple[int, ...]) -> Stored:
    return Stored(shape, "float32", partial(load, *arguments))


# --- bitsandbytes, 4 bits: two codes per byte, a table of 16 values, one scale per block, itself quantised or not ---

_STATES = ("bitsandbytes__nf4", "bitsandbytes__fp4")
_LARGEST_STATE = 1 << 16  # bytes of the description of a 4-bit weight


def _four_bits(name: str, stored: Mapping[str, Stored], _: Mapping[str, Any]) -> Packed | None:
    state = next((key for kind in _STATES if (key := f"{name}.quant_state.{kind}") in stored), None)
    parts = _parts(stored, name, f"{name}.absmax", f"{name}.quant_map")
    if state is None or parts is None or stored[state].entries > _LARGEST_STATE:
        return None
    try:  # the JSON in which bitsandbytes describes the weight
        about = json.loads(bytes(stored[state].load().to(torch.uint8).tolist()))
        shape, block = tuple(about["shape"]), about["blocksize"]
        if not (all(isinstance(v, int) and v >= 0 for v in shape) and isinstance(block, int) and block > 0):
            return None
    except (ValueError, TypeError, KeyError, RuntimeError, RecursionError, OSError):
        return None
    parts |= _parts(stored, f"{name}.nested_absmax", f"{name}.nested_quant_map") or {}
    made = _computed(_four_bit_values, {k.removeprefix(name): v for k, v in parts.items()}, about, shape=shape)
    return Packed(name, (*parts, state), made, f"dequantised from 4 bits ({state.rpartition('__')[2]})")


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
    entries, size = prod(about["shape"]), about["blocksize"]
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
    fits = name.endswith("weight") and weight.dtype == "int8" and len(weight.shape) == 2
    if not fits or scb not in stored or stored[scb].shape != weight.shape[:1]:
        return None
    made = _computed(_row_values, weight, stored[scb], shape=weight.shape)
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
    rows, columns = weight.shape
    shapes = ((rows,), (rows, 1), (ceil(rows / BLOCK), ceil(columns / BLOCK)))
    for key in (f"{name}_scale_inv", f"{name}_scale"):
        scale = stored.get(key)
        if scale is not None and (scale.entries == 1 or scale.shape in shapes):
            made = _computed(_scaled_values, weight, scale, shape=weight.shape)
            return Packed(name, (name, key), made, f"dequantised from {weight.dtype} and its scale")
    return None


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
        bits = about.get("bits") if groups is None else _bits(32 * codes[0], groups.entries)
        inputs, read = (0 if not bits else 32 * codes[0] // bits), _gptq_values
        said = "GPTQ" if "checkpoint_format" in about else "GPTQ, its zero points stored less one"
        parts |= {} if groups is None else {f"{path}g_idx": groups}
    else:
        bits, inputs, read, said = _bits(32 * codes[1], scales[1]), codes[0], _awq_values, "AWQ"
    if bits not in (2, 4, 8) or not scales[0] or (bits != 4 and read is _awq_values):
        return None
    named = {key.removeprefix(path): part for key, part in parts.items()}
    made = _computed(read, named, bits, about, shape=(scales[1], inputs))
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
    packed = (_unpacked(parts[name].load(), bits).unflatten(-1, (-1, 8)) for name in ("qweight", "qzeros"))
    codes, zeros = (numbers[..., list(_AWQ_ORDER)].flatten(-2).float() for numbers in packed)
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
    made = _computed(_mxfp4_values, codes, scales, shape, shape=shape)
    return Packed(path, (name, f"{path}_scales"), made, "dequantised from 4 bits (MXFP4)", prod(matrices))


def _mxfp4_values(codes: Stored, scales: Stored, shape: tuple[int, int]) -> Tensor:
    """Sign, 2 bits of exponent and 1 of mantissa, times 2^(scale − 127); the low half of each byte first.

    References:
        [1] Open Compute Project, "OCP microscaling formats (MX) specification", version 1.0, 2023, §5.3 and §6.3.
    """
    table = torch.tensor([*_FP4, *(-value for value in _FP4)])
    powers = scales.load().to(torch.int32) - 127
    return torch.ldexp(table[_halves(codes.load(), high_first=False)], powers.unsqueeze(-1)).reshape(shape)


Reader = Callable[[str, Mapping[str, Stored], Mapping[str, Any]], Packed | None]
_READERS: tuple[Reader, ...] = (_four_bits, _by_row, _scaled, _grouped, _microscaled)
