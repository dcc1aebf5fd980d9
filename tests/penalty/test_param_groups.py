"""E4: weight decay reaches weights, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import gonio
from gonio import Penalty, param_groups
from gonio import regularizers as R
from gonio.errors import InvalidArgumentError
from penalty.test_matrices import timm_model


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(8, 1)
    )


def test_weights_decay_and_nothing_else() -> None:
    found = param_groups(network(), 0.1)
    assert found.decayed == ("0.weight", "3.weight", "5.weight")
    assert dict(found.spared) == {
        "0.bias": "a bias",
        "1.weight": "one number per unit",
        "1.bias": "a bias",
        "3.bias": "a bias",
        "5.bias": "a bias",
    }


def test_every_trainable_parameter_is_in_one_group() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    model.add_module("again", model[5])  # tied
    members = [p for group in param_groups(model, 0.1) for p in group["params"]]
    assert len(members) == len({id(p) for p in members})
    assert {id(p) for p in members} == {id(p) for p in model.parameters() if p.requires_grad}


def test_an_optimizer_takes_them() -> None:
    model = network()
    optimizer = torch.optim.SGD(param_groups(model, 0.5), lr=1.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model[1].weight.data.mul_(2), before["1.weight"].mul_(2)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    shrunk = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert shrunk == {"0.weight", "3.weight", "5.weight"}


@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(8, 4), lambda: nn.Linear(8, 1), lambda: nn.Conv2d(3, 4, 3)], ids=["4", "1", "conv"]
)
@pytest.mark.parametrize("whose", ["torch", "gonio"])
def test_magnitudes_of_weight_normalisation_do_not_decay(make: Callable[[], nn.Module], whose: str) -> None:
    """`original0` has as many dimensions as the weight, so that counting dimensions takes it for one."""
    model = nn.Sequential(make())
    if whose == "torch":
        parametrizations.weight_norm(model[0])
    else:
        gonio.parametrize_(model, gonio.parametrizations.WeightNorm())
    found = param_groups(model, 0.1)
    magnitude = {"torch": "0.parametrizations.weight.original0", "gonio": "0.weight_parametrization.magnitude"}[whose]
    assert found.spared[magnitude] == "one number per unit"
    assert len(found.decayed) == 1


def test_tables_tokens_and_positions_do_not_decay() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.mix = nn.Embedding(5, 4), nn.Linear(4, 4)
            self.position = nn.Parameter(torch.zeros(1, 7, 4))
            self.token = nn.Parameter(torch.zeros(1, 1, 4))
            self.scale = nn.Parameter(torch.ones(4, 1, 1))

    found = param_groups(Tokens(), 0.1)
    assert found.decayed == ("mix.weight",)
    assert found.spared["table.weight"] == "a table that is looked up"
    assert found.spared["position"] == "no weight with filters"
    assert {found.spared["token"], found.spared["scale"]} == {"one number per unit"}


def test_scale_that_a_penalty_holds_does_not_decay_as_well() -> None:
    model = network()
    rules = [("5", R.ScaleShift(1e-3)), ("0", R.Orthogonality(1e-3))]
    found = param_groups(model, 0.1, penalty=Penalty(model, rules))
    assert found.decayed == ("0.weight", "3.weight")
    assert found.spared["5.weight"] == "5.weight/ScaleShift draws its scale down"
    optimizer = torch.optim.SGD(found, lr=1e-3)
    assert Penalty(model, rules).check(optimizer) == []
    twice = Penalty(model, rules).check(torch.optim.SGD(param_groups(model, 0.1), lr=1e-3))
    assert twice == ["5.weight/ScaleShift: the optimizer's weight decay shrinks this weight as well"]


def test_errors() -> None:
    with pytest.raises(InvalidArgumentError, match=r"needs a finite weight_decay >= 0"):
        param_groups(network(), -1.0)
    with pytest.raises(InvalidArgumentError, match=r"needs parameters that train"):
        param_groups(network().requires_grad_(False), 0.1)


@pytest.mark.parametrize("arguments", [{}, {"matrices": True}, {"mup": True, "lr": 0.1}])
def test_two_parameters_on_one_memory_are_refused(arguments: dict[str, Any]) -> None:
    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False))
        model[2].weight = model[0].weight
        return model

    model, more = tied(), {"base": tied()} if "mup" in arguments else {}
    groups = param_groups(model, 0.1, **arguments, **more)
    assert sum(len(group["params"]) for group in groups) == 3  # one object is stepped once
    model[2].weight = nn.Parameter(model[0].weight.data)
    with pytest.raises(InvalidArgumentError, match=r"shared memory of 0\.weight, 2\.weight\. Let the layers hold one"):
        param_groups(model, 0.1, **arguments, **more)


FAMILIES = (
    "beit_base_patch16_224", "cait_xxs24_224", "coat_tiny", "convmixer_768_32", "convnext_tiny", "crossvit_tiny_240",
    "deit_tiny_patch16_224", "densenet121", "dla34", "dpn68", "edgenext_xx_small", "efficientnet_b0",
    "efficientformer_l1", "gmlp_ti16_224", "hrnet_w18_small", "inception_v3", "levit_128", "mixer_s32_224",
    "mobilenetv3_large_100", "nf_resnet50", "poolformer_s12", "pvt_v2_b0", "regnety_002", "repvgg_a0", "resmlp_12_224",
    "resnet18", "resnetv2_50", "swin_tiny_patch4_window7_224", "tf_efficientnet_b0", "vit_tiny_patch16_224",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_networks_that_people_train(name: str) -> None:
    """Exactly the weights of linear layers and convolutions with more than one number per filter, by their kinds."""
    model = timm_model(name)
    kinds = (nn.Linear, nn.modules.conv._ConvNd)
    expected = {
        f"{path}.weight".lstrip(".")
        for path, module in model.named_modules()
        if isinstance(module, kinds) and (module.weight.ndim == 2 or module.weight[0].numel() > 1)
    }
    found = param_groups(model, 0.05)
    assert set(found.decayed) == expected & {name for name, _ in model.named_parameters()}
    assert set(found.spared) == {name for name, _ in model.named_parameters()} - expected
