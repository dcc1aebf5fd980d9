"""The graph of a model, by `torch.fx`, and nothing left behind by reading it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from gonio.surgery.kinds import WEIGHTED, is_norm
from gonio.surgery.wrapping import unwrapped

__all__ = ["Traced", "called_function", "trace"]


@dataclass(frozen=True)
class Traced:
    """A model's graph, or the reason why there is none.

    Attributes:
        model: what the graph's paths refer to: the model without compilation or parallelism around it.
        graph: the `torch.fx` graph, or None.
        reason: why tracing failed; empty if it did not.
    """

    model: nn.Module
    graph: fx.Graph | None
    reason: str = ""

    def calls(self) -> Iterator[tuple[str, nn.Module, fx.Node]]:
        """Every call of a module: its path, the module and the node."""
        if self.graph is None:
            return
        for node in self.graph.nodes:
            if node.op == "call_module":
                yield str(node.target), self.model.get_submodule(str(node.target)), node

    def called(self, node: fx.Node) -> nn.Module | None:
        """The module that a node calls, if it calls one."""
        return self.model.get_submodule(str(node.target)) if node.op == "call_module" else None


class _Tracer(fx.Tracer):
    """Stops at every layer that carries weights or belongs to torch or to gonio."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            return False
        return type(m).__module__.startswith(("torch.nn.", "gonio.nn")) or isinstance(m, WEIGHTED) or is_norm(m)


def trace(model: nn.Module, *, training: bool | None = None) -> Traced:
    """Trace a model symbolically, called with its first arguments alone; never raises because of the model.

    Arguments that have defaults keep them: `if mask is None` is decided as in a plain call. The model's
    attributes and the random generator are as before afterwards, whatever its forward does to them.

    Args:
        model: not changed.
        training: the mode in which it is traced; None for the mode that it is in.

    Example:
        >>> trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU())).reason
        ''
    """
    model = unwrapped(model)
    try:
        with _unchanged(model), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about defaults that it cannot hold an assertion on
            if training is not None:
                model.train(training)
            graph = _Tracer().trace(model, concrete_args=_defaults(model))
    except Exception as error:  # user code under a tracer can raise anything at all
        return Traced(model, None, f"{type(error).__name__}: {error}".split("\n")[0])
    return Traced(model, graph)


def _defaults(model: nn.Module) -> dict[str, Any]:
    """The arguments of a forward that a plain call leaves at their defaults; the first one is always given."""
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = list(inspect.signature(model.forward).parameters.values())[1:]
    return {p.name: p.default for p in parameters if p.kind in plain and p.default is not p.empty}


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Attributes that a forward sets while it runs on proxies are put back, modes too."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for module, attributes in before:
            now = vars(module)
            if now.keys() != attributes.keys() or any(now[key] is not value for key, value in attributes.items()):
                now.clear()
                now.update(attributes)


def called_function(node: fx.Node) -> str:
    """The name of the function or method that a node calls; empty for anything else."""
    if node.op == "call_method":
        return str(node.target)
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""
