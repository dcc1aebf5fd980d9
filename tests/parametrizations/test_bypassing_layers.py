"""Layers whose forward does more than read an attribute: recurrent nets and attention."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from catalog import seeded
from gonio import parametrizations as P

RECURRENT = {"RNN": nn.RNN, "LSTM": nn.LSTM, "GRU": nn.GRU}


def plain_twin(layer: nn.Module, names: list[str]) -> nn.Module:
    twin = copy.deepcopy(layer)
    for name in names:
        P.detach(twin, name, keep="weight")
    return twin


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_use_the_effective_weight(kind: str) -> None:
    layer = RECURRENT[kind](3, 5, num_layers=2, bidirectional=True)
    names = [name for name, _ in layer.named_parameters() if name.startswith("weight")]
    plain = copy.deepcopy(layer)
    for name in names:
        P.attach(layer, name, P.Sphere(radius=0.5))
    x = seeded(7, 2, 3)
    expected = plain_twin(layer, names)(x)[0]
    assert torch.equal(layer(x)[0], expected)
    assert not torch.allclose(layer(x)[0], plain(x)[0])
    layer(x)[0].sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    with torch.no_grad():
        layer.weight_hh_l0_raw = layer._parameters["weight_hh_l0"].add_(1.0)
    assert not torch.allclose(layer(x)[0], expected)


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_copy_move_and_come_back(kind: str) -> None:
    layer = RECURRENT[kind](3, 5)
    P.attach(layer, "weight_hh_l0", P.WeightNorm())
    x = seeded(7, 2, 3)
    layer(x)[0].sum().backward()
    expected = layer(x)[0]
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x)[0], expected)
    layer.double()
    torch.testing.assert_close(layer(x.double())[0].float(), expected)
    P.detach(layer, "weight_hh_l0", keep="weight")
    assert type(layer) is RECURRENT[kind]
    assert all(a is b for a, b in zip(layer._flat_weights, layer.parameters(), strict=True))
    torch.testing.assert_close(layer(x.double())[0].float(), expected)


def test_recurrent_cells() -> None:
    cell = nn.LSTMCell(3, 4)
    P.attach(cell, "weight_hh", P.Sphere())
    x = seeded(2, 3)
    state = (seeded(2, 4), seeded(2, 4, seed=1))
    assert torch.equal(cell(x, state)[0], plain_twin(cell, ["weight_hh"])(x, state)[0])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_attention_on_both_paths(training: bool, grad: bool) -> None:
    """In evaluation without gradients a fused kernel takes the weights; it reads the attributes."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).train(training)
    plain = copy.deepcopy(layer)
    P.attach(layer.self_attn, "in_proj_weight", P.Sphere(radius=2.0))
    for part in (layer.self_attn.out_proj, layer.linear1, layer.linear2):
        P.attach(part, "weight", P.Sphere(radius=2.0))
    folded = copy.deepcopy(layer)
    P.detach(folded.self_attn, "in_proj_weight", keep="weight")
    for part in (folded.self_attn.out_proj, folded.linear1, folded.linear2):
        P.detach(part, "weight", keep="weight")
    x = seeded(3, 4, 8)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(layer(x), folded(x))
        assert not torch.allclose(layer(x), plain(x))


def test_attention_resets_as_its_class_does() -> None:
    layer = nn.MultiheadAttention(8, 2)
    P.attach(layer, "in_proj_weight", P.Sphere())
    layer.reset_parameters()
    assert P.parametrization_of(layer, "in_proj_weight").holds(layer.in_proj_weight)
    assert layer(seeded(3, 2, 8), seeded(3, 2, 8), seeded(3, 2, 8))[0].shape == (3, 2, 8)
