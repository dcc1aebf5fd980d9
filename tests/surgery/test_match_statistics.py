"""`match_statistics_`: filters get back what the batch norm behind them stores."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import gonio
from gonio.errors import NotApplicableError


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


@pytest.mark.parametrize("inference", [False, True])
def test_an_output_that_was_changed_in_place_is_not_the_layers_own(inference: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(inplace=True), nn.BatchNorm1d(6)).eval()
    x = inputs(256, 8)
    with torch.no_grad():
        model[0].bias.fill_(-1.5)  # behind the ReLU the variances are far below those of the outputs
    gonio.calibrate_(model, [x])
    before = copy.deepcopy(model.state_dict())
    none = "layer '0': no batch norm with running statistics gets its output"
    with torch.inference_mode(inference), pytest.raises(NotApplicableError, match=none):
        gonio.match_statistics_(model, [x])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_output_that_a_hook_has_changed_is_not_the_layers_own() -> None:
    model, x, layer = calibrated("linear")
    layer.register_forward_hook(lambda module, given, output: 5 * output)
    gonio.calibrate_(model, [x])
    with pytest.raises(NotApplicableError, match="layer '0': no batch norm with running statistics gets its output"):
        gonio.match_statistics_(model, [x])


@torch.no_grad()
def test_a_weight_of_two_layers_stays() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    model, x = model.append(nn.BatchNorm1d(8)).eval(), inputs(256, 8)
    gonio.calibrate_(model, [x])
    shared, own = model[0].weight.clone(), model[4].weight.clone()
    model[3].running_var *= 100  # what the second layer is to have, and the first is not
    model[4].weight[1] *= 100
    edited = gonio.match_statistics_(model, [x])
    assert [change.path for change in edited.changes] == ["4"]
    assert edited.notes == ("0, 2 stay: another layer has the same weight or bias",)
    assert torch.equal(model[0].weight, shared)
    assert not torch.equal(model[4].weight, own)
    with pytest.raises(NotApplicableError, match="layer '0': another layer has the same weight or bias"):
        gonio.match_statistics_(model, [x], where="[02]")


@torch.no_grad()
def test_scripted_parts_stay_and_are_named() -> None:
    part = torch.jit.trace(nn.Linear(8, 8), inputs(2, 8))
    model, x = nn.Sequential(part, nn.Linear(8, 6), nn.BatchNorm1d(6)).eval(), inputs(256, 8)
    gonio.calibrate_(model, [x])
    before = model[1].weight.clone()
    model[1].weight[2] *= 100
    edited = gonio.match_statistics_(model, [x])
    assert edited.notes == ("0 stays: it is scripted, and runs compiled code; edit the model before torch.jit",)
    torch.testing.assert_close(model[1].weight, before)


@torch.no_grad()
def test_a_layer_inside_a_wrapped_part_is_measured() -> None:
    part, x, layer = calibrated("linear")
    before = layer.weight.clone()
    layer.weight[1].mul_(100)
    assert len(gonio.match_statistics_(nn.Sequential(nn.DataParallel(part)).eval(), [x])) == 1
    torch.testing.assert_close(layer.weight, before)


def test_no_batch_is_refused() -> None:
    with pytest.raises(gonio.GonioError, match="match_statistics_ measures on batches; found no batch"):
        gonio.match_statistics_(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), [])
