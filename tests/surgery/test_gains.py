"""fold_ of the gains and shifts of norms: values by hand, the same function, what stays and why."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import gonio
from bank.live import timm_models, transformers_models
from catalog import seeded
from gonio.errors import NoMatchError, NotApplicableError
from gonio.surgery import fold_, gains, rotate_

X = seeded(2, 5, 8, dtype=torch.float64)


class RMSNorm(nn.Module):
    """Of all entries, times what `factor` gives of the gain."""

    def __init__(self, factor: Callable[[Tensor], Tensor] = lambda w: w):
        super().__init__()
        self.scale, self.factor = nn.Parameter(torch.ones(8)), factor

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.factor(self.scale)


class Net(nn.Module):
    """A first layer, a norm, and what `read` makes of the norm's result; it cannot be traced."""

    def __init__(self, read: Callable[[Any, Tensor], Tensor], norm: nn.Module | None = None, *, bias: bool = True):
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.LayerNorm(8) if norm is None else norm
        self.a, self.b = nn.Linear(8, 8, bias=bias), nn.Linear(8, 8, bias=bias)
        self.read = read
        randomise(self.double())

    def forward(self, x: Tensor) -> Tensor:
        if not torch.isfinite(x).all():
            raise ValueError("not finite")
        return self.read(self, self.norm(self.first(x)))


def randomise(model: nn.Module) -> None:
    for seed, p in enumerate(model.parameters()):
        p.data = seeded(*p.shape, seed=seed, dtype=torch.float64).to(p) + (0.5 if p.ndim == 1 else 0)


def linear(m: Any, x: Tensor) -> Tensor:
    """Two layers read it."""
    return m.a(x).sin() + m.b(x).cos()


def assert_same(old: nn.Module, new: nn.Module, *examples: Any, within: float = 1e-12) -> None:
    for example in examples:
        assert gonio.equivalent(old, new, example=example).relative <= within
    assert list(old.state_dict()) == list(new.state_dict())


def assert_undone(edited: gonio.Edited, model: nn.Module, old: nn.Module) -> None:
    edited.undo_()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), old.parameters(), strict=True))


def test_gain_and_shift_move_into_weights_and_biases() -> None:
    model = Net(linear)
    old = copy.deepcopy(model)
    edited = fold_(model, example=X, gains=True)
    assert [str(change.what) for change in edited.changes] == ["gain and shift folded into a.weight, b.weight"]
    g, b = old.norm.weight, old.norm.bias
    for ours, theirs in ((model.a, old.a), (model.b, old.b)):
        torch.testing.assert_close(ours.weight, theirs.weight @ torch.diag(g), rtol=1e-15, atol=0)
        torch.testing.assert_close(ours.bias, theirs.bias + theirs.weight @ b, rtol=1e-14, atol=1e-15)
    assert model.norm.weight.eq(1).all()
    assert model.norm.bias.eq(0).all()
    assert torch.equal(model.first.weight, old.first.weight)
    assert_same(old, model, X, 3 * X[:1])
    assert_undone(edited, model, old)


def test_without_biases_the_shift_stays_divided_by_the_gain() -> None:
    model = Net(linear, bias=False)
    old = copy.deepcopy(model)
    edited = fold_(model, example=X, gains=True)
    assert any(note.startswith("the shift of norm stays") for note in edited.notes)
    torch.testing.assert_close(model.norm.bias, old.norm.bias / old.norm.weight, rtol=1e-15, atol=0)
    assert model.norm.weight.eq(1).all()
    assert_same(old, model, X)
    again = fold_(model, example=X, gains=True)
    assert not again.changes
    assert any("its gain has nothing to give, and a layer that reads it has no bias" in note for note in again.notes)
    again.undo_()
    assert_undone(edited, model, old)


@pytest.mark.parametrize(("factor", "neutral"), [(lambda w: w, 1), (lambda w: 1 + w, 0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_neutral_value_is_measured(factor: Callable[[Tensor], Tensor], neutral: int, dtype: torch.dtype) -> None:
    model = Net(linear, RMSNorm(factor)).to(dtype)
    old = copy.deepcopy(model)
    edited = fold_(model, example=X.to(dtype), gains=True)
    assert model.norm.scale.eq(neutral).all()
    expected = old.a.weight.double() * factor(old.norm.scale.double())
    torch.testing.assert_close(model.a.weight, expected.to(dtype), rtol=0, atol=0)
    assert_same(old, model, X.to(dtype), within={torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 0.05))
    assert_undone(edited, model, old)


def test_a_gain_of_0_folds_with_a_bias_and_stays_without_one() -> None:
    for bias in (True, False):
        model = Net(linear, bias=bias)
        model.norm.weight.data[3] = 0
        old = copy.deepcopy(model)
        edited = fold_(model, example=X, gains=True)
        assert bool(model.a.weight[:, 3].eq(0).all()) is bias
        assert any("cannot be divided by a gain of 0" in note for note in edited.notes) is not bias
        assert_same(old, model, X)


DRAWN = torch.Generator()
OUT = "read by other means than a layer with a weight of its own"
OTHER = "not only linear layers read its result"


def one(read: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """With no second layer."""
    model = Net(read)
    del model.b
    return model


STAY: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "residual": (lambda: Net(lambda m, x: m.b((x + m.a(x).sin()).cos())), OTHER),
    "activation": (lambda: one(lambda m, x: m.a(F.gelu(x))), OTHER),
    "relu": (lambda: one(lambda m, x: m.a(F.relu(x))), "the outputs change if it moves into a.weight"),
    "norm again": (lambda: one(lambda m, x: m.a(F.rms_norm(x, (8,)))), "the outputs change"),
    "square": (lambda: Net(lambda m, x: m.a(x) + m.b(x * x)), OTHER),
    "output": (lambda: one(lambda m, x: m.a(x).sin() + x), OUT),
    "permuted": (lambda: one(lambda m, x: m.a(x.flip(-1))), "the outputs change"),
    "half": (lambda: one(lambda m, x: F.linear(x[..., :4], m.a.weight.view(16, 4))), OUT),
    "computed": (lambda: Net(lambda m, x: F.linear(x, m.a.weight * m.b.weight)), OUT),
    "computed, too": (lambda: Net(lambda m, x: m.b(x) + F.linear(x, 2 * m.a.weight)), OUT),
    "random": (lambda: one(lambda m, x: m.a(x) + torch.rand(1, generator=DRAWN).double()), "differ from run to run"),
    "used twice": (lambda: one(lambda m, x: m.a(m.a(x).sin())), "a.weight reads something else, too"),
    "other parameter": (lambda: one(lambda m, x: m.a(x) + m.a.weight.sum()), "the outputs change"),
    "idle": (lambda: Net(lambda m, x: m.b(x) if x.max() > 1e6 else m.a(x)), "b.weight had no part in the run"),
    "exponential": (lambda: Net(linear, RMSNorm(torch.exp)), "computes something else than its gain"),
    "clamped": (lambda: Net(linear, RMSNorm(lambda w: w.clamp(-1.5, 1.5) * w.abs())), "the outputs change"),
}


@pytest.mark.parametrize("name", STAY)
def test_what_stays_is_said_with_the_reason(name: str) -> None:
    make, why = STAY[name]
    model = make()
    old = copy.deepcopy(model)
    edited = fold_(model, example=X, gains=True)
    assert not edited.changes
    assert any(note.startswith("norm stays") and why in note for note in edited.notes), edited.notes
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), old.parameters(), strict=True))
    with pytest.raises(NotApplicableError, match=r"fold_: .*norm"):
        fold_(model, example=X, where="norm", gains=True)


class _Start(nn.Module):
    """With a table that is used for masked inputs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mask = nn.Linear(8, 8).double(), nn.Parameter(torch.zeros(1, 8).double())

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.layer(x) if mask is None else torch.where(mask, self.mask, self.layer(x))


def test_an_unused_table_of_a_module_that_ended_before_reads_nothing() -> None:
    model = Net(linear)
    model.first = _Start()
    assert fold_(model, example=X, gains=True).changes
    model = Net(lambda m, x: m.first(m.a(x).sin()) + m.b(x))
    model.first = _Start()
    assert any("first.mask had no part" in note for note in fold_(model, example=X, gains=True).notes)


class _Opaque(torch.autograd.Function):
    """Its backward raises an error of this kind."""

    raised: type[Exception] = RuntimeError

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        raise _Opaque.raised("none\nhere")


@pytest.mark.parametrize("raised", [RuntimeError, AssertionError, ValueError])
def test_a_function_without_a_derivative(raised: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of a model of one's own may refuse it by any error, as those of reversible layers do."""
    monkeypatch.setattr(_Opaque, "raised", raised)
    model = Net(lambda m, x: m.b(_Opaque.apply(x)))
    said = "none" if raised is RuntimeError else f"{raised.__name__}: none"
    assert f"norm stays: derivatives cannot be computed: {said}" in fold_(model, example=X, gains=True).notes
    assert gonio.surgery.anatomy(model, example=X).mlps == ()
    assert (
        gonio.measure(model, batch=X)
        .notes[-1]
        .startswith(f"Gradients were not measured: derivatives cannot be computed: {said}")
    )
    with pytest.raises(NotApplicableError, match=f"what reads what cannot be computed .{said}"):
        rotate_(model, example=X)


class _Still(nn.Module):
    """What is inside runs without gradients, as a frozen teacher or a reversible block does."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)


def test_a_norm_that_runs_without_gradients() -> None:
    model = Net(linear, _Still(nn.LayerNorm(8)))
    before = model(X)
    edited = fold_(model, example=X, gains=True)
    torch.testing.assert_close(model(X), before, rtol=1e-12, atol=1e-12)
    edited.undo_()
    assert torch.equal(model(X), before)


def test_shared_weights_and_gains_stay() -> None:
    model = Net(linear)
    model.b.weight = model.a.weight
    notes = fold_(model, example=X, gains=True).notes
    assert any("a.weight is shared with another layer" in note for note in notes)
    model = Net(lambda m, x: m.b(m.again(m.a(x).sin())))
    model.again = nn.LayerNorm(8).double()
    model.again.weight = model.norm.weight
    notes = fold_(model, example=X, gains=True).notes
    assert any("norm.weight is shared with another layer" in note for note in notes)


def test_only_what_is_asked_for() -> None:
    model = Net(linear)
    with pytest.raises(NoMatchError, match="fold_"):
        fold_(model, example=X)
    fold_(model, example=X, gains=True, where="norm")
    with pytest.raises(NoMatchError, match="fold_"):  # every gain is 1
        fold_(model, example=X, gains=True)


def test_a_model_that_takes_no_known_input_needs_an_example() -> None:
    model = Net(lambda m, x: m.a(x))
    model.forward = lambda x, y: x  # type: ignore[method-assign]
    with pytest.raises(NotApplicableError, match=r"fold_: .*found by running the model.*Pass example="):
        fold_(model, gains=True)


def test_a_wrong_fold_is_undone_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net(lambda m, x: m.a(F.relu(x)) + m.b(x))
    old = copy.deepcopy(model)
    monkeypatch.setattr(gains, "confirmed", lambda trial, able: [options[0] for options in able])
    with pytest.raises(NotApplicableError, match="the outputs changed"):
        fold_(model, example=X, gains=True)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), old.parameters(), strict=True))


def test_a_hold_follows() -> None:
    model = Net(linear)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gonio.hold_(model, optimizer, where="a")
    old = copy.deepcopy(model)
    assert "a.weight is held at its new norm from now on" in str(fold_(model, example=X, gains=True))
    folded = model.a.weight.detach().clone()
    assert not torch.equal(folded, old.a.weight)
    model(X).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.a.weight.norm(), folded.norm())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_transformers_of_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True, norm_first=True).to(dtype).eval()
    randomise(model)
    old, example = copy.deepcopy(model), (X.to(dtype), X.flip(0).to(dtype))
    edited = fold_(model, example=example, gains=True)
    assert {change.path for change in edited.changes} == {
        "encoder.layers.0.norm1", "encoder.layers.0.norm2", "encoder.norm", "decoder.layers.0.norm1",
        "decoder.layers.0.norm2", "decoder.layers.0.norm3",
    }  # fmt: skip
    # queries are computed from norm2, keys and values from the encoder's norm
    ours, theirs = (m.decoder.layers[0].multihead_attn.in_proj_weight for m in (model, old))
    for rows, norm in ((slice(0, 8), old.decoder.layers[0].norm2), (slice(8, 24), old.encoder.norm)):
        torch.testing.assert_close(ours[rows], theirs[rows] * norm.weight)
    other = (2 * example[0][:1, :3], example[1][:1])
    assert_same(old, model, example, other, within=1e-12 if dtype == torch.float64 else 1e-5)
    assert_undone(edited, model, old)


CASES = {case.name: case for case in (*transformers_models.CASES, *timm_models.CASES)}
FAMILIES: dict[str, set[str]] = {  # names of the norms that alone are read by layers, from the architecture
    "Llama": {"input_layernorm", "post_attention_layernorm", "norm"},
    "Mistral": {"input_layernorm", "post_attention_layernorm", "norm"},
    "Mixtral": {"input_layernorm", "post_attention_layernorm", "norm"},
    "Qwen3": {"input_layernorm", "post_attention_layernorm", "norm"},
    "Gemma": {"input_layernorm", "post_attention_layernorm"},
    "Gemma 2": {"input_layernorm", "pre_feedforward_layernorm"},
    "OLMo 2": {"norm"},
    "GPT-2": {"ln_1", "ln_2"},
    "GPT-NeoX": {"input_layernorm", "post_attention_layernorm", "final_layer_norm"},
    "Falcon": {"input_layernorm"},
    "BERT": set(),
    "RoBERTa": set(),
    "BART": set(),
    "T5": {"layer_norm"},
    "ViT": {"layernorm_before", "layernorm_after", "layernorm"},
    "vit_tiny_patch16_224": {"norm1", "norm2", "norm"},
    "convnext_atto": {"norm", "0"},
}


def some(names: Any, *quick: str) -> list[Any]:
    """All names, of which some run in `make test`."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", some(FAMILIES, "Gemma", "GPT-2"))
def test_families(name: str) -> None:
    torch.manual_seed(0)
    model, x = CASES[name].make()
    model = model.double().eval()
    x = tree_map(lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t, x)
    for seed, p in enumerate(p for p in model.parameters() if p.ndim == 1):
        p.data += 0.5 * seeded(*p.shape, seed=seed, dtype=torch.float64)
    old = copy.deepcopy(model)
    edited = fold_(model, example=x, gains=True)
    assert {change.path.rpartition(".")[2] for change in edited.changes} == FAMILIES[name]
    modules = dict(model.named_modules())
    neutral = 0 if name.startswith("Gemma") else 1
    assert all(modules[change.path].weight.eq(neutral).all() for change in edited.changes)
    single = CASES[name].origin == "transformers"  # their norms and softmaxes compute in float32
    other = tree_map(lambda t: t.flip(-1), x)
    assert_same(old, model, x, other, within=1e-6 if single else 1e-12)
    assert_undone(edited, model, old)
