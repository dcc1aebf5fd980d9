"""`match_statistics_`: filters get back what the batch norm behind them stores."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import gonio


def inputs(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) + 0.7


class Residual(nn.Module):
    """A layer whose output is read by a norm and by a sum, and one without a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 6, 3, bias=False), nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.head((self.norm(y).relu() + 0 * y).mean((2, 3)))


CASES = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)), (256, 8), "0"),
    "grouped": (
        lambda: nn.Sequential(nn.Conv2d(4, 6, 3, groups=2, bias=False), nn.BatchNorm2d(6), nn.Flatten()),
        (64, 4, 5, 5),
        "0",
    ),
    "transposed": (
        lambda: nn.Sequential(nn.ConvTranspose1d(3, 6, 4, stride=2), nn.BatchNorm1d(6)),
        (64, 3, 7),
        "0",
    ),
    "residual": (Residual, (64, 2, 6, 6), "conv"),
}


def calibrated(name: str) -> tuple[nn.Module, Tensor, nn.Module]:
    """A network whose statistics are those of its input, the input, and the layer in front of the norm."""
    make, shape, path = CASES[name]
    torch.manual_seed(0)
    model, x = make().eval(), inputs(*shape)
    gonio.calibrate_(model, [x])
    return model, x, model.get_submodule(path)


def channel(layer: nn.Module, number: int) -> Tensor:
    """The weights of an output channel, as a view."""
    return layer.weight[:, number] if isinstance(layer, nn.ConvTranspose1d) else layer.weight[number]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("factor", [100.0, 1e-5])
@torch.no_grad()
def test_scales_come_back(name: str, factor: float) -> None:
    model, x, layer = calibrated(name)
    right, before = model(x), copy.deepcopy(layer.weight)
    channel(layer, 2).mul_(factor)
    assert not torch.allclose(model(x), right, atol=1e-3)
    edited = gonio.match_statistics_(model, [x[:32], x[32:]])
    assert torch.allclose(model(x), right, atol=1e-3)
    assert torch.allclose(layer.weight, before, rtol=1e-3, atol=1e-5)
    assert "filter 2 gets the statistics" in str(edited)


@torch.no_grad()
def test_all_filters_and_a_bias_come_back() -> None:
    model, x, layer = calibrated("linear")
    right = model(x)
    layer.weight.div_(1000)
    layer.bias[3] = torch.nan
    layer.bias[4] += 50
    gonio.match_statistics_(model, [x], where="0")
    assert torch.allclose(model(x), right, atol=1e-3)


@torch.no_grad()
def test_a_number_added_to_every_weight_is_found_where_there_is_no_bias() -> None:
    model, x, layer = calibrated("residual")
    right, before = model(x), layer.weight.clone()
    layer.weight.add_(3 * layer.weight.square().mean().sqrt())
    gonio.match_statistics_(model, [x], where="conv")
    assert torch.allclose(layer.weight, before, atol=1e-3)
    assert torch.allclose(model(x), right, atol=1e-2)


@torch.no_grad()
def test_what_agrees_stays_bit_for_bit() -> None:
    model, x, layer = calibrated("linear")
    before = copy.deepcopy(model.state_dict())
    layer.weight[1].mul_(1.5)
    touched = copy.deepcopy(model.state_dict())
    assert not gonio.match_statistics_(model, [x]).changes
    assert all(torch.equal(value, touched[name]) for name, value in model.state_dict().items())
    assert not torch.equal(before["0.weight"], touched["0.weight"])


@torch.no_grad()
def test_statistics_that_are_not_valid_are_not_followed() -> None:
    model, x, layer = calibrated("linear")
    layer.weight[1].mul_(100)
    model[1].running_var[1] = -1.0
    model[1].running_mean[2] = torch.nan
    before = layer.weight.clone()
    assert not gonio.match_statistics_(model, [x]).changes
    assert torch.equal(layer.weight, before)


def test_a_norm_must_get_the_output_itself() -> None:
    between = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.BatchNorm1d(6))
    with pytest.raises(gonio.GonioError, match="no batch norm with running statistics gets its output"):
        gonio.match_statistics_(between, [inputs(16, 8)])
    tokens = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(5))  # it normalises positions
    with pytest.raises(gonio.GonioError, match="no batch norm with running statistics gets its output"):
        gonio.match_statistics_(tokens, [inputs(16, 5, 8)])


def test_no_batch_is_refused() -> None:
    with pytest.raises(gonio.GonioError, match="match_statistics_ measures on batches; found no batch"):
        gonio.match_statistics_(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), [])
