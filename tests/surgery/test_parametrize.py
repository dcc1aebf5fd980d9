"""`parametrize_` beyond the laws that `tests/laws` runs over the catalogue."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gonio
from catalog import PARAMETRIZATIONS, ParametrizationCase, seeded
from foreign import transformers
from gonio import init
from gonio import parametrizations as P
from gonio.errors import AlreadyAppliedError, NoMatchError, NotApplicableError
from laws.snapshot import Snapshot, assert_restored
from laws.support import first_of_kind, over
from surgery.test_init import network
from surgery.test_swap import TOKENS, encoder, slow_and_fast


def test_twice_is_refused():
    model = network()
    gonio.parametrize_(model, P.Sphere(), where="4")
    with pytest.raises(AlreadyAppliedError, match=r"cannot change '4'; found Sphere on 'weight' there already"):
        gonio.parametrize_(model, P.Sphere(), where="4")


def test_the_template_is_copied_for_each_layer():
    model = network()
    template = P.WeightNorm()
    gonio.parametrize_(model, template)
    found = [m for m in model.modules() if isinstance(m, P.Parametrization)]
    assert len({id(m) for m in found}) == 3
    assert template not in found


def test_a_tie_to_an_unselected_layer_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with pytest.raises(NotApplicableError, match=r"it shares its weight with 1\.weight, which is not selected"):
        gonio.parametrize_(model, P.Sphere(), where="0")


def test_tied_layers_stay_tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    gonio.parametrize_(model, P.Sphere())
    assert len(list(model.parameters())) == 3
    assert torch.equal(model[0].weight, model[1].weight)


def test_added_parameters_reach_the_optimizer():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    edited = gonio.parametrize_(model, P.WeightNorm(), optimizer=optimizer)
    assert {id(p) for p in model.parameters()} == {id(p) for p in optimizer.param_groups[0]["params"]}
    edited.undo_()
    assert {id(p) for p in model.parameters()} == {id(p) for p in optimizer.param_groups[0]["params"]}


def test_a_vector_cannot_be_parametrized():
    with pytest.raises(NoMatchError, match="its weight is not a matrix"):
        gonio.parametrize_(network(), P.Sphere(), where=nn.BatchNorm2d)


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


class TestTransposedLinear:
    """Hugging Face's Conv1D stores (in, out); it is known by its name, without importing transformers."""

    @pytest.fixture
    def layer(self) -> nn.Module:
        class Conv1D(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight, self.bias = nn.Parameter(seeded(6, 4)), nn.Parameter(torch.zeros(4))

            def forward(self, x):
                return torch.addmm(self.bias, x, self.weight)

        Conv1D.__module__, Conv1D.__qualname__ = "transformers.pytorch_utils", "Conv1D"
        return Conv1D()

    def test_filters_are_columns(self, layer: nn.Module) -> None:
        model = nn.Sequential(layer)
        gonio.init_(model, init.orthogonal_, gain=1.0)
        torch.testing.assert_close(layer.weight.T @ layer.weight, torch.eye(4), rtol=1e-5, atol=1e-5)
        edited = gonio.parametrize_(model, P.Sphere(radius=2.0))
        torch.testing.assert_close(layer.weight.norm(dim=0), torch.full((4,), 2.0))
        expected = model(seeded(3, 6))
        gonio.fold_(model, example=seeded(3, 6))
        torch.testing.assert_close(model(seeded(3, 6)), expected)
        assert type(layer).__name__ == "Conv1D"
        assert edited.changes


def test_lazy_layers_are_refused():
    with pytest.raises(NoMatchError, match="it is lazy; run one batch first"):
        gonio.parametrize_(nn.Sequential(nn.LazyLinear(3)), P.Sphere())


@over(first_of_kind(PARAMETRIZATIONS))
def test_a_model_on_the_meta_device(case: ParametrizationCase) -> None:
    """Built without memory, parametrized, then given the tensors of a real one."""
    model, x = network().eval(), seeded(2, 3, 4, 4)
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
