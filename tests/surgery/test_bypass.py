"""Layers that are read instead of called, kept elsewhere, nested, or of a class that computes something else."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import gonio
from catalog import seeded
from gonio import init
from gonio import nn as gnn
from gonio import parametrizations as P
from gonio.errors import InvalidArgumentError, NoMatchError, NotApplicableError
from laws.snapshot import Snapshot, assert_restored

TOKENS = seeded(2, 5, 8)
LINEAR = {"magnitude": gnn.magnitude.Sphere()}


def encoder(layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=True).eval()


def slow_and_fast(model: nn.Module, **arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """The output with the fast path forbidden, and as torch chooses."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            slow = model(TOKENS, **arguments)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        return slow, model(TOKENS, **arguments)


def test_an_attention_output_projection_is_left_out() -> None:
    model = encoder()
    text = str(gonio.swap_(model, gnn.DecoupledLinear.from_linear, **LINEAR))
    assert "layers.0.self_attn.out_proj stays: its parent reads its weight and does not call it" in text
    assert isinstance(model.layers[0].linear1, gnn.DecoupledLinear)
    with pytest.raises(NoMatchError, match=r"out_proj \(its parent reads its weight"):
        gonio.swap_(encoder(), gnn.DecoupledLinear.from_linear, where="*.out_proj")


@pytest.mark.parametrize(
    "arguments", [{}, {"src_key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2])}]
)
def test_the_fast_path_of_a_transformer_does_not_pass_by_what_was_put_in(arguments) -> None:
    model = encoder()
    before = Snapshot.of(model, TOKENS)
    plain, _ = slow_and_fast(model, **arguments)
    edited = gonio.swap_(model, gnn.DecoupledLinear.from_linear, where="*.linear1", **LINEAR)
    slow, fast = slow_and_fast(model, **arguments)
    assert (slow - plain).abs().max() > 1e-3
    torch.testing.assert_close(fast, slow)
    assert "the fast path of TransformerEncoderLayer is off" in str(edited)
    edited.undo_()
    assert_restored(before, Snapshot.of(model, TOKENS))


def test_a_layer_that_a_plain_list_holds_too_is_said() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(1, 1, 1)
            self.stages = [self.first]

        def forward(self, x):
            return self.stages[0](x)

    model = Listed()
    text = str(gonio.swap_(model, gnn.DecoupledConv2d.from_conv))
    assert "stages still holds the module that was first: no edit reaches it there" in text


class Doubled(nn.Conv2d):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_subclass_that_the_factory_refuses_stays_or_is_an_error_where_it_was_asked_for() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 1), Doubled(1, 1, 1))
    text = str(gonio.swap_(model, gnn.DecoupledConv2d.from_conv))
    assert "1 stays: from_conv was asked for 'Doubled'; this subclass of Conv2d computes something else" in text
    model = nn.Sequential(nn.Conv2d(1, 1, 1), Doubled(1, 1, 1))
    with pytest.raises(NotApplicableError, match="this subclass of Conv2d computes something else") as caught:
        gonio.swap_(model, gnn.DecoupledConv2d.from_conv, where="type:Conv2d")
    assert caught.value.__notes__ == ["at 1"]
    assert type(model[0]) is nn.Conv2d
    with pytest.raises(NotApplicableError, match="computes something else"):
        gonio.swap_(nn.Sequential(Doubled(1, 1, 1)), gnn.DecoupledConv2d.from_conv)


def test_a_parametrized_layer_is_not_replaced_without_its_parametrization() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Conv2d(2, 2, 1))
    gonio.parametrize_(model, P.Sphere(), where="0")
    with pytest.raises(NotApplicableError, match="its weight is computed by a parametrization"):
        gonio.swap_(model, gnn.DecoupledConv2d.from_conv, where="0")
    torch.nn.utils.parametrizations.weight_norm(model[1])
    with pytest.raises(NotApplicableError, match="its weight is computed by a parametrization"):
        gonio.swap_(model, gnn.DecoupledConv2d.from_conv, where="1")


def test_a_layer_inside_one_that_is_dropped_is_an_error() -> None:
    def plain(block: nn.Sequential) -> nn.Module:
        return nn.Sequential(nn.ReLU())

    def either(module: nn.Sequential | nn.Linear) -> nn.Module:
        return plain(module) if isinstance(module, nn.Sequential) else nn.Linear(2, 2)

    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(
        NotApplicableError, match=r"'0\.0'; a selected layer around it was replaced by one that does not"
    ):
        gonio.swap_(model, either, where=r"re:0.*")
    assert type(model[0][0]) is nn.Linear


def test_a_factory_must_make_modules() -> None:
    def nothing(linear: nn.Linear):
        return None

    with pytest.raises(InvalidArgumentError, match=r"makes modules \(.*nothing\); found a NoneType for '0'"):
        gonio.swap_(nn.Sequential(nn.Linear(2, 2)), nothing)


class TestPackedProjections:
    def test_each_projection_is_drawn_as_a_matrix_of_its_own(self) -> None:
        model = nn.Sequential(nn.MultiheadAttention(8, 2))
        text = str(gonio.init_(model, init.orthogonal_, tensor="in_proj_weight", gain=1.0))
        assert "0  in_proj_weight: orthogonal_(gain=1.0)" in text
        for block in model[0].in_proj_weight.chunk(3):
            torch.testing.assert_close(block @ block.T, torch.eye(8), rtol=1e-5, atol=1e-5)

    def test_a_call_for_weights_names_what_it_leaves(self) -> None:
        model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "lstm": nn.LSTM(8, 4)})
        text = str(gonio.init_(model, init.orthogonal_, gain=1.0))
        assert "in_proj_weight of MultiheadAttention layers stay as they are" in text
        assert "weight_ih_l0, weight_hh_l0 of LSTM layers stay as they are" in text

    def test_separate_projections(self) -> None:
        model = nn.Sequential(nn.MultiheadAttention(8, 2, kdim=4, vdim=6))
        gonio.init_(model, init.orthogonal_, tensor="k_proj_weight", gain=1.0)
        gram = model[0].k_proj_weight.T @ model[0].k_proj_weight
        torch.testing.assert_close(gram, torch.eye(4), rtol=1e-5, atol=1e-5)
        with pytest.raises(NoMatchError, match="it has no parameter 'in_proj_weight'"):
            gonio.init_(model, init.orthogonal_, tensor="in_proj_weight")

    def test_undo_brings_the_values_back(self) -> None:
        model = nn.Sequential(nn.MultiheadAttention(8, 2))
        before = model[0].in_proj_weight.detach().clone()
        edited = gonio.init_(model, init.orthogonal_, tensor="in_proj_weight")
        assert not torch.equal(model[0].in_proj_weight, before)
        edited.undo_()
        assert torch.equal(model[0].in_proj_weight, before)

    @pytest.mark.parametrize("tensor", ["weight_ih_l0", "weight_hh_l0"])
    def test_gates_of_recurrent_layers(self, tensor: str) -> None:
        model = nn.Sequential(nn.LSTM(4, 4))
        gonio.init_(model, init.orthogonal_, tensor=tensor, gain=1.0)
        for block in getattr(model[0], tensor).chunk(4):
            torch.testing.assert_close(block @ block.T, torch.eye(4), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("fast", [False, True])
    def test_a_parametrization_reaches_what_is_read(self, fast: bool) -> None:
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


class TestLayersWithoutAWeightOfTheirOwn:
    def test_lazy_layers_are_named(self) -> None:
        model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3))
        assert "0 stays as it is: it is lazy; run one batch first" in str(
            gonio.init_(model, init.orthogonal_, gain=1.0)
        )
        with pytest.raises(NoMatchError, match="it is lazy; run one batch first"):
            gonio.parametrize_(model, P.Sphere(), where="0")
        with pytest.raises(NoMatchError, match="it is lazy; run one batch first"):
            gonio.lsuv_(model, seeded(2, 3), where="0")

    def test_computed_weights_are_not_set_in_vain(self) -> None:
        model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 3))
        before = model[0].weight.detach().clone()
        text = str(gonio.init_(model, init.orthogonal_, gain=1.0))
        assert "0 stays as it is: its weight is computed; initialise before that" in text
        assert torch.equal(model[0].weight, before)

    def test_the_padding_row_of_an_embedding_stays(self) -> None:
        model = nn.Sequential(nn.Embedding(5, 4, padding_idx=1))
        gonio.init_(model, init.orthogonal_, gain=1.0)
        assert torch.equal(model[0].weight[1], torch.zeros(4))
        assert model[0].weight[0].norm() > 0

    def test_a_tied_weight_is_scaled_once(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        model[2].weight = model[0].weight
        assert "2  tied: scaled above" in str(gonio.lsuv_(model, seeded(64, 4)))
