"""How the normalisation layers of a model are used: on what shapes, how often, in which training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from gonio.measuring.signals import Signal
from gonio.measuring.structure import Structure
from gonio.measuring.training import Training
from gonio.nn import SwitchableNorm1d, SwitchableNorm2d, SwitchableNorm3d
from gonio.parametrizations.base import parametrization_of
from gonio.surgery import Site, sites

__all__ = ["NormUse", "Setting"]

_SWITCHABLE = (SwitchableNorm1d, SwitchableNorm2d, SwitchableNorm3d)
_NORMS = (_BatchNorm, _InstanceNorm, nn.GroupNorm, nn.LayerNorm, *_SWITCHABLE)


@dataclass(frozen=True)
class NormUse:
    """One normalisation layer.

    Attributes:
        calls: how often it runs in one forward, as far as is known; 1 if nothing is.
        positions: values per channel and sample; None if no batch was measured.
        frozen: whether it keeps its running statistics while the rest of the model trains.
        recomputed: whether activation checkpointing runs it twice.
    """

    path: str
    module: nn.Module
    calls: int
    positions: int | None
    frozen: bool
    recomputed: bool

    @property
    def averages_over_batches(self) -> bool:
        """Whether it is a batch norm that moves its statistics in training."""
        return isinstance(self.module, _BatchNorm) and not self.frozen

    @property
    def values(self) -> int | None:
        """Values that are centred together, for a layer or group norm."""
        if isinstance(self.module, nn.LayerNorm):
            return prod(self.module.normalized_shape)
        if isinstance(self.module, nn.GroupNorm) and self.positions is not None:
            return self.positions * self.module.num_channels // self.module.num_groups
        return None


@dataclass(frozen=True)
class Setting:
    """What the rules on normalisation read.

    Attributes:
        norms: every normalisation layer.
        decayed: the weights under weight decay whose scale the function does not depend on, by path.
    """

    norms: tuple[NormUse, ...]
    training: Training
    decayed: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module, structure: Structure, signals: Sequence[Signal], training: Training) -> Setting:
        everything = sites(model)
        shapes = {signal.path: signal for signal in signals}
        inside = _recomputed(everything)
        norms = [
            _use(site, shapes.get(site.path), structure, frozen=model.training, recomputed=id(site.module) in inside)
            for site in everything
            if isinstance(site.module, _NORMS)
        ]
        free = [
            f"{site.path}.{name}" if site.path else name
            for site in everything
            for name, parameter in site.module._parameters.items()
            if id(parameter) in training.decayed and _is_free(site, name, structure)
        ]
        return cls(tuple(norms), training, tuple(free))


def processes() -> int:
    """Of the default group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _use(site: Site, signal: Signal | None, structure: Structure, *, frozen: bool, recomputed: bool) -> NormUse:
    calls = max(structure.calls.get(site.path, 1), signal.calls if signal is not None else 1)
    positions = prod(signal.shape[2:]) if signal is not None else None
    return NormUse(site.path, site.module, calls, positions, frozen and not site.module.training, recomputed)


def _is_free(site: Site, name: str, structure: Structure) -> bool:
    return parametrization_of(site.module, name) is not None or (name == "weight" and site.path in structure.invariant)


def _recomputed(everything: Sequence[Site]) -> set[int]:
    """Modules inside torch's wrapper for activation checkpointing."""
    wrappers = [site.module for site in everything if "_checkpoint_wrapped_module" in site.module._modules]
    return {id(module) for wrapper in wrappers for module in wrapper.modules()}
