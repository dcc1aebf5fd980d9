"""The catalogue: every member of the library with one valid construction.

The law tests in `tests/laws/` loop over these lists, so a new method enters by adding one entry and
inherits every law that applies to its kind (DESIGN, "Laws").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gonio import parametrizations as P
from references import parametrizations as ref_P

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


LAYERS: list[LayerCase] = []
REGULARIZERS: list[RegularizerCase] = []
PARAMETRIZATIONS: list[ParametrizationCase] = []
INITS: list[InitCase] = []
VERBS: list[VerbCase] = []


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers that depend on `shape` and `seed` alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# --- layers ---------------------------------------------------------------------------------------

# --- regularizers ---------------------------------------------------------------------------------

# --- parametrizations -----------------------------------------------------------------------------

_CORNERS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(6, 4),
    "Conv2d": lambda: nn.Conv2d(3, 5, 3, stride=2, padding=1),
    "grouped Conv2d": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "ConvTranspose2d": lambda: nn.ConvTranspose2d(4, 6, 3, groups=2),
}


def _on_corners(
    name: str,
    make: Callable[[], Any],
    reference: Callable[[nn.Module, Tensor], Tensor],
    *,
    keeps_weight: bool = False,
) -> list[ParametrizationCase]:
    return [
        ParametrizationCase(
            name=f"{name} on {corner}", make=make, layer=layer, reference=reference, keeps_weight=keeps_weight
        )
        for corner, layer in _CORNERS.items()
    ]


PARAMETRIZATIONS += _on_corners("Sphere", lambda: P.Sphere(radius=1.5), lambda m, v: ref_P.sphere(m, v, 1.5))
PARAMETRIZATIONS += _on_corners("WeightNorm", P.WeightNorm, ref_P.weight_norm, keeps_weight=True)

# --- initialisation -------------------------------------------------------------------------------

# --- verbs ----------------------------------------------------------------------------------------
