"""Weights that files store as several tensors: quantised ones, and low-rank adapters of a base model.

Each format has a function that recognises it by names and shapes and one that computes its values. A tensor packed
in another way keeps its row, with the reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, prod, sqrt
from typing import Any

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.geometry import Layout
from gonio.geometry.views import PLAIN
from gonio.measuring.reading.entry import Entry, Stored, dtype_named


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


# --- low-rank adapters -----------------------------------------------------------------------------------------------

_PEFT = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(embedding_)?A(?:\.([^.]+))??(?:\.weight)?")
_KOHYA = re.compile(r"(.+)\.lora_down\.weight")


@dataclass(frozen=True)
class Adapter:
    """One adapter of one weight.

    Attributes:
        path: of the adapted layer. `name`: of the adapter where a layer may have several.
        down, up: its matrices A and B.
        scale: the factor of their product; None where it is not stored.
        turned: whether the weight is stored as the transpose of B A. `layout`: of the weight.
        magnitude: the norms of the sum's filters, where only directions are adapted (DoRA).
    """

    path: str
    name: str
    down: Stored
    up: Stored
    scale: float | None
    turned: bool = False
    layout: Layout = PLAIN
    magnitude: Stored | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the product B A as the weight is stored."""
        rows, columns = self.up.shape[0], self.down.shape[1:]
        return (columns[0], rows) if self.turned else (rows, *columns)

    def fits(self) -> bool:
        down, up = self.down.shape, self.up.shape
        return len(down) >= 2 and len(up) >= 2 and up[1] == down[0] and all(n == 1 for n in up[2:])

    def delta(self) -> Tensor:
        """scale · B A, in the shape of the weight; a convolution's A has the kernel, and its B is 1×1."""
        down, up = self.down.load().float(), self.up.load().float()
        product = (up.flatten(1) @ down.flatten(1)).mul_(1.0 if self.scale is None else self.scale)
        return product.mT if self.turned else product.reshape(up.shape[0], *down.shape[1:])

    def total(self, base: Entry) -> Tensor:
        """The base's weight plus :meth:`delta`."""
        weight = base.load() if base.load is not None else None
        if not isinstance(weight, Tensor) or tuple(weight.shape) != self.shape:
            found = "nothing" if weight is None else f"the shape {tuple(weight.shape)}"
            raise ValueError(f"the adapter is made for a weight of the shape {self.shape}, the base has {found}")
        made = weight.float() + self.delta()
        return made if self.magnitude is None else with_norms(made, self.magnitude.load().float(), turned=self.turned)


def with_norms(total: Tensor, norms: Tensor, *, turned: bool) -> Tensor:
    """The weight with these norms of its filters: only directions are adapted.

    References:
        [1] S.-Y. Liu et al., "DoRA: weight-decomposed low-rank adaptation", 2024, equation (5). arXiv 2402.09353
    """
    if turned:
        raise ValueError("DoRA of a transposed weight is not supported")
    factor = norms.flatten() / torch.linalg.vector_norm(total.flatten(1), dim=1)
    return total * factor.reshape(-1, *[1] * (total.ndim - 1))


def adapters_in(stored: Mapping[str, Stored], config: Mapping[str, Any]) -> list[Adapter]:
    """The adapters among these tensors.

    Args:
        config: of the adapter (`adapter_config.json`), which holds the scale, or an empty mapping.
    """
    found = (_of_peft(name, stored, config) or _of_kohya(name, stored) for name in stored)
    return [adapter for adapter in found if adapter is not None and adapter.fits()]


def _of_peft(name: str, stored: Mapping[str, Stored], config: Mapping[str, Any]) -> Adapter | None:
    match = _PEFT.fullmatch(name)
    kind = "" if match is None else match[2] or ""
    other = name.replace(f".lora_{kind}A", f".lora_{kind}B")
    if match is None or other not in stored:
        return None
    path, adapter = match[1], match[3]
    flipped = not kind and bool(config.get("fan_in_fan_out"))
    stem = f"{name[: match.end(1)]}.lora_magnitude_vector"
    magnitudes = (stored.get(key) for key in (stem, f"{stem}.weight", f"{stem}.{adapter}.weight"))
    return Adapter(
        path,
        adapter or "",
        stored[name],
        stored[other],
        _scale(path, next(iter(stored[name].shape), 0), config),
        turned=bool(kind) or flipped,
        layout=Layout(transposed=flipped),
        magnitude=next((magnitude for magnitude in magnitudes if magnitude is not None), None),
    )


def _scale(path: str, rank: int, config: Mapping[str, Any]) -> float | None:
    """alpha / r, or alpha / √r for rank-stabilised adapters; patterns name layers with an alpha of their own."""
    alpha, patterns = config.get("lora_alpha"), config.get("alpha_pattern")
    for pattern, own in patterns.items() if isinstance(patterns, Mapping) else ():
        if f".{path}".endswith(f".{pattern}"):
            alpha = own
    if not isinstance(alpha, (int, float)) or rank < 1:
        return None
    return alpha / (sqrt(rank) if config.get("use_rslora") else rank)


def _of_kohya(name: str, stored: Mapping[str, Stored]) -> Adapter | None:
    """In the names that tools for diffusion models use, with the alpha beside the matrices."""
    match = _KOHYA.fullmatch(name)
    if match is None or f"{match[1]}.lora_up.weight" not in stored:
        return None
    down, alpha = stored[name], stored.get(f"{match[1]}.alpha")
    scale = None
    if alpha is not None and alpha.entries == 1 and down.shape and down.shape[0]:
        scale = float(alpha.load().reshape(()).float()) / down.shape[0]
    return Adapter(match[1], "", down, stored[f"{match[1]}.lora_up.weight"], scale)


def entries_of_adapters(adapters: list[Adapter], base: Mapping[str, Entry]) -> list[Entry]:
    """For each adapter its product and, if the base is given, the base's weight and the sum.

    Args:
        base: the tensors of the adapted model by path; empty if it is not given.
    """
    made: list[Entry] = []
    for adapter in adapters:
        end = f".{adapter.name}" if adapter.name else ""
        said = "without its scale, which the file does not hold"
        said = said if adapter.scale is None else f"with its scale {adapter.scale:.4g}"
        note = f"the product of the adapter's B and A, {said}"
        delta = Stored(adapter.shape, "float32", adapter.delta)
        made.append(delta.entry(f"{adapter.path}.lora_BA{end}", "low-rank product", adapter.layout, notes=(note,)))
        name, held = f"{adapter.path}.base_and_lora{end}", base.get(adapter.path)
        if held is None:
            made += [Entry(name, "", None, None, f"the base has no weight {adapter.path}")] if base else []
        elif adapter.scale is None:
            made += [held, Entry(name, held.kind, None, None, "the adapter's scale is not known")]
        else:
            made += [held, replace(held, name=name, load=partial(adapter.total, held), notes=())]
    return made
