"""`parametrize_` beyond the laws that `tests/laws` runs over the catalogue."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gonio
from catalog import PARAMETRIZATIONS, VERBS, ParametrizationCase, seeded
from foreign import transformers
from gonio import init
from gonio import parametrizations as P
from gonio.errors import NoMatchError, NotApplicableError
from laws.snapshot import Snapshot, assert_restored
from laws.support import first_of_kind, over
from surgery.net import tied
from surgery.test_swap import TOKENS, encoder, slow_and_fast

network = VERBS[0].model


def test_the_template_is_copied_for_each_layer():
    model = network()
    template = P.WeightNorm()
    gonio.parametrize_(model, template)
    found = [m for m in model.modules() if isinstance(m, P.Parametrization)]
    assert len({id(m) for m in found}) == 3
    assert template not in found


def test_a_tie_to_an_unselected_layer_is_refused() -> None:
    with pytest.raises(NotApplicableError, match=r"it shares its weight with 1\.weight, which is not selected"):
        gonio.parametrize_(tied(), P.Sphere(), where="0")


def test_tied_layers_stay_tied() -> None:
    model = tied()
    gonio.parametrize_(model, P.Sphere())
    assert len(list(model.parameters())) == 3
    assert torch.equal(model[0].weight, model[1].weight)


@pytest.mark.parametrize(
    ("layer", "message"),
    [(nn.BatchNorm2d(4), "its weight is not a matrix"), (nn.LazyLinear(3), "it is lazy; run one batch first")],
    ids=["vector", "lazy"],
)
def test_layers_without_a_matrix_are_refused(layer: nn.Module, message: str) -> None:
    with pytest.raises(NoMatchError, match=message):
        gonio.parametrize_(nn.Sequential(layer), P.Sphere(), where="0")


@pytest.mark.parametrize("fast", [False, True])
def test_a_parametrization_reaches_what_is_read(fast: bool) -> None:
    model = encoder(1)
    before = Snapshot.of(model, TOKENS)
    edits = [gonio.parametrize_(model, P.SpectralNorm(norm=0.1), tensor="in_proj_weight")]
    edits.append(gonio.parametrize_(model, P.SpectralNorm(norm=0.1), where="*.out_proj"))
    norms = [torch.linalg.matrix_norm(block, 2) for block in model.layers[0].self_attn.in_proj_weight.chunk(3)]
    assert max(norms).item() == pytest.approx(0.1, rel=1e-3)
    slow, quick = slow_and_fast(model)
    torch.testing.assert_close(quick, slow)
    for edited in reversed(edits):
        edited.undo_()
    assert_restored(before, Snapshot.of(model, TOKENS))


class Conv1D(nn.Module):
    """Hugging Face's: its weight is (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(seeded(6, 4)), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


def test_filters_of_a_transposed_linear_layer_are_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is known by its name, without importing transformers."""
    monkeypatch.setattr(Conv1D, "__module__", "transformers.pytorch_utils")
    layer, x = Conv1D(), seeded(3, 6)
    model = nn.Sequential(layer)
    gonio.init_(model, init.orthogonal_, gain=1.0)
    torch.testing.assert_close(layer.weight.T @ layer.weight, torch.eye(4), rtol=1e-5, atol=1e-5)
    assert gonio.parametrize_(model, P.Sphere(radius=2.0)).changes
    torch.testing.assert_close(layer.weight.norm(dim=0), torch.full((4,), 2.0))
    expected = model(x)
    gonio.fold_(model, example=x)
    torch.testing.assert_close(model(x), expected)
    assert type(layer).__name__ == "Conv1D"


@over(first_of_kind(PARAMETRIZATIONS))
def test_a_model_on_the_meta_device(case: ParametrizationCase) -> None:
    """Built without memory, parametrized, then given the tensors of a real one."""
    model, x = network().eval(), VERBS[0].inputs()
    with torch.device("meta"):
        deferred = network().eval()
    before = [type(module) for module in deferred.modules()]
    gonio.parametrize_(deferred, case.make()).undo_()
    assert [type(module) for module in deferred.modules()] == before
    for each in (model, deferred):
        gonio.parametrize_(each, case.make())
    assert all(parameter.is_meta for parameter in deferred.parameters())
    deferred.to_empty(device="cpu")
    deferred.load_state_dict(model.state_dict())
    torch.testing.assert_close(deferred(x), model(x))


def test_transformers_is_named_where_its_methods_cannot_find_a_tied_weight() -> None:
    """`tie_weights` looks Parameters up by name, which a computed weight is not; after an undo it works again."""
    library = transformers()
    sizes = {"vocab_size": 16, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}
    model = library.GPT2LMHeadModel(library.GPT2Config(**sizes, bos_token_id=1, eos_token_id=1))
    edited = gonio.parametrize_(model, P.Sphere())
    assert "resize_token_embeddings() and init_weights() of transformers fail while a tied weight" in str(edited)
    with pytest.raises(AttributeError, match="neither a parameter, buffer"):
        model.tie_weights()
    edited.undo_()
    model.tie_weights()
    model.resize_token_embeddings(20, mean_resizing=False)
    assert model.lm_head.weight is model.transformer.wte.weight
    text = str(gonio.parametrize_(model, P.Sphere(), where="*.c_attn"))
    assert "tie_weights" not in text  # no tied weight is selected


def test_matrices_under_other_names_are_noted() -> None:
    """`init_` said so of them, `parametrize_` left them out without a word."""
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16), nn.LSTM(8, 8))
    said = "in_proj_weight of MultiheadAttention layers stay as they are: parametrize them with tensor="
    edited = gonio.parametrize_(model, P.Sphere())
    assert said in edited.notes
    assert any(note.startswith("weight_ih_l0, weight_hh_l0 of LSTM layers stay") for note in edited.notes)
    edited.undo_()
    assert said not in gonio.parametrize_(model, P.Sphere(), where=nn.Linear).notes
