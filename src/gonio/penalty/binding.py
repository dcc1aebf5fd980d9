"""Which tensors of which layers a rule reads, and which it leaves alone and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gonio.errors import InvalidArgumentError, NoMatchError, NotApplicableError
from gonio.geometry.views import Layout, layout_of
from gonio.penalty.surroundings import HOMOGENEOUS, Surroundings
from gonio.regularizers import OutputRegularizer, Regularizer, ScaleShift, WeightRegularizer
from gonio.surgery.where import Site, Where, as_selector, select

__all__ = ["TABLES", "Binding", "Slot", "bind", "slots_of", "unwrapped"]

TABLES = (nn.Embedding, nn.EmbeddingBag)
_WITH_OUTPUTS = (nn.Linear, nn.modules.conv._ConvNd)


@dataclass(frozen=True, eq=False)
class Slot:
    """One weight tensor of one layer."""

    path: str
    module: nn.Module
    name: str
    layout: Layout

    @property
    def label(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name

    def tensor(self) -> Tensor:
        """The effective weight, as the layer uses it now."""
        weight: Tensor = getattr(self.module, self.name)
        return weight

    def parameters(self) -> list[nn.Parameter]:
        """What the effective weight is made from."""
        own = self.module._parameters.get(self.name)
        if own is not None:
            extra = self.module._modules.get(f"{self.name}_parametrization")
            return [own, *(extra.parameters() if extra is not None else ())]
        if parametrize.is_parametrized(self.module, self.name):
            return list(self.module.parametrizations[self.name].parameters())  # type: ignore[index, union-attr]
        return [p for key, p in self.module._parameters.items() if p is not None and key.startswith(self.name)]

    @property
    def frozen(self) -> bool:
        own = self.module._parameters.get(self.name)
        if own is not None and own.requires_grad:
            return False
        return not any(p.requires_grad for p in self.parameters())


@dataclass(frozen=True, eq=False)
class Binding:
    """One regularizer on one tensor.

    Attributes:
        skipped: why it does nothing there, if so.
        note: what to know about it there.
    """

    slot: Slot
    regularizer: Regularizer
    skipped: str | None = None
    note: str = ""


def bind(model: nn.Module, rules: Sequence[tuple[Where, Regularizer]]) -> tuple[list[Binding], list[str]]:
    """What each rule reads, and remarks on the whole.

    Raises:
        NoMatchError: if a rule reads nothing.
        InvalidArgumentError: if a rule is not a pair of a `where` and a regularizer.
    """
    around = Surroundings(unwrapped(model))
    bindings = []
    for where, regularizer in map(_checked, rules):
        found = list(_bindings(model, where, regularizer, around))
        if all(b.skipped for b in found):
            refused = [f"{b.slot.label} ({b.skipped})" for b in found]
            raise NoMatchError(type(regularizer).__name__, str(as_selector(where)), [], refused=refused)
        bindings += found
    return bindings, around.remarks()


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own model inside torch.compile's and data-parallel wrappers."""
    while True:
        inner = model._modules.get("_orig_mod")
        if inner is None and isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
        if inner is None:
            return model
        model = inner


def _checked(rule: tuple[Where, Regularizer]) -> tuple[Where, Regularizer]:
    if not (isinstance(rule, tuple) and len(rule) == 2 and isinstance(rule[1], Regularizer)):
        raise InvalidArgumentError(
            "Penalty(model, rules) takes pairs (where, regularizer)", repr(rule), "E.g. [(None, L2(1e-4))]."
        )
    return rule


def _bindings(model: nn.Module, where: Where, regularizer: Regularizer, around: Surroundings) -> Iterator[Binding]:
    reads_outputs = isinstance(regularizer, OutputRegularizer)

    def can_act(module: nn.Module) -> str | None:
        if where is None and isinstance(module, TABLES):
            return "it is a table that is looked up; name it in `where` to include it"
        if reads_outputs and not isinstance(module, _WITH_OUTPUTS):
            return "it is no linear or convolution layer"
        return None if _weights(module) else "it has no weight with filters"

    owners: dict[tuple[int, ...], str] = {}
    for site in select(model, where, verb=type(regularizer).__name__, can_act=can_act):
        for slot in slots_of(site):
            key = tuple(id(p) for p in slot.parameters())
            skipped = _why_skipped(slot, regularizer, around)
            if skipped is None and not reads_outputs and key in owners:
                skipped = f"is the same tensor as {owners[key]}, where it counts"
            owners.setdefault(key, slot.label)
            yield Binding(slot, regularizer, skipped, _note(slot, regularizer, around))


def _why_skipped(slot: Slot, regularizer: Regularizer, around: Surroundings) -> str | None:
    if not isinstance(regularizer, WeightRegularizer):
        return None
    if regularizer.scale_only and getattr(regularizer, "before_norm", "keep") == "skip":
        norm = around.norm_after(slot.module)
        if norm is not None:
            return f"its scale does not matter: {norm} normalises what it puts out"
    if regularizer.logarithmic and _is_zero(slot):
        return "is zero at the start, and its logarithm has nothing to hold on to"
    return None


def _note(slot: Slot, regularizer: Regularizer, around: Surroundings) -> str:
    if isinstance(regularizer, ScaleShift):
        activation = around.activation_after(slot.module)
        if activation is not None and activation not in HOMOGENEOUS:
            return f"{activation} follows, which is not homogeneous: moving scale changes the function"
    return ""


@torch.no_grad()
def _is_zero(slot: Slot) -> bool:
    weight = slot.tensor()
    return not weight.is_meta and not bool(weight.count_nonzero())


def slots_of(site: Site) -> Iterator[Slot]:
    """The weights with filters of one layer."""
    for name, layout in _weights(site.module).items():
        yield Slot(site.path, site.module, name, layout)


def _weights(module: nn.Module) -> dict[str, Layout]:
    """The tensors of a module that have filters, by name."""
    names = dict.fromkeys(["weight", *module._parameters])
    found = {}
    for name in names:
        try:
            layout = layout_of(module, name)
        except NotApplicableError:
            continue
        tensor = getattr(module, name, None)
        if isinstance(tensor, Tensor) and not isinstance(tensor, nn.parameter.UninitializedParameter):
            found[name] = layout
    return found
