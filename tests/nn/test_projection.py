"""Weighted gradients and weight projection."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import gonio
from catalog import seeded
from gonio import nn as gnn
from gonio.errors import InvalidArgumentError, NoMatchError, NotApplicableError
from laws.support import differentiate
from nn.operators import conversions
from tolerances import close, exact

SGD = torch.optim.SGD


def filter_norms(layer: nn.Module) -> torch.Tensor:
    """Norm of each filter, read from torch's storage order."""
    weight = layer.weight.detach()
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):
        groups = weight.reshape(layer.groups, -1, *weight.shape[1:])
        return groups.transpose(1, 2).flatten(2).norm(dim=2).flatten()
    return weight.flatten(1).norm(dim=1)


def test_the_weighted_gradient_is_the_exact_one_times_the_norm() -> None:
    for name, plain, convert, x in conversions():
        exact_layer, weighted = convert(plain), convert(plain, gradient="weighted")
        (exact_grad,) = differentiate(exact_layer(x), [plain.weight])
        (weighted_grad,) = differentiate(weighted(x), [plain.weight])
        lengths = filter_norms(plain)
        if "Transpose" in name:
            rows = lengths.reshape(plain.groups, 1, -1).expand(-1, plain.in_channels // plain.groups, -1)
            factor = rows.reshape(*plain.weight.shape[:2], *(1 for _ in plain.kernel_size))
        else:
            factor = lengths.reshape(-1, *(1 for _ in plain.weight.shape[1:]))
        torch.testing.assert_close(weighted_grad, factor * exact_grad, **close(torch.float64))
        torch.testing.assert_close(weighted(x), exact_layer(x), **exact(torch.float64))


def test_projection_keeps_the_function() -> None:
    for name, plain, convert, x in conversions():
        layer = convert(plain).eval()
        before = layer(x)
        edited = gnn.project_weights_(layer, norm=2.0)
        assert [change.path for change in edited.changes] == [""], name
        torch.testing.assert_close(filter_norms(layer), torch.full_like(filter_norms(layer), 2.0))
        torch.testing.assert_close(layer(x), before, **close(torch.float64))


def test_projection_leaves_a_dead_filter_and_other_layers() -> None:
    model = nn.Sequential(gnn.DecoupledLinear(4, 3), nn.Linear(3, 2))
    model[0].weight.data[0] = 0
    plain = model[1].weight.clone()
    edited = gnn.project_weights_(model)
    assert str(edited) == "project_weights_: 1 module\n  0  norm of 2 filters set to 1, 1 zero"
    torch.testing.assert_close(filter_norms(model[0]), torch.tensor([0.0, 1.0, 1.0]))
    assert torch.equal(model[1].weight, plain)


def test_undo_restores_the_weights_and_leaves_nothing_behind() -> None:
    """Neither a projection nor its undo acts on later steps, also after the layer was swapped back."""
    model = nn.Sequential(nn.Linear(4, 3))
    optimizer = SGD(model.parameters(), lr=0.0)
    weight = model[0].weight.detach().clone()
    swapped = gonio.swap_(model, gnn.DecoupledLinear.from_linear)
    projected = gnn.project_weights_(model)
    assert not torch.equal(model[0].weight, weight)
    projected.undo_()
    assert torch.equal(model[0].weight, weight)
    swapped.undo_()
    with torch.no_grad():
        model[0].weight.mul_(5)
    model(seeded(2, 4)).sum().backward()
    optimizer.step()
    assert torch.equal(model[0].weight, 5 * weight)


def test_hold_is_the_repeated_projection() -> None:
    held, projected = (gnn.DecoupledLinear(4, 3) for _ in range(2))
    projected.load_state_dict(held.state_dict())
    optimizers = [SGD(layer.parameters(), lr=0.5, momentum=0.9) for layer in (held, projected)]
    gnn.project_weights_(projected)
    gonio.hold_(held, optimizers[0], norm="filters", radius=1.0)
    for step in range(4):
        for layer, optimizer in zip((held, projected), optimizers, strict=True):
            optimizer.zero_grad()
            layer(seeded(5, 4, seed=step)).square().sum().backward()
            optimizer.step()
        gnn.project_weights_(projected)
    torch.testing.assert_close(held.weight, projected.weight, **close(torch.float32))


def _under_way() -> nn.Module:
    layer = gnn.DecoupledLinear(3, 2)
    gonio.convert_gradually_(layer, SGD(layer.parameters(), lr=0.1), steps=3)
    return layer


REFUSED = [
    (lambda: gnn.DecoupledLinear(3, 2, weighted="tanh_each"), r"its output depends on .*weighted='tanh_each'"),
    (_under_way, "its output depends on .* until its gradual conversion has ended"),
    (lambda: weight_norm(gnn.DecoupledLinear(3, 2)), "its weight is computed by a parametrization"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_projection_is_refused_where_norms_count(make: Any, message: str) -> None:
    model = nn.Sequential(gnn.DecoupledLinear(3, 3), make())
    before = model[0].weight.clone()
    with pytest.raises(NotApplicableError, match=f"'1'; {message}"):
        gnn.project_weights_(model, where=type(model[0]))
    assert torch.equal(model[0].weight, before)  # all or nothing
    with pytest.raises(NoMatchError, match=message):
        gnn.project_weights_(model[1])
    assert re.search(f"1 stays: {message}", str(gnn.project_weights_(model)))


def test_wrong_arguments() -> None:
    with pytest.raises(InvalidArgumentError, match="project_weights_: invalid norm; found 0"):
        gnn.project_weights_(gnn.DecoupledLinear(3, 2), norm=0)
    with pytest.raises(NoMatchError, match="it is a Linear, not a decoupled layer"):
        gnn.project_weights_(nn.Linear(3, 2))
