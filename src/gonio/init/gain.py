"""Gains: factors on weights with which an activation preserves the size of the signal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import inf, isfinite, nan, pi, sqrt
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gonio.errors import InvalidArgumentError, UnknownNameError, check_range

Activation: TypeAlias = Callable[[Tensor], Tensor]
Kind: TypeAlias = Literal["rms", "std", "small", "torch", "trains"]
KINDS = get_args(Kind)
_TORCH = ("linear", "sigmoid", "tanh", "relu", "leaky_relu", "selu")  # that take no parameter
Gain: TypeAlias = float | str | Activation

ACTIVATIONS: dict[str, Activation] = {
    "linear": lambda z: z,
    "identity": lambda z: z,
    "relu": F.relu,
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "selu": F.selu,
    "celu": F.celu,
    "gelu": F.gelu,
    "silu": F.silu,
    "swish": F.silu,
    "mish": F.mish,
    "softplus": F.softplus,
    "softsign": F.softsign,
    "tanh": torch.tanh,
    "hardtanh": F.hardtanh,
    "sigmoid": torch.sigmoid,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "sin": torch.sin,
}

# Note [Quadrature]
# Gauss–Hermite nodes converge only as 1/n for activations with a kink. Gauss–Legendre on panels that end at
# every multiple of 1/2 has no kink of a usual activation (0, ±1, ±3, 6) inside a panel and an error of 1e-13;
# beyond ±16 the normal density is below 1e-56. Kinks and jumps elsewhere are found by bisection: a panel is
# halved until halving it changes neither moment.
REACH, PANEL, NODES = 16.0, 0.5, 16
TOLERANCE, DEPTH, MOST_PANELS = 1e-12, 40, 1 << 14


def _evaluate(activation: str | Activation, left: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of E[f(z)] for standard normal z and values of f at the nodes of each panel, (panels, nodes)."""
    nodes, weights = map(torch.from_numpy, np.polynomial.legendre.leggauss(NODES))
    z = left[:, None] + width[:, None] / 2 + width[:, None] / 2 * nodes
    w = width[:, None] / 2 * weights * torch.exp(-z * z / 2) / sqrt(2 * pi)
    return w, _apply(activation, z.flatten()).view_as(z)


def _quadrature(activation: str | Activation) -> tuple[Tensor, Tensor]:
    """Weights and values with which E[f(z)] and E[f(z)²] are sums; see Note [Quadrature]."""
    left = torch.arange(-REACH, REACH, PANEL, dtype=torch.float64, device="cpu")
    width = torch.full_like(left, PANEL)
    w, f = _evaluate(activation, left, width)
    size = float((w * f * f).sum().sqrt())
    weights, values = [], []
    for _ in range(DEPTH):
        halves = torch.stack([left, left + width / 2], 1).flatten(), (width / 2).repeat_interleave(2)
        finer, g = _evaluate(activation, *halves)
        change = [(w * f**k).sum(1) - (finer * g**k).sum(1).view(-1, 2).sum(1) for k in (1, 2)]
        split = (change[0].abs() > TOLERANCE * size) | (change[1].abs() > TOLERANCE * size * size)
        if not 0 < 2 * int(split.sum()) <= MOST_PANELS:  # converged, or discontinuous everywhere
            break
        weights.append(w[~split].flatten())
        values.append(f[~split].flatten())
        kept = split.repeat_interleave(2)
        left, width, w, f = halves[0][kept], halves[1][kept], finer[kept], g[kept]
    return torch.cat([*weights, w.flatten()]), torch.cat([*values, f.flatten()])


def gain(activation: str | Activation, kind: Kind = "rms") -> float:
    r"""The factor on weights with which `activation` preserves the size of a signal.

    .. math::
        \text{rms: } \frac{1}{\sqrt{E[f(z)^2]}}, \qquad
        \text{std: } \frac{1}{\sqrt{\operatorname{Var} f(z)}}, \qquad
        \text{small: } \lim_{\epsilon \to 0} \frac{\epsilon}{\sqrt{E[f(\epsilon z)^2]}}, \qquad z \sim N(0, 1)

    The rms gain preserves the second moment of a standard normal signal, which determines the output variance of a
    following random layer; the std gain preserves the variance, for layers with centred weights (weight
    standardisation, NF-nets). The small gain preserves small signals and, with orthogonal weights, gradients: dynamical
    isometry. `"torch"` is the entry of ``torch.nn.init.calculate_gain``. `"trains"`, the choice of
    :func:`gonio.init_`, is small for an odd bounded activation and rms for every other: with its rms gain tanh
    multiplies gradients by 1.085 per layer, and does not train at a depth of 50. The rms and std gains are accurate to
    1e-9 for every named activation and for activations with kinks and jumps anywhere.

    `activation` is a name ("relu", "gelu", "silu", …) or any elementwise function of a tensor; an ``nn.Module`` is
    evaluated on a float64 copy, in eval mode.

    Raises: UnknownNameError; InvalidArgumentError if the function changes the shape, or has no finite positive moment.

    Example:
        >>> round(gonio.init.gain("relu"), 4), round(gonio.init.gain("relu", kind="std"), 4)
        (1.4142, 1.7129)
        >>> [round(gonio.init.gain("tanh", kind), 4) for kind in ("rms", "torch", "small", "trains")]
        [1.5925, 1.6667, 1.0, 1.0]

    References:
        [1] K. He et al., "Delving deep into rectifiers", 2015, §2.2. https://arxiv.org/abs/1502.01852
        [2] A. Brock et al., "Characterizing signal propagation to close the performance gap in unnormalized ResNets",
        2021, §3 (std gains, estimated by sampling). https://arxiv.org/abs/2101.08692
        [3] A. Saxe et al., "Exact solutions to the nonlinear dynamics of learning in deep linear neural networks",
        2014, §4 (gain 1 for tanh, at the edge of chaos). https://arxiv.org/abs/1312.6120

    Differs: ``torch.nn.init.calculate_gain`` returns 5/3 for tanh (1.5925 here), 0.75 for selu (1.0) and 1 for sigmoid
        (1.8462), and has no gelu or silu.
    """
    if kind not in KINDS:
        raise InvalidArgumentError(f"gain() takes a kind among {', '.join(KINDS)}", f"{kind!r}", "Choose one of them.")
    if kind == "torch":
        if activation not in _TORCH:
            does = f"torch's table of gains has {', '.join(_TORCH)}"
            raise InvalidArgumentError(does, repr(activation), 'Choose another kind, such as "rms".')
        return nn.init.calculate_gain(str(activation))  # type: ignore[arg-type]
    if kind == "small" or (kind == "trains" and _is_odd_and_bounded(activation)):
        return _small(activation)
    w, value = _quadrature(activation)
    mean = (w * value).sum() if kind == "std" else 0.0
    moment = float((w * (value - mean).square()).sum())
    if not isfinite(moment) or moment < 1e-30:
        raise InvalidArgumentError(
            f"gain() needs an activation with a finite, positive {kind} on standard normal input",
            f"a squared {kind} of {moment}",
            "A constant or exploding activation has no gain; pass a number instead.",
        )
    return 1 / sqrt(moment)


def _small(activation: str | Activation) -> float:
    """The rms gain of a signal so small that a smaller one has the same."""

    def moment(size: float) -> float:
        w, value = _quadrature(lambda z: _apply(activation, size * z) / size)
        return float((w * value.square()).sum())

    small, smaller = moment(1e-7), moment(1e-8)
    if not 0 < small < inf or abs(small / smaller - 1) > 1e-3:
        does = 'gain(kind="small") needs an activation that is 0 at 0 and has a slope there'
        raise InvalidArgumentError(does, f"E[f(εz)²]/ε² from {small:.3g} to {smaller:.3g}", 'Take kind="rms".')
    return 1 / sqrt(small)


def _is_odd_and_bounded(activation: str | Activation) -> bool:
    z = torch.linspace(0, REACH, 257, dtype=torch.float64, device="cpu")
    f, mirrored = _apply(activation, z), _apply(activation, -z)
    size = float(f.abs().max())
    return bool((f + mirrored).abs().max() <= 1e-6 * size) and abs(float(f[-1])) <= 0.2 * REACH


def resolve_gain(gain_: Gain) -> float:
    """A number unchanged; a name or a callable through :func:`gain`, of the kind that trains."""
    if isinstance(gain_, str) or (callable(gain_) and not isinstance(gain_, Tensor)):
        return gain(gain_, "trains")
    try:
        value = float(gain_)
    except (TypeError, ValueError, OverflowError):
        value = nan
    check_range("init", gain=value)
    if not isfinite(value):
        raise InvalidArgumentError(
            "gain must be a finite number, the name of an activation or a function",
            repr(gain_),
            'Pass for example gain=2**0.5, gain="relu" or gain=torch.tanh.',
        )
    return value


def _apply(activation: str | Activation, z: Tensor) -> Tensor:
    if isinstance(activation, str):
        if activation not in ACTIVATIONS:
            raise UnknownNameError("activation", activation, ACTIVATIONS)
        activation = ACTIVATIONS[activation]
    if not callable(activation):
        raise InvalidArgumentError(
            "gain() needs the name of an activation or a function",
            repr(activation),
            'For example "relu" or torch.tanh.',
        )
    if isinstance(activation, nn.Module):
        activation = copy.deepcopy(activation).to("cpu", torch.float64).eval()
    with torch.no_grad():
        value = activation(z.clone())  # an in-place activation must not change the nodes
    if not isinstance(value, Tensor) or value.shape != z.shape:
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InvalidArgumentError(
            f"gain() needs an elementwise activation, which maps shape {tuple(z.shape)} to the same shape",
            found,
            "Gated activations that halve a dimension have no single gain; pass a number instead.",
        )
    return value.to(torch.float64)
