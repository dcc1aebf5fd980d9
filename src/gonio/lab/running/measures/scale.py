"""What changes when scale is moved between layers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gonio.errors import NotApplicableError
from gonio.geometry import fake_quantize
from gonio.lab.running.measures import FinishedRun, measure
from gonio.lab.running.measures.scores import score_of
from gonio.nn import DecoupledConv2d, angular, magnitude
from gonio.seeding import generator
from gonio.surgery import balance_, equivalent, fold_, rotate_, swap_
from gonio.surgery.turns import STREAM, keeping_mean, turns_of

PROBES = 256  # test examples on which a measure that needs gradients, signals or attacks is computed
_SAME = 1e-9  # largest relative deviation of outputs in float64 that counts as the same function


def weights_of(model: nn.Module) -> Iterator[tuple[Any, Tensor]]:
    """Every linear and convolutional layer in order, with its effective weight."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
            yield module, module.weight.detach()


@measure("%")
@torch.no_grad()
def penalty_change(
    run: FinishedRun, *, penalty: Literal["l2", "log"] = "l2", move: Literal["balance", "shift"] = "balance"
) -> float:
    """Change of a penalty on all weights in percent, when scale is moved between the layers of the trained model.

    The outputs in float64 must stay the same to 1e-9, or the run fails.

    Args:
        penalty: `l2`, the sum of squares; or `log`, the sum of the logarithms of the layers' norms.
        move: `balance`, to the least sum of squares; or `shift`, random factors of the layers with product 1.
    """
    model = copy.deepcopy(run.model).double().eval()
    before = _penalty(model, penalty)
    _moved(model, run, move=move, level="layer", spread=1.0)
    return 100 * (_penalty(model, penalty) - before) / abs(before)


def _penalty(model: nn.Module, penalty: str) -> float:
    norms = torch.stack([weight.double().norm() for _, weight in weights_of(model)])
    return float(norms.square().sum() if penalty == "l2" else norms.log().sum())


@measure("%", worst=0.0, better="max", reads=("%", "max"))
@torch.no_grad()
def int8_accuracy(run: FinishedRun, *, spread: float = 0.0, balance: bool = False, bits: int = 8) -> float:
    """Test accuracy with every weight rounded to integers of one scale per tensor, by :func:`fake_quantize`.

    Args:
        spread: first, random factors with this standard deviation of their log2 are moved between the neurons of
            successive layers; the function stays.
        balance: then, scale is moved back with :func:`gonio.balance_`. bits: of the integers, 0 for no rounding.
    """
    model = copy.deepcopy(run.model).double().eval()
    if spread:
        _moved(model, run, move="shift", level="neuron", spread=spread)
    if balance:
        _moved(model, run, move="balance", level="neuron", spread=0.0)
    for _, weight in weights_of(model):
        if bits:
            weight.copy_(fake_quantize(weight, bits=bits, per="tensor"))
    return score_of(run, model.to(next(run.model.parameters()).dtype))


@measure("%", worst=100.0, better="min", reads=(None, "min"))
@torch.no_grad()
def int4_cost(
    run: FinishedRun, *, axes: Literal["own", "principal"] = "own", turn: bool = False, bits: int = 4
) -> float:
    """By how much rounding to integers raises the loss, as a share of what it does with outlier channels.

    Every linear layer has one scale per tensor; gains of norms are folded into the layers first. The loss is that of
    the test split. Outlier channels: the residual stream is turned so that its channels are the singular vectors of all
    that reads and writes it, of which few are large.

    Args:
        axes: `own` or `principal`, those of the outlier channels, with which the share is 100 %.
        turn: then, the stream is turned with :func:`gonio.rotate_`. bits: of the integers.
    """
    cost, most = _rounded(run, axes, turn, bits), _rounded(run, "principal", False, bits)
    if most <= 0:
        raise NotApplicableError("rounding", "", "it costs nothing with outlier channels", "Round to fewer bits.")
    return 100 * cost / most


def _rounded(run: FinishedRun, axes: str, turn: bool, bits: int) -> float:
    """By how much rounding raises the loss. The function stays until the weights are rounded, or the run fails."""
    model, example = copy.deepcopy(run.model).double().eval(), run.task.test.inputs[:4]
    before = copy.deepcopy(model)
    fold_(model, example=example, gains=True)
    if axes == "principal":
        along_principal_axes_(model, example)
    if turn:
        rotate_(model, ["stream"], example=example, seed=run.seed)
    found = equivalent(before, model, example=example)
    if found.relative > _SAME:
        raise NotApplicableError(
            "moving outliers", "", f"its outputs change ({found})", "Use a norm before each block."
        )
    for module, weight in weights_of(model):
        if isinstance(module, nn.Linear):
            weight.copy_(fake_quantize(weight, bits=bits, per="tensor"))
    return score_of(run, model.to(next(run.model.parameters()).dtype)) - score_of(run, run.model)


@torch.no_grad()
def along_principal_axes_(model: nn.Module, example: Any) -> None:
    """Turn each residual stream so that its channels are the singular vectors of the weights that read and write it."""
    found = turns_of(model, example, (STREAM,))
    for each in found.able:
        slots = [slot for slot in each.slots[0] if found.parameters[slot.tensor].ndim > 1]
        rows = torch.cat([found.parameters[s.tensor].double().movedim(s.dim, -1).flatten(0, -2) for s in slots])
        free = keeping_mean(torch.eye(each.size - 1)) if each.keeps_mean else torch.eye(each.size).double()
        axes = torch.linalg.svd((rows @ free)[:, int(each.keeps_mean) :], full_matrices=False)[2]
        turned = keeping_mean(axes) if each.keeps_mean else axes
        for name in each.tensors:
            found.parameters[name].copy_(each.turned(name, found.parameters[name], [turned]))


def _moved(model: nn.Module, run: FinishedRun, *, move: str, level: str, spread: float) -> None:
    """Move scale in place, and check that the function is the same."""
    before = copy.deepcopy(model)
    if move == "balance":
        balance_(model, level="layer" if level == "layer" else "neuron")
    else:
        _shift(model, level, spread, generator(run.seed, "shift"))
    found = equivalent(before, model, example=_standardised(run))
    if found.relative > _SAME:
        raise NotApplicableError("moving scale", "", f"its outputs change ({found})", "Use a chain with ReLU.")


def _shift(model: nn.Module, level: str, spread: float, draw: torch.Generator) -> None:
    """Random factors between successive layers of a chain; each factor leaves with its inverse."""
    chain = list(weights_of(model))
    for (module, weight), (_, later) in pairwise(chain):
        size = len(weight) if level == "neuron" else 1
        factors = torch.exp2(spread * torch.randn(size, generator=draw, dtype=weight.dtype)).expand(len(weight))
        weight.mul_(factors.view(-1, *(1,) * (weight.ndim - 1)))
        if module.bias is not None:
            module.bias.mul_(factors)
        inverse = factors.repeat_interleave(later.shape[1] // len(weight)).reciprocal()
        later.mul_(inverse.view(1, -1, *(1,) * (later.ndim - 2)))


@measure("%")
def shift_deviation(run: FinishedRun) -> float:
    """Largest change of the outputs, in percent, when random factors with product 1 move between the layers.

    It is 0 to rounding where the activations are positively homogeneous.
    """
    model = copy.deepcopy(run.model).double().eval()
    before = copy.deepcopy(model)
    with torch.no_grad():
        _shift(model, "layer", 1.0, generator(run.seed, "shift"))
    return 100 * equivalent(before, model, example=_standardised(run)).relative


@measure("%", start=True)
def rectified_deviation(run: FinishedRun, *, biases: Literal["kept", "zero"] = "kept") -> float:
    """Largest change of the outputs, in percent, when every convolution becomes the operator ‖w‖‖x‖·max(0, cos θ).

    Args:
        biases: of the convolutions, `kept` or set to `zero` first.
    """
    model = copy.deepcopy(run.model).double().eval()
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.bias is not None and biases == "zero":
            nn.init.zeros_(module.bias)
    changed = copy.deepcopy(model)
    parts: dict[str, Any] = {
        "magnitude": magnitude.Linear(),
        "angular": angular.RectifiedCosine(),
        "weighted": "linear",
    }
    swap_(changed, DecoupledConv2d.from_conv, where=nn.Conv2d, **parts)
    return 100 * equivalent(model, changed, example=_standardised(run)).relative


def _standardised(run: FinishedRun) -> Tensor:
    """The first test examples in float64, as the model sees them."""
    return run.task.outputs(nn.Identity(), run.task.test.inputs[:PROBES]).double()
