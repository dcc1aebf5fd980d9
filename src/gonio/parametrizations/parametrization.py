"""The one idea of this package: a weight is a function of what is trained, with a right inverse."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from gonio.errors import InvalidArgumentError, UnsetStateError
from gonio.geometry.precision import full_precision, widen
from gonio.geometry.views import Layout

__all__ = ["Parametrization", "describe", "kind_of"]

_VERSION = 1
_KINDS: dict[str, type[Parametrization]] = {}


class Parametrization(nn.Module, ABC):
    r"""A map :math:`W = f(V)` from a trained tensor to the weight that the layer uses.

    Members of this class are templates until they are attached to a layer; then they hold what state
    the map needs (a gain, singular vectors) for that one tensor. Four statements hold for all:

    * reading the weight is pure: no call of :meth:`forward` changes any state;
    * :math:`f(f^{-1}(W)) = W` for each weight that :meth:`holds`, and the nearest or rescaled member
      of the set otherwise;
    * the map is computed in float32 at least, outside autocast, and returned in the dtype of `V`;
    * values and gradients are finite wherever `V` is, zero filters included.

    To add a member, write a subclass with its constructor's keywords in :attr:`options`, and
    :meth:`weight_of`, :meth:`holds`, and :meth:`bind` if it has state.
    """

    options: ClassVar[tuple[str, ...]] = ()
    """The constructor's keywords, each also an attribute that JSON can hold."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _KINDS[cls.__name__] = cls

    def __init__(self) -> None:
        super().__init__()
        self.layout: Layout | None = None
        self.raw_id: int | None = None  # id() of the Parameter it was bound to
        self._unset = False  # state tensors exist, but hold whatever memory held

    @abstractmethod
    def weight_of(self, raw: Tensor) -> Tensor:
        """The map itself, on a tensor of float32 or float64."""

    @abstractmethod
    def holds(self, weight: Tensor) -> bool:
        """Whether `weight` obeys the law that :meth:`forward` guarantees, up to rounding."""

    def forward(self, raw: Tensor) -> Tensor:
        """The effective weight of `raw`, in its shape and dtype; changes no state."""
        if self._unset:
            raise UnsetStateError(type(self).__name__)
        # Only where autocast is on: to enter the context costs as much as a small layer, and shows in graphs.
        if not raw.is_meta and torch.is_autocast_enabled("cpu" if raw.is_cpu else raw.device.type):
            with full_precision(raw):
                return self._widened(raw)
        return self._widened(raw)

    def _widened(self, raw: Tensor) -> Tensor:
        if raw.dtype in (torch.float32, torch.float64):
            return self.weight_of(raw)
        return self.weight_of(_normal(widen(raw), raw.dtype)).to(raw.dtype)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """A trained tensor whose effective weight is `weight`, or the nearest that the map can reach."""
        return weight

    def bind(self, weight: Tensor, layout: Layout) -> None:
        """Create the state for a layer whose weight is `weight`; called once, by `attach`."""
        self.layout = layout

    @torch.no_grad()
    def rebind_(self, weight: Tensor) -> None:
        """Overwrite the state by what :meth:`bind` would make of `weight`, keeping every tensor object."""
        fresh = self.unbound()
        fresh.bind(weight.detach(), self.bound_layout)
        for mine, new in zip(self._state(), fresh._state(), strict=True):
            mine.copy_(new)
        self._unset = False

    def reset_parameters(self) -> None:
        """Nothing: the state follows from the weight, and the layer's own reset sets both.

        It is here so that ``for m in model.modules(): m.reset_parameters()`` works in any order.
        """

    def unbound(self) -> Self:
        """A new template with the same options."""
        return type(self)(**self._options())

    @property
    def bound_layout(self) -> Layout:
        """The layout of the tensor; torch's plain one for a template."""
        return self.layout or Layout()

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self._options().items())

    def get_extra_state(self) -> Tensor:
        """Kind, options and layout as JSON bytes: a tensor, so that every file format can store it."""
        text = json.dumps(
            {
                "kind": type(self).__name__,
                "version": _VERSION,
                "options": self._options(),
                "layout": None if self.layout is None else vars(self.layout),
            },
            sort_keys=True,
        )
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Accept the description in a checkpoint if it is this parametrization's own."""
        found = describe(state)
        if not self.wrote(found):
            raise InvalidArgumentError(
                f"{self} reads the state that it wrote itself",
                f"that of {found.get('kind')} {found.get('options')}",
                "Load the state dict of the whole layer: it is translated.",
            )
        self._unset = False

    def wrote(self, description: Mapping[str, Any]) -> bool:
        """Whether a description in a checkpoint is of this kind with these options."""
        mine = describe(self.get_extra_state())
        return all(mine[key] == description.get(key) for key in ("kind", "options"))

    def adopt(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """The raw tensor if torch's own state `tensors` can be taken over exactly, else None.

        Called on a bound copy, whose state it may set. `tensors` holds ``g`` and ``v`` of a weight
        norm, or ``original``, ``u`` and ``v`` of a spectral norm.
        """
        return None

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.options}

    def _state(self) -> list[Tensor]:
        return [*self.parameters(recurse=False), *self.buffers(recurse=False)]

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Self:
        # `to_empty` on a meta module comes through here: what it leaves in the state is garbage.
        was_meta = any(tensor.is_meta for tensor in self._state())
        super()._apply(fn, recurse)
        self._unset = self._unset or (was_meta and not any(tensor.is_meta for tensor in self._state()))
        return self


def describe(extra_state: Tensor) -> dict[str, Any]:
    """What :meth:`Parametrization.get_extra_state` wrote."""
    found: dict[str, Any] = json.loads(bytes(extra_state.tolist()).decode())
    return found


def kind_of(description: Mapping[str, Any]) -> Parametrization:
    """A template of the kind and options that a checkpoint describes, with its layout.

    Raises:
        InvalidArgumentError: if the kind is unknown, or a newer version wrote it.
    """
    kind = _KINDS.get(description.get("kind", ""))
    if kind is None or description.get("version", 0) > _VERSION:
        raise InvalidArgumentError(
            f"a checkpoint's parametrization is one of {', '.join(sorted(_KINDS))}, version <= {_VERSION}",
            f"{description.get('kind')} of version {description.get('version')}",
            "Load it with the version of gonio that wrote it, and save the folded model.",
        )
    found = kind(**description["options"])
    if description["layout"] is not None:
        found.layout = Layout(**{k: _frozen(v) for k, v in description["layout"].items()})
    return found


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value  # JSON has no tuples


def _normal(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """float16 subnormals (below 6e-5) count as zero, but keep their gradient.

    A filter of subnormals alone has a gradient of size 1/norm that float16 cannot hold; as a zero filter
    it has gradient zero. The wider types hold the gradient of every filter that is not zero to them.
    """
    if dtype is not torch.float16:
        return wide
    small = wide.detach().abs() < torch.finfo(dtype).tiny
    return wide - wide.detach() * small
