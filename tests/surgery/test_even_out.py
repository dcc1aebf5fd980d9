"""`even_out_`: what cannot be right gets what is usual among its siblings, and nothing else changes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import gonio


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 24), nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, 24), nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, 9)
    )


@pytest.fixture
def model() -> nn.Sequential:
    return network()


def norms(model: nn.Sequential, index: int) -> torch.Tensor:
    return model[index].weight.detach().norm(dim=1)


def test_a_healthy_network_stays_bit_for_bit(model: nn.Sequential) -> None:
    with torch.no_grad():
        model[1].weight.normal_(1.0, 0.3)
        model[1].bias.normal_(0.0, 0.5)
        model[0].weight[3] *= 5
    before = copy.deepcopy(model.state_dict())
    assert not gonio.even_out_(model).changes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@torch.no_grad()
def test_lost_entries(model: nn.Sequential) -> None:
    model[0].weight[2, 3], model[0].bias[5] = torch.nan, torch.inf
    model[1].weight[4] = torch.nan
    rest = model[0].weight.clone()
    middle = model[0].bias[torch.isfinite(model[0].bias)].median()
    said = str(gonio.even_out_(model, where="[01]"))
    assert "1 entry that is not finite set to 0; entries of the bias that are not finite set to the median" in said
    assert model[0].weight[2, 3] == 0
    assert torch.equal(model[0].weight[3:], rest[3:])
    assert model[0].bias[5] == middle
    assert model[1].weight[4] == 1


@torch.no_grad()
@pytest.mark.parametrize("factor", [100.0, 1e-5])
def test_one_filter_gets_the_median_norm_and_keeps_its_direction(model: nn.Sequential, factor: float) -> None:
    before = model[3].weight.clone()
    model[3].weight[7] *= factor
    edited = gonio.even_out_(model, where="3")
    assert "filter 7 gets the median norm" in str(edited)
    assert norms(model, 3)[7].item() == pytest.approx(before.norm(dim=1).median().item(), rel=0.05)
    assert torch.cosine_similarity(model[3].weight[7], before[7], dim=0).item() == pytest.approx(1, abs=1e-5)
    assert torch.equal(model[3].weight[:7], before[:7])


@torch.no_grad()
def test_a_layer_gets_the_scale_of_the_others(model: nn.Sequential) -> None:
    before = norms(model, 3).median()
    model[3].weight /= 1000
    gonio.even_out_(model, where="3")
    assert 0.3 < float(norms(model, 3).median() / before) < 3


@torch.no_grad()
def test_a_common_offset_is_subtracted(model: nn.Sequential) -> None:
    before = model[3].weight.clone()
    model[3].weight += 3 * model[3].weight.square().mean().sqrt()
    gonio.even_out_(model, where="3")
    assert torch.allclose(model[3].weight, before - before.mean(), atol=1e-5)


@torch.no_grad()
def test_gains_and_shifts_of_a_norm(model: nn.Sequential) -> None:
    model[1].weight.normal_(1.0, 0.1)
    gains = model[1].weight.clone()
    model[1].weight *= 100
    model[1].bias -= 1000
    model[4].weight.zero_()
    model[4].bias[2] = -1000
    gonio.even_out_(model, where=nn.LayerNorm)
    assert model[1].weight.median().item() == pytest.approx(1.0, rel=0.2)
    assert torch.allclose(model[1].weight / model[1].weight[0], gains / gains[0], rtol=1e-4)
    assert model[1].bias.abs().max() < 1
    assert torch.equal(model[4].bias, torch.zeros(24))
    assert float(model[4].weight.std()) == 0
    assert 0.5 < float(model[4].weight[0]) < 2


def test_layers_without_filters_or_gains_are_refused(model: nn.Sequential) -> None:
    with pytest.raises(gonio.GonioError, match="even_out_"):
        gonio.even_out_(model, where="2")


@torch.no_grad()
def test_rows_of_an_embedding() -> None:
    table = nn.Embedding(50, 16)
    before = table.weight.clone()
    table.weight[3, 2] = torch.nan
    table.weight[7] *= 1000
    gonio.even_out_(nn.Sequential(table, nn.Linear(16, 2)), where="0")
    assert table.weight[3, 2] == 0
    assert float(table.weight[7].norm() / before[7].norm()) < 3
    assert torch.equal(table.weight[8:], before[8:])


@torch.no_grad()
def test_scripted_parts_stay_and_are_named() -> None:
    part = torch.jit.trace(nn.Linear(16, 16), torch.zeros(1, 16))
    model = nn.Sequential(part, *network())
    before = model[1].weight.clone()
    model[1].weight[3] *= 1000
    edited = gonio.even_out_(model)
    assert [change.path for change in edited.changes] == ["1"]
    assert edited.notes == ("0 stays: it is scripted, and runs compiled code; edit the model before torch.jit",)
    assert float(model[1].weight[3].norm()) < 2 * float(before[3].norm())
