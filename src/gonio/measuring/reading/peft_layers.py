"""Adapters of peft in a model in memory, recognised by their types: the weight in use is the one that peft merges."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gonio.errors import first_line
from gonio.execution import loaded
from gonio.geometry import Layout
from gonio.measuring.reading.entry import LOW_RANK, TensorEntry
from gonio.measuring.reading.experts import Stack
from gonio.surgery import Site

_INSIDE = {"base_layer", "token_adapter"}  # the names under which peft's layers hold the layer that they adapt


class AdaptedLayers:
    """The adapted layers of one model.

    Attributes:
        layers: by path, the modules of peft that adapt a layer. `saved`: those that replace one by a trained copy.
    """

    def __init__(self, everything: list[Site]) -> None:
        layer = loaded("peft.tuners.tuners_utils:BaseTunerLayer")
        wrapper = loaded("peft.utils.other:ModulesToSaveWrapper")
        self.layers = {site.path: site.module for site in everything if isinstance(site.module, layer)}
        self.saved = {site.path: site.module for site in everything if isinstance(site.module, wrapper)}

    def role_of(self, name: str) -> tuple[bool, str]:
        """Whether a tensor is a part of an adapter or replaced by one; and its name in the plain model."""
        parts = name.split(".")
        kept: list[str] = []
        hidden = False
        for i, part in enumerate(parts):
            above = ".".join(parts[:i])
            if above in self.layers or (part in _INSIDE and f"{above}.{part}" in self.layers):
                layer: Any = self.layers.get(above)
                if layer is not None and part not in _INSIDE:
                    return True, name
                rest = [inner for inner in parts[i:] if inner not in _INSIDE]
                hidden |= layer is not None and len(rest) == 1 and rest[0] in dict(_changed(layer))
            elif above in self.saved:
                used = self._used(self.saved[above])
                if parts[i : i + len(used)] != used:
                    return True, name
                return hidden, ".".join([*kept, *parts[i + len(used) :]])
            else:
                kept.append(part)
        return hidden, ".".join(kept)

    def _used(self, wrapper: Any) -> list[str]:
        """The place of the module that a wrapper runs."""
        active = list(wrapper.active_adapters)
        return ["original_module"] if wrapper.disable_adapters or not active else ["modules_to_save", active[0]]


def _active(layer: Any) -> list[str]:
    """The adapters in use, merged ones first; none where they are disabled."""
    merged = list(getattr(layer, "merged_adapters", ()))
    if merged or layer.disable_adapters:
        return merged
    known = layer._get_available_adapters() if hasattr(layer, "_get_available_adapters") else set()
    return [name for name in layer.active_adapters if name in known]


def _changed(layer: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the adapted layer that its active adapters may change."""
    base = layer.get_base_layer()
    if not _active(layer) or getattr(layer, "merged_adapters", False):
        return
    own = getattr(layer, "parameter_name", None)  # of an adapter of one parameter of a module
    for name, value in base.named_parameters(recurse=False):
        if own is not None and name != own:
            continue
        biases = getattr(layer, "lora_bias", None)  # of LoRA only those with a bias of their own may change one
        if value.ndim > 1 or biases is None or any(biases.values()):
            yield name, value


def adapted_entries(
    path: str, layer: Any, plain: str, layout: Layout | None, reason: str, stacks: Mapping[str, Stack]
) -> Iterator[TensorEntry]:
    """The value in use of each tensor that the layer's adapters change, and the product of each low-rank adapter.

    Args:
        plain: the path of the layer in the model without adapters.
        layout, reason: of the adapted layer's weight.
        stacks: by name, its tensors that are stacks of matrices, and are read as such without adapters too.
    """
    kind = type(layer).__module__.removeprefix("peft.tuners.").partition(".")[0]
    for adapter in _products(layer):
        yield _product(path, layer, adapter, layout, reason)
    active = _active(layer)
    if not active:
        return
    said = f"{path}.base_and_{kind}.{'+'.join(active)}"
    if getattr(layer, "merged_adapters", ()):
        parameter = getattr(layer, "parameter_name", "weight")
        merged = TensorEntry(said, type(layer.get_base_layer()).__name__, layout,
                    lambda: getattr(layer.get_base_layer(), parameter).detach(), reason,
                    (f"merged into the base's weight: {', '.join(active)}",), role="adapter")  # fmt: skip
        yield stacks[parameter].entry(merged) if parameter in stacks else merged
        return
    for name, _ in _changed(layer):
        main = name in ("weight", getattr(layer, "parameter_name", ""))
        stacked = reason or "not known to be a stack of filters"
        changed = TensorEntry(
            said if main else f"{path}.{name}.base_and_{kind}.{'+'.join(active)}",
            type(layer.get_base_layer()).__name__,
            layout if name == "weight" else None,
            partial(_in_use, layer, name, kind),
            "" if name == "weight" and layout is not None else stacked,
            (),
            weight_name=f"{plain}.{name}" if plain else name,
        )
        yield stacks[name].entry(changed) if name in stacks else changed


def _products(layer: Any) -> list[str]:
    """The low-rank adapters of a layer, whose product peft computes."""
    if not isinstance(layer, loaded("peft.tuners.lora.layer:LoraLayer")) or not hasattr(layer, "get_delta_weight"):
        return []
    held = [getattr(layer, name, None) for name in ("lora_A", "lora_embedding_A")]
    return [name for part in held if isinstance(part, (nn.ModuleDict, nn.ParameterDict)) for name in part]


def _product(path: str, layer: Any, adapter: str, layout: Layout | None, reason: str) -> TensorEntry:
    scale = getattr(layer, "scaling", {}).get(adapter)
    notes: tuple[str, ...] = ("with its scale",) if scale is None else (f"with its scale {scale:.4g}",)
    experts = getattr(layer, "num_experts", 1)
    if experts > 1:
        turned = bool(getattr(layer.get_base_layer(), "is_transposed", False))
        layout, reason = Layout(blocks=experts), ""
        notes = (*notes, f"{experts} experts: a matrix each")

    def load() -> Tensor:
        delta: Tensor = layer.get_delta_weight(adapter).detach()
        return (delta.mT if turned else delta).flatten(0, 1) if experts > 1 else delta

    return TensorEntry(f"{path}.lora_BA.{adapter}", LOW_RANK, layout, load, reason, notes, role="adapter")


@torch.no_grad()
def _in_use(layer: Any, name: str, kind: str) -> Tensor:
    """The tensor that a copy of the layer has once peft has merged its active adapters into it."""
    try:
        made = copy.deepcopy(layer)
        made.merge()
        merged: Tensor = getattr(made.get_base_layer(), name)
    except Exception as error:  # any tuner's own code
        said = first_line(error)
        raise ValueError(f"changed by an adapter of type {kind}, which peft does not merge here: {said}") from error
    if not made.merged:
        raise ValueError(f"changed by an adapter of type {kind}, which peft does not merge")
    return merged.detach()
