"""Adapters in files and state dicts: what low-rank ones add to the weight that they adapt, how others rotate it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt, sqrt
from typing import Any, ClassVar

import torch
from torch import Tensor

from gonio.geometry import Layout
from gonio.geometry.views import PLAIN
from gonio.measuring.reading.entry import Entry, Stored

MARKS = (".lora_", ".oft_")  # in the names of tensors of adapters
_PEFT = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(embedding_)?A(?:\.([^.]+))??(?:\.weight)?")
_PEFT_OFT = re.compile(r"(?:base_model\.model\.)?(.+)\.oft_(?:embedding_)?R(?:\.([^.]+))??(?:\.weight)?")
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
    KIND: ClassVar = "lora"

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
        weight = base.read()
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


# --- adapters that rotate a weight -----------------------------------------------------------------------------------

TERMS = 5  # of the Neumann series, where the configuration names no other number


@dataclass(frozen=True)
class Rotation:
    r"""An orthogonal adapter of one weight: block-diagonal R, :math:`W' = W R^\top`, from skew-symmetric matrices Q.

    :math:`R = (I - Q)(I + Q)^{-1}` up to sign, exactly or by a series; the series is orthogonal only approximately.

    Attributes:
        path: of the adapted layer. `name`: of the adapter where a layer may have several.
        entries: the upper triangles of the blocks, (blocks, b(b − 1)/2); one row if all blocks are equal.
        terms: of the Neumann series; 0 for the exact Cayley transform.
        radius: the largest norm of a block of Q (constrained OFT); None for no limit.
        turned: whether the weight is stored with its inputs first (`Conv1D`).

    References:
        [1] Z. Qiu et al., "Controlling text-to-image diffusion by orthogonal finetuning", 2023, arXiv 2306.07280,
        section 3. [2] Z. Qiu et al., "Orthogonal finetuning made scalable", 2025, arXiv 2506.19847 (the series).
    """

    path: str
    name: str
    entries: Stored
    terms: int
    radius: float | None = None
    turned: bool = False
    KIND: ClassVar = "oft"

    @property
    def size(self) -> int:
        """b: rows of a block."""
        return (1 + isqrt(1 + 8 * self.entries.shape[1])) // 2

    def blocks(self) -> Tensor:
        """The rotations, (blocks, b, b)."""
        packed = self.entries.load().float()
        rows, columns = torch.triu_indices(self.size, self.size, 1).unbind()
        skew = packed.new_zeros(len(packed), self.size, self.size)
        skew[:, rows, columns] = packed
        skew = skew - skew.mT
        if self.radius is not None:
            norms = torch.linalg.matrix_norm(skew, keepdim=True)
            limit = self.radius / sqrt(len(packed))
            skew = skew * (limit / norms.clamp_min(limit))
        one = torch.eye(self.size).expand_as(skew)
        return _series(skew, self.terms) if self.terms else torch.linalg.solve(one + skew, one - skew, left=False)

    def total(self, base: Entry) -> Tensor:
        """The base's weight with its inputs rotated."""
        weight = base.read()
        if not isinstance(weight, Tensor):
            raise ValueError("the base has no values here")
        stored = weight.float().mT if self.turned else weight.float()
        filters, blocks = stored.flatten(1), self.blocks()
        if filters.shape[1] % self.size or len(blocks) not in (1, filters.shape[1] // self.size):
            found = f"{len(blocks)} blocks of {self.size}, the base has filters of length {filters.shape[1]}"
            raise ValueError(f"the adapter rotates {found}")
        turned = torch.einsum(
            "nrk,rck->nrc", filters.unflatten(1, (-1, self.size)), blocks.expand(filters.shape[1] // self.size, -1, -1)
        )
        made = turned.reshape(stored.shape)
        return made.mT if self.turned else made


def _series(skew: Tensor, terms: int) -> Tensor:
    """I + 2Q + 2Q² + … + Qᵗ with t = `terms` − 1, as peft sums it: 3 terms are 4."""
    total = torch.eye(skew.shape[-1]).expand_as(skew).clone()
    if terms < 3:
        return total + 2 * skew if terms == 2 else total
    power = skew
    for _ in range(max(terms, 4) - 2):
        total += 2 * power
        power = power @ skew
    return total + power


def rotations_in(stored: Mapping[str, Stored], config: Mapping[str, Any]) -> list[Rotation]:
    """The orthogonal adapters among these tensors.

    Args:
        config: of the adapter (`adapter_config.json`), or an empty mapping: then peft's defaults hold.
    """
    made = []
    for name, tensor in stored.items():
        match = _PEFT_OFT.fullmatch(name) if ".oft_" in name else None
        if match is None or len(tensor.shape) != 2 or not _triangular(tensor.shape[1]):
            continue
        terms = config.get("num_cayley_neumann_terms", TERMS) if config.get("use_cayley_neumann", True) else 0
        radius = float(config.get("eps", 6e-5)) if config.get("coft") else None
        turned = bool(config.get("fan_in_fan_out"))
        made.append(Rotation(match[1], match[2] or "", tensor, int(terms), radius, turned))
    return made


def _triangular(count: int) -> bool:
    """Whether so many entries fill the upper triangle of a matrix."""
    root = isqrt(1 + 8 * count)
    return count > 0 and root * root == 1 + 8 * count


# --- all adapters of a file ------------------------------------------------------------------------------------------


def adapters_in(stored: Mapping[str, Stored], config: Mapping[str, Any]) -> list[Adapter | Rotation]:
    """The adapters among these tensors, low-rank ones first.

    Args:
        config: of the adapter (`adapter_config.json`), which holds the scale, or an empty mapping.
    """
    names = (name for name in stored if ".lora_" in name)
    found = (_of_peft(name, stored, config) or _of_kohya(name, stored) for name in names)
    low_rank = (adapter for adapter in found if adapter is not None and adapter.fits())
    return [*low_rank, *rotations_in(stored, config)]


def entries_of_adapters(adapters: Iterable[Adapter | Rotation], base: Mapping[str, Entry]) -> list[Entry]:
    """The product of each low-rank adapter and, if the base is given, the weight of the base and the adapted one.

    Args:
        base: the tensors of the adapted model by path; empty if it is not given.
    """
    made: list[Entry] = []
    for adapter in adapters:
        end = f".{adapter.name}" if adapter.name else ""
        if isinstance(adapter, Adapter):
            known = "without its scale, which the file does not hold"
            known = known if adapter.scale is None else f"with its scale {adapter.scale:.4g}"
            notes = (f"the product of the adapter's B and A, {known}",)
            delta = Stored(adapter.shape, "float32", adapter.delta)
            made.append(delta.entry(f"{adapter.path}.lora_BA{end}", "low-rank product", adapter.layout, notes=notes))
        name, held = f"{adapter.path}.base_and_{adapter.KIND}{end}", base.get(adapter.path)
        if held is None:
            made += [Entry(name, "", None, None, f"the base has no weight {adapter.path}")] if base else []
        elif isinstance(adapter, Adapter) and adapter.scale is None:
            made += [held, Entry(name, held.kind, None, None, "the adapter's scale is not known")]
        else:
            made += [held, replace(held, name=name, load=partial(adapter.total, held), notes=())]
    return made
