"""Forward hooks that keep the outputs of layers for one step.

Note [Which forward passes count]
    Only a forward pass whose graph training will differentiate counts: in training mode, with grad, and not the
    recomputation of activation checkpointing inside the backward. A hook that is registered after a module was
    compiled is never called, so an empty hook is an error, not a penalty of zero.

Note [Outputs overwritten in place]
    ``nn.ReLU(inplace=True)`` overwrites the output that the hook keeps. In the first step the hook keeps a copy; if
    nothing has changed the original by the time it is taken, later steps do without the copy.

Note [Copies of the model]
    A deep copy or a pickle of the model (an average of weights, a checkpoint) carries a hook that does nothing, because
    no penalty would take its outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gonio.errors import InvalidArgumentError, NoActivationError
from gonio.execution import ProcessGroup, inside_backward, is_sharded
from gonio.surgery.facts import only_reads

# More forward passes than this without penalty() keep as many sets of activations alive.
MOST_KEPT = 64


class OutputHook:
    """Keeps the outputs of one layer, called `path` in errors, until they are taken.

    `without_bias` keeps them minus the layer's bias, subtracted at once: later a sharded bias is in pieces.
    """

    def __init__(self, module: nn.Module, path: str, *, without_bias: bool) -> None:
        self.path = path
        self._without_bias = without_bias and getattr(module, "bias", None) is not None
        self._kept: list[Tensor] = []
        self._originals: list[tuple[Tensor, int]] = []
        self._ignored: set[str] = set()
        self._copies = True
        self._live = True
        self._handle = module.register_forward_hook(self._see, prepend=True)  # before FSDP2 frees the weights

    @only_reads
    def _see(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if not self._live:
            return
        if torch.compiler.is_compiling():
            if module.training and torch.is_grad_enabled():
                self._kept.append(self._own(module, output))
            return
        reason = _why_ignored(module)
        if reason is not None:
            self._ignored.add(reason)
            return
        if len(self._kept) >= MOST_KEPT:
            found = f"it ran {MOST_KEPT} times since penalty() was last called, and every output was kept"
            raise NoActivationError([self.path], found, "Call penalty() at each step, or penalty.undo_().")
        self._kept.append(self._own(module, output) if self._copies or self._without_bias else output)
        self._originals.append((output, output._version))

    def _own(self, module: nn.Module, output: Tensor) -> Tensor:
        """The output as a tensor that no other module overwrites."""
        if not self._without_bias:
            return output.clone()
        bias: Any = module.bias
        return output - bias.view(-1, *[1] * len(getattr(module, "kernel_size", ())))

    def take(self) -> list[Tensor]:
        """The outputs since the last call; the hook forgets them. Raises if there are none or they were overwritten."""
        if not self._live:
            raise NoActivationError([self.path], "this penalty was removed, or is a copy", "Build a new one.")
        kept, ignored = self._kept, self._ignored
        changed = any(tensor._version != version for tensor, version in self._originals)
        overwritten = changed and not (self._copies or self._without_bias)
        self._copies = changed
        self.forget()
        if not kept:
            raise NoActivationError([self.path], *_explanation(ignored))
        if overwritten:
            found = "its output was overwritten in place, which it was not in earlier steps"
            raise NoActivationError([self.path], found, "From the next step on a copy is kept.")
        return kept

    def forget(self) -> None:
        """Drop the outputs."""
        self._kept, self._originals, self._ignored = [], [], set()

    def remove(self) -> None:
        """Remove the hook from the layer; that of a copy is on none."""
        if self._live:
            self._handle.remove()
        self._live = False
        self.forget()

    def __reduce__(self) -> tuple[Any, ...]:
        return _inert_hook, (self.path,)  # Note [Copies of the model]


def _inert_hook(path: str) -> OutputHook:
    hook = OutputHook.__new__(OutputHook)
    hook.path, hook._live = path, False
    return hook


def _why_ignored(module: nn.Module) -> str | None:
    if inside_backward():
        return "recomputed in the backward"
    if not module.training:
        return "in evaluation mode"
    return None if torch.is_grad_enabled() else "without gradients"


def _explanation(ignored: set[str]) -> tuple[str, str]:
    if ignored == {"recomputed in the backward"} or ignored >= {"recomputed in the backward", "without gradients"}:
        return (
            "its forward ran only without gradients and again in the backward, as under reentrant checkpointing",
            "Use checkpoint(…, use_reentrant=False).",
        )
    if ignored:
        return f"it ran only {' and '.join(sorted(ignored))}", "Call penalty() in training steps only."
    return (
        "it did not run since the last call, or was compiled before the penalty was built (hooks that are "
        "registered later are never called), or the model uses its weight without calling it (as "
        "nn.MultiheadAttention uses out_proj)",
        "Build the Penalty before torch.compile, call it once after each forward, and exclude in `where` layers that "
        "are never called.",
    )


def data_parallel_group(model: nn.Module) -> ProcessGroup | None:
    """The process group of DistributedDataParallel, or of a one-dimensional FSDP2 mesh; else None.

    Under tensor parallelism alone every process has the whole batch.

    Raises:
        InvalidArgumentError: for a mesh of several dimensions: over which the batch is spread is not known.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        group: ProcessGroup = model.process_group
        return group
    meshes: Iterator[Any] = (p.device_mesh for p in model.parameters() if is_sharded(p))  # type: ignore[attr-defined]
    mesh = next(meshes, None)
    if mesh is None:
        return None
    from torch.distributed.fsdp import FSDPModule

    if mesh.ndim == 1 and not any(isinstance(module, FSDPModule) for module in model.modules()):
        return None
    if mesh.ndim > 1:
        raise InvalidArgumentError(
            "Penalty(process_group=…) is needed for a regularizer of outputs on a mesh of several dimensions",
            f"a mesh of shape {tuple(mesh.shape)}",
            "Pass the group of the processes that share a batch, such as torch.distributed.group.WORLD.",
        )
    sharded: ProcessGroup = mesh.get_group()
    return sharded
