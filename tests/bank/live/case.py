"""A row of the bank: a live model with an input, as its own library builds it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from catalog import seeded
from gonio.surgery.equivalent import call

Made = tuple[nn.Module, Any]


@dataclass(frozen=True)
class Case:
    """One model of the bank.

    Attributes:
        origin: the library, or the kind of a model that is written here.
        make: builds the model with its own initialisation, and an input of it.
        tolerance: the relative deviation that is rounding in float64; more for a model that computes in float32.
        findings: codes above info that are true of the fresh model, which its structure or its initialisation explains.
        quick: whether `make test` runs it; the others are slow tests.
    """

    name: str
    origin: str
    make: Callable[[], Made]
    tolerance: float = 1e-9
    findings: tuple[str, ...] = ()
    quick: bool = False

    def fresh(self) -> Made:
        """The model as its constructor leaves it."""
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the model's own library
            torch.manual_seed(0)
            return self.make()

    def trained(self) -> Made:
        """In float64 and evaluation mode, with statistics of data, and vectors that are no longer 0 and 1."""
        model, x = self.fresh()
        x = tree_map(_wide, x)
        with torch.random.fork_rng(devices=[]), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(1)
            call(model.eval(), tree_map(_narrow, x))  # what is lazy or set from data gets its values
            model.double()
            for seed, parameter in enumerate(model.parameters()):
                if parameter.dim() == 1 and parameter.is_floating_point():
                    parameter += 0.1 * seeded(*parameter.shape, seed=seed)
            if any(name.endswith("running_var") for name, _ in model.named_buffers()):
                for _ in range(3):
                    call(model.train(), x)
            call(model.eval(), x)  # an embedding with max_norm changes its weight when it runs
        return model, x


def _wide(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _narrow(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
