"""A forward hook that keeps a layer's outputs for one step.

Note [When a hook counts]
    Only a forward that training will go back through counts: in training mode, with grad, and not the
    recomputation that activation checkpointing runs inside the backward, which would count it twice. A hook
    that is registered after a module was compiled never fires, so taking nothing is an error, never zero.
    Registered before, it fires, also under ``fullgraph=True``.

Note [Outputs overwritten in place]
    ``nn.ReLU(inplace=True)`` overwrites the output that the hook keeps. At first a copy is kept as well; if
    nothing has changed the original by the time it is taken, later steps do without the copy.

Note [Copies of the model]
    A deep copy or a pickle of the model (an average of weights, a checkpoint) carries a hook that does
    nothing: nobody would take what it keeps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gonio.errors import NoActivationError

__all__ = ["Tap"]

# More forward passes than this without penalty() keep as many sets of activations alive.
MOST_KEPT = 64


class Tap:
    """The outputs of one layer since they were last taken.

    Args:
        module: the layer.
        path: what it is called in errors.
        without_bias: keep outputs less the layer's bias. Done at once: later a sharded bias is in pieces.
    """

    def __init__(self, module: nn.Module, path: str, *, without_bias: bool) -> None:
        self.path = path
        self._without_bias = without_bias and getattr(module, "bias", None) is not None
        self._kept: list[Tensor] = []
        self._originals: list[tuple[Tensor, int]] = []
        self._ignored: set[str] = set()
        self._copies = True
        self._live = True
        self._handle = module.register_forward_hook(self._see, prepend=True)  # before FSDP2 takes weights away

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
            raise NoActivationError([self.path], found, "Call penalty() at each step, or penalty.remove().")
        self._kept.append(self._own(module, output) if self._copies or self._without_bias else output)
        self._originals.append((output, output._version))

    def _own(self, module: nn.Module, output: Tensor) -> Tensor:
        """The output as a tensor that nobody else will overwrite."""
        if not self._without_bias:
            return output.clone()
        bias: Any = module.bias
        return output - bias.view(-1, *[1] * len(getattr(module, "kernel_size", ())))

    def take(self) -> list[Tensor]:
        """The outputs seen since the last time, and forget them.

        Raises:
            NoActivationError: if there are none, or if they were overwritten meanwhile.
        """
        kept, ignored = self._kept, self._ignored
        changed = any(tensor._version != version for tensor, version in self._originals)
        overwritten = changed and not (self._copies or self._without_bias)
        self._copies = changed
        self.forget()
        if not kept:
            raise NoActivationError([self.path], *_explanation(self._live, ignored))
        if overwritten:
            found = "its output was overwritten in place, which it was not in earlier steps"
            raise NoActivationError([self.path], found, "From the next step on a copy is kept.")
        return kept

    def forget(self) -> None:
        """Drop what was seen."""
        self._kept, self._originals, self._ignored = [], [], set()

    def remove(self) -> None:
        """Take the hook off the layer."""
        self._handle.remove()
        self._live = False
        self.forget()

    def __reduce__(self) -> tuple[Any, ...]:
        return _silent, (self.path,)  # Note [Copies of the model]


def _silent(path: str) -> Tap:
    tap = Tap.__new__(Tap)
    tap.path, tap._live = path, False
    return tap


def _why_ignored(module: nn.Module) -> str | None:
    if _in_backward():
        return "recomputed in the backward"
    if not module.training:
        return "in evaluation mode"
    return None if torch.is_grad_enabled() else "without gradients"


def _in_backward() -> bool:
    """Whether the autograd engine is running; torch has no public way to ask."""
    return torch._C._current_graph_task_id() != -1


def _explanation(live: bool, ignored: set[str]) -> tuple[str, str]:
    if not live:
        return "this penalty was removed", "Build a new one."
    if ignored == {"recomputed in the backward"} or ignored >= {"recomputed in the backward", "without gradients"}:
        return (
            "its forward ran only without gradients and again in the backward, as under reentrant checkpointing",
            "Use checkpoint(…, use_reentrant=False).",
        )
    if ignored:
        return f"it ran only {' and '.join(sorted(ignored))}", "Call penalty() in training steps alone."
    return (
        "it did not run since the last call, or was compiled before the penalty was built (hooks that are "
        "registered later never fire)",
        "Build the Penalty before torch.compile, and call it once after each forward.",
    )
