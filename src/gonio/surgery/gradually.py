"""`convert_gradually_`: blend from the plain to the decoupled product during training."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import Optimizer

from gonio.editing.edit import Edit, Edited
from gonio.editing.steps import check_optimizer, expect_steps_, watch
from gonio.editing.where import Where, select
from gonio.errors import AlreadyAppliedError, InvalidArgumentError, with_article
from gonio.messages import say
from gonio.nn.decoupled import Decoupled

_CONVERTED: weakref.WeakSet[Decoupled] = weakref.WeakSet()  # layers whose share an optimizer moves


@dataclass(frozen=True)
class Conversion(Edited):
    """The :class:`gonio.Edited` of :func:`convert_gradually_`; `undo_()` ends the conversion.

    Example:
        >>> layer = gonio.nn.DecoupledLinear(3, 2)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> gonio.convert_gradually_(layer, optimizer, steps=10).share
        0.0
    """

    _layers: tuple[Decoupled, ...] = field(repr=False, compare=False)

    @property
    def share(self) -> float:
        """The share of the decoupled product in the output, from 0 to 1."""
        blend = self._layers[0].blend
        return 1.0 if blend is None else float(blend)


def convert_gradually_(
    model: nn.Module, optimizer: Optimizer, *, steps: int, start: int | None = None, where: Where = None
) -> Conversion:
    r"""Blend from the plain product of trained layers to their decoupled product.

    The output is :math:`(1 - t) \lVert w \rVert \lVert x \rVert \cos\theta + t\, h\, g(\theta)` (plus the
    bias), where :math:`t` rises from 0 by 1/`steps` after each step of the optimizer. At :math:`t = 1` the
    plain product is dropped, and costs nothing any more.

    The share :math:`t` is the buffer `blend` of each layer, also at 1, until `undo_()`. A copy of the model keeps the
    share that it was copied with, and ``AveragedModel`` takes over the model's at each update: make it after this call.
    A state dict contains the share, and loads into a model in conversion, which goes on from that share, as into a
    fresh one.

    Args:
        model: its decoupled layers are changed in place; convert the layers first.
        optimizer: counts the steps.
        steps: until the plain product is dropped.
        start: steps that were taken already. None resumes where a loaded state or a copied layer is, and starts at 0
            otherwise.
        where: which layers; None for every decoupled layer.

    Returns: :class:`Conversion`, an `Edited` with the `share`. Its `undo_()` ends the conversion: the layers compute
        the decoupled product alone, as before.

    Raises:
        NoMatchError: if no decoupled layer is selected.
        InvalidArgumentError: if `steps` or `start` is out of range, or the optimizer is not of this model.
        AlreadyAppliedError: if one of the layers is being converted.

    Example:
        >>> linear = nn.Linear(3, 2)
        >>> layer = gonio.nn.DecoupledLinear.from_linear(linear)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        >>> conversion = gonio.convert_gradually_(layer, optimizer, steps=2)
        >>> x = torch.eye(3)
        >>> torch.allclose(layer(x), linear(x))
        True
        >>> optimizer.step(); optimizer.step(); conversion.share, layer.blends
        (1.0, False)

    References:
        W. Liu et al., "Decoupled Networks", CVPR 2018, advises to start from a trained plain
        network. https://arxiv.org/abs/1804.08071

    Differs: the paper changes the operator at once.
    """
    if not (isinstance(steps, int) and steps >= 1 and 0 <= (start or 0) < steps):
        found, do = f"steps={steps}, start={start}", "Pass steps >= 1 and 0 <= start < steps."
        raise InvalidArgumentError("convert_gradually_: invalid schedule", found, do)
    check_optimizer(optimizer, model, "convert_gradually_")
    chosen = select(model, where, verb="convert_gradually_", can_act=cannot_convert)
    layers = tuple(site.module for site in chosen if isinstance(site.module, Decoupled))
    for site in chosen:
        if site.module in _CONVERTED:
            raise AlreadyAppliedError("convert_gradually_", site.path, "a gradual conversion")
    with Edit(model, "convert_gradually_") as edit:
        for site, layer in zip(chosen, layers, strict=True):
            edit.on_undo(_restorer(layer))
            done = float(layer.blend) if start is None and layer.blend is not None else (start or 0) / steps
            layer.set_blend_(done, ended=done == 1)
            edit.changed(site.path, say("plain → decoupled product in {steps} steps", steps=steps))
        edit.on_undo(_count_steps_(optimizer, layers, steps))
        mine = {id(p) for layer in layers for p in layer.parameters()}
        expect_steps_(edit, optimizer, {name: p for name, p in model.named_parameters() if id(p) in mine})
    return Conversion(**vars(edit.done()), _layers=layers)


def cannot_convert(module: nn.Module) -> str | None:
    """Why a module cannot be converted gradually; None if it can."""
    kind = with_article(type(module).__name__)
    return None if isinstance(module, Decoupled) else f"it is {kind}, not a decoupled layer"


def _restorer(layer: Decoupled) -> Callable[[], None]:
    before = None if layer.blend is None else layer.blend.clone()
    ended = before is not None and not layer.blends
    return lambda: layer.set_blend_(before, ended=ended)


def _count_steps_(optimizer: Optimizer, layers: Sequence[Decoupled], steps: int) -> Callable[[], None]:
    """Move the share of the layers after each step of the optimizer; returns the function that ends it.

    The share is read when it should be 1 and after a state was loaded, and not in each step: that would wait for the
    device.
    """

    def missing() -> int:
        return steps - round(steps * min(1.0 if layer.blend is None else float(layer.blend) for layer in layers))

    def loaded() -> int:
        return sum(layer.loads for layer in layers)

    left, seen = missing(), loaded()

    @torch.no_grad()
    def after_step(_: Optimizer) -> None:
        nonlocal left, seen
        if seen != loaded():
            left, seen = missing(), loaded()
        elif left <= 0:
            return
        for layer in layers:
            if layer.blend is not None:
                layer.blend.add_(1 / steps).clamp_(max=1)
        left -= 1
        if left <= 0 and (left := missing()) == 0:
            for layer in layers:
                layer.set_blend_(1.0, ended=True)

    end_watch = watch(optimizer, after=after_step, verb="convert_gradually_")
    _CONVERTED.update(layers)

    def end() -> None:
        end_watch()
        _CONVERTED.difference_update(layers)

    return end
