"""What the compiler is given: one slope per patch, short derivatives, and the numbers of eager mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalog import seeded
from gonio import nn as gnn
from gonio.nn import angular
from gonio.nn.compiled import computed_once
from gonio.nn.elementary import tanh, transformed
from nn.operators import gradients
from tolerances import close

Graph = torch.fx.GraphModule


def traced(function: Any, *inputs: Tensor) -> list[str]:
    """The names of the operations that a compiler gets."""
    found: list[str] = []

    def backend(graph: Graph, _: Any) -> Graph:
        found.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    return found


def times_computed_once(layer: nn.Module, x: Tensor) -> int:
    return sum("computed_once" in name for name in traced(layer, x))


@pytest.mark.parametrize(("groups", "angle", "times"), [(1, "Cosine", 1), (2, "Sigmoid", 2), (8, "Cosine", 0)])
def test_the_slope_is_computed_once_per_patch(groups: int, angle: str, times: int) -> None:
    """With a filter per patch, as in depthwise layers, there is nothing to save."""
    layer = gnn.DecoupledConv2d(8, 8, 3, groups=groups, angular=getattr(angular, angle)()).eval()
    assert times_computed_once(layer, seeded(2, 8, 5, 5)) == times


@pytest.mark.parametrize("angle", ["Cosine", "Linear", "Sigmoid", "SquaredCosine"])
def test_values_and_gradients_are_those_of_eager_mode(angle: str) -> None:
    layer = gnn.DecoupledConv2d(8, 8, 3, groups=2, angular=getattr(angular, angle)()).eval()
    torch._dynamo.reset()
    results = []
    for call in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        x = seeded(2, 8, 5, 5).requires_grad_()
        output = call(x)
        results.append([output.detach(), *gradients(output, [x, *layer.parameters()])])
    for found, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(found, expected, **close(torch.float32))


def test_a_compiler_knows_whether_a_transform_is_active() -> None:
    """Else it would get the long form of every derivative."""

    def marked(x: Tensor) -> Tensor:
        return x * (2 if transformed() else 3)

    compiled = torch.compile(marked, backend="eager", fullgraph=True)
    mapped = torch.compile(lambda x: torch.func.vmap(marked)(x), backend="eager", fullgraph=True)
    ones = torch.ones(2)
    assert compiled(ones).tolist() == [3, 3]
    assert mapped(ones).tolist() == [2, 2]


def test_second_derivatives_of_the_compiled_tanh() -> None:
    """The short derivative is a constant to autograd; under a transform the long form stands in for it."""
    curvature = torch.func.vmap(torch.func.grad(torch.func.grad(lambda x: tanh(x))))
    x = torch.linspace(-2, 2, 9)
    torch._dynamo.reset()
    found = torch.compile(lambda x: curvature(x), backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(found, -2 * x.tanh() * (1 - x.tanh() ** 2), **close(torch.float32))


def test_outside_a_compiler_nothing_happens() -> None:
    x = seeded(2)
    assert computed_once(x) is x
