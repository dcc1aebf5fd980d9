"""Negative controls of the laws of verbs: edits broken on purpose."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from catalog import ParametrizationCase, VerbCase, seeded
from gonio.errors import AlreadyAppliedError
from laws.test_verbs import (
    check_detach,
    check_frozen,
    check_function_kept,
    check_tied,
    check_trained_undo,
    check_twice,
    check_undo,
)


class _Edit:
    """A record as the verbs return it."""

    changes = ("0",)

    def __init__(self, undo: Callable[[], Any]) -> None:
        self.undo_ = undo


def _case(apply: Callable[[nn.Module], _Edit], **claims: bool) -> VerbCase:
    return VerbCase(
        name=apply.__name__,
        model=lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU()),
        inputs=lambda: seeded(2, 4),
        apply=apply,
        **claims,
    )


def doubling(model: nn.Module) -> _Edit:
    """A right verb: doubles the weights, once, and takes it back."""
    linear = model[0]
    if hasattr(linear, "doubled"):
        raise AlreadyAppliedError("doubling", "0", "a doubled weight")
    before = linear.weight.detach().clone()
    linear.doubled = True
    linear.weight.data.mul_(2)

    def undo() -> None:
        linear.weight.data.copy_(before)
        del linear.doubled

    return _Edit(undo)


def rounding(model: nn.Module) -> _Edit:
    """Undoes by arithmetic, which loses bits."""
    model[0].weight.data.mul_(3.0)
    return _Edit(lambda: model[0].weight.data.div_(3.0))


def leaking(model: nn.Module) -> _Edit:
    model[0].register_forward_hook(lambda module, inputs, output: None)
    return _Edit(lambda: None)


def replacing(model: nn.Module) -> _Edit:
    """Restores equal values in another Parameter object."""

    def undo() -> None:
        model[0].weight = nn.Parameter(model[0].weight.detach().clone())

    return _Edit(undo)


def reordering(model: nn.Module) -> _Edit:
    def undo() -> None:
        parameters = model[0]._parameters
        parameters["weight"] = parameters.pop("weight")

    return _Edit(undo)


def thawing(model: nn.Module) -> _Edit:
    model.requires_grad_(True)
    return _Edit(lambda: None)


def untying(model: nn.Module) -> _Edit:
    model.second = copy.deepcopy(model.first)
    return _Edit(lambda: None)


def test_the_laws_accept_a_right_verb() -> None:
    for check in (check_undo, check_twice, check_frozen):
        check(_case(doubling))


@pytest.mark.parametrize(
    ("check", "verb", "message"),
    [
        (check_undo, rounding, "has other values after undo"),
        (check_undo, leaking, "hooks differ after undo"),
        (check_undo, replacing, "parameters differ after undo"),
        (check_undo, reordering, "parameters differ after undo"),
        (check_trained_undo, replacing, "parameters differ after undo"),  # a stale optimizer
        (check_function_kept, doubling, "output after doubling differs"),
        (check_frozen, thawing, "thawing set requires_grad on frozen"),
        (check_tied, untying, "untied a module"),
    ],
)
def test_the_laws_refuse(check: Callable[[VerbCase], None], verb: Callable[[nn.Module], _Edit], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check(_case(verb))


def test_the_law_refuses_a_silent_second_application() -> None:
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check_twice(_case(rounding))
    with pytest.raises(AssertionError, match="output after the second application differs"):
        check_twice(_case(rounding, idempotent=True))


def test_the_law_refuses_the_order_that_torch_leaves() -> None:
    """torch registers the weight anew on removal, behind the bias."""
    case = ParametrizationCase(
        name="spectral norm of torch",
        make=lambda: None,
        layer=lambda: nn.Linear(4, 3),
        reference=lambda layer, raw: raw,
    )

    def attach(layer: nn.Module, name: str, template: None) -> None:
        layer.register_buffer("extra", torch.zeros(()))

    def detach(layer: nn.Module, name: str) -> None:
        del layer.extra
        layer._parameters[name] = layer._parameters.pop(name)

    with pytest.raises(AssertionError, match="parameters differ after undo"):
        check_detach(case, attach, detach)
