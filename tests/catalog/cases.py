"""What a case of the catalogue states, for each kind of member of the library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

# A changed copy of a layer and of its input; must not change the ones that it is given.
LayerChange = Callable[[nn.Module, Tensor], tuple[nn.Module, Tensor]]
TensorChange = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class LayerCase:
    """A layer of `gonio.nn`."""

    name: str
    make: Callable[[], nn.Module]  # float32, CPU, training mode
    shape: tuple[int, ...]  # of one valid input, batch first
    reference: Callable[[nn.Module, Tensor], Tensor]  # float64 oracle; reads the float64 layer's parameters
    invariances: Mapping[str, LayerChange] = field(default_factory=dict)  # by name; the output must be equal
    sensitivities: Mapping[str, LayerChange] = field(default_factory=dict)  # by name; the output must differ
    channels_last: bool = False  # 4-D input whose memory format must survive
    couples_batch: bool = False  # training output of one sample depends on the others
    halves: bool = True  # documented for bfloat16 and float16 parameters and inputs


@dataclass(frozen=True, kw_only=True)
class RegularizerCase:
    """A member of `gonio.regularizers`."""

    name: str
    make: Callable[[], Any]  # the regularizer, strength 1
    shape: tuple[int, ...]  # of a weight, or of layer outputs
    reference: Callable[[Tensor], Tensor]  # float64 value at strength 1
    reads: str = "weight"  # or "outputs"
    invariances: Mapping[str, TensorChange] = field(default_factory=dict)
    sensitivities: Mapping[str, TensorChange] = field(default_factory=dict)
    zero_at: Callable[[], Tensor] | None = None  # a float64 input at which the value is 0
    smooth: bool = True  # gradcheck applies at a random point
    halves: bool = True  # documented for bfloat16 and float16 inputs
    long_to_compile: bool = False  # unrolls many steps: its compilation is a slow test


@dataclass(frozen=True, kw_only=True)
class ParametrizationCase:
    """A member of `gonio.parametrizations`."""

    name: str
    make: Callable[[], Any]
    layer: Callable[[], nn.Module]  # the layer whose `weight` it is put on
    reference: Callable[[nn.Module, Tensor], Tensor]  # (layer, raw float64 weight) -> effective weight
    keeps_weight: bool = False  # binding to any weight leaves the effective weight as it was


@dataclass(frozen=True, kw_only=True)
class InitCase:
    """A member of `gonio.init`: `function(weight, layout=…, generator=…)`."""

    name: str
    function: Callable[..., Tensor]
    shape: tuple[int, ...]
    # asserts the property on a float64 copy; the dtype is the one that was initialised, for `tolerances`
    check: Callable[[Tensor, torch.dtype], None]
    options: Mapping[str, Any] = field(default_factory=dict)  # further keywords of `function`
    random: bool = True  # another generator gives another tensor


@dataclass(frozen=True, kw_only=True)
class VerbCase:
    """A verb of `gonio` applied to a model."""

    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    apply: Callable[[nn.Module], Any]  # returns an Edited
    keeps_function: bool = False
    idempotent: bool = False  # a second application is allowed and changes nothing new


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers that depend on `shape` and `seed` alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
