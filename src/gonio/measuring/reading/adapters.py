"""Low-rank adapters, in files and in models: what each adds to the weight that it adapts, and the sum."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from gonio.geometry import Layout
from gonio.geometry.views import PLAIN
from gonio.measuring.reading.entry import Entry, Stored

_PEFT = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(embedding_)?A(?:\.([^.]+))??(?:\.weight)?")
_KOHYA = re.compile(r"(.+)\.lora_down\.weight")


@dataclass(frozen=True)
class Adapter:
    """One adapter of one weight, in a file or state dict.

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
        return made if self.magnitude is None else _with_norms(made, self.magnitude.load().float(), turned=self.turned)


def _with_norms(total: Tensor, norms: Tensor, *, turned: bool) -> Tensor:
    """The weight with these norms of its filters: only directions are adapted.

    References:
        [1] S.-Y. Liu et al., "DoRA: weight-decomposed low-rank adaptation", 2024, equation (5). arXiv 2402.09353
    """
    if turned:
        raise ValueError("DoRA of a transposed weight is not supported")
    factor = norms.flatten() / torch.linalg.vector_norm(total.flatten(1), dim=1)
    return total * factor.reshape(-1, *[1] * (total.ndim - 1))


# --- in files and state dicts ----------------------------------------------------------------------------------------


def adapters_in(stored: Mapping[str, Stored], config: Mapping[str, Any]) -> list[Adapter]:
    """The adapters among these tensors.

    Args:
        config: of the adapter (`adapter_config.json`), which holds the scale, or an empty mapping.
    """
    made = []
    for name in stored:
        adapter = _of_peft(name, stored, config) or _of_kohya(name, stored)
        if adapter is not None and _fits(adapter):
            made.append(adapter)
    return made


def _fits(adapter: Adapter) -> bool:
    down, up = adapter.down.shape, adapter.up.shape
    return len(down) >= 2 and len(up) >= 2 and up[1] == down[0] and all(n == 1 for n in up[2:])


def _of_peft(name: str, stored: Mapping[str, Stored], config: Mapping[str, Any]) -> Adapter | None:
    match = _PEFT.fullmatch(name)
    if match is None:
        return None
    path, kind, adapter = match[1], match[2] or "", match[3]
    other = name.replace(f".lora_{kind}A", f".lora_{kind}B")
    if other not in stored:
        return None
    flipped = not kind and bool(config.get("fan_in_fan_out"))
    stem = f"{name[: match.end(1)]}.lora_magnitude_vector"
    magnitudes = [key for key in (stem, f"{stem}.weight", f"{stem}.{adapter}.weight") if key in stored]
    return Adapter(
        path,
        adapter or "",
        stored[name],
        stored[other],
        _scale(path, next(iter(stored[name].shape), 0), config),
        turned=bool(kind) or flipped,
        layout=Layout(transposed=flipped),
        magnitude=stored[magnitudes[0]] if magnitudes else None,
    )


def _scale(path: str, rank: int, config: Mapping[str, Any]) -> float | None:
    """alpha / r, or alpha / √r for rank-stabilised adapters; patterns name layers with an alpha of their own."""
    alpha = config.get("lora_alpha")
    patterns = config.get("alpha_pattern")
    for pattern, own in patterns.items() if isinstance(patterns, Mapping) else ():
        if path == pattern or path.endswith(f".{pattern}"):
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
        scaled = adapter.scale is not None
        note = f"with its scale {adapter.scale:.4g}" if scaled else "without its scale, which the file does not hold"
        delta = Entry(
            f"{adapter.path}.lora_BA{end}",
            "low-rank product",
            adapter.layout,
            adapter.delta,
            notes=(f"the product of the adapter's B and A, {note}",),
            shape=adapter.shape,
            dtype="float32",
        )
        made += [delta, *_with_base(adapter, base, end)] if base else [delta]
    return made


def _with_base(adapter: Adapter, base: Mapping[str, Entry], end: str) -> list[Entry]:
    name = f"{adapter.path}.base_and_lora{end}"
    held = base.get(adapter.path)
    if held is None:
        return [Entry(name, "", None, None, f"the base has no weight {adapter.path}")]
    if adapter.scale is None:
        return [held, Entry(name, held.kind, None, None, "the adapter's scale is not known")]
    return [held, replace(held, name=name, load=partial(adapter.total, held), notes=())]


# --- in models -------------------------------------------------------------------------------------------------------


def entries_of_adapted(
    path: str, module: Any, layout_of: Callable[[nn.Module], tuple[Layout | None, str]]
) -> Iterator[Entry]:
    """Two entries per adapter of PEFT's LoRA layers, which are recognised by their methods and names.

    Args:
        layout_of: returns a layer's layout, or None and the reason.
    """
    base = getattr(module, "base_layer", None)
    if not callable(getattr(module, "get_delta_weight", None)) or not isinstance(base, nn.Module):
        return
    layout, reason = layout_of(base)
    held = [getattr(module, name, None) for name in ("lora_A", "lora_embedding_A")]
    names = [name for part in held if isinstance(part, (nn.ModuleDict, nn.ParameterDict)) for name in part]
    merged = list(getattr(module, "merged_adapters", ()))
    notes = (f"merged into the base's weight: {', '.join(merged)}",) if merged else ()
    for adapter in names:
        scale = getattr(module, "scaling", {}).get(adapter)
        note = "with its scale" if scale is None else f"with its scale {scale:.4g}"
        delta = partial(module.get_delta_weight, adapter)
        yield Entry(f"{path}.lora_BA.{adapter}", "low-rank product", layout, delta, reason, (note,))
        total = partial(_total, module, adapter)
        yield Entry(f"{path}.base_and_lora.{adapter}", type(base).__name__, layout, total, reason, notes)


def _total(module: Any, adapter: str) -> Tensor:
    """The layer's weight with only this adapter active, or with the merged ones."""
    weight: Tensor = module.base_layer.weight.detach()
    if getattr(module, "merged_adapters", ()):
        return weight
    total = torch.add(weight, module.get_delta_weight(adapter).detach().to(weight))
    magnitudes = getattr(module, "lora_magnitude_vector", {})
    if adapter not in magnitudes:
        return total
    turned = getattr(module, "fan_in_fan_out", False) or isinstance(module.base_layer, nn.Embedding)
    return _with_norms(total, magnitudes[adapter].weight.detach(), turned=turned)
