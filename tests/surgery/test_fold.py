from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

import gonio
from catalog import seeded
from gonio import nn as gnn
from gonio import parametrizations as P
from gonio.errors import NoMatchError, NotApplicableError
from gonio.nn import angular, magnitude
from gonio.surgery import fold_

X = seeded(3, 6, 8, 8, dtype=torch.float64)


def shaken(norm):
    """A batch norm that has trained: no statistic or parameter at its default."""
    with torch.no_grad():
        norm.running_mean.copy_(seeded(norm.num_features, seed=1))
        norm.running_var.copy_(seeded(norm.num_features, seed=2).exp())
        norm.weight.copy_(seeded(norm.num_features, seed=3))
        norm.bias.copy_(seeded(norm.num_features, seed=4))
    return norm


CONVOLUTIONS = [
    (kind, groups, bias)
    for kind, groups, bias in itertools.product((nn.Conv2d, nn.ConvTranspose2d), (1, 2, 6), (True, False))
]


@pytest.mark.parametrize(("kind", "groups", "bias"), CONVOLUTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batch_norm_folds_into_every_kind_of_convolution(kind, groups, bias, dtype):
    model = (
        nn.Sequential(kind(6, 12, 3, groups=groups, bias=bias), shaken(nn.BatchNorm2d(12)), nn.ReLU()).to(dtype).eval()
    )
    expected = model(X.to(dtype)).detach()
    fold_(model, example=X.to(dtype))
    found = model(X.to(dtype)).detach()
    assert type(model[1]) is nn.Identity
    assert float((found - expected).abs().max() / expected.abs().max()) <= (1e-12 if dtype is torch.float64 else 1e-5)


def test_batch_norm_folds_into_linear_layers():
    model = nn.Sequential(nn.Linear(6, 5), shaken(nn.BatchNorm1d(5))).double().eval()
    x = seeded(4, 6, dtype=torch.float64)
    expected = model(x)
    fold_(model)
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)


def test_a_norm_whose_input_is_read_elsewhere_stays():
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(6, 4, 1), shaken(nn.BatchNorm2d(4))
            self.other, self.last = nn.Conv2d(4, 4, 1), shaken(nn.BatchNorm2d(4))

        def forward(self, x):
            y = self.conv(x)
            return self.last(self.other(self.norm(y) + y))

    model = Fork().double()
    fold_(model, example=X)
    assert type(model.norm) is nn.BatchNorm2d
    assert type(model.last) is nn.Identity


@pytest.mark.parametrize("make", [P.WeightNorm, P.Sphere], ids=lambda make: make.__name__)
def test_a_parametrized_copy_folds_and_the_original_stays(make):
    model = nn.Sequential(nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(144, 3)).double()
    gonio.parametrize_(model, make())
    expected, average = model(X).detach(), copy.deepcopy(model)
    fold_(average, example=X)
    assert [type(m) for m in average] == [nn.Conv2d, nn.Flatten, nn.Linear]
    torch.testing.assert_close(average(X), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(model(X), expected)
    assert P.is_parametrized(model[0])
    model(X).sum().backward()
    assert torch.isfinite(model[0]._parameters["weight"].grad).all()


def test_undo_is_exact():
    model = nn.Sequential(nn.Conv2d(6, 4, 3, bias=False), shaken(nn.BatchNorm2d(4))).double().eval()
    gonio.parametrize_(model, P.Sphere())
    expected, state = model(X), {k: v.clone() for k, v in model.state_dict().items()}
    parameters, classes = list(model.parameters()), [type(m) for m in model.modules()]
    edited = fold_(model, example=X)
    assert model[0].bias is not None
    edited.undo_()
    assert torch.equal(model(X), expected)
    assert [type(m) for m in model.modules()] == classes
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_switchable_norm_folds_if_its_mixture_is_batch_statistics_alone():
    model = nn.Sequential(nn.Conv2d(6, 4, 3), shaken(nn.BatchNorm2d(4))).double().eval()
    gonio.swap_(model, gnn.SwitchableNorm2d.from_batch_norm)
    with pytest.raises(NoMatchError, match="on which fold_ cannot act"):
        fold_(model)
    with torch.no_grad():
        for logits in (model[1].mean_logits, model[1].var_logits):
            logits.copy_(torch.tensor([-100.0, -100.0, 100.0]))
    expected = model(X)
    fold_(model, example=X)
    assert type(model[1]) is nn.Identity
    torch.testing.assert_close(model(X), expected, rtol=1e-12, atol=1e-12)


def test_decoupled_layers_fold_where_they_are_linear_and_are_refused_by_name_elsewhere():
    model = nn.Sequential(nn.Conv2d(6, 4, 3), nn.Conv2d(4, 4, 3)).double().eval()
    linear = {"magnitude": magnitude.Linear(), "angular": angular.Cosine()}
    gonio.swap_(model, gnn.DecoupledConv2d.from_conv, where="0", **linear)
    gonio.swap_(model, gnn.DecoupledConv2d.from_conv, where="1", magnitude=magnitude.Tanh())
    expected = model(X)
    text = str(fold_(model, example=X))
    assert type(model[0]) is nn.Conv2d
    assert type(model[1]) is gnn.DecoupledConv2d
    assert "1 stays" in text
    torch.testing.assert_close(model(X), expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(NotApplicableError, match="its output is not linear in its input"):
        fold_(model, where="1")


def test_a_plain_model_has_nothing_to_fold():
    with pytest.raises(NoMatchError, match="on which fold_ cannot act"):
        fold_(nn.Sequential(nn.Conv2d(6, 4, 3), nn.ReLU()))


def test_a_model_that_cannot_be_traced_still_folds_its_parametrizations_and_says_what_stays():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(6, 4, 1), nn.BatchNorm2d(4)

        def forward(self, x):
            return self.norm(self.conv(x)) if x.sum() > -1e9 else x

    model = Loop().double()
    gonio.parametrize_(model, P.Sphere())
    text = str(fold_(model, example=X))
    assert "norm stays: the model cannot be traced" in text
    assert type(model.conv) is nn.Conv2d
