"""What a batch becomes on its way through the layers, and its gradient on the way back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gonio.measuring.batch_gap import train_eval_gap
from gonio.measuring.gradients import Gradient, leads_to, measure_gradients
from gonio.measuring.output_angles import off_right_angle
from gonio.parametrizations.base import Parametrization
from gonio.surgery import Site, sites
from gonio.surgery.equivalent import call, evaluating
from gonio.surgery.wrapping import run_eagerly, unwrapped

__all__ = ["Signal", "measure_signals"]

_COMPUTING = (Parametrization, nn.utils.parametrize.ParametrizationList)


@dataclass(frozen=True, kw_only=True)
class Signal:
    """One layer's output on a batch, in evaluation mode, at the layer's first call, and the gradient there.

    The gradient is that of the model's output multiplied by standard normal numbers and summed; its figures
    are None where none arrives. A batch norm that has seen no batch yet, whose statistics say nothing,
    uses those of this batch, as it will in the first step of training.

    Attributes:
        mean, std, rms: over all entries.
        gain, norm_ratio: rms and norm of the output over those of the input; None where the layer has no
            tensor input.
        zeros: share of entries that are exactly 0.
        units, dead_units: channels (dim 1, or the last of a 2- or 3-d output), and those that are 0 throughout.
        nonfinite: entries that are NaN or infinite; they are left out of the other figures.
        calls: how often the layer ran.
        angles_read, angles_exact: root mean square of 90° − θ over pairs of filters, in degrees, as the signs of the
            outputs show it (freed of what a finite sample adds) and as the weights have it. They agree where inputs
            are uniform in direction; None but for linear layers and convolutions with 2 to 2048 filters per group.
        gradient_rms: of the gradient at the output.
        gradient_gain, gradient_norm_ratio: rms and norm of the gradient at the input, through this layer
            alone, over those at the output.
        train_eval_gap: of a norm that keeps running statistics: root mean square of what it would give with the
            statistics of this batch minus what it gives with the running ones, over the deviation of the latter. 0
            where they agree; a batch of the training's own data shows about √(3/(2N)) for N values per channel. None
            for norms that have seen no batch, and over several processes.
        branch: "ends" where the layer's own weights are all 0, so that it gives 0 whatever comes in: the end of
            a residual branch that starts as the identity, and no dead layer. "waits" where the gradient is
            exactly 0 for that reason, or because the branch is multiplied by 0: it begins to learn when the
            zero has moved. Else "".
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    mean: float
    std: float
    rms: float
    gain: float | None
    norm_ratio: float | None
    zeros: float
    units: int
    dead_units: int
    nonfinite: int
    calls: int
    angles_read: float | None = None
    angles_exact: float | None = None
    gradient_rms: float | None = None
    gradient_gain: float | None = None
    gradient_norm_ratio: float | None = None
    train_eval_gap: float | None = None
    branch: str = ""


def measure_signals(model: nn.Module, batch: Any) -> tuple[tuple[Signal, ...], tuple[str, ...]]:
    """The outputs of all layers without sub-layers, in the order in which they run, and notes.

    The model runs twice, in evaluation mode and without compilation, the second time with its backward; modes,
    buffers, gradients and hooks are as before afterwards, also if it raises.
    """
    plain = unwrapped(model)  # hooks set after a compiled call would never fire
    computing = {part for module in plain.modules() if isinstance(module, _COMPUTING) for part in module.modules()}
    layers = {s.module: s for s in sites(plain) if _is_layer(s.module) and s.module not in computing}
    with run_eagerly(plain), evaluating(plain), _first_statistics(plain):
        forward = _forward(plain, batch, layers)
        backward, why = measure_gradients(plain, batch, list(forward))
    dead = [backward[m].node for m, s in forward.items() if m in backward and _is_dead(m, s)]
    signals = [_joined(m, s, backward.get(m), dead) for m, s in forward.items()]
    return tuple(signals), (f"Nothing is said on gradients: {why}.",) if why else ()


def _is_layer(module: nn.Module) -> bool:
    """Whether a module has no sub-layers but those that compute its weight."""
    lists = module._modules.get("parametrizations")
    return all(child is lists or isinstance(child, _COMPUTING) for child in module.children())


@contextmanager
def _first_statistics(model: nn.Module) -> Iterator[None]:
    """Batch norms that have seen no batch use the statistics of this one, and keep theirs as they are."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    norms = [m for m in model.modules() if isinstance(m, kinds) and m.track_running_stats]
    fresh = [m for m in norms if m.num_batches_tracked is not None and not m.num_batches_tracked]
    handles = [norm.register_forward_pre_hook(_use_batch) for norm in fresh]
    try:
        yield
    finally:
        for norm, handle in zip(fresh, handles, strict=True):
            handle.remove()
            norm.track_running_stats, norm.training = True, False


def _use_batch(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    several = inputs[0].numel() > inputs[0].shape[1]  # values per channel; of one there is no variance
    norm.training = several
    norm.track_running_stats = not several  # type: ignore[assignment]


@torch.no_grad()
def _forward(model: nn.Module, batch: Any, layers: dict[nn.Module, Site]) -> dict[nn.Module, Signal]:
    seen = _Outputs(layers)
    handles = [layer.register_forward_pre_hook(seen.before) for layer in layers]
    handles += [layer.register_forward_hook(seen.after) for layer in layers]
    try:
        call(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return seen.found


class _Outputs:
    """Hooks that measure each layer's first call, its input before a layer that works in place changes it."""

    def __init__(self, layers: dict[nn.Module, Site]) -> None:
        self.layers = layers
        self.found: dict[nn.Module, Signal] = {}
        self.fed: dict[nn.Module, tuple[float, int]] = {}  # rms and number of entries

    def before(self, module: nn.Module, inputs: Any) -> None:
        source = _first_tensor(inputs)
        if module not in self.fed and source is not None:
            self.fed[module] = _rms(source), source.numel()

    def after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if module in self.found:
            self.found[module] = replace(self.found[module], calls=self.found[module].calls + 1)
            return
        tensor = _first_tensor(output)
        if tensor is not None:
            figures = _figures(tensor, *self.fed.get(module, (0.0, 0)))
            figures["angles_read"], figures["angles_exact"] = off_right_angle(module, tensor)
            figures["train_eval_gap"] = train_eval_gap(module, inputs, output)
            ends = figures["rms"] == 0 and figures["gain"] == 0 and _all_zero(module)
            path, kind = self.layers[module].path, type(module).__name__
            self.found[module] = Signal(path=path, kind=kind, calls=1, branch="ends" if ends else "", **figures)


def _all_zero(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and not any(bool(parameter.any()) for parameter in parameters)


def _is_dead(module: nn.Module, signal: Signal) -> bool:
    return signal.rms == 0 and signal.branch == "" and next(module.parameters(), None) is None


def _joined(module: nn.Module, signal: Signal, gradient: Gradient | None, dead: list[Any]) -> Signal:
    if gradient is None:
        return signal
    stopped = gradient.output == 0 and signal.rms > 0
    waits = stopped and not any(leads_to(node, gradient.node) for node in dead)
    return replace(
        signal,
        gradient_rms=gradient.rms,
        gradient_gain=gradient.gain,
        gradient_norm_ratio=gradient.norm_ratio,
        branch=signal.branch or ("waits" if waits else ""),
    )


def _first_tensor(value: Any) -> Tensor | None:
    """The first floating-point tensor in any nesting of tuples, lists and dicts."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
            return leaf.detach()
    return None


def _figures(output: Tensor, fed: float, entries: int) -> dict[str, Any]:
    units = output.movedim(1 if output.ndim > 3 else -1, 0).flatten(1) if output.ndim > 1 else output.unsqueeze(0)
    finite = torch.isfinite(output)
    values = output[finite].double()
    rms = float(values.square().mean().sqrt()) if values.numel() else 0.0
    gain = rms / fed if fed else None
    return {
        "shape": tuple(output.shape),
        "mean": float(values.mean()) if values.numel() else 0.0,
        "std": float(values.std(correction=0)) if values.numel() else 0.0,
        "rms": rms,
        "gain": gain,
        "norm_ratio": None if gain is None else gain * sqrt(output.numel() / entries),
        "zeros": float((output == 0).double().mean()),
        "units": units.shape[0],
        "dead_units": int((units == 0).all(1).sum()),
        "nonfinite": int((~finite).sum()),
    }


def _rms(tensor: Tensor) -> float:
    values = tensor[torch.isfinite(tensor)].double()
    return float(values.square().mean().sqrt()) if values.numel() else 0.0
