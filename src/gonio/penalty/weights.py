"""References to the weights of layers: where each is, how it is stored, and from which parameters it is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gonio.editing.memory import memory_key
from gonio.editing.where import Site
from gonio.errors import NotApplicableError
from gonio.geometry.views import Layout, layout_of
from gonio.parametrizations.checkpoints import weight_by_hook, weights_of_hooks
from gonio.parametrizations.mechanism import child_name, parametrizations_of_torch, without_steps

_HELD = ("_g", "_v", "_orig")  # endings of the parameters in the place of a weight that a hook of torch computes


@dataclass(frozen=True, eq=False)
class WeightRef:
    """One weight tensor of one layer."""

    path: str
    module: nn.Module
    name: str
    layout: Layout

    @property
    def label(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name

    def tensor(self) -> Tensor:
        """The effective weight, as the next forward uses it."""
        computed = weight_by_hook(self.module, self.name)
        if computed is None and self.name in parametrizations_of_torch(self.module):
            with without_steps(self.module):
                return getattr(self.module, self.name)
        weight: Tensor = getattr(self.module, self.name) if computed is None else computed
        return weight

    def parameters(self) -> list[nn.Parameter]:
        """The parameters from which the effective weight is computed."""
        own = self.module._parameters.get(self.name)
        if own is not None:
            extra = self.module._modules.get(child_name(self.name))
            return [own, *(extra.parameters() if extra is not None else ())]
        if (computed := parametrizations_of_torch(self.module).get(self.name)) is not None:
            return list(computed.parameters())
        held = (self.module._parameters.get(f"{self.name}{ending}") for ending in _HELD)
        return [parameter for parameter in held if parameter is not None]

    def stored(self) -> nn.Parameter | None:
        """The parameter that is itself the effective weight; None where that is computed from parameters."""
        own = self.module._parameters.get(self.name)
        return None if own is None or child_name(self.name) in self.module._modules else own

    @property
    def key(self) -> tuple[object, ...]:
        """What two references to the same numbers have in common."""
        return tuple(map(memory_key, self.parameters()))

    @property
    def frozen(self) -> bool:
        """Whether it is computed from frozen Parameters alone; what a functional call puts in their place is not."""
        own = self.module._parameters.get(self.name)
        if own is not None and own.requires_grad:
            return False
        return not any(p.requires_grad or not isinstance(p, nn.Parameter) for p in self.parameters())


def weights_of(site: Site) -> Iterator[WeightRef]:
    """The weights with filters of one layer."""
    for name, layout in layouts_of(site.module).items():
        yield WeightRef(site.path, site.module, name, layout)


def layouts_of(module: nn.Module) -> dict[str, Layout]:
    """The layouts of the tensors of a module that have filters, by name; none of a scripted one, which has no types."""
    found = dict[str, Layout]()
    if isinstance(module, torch.jit.ScriptModule):
        return found
    computed = dict.fromkeys([*parametrizations_of_torch(module), *weights_of_hooks(module)])
    for name in dict.fromkeys(["weight", *module._parameters, *computed]):
        try:
            layout = layout_of(module, name)
        except NotApplicableError:
            continue
        tensor = None if name in computed else getattr(module, name, None)
        if name in computed or (isinstance(tensor, Tensor) and not is_lazy(tensor)):
            found[name] = layout
    return found
