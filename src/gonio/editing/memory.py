"""Which tensors are the same numbers in memory, which cannot be written to, and which a forward writes to."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from gonio.errors import InvalidArgumentError
from gonio.messages import say


def memory_key(tensor: Tensor) -> Hashable:
    """Equal for one tensor, and for two with the same entries in the same places of memory; else the `id`.

    `nn.Parameter(a.data)` is such a second one, and so are tied weights after `load_state_dict(assign=True)`.

    Example:
        >>> from gonio.editing.memory import memory_key
        >>> a = nn.Parameter(torch.zeros(2, 2))
        >>> b = nn.Parameter(a.data)
        >>> memory_key(a) == memory_key(b), memory_key(a) == memory_key(b.T)
        (True, False)
        >>> memory_key(a) == memory_key(a.detach()[:1])
        False
    """
    if not has_address(tensor):
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def has_address(tensor: Tensor) -> bool:
    """Whether it is an ordinary tensor with entries in memory: no shard, no quantised, lazy or fake one.

    Example:
        >>> from gonio.editing.memory import has_address
        >>> has_address(torch.zeros(2)), has_address(torch.zeros(2, device="meta")), has_address(torch.zeros(0))
        (True, False, False)
    """
    own = [base for base in type(tensor).__mro__ if base not in nn.Parameter.__mro__]
    if any(hook in vars(base) for base in own for hook in ("__torch_dispatch__", "__torch_function__")):
        return False  # an attribute of it may do anything
    return not (is_lazy(tensor) or tensor.is_meta or tensor.layout is not torch.strided or tensor.numel() == 0)


def registered(module: nn.Module) -> dict[str, int]:
    """The `id` of each tensor that is registered in a module itself, by name.

    While a module runs others may stand there, as under `torch.func.functional_call`.

    Example:
        >>> from gonio.editing.memory import registered
        >>> layer = nn.Linear(2, 2)
        >>> registered(layer) == {"weight": id(layer.weight), "bias": id(layer.bias)}
        True
    """
    held = (*module._parameters.items(), *module._buffers.items())
    return {name: id(tensor) for name, tensor in held if tensor is not None}


def storage_of(tensor: Tensor) -> int | None:
    """What identifies the memory that a tensor and its views are in; None for one without, as of some subclasses.

    Example:
        >>> from gonio.editing.memory import storage_of
        >>> a = torch.zeros(2, 2)
        >>> storage_of(a) == storage_of(a.T[1:]), storage_of(a) == storage_of(a.clone())
        (True, False)
    """
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def overlapping(tensors: Iterable[Tensor]) -> dict[int, list[Tensor]]:
    """By the `id` of each tensor that shares memory with others: these. Slices of one buffer beside each other do not.

    Example:
        >>> from gonio.editing.memory import overlapping
        >>> flat = torch.zeros(10)
        >>> a, b, c = flat[:4], flat[4:8], flat[6:]
        >>> overlapping([a, b]), [other is c for other in overlapping([a, b, c])[id(b)]]
        ({}, [True])
    """
    found: dict[int, list[Tensor]] = {}
    distinct = [each for each in {id(t): t for t in tensors}.values() if has_address(each)]
    open_: list[Tensor] = []  # those that end behind the start of the next one
    for tensor in sorted(distinct, key=lambda each: each.data_ptr()):
        open_ = [each for each in open_ if _end(each) > tensor.data_ptr()]
        for other in open_:
            if other.device == tensor.device and _share(other, tensor):
                found.setdefault(id(other), []).append(tensor)
                found.setdefault(id(tensor), []).append(other)
        open_.append(tensor)
    return found


def _end(tensor: Tensor) -> int:
    return tensor.data_ptr() + _extent(tensor) * tensor.element_size()


def _extent(tensor: Tensor) -> int:
    """The number of places from the first entry to the last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _share(first: Tensor, second: Tensor) -> bool:
    """Whether a byte belongs to both, which may be interleaved as the columns of one matrix are."""
    if memory_key(first) == memory_key(second):
        return True
    start = min(first.data_ptr(), second.data_ptr())
    taken = torch.zeros(max(_end(first), _end(second)) - start, dtype=torch.bool, device="cpu")
    _bytes_of(taken, first, start).fill_(True)
    return bool(_bytes_of(taken, second, start).any())


def _bytes_of(taken: Tensor, tensor: Tensor, start: int) -> Tensor:
    """The places of a tensor's bytes; an expanded dimension has one."""
    kept = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    step = tensor.element_size()
    sizes, strides = [size for size, _ in kept], [stride * step for _, stride in kept]
    return taken.as_strided([*sizes, step], [*strides, 1], tensor.data_ptr() - start)


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether several of its entries are one number in memory, as in an expanded tensor."""
    if not has_address(tensor) or tensor.is_contiguous():
        return False
    reached = 0  # the last place that the smaller strides reach
    for stride, size in sorted((t, n) for n, t in zip(tensor.shape, tensor.stride(), strict=True) if n > 1):
        if stride <= reached or stride == 0:
            break
        reached += (size - 1) * stride
    else:
        return False
    taken = torch.zeros(_extent(tensor) * tensor.element_size(), dtype=torch.bool, device="cpu")
    _bytes_of(taken, tensor, tensor.data_ptr()).fill_(True)
    return int(taken.sum()) < tensor.numel() * tensor.element_size()


def why_not_written(tensor: Tensor) -> str | None:
    """Why torch cannot write values to a tensor; None if it can.

    Example:
        >>> from gonio.editing.memory import why_not_written
        >>> why_not_written(torch.zeros(1, 2).expand(3, 2))
        'several of its entries are one number in memory, as in an expanded tensor'
        >>> why_not_written(torch.zeros(3, 2).T) is None
        True
    """
    if _overlaps_itself(tensor):
        return say("several of its entries are one number in memory, as in an expanded tensor")
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return say("it was made in inference mode, and torch lets nothing change it outside of that mode")
    return None


def is_inference(tensor: Tensor) -> bool:
    """Whether a tensor was made in inference mode; torch does not answer for a lazy one, which has no values yet.

    Example:
        >>> from gonio.editing.memory import is_inference
        >>> is_inference(nn.LazyLinear(2).weight), is_inference(nn.Linear(1, 2).weight)
        (False, False)
    """
    return not is_lazy(tensor) and tensor.is_inference()


def refuse_inference(asked: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise for a tensor that was made in inference mode, by its name: torch computes no gradient with it.

    Example:
        >>> from gonio.editing.memory import refuse_inference
        >>> with torch.inference_mode():
        ...     made = torch.ones(2)
        >>> refuse_inference("it", [("weight", made)])
        Traceback (most recent call last):
        gonio.errors.InvalidArgumentError: it needs weights with which torch computes gradients; found weight, which ...
    """
    if torch.compiler.is_compiling():
        return
    for name, tensor in tensors:
        if is_inference(tensor):
            found = f"{name}, which was made in inference mode"
            do = "Make the model outside of torch.inference_mode()."
            raise InvalidArgumentError(f"{asked} needs weights with which torch computes gradients", found, do)


# --- forwards that write to parameters of their model -------------------------------------------------

# Note [Forwards that write]
# Constrained OFT does, and so do heads that renormalise a weight. A run of such a model in order to read it would
# change it: the values before are kept when the first write comes.

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
        >>> from gonio.editing.memory import writes_taken_back
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
                if place in self._counts and self._counts[place] != version_of(parameter):  # written by a verb since
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
                    self._counts[place] = version_of(parameter)
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
            if count != version_of(parameter):
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


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place, as autograd counts it; 0 for one of inference mode, which is not."""
    return 0 if tensor.is_inference() else int(tensor._version)
