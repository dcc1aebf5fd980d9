"""Optimizers by name, with arguments that are data: what a recipe and a comparison may train with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from gonio.errors import InvalidArgumentError, UnknownNameError, check_range
from gonio.optim.muon import Muon
from gonio.penalty.param_groups import param_groups

Decay = Literal["all", "weights"]
DECAYS = get_args(Decay)

Range = tuple[str, Callable[[Any], bool]]  # what a value must be, in words, and whether it is


def one_of(names: Sequence[str]) -> Range:
    """The range of a setting that is one of these names."""
    return f"one of {', '.join(names)}", lambda value: value in names


POSITIVE: Range = ("a positive number", lambda value: 0 < value < inf)
NOT_NEGATIVE: Range = ("0 or above", lambda value: 0 <= value < inf)
SHARE: Range = ("from 0 to below 1", lambda value: 0 <= value < 1)
RANGES: Mapping[str, Range] = {
    "lr": POSITIVE,
    "others_factor": POSITIVE,
    "weight_decay": NOT_NEGATIVE,
    "momentum": SHARE,
    "betas": ("two numbers from 0 to below 1", lambda pair: len(pair) == 2 and all(0 <= beta < 1 for beta in pair)),
    "decay": one_of(DECAYS),
}


def sgd(
    model: nn.Module, *, lr: float, weight_decay: float = 0.0, momentum: float = 0.9, decay: Decay = "all"
) -> torch.optim.SGD:
    """SGD with Nesterov momentum; `decay="weights"` spares biases, norms and tables (:func:`gonio.param_groups`)."""
    check_settings({"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "decay": decay})
    parameters = _parameters(model, weight_decay, decay)
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=momentum > 0)


def adamw(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    decay: Decay = "all",
) -> torch.optim.AdamW:
    """AdamW; `decay="weights"` spares biases, norms and tables (:func:`gonio.param_groups`)."""
    check_settings({"lr": lr, "weight_decay": weight_decay, "betas": betas, "decay": decay})
    return torch.optim.AdamW(
        _parameters(model, weight_decay, decay), lr=lr, betas=_pair(betas), weight_decay=weight_decay
    )


def muon(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.0,
    momentum: float = 0.95,
    betas: tuple[float, float] = (0.9, 0.95),
    others_factor: float = 0.015,
) -> Muon:
    """Muon on the matrices of `gonio.param_groups(model, matrices=True)`, AdamW on the others; weights alone decay.

    The others have the learning rate `others_factor` · `lr`, so that tuning `lr` moves both.
    """
    given = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "betas": betas}
    check_settings({**given, "others_factor": others_factor})
    groups = param_groups(model, weight_decay, matrices=True)
    return Muon(groups, lr, weight_decay, momentum=momentum, others_lr=others_factor * lr, betas=_pair(betas))


OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = MappingProxyType({"sgd": sgd, "adamw": adamw, "muon": muon})


def arguments_of(name: str) -> Mapping[str, Any]:
    """The arguments of an optimizer by name, with their defaults; the model is none of them.

    Raises:
        UnknownNameError: for a name that is not in `OPTIMIZERS`.

    Example:
        >>> from gonio.optim.named import arguments_of
        >>> arguments_of("sgd")["momentum"], sorted(arguments_of("muon"))
        (0.9, ['betas', 'lr', 'momentum', 'others_factor', 'weight_decay'])
    """
    if name not in OPTIMIZERS:
        raise UnknownNameError("optimizer", name, OPTIMIZERS)
    parameters = list(inspect.signature(OPTIMIZERS[name]).parameters.values())[1:]
    return {each.name: each.default for each in parameters}


def type_of(name: str) -> type[Optimizer]:
    """The class of an optimizer by name.

    Example:
        >>> from gonio.optim.named import type_of
        >>> type_of("sgd") is torch.optim.SGD
        True
    """
    kind: type[Optimizer] = inspect.signature(OPTIMIZERS[name], eval_str=True).return_annotation
    return kind


def _parameters(model: nn.Module, weight_decay: float, decay: Decay) -> Any:
    return model.parameters() if decay == "all" else [*param_groups(model, weight_decay)]


def _pair(betas: Sequence[float]) -> tuple[float, float]:
    first, second = betas
    return float(first), float(second)


def check_settings(settings: Mapping[str, Any], ranges: Mapping[str, Range] = RANGES) -> None:
    """Refuse values that no training can use, before torch refuses some of them with errors of its own.

    Args:
        settings: by name; None is the default of whoever uses it.
        ranges: of the names that have one.

    Raises:
        InvalidArgumentError: names the setting.

    Example:
        >>> from gonio.optim.named import check_settings
        >>> check_settings({"momentum": 1.0})
        Traceback (most recent call last):
        gonio.errors.InvalidArgumentError: momentum must be from 0 to below 1; found 1.0. Give another value.
    """
    for name, value in settings.items():
        if value is None or name not in ranges:
            continue
        said, holds = ranges[name]
        number = ranges[name] in (POSITIVE, NOT_NEGATIVE, SHARE)
        if number and (isinstance(value, bool) or not isinstance(value, (int, float))):  # a tensor passes as a number
            raise InvalidArgumentError(f"{name} must be {said}", repr(value), "Give a number of Python.")
        if ranges[name] in (POSITIVE, NOT_NEGATIVE):
            check_range("training", **{name: value})
        if not holds(value):
            raise InvalidArgumentError(f"{name} must be {said}", repr(value), "Give another value.")
