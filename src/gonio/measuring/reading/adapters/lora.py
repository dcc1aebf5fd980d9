"""Low-rank adapters: LoRA, DoRA, PiSSA, OLoRA and AdaLoRA as peft stores them, and those in kohya's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import prod, sqrt

import torch
from torch import Tensor

from gonio.geometry import Layout
from gonio.measuring.reading.adapters import UNKNOWN_SCALE, Adapter, AdapterConfig, Group, Unfit
from gonio.measuring.reading.entry import StoredTensor, TensorEntry
from gonio.messages import Message, joined, say

_NAMES = (("lora_A", "lora_B"), ("lora_down", "lora_up"), ("lora_embedding_A", "lora_embedding_B"))
_KNOWN = {*(name for pair in _NAMES for name in pair), "lora_B.bias", "lora_E", "lora_mid", "lora_magnitude_vector"}
_KNOWN |= {"alpha", "dora_scale", "ranknum"}
# Initialisations that leave the base as it is.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")


def adapters_of(group: Group, config: AdapterConfig, _: Mapping[str, StoredTensor]) -> list[Adapter]:
    """The adapter of a layer's weight, and that of its bias."""
    names = next((pair for pair in _NAMES if all(name in group.parts for name in pair)), None)
    if names is None:
        lone = next((part for pair in _NAMES for part in pair if part in group.parts), None)
        if lone is None:
            return []
        return [group.refused("lora", say("its {part} has no partner in the file", part=lone), fault=True)]
    down, up = (group.parts[name].shape for name in names)
    if not (len(down) >= 2 and len(up) >= 2 and up[1] == down[0] and all(n == 1 for n in up[2:])):
        return [group.refused("lora", say("its A {down} and B {up} do not fit", down=down, up=up), fault=True)]
    unknown = sorted(set(group.parts) - _KNOWN)
    reason = config.refusal or (f"the adapter has a part that is not read: {unknown[0]}" if unknown else "")
    if reason:
        return [group.refused("lora", reason)]
    try:
        if misfit := _other_rank(group, config, names[0]):
            return [group.refused("lora", misfit, fault=True)]
        scale, experts = _scale(group, down[0], config), _experts(group, config, down[0])
    except ValueError as error:
        scale, experts, reason = None, 1, str(error)
    made = _of_weight(group, config, names, 1.0 if scale is None else scale, experts)
    if targets := _targets(group, config):
        made = replace(made, tensor=targets[0], among=tuple(targets))
    said = say("the product of the adapter's B and A, without its scale, which the file does not hold")
    if scale is not None:
        said = say("the product of the adapter's B and A, with its scale {scale:.4g}", scale=scale)
    if experts > 1:
        said = joined([said, say("{experts} experts: a matrix each", experts=experts)], "; ")
    reason = reason or made.reason or (UNKNOWN_SCALE if scale is None else "")
    weight = replace(made, reason=reason, note=said)
    if (bias := group.parts.get("lora_B.bias")) is not None:
        return [weight, group.adapter("lora", partial(_shifted, bias, scale), tensor="bias", reason=reason)]
    return [weight]


def _scale(group: Group, rank: int, config: AdapterConfig) -> float | None:
    """alpha / r, or alpha / √r for rank-stabilised adapters; an alpha in the file before the configuration's."""
    if rank < 1:
        return None
    stored = group.parts.get("alpha")
    if stored is not None and stored.entries == 1:
        return float(stored.load().reshape(()).float()) / rank
    alpha = _pattern("alpha_pattern", group, config)
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


def _pattern(key: str, group: Group, config: AdapterConfig) -> float | None:
    """What the patterns of the configuration say of the layer, or of each parameter that the adapter may change."""
    paths = [f"{group.path}.{name}" for name in _targets(group, config)] or [group.path]
    found = {config.pattern(key, path) for path in paths}
    if len(found) > 1:
        raise ValueError(f"{key} says different things of {' and '.join(paths[:2])}")
    return found.pop()


def _rank(group: Group, config: AdapterConfig) -> int | None:
    rank = _pattern("rank_pattern", group, config)
    rank = config.number("r") if rank is None else rank
    return int(rank) if rank is not None and 0 < rank <= group.parts["lora_A"].shape[0] else None


def _other_rank(group: Group, config: AdapterConfig, first: str) -> Message | None:
    """Why factors are not those of the configuration, which peft refuses; None where it does not state their rank.

    AdaLoRA lowers ranks as it trains; an alpha in the file tells that the configuration is not what made it.
    """
    if _targets(group, config) or group.parts.keys() & {"alpha", "lora_E", "lora_mid"}:
        return None
    rank = _pattern("rank_pattern", group, config)
    rank, own = config.number("r") if rank is None else rank, group.parts[first].shape[0]
    if rank is None or rank == own:
        return None
    return say("its A and B have rank {rank}, and the configuration states {stated:g}", rank=own, stated=rank)


def _experts(group: Group, config: AdapterConfig, rows: int) -> int:
    """The number of stacked matrices that an adapter of a parameter changes; 1 for a layer, 0 if it is not known."""
    if "lora_A" not in group.parts or not _targets(group, config):
        return 1
    rank = _rank(group, config)
    return rows // rank if rank and rows % rank == 0 else 0


def _of_experts(down: StoredTensor, up: StoredTensor, scale: float, experts: int) -> Tensor:
    """ΔW of each expert, (experts, outputs, inputs): A holds the experts one after the other, B in turn."""
    a, b = down.load().float(), up.load().float()
    a, b = a.reshape(experts, -1, a.shape[1]), b.reshape(b.shape[0], -1, experts)
    return torch.einsum("ore,eri->eoi", b, a).mul_(scale)


def _added_to_experts(delta: StoredTensor, experts: int, weight: Tensor, base: TensorEntry) -> Tensor:
    values = delta.load().reshape(experts, -1, delta.shape[-1])
    if weight.shape == delta.shape:  # a base whose axes are known is read as a matrix for each expert
        return weight + values.flatten(0, 1).to(weight)
    straight, turned = tuple(weight.shape) == values.shape, tuple(weight.shape) == values.mT.shape
    if not (straight or turned):
        raise _unfit(values, weight)
    if straight and turned:
        raise ValueError(f"which axis of the experts holds the outputs is not known: {tuple(weight.shape)}")
    return weight + (values if straight else values.mT).to(weight)


# --- one matrix ------------------------------------------------------------------------------------------------------


def _of_weight(group: Group, config: AdapterConfig, names: tuple[str, str], scale: float, experts: int) -> Adapter:
    """The adapter of the weight, whether or not its scale is known."""
    if experts != 1:
        return _of_stack(group, config, scale, experts)
    down, up = (group.parts[name] for name in names)
    rows, columns, mid = up.shape[0], down.shape[1:], group.parts.get("lora_mid")
    if mid is not None:
        if mid.shape[:2] != (up.shape[1], down.shape[0]) or prod(columns[1:]) != 1:
            misfit = say("its lora_mid {mid} and B {up} do not fit", mid=mid.shape, up=up.shape)
            return group.refused("lora", misfit, fault=True)
        columns = (columns[0], *mid.shape[2:])
    embedding, flipped = names[0] == "lora_embedding_A", bool(config.get("fan_in_fan_out"))
    if embedding or (flipped and len(columns) == 1):
        delta = StoredTensor((columns[0], rows), "float32", lambda: _delta(group, names, scale).mT)
    else:
        delta, flipped = StoredTensor((rows, *columns), "float32", lambda: _delta(group, names, scale)), False
    norms = group.parts.get("lora_magnitude_vector") or group.parts.get("dora_scale")
    start = config.get("init_lora_weights", True)
    start = "" if isinstance(start, (bool, str, type(None))) and start in _PLAIN_STARTS else str(start).lower()
    reason = "" if start in ("", "pissa", "olora") else f"its initialisation {start[:40]!r} changes the base"

    def change(weight: Tensor, base: TensorEntry) -> Tensor:
        initial = partial(_initial, start=start, rank=down.shape[0], scale=scale) if start else None
        return _adapted(_delta(group, names, scale), norms, embedding, initial, weight, base)

    square = flipped and not embedding and rows == columns[0]
    layout, check = Layout(transposed=flipped and not embedding), _undecided if square else lambda _: ""
    return group.adapter("lora", change, reason=reason, product=delta, layout=layout, check=check)


def _of_stack(group: Group, config: AdapterConfig, scale: float, experts: int) -> Adapter:
    """The adapter of a parameter that holds a matrix for each expert."""
    if not experts:
        return group.refused("lora", "the number of its experts is not known")
    down, up = group.parts["lora_A"], group.parts["lora_B"]
    load = partial(_of_experts, down, up, scale, experts)
    product = StoredTensor((experts * up.shape[0], down.shape[1]), "float32", lambda: load().flatten(0, 1))
    change, layout = partial(_added_to_experts, product, experts), Layout(blocks=experts)
    return group.adapter("lora", change, product=product, layout=layout)


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
    initial: Callable[[Tensor], Tensor] | None,
    weight: Tensor,
    base: TensorEntry,
) -> Tensor:
    """The base's weight as peft changes it, and the product: with norms of its own where these are trained (DoRA)."""
    turned = embedding or (weight.ndim == delta.ndim == 2 and _is_turned(delta, base, tuple(weight.shape)))
    total = weight.mT if turned else weight
    if tuple(total.shape) != tuple(delta.shape):
        raise _unfit(delta.mT if embedding else delta, weight)
    if initial is not None:
        total = total - initial(total)
    total = total + delta.to(total)
    if norms is not None:
        total = with_norms(total, norms.load().to(total))
    return total.mT if turned else total


def _unfit(made: Tensor | StoredTensor, weight: Tensor) -> Unfit:
    return Unfit(
        say(
            "the adapter is made for a weight of the shape {made}, the base has the shape {found}",
            made=tuple(made.shape),
            found=tuple(weight.shape),
        )
    )


def _is_turned(delta: Tensor, base: TensorEntry, shape: tuple[int, ...]) -> bool:
    """Whether the base stores its inputs first. peft ignores `fan_in_fan_out` for layers that do not."""
    if delta.shape[0] != delta.shape[1]:
        return shape == tuple(delta.mT.shape)
    return base.layout is not None and base.layout.transposed


def _undecided(base: TensorEntry) -> str:
    """Why the product of a configuration with `fan_in_fan_out` cannot be added to a square weight."""
    if not base.inferred or (base.layout is not None and base.layout.transposed):
        return ""
    return "whether this square weight is stored with its inputs first is not known: pass the model as the base"


def _initial(weight: Tensor, *, start: str, rank: int, scale: float) -> Tensor:
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
    row = norms.ndim > 1 and norms.shape[0] == 1
    inputs = row and norms.shape[1] == total.shape[1] != norms.numel() // total.shape[0]
    matrix = total.transpose(0, 1) if inputs else total
    if norms.numel() != len(matrix):
        raise Unfit(say("the adapter has {norms} norms for {n} filters", norms=norms.numel(), n=len(matrix)))
    factor = norms.flatten() / torch.linalg.vector_norm(matrix.flatten(1), dim=1)
    made = matrix * factor.reshape(-1, *[1] * (matrix.ndim - 1))
    return made.transpose(0, 1) if inputs else made


def _shifted(shift: StoredTensor, scale: float | None, weight: Tensor, base: TensorEntry) -> Tensor:
    """A bias, and the bias of the adapter's B times the scale."""
    if weight.shape != shift.shape:
        raise _unfit(shift, weight)
    return weight + shift.load().to(weight) * (scale or 0.0)
