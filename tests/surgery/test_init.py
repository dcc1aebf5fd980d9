"""`init_` beyond the laws that `tests/laws` runs over the catalogue."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gonio
from catalog import seeded
from gonio import init
from gonio.errors import InvalidArgumentError, NoMatchError, NotApplicableError


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.Tanh(),
        nn.Linear(8, 2),
    )


def test_a_weight_depends_on_seed_and_path_alone():
    one, other = network(), network()
    other.add_module("extra", nn.Linear(2, 2))
    torch.manual_seed(5)
    gonio.init_(one, init.orthogonal_, seed=3, gain=1.0)
    gonio.init_(other, init.orthogonal_, where="[046]", seed=3, gain=1.0)
    assert torch.equal(one[4].weight, other[4].weight)
    gonio.init_(other, init.orthogonal_, where="[046]", seed=4, gain=1.0)
    assert not torch.equal(one[4].weight, other[4].weight)


def test_the_gain_follows_the_activation():
    model = network()
    table = str(gonio.init_(model, init.orthogonal_))
    assert "0  orthogonal_(gain=relu)" in table
    assert "4  orthogonal_(gain=tanh)" in table
    assert "6  orthogonal_(gain=linear)" in table


def test_an_unknown_activation_is_said():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return torch.sin(self.fc(x))

    edited = gonio.init_(Odd(), init.orthogonal_)
    assert "the function's own gain where the following activation is not known" in str(edited)
    assert "fc  orthogonal_()" in str(edited)


def test_a_failure_in_the_middle_leaves_all_as_it_was():
    model = network()
    before = {k: v.clone() for k, v in model.state_dict().items()}

    def fails_late(weight, *, layout, generator):
        weight.zero_()
        if weight.shape == (2, 8):
            weight.fill_(float("nan"))
        return weight

    with pytest.raises(
        NotApplicableError, match=r"init_: cannot initialise layer '6' \(Linear\): fails_late gave non-finite"
    ):
        gonio.init_(model, fails_late)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_tied_weights_are_drawn_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    assert "1  tied: initialised above" in str(gonio.init_(model, init.orthogonal_))


def test_options_are_checked_before_anything_happens():
    with pytest.raises(InvalidArgumentError, match=r"gian, which it does not take\. It takes .*gain"):
        gonio.init_(network(), init.orthogonal_, gian=2.0)


def test_a_layer_on_the_meta_device_is_refused():
    with pytest.raises(NoMatchError, match="on the meta device"):
        gonio.init_(nn.Linear(2, 2, device="meta"), init.orthogonal_)


def lsuv_(model, function):
    gonio.lsuv_(model, seeded(2, 3, 4, 4), function=function)


@pytest.mark.parametrize("verb", [gonio.init_, lsuv_])
@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("orthogonal", r"takes a function of gonio\.init, .*; found 'orthogonal'\. Pass gonio\.init\.orthogonal_\."),
        (nn.init.orthogonal_, r"init\.orthogonal_, which takes no layout .* Pass gonio\.init\.orthogonal_\."),
        (nn.init.sparse_, r"found torch\.nn\.init\.sparse_, .* Pass a function of gonio\.init\."),
    ],
)
def test_other_functions_are_refused_with_the_one_to_pass(verb, function, message):
    with pytest.raises(InvalidArgumentError, match=message):
        verb(network(), function)


def test_each_projection_is_drawn_as_a_matrix_of_its_own() -> None:
    model = nn.Sequential(nn.MultiheadAttention(8, 2))
    text = str(gonio.init_(model, init.orthogonal_, tensor="in_proj_weight", gain=1.0))
    assert "0  in_proj_weight: orthogonal_(gain=1.0)" in text
    for block in model[0].in_proj_weight.chunk(3):
        torch.testing.assert_close(block @ block.T, torch.eye(8), rtol=1e-5, atol=1e-5)


def test_a_call_for_weights_names_what_it_leaves() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "lstm": nn.LSTM(8, 4)})
    text = str(gonio.init_(model, init.orthogonal_, gain=1.0))
    assert "in_proj_weight of MultiheadAttention layers stay as they are" in text
    assert "weight_ih_l0, weight_hh_l0 of LSTM layers stay as they are" in text


def test_separate_projections() -> None:
    model = nn.Sequential(nn.MultiheadAttention(8, 2, kdim=4, vdim=6))
    gonio.init_(model, init.orthogonal_, tensor="k_proj_weight", gain=1.0)
    gram = model[0].k_proj_weight.T @ model[0].k_proj_weight
    torch.testing.assert_close(gram, torch.eye(4), rtol=1e-5, atol=1e-5)
    with pytest.raises(NoMatchError, match="it has no parameter 'in_proj_weight'"):
        gonio.init_(model, init.orthogonal_, tensor="in_proj_weight")


@pytest.mark.parametrize("tensor", ["weight_ih_l0", "weight_hh_l0"])
def test_gates_of_recurrent_layers(tensor: str) -> None:
    model = nn.Sequential(nn.LSTM(4, 4))
    gonio.init_(model, init.orthogonal_, tensor=tensor, gain=1.0)
    for block in getattr(model[0], tensor).chunk(4):
        torch.testing.assert_close(block @ block.T, torch.eye(4), rtol=1e-5, atol=1e-5)


def test_computed_weights_are_not_set_in_vain() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 3))
    before = model[0].weight.detach().clone()
    text = str(gonio.init_(model, init.orthogonal_, gain=1.0))
    assert "0 stays as it is: its weight is computed; initialise before that" in text
    assert torch.equal(model[0].weight, before)


def test_the_padding_row_of_an_embedding_stays() -> None:
    model = nn.Sequential(nn.Embedding(5, 4, padding_idx=1))
    gonio.init_(model, init.orthogonal_, gain=1.0)
    assert torch.equal(model[0].weight[1], torch.zeros(4))
    assert model[0].weight[0].norm() > 0


def test_lazy_layers_are_named() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3))
    assert "0 stays as it is: it is lazy; run one batch first" in str(gonio.init_(model, init.orthogonal_, gain=1.0))
