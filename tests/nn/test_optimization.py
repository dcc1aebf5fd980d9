"""Weighted gradients, weight projection and gradual conversion."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from catalog import seeded
from gonio import nn as gnn
from gonio.errors import AlreadyAppliedError, InvalidArgumentError, NotApplicableError
from gonio.nn import magnitude
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
        projection = gnn.project_weights_(layer, norm=2.0)
        assert projection.paths == ("",), name
        torch.testing.assert_close(filter_norms(layer), torch.full_like(filter_norms(layer), 2.0))
        torch.testing.assert_close(layer(x), before, **close(torch.float64))


def test_projection_leaves_a_dead_filter_and_other_layers() -> None:
    model = nn.Sequential(gnn.DecoupledLinear(4, 3), nn.Linear(3, 2))
    model[0].weight.data[0] = 0
    plain = model[1].weight.clone()
    assert gnn.project_weights_(model).paths == ("0",)
    torch.testing.assert_close(filter_norms(model[0]), torch.tensor([0.0, 1.0, 1.0]))
    assert torch.equal(model[1].weight, plain)


def test_repeated_projection_counts_optimizer_steps() -> None:
    layer = gnn.DecoupledLinear(4, 3)
    optimizer = SGD(layer.parameters(), lr=0.5)
    projection = gnn.project_weights_(layer, optimizer, every=2)

    def step() -> bool:
        layer(seeded(5, 4)).square().sum().backward()
        optimizer.step()
        return torch.allclose(filter_norms(layer), torch.ones(3))

    assert [step() for _ in range(4)] == [False, True, False, True]
    projection.undo_()
    assert [step() for _ in range(2)] == [False, False]


def _under_way() -> nn.Module:
    layer = gnn.DecoupledLinear(3, 2)
    gnn.convert_gradually_(layer, SGD(layer.parameters(), lr=0.1), steps=3)
    return layer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gnn.DecoupledLinear(3, 2, weighted="tanh_each"), r"'1'; its output depends on .*weighted='tanh_each'"),
        (_under_way, "until its gradual conversion has ended"),
    ],
)
def test_projection_is_refused_where_norms_count(make: Any, message: str) -> None:
    model = nn.Sequential(gnn.DecoupledLinear(3, 3), make())
    before = model[0].weight.clone()
    with pytest.raises(NotApplicableError, match=message):
        gnn.project_weights_(model)
    assert torch.equal(model[0].weight, before)  # all or nothing


def test_projection_is_refused_for_a_computed_weight() -> None:
    layer = torch.nn.utils.parametrizations.weight_norm(gnn.DecoupledLinear(3, 2))
    with pytest.raises(NotApplicableError, match="its weight is computed by a parametrization"):
        gnn.project_weights_(layer)


@pytest.mark.parametrize("weighted", [None, "linear"])
def test_a_gradual_conversion_goes_from_plain_to_decoupled(weighted: Any) -> None:
    for name, plain, convert, x in conversions():
        options = {"magnitude": magnitude.Ball(), "weighted": weighted}
        target = convert(plain, **options)(x)
        layer = convert(plain, **options)
        optimizer = SGD(layer.parameters(), lr=0.0)
        blending = gnn.convert_gradually_(layer, optimizer, steps=4)
        torch.testing.assert_close(
            layer(x), plain(x), msg=lambda text, name=name: f"{name}: {text}", **exact(torch.float64)
        )
        for done in (1, 2, 3):
            optimizer.step()
            share = blending.share
            assert share == done / 4
            torch.testing.assert_close(layer(x), (1 - share) * plain(x) + share * target, **close(torch.float64))
        optimizer.step()
        assert layer.blend is None
        torch.testing.assert_close(layer(x), target, **exact(torch.float64))
        blending.undo_()  # a hook cannot remove itself during a step
        assert not optimizer._optimizer_step_post_hooks


def test_a_gradual_conversion_can_be_resumed_and_finished() -> None:
    layer = gnn.DecoupledLinear(3, 2)
    optimizer = SGD(layer.parameters(), lr=0.1)
    blending = gnn.convert_gradually_(layer, optimizer, steps=10, start=4)
    assert blending.share == 0.4
    assert float(layer.blend) == pytest.approx(0.4)
    assert "blend" in layer.state_dict()  # a checkpoint of a half-converted layer does not load silently
    with pytest.raises(AlreadyAppliedError, match="found a gradual conversion there already"):
        gnn.convert_gradually_(layer, optimizer, steps=10)
    blending.undo_()
    assert layer.blend is None
    assert "blend" not in layer.state_dict()


def test_the_last_step_leaves_later_hooks_of_the_optimizer_alone():
    """torch iterates over the hooks during a step, and raises if one removes itself before the last."""
    layer = gnn.DecoupledLinear(3, 2)
    optimizer, seen = torch.optim.SGD(layer.parameters(), lr=0.1), []
    blending = gnn.convert_gradually_(layer, optimizer, steps=2)
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    for _ in range(3):
        optimizer.step()
    assert (len(seen), blending.share, layer.blend) == (3, 1.0, None)
    blending.undo_()
    assert len(optimizer._optimizer_step_post_hooks) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, o: gnn.project_weights_(m, norm=0), "project_weights_: invalid norm; found 0"),
        (lambda m, o: gnn.project_weights_(m, o), "project_weights_: invalid schedule; found every=None, "),
        (lambda m, o: gnn.project_weights_(nn.Linear(3, 2)), "project_weights_: the model has no decoupled layer; "),
        (lambda m, o: gnn.convert_gradually_(m, o, steps=3, start=3), "found steps=3, start=3"),
        (
            lambda m, o: gnn.convert_gradually_(nn.Linear(3, 2), o, steps=3),
            "gradually_: the model has no decoupled layer; ",
        ),
    ],
)
def test_wrong_arguments(call: Any, message: str) -> None:
    layer = gnn.DecoupledLinear(3, 2)
    with pytest.raises(InvalidArgumentError, match=message):
        call(layer, SGD(layer.parameters(), lr=0.1))
