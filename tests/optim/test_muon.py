"""Muon: torch's on matrices, and right where torch refuses or mixes: convolutions, heads, experts."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gonio
from catalog import seeded
from foreign import TORCHS_MUON
from gonio.errors import InvalidArgumentError
from gonio.geometry import layout_of, matrix_view
from gonio.optim import Muon
from gonio.penalty.matrices import Blocks
from gonio.surgery.facts import Facts, register
from laws.support import reloaded

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "plain momentum": {"nesterov": False, "momentum": 0.8},
    "AdamW's size": {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
    "three steps": {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5)},
}


def polar(matrix: Tensor) -> Tensor:
    u, _, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u @ v


@TORCHS_MUON
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", [(8, 8), (12, 5), (5, 12)])
def test_on_a_matrix_it_is_torchs_to_the_last_bit(name: str, shape: tuple[int, int]) -> None:
    ours, theirs = (nn.Parameter(seeded(*shape)) for _ in range(2))
    optimizers = [Muon([ours], lr=0.1, **OPTIONS[name]), torch.optim.Muon([theirs], lr=0.1, **OPTIONS[name])]
    for seed in range(4):
        for p, optimizer in zip((ours, theirs), optimizers, strict=True):
            p.grad = seeded(*shape, seed=seed + 1)
            optimizer.step()
    assert torch.equal(ours, theirs)


@TORCHS_MUON
def test_matrices_of_one_size_are_batched_with_the_same_result() -> None:
    """Batched products round otherwise: bfloat16 has 8 bits, and five iterations add up."""
    ours, theirs = ([nn.Parameter(seeded(16, 8, seed=i)) for i in range(3)] for _ in range(2))
    optimizers = [Muon(ours, lr=0.1), torch.optim.Muon(theirs, lr=0.1)]
    for params, optimizer in zip((ours, theirs), optimizers, strict=True):
        for i, p in enumerate(params):
            p.grad = seeded(16, 8, seed=i + 9)
        optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        assert float((a - b).detach().norm()) < 0.02 * 0.1 * 8**0.5


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: nn.Conv2d(3, 8, 3),
    "grouped": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "transposed": lambda: nn.ConvTranspose2d(4, 6, 2),
    "transposed, grouped": lambda: nn.ConvTranspose2d(4, 6, 2, groups=2),
    "LSTM": lambda: nn.LSTM(6, 5),
}


@pytest.mark.parametrize("name", LAYERS)
def test_each_block_is_orthogonalised_by_itself(name: str) -> None:
    """Nearly the polar factor of each matrix of the layer's view, by SVD; singular values are between 0.5 and 1.3."""
    layer = LAYERS[name]()
    key = "weight_ih_l0" if name == "LSTM" else "weight"
    weight, layout = layer.get_parameter(key), layout_of(layer, key)
    model = nn.ModuleDict({"body": layer, "head": nn.Linear(2, 2)})
    optimizer = Muon(gonio.param_groups(model, matrices=True), lr=1.0, weight_decay=0.0, momentum=0.0)
    before, gradient = weight.detach().clone(), seeded(*weight.shape)
    weight.grad = gradient.clone()
    optimizer.step()
    changes = matrix_view(before - weight.detach(), layout).double()
    for change, block in zip(changes, matrix_view(gradient, layout), strict=True):
        scale = max(1, block.shape[0] / block.shape[1]) ** 0.5
        expected = scale * polar(block)
        assert float((change - expected).norm() / expected.norm()) < 0.35
        assert float((torch.linalg.svdvals(change) / scale).min()) > 0.5


class Attention(nn.Module):
    def __init__(self, dim: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.qkv(x)[..., : x.shape[-1]])


register(Attention, Facts(fused={"qkv": 3}))


def test_a_head_does_not_see_the_others() -> None:
    """The update of one head is the same whatever gradient the others have; as one matrix it is not."""
    model = nn.Sequential(OrderedDict(attn=Attention(), head=nn.Linear(8, 2)))
    groups = gonio.param_groups(model, matrices=True)
    assert groups.matrices == {"attn.qkv.weight": "6 matrices 4×8", "attn.proj.weight": "matrix 8×8"}

    def first_head(groups: Any, other: float) -> Tensor:
        weight = model.attn.qkv.weight
        weight.data = seeded(24, 8)
        weight.grad = seeded(24, 8, seed=1) * torch.tensor([1.0] * 4 + [other] * 20).view(-1, 1)
        Muon(groups, lr=0.1).step()
        weight.grad = None
        return weight.detach()[:4].clone()

    assert torch.equal(first_head(groups, 1), first_head(groups, 30))
    whole = [{"params": [model.attn.qkv.weight]}]
    assert not torch.allclose(first_head(whole, 1), first_head(whole, 30), atol=1e-2)


@pytest.mark.parametrize(
    ("blocks", "shape", "sizes"),
    [
        (Blocks(), (6, 4), [(1, 6, 4)]),
        (Blocks(), (6, 4, 3, 3), [(1, 6, 36)]),
        (Blocks(2), (6, 4, 3), [(2, 3, 12)]),
        (Blocks(2, transposed=True), (6, 4, 3), [(2, 4, 9)]),
        (Blocks(rows=(2,)), (6, 4), [(3, 2, 4)]),
        (Blocks(rows=(1, 1, 2)), (8, 3), [(2, 1, 3), (2, 1, 3), (2, 2, 3)]),
        (Blocks(transposed=True, rows=(2,)), (5, 6), [(3, 2, 5)]),
        (Blocks(4, stacked=True), (4, 6, 3), [(4, 6, 3)]),
    ],
)
def test_blocks_are_cut_and_joined(blocks: Blocks, shape: tuple[int, ...], sizes: list[tuple[int, ...]]) -> None:
    weight = seeded(*shape)
    parts = blocks.split(weight)
    assert [tuple(part.shape) for part in parts] == sizes
    assert torch.equal(blocks.join(parts, weight), weight)
    assert Blocks.of(blocks.code) == blocks


def test_other_parameters_are_trained_by_adamw() -> None:
    model = nn.Sequential(OrderedDict(body=nn.Linear(4, 6), head=nn.Linear(6, 2)))
    optimizer = Muon(gonio.param_groups(model, 0.1, matrices=True), lr=0.1, others_lr=0.01)
    others = ["body.bias", "head.weight", "head.bias"]
    twin = {name: nn.Parameter(model.get_parameter(name).detach().clone()) for name in others}
    decays = [{"params": [twin["head.weight"]], "weight_decay": 0.1}]
    biases = [{"params": [twin["body.bias"], twin["head.bias"]], "weight_decay": 0.0}]
    reference = torch.optim.AdamW([*decays, *biases], lr=0.01, betas=(0.9, 0.95))
    for seed in range(3):
        for name, p in model.named_parameters():
            p.grad = seeded(*p.shape, seed=seed)
            if name in twin:
                twin[name].grad = p.grad.clone()
        optimizer.step()
        reference.step()
    for name, p in twin.items():
        assert torch.allclose(model.get_parameter(name), p, rtol=1e-6, atol=1e-7), name


def test_the_state_is_saved_with_the_blocks() -> None:
    def start() -> tuple[nn.Module, Muon]:
        torch.manual_seed(0)
        model = nn.Sequential(OrderedDict(attn=Attention(), head=nn.Linear(8, 2)))
        return model, Muon(gonio.param_groups(model, matrices=True), lr=0.1)

    def train(model: nn.Module, optimizer: Muon, seed: int) -> None:
        for p in model.parameters():
            p.grad = seeded(*p.shape, seed=seed)
        optimizer.step()

    model, optimizer = start()
    train(model, optimizer, 0)
    state = reloaded({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, 1)
    other, resumed = start()
    other.load_state_dict(state["model"])
    resumed.load_state_dict(state["optimizer"])
    train(other, resumed, 1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_held_weights_with_gains_train_by_muon() -> None:
    model = nn.Sequential(OrderedDict(body=nn.Linear(4, 6), head=nn.Linear(6, 2)))
    optimizer = Muon(gonio.param_groups(model, matrices=True), lr=0.1)
    gonio.hold_(model, optimizer, where="body", norm="filters", step="fixed", magnitude="learned")
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    norms = model.body._parameters["weight"].norm(dim=1).detach().clone()
    optimizer.step()
    assert torch.allclose(model.body._parameters["weight"].norm(dim=1), norms, rtol=1e-6)


def test_errors() -> None:
    with pytest.raises(InvalidArgumentError, match=r"at least 2 dimensions as matrices; found one of shape \(3,\)"):
        Muon([nn.Parameter(torch.ones(3))])
    with pytest.raises(InvalidArgumentError, match=r"Muon\(lr=\) is finite and not negative; found -1"):
        Muon([nn.Parameter(torch.ones(3, 3))], lr=-1)
    with pytest.raises(InvalidArgumentError, match=r"adjust_lr_fn=\) is one of original, match_rms_adamw; found 'x'"):
        Muon([nn.Parameter(torch.ones(3, 3))], adjust_lr_fn="x")


def test_sparse_gradients_are_refused_before_anything_is_changed() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(10, 4, sparse=True), "layer": nn.Linear(4, 3)})
    optimizer = Muon(gonio.param_groups(model, matrices=True), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    model["layer"](model["table"](torch.tensor([1, 2]))).sum().backward()
    with pytest.raises(
        InvalidArgumentError, match=r"Muon takes dense gradients; found one of torch.sparse_coo .* \(10,"
    ):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": math.nan},
        {"weight_decay": math.inf},
        {"betas": (2.0, -1.0)},
        {"ns_steps": -3},
        {"eps": -1.0},
        {"eps": 0.0},
    ],
    ids=str,
)
def test_numbers_out_of_range_are_refused(wrong) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"Muon\({next(iter(wrong))}=\)"):
        Muon([nn.Parameter(torch.ones(3, 3))], **wrong)


def test_parameters_of_one_size_on_two_devices() -> None:
    here, there = nn.Parameter(seeded(3, 3)), nn.Parameter(torch.empty(3, 3, device="meta"))
    alone = nn.Parameter(here.detach().clone())
    for parameters in ([here, there], [alone]):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        Muon(parameters).step()
    assert torch.equal(here, alone)
