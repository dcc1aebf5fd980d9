"""The tensors of a model: its parameters and buffers, and the weights that its layers and adapters compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gonio.errors import NotApplicableError
from gonio.geometry import Layout, layout_of
from gonio.measuring.reading.adapters import with_norms
from gonio.measuring.reading.entry import PADDING, Entry, header_of, infer
from gonio.parametrizations.mechanism import parametrization_of
from gonio.surgery import Site, sites


def entries_of_model(model: nn.Module) -> list[Entry]:
    """One entry per parameter and buffer, tied ones once, and one per weight that a layer computes."""
    seen: dict[int, str] = {}
    made: list[Entry] = []
    for site in sites(model):
        for name, tensor in _own(site.module):
            path = f"{site.path}.{name}" if site.path else name
            first = path if tensor is None else seen.setdefault(id(tensor), path)
            if first == path:
                made.append(_entry_of(site, name, path, tensor))
            else:
                reason = f"tied to {first}, where it is measured"
                made.append(Entry(path, type(site.module).__name__, None, None, reason))
        made.extend(_adapted(site.path, site.module))
    return made


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    """(name, tensor) of a module's own tensors; the tensor is None for one that is computed."""
    yield from ((name, value) for name, value in module._parameters.items() if value is not None)
    yield from ((name, value) for name, value in module._buffers.items() if value is not None)
    lists = _parametrizations(module)
    if lists is not None:
        yield from ((name, None) for name in lists)
    weight = module.__dict__.get("weight")  # where the old weight_norm and spectral_norm store it
    if isinstance(weight, Tensor) or (
        "weight" not in module._parameters and callable(getattr(type(module), "weight", None))
    ):
        yield "weight", None


def _parametrizations(module: nn.Module) -> nn.ModuleDict | None:
    """Torch's container of a module's parametrizations; None for a child of another kind that has its name."""
    lists = dict(module._modules.items()).get("parametrizations")  # a scripted module's mapping has no get
    if not isinstance(lists, nn.ModuleDict):
        return None
    return lists if all(isinstance(part, nn.utils.parametrize.ParametrizationList) for part in lists.values()) else None


def _entry_of(site: Site, name: str, path: str, tensor: Tensor | None) -> Entry:
    """The entry of a tensor; for one that cannot be inspected, an entry with the reason."""
    try:
        return _entry(site, name, path, tensor)
    except Exception as error:  # a tensor's subclass, or a property of the module, runs code of its own
        said = str(error).strip().partition("\n")[0][:300] or type(error).__name__
        return Entry(path, type(site.module).__name__, None, None, f"cannot be read: {said}")


def _entry(site: Site, name: str, path: str, tensor: Tensor | None) -> Entry:
    module = site.module
    kind = type(module).__name__
    notes = tuple(f"also {alias}.{name}" for alias in site.aliases)
    if name == "weight" and getattr(module, "padding_idx", None) is not None:
        notes = (*notes, PADDING)
    if tensor is not None and is_lazy(tensor):
        return Entry(path, kind, None, None, "a lazy layer that has seen no input yet", notes)
    if isinstance(module, nn.utils.parametrize.ParametrizationList):
        return Entry(path, kind, None, partial(_read, module, name), "a part of a parametrization", notes)
    parametrization = parametrization_of(module, name)
    if parametrization is not None:
        remarks = parametrization.remarks(partial(_read, module, name))
        notes = (*notes, f"the weight that {type(parametrization).__name__} computes", *remarks)
    elif tensor is None:
        notes = (*notes, "the weight that the layer computes")
    layout, reason = _layout(module, name, tensor)
    shape, dtype = (None, "") if tensor is None else header_of(tensor)
    return Entry(path, kind, layout, partial(_read, module, name), reason, notes, shape, dtype)


def _layout(module: nn.Module, name: str, tensor: Tensor | None) -> tuple[Layout | None, str]:
    """The layout of a module's tensor, or None and the reason."""
    with suppress(NotApplicableError):
        return layout_of(module, name), ""
    if tensor is None:
        return (Layout(), "") if name == "weight" else (None, "not known to be a stack of filters")
    if name == "weight" and tensor.ndim >= 2:
        layout, _, reason, _ = infer(name, {name: tuple(tensor.shape)})
        return layout, reason
    return None, {0: "a single number", 1: "a vector"}.get(tensor.ndim, "not known to be a stack of filters")


def _read(module: nn.Module, name: str) -> Tensor:
    with _frozen(module):
        value: Any = getattr(module, name)
        if callable(value) and not isinstance(value, Tensor):  # torch's quantised layers: weight()
            value = value()
    return value


@contextmanager
def _frozen(module: nn.Module) -> Iterator[None]:
    """Torch's parametrizations in evaluation mode: in train mode spectral_norm takes a step at each read."""
    lists = _parametrizations(module)
    parts = [m for m in lists.modules() if m.training] if lists is not None else []
    try:
        for part in parts:
            part.training = False
        yield
    finally:
        for part in parts:
            part.training = True


def _adapted(path: str, module: Any) -> Iterator[Entry]:
    """Two entries per adapter of PEFT's LoRA layers, which are recognised by their methods and names."""
    base = getattr(module, "base_layer", None)
    if not callable(getattr(module, "get_delta_weight", None)) or not isinstance(base, nn.Module):
        return
    layout, reason = _layout(base, "weight", None)
    held = [getattr(module, name, None) for name in ("lora_A", "lora_embedding_A")]
    merged = list(getattr(module, "merged_adapters", ()))
    notes = (f"merged into the base's weight: {', '.join(merged)}",) if merged else ()
    for adapter in (name for part in held if isinstance(part, (nn.ModuleDict, nn.ParameterDict)) for name in part):
        scale = getattr(module, "scaling", {}).get(adapter)
        note = "with its scale" if scale is None else f"with its scale {scale:.4g}"
        delta, total = partial(module.get_delta_weight, adapter), partial(_total, module, adapter)
        yield Entry(f"{path}.lora_BA.{adapter}", "low-rank product", layout, delta, reason, (note,))
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
    return with_norms(total, magnitudes[adapter].weight.detach(), turned=turned)
