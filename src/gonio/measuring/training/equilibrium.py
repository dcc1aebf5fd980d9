r"""The rotation at which training settles: predicted from the optimizer's settings alone.

The weight w of a layer before a normalisation has no effective scale, so its gradients are orthogonal to it: each
update makes it longer, and weight decay makes it shorter. Where both balance, norm and rotation per step stay constant.

Note [One formula for all optimizers]
    Let a be the part of the weight that decay removes per step, u_t the update without decay, ρ(τ) the correlation of
    u_t and u_{t+τ}, and M = 1 + 2 Σ_τ ρ(τ). If the gradients of different steps are uncorrelated (noise dominates) and
    orthogonal to w, then E‖w‖² = M E‖u‖²/(2a), so the root mean square of the rotation is √(2a/M). For a linear filter
    u_t = Σ c_k g_{t−k} of the gradients, M = (Σ c_k)²/Σ c_k².

    ============================  ==============================  ==========================================
    optimizer                     a                               M
    ============================  ==============================  ==========================================
    SGD, momentum α               ηλ/(1−α)                        (1+α)/(1−α); with Nesterov see `_sgd`
    AdamW, Adam with L2           ηλ, and ηλ⟨1/√v⟩ with L2        (1+β₁)/(1−β₁)
    Lion                          ηλ                              ρ = (2/π) arcsin r, r the correlation of the
                                                                  filtered gradients (normal entries)
    Muon                          ηλ                              ρ = c r + (1−c) r³, c from the singular values
                                                                  of a random matrix of the same shape
    ============================  ==============================  ==========================================

    The weight forgets its direction after about 1/a steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import asin, inf, pi, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gonio.editing.optimizer_states import of_kind
from gonio.errors import InvalidArgumentError, UnknownNameError, listing
from gonio.execution import loaded
from gonio.geometry.norms import whole
from gonio.measuring.figures.moments import denominator
from gonio.messages import say
from gonio.optim.muon import Muon, adjusted
from gonio.penalty.matrices import Blocks


@dataclass(frozen=True)
class Equilibrium:
    """The predicted rotation of a scale-invariant weight per step, and when it is reached.

    Attributes:
        rotation: root mean square over steps, in radians; None without a prediction.
        steps: after about so many steps the weight has forgotten its direction and the rotation has settled.
        reason: why there is no prediction.
    """

    rotation: float | None
    steps: float = inf
    reason: str = ""


def equilibrium(optimizer: Optimizer, parameter: Tensor) -> Equilibrium:
    r"""The rotation per step at which an optimizer's settings hold a scale-invariant weight.

    √(2ηλ/(1+α)) for SGD with learning rate η, weight decay λ and momentum α; √(2ηλ(1−β₁)/(1+β₁)) for AdamW; Note [One
    formula for all optimizers] in the source has Adam with L2, Lion and Muon. The gradient's size, the batch and the
    layer's width have no influence, except with Adam and L2, whose second moments are read from the optimizer's state.

    Known by their types are SGD, Adam, AdamW and Muon of torch, gonio's Muon, Lion of timm, lion-pytorch and
    pytorch-optimizer, what :func:`register_equilibrium` adds, and subclasses with the same `step`. Of others, of
    options that the formula does not cover, and without weight decay, there is no prediction, and `reason` says so.

    Raises:
        InvalidArgumentError: if the optimizer does not hold the parameter.

    Example:
        >>> layer = nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        >>> round(gonio.measuring.equilibrium(optimizer, layer.weight).rotation, 6)
        0.032444

    Source: Kosson, Messmer and Jaggi, "Rotational Equilibrium", arXiv 2305.17212, §3 (SGD with momentum, AdamW).
    Differs: Lion with the arcsine law of signs instead of its linearisation; Muon is derived here.
    """
    group = next((g for g in optimizer.param_groups if any(p is parameter for p in g["params"])), None)
    if group is None:
        raise InvalidArgumentError(
            "equilibrium(optimizer, parameter) needs a parameter of the optimizer",
            f"one of shape {tuple(parameter.shape)} that is in none of its groups",
            "Pass the optimizer that trains it.",
        )
    kind = type(optimizer).__name__
    rule = of_kind(optimizer, _rules())
    if rule is None:
        return Equilibrium(None, reason=say("the equilibrium of {kind} is not known", kind=kind))
    if missing := [name for name in rule.options if name not in group]:
        told = {"kind": kind, "missing": listing(missing)}
        why = say("the equilibrium of {kind} without the option {missing} is not known", **told)
        return Equilibrium(None, reason=why)
    if other := [name for name, usual in rule.only.items() if name in group and group[name] not in usual]:
        what = listing([f"{name}={group[name]!r}" for name in other])
        return Equilibrium(None, reason=say("the equilibrium of {kind} with {what} is not known", kind=kind, what=what))
    if not float(group["lr"] or 0):
        return Equilibrium(None, reason=say("the learning rate is 0"))
    if not float(group["weight_decay"] or 0):
        return Equilibrium(None, reason=say("no weight decay"))
    balance = rule.balance(group, optimizer.state.get(parameter, {}), parameter)
    if isinstance(balance, str):
        return Equilibrium(None, reason=balance)
    decay, memory = balance
    return Equilibrium(sqrt(2 * decay / memory), 1 / decay)


def register_equilibrium(kind: type[Optimizer], like: str) -> None:
    """Predict the rotations of another type of optimizer by a formula of :func:`equilibrium`.

    Args:
        kind: its type; it has the options of `like` in its parameter groups.
        like: "sgd", "adam", "adamw", "lion" or "muon".

    Raises:
        UnknownNameError: for another name.

    Example:
        >>> class SignMomentum(torch.optim.Optimizer):
        ...     def __init__(self, params):
        ...         super().__init__(params, {"lr": 1e-4, "weight_decay": 1.0, "betas": (0.9, 0.99)})
        ...     def step(self, closure=None): ...
        >>> gonio.measuring.register_equilibrium(SignMomentum, "lion")
        >>> layer = nn.Linear(4, 2)
        >>> gonio.measuring.equilibrium(SignMomentum(layer.parameters()), layer.weight).rotation is not None
        True
    """
    if like not in RULES:
        raise UnknownNameError("equilibrium", like, RULES)
    _REGISTERED[kind] = RULES[like]


# --- decay per step and memory of each optimizer: Note [One formula for all optimizers] -------------------------------

_Balance = tuple[float, float] | str
_State = Mapping[str, Any]


def _ηλ(group: Mapping[str, Any]) -> float:
    return float(group["lr"]) * float(group["weight_decay"])


def _sgd(group: Mapping[str, Any], state: _State, parameter: Tensor) -> _Balance:
    """c_k = (1−τ) α^k with dampening τ; with Nesterov the newest gradient counts once more: 1 + α, α², α³, …"""
    α, τ = float(group["momentum"]), float(group["dampening"])
    total = (1 - τ) / (1 - α) if α else 1.0
    squares = (1 - τ) ** 2 / (1 - α * α) if α else 1.0
    if group["nesterov"]:
        squares = (1 + α) ** 2 + α**4 / (1 - α * α)
    return _ηλ(group) * total, total**2 / squares


def _adam(group: Mapping[str, Any], state: _State, parameter: Tensor) -> _Balance:
    """With L2 the decay of an entry is divided by the root v of its second moment: the mean over w² counts."""
    if group.get("decoupled_weight_decay"):
        return _adamw(group, state, parameter)
    moment = state.get("max_exp_avg_sq", state.get("exp_avg_sq"))
    if moment is None:
        return "Adam with L2 has taken no step yet"
    w2 = parameter.detach().double().square()
    root = denominator(moment.double(), float(group["betas"][1]), float(state["step"]), float(group["eps"]))
    share = (w2 / root).sum() / w2.sum()
    return _ηλ(group) * float(whole(share)), _memory(group)


def _adamw(group: Mapping[str, Any], state: _State, parameter: Tensor) -> _Balance:
    return _ηλ(group), _memory(group)


def _memory(group: Mapping[str, Any]) -> float:
    β = float(group["betas"][0])
    return (1 + β) / (1 - β)


def _lion(group: Mapping[str, Any], state: _State, parameter: Tensor) -> _Balance:
    """u = sign(β₁m + (1−β₁)g) with m ← β₂m + (1−β₂)g: c₀ = 1−β₁ and c_k = β₁(1−β₂)β₂^(k−1)."""
    β1, β2 = map(float, group["betas"])
    squares = (1 - β1) ** 2 + β1**2 * (1 - β2) / (1 + β2)
    first = ((1 - β1) * β1 * (1 - β2) + β1**2 * (1 - β2) * β2 / (1 + β2)) / squares
    return _ηλ(group), _memory_of(lambda r: 2 / pi * asin(r), first, β2, _ηλ(group))


def _muon(group: Mapping[str, Any], state: _State, parameter: Tensor) -> _Balance:
    """The polar factor of the filtered gradients: c_k = (1−μ)μ^k, with Nesterov (1−μ²), (1−μ)μ², (1−μ)μ³, …"""
    if not group.get("matrices", True):
        return _adamw(group, state, parameter)  # gonio's Muon trains what is no matrix by AdamW
    if parameter.ndim < 2:
        return "the parameter is not a matrix"
    μ = float(group["momentum"])
    squares, first = (1 - μ) ** 2 / (1 - μ * μ), μ
    if group["nesterov"]:
        squares = (1 - μ) ** 2 * ((1 + μ) ** 2 + μ**4 / (1 - μ * μ))
        first = (1 - μ) ** 2 * ((1 + μ) * μ**2 + μ**5 / (1 - μ * μ)) / squares
    # Blocks of k matrices with sides m and n get updates of squared norm k·min(m, n)·(their rate)², and settle each by
    # itself: the squared rotation of the whole is Σ‖u‖²/Σ‖w‖² with ‖w‖² = M‖u‖²/2a.
    weights, memories = [], []
    for part in _blocks_of(group, parameter).split(torch.empty(parameter.shape, device="meta")):
        short, long = sorted(part.shape[1:])
        c = _linear_part(short, long, tuple(group["ns_coefficients"]), int(group["ns_steps"]))
        memories.append(_memory_of(partial(_of_polar_factor, c), first, μ, _ηλ(group)))
        weights.append(part.shape[0] * short * adjusted(1.0, group["adjust_lr_fn"], part.shape) ** 2)
    return _ηλ(group), sum(w * m for w, m in zip(weights, memories, strict=True)) / sum(weights)


def _of_polar_factor(c: float, r: float) -> float:
    return c * r + (1 - c) * r**3


def _blocks_of(group: Mapping[str, Any], parameter: Tensor) -> Blocks:
    codes = group.get("blocks", ())
    pairs = zip(group["params"], codes, strict=True) if codes else ()
    code = next((code for p, code in pairs if p is parameter), None)
    return Blocks() if code is None else Blocks.of(code)


def _memory_of(correlation: Callable[[float], float], first: float, factor: float, a: float) -> float:
    """M for filtered gradients whose correlation at a lag of τ steps is r_τ = first · factor^(τ−1).

    The sum is exact in a, because Lion's memory of 1/(1−β₂) steps may be as long as 1/a: the update τ steps ago counts
    by (1−a)^τ, x = E‖u‖²/E‖w‖² = (2a − a²)/(1 + 2 Σ (1−a)^τ ρ(τ)), of which the radial part (a − x/2)² does not turn w.
    In a linear filter both corrections cancel.
    """
    total, r, kept = 1.0, first, 1 - a
    while r > 1e-6:
        total += 2 * kept * correlation(r)
        r, kept = r * factor, kept * (1 - a)
    x = (2 * a - a * a) / total
    return 2 * a / (x - (a - x / 2) ** 2)


@lru_cache(maxsize=256)
def _linear_part(short: int, long: int, coefficients: tuple[float, float, float], steps: int) -> float:
    """(E σf(σ))²/(E σ² E f(σ)²): the part of the correlation of two updates that is linear in that of the gradients.

    f is the polynomial that Newton–Schulz iterations apply to the singular values σ of a random matrix, here at
    quantiles of the Marchenko–Pastur law. About 0.72 for square matrices, and 1 for a single row.
    """
    low, high = (1 - sqrt(short / long)) ** 2, (1 + sqrt(short / long)) ** 2
    x = (torch.arange(2000, dtype=torch.float64, device="cpu") + 0.5) * pi / 2000
    λ = (low + high) / 2 + (high - low) / 2 * x.cos()
    mass = x.sin().square() / λ  # up to a factor; the substitution by the cosine removes the singularities of the edges
    σ = λ.sqrt()
    f = σ / sqrt(short)  # divided by the Frobenius norm
    a, b, c = coefficients
    for _ in range(steps):
        f = f * (a + b * f**2 + c * f**4)
    return float((mass * σ * f).sum() ** 2 / (mass * λ).sum() / (mass * f * f).sum())


@dataclass(frozen=True)
class _Rule:
    """A formula, the options that a parameter group must have, and those that may have these values only."""

    balance: Callable[[Mapping[str, Any], _State, Tensor], _Balance]
    options: tuple[str, ...]
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


_DECAY = ("lr", "weight_decay")
_CHANGES = ("fixed_decay", "use_gc", "adanorm", "caution", "cautious", "corrected_weight_decay")
RULES: Mapping[str, _Rule] = {
    "sgd": _Rule(_sgd, (*_DECAY, "momentum", "dampening", "nesterov")),
    "adam": _Rule(_adam, (*_DECAY, "betas", "eps")),
    "adamw": _Rule(_adamw, (*_DECAY, "betas")),
    "lion": _Rule(_lion, (*_DECAY, "betas"), {"weight_decouple": (True,), **dict.fromkeys(_CHANGES, (False,))}),
    "muon": _Rule(_muon, (*_DECAY, "momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn")),
}
_OF_TORCH = {"SGD": "sgd", "Adam": "adam", "AdamW": "adamw", "Muon": "muon"}
_OF_OTHERS = {
    "timm.optim.lion:Lion": "lion",
    "lion_pytorch.lion_pytorch:Lion": "lion",
    "pytorch_optimizer.optimizer.lion:Lion": "lion",
}
_REGISTERED: dict[type[Optimizer], _Rule] = {
    **{getattr(torch.optim, name): RULES[like] for name, like in _OF_TORCH.items() if hasattr(torch.optim, name)},
    Muon: RULES["muon"],
}


def _rules() -> Mapping[type[Optimizer], _Rule]:
    others = {kind: RULES[like] for name, like in _OF_OTHERS.items() for kind in loaded(name)}
    return {**others, **_REGISTERED}
