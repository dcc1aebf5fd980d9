"""A second device that computes, on a CPU build of torch.

The tensors of :class:`accelerator <laws.accelerator>` have no values, so what decides by values cannot be tried with
them. Those of this device have: each holds a tensor of the CPU, on which its operations are computed. What an
accelerator refuses is refused: tensors of two devices in one operation, a generator of the CPU, NumPy.

The registration lasts as long as the process, so the law runs this in a process of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_iter, tree_map

DEVICE = "elsewhere"
_COPIES = {"_to_copy", "copy_"}
_BY_INDEX = {"index", "index_put", "index_put_", "_index_put_impl_"}  # whose indices may be on the CPU


class There(Tensor):
    """A tensor of the device."""

    here: Tensor
    __module__ = "torch._subclasses.elsewhere"  # where what computes with tensors of its own expects no special form

    @staticmethod
    def __new__(cls, here: Tensor) -> There:
        found = Tensor._make_wrapper_subclass(
            cls, here.shape, strides=here.stride(), storage_offset=here.storage_offset(), dtype=here.dtype,
            device=torch.device(DEVICE, 0),
        )  # fmt: skip
        found.here = here
        return found

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.here.data_ptr()

    def untyped_storage(self) -> Any:
        return self.here.untyped_storage()

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, new: Tensor) -> None:
        with torch.no_grad():
            self.here = new.here if isinstance(new, There) else refuse("a tensor of the CPU in the place of another")

    def tolist(self) -> Any:
        return self.here.tolist()

    def numpy(self, **_: Any) -> Any:
        refuse("NumPy, which needs a tensor of the CPU")

    def __deepcopy__(self, memo: Any) -> Tensor:
        found = memo.get(id(self))
        if found is None:
            found = self.detach().clone()
            if isinstance(self, nn.Parameter):
                found = nn.Parameter(found, self.requires_grad)
            memo[id(self)] = found
        return found

    def __repr__(self, **_: Any) -> str:
        return f"There({self.here!r})"


def refuse(what: str) -> Any:
    raise RuntimeError(f"the other device met {what}")


def computed(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation, computed on the CPU; its result is there if one of its tensors or `device` is."""
    name = func.overloadpacket.__name__
    tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
    there = any(isinstance(x, There) for x in tensors)
    named = kwargs.get("device")
    target = there if named is None else torch.device(named).type == DEVICE
    if there and name not in _COPIES:
        mixed = (args[:1], args[2:]) if name in _BY_INDEX else (args, kwargs)
        for x in tree_iter(mixed):
            if isinstance(x, Tensor) and not isinstance(x, There) and x.ndim:
                refuse(f"a tensor of {x.device} in {name}")
    generator = kwargs.get("generator")
    if target and generator is not None:
        refuse(f"a generator of {generator.device} in {name}")
    plain = {key: "cpu" if key == "device" and value is not None else value for key, value in kwargs.items()}
    plain.pop("pin_memory", None)
    inner = tree_map(lambda x: x.here if isinstance(x, There) else x, (args, plain))
    found = func(*inner[0], **inner[1])
    if name == "copy_" and not isinstance(args[0], There):
        return args[0]
    if not target:
        return found
    if name in _COPIES and name != "copy_" and not there:
        return There(found.clone() if any(found is x for x in tensors) else found)
    # the tensor of the device does not know that the one here is conjugated lazily
    wrapped = tree_map(lambda x: There(x.resolve_conj().resolve_neg()) if isinstance(x, Tensor) else x, found)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if there else wrapped


class _Factories(TorchDispatchMode):
    """New tensors of the device, and copies to it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


@contextmanager
def second_device() -> Iterator[None]:
    """The device is there; `torch.tensor` and its like build what they make on the CPU."""
    originals = {name: getattr(torch, name) for name in ("tensor", "as_tensor")}
    new_tensor, numpy = Tensor.new_tensor, Tensor.numpy

    def made(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(data: Any, *args: Any, device: Any = None, **options: Any) -> Tensor:
            if isinstance(data, There) and device is None:
                device = DEVICE
            found = original(data.here if isinstance(data, There) else data, *args, **options)
            return found if device is None else found.to(device)

        return make

    with _Factories():
        try:
            for name, original in originals.items():
                setattr(torch, name, made(original))
            Tensor.new_tensor = lambda self, data, **options: torch.tensor(  # type: ignore[assignment,misc]
                data, **{"dtype": self.dtype, "device": self.device, **options}
            )
            yield
        finally:
            for name, original in originals.items():
                setattr(torch, name, original)
            Tensor.new_tensor, Tensor.numpy = new_tensor, numpy  # type: ignore[method-assign]


def moved(module: nn.Module) -> nn.Module:
    """A copy of a module on the device."""
    return copy.deepcopy(module).to(DEVICE)


_KEPT: list[torch.library.Library] = []  # what is registered ends with its library


def register() -> None:
    """Once in a process."""
    backend_registration._setup_privateuseone_for_python_backend(DEVICE)
    library = torch.library.Library("aten", "IMPL")
    for name in ("empty.memory_format", "empty_strided"):  # of torch's own code, which sees no mode
        packet, _, overload = name.partition(".")
        made = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(
            name, lambda *args, made=made, **kwargs: computed(made, args, {**kwargs, "device": DEVICE}), "PrivateUse1"
        )
    library.impl("_copy_from", _copied, "PrivateUse1")
    _KEPT.append(library)


def _copied(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """What torch's own code calls where it makes a tensor of a list of indices."""
    found, into = (x.here if isinstance(x, There) else x for x in (source, target))
    into.copy_(found)
    return target
