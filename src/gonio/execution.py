"""How torch executes an operation: the one predicate that chooses between a plain form and a faster second one.

Compilers, exports, tracers, function transforms (`torch.func`), forward-mode differentiation and tensor subclasses
(sharded and fake tensors) get the plain form of every formula. This file isolates the private functions of torch
that tell them apart. In a training of several processes, :func:`total` sums over them. :func:`one_thread` leaves the
other cores alone.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from gonio.errors import first_line

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
else:  # recipes read annotations; a torch that was built without `torch.distributed` has no such class
    ProcessGroup = getattr(dist, "ProcessGroup", type("ProcessGroup", (), {}))


def ordinary_eager(*tensors: Tensor) -> bool:
    """Whether operations on these tensors run one by one, under reverse-mode differentiation at most.

    Example:
        >>> from gonio.execution import ordinary_eager
        >>> ordinary_eager(torch.ones(2)), torch.func.vmap(lambda x: x * ordinary_eager(x))(torch.ones(2))
        (True, tensor([0., 0.]))
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    ):
        return False
    for x in tensors:  # noqa: SIM110 - a generator takes longer than all of the above
        if type(x) is not Tensor and type(x) is not nn.Parameter:
            return False
    return True


_COUNTING = threading.Lock()
_inside, _usual = 0, 1  # threads of Python in `one_thread`, and torch's number of threads outside


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch computes with one thread: LAPACK takes up to twice as long with two for matrices of 64 rows.

    The number is one of the process. It is restored at the end, also where several threads of Python overlap here.

    Example:
        >>> from gonio.execution import one_thread
        >>> with one_thread():
        ...     torch.get_num_threads()
        1
    """
    global _inside, _usual
    with _COUNTING:
        _usual = _usual if _inside else torch.get_num_threads()
        _inside += 1
    torch.set_num_threads(1)
    try:
        yield
    finally:
        with _COUNTING:
            _inside -= 1
            torch.set_num_threads(_usual)


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """``function.apply`` of tensors that :func:`ordinary_eager` accepts, without what it does for other tensors.

    That is to look for transforms and to unwrap what they left over, which takes a few microseconds per call.
    """
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]


def derivatives(outputs: Any, inputs: Sequence[Tensor], along: Any = None, **options: bool) -> tuple[Any, ...]:
    """``torch.autograd.grad`` through a model, whose own functions may raise anything in their backward.

    Raises:
        RuntimeError: whatever they raised, as where torch has no derivative.

    Example:
        >>> from gonio.execution import derivatives
        >>> x = torch.ones(2, requires_grad=True)
        >>> derivatives((3 * x).sum(), [x])
        (tensor([3., 3.]),)
    """
    try:
        return torch.autograd.grad(outputs, inputs, along, **options)
    except RuntimeError:
        raise
    except Exception as error:
        raise RuntimeError(first_line(error, kind=True)) from error


def leaves_of(value: Tensor) -> list[Tensor]:
    """The tensors that require a gradient and that `value` was computed from, each once, from the derivative's graph.

    Example:
        >>> from gonio.execution import leaves_of
        >>> layer = nn.Linear(2, 3)
        >>> len(leaves_of(layer(layer(torch.ones(3, 2)).T[:, :2])))
        2
    """
    waiting, seen, found = [value.grad_fn], set[Any](), list[Tensor]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            found.append(leaf)
        waiting += [before for before, _ in node.next_functions]
    return found


@contextmanager
def as_usual_saved() -> Iterator[None]:
    """Inside, autograd saves what derivatives take, whatever hooks of checkpointing are around.

    Hooks that return what they are given would do as well, but for outputs that are saved: those would never be freed.
    torch 2.6 does not tell which hooks are set, and they stay.
    """
    autograd, held = cast(Any, torch._C._autograd), []
    top = getattr(autograd, "_top_saved_tensors_default_hooks", lambda _: None)
    while (hooks := top(True)) is not None:
        autograd._pop_saved_tensors_default_hooks()
        held.append(hooks)
    try:
        yield
    finally:
        for pack, unpack in reversed(held):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


def autocast_is_on(x: Tensor) -> bool:
    """Whether autocast acts on operations of `x`; never for meta tensors, on which torch refuses the question."""
    return torch._C._is_any_autocast_enabled() and not x.is_meta and torch.is_autocast_enabled(x.device.type)


def inside_backward() -> bool:
    """Whether the autograd engine is running, as in the recomputation of a checkpointed forward."""
    if torch.compiler.is_compiling():
        return False  # a compiled graph recomputes below this level
    return bool(torch._C._current_graph_task_id() != -1)


@cache
def count_uncounted_steps() -> None:
    """Let all steps of optimizers raise the version of the parameters that they change.

    Torch's operations do so, but for those of fused optimizers, and for those on lists of shards (`foreach`).
    """
    register_optimizer_step_post_hook(_count_step)


def _count_step(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        fused = group.get("fused")
        changed = [p for p in group["params"] if p.grad is not None and (fused or is_sharded(p))]
        torch.autograd.graph.increment_version(changed)


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor; without an import of `torch.distributed.tensor`, which takes half a second."""
    return type(tensor) not in (Tensor, nn.Parameter) and hasattr(tensor, "device_mesh")


def replicated(x: Any) -> Tensor:
    """A DTensor with its partial sums added and its shards gathered in every process; other tensors unchanged."""
    if not is_sharded(x):
        return x
    from torch.distributed.tensor import Replicate

    whole: Tensor = x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)
    return whole


def replicated_like(x: Tensor, reference: Any) -> Tensor:
    """A plain tensor with the same values in every process, as a DTensor if `reference` is one."""
    if not is_sharded(reference):
        return x
    from torch.distributed.tensor import DTensor, Replicate

    mesh = reference.device_mesh
    made: Tensor = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return made


def cut_like(x: Tensor, reference: Any) -> Tensor:
    """A plain tensor with the same values in every process, as the shards of a DTensor; differentiable."""
    everywhere: Any = replicated_like(x, reference)
    cut: Tensor = everywhere.redistribute(placements=reference.placements)
    return cut


def sharded_like(x: Tensor, reference: Any) -> Tensor:
    """A whole tensor as the shards, device and dtype of `reference` if that is a DTensor; else unchanged.

    They are the shards of the first rank's tensor, so the result does not depend on the number of processes.
    """
    if not is_sharded(reference):
        return x
    from torch.distributed.tensor import distribute_tensor

    values = x.to(device=reference.device, dtype=reference.dtype)
    return distribute_tensor(values, reference.device_mesh, reference.placements)


def loaded(*names: str) -> tuple[type, ...]:
    """The classes of these names, `package.module:Class`, without those whose module nobody has imported.

    Nothing is an instance of a class that is not there, so facts on classes of other packages cost no import.

    Example:
        >>> from gonio.execution import loaded
        >>> loaded("torch.nn:Linear", "no_such_package:Layer")
        (<class 'torch.nn.modules.linear.Linear'>,)
    """
    found = (getattr(sys.modules.get(module), kind, None) for module, _, kind in (n.partition(":") for n in names))
    return tuple(kind for kind in found if isinstance(kind, type))


def device_of(model: nn.Module) -> torch.device:
    """That of the model's first parameter."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def several_ranks(group: ProcessGroup | None = None) -> bool:
    """Whether a process group, by default the one of all processes, has been started with more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def total(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """The sum of `x` over a group (all processes), with the gradient; each must call it, in the same order."""
    result: Tensor = _Total.apply(x, group)
    return result


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        result = x.clone()
        dist.all_reduce(result, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # every process's loss depends on every process's summand
        return total(grads[0], ctx.group), None
