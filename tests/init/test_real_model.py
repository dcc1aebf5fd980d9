"""The inits through the verb, on one model that holds every kind of layer that keeps its weights in its own way."""

from __future__ import annotations

from math import prod, sqrt

import pytest
import torch
from torch import Tensor, nn

import gonio
from gonio.geometry import layout_of, matrix_view, singular_values
from gonio.init import fans, orthogonal_, variance_scaling_


class Tagger(nn.Module):
    """Words through convolutions, an LSTM and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(200, 64, padding_idx=3)
        self.grouped = nn.Conv1d(64, 96, 3, groups=4, padding=1)
        self.depthwise = nn.Conv1d(96, 96, 5, groups=96, padding=2)
        self.down = nn.Conv1d(96, 64, 2, stride=2)
        self.up = nn.ConvTranspose1d(64, 48, 2, stride=2, groups=2)
        self.memory = nn.LSTM(48, 32, num_layers=2, bidirectional=True, proj_size=16, batch_first=True)
        self.mixer = nn.MultiheadAttention(32, 4, batch_first=True)
        self.other = nn.MultiheadAttention(32, 4, kdim=8, vdim=6, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.depthwise(self.grouped(self.words(x).transpose(1, 2)).relu()).relu()
        hidden, _ = self.memory(self.up(self.down(hidden).tanh()).transpose(1, 2))
        hidden = hidden + self.mixer(hidden, hidden, hidden)[0]
        return self.head(hidden + self.other(hidden, hidden[..., :8], hidden[..., :6])[0])


OWN_NAMES = ["in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"] + [
    f"weight_{kind}_l{layer}{back}" for layer in (0, 1) for back in ("", "_reverse") for kind in ("ih", "hh", "hr")
]


def owners(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Every tensor that is a stack of matrices: its path, its layer, its name there."""
    return [
        (f"{path}.{name}", module, name)
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim > 1
    ]


def initialise_all_(model: nn.Module, function, **options) -> None:
    for name in ("weight", *OWN_NAMES):
        gonio.init_(model, function, seed=1, tensor=name, **options)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")  # torch's own
def test_every_matrix_of_every_layer_becomes_orthogonal() -> None:
    model = Tagger()
    initialise_all_(model, orthogonal_, gain=2.0)
    for path, module, name in owners(model):
        weight = getattr(module, name).detach()
        matrices = matrix_view(weight, layout_of(module, name))
        if path == "words.weight":
            assert torch.equal(weight[3], torch.zeros(64))
            matrices = torch.cat([matrices[:, :3], matrices[:, 4:]], 1)
            assert float((singular_values(matrices) - 2).abs().max()) < 0.7  # one row of 200 is missing
            continue
        assert matrices.shape[0] == layout_of(module, name).matrices
        values = singular_values(matrices)
        torch.testing.assert_close(values, torch.full_like(values, 2.0), msg=path)
    assert model(torch.randint(200, (2, 8))).isfinite().all()


@pytest.mark.parametrize("preserve", ["norm", "rms"])
def test_every_matrix_has_the_variance_of_its_own_fans(preserve: str) -> None:
    """Per block, not per stored tensor: the two differ by 3 for packed attention and by 4 for an LSTM."""
    model = Tagger()
    initialise_all_(model, variance_scaling_, preserve=preserve, distribution="rademacher", gain=1.0)
    for path, module, name in owners(model):
        weight, layout = getattr(module, name).detach(), layout_of(module, name)
        rows, cols = matrix_view(weight, layout).shape[1:]
        kernel, stride = prod(weight.shape[2:]), prod(layout.stride)
        fan_in = cols / (stride if layout.transposed else 1)
        fan_out = rows * kernel / (1 if layout.transposed else stride)
        assert (fans(weight.shape, layout).fan_in, fans(weight.shape, layout).fan_out) == (fan_in, fan_out), path
        size = 1 / sqrt(fan_out if preserve == "norm" else fan_in)
        sizes = weight.abs()
        if path == "words.weight":
            sizes = torch.cat([sizes[:3], sizes[4:]])
        torch.testing.assert_close(sizes, torch.full_like(sizes, size), msg=path)


def test_one_call_for_weight_says_what_it_leaves() -> None:
    model = Tagger()
    before = {path: getattr(module, name).detach().clone() for path, module, name in owners(model)}
    edited = gonio.init_(model, orthogonal_, gain=1.0)
    taken = {f"{change.path}.weight" for change in edited.changes}
    for path, module, name in owners(model):
        assert torch.equal(getattr(module, name), before[path]) == (path not in taken), path
    assert {"words.weight", "mixer.out_proj.weight", "up.weight"} <= taken
    assert not any("weight_ih" in path or "in_proj" in path for path in taken)
    assert "in_proj_weight" in str(edited)
    assert "weight_ih_l0" in str(edited)


def test_tensors_of_one_layer_are_drawn_independently() -> None:
    model = nn.LSTM(16, 16)
    for name in ("weight_ih_l0", "weight_hh_l0"):
        gonio.init_(model, orthogonal_, tensor=name, gain=1.0)
    assert model.weight_ih_l0.shape == model.weight_hh_l0.shape
    assert not torch.allclose(model.weight_ih_l0, model.weight_hh_l0)
