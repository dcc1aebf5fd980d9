"""Low-rank adapters: LoRA, DoRA, PiSSA, OLoRA and AdaLoRA as peft stores them, and those in kohya's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod, sqrt

import torch
from torch import Tensor

from gonio.geometry import Layout
from gonio.measuring.reading.adapters import UNKNOWN_SCALE, Adapter, AdapterConfig, Group
from gonio.measuring.reading.entry import Entry, StoredTensor
from gonio.measuring.reading.layouts import INPUTS_FIRST

_NAMES = (("lora_A", "lora_B"), ("lora_down", "lora_up"), ("lora_embedding_A", "lora_embedding_B"))
_KNOWN = {*(name for pair in _NAMES for name in pair), "lora_B.bias", "lora_E", "lora_mid", "lora_magnitude_vector"}
_KNOWN |= {"alpha", "dora_scale", "ranknum"}
_PLAIN_STARTS = (
    True,
    False,
    None,
    "gaussian",
    "eva",
    "orthogonal",
    "mica",
)  # initialisations that leave the base as it is


def adapters_of(group: Group, config: AdapterConfig, _: Mapping[str, StoredTensor]) -> list[Adapter]:
    """The adapter of a layer's weight, and that of its bias."""
    names = next((pair for pair in _NAMES if all(name in group.parts for name in pair)), None)
    if names is None:
        return []
    down, up = (group.parts[name] for name in names)
    unknown = sorted(set(group.parts) - _KNOWN)
    fits = len(down.shape) >= 2 and len(up.shape) >= 2 and up.shape[1] == down.shape[0]
    if not (fits and all(n == 1 for n in up.shape[2:])):
        return [group.refused("lora", f"its A {down.shape} and B {up.shape} do not fit")]
    try:
        scale, reason = _scale(group, down.shape[0], config), ""
    except ValueError as error:
        scale, reason = None, str(error)
    reason = config.refusal or (f"the adapter has a part that is not read: {unknown[0]}" if unknown else reason)
    experts = _experts(group, config, down.shape[0])
    made = [_of_weight(group, config, names, 1.0 if scale is None else scale, experts)]
    said = "without its scale, which the file does not hold" if scale is None else f"with its scale {scale:.4g}"
    change, product = made[0].change, made[0].product
    reason = reason or made[0].reason or (UNKNOWN_SCALE if scale is None else "")
    keep = not (config.refusal or unknown or experts == 0)
    note = f"the product of the adapter's B and A, {said}" + (
        f"; {experts} experts: a matrix each" if experts > 1 else ""
    )
    weight = group.adapter(
        "lora", None if reason else change, tensor=made[0].tensor, reason=reason,
        product=product if keep else None, layout=made[0].layout, note=note, check=made[0].check,
    )  # fmt: skip
    bias = group.parts.get("lora_B.bias")
    if bias is None:
        return [weight, *(replace(weight, tensor=name, product=None) for name in _targets(group, config)[1:])]
    shifted = partial(_shifted, bias, 1.0 if scale is None else scale)
    return [weight, group.adapter("lora", None if reason else shifted, tensor="bias", reason=reason)]


def _scale(group: Group, rank: int, config: AdapterConfig) -> float | None:
    """alpha / r, or alpha / √r for rank-stabilised adapters; the alpha beside the matrices before the configuration's."""
    if rank < 1:
        return None
    stored = group.parts.get("alpha")
    if stored is not None and stored.entries == 1:
        return float(stored.load().reshape(()).float()) / rank
    alpha = config.pattern("alpha_pattern", _key(group, config))
    alpha = config.number("lora_alpha") if alpha is None else alpha
    if alpha is None:
        return None
    if "lora_E" in group.parts:
        first = config.number("init_r")
        first = float(rank) if first is None else first
        return (alpha if alpha > 0 else first) / (first + 1e-5)
    if _targets(group, config):
        rank = _rank(group, config) or 0
    return None if rank < 1 else alpha / (sqrt(rank) if config.get("use_rslora") else rank)


# --- stacked experts -------------------------------------------------------------------------------------------------


def _targets(group: Group, config: AdapterConfig) -> list[str]:
    """The parameters that the configuration names in this layer."""
    named = config.get("target_parameters")
    pairs = [str(name).rpartition(".") for name in named] if isinstance(named, list) else []
    return [last for path, _, last in pairs if path and f".{group.path}".endswith(f".{path}")]


def _key(group: Group, config: AdapterConfig) -> str:
    """What the patterns of the configuration are held against."""
    targets = _targets(group, config)
    return f"{group.path}.{targets[0]}" if targets else group.path


def _rank(group: Group, config: AdapterConfig) -> int | None:
    rank = config.pattern("rank_pattern", _key(group, config))
    rank = config.number("r") if rank is None else rank
    return int(rank) if rank is not None and 0 < rank <= group.parts["lora_A"].shape[0] else None


def _experts(group: Group, config: AdapterConfig, rows: int) -> int:
    """The number of stacked matrices that an adapter of a parameter changes; 1 for a layer, 0 if it is not known."""
    if "lora_A" not in group.parts or not _targets(group, config):
        return 1
    try:
        rank = _rank(group, config)
    except ValueError:
        return 0
    return rows // rank if rank and rows % rank == 0 else 0


def _of_experts(down: StoredTensor, up: StoredTensor, scale: float, experts: int) -> Tensor:
    """ΔW of each expert, (experts, outputs, inputs): A holds the experts one after the other, B in turn."""
    a, b = down.load().float(), up.load().float()
    a, b = a.reshape(experts, -1, a.shape[1]), b.reshape(b.shape[0], -1, experts)
    return torch.einsum("ore,eri->eoi", b, a).mul_(scale)


def _added_to_experts(delta: StoredTensor, experts: int, weight: Tensor, base: Entry) -> Tensor:
    values = delta.load().reshape(experts, -1, delta.shape[-1])
    straight, turned = tuple(weight.shape) == values.shape, tuple(weight.shape) == values.mT.shape
    if straight == turned:
        what = "which axis of the experts holds the outputs is not known" if straight else "the shapes do not fit"
        raise ValueError(f"{what}: {tuple(weight.shape)}")
    return weight + (values if straight else values.mT).to(weight)


# --- one matrix ------------------------------------------------------------------------------------------------------


def _of_weight(group: Group, config: AdapterConfig, names: tuple[str, str], scale: float, experts: int) -> Adapter:
    """The adapter of the weight, whatever the configuration says of its scale."""
    down, up = (group.parts[name] for name in names)
    rows, columns, mid = up.shape[0], down.shape[1:], group.parts.get("lora_mid")
    if experts != 1:
        targets = _targets(group, config)
        load = partial(_of_experts, down, up, scale, experts)
        product = StoredTensor((max(1, experts) * rows, columns[0]), "float32", lambda: load().flatten(0, 1))
        several = "which of the layer's parameters it changes is not known" if len(targets) > 1 else ""
        change = partial(_added_to_experts, product, experts)
        reason = several or ("" if experts else "the number of its experts is not known")
        return group.adapter("lora", change, tensor=targets[0], reason=reason, product=product,
                             layout=Layout(blocks=max(1, experts)))  # fmt: skip
    if mid is not None:
        if mid.shape[:2] != (up.shape[1], down.shape[0]) or prod(columns[1:]) != 1:
            return group.refused("lora", f"its lora_mid {mid.shape} does not fit")
        columns = (columns[0], *mid.shape[2:])
    embedding, flipped = names[0] == "lora_embedding_A", bool(config.get("fan_in_fan_out"))
    if embedding or (flipped and len(columns) == 1):
        shape: tuple[int, ...] = (columns[0], rows)
        delta = StoredTensor(shape, "float32", lambda: _delta(group, names, scale).mT)
        layout = Layout(transposed=not embedding)
    else:
        delta, layout = StoredTensor((rows, *columns), "float32", lambda: _delta(group, names, scale)), Layout()
    norms = group.parts.get("lora_magnitude_vector") or group.parts.get("dora_scale")
    start = config.get("init_lora_weights", True)
    plain = isinstance(start, (bool, str, type(None))) and start in _PLAIN_STARTS
    start = None if plain else str(start).lower()
    reason = "" if start in (None, "pissa", "olora") else f"its initialisation {start[:40]!r} changes the base"

    def change(weight: Tensor, base: Entry) -> Tensor:
        return _adapted(_delta(group, names, scale), norms, embedding, (start, down.shape[0], scale), weight, base)

    square = not embedding and len(columns) == 1 and rows == columns[0]
    check = _undecided if flipped and square else lambda _: ""
    return group.adapter("lora", change, reason=reason, product=delta, layout=layout, check=check)


def _delta(group: Group, names: tuple[str, str], scale: float) -> Tensor:
    """scale · B A, as (outputs, inputs, …); AdaLoRA has a diagonal between the two, a Tucker form a core.

    References: [1] Q. Zhang et al., "AdaLoRA", 2023, arXiv 2303.10512, equation (3). [2] S.-Y. Yeh et al.,
        "Navigating text-to-image customization", 2023, arXiv 2309.14859, equation (5).
    """
    down, up = (group.parts[name].load().float() for name in names)
    if "lora_E" in group.parts:
        down = down * group.parts["lora_E"].load().float().reshape(-1, 1)
    if "lora_mid" in group.parts:
        core = group.parts["lora_mid"].load().float()
        return torch.einsum("om,mr...,ri->oi...", up.flatten(1), core, down.flatten(1)).mul_(scale)
    return (up.flatten(1) @ down.flatten(1)).mul_(scale).reshape(up.shape[0], *down.shape[1:])


def _adapted(
    delta: Tensor,
    norms: StoredTensor | None,
    embedding: bool,
    start: tuple[str | None, int, float],
    weight: Tensor,
    base: Entry,
) -> Tensor:
    """The base's weight as peft changes it, and the product: with norms of its own where these are trained (DoRA)."""
    turned = embedding or (weight.ndim == delta.ndim == 2 and _is_turned(delta, base, tuple(weight.shape)))
    total = weight.mT if turned else weight
    if tuple(total.shape) != tuple(delta.shape):
        made, found = tuple(delta.mT.shape if embedding else delta.shape), tuple(weight.shape)
        raise ValueError(f"the adapter is made for a weight of the shape {made}, the base has the shape {found}")
    if start[0] is not None:
        total = total - _initial(total, *start)
    total = total + delta.to(total)
    if norms is not None:
        total = with_norms(total, norms.load().to(total))
    return total.mT if turned else total


def _is_turned(delta: Tensor, base: Entry, shape: tuple[int, ...]) -> bool:
    """Whether the base stores its inputs first. peft ignores `fan_in_fan_out` for layers that do not."""
    if delta.shape[0] != delta.shape[1]:
        return shape == tuple(delta.mT.shape)
    return base.layout is not None and base.layout.transposed


def _undecided(base: Entry) -> str:
    """Why the product of a configuration with `fan_in_fan_out` cannot be added to a square weight."""
    if not base.inferred or any(note.startswith(INPUTS_FIRST) for note in base.notes):
        return ""
    return "whether this square weight is stored with its inputs first is not known: pass the model as the base"


def _initial(weight: Tensor, start: str | None, rank: int, scale: float) -> Tensor:
    """The product that peft takes out of the base when it makes a PiSSA or OLoRA adapter.

    References: [1] F. Meng et al., "PiSSA", 2024, arXiv 2404.02948, section 3. [2] K. Büyükakyüz, "OLoRA", 2024, arXiv
        2406.01775, algorithm 1.
    """
    if weight.ndim != 2:
        raise ValueError(f"the adapter's initialisation {start!r} is known for matrices only")
    if start == "olora":
        q, r = torch.linalg.qr(weight.float())
        return scale * q[:, :rank] @ r[:rank]
    left, values, right = torch.linalg.svd(weight.float(), full_matrices=False)
    return left[:, :rank] * values[:rank] @ right[:rank]


def with_norms(total: Tensor, norms: Tensor) -> Tensor:
    """The weight with these norms of its filters, or of its inputs where the norms lie on dim 1.

    References:
        [1] S.-Y. Liu et al., "DoRA: weight-decomposed low-rank adaptation", 2024, equation (5). arXiv 2402.09353
    """
    inputs = (
        norms.ndim > 1 and norms.shape[0] == 1 and norms.shape[1] == total.shape[1] != norms.numel() // total.shape[0]
    )
    matrix = total.transpose(0, 1) if inputs else total
    if norms.numel() != len(matrix):
        raise ValueError(f"the adapter has {norms.numel()} norms for {len(matrix)} filters")
    factor = norms.flatten() / torch.linalg.vector_norm(matrix.flatten(1), dim=1)
    made = matrix * factor.reshape(-1, *[1] * (matrix.ndim - 1))
    return made.transpose(0, 1) if inputs else made


def _shifted(shift: StoredTensor, scale: float, weight: Tensor, base: Entry) -> Tensor:
    """A bias, and the bias of the adapter's B times the scale."""
    return weight + shift.load().to(weight) * scale
