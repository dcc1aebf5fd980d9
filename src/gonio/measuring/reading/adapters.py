"""Low-rank adapters in files and state dicts: what each adds to the weight that it adapts, and the sum."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from gonio.geometry import Layout
from gonio.geometry.views import PLAIN
from gonio.measuring.reading.entry import Entry, Stored

NAMED = ".lora_"  # in the names of all tensors of adapters
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


def adapters_in(names: Iterable[str], stored: Mapping[str, Stored], config: Mapping[str, Any]) -> list[Adapter]:
    """The adapters among the tensors of these names.

    Args:
        config: of the adapter (`adapter_config.json`), which holds the scale, or an empty mapping.
    """
    found = (_of_peft(name, stored, config) or _of_kohya(name, stored) for name in names)
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
