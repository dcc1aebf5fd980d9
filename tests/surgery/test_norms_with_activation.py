"""timm's batch norms that have their activation inside: converted to a norm and that activation, and undone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import gonio
from catalog import seeded
from foreign import timm
from gonio import nn as gnn
from laws.snapshot import Snapshot, assert_restored


def norm(**options: Any) -> nn.Module:
    timm()
    from timm.layers import BatchNormAct2d

    layer = BatchNormAct2d(4, eps=1e-3, **options)
    layer.running_mean.copy_(seeded(4))
    layer.running_var.copy_(seeded(4, seed=1).exp())
    return layer


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 1), norm(act_layer=nn.SiLU), nn.Conv2d(4, 4, 1), norm(apply_act=False)).eval()


X = seeded(2, 3, 5, 5)


def test_each_becomes_a_norm_and_its_activation_and_comes_back() -> None:
    model = network()
    weight = model[1].weight
    text = str(gonio.swap_(model, gnn.SwitchableNorm2d.from_batch_norm, where=nn.BatchNorm2d))
    assert "1  BatchNormAct2d → SwitchableNorm2d + SiLU" in text
    assert "3  BatchNormAct2d → SwitchableNorm2d\n" in text
    assert model[1][0].weight is weight
    assert model[1][0].eps == 1e-3


def test_undo_is_exact() -> None:
    model = network()
    before = Snapshot.of(model, X)
    edited = gonio.swap_(model, gnn.to_group_norm, where=nn.BatchNorm2d, groups=2)
    assert [type(part).__name__ for part in model[1]] == ["GroupNorm", "SiLU"]
    model(X)
    edited.undo_()
    assert_restored(before, Snapshot.of(model, X))


def test_a_mixture_of_batch_statistics_alone_is_the_same_function() -> None:
    model = network().double()
    x = X.double()
    expected = model(x).detach()
    gonio.swap_(model, gnn.SwitchableNorm2d.from_batch_norm)
    with torch.no_grad():
        for layer in (model[1][0], model[3]):
            for logits in (layer.mean_logits, layer.var_logits):
                logits.copy_(torch.tensor([-1000.0, -1000.0, 0.0]))
    torch.testing.assert_close(model(x).detach(), expected, rtol=1e-12, atol=1e-12)


def test_a_factory_of_ones_own_gets_the_layer_as_it_is() -> None:
    taken = []

    def keep(layer):
        taken.append(layer)
        return copy.deepcopy(layer)

    model = network()
    gonio.swap_(model, keep, where="1")
    assert type(taken[0]).__name__ == type(model[1]).__name__ == "BatchNormAct2d"


@pytest.mark.parametrize("frozen", [True, False])
def test_modes_and_gradients_stay(frozen: bool) -> None:
    model = network().requires_grad_(not frozen).train()
    gonio.swap_(model, gnn.SwitchableNorm2d.from_batch_norm)
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad is not frozen for parameter in model.parameters())
