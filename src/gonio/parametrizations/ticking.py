"""Power iterations, once per optimizer step and nowhere else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gonio.errors import InvalidArgumentError, NoMatchError
from gonio.geometry.precision import full_precision, widen
from gonio.parametrizations.covering import Covered, child_name
from gonio.parametrizations.spectral_norm import SpectralNorm
from gonio.parametrizations.spectral_views import SpectralView

__all__ = ["tick_", "tick_on_step"]

# Layers of one shape are iterated as one stack, which copies their weights. On CPU a copy costs more than
# the calls it saves, except for small layers (64 KiB: measured where the two meet).
_SMALL = 2**14
_Job = tuple[SpectralNorm, Tensor]


@torch.no_grad()
def tick_(model: nn.Module, *, iterations: int = 1) -> int:
    """Advance the singular vectors of every spectral norm in a model, in place.

    To be called after each optimizer step; :func:`tick_on_step` does that. Layers of equal shape are
    advanced together. Everything else of the model is left alone, the random generators included.

    Args:
        model: any module; a parametrization that several layers share is advanced once.
        iterations: power iterations; more after a large change, such as averaging weights.

    Returns:
        How many parametrizations were advanced.

    Raises:
        InvalidArgumentError: if `iterations` is below 1.

    Example:
        >>> layer = nn.Linear(8, 8)
        >>> sn = gonio.parametrizations.attach(layer, "weight", gonio.parametrizations.SpectralNorm())
        >>> raw = next(layer.parameters())
        >>> _ = raw.data.copy_(torch.diag(torch.arange(1.0, 9.0)))  # a step much larger than any optimizer's
        >>> sn.holds(layer.weight)
        False
        >>> gonio.parametrizations.tick_(layer, iterations=100), sn.holds(layer.weight)
        (1, True)
    """
    if iterations < 1:
        raise InvalidArgumentError("tick_() needs iterations >= 1", f"{iterations}", "Use 1 per step.")
    jobs = list(_jobs(model))
    for batch in _batches(jobs):
        raw = batch[0][1]
        with full_precision(raw) if torch.is_autocast_enabled(raw.device.type) else nullcontext():
            _advance_(batch, iterations)
    return len(jobs)


def tick_on_step(optimizer: Optimizer, model: nn.Module) -> RemovableHandle:
    """Call :func:`tick_` after every step that the optimizer takes.

    A step that a gradient scaler skips takes no tick.

    Args:
        optimizer: its post-step hook is used; pickles and state dicts of it do not contain the hook.
        model: what is ticked; layers parametrized later are included.

    Returns:
        A handle; ``handle.remove()`` ends it.

    Raises:
        NoMatchError: if nothing in the model needs ticks.

    Example:
        >>> layer = nn.Linear(4, 4)
        >>> _ = gonio.parametrizations.attach(layer, "weight", gonio.parametrizations.SpectralNorm())
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> handle = gonio.parametrizations.tick_on_step(optimizer, layer)
        >>> layer(torch.ones(1, 4)).sum().backward(); optimizer.step()
        >>> handle.remove()
    """
    if not any(True for _ in _jobs(model)):
        raise NoMatchError("tick_on_step", "the model", [])

    def after(*_: Any) -> None:
        tick_(model)

    return optimizer.register_step_post_hook(after)


def _jobs(model: nn.Module) -> Iterator[_Job]:
    """Each bound spectral norm once, with the tensor it normalises."""
    seen: set[int] = set()
    for module in model.modules():
        if not isinstance(module, Covered):
            continue
        for name in module.covered_names:
            found, raw = module._modules[child_name(name)], module._parameters.get(name)
            if isinstance(found, SpectralNorm) and raw is not None and id(found) not in seen:
                seen.add(id(found))
                yield found, _whole(raw)


def _whole(raw: Tensor) -> Tensor:
    """A sharded tensor gathered, because each process keeps the vectors of the whole weight."""
    return raw.full_tensor() if hasattr(raw, "full_tensor") else raw


def _batches(jobs: list[_Job]) -> Iterator[list[_Job]]:
    """Jobs of the same kind, shape, device and dtype, where stacking them pays."""
    groups: dict[Any, list[_Job]] = defaultdict(list)
    for job in jobs:
        parametrization, raw = job
        alone = raw.is_cpu and raw.numel() > _SMALL
        groups[id(parametrization) if alone else (parametrization.how, raw.device, raw.dtype)].append(job)
    yield from groups.values()


def _advance_(batch: list[_Job], iterations: int) -> None:
    how = batch[0][0].how
    if how is None:
        return
    matrices = [how.matrices(widen(raw)) for _, raw in batch]
    buffers = [{name: b for name, b in p._buffers.items() if b is not None} for p, _ in batch]
    if len(batch) > 1 or not how.step_alone_(matrices[0], buffers[0], iterations):
        _step_(how, matrices, buffers, iterations)
    for parametrization, _ in batch:
        parametrization.ticked()


def _step_(how: SpectralView, matrices: list[Tensor], buffers: list[dict[str, Tensor]], iterations: int) -> None:
    """Weights of one shape as one stack."""
    together = _joined(matrices)
    state = {name: _joined([each[name].to(together.dtype) for each in buffers]) for name in buffers[0]}
    for _ in range(iterations):
        state = how.step(together, state)
    for name, following in state.items():
        for each, part in zip(buffers, following.chunk(len(buffers)), strict=True):
            if part is not each[name]:
                each[name].copy_(part)


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]
