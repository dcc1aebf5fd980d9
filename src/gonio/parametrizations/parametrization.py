"""The base class of all parametrizations: a weight as a function of a trained tensor."""

from __future__ import annotations

import json
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from math import inf
from types import NoneType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from gonio.errors import InvalidArgumentError, UnsetStateError, check_range
from gonio.execution import autocast_is_on
from gonio.geometry.norms import WIDE, full_precision, widen
from gonio.geometry.views import Layout

VERSION = 2  # of the description in a checkpoint
_KINDS: dict[str, type[Parametrization]] = {}


def check_like(found: object, given: Tensor, what: str) -> None:
    """Refuse what a map of a tensor returned unless it is a tensor of the same shape and dtype."""
    if not isinstance(found, Tensor):
        raise InvalidArgumentError(f"{what} returns a tensor", repr(found), "Return the tensor.")
    if found.shape != given.shape or found.dtype != given.dtype:
        asked = f"{what} returns a tensor of the shape {tuple(given.shape)} and dtype {given.dtype}"
        raise InvalidArgumentError(asked, f"{tuple(found.shape)} and {found.dtype}", "Keep shape and dtype.")


def check_options(parametrization: Parametrization) -> None:
    """Refuse options that the object does not have, or that a checkpoint cannot store."""
    asked = f"{type(parametrization).__name__}.options names attributes that are plain numbers or strings"
    for name in parametrization.options:
        value = getattr(parametrization, name, parametrization)
        if value is parametrization or not isinstance(value, (bool, int, float, str, NoneType)):
            found = f"no {name!r}" if value is parametrization else f"{name}={value!r}"
            raise InvalidArgumentError(asked, found, "Set it in __init__, or leave it out of options.")


def positive(kind: str, name: str, value: float, do: str) -> float:
    """An option as a float; refused unless it is finite and above 0."""
    check_range(kind, **{name: value})
    if not 0 < value < inf:
        raise InvalidArgumentError(f"{kind} needs a finite {name} > 0", f"{value}", do)
    return float(value)


class Parametrization(nn.Module, ABC):
    r"""A map :math:`W = f(V)` from a trained tensor to the weight that the layer uses.

    An instance is a template until it is attached to a layer, where it holds the state that the map needs for this
    one tensor (a gain, singular vectors). All members guarantee:

    * reading the weight is pure: no call of :meth:`forward` changes any state;
    * :math:`f(f^{-1}(W)) = W` for each weight that :meth:`holds`, and the nearest or a rescaled member
      of the set for others;
    * the map is computed in float32 at least, outside autocast, and returned in the dtype of `V`;
    * values and gradients are finite wherever `V` is, also for zero filters;
    * folding is exact: ``detach(layer, "weight", keep="weight")``.

    A subclass names the keywords of its constructor in :attr:`options` and defines :meth:`weight_of`,
    :meth:`holds` and, if it has state, :meth:`bind`.
    """

    options: ClassVar[tuple[str, ...]] = ()
    """Keywords of the constructor; each is also an attribute with a value that JSON can represent."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _KINDS[cls.kind()] = cls

    @classmethod
    def kind(cls) -> str:
        """The name of the class in checkpoints: qualified, but for those of gonio itself."""
        own = cls.__module__.startswith(f"{__package__}.")
        return cls.__name__ if own else f"{cls.__module__}.{cls.__qualname__}"

    def __init__(self) -> None:
        super().__init__()
        self.layout: Layout | None = None
        self.bound_to: weakref.ref[nn.Parameter] | None = None  # see `trained`; weak, for a layer has the Parameter
        self._unset = False  # whether the state was allocated by to_empty() and not initialised since

    @abstractmethod
    def weight_of(self, raw: Tensor) -> Tensor:
        """The map itself, for a tensor in float32 or float64."""

    @abstractmethod
    def holds(self, weight: Tensor) -> bool:
        """Whether `weight` has the property that :meth:`forward` guarantees, up to rounding."""

    def forward(self, raw: Tensor) -> Tensor:
        """The effective weight of `raw`, in its shape and dtype; changes no state."""
        if self._unset:
            raise UnsetStateError(type(self).__name__)
        # Only if autocast is on: entering the context costs as much as a small layer and shows in graphs.
        if autocast_is_on(raw):
            with full_precision(raw):
                return self._in_full_precision(raw)
        return self._weight(raw) if raw.dtype in WIDE else self._in_full_precision(raw)

    def _in_full_precision(self, raw: Tensor) -> Tensor:
        if raw.dtype in WIDE:
            return self._weight(raw)
        wide = widen(raw)
        if raw.dtype is torch.float16:
            # Subnormal numbers (below 6e-5) count as zero but keep their gradient: a filter of subnormal
            # numbers has a gradient of size 1/norm, which float16 cannot represent; a zero filter has gradient 0.
            wide = wide - wide.detach() * (wide.detach().abs() < torch.finfo(raw.dtype).tiny)
        return self._weight(wide).to(raw.dtype)

    def _weight(self, raw: Tensor) -> Tensor:
        """What :meth:`weight_of` of a subclass returned; refused unless it can stand for the weight."""
        found = self.weight_of(raw)
        check_like(found, raw, f"{type(self).__name__}.weight_of()")
        return found

    def remarks(self, weight: Callable[[], Tensor]) -> tuple[str, ...]:
        """Notes of :func:`gonio.measure` on the effective weight, which `weight` returns."""
        return ()

    def right_inverse(self, weight: Tensor) -> Tensor:
        """A trained tensor whose effective weight is `weight`, or the nearest weight that the map can reach."""
        return weight

    def bind(self, weight: Tensor, layout: Layout) -> None:
        """Create the state for a layer whose weight is `weight`; `attach` calls it once."""
        self.layout = layout

    @torch.no_grad()
    def rebind_(self, weight: Tensor) -> None:
        """Overwrite the state with the state that :meth:`bind` creates for `weight`; keeps every tensor object."""
        fresh = self.unbound()
        fresh.bind(weight.detach(), self.bound_layout)
        for mine, new in zip(self._state(), fresh._state(), strict=True):
            mine.copy_(new)
        self._unset = False

    @torch.no_grad()
    def reaches(self, weight: Tensor) -> bool:
        """Whether binding to `weight` keeps its values, up to 0.1 % of the largest (1 % in half precision)."""
        weight = weight.detach()
        if weight.is_meta:
            return True
        fresh = self.unbound()
        fresh.bind(weight, self.bound_layout)
        tolerance = 1e-3 if weight.dtype in WIDE else 1e-2
        return bool((fresh(fresh.right_inverse(weight)) - weight).abs().max() <= tolerance * weight.abs().max())

    def reset_parameters(self) -> None:
        """Do nothing, in loops that reset all modules: `reset_parameters` of the layer sets weight and state."""

    def unbound(self) -> Self:
        """A new template with the same options."""
        return type(self)(**self._options())

    @property
    def bound_layout(self) -> Layout:
        """The layout of the tensor; for a template the default one."""
        return self.layout or Layout()

    @property
    def trained(self) -> nn.Parameter | None:
        """The Parameter that the state belongs to; None for a template, and after another has taken its place."""
        return None if self.bound_to is None else self.bound_to()

    def track(self, raw: nn.Parameter | None) -> None:
        """Remember the Parameter that the state belongs to; the layer does so after each change of the object."""
        self.bound_to = None if raw is None else weakref.ref(raw)

    def release(self) -> nn.Parameter | None:
        """Forget the Parameter while its layer moves it, which changes no value; returns it, for :meth:`track`."""
        raw, self.bound_to = self.trained, None
        return raw

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "bound_to": None}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self._options().items())

    def get_extra_state(self) -> Tensor:
        """Kind, options and layout as ASCII codes of JSON, in a tensor, which every file format can store.

        In float32, so that the codes survive casts to half precision and averages of equal models.
        """
        text = json.dumps(self._described(), sort_keys=True)
        return torch.tensor(list(text.encode("ascii")), dtype=torch.float32, device="cpu")

    def _described(self) -> dict[str, Any]:
        layout = None if self.layout is None else vars(self.layout)
        return {"kind": self.kind(), "version": VERSION, "options": self._options(), "layout": layout}

    def set_extra_state(self, state: Tensor) -> None:
        """Check that the description in a checkpoint is of this kind with these options."""
        found = describe(state)
        if not self.wrote(found):
            raise InvalidArgumentError(
                f"{self}.load_state_dict() needs the state of a parametrization of the same kind and options",
                f"that of {found.get('kind')} {found.get('options')}",
                "Load the state dict of the whole layer, which is converted.",
            )
        self._unset = False

    def wrote(self, description: Mapping[str, Any]) -> bool:
        """Whether a description in a checkpoint is of this kind with these options."""
        mine = describe(self.get_extra_state())
        return all(mine[key] == description.get(key) for key in ("kind", "options"))

    def adopt(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """The raw tensor if this map can take over the state of torch's own parametrization exactly, else None.

        It is called on a bound copy, whose state it may set. `tensors` holds ``g`` and ``v`` of torch's weight
        norm, or ``original``, ``u`` and ``v`` of torch's spectral norm.
        """
        return None

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.options}

    def _state(self) -> list[Tensor]:
        return [*self.parameters(recurse=False), *self.buffers(recurse=False)]

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Self:
        # `to_empty` of a module on the meta device allocates the state without initialising it.
        was_meta = any(tensor.is_meta for tensor in self._state())
        super()._apply(fn, recurse)
        self._unset = self._unset or (was_meta and not any(tensor.is_meta for tensor in self._state()))
        return self


def describe(extra_state: Tensor) -> dict[str, Any]:
    """The description that :meth:`Parametrization.get_extra_state` wrote; older files have it in uint8.

    Raises: InvalidArgumentError if the codes are damaged.
    """
    try:
        found: dict[str, Any] = json.loads(bytes(extra_state.double().round().to(torch.uint8).tolist()).decode())
    except ValueError as error:
        needs = "the description of a parametrization in a checkpoint holds the codes of a JSON text"
        do = "Take the checkpoint as it was saved; casts below bfloat16 and averages of different models damage it."
        raise InvalidArgumentError(needs, f"other numbers ({error})", do) from error
    kind = found.get("kind")
    if found.get("version", 0) < 2 and kind not in _KINDS:  # the bare name of a class of the user's
        matching = [name for name in _KINDS if name.rpartition(".")[2] == kind]
        found["kind"] = matching[0] if len(matching) == 1 else kind
    return found


def kind_of(description: Mapping[str, Any]) -> Parametrization:
    """A template of the kind and options in a checkpoint's description, with its layout.

    Raises: InvalidArgumentError if the kind is unknown, or if a newer version wrote the description.
    """
    kind = _KINDS.get(description.get("kind", ""))
    if kind is None or description.get("version", 0) > VERSION:
        raise InvalidArgumentError(
            f"the parametrization in a checkpoint must be one of {', '.join(sorted(_KINDS))}, version <= {VERSION}",
            f"{description.get('kind')} of version {description.get('version')}",
            "Import the module that defines it, or fold the model with the version of gonio that wrote it.",
        )
    found, layout = kind(**description["options"]), description["layout"]
    if layout is not None:  # JSON has lists for tuples
        fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in layout.items()}
        found.layout = Layout(**fields)
    return found
