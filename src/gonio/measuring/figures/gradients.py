"""The gradient of a random linear function of a model's output, at each layer's output and input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree

from gonio.seeding import generator
from gonio.surgery.equivalent import call


@dataclass
class Gradient:
    """Sums of squares of the gradient at a layer's output, and at its input through this layer alone."""

    output: float | None = None  # None where no gradient arrives
    outputs: int = 0
    input: float | None = None
    inputs: int = 0
    node: Node | None = None  # where autograd computes the layer's output

    @property
    def rms(self) -> float | None:
        return None if self.output is None else sqrt(self.output / self.outputs)

    @property
    def norm_ratio(self) -> float | None:
        """Norm of the gradient at the input over that at the output."""
        return sqrt(self.input / self.output) if self.output and self.input is not None else None

    @property
    def gain(self) -> float | None:
        return None if self.norm_ratio is None else self.norm_ratio * sqrt(self.outputs / self.inputs)

    def at_output(self, gradient: Tensor) -> None:
        self.output, self.outputs = float(gradient.double().square().sum()), gradient.numel()

    def at_input(self, gradient: Tensor) -> None:
        self.input, self.inputs = float(gradient.double().square().sum()), gradient.numel()


def measure_gradients(
    model: nn.Module, batch: Any, layers: Sequence[nn.Module], *, seed: int = 0
) -> tuple[dict[nn.Module, Gradient], str]:
    """The gradient at each layer's first call; or an empty dict and the reason.

    The output is multiplied by standard normal numbers and summed. No `.grad` is changed. Frozen parameters take
    part, because gradients pass through their layers too.
    """
    probe = _Probe()
    handles = [layer.register_forward_pre_hook(probe.before) for layer in layers]
    handles += [layer.register_forward_hook(probe.after) for layer in layers]
    try:
        with _unfrozen(model), torch.enable_grad():
            outputs = pytree.tree_leaves(call(model, batch))
            probe.recording = False  # a checkpointed part calls its layers again in the backward
            roots = [leaf for leaf in outputs if isinstance(leaf, Tensor) and leaf.requires_grad]
            if not roots:
                return {}, "its output has no gradient"
            draws = [torch.randn(t.shape, generator=generator(seed, "cotangent", i)) for i, t in enumerate(roots)]
            inputs = [*probe.sources, *(p for p in model.parameters() if p.requires_grad)]
            torch.autograd.grad(roots, inputs, [d.to(t) for d, t in zip(draws, roots, strict=True)], allow_unused=True)
    except RuntimeError as error:  # no derivative, or an operation in place that autograd cannot follow
        return {}, str(error).split("\n")[0]
    finally:
        for handle in handles:
            handle.remove()
    return probe.found, ""


class _Probe:
    """Hooks that record each layer's first call."""

    def __init__(self) -> None:
        self.found: dict[nn.Module, Gradient] = {}
        self.sources: list[Tensor] = []  # inputs without a gradient of their own
        self.recording = True

    def before(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        first = self.recording and module not in self.found
        gradient = self.found.setdefault(module, Gradient())
        if getattr(module, "inplace", False):
            return None  # it must write into the tensor that it was given
        for index, argument in enumerate(arguments):
            if _carries_signal(argument):
                # A separate view, so that the gradients of other layers to the same tensor are not counted; in
                # every call, because a checkpointed part must compute the same twice.
                own = argument.view_as(argument) if argument.requires_grad else argument.detach().requires_grad_()
                if first:
                    self.sources += [own] if own.is_leaf else []
                    own.register_hook(gradient.at_input)
                return (*arguments[:index], own, *arguments[index + 1 :])
        return None

    def after(self, module: nn.Module, _arguments: Any, output: Any) -> None:
        gradient = self.found.get(module)
        if not self.recording or gradient is None or gradient.node is not None:
            return
        tensor = next((leaf for leaf in pytree.tree_leaves(output) if _carries_signal(leaf)), None)
        if tensor is not None and tensor.grad_fn is not None:
            tensor.register_hook(gradient.at_output)
            gradient.node = tensor.grad_fn


def _carries_signal(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0


@contextmanager
def _unfrozen(model: nn.Module) -> Iterator[None]:
    """All parameters require gradients inside; restored afterwards."""
    frozen = [p for p in model.parameters() if p.is_floating_point() and not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def leads_to(later: Node | None, earlier: Node | None) -> bool:
    """Whether the result of `earlier` is an input of `later`, directly or through other nodes."""
    pending, seen = [later], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        if node is earlier:
            return True
        seen.add(node)
        pending += [following for following, _ in node.next_functions]
    return False
