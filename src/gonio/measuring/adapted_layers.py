"""Layers of a model that carry low-rank adapters: what each adapter adds, and the sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gonio.geometry import Layout
from gonio.measuring.entry import Entry

__all__ = ["entries_of_adapted"]


def entries_of_adapted(
    path: str, module: Any, layout_of: Callable[[nn.Module], tuple[Layout | None, str]]
) -> Iterator[Entry]:
    """Two entries per adapter of PEFT's LoRA layers, which are recognised by their methods and names.

    Args:
        layout_of: how a layer's weight is stored, and why it has no filters.
    """
    base = getattr(module, "base_layer", None)
    if not callable(getattr(module, "get_delta_weight", None)) or not isinstance(base, nn.Module):
        return
    layout, reason = layout_of(base)
    for adapter in _names(module):
        scale = getattr(module, "scaling", {}).get(adapter)
        note = "with its scale" if scale is None else f"with its scale {scale:.4g}"
        delta = partial(module.get_delta_weight, adapter)
        yield Entry(f"{path}.lora_BA.{adapter}", "low-rank product", layout, delta, reason, (note,))
        total = partial(_sum, module, adapter)
        yield Entry(f"{path}.base_and_lora.{adapter}", type(base).__name__, layout, total, reason, _merged(module))


def _names(module: Any) -> list[str]:
    held = [getattr(module, name, None) for name in ("lora_A", "lora_embedding_A")]
    return [name for part in held if isinstance(part, (nn.ModuleDict, nn.ParameterDict)) for name in part]


def _merged(module: Any) -> tuple[str, ...]:
    names = list(getattr(module, "merged_adapters", ()))
    return (f"merged into the base's weight: {', '.join(names)}",) if names else ()


def _sum(module: Any, adapter: str) -> Tensor:
    """The weight with which the layer computes if this adapter alone is active, or those merged into it."""
    weight = module.base_layer.weight.detach()
    if getattr(module, "merged_adapters", ()):
        return weight
    total = torch.add(weight, module.get_delta_weight(adapter).detach().to(weight))
    magnitudes = getattr(module, "lora_magnitude_vector", {})
    if adapter not in magnitudes:
        return total
    # only directions are adapted (S.-Y. Liu et al., "DoRA", 2024, arXiv 2402.09353, equation 5)
    if getattr(module, "fan_in_fan_out", False) or isinstance(module.base_layer, nn.Embedding):
        raise ValueError("the directions of a transposed weight alone are adapted, which is not read here")
    norms = torch.linalg.vector_norm(total.flatten(1), dim=1)
    factor = magnitudes[adapter].weight.detach().flatten() / norms
    return total * factor.reshape(-1, *[1] * (total.ndim - 1))
