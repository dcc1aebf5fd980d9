"""`lsuv_` beyond the laws that `tests/laws` runs over the catalogue."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import foreign
import gonio
from catalog import VERBS, seeded
from gonio import parametrizations as P
from gonio.errors import NoMatchError, NotApplicableError
from gonio.surgery import lsuv_
from surgery.net import Net, tied


def test_every_layer_has_unit_variance_in_execution_order() -> None:
    """They are registered last to first."""
    layers = {"third": nn.Linear(32, 4), "second": nn.Conv1d(8, 8, 1), "first": nn.Conv1d(3, 8, 3, padding=1)}
    model = Net(lambda m, x: m.third(torch.relu(m.second(torch.relu(m.first(x)))).flatten(1)), **layers)
    x, stds = seeded(64, 3, 4), []
    edited = lsuv_(model, x)
    assert [change.path for change in edited.changes] == ["first", "second", "third"]
    for layer in layers.values():
        layer.register_forward_hook(lambda _, __, y: stds.append(float(y.detach().std())))
    model(x)
    assert stds == pytest.approx([1, 1, 1], abs=0.011)


def test_a_dead_layer_is_reported_and_the_others_converge() -> None:
    live, dead = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
    text = str(lsuv_(Net(lambda m, x: m.dead(0 * m.live(x)), live=live, dead=dead), seeded(16, 4)))
    assert "dead has not converged: its output is constant" in text
    assert "live  output std" in text


def test_non_finite_input_ends_and_is_reported() -> None:
    text = str(lsuv_(nn.Sequential(nn.Linear(4, 4)), torch.full((8, 4), float("nan"))))
    assert "0 has not converged: its output's std is nan" in text


def test_a_layer_that_does_not_run_is_left_and_said() -> None:
    model = Net(lambda m, x: m.used(x), used=nn.Linear(4, 4), unused=nn.Linear(4, 4))
    before = model.unused.weight.detach().clone()
    assert "unused did not run on the batch" in str(lsuv_(model, seeded(16, 4)))
    assert torch.equal(model.unused.weight, before)
    with pytest.raises(NotApplicableError, match="no selected layer ran"):
        lsuv_(model, seeded(16, 4), where="unused")


def test_modes_and_buffers_stay() -> None:
    model = VERBS[0].model()
    before = model[1].running_mean.clone()
    lsuv_(model, seeded(4, 2, 5, 5))
    assert all(module.training for module in model.modules())
    assert torch.equal(model[1].running_mean, before)


@pytest.mark.parametrize(
    ("layer", "message"),
    [(nn.ReLU(), "not a linear or convolutional layer"), (nn.LazyLinear(3), "it is lazy; run one batch first")],
    ids=["ReLU", "lazy"],
)
def test_nothing_to_scale(layer: nn.Module, message: str) -> None:
    with pytest.raises(NoMatchError, match=message):
        lsuv_(nn.Sequential(layer), seeded(2, 2))


COMPUTED = {
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
    "sphere": lambda layer: gonio.parametrize_(layer, P.Sphere()) and layer,
}


@pytest.mark.parametrize("kind", COMPUTED)
def test_weights_that_are_computed_are_left_and_named(kind: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), COMPUTED[kind](nn.Linear(8, 8))).eval()
    before = model[2].weight.detach().clone()
    text = str(lsuv_(model, seeded(64, 8)))
    assert "2 stays" in text
    assert "0  output std" in text
    assert torch.equal(model[2].weight, before)


def test_a_tied_weight_is_scaled_once() -> None:
    assert "2  tied: scaled above" in str(lsuv_(tied(nn.ReLU()), seeded(64, 4)))


def test_linear_layers_that_store_their_inputs_first_are_scaled() -> None:
    """`Conv1D`, of which GPT-2 consists."""
    transformers = foreign.transformers()
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 20}
    model = transformers.GPT2Model(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    seen: dict[str, Tensor] = {}
    edited = gonio.lsuv_(model, {"input_ids": torch.arange(16).view(2, 8)})
    for change in edited.changes:
        layer = model.get_submodule(change.path)
        layer.register_forward_hook(lambda *args, path=change.path: seen.update({path: args[2].detach()}))
    model(torch.arange(16).view(2, 8))
    assert set(seen) == {"h.0.attn.c_attn", "h.0.attn.c_proj", "h.0.mlp.c_fc", "h.0.mlp.c_proj"}
    assert all(float(y.std(correction=0)) == pytest.approx(1, abs=0.01) for y in seen.values())
    weight = model.h[0].mlp.c_fc.weight.detach()  # 16 inputs, stored first, of 64 orthogonal filters: a scaled basis
    gram = weight @ weight.T
    assert torch.allclose(gram, gram[0, 0] * torch.eye(16), atol=1e-5 * float(gram[0, 0]))
