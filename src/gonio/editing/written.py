"""Forwards that write to the parameters of their own model, as constrained OFT and heads that renormalise a weight do.

A run of such a model in order to read it would change it; here the values before are kept when the first write comes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from gonio.editing.memory import storage_of

_own = threading.local()


def looks_at_parameters() -> bool:
    """Whether this thread calls functions of torch for this module, which are none of the model that runs."""
    return getattr(_own, "calls", False)


@contextmanager
def _looking() -> Iterator[None]:
    _own.calls = True
    try:
        yield
    finally:
        _own.calls = False


@contextmanager
def writes_taken_back(model: nn.Module) -> Iterator[None]:
    """On leaving, parameters have the values that they had before forwards of the model wrote to them.

    What is written between two forwards, as by a verb, stays. Only tensors that a forward writes to are copied.

    Example:
        >>> from gonio.editing.written import writes_taken_back
        >>> class Normalised(nn.Linear):
        ...     def forward(self, x):
        ...         self.weight.data = nn.functional.normalize(self.weight.data)
        ...         return super().forward(x)
        >>> layer = Normalised(2, 1, bias=False)
        >>> before = layer.weight.clone()
        >>> with writes_taken_back(layer):
        ...     out = layer(torch.ones(1, 2))
        >>> torch.equal(layer.weight, before)
        True
    """
    if isinstance(model, torch.jit.ScriptModule):  # it takes no hooks
        yield
        return
    written = _Written([parameter for parameter in model.parameters() if not is_lazy(parameter)])
    with (
        model.register_forward_pre_hook(written.begin, prepend=True),
        model.register_forward_hook(written.end, always_call=True),
    ):
        try:
            yield
        finally:  # also if Ctrl-C comes here
            written.put_back_()


class _Written(TorchDispatchMode):
    """The parameters that operations write to while the model's forward runs, with their values before."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self._parameters = parameters
        self._running = 0
        self._data: dict[int, Tensor] = {}  # by the place of a parameter in the list: its tensor when a forward began
        self._stored: dict[int | None, list[int]] = {}  # by storage, the places of the parameters in it
        self._values: dict[int, Tensor] = {}  # by place, before the first write
        self._counts: dict[int, int] = {}  # by place, of changes after the last forward that wrote

    def begin(self, *_: Any) -> None:
        self._running += 1
        if self._running > 1:
            return
        self._stored = {}
        with _looking():
            for place, parameter in enumerate(self._parameters):
                if place in self._counts and self._counts[place] != _count(parameter):  # written by a verb since
                    self._forget(place)
                self._data.setdefault(place, parameter.detach())
                self._stored.setdefault(storage_of(parameter), []).append(place)
        self._stored.pop(None, None)
        self.__enter__()

    def end(self, *_: Any) -> None:
        self._running -= 1
        if self._running:
            return
        self.__exit__(None, None, None)
        with _looking():
            for place, parameter in enumerate(self._parameters):
                if place in self._values or storage_of(parameter) != storage_of(self._data[place]):
                    self._counts[place] = _count(parameter)
                else:
                    self._forget(place)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in _written_by(func, args, kwargs or {}):
            for place in self._stored.get(storage_of(each), ()):
                if place not in self._values:
                    self._values[place] = self._data[place].clone()
        return func(*args, **(kwargs or {}))

    def put_back_(self) -> None:
        for place, count in self._counts.items():
            parameter, data = self._parameters[place], self._data[place]
            if count != _count(parameter):
                continue
            if place in self._values:
                data.data.copy_(self._values[place])  # a change that autograd does not count
            if storage_of(parameter) != storage_of(data):
                parameter.data = data

    def _forget(self, place: int) -> None:
        for known in (self._data, self._values, self._counts):
            known.pop(place, None)


def _written_by(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors among the arguments of an operation that it changes."""
    if not func._schema.is_mutable:
        return
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[place] if place < len(args) else kwargs.get(argument.name)
        for each in given if isinstance(given, (list, tuple)) else (given,):
            if isinstance(each, Tensor):
                yield each


def _count(tensor: Tensor) -> int:
    """How often a tensor was changed, as autograd counts it; tensors of inference mode are not counted."""
    return 0 if tensor.is_inference() else int(tensor._version)
