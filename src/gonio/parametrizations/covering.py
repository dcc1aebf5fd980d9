"""The classes of layers that carry parametrizations.

Note [How a weight is covered]
The trained Parameter stays in ``layer._parameters["weight"]``: same object, same key, same place, so
optimizers and state dicts know it as before. The layer's class becomes a subclass, made once per (class,
names) and never changed afterwards, with a property ``weight`` in front of the Parameter that returns the
effective tensor. A property is found before ``nn.Module.__getattr__`` is asked, so every forward that
reads ``self.weight`` uses it. Copies share the class, and uncovering one of them gives that instance its
old class back, which no other instance notices.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from gonio.errors import InvalidArgumentError
from gonio.parametrizations.checkpoints import translate_
from gonio.parametrizations.parametrization import Parametrization

__all__ = ["Covered", "child_name", "covered_class", "uncovered"]


def child_name(name: str) -> str:
    """The name of the sub-module that parametrizes the tensor `name`."""
    return f"{name}_parametrization"


class Covered:
    """What a layer with parametrized tensors does differently; mixed in before the layer's own class."""

    covered_base: type[nn.Module]
    covered_names: tuple[str, ...]

    # the parts of nn.Module that this mixin relies on
    _parameters: dict[str, nn.Parameter | None]
    _modules: dict[str, nn.Module | None]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.covered_names or not isinstance(value, Tensor):
            super().__setattr__(name, value)
        elif name not in self._parameters:
            # Tools that take the Parameter away (DataParallel, FSDP 1) put a view of it in its place.
            self.__dict__[name] = value
        else:
            _assign_(self, name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        new, arguments, *state = cast(tuple[Any, ...], super().__reduce_ex__(max(int(protocol), 2)))
        if new is cast(Any, copyreg).__newobj__ and arguments == (
            covered_class(self.covered_base, self.covered_names),
        ):
            # The class was made at run time: a pickle names what to make it from instead.
            return (_new, (self.covered_base, self.covered_names), *state)
        return (new, arguments, *state)

    def reset_parameters(self) -> None:
        """Reset the layer as its own class does, then bind the state to the new weights."""
        with uncovered(self) as layer:
            reset = getattr(layer, "reset_parameters", None) or getattr(layer, "_reset_parameters", None)
            if reset is not None:
                reset()
        for name in self.covered_names:
            raw = self._parameters[name]
            if raw is not None:
                _bind_value_(_parametrization(self, name), raw, raw)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        for name in self.covered_names:
            translate_(_parametrization(self, name), state_dict, prefix, name)
        with uncovered(self) as layer:
            layer._load_from_state_dict(state_dict, prefix, *arguments)


class CoveredRecurrent(Covered):
    """RNN, LSTM, GRU read a list of tensors, made when weights change; here it is made at each read.

    cuDNN's packing of the weights into one buffer cannot apply to computed weights; it is skipped.
    """

    _flat_weights_names: list[str]

    @property
    def _flat_weights(self) -> list[Tensor]:
        return [getattr(self, name) for name in self._flat_weights_names]

    @_flat_weights.setter
    def _flat_weights(self, _: list[Tensor]) -> None:
        # torch sets the list after it moved the parameters; the plain class will read the raw ones again.
        self.__dict__["_flat_weights"] = [self._parameters.get(name) for name in self._flat_weights_names]

    def _update_flat_weights(self) -> None:
        """Nothing is kept, so nothing can be stale."""

    def flatten_parameters(self) -> None:
        """Not for computed weights."""


_CLASSES: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}


def covered_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The one subclass of `base` whose tensors `names` are computed by parametrizations."""
    if (base, names) not in _CLASSES:
        _CLASSES[base, names] = _make_class(base, names)
    return _CLASSES[base, names]


def _make_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    mixin = CoveredRecurrent if issubclass(base, nn.RNNBase) else Covered
    namespace: dict[str, Any] = {name: _effective(name) for name in names}
    namespace |= {
        "covered_base": base,
        "covered_names": names,
        "__doc__": base.__doc__,
        # torch.fx takes a module as one opaque layer if its class is torch's
        "__module__": base.__module__,
        "__qualname__": f"Parametrized{base.__qualname__}",
    }
    return cast(type[nn.Module], type(f"Parametrized{base.__name__}", (mixin, base), namespace))


@contextmanager
def uncovered(layer: Any) -> Iterator[nn.Module]:
    """The layer as its own class sees it, with the raw parameters under their names."""
    kind = type(layer)
    layer.__class__ = kind.covered_base
    try:
        yield layer
    finally:
        layer.__class__ = kind


def _effective(name: str) -> property:
    child = child_name(name)

    def read(self: Covered) -> Tensor | None:
        try:
            raw = self._parameters[name] if name in self._parameters else self.__dict__[name]
            if raw is None or (_sharded(raw) and _asked_by_fsdp()):
                return raw
            return cast(Parametrization, self._modules[child])(raw)
        except (AttributeError, KeyError) as error:
            # nn.Module would answer an AttributeError of a property with the raw tensor.
            raise RuntimeError(f"the parametrized tensor {name!r} cannot be computed: {error!r}") from error

    return property(read)


def _asked_by_fsdp() -> bool:
    """Whether FSDP 2 asks for the Parameter that it shards, to see if it still is the same object.

    It reads the attribute for that, before the first forward, and would train the effective tensor from then
    on. There is no public way to tell it where the Parameter is; a reader of the weight of a sharded layer
    still gets the effective weight.
    """
    return sys._getframe(2).f_code.co_name == "reset_sharded_param"


def _parametrization(layer: Covered, name: str) -> Parametrization:
    return cast(Parametrization, layer._modules[child_name(name)])


@torch.no_grad()
def _assign_(layer: Covered, name: str, value: Tensor) -> None:
    """A tensor becomes the effective weight; a Parameter also becomes the object that is trained."""
    raw = layer._parameters[name]
    if isinstance(value, nn.Parameter) and (raw is None or _sharded(raw) or _sharded(value)):
        layer._parameters[name] = value  # FSDP exchanges whole and sharded forms of the same numbers
        return
    if raw is None or value.shape != raw.shape:
        raise InvalidArgumentError(
            f"assigning a parametrized {name!r} needs a tensor of its shape",
            f"{tuple(value.shape)} for {None if raw is None else tuple(raw.shape)}",
            "Detach the parametrization first to put in a tensor of another shape.",
        )
    if isinstance(value, nn.Parameter):
        layer._parameters[name] = raw = value
    _bind_value_(_parametrization(layer, name), raw, value.detach())


@torch.no_grad()
def _bind_value_(parametrization: Parametrization, raw: nn.Parameter, weight: Tensor) -> None:
    parametrization.rebind_(weight)
    inverse = parametrization.right_inverse(weight)
    if inverse is not raw:
        raw.copy_(inverse)


def _sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "device_mesh")


def _new(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """An empty instance of a covered class, for unpickling and copying."""
    kind = covered_class(base, names)
    return kind.__new__(kind)
