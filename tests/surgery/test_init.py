"""`init_` beyond the laws that `tests/laws` runs over the catalogue."""

from __future__ import annotations

from math import prod, sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import foreign
import gonio
from catalog import VERBS, seeded
from gonio import init
from gonio.errors import InvalidArgumentError, NoMatchError, NotApplicableError
from gonio.geometry import layout_of, matrix_view, singular_values
from surgery.net import Net, tied

network = VERBS[0].model


def test_a_weight_depends_on_seed_and_path_alone() -> None:
    one, other = network(), network()
    other.add_module("extra", nn.Linear(2, 2))
    gonio.init_(one, init.orthogonal_, seed=3, gain=1.0)
    gonio.init_(other, init.orthogonal_, where="[046]", seed=3, gain=1.0)
    assert torch.equal(one[4].weight, other[4].weight)
    gonio.init_(other, init.orthogonal_, where="[046]", seed=4, gain=1.0)
    assert not torch.equal(one[4].weight, other[4].weight)


def test_the_gain_follows_the_activation() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    table = str(gonio.init_(model, init.orthogonal_))
    for path, activation in ((0, "relu"), (2, "tanh"), (4, "linear")):
        assert f"{path}  orthogonal_(gain={activation})" in table


def test_an_unknown_activation_is_said() -> None:
    text = str(gonio.init_(Net(lambda m, x: torch.sin(m.fc(x)), fc=nn.Linear(4, 4)), init.orthogonal_))
    assert "the function's own gain where the following activation is not known" in text
    assert "fc  orthogonal_()" in text


def test_a_failure_in_the_middle_leaves_all_as_it_was() -> None:
    model = network()
    before = {k: v.clone() for k, v in model.state_dict().items()}

    def fails_late(weight, *, layout, generator):
        return weight.fill_(float("nan") if weight.shape == (3, 6) else 0.0)

    message = r"init_: cannot initialise layer '6' \(Linear\): fails_late gave non-finite"
    with pytest.raises(NotApplicableError, match=message):
        gonio.init_(model, fails_late)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_unknown_options_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"gian, which it does not take\. It takes .*gain"):
        gonio.init_(network(), init.orthogonal_, gian=2.0)


@pytest.mark.parametrize("verb", [gonio.init_, lambda model, f: gonio.lsuv_(model, seeded(4, 2, 5, 5), function=f)])
@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("orthogonal", r"takes a function of gonio\.init, .*; found 'orthogonal'\. Pass gonio\.init\.orthogonal_\."),
        (nn.init.orthogonal_, r"init\.orthogonal_, which takes no layout .* Pass gonio\.init\.orthogonal_\."),
        (nn.init.sparse_, r"found torch\.nn\.init\.sparse_, .* Pass a function of gonio\.init\."),
    ],
)
def test_other_functions_are_refused_with_the_one_to_pass(verb, function, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        verb(network(), function)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (tied(), "1  tied: initialised above"),
        (
            nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 3)),
            "0 stays: its weight is computed; initialise before that",
        ),
        (nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3)), "0 stays: it is lazy; run one batch first"),
    ],
    ids=["tied", "computed", "lazy"],
)
def test_what_is_not_drawn_is_said(model: nn.Module, message: str) -> None:
    before = None if isinstance(model[0], nn.LazyLinear) else model[0].weight.detach().clone()
    assert message in str(gonio.init_(model, init.orthogonal_, gain=1.0))
    if before is not None:
        assert torch.equal(model[0].weight, before) == ("tied" not in message)


@pytest.mark.parametrize(
    ("model", "tensor", "message"),
    [
        (nn.Linear(2, 2, device="meta"), "weight", "on the meta device"),
        (nn.MultiheadAttention(8, 2, kdim=4, vdim=6), "in_proj_weight", "it has no parameter 'in_proj_weight'"),
    ],
)
def test_layers_without_the_tensor_are_refused(model: nn.Module, tensor: str, message: str) -> None:
    with pytest.raises(NoMatchError, match=message):
        gonio.init_(model, init.orthogonal_, tensor=tensor, gain=1.0)


# --- a model with every kind of layer that keeps its weights in its own way ----------------------------


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


def owners(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Every tensor that is a stack of matrices: its path, its layer, its name there."""
    return [
        (f"{path}.{name}", module, name)
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim > 1
    ]


def initialised(function, **options) -> Tagger:
    model = Tagger()
    for name in sorted({name for _, _, name in owners(model)}):
        gonio.init_(model, function, seed=1, tensor=name, **options)
    return model


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")  # torch's own
def test_every_matrix_of_every_layer_becomes_orthogonal() -> None:
    model = initialised(init.orthogonal_, gain=2.0)
    for path, module, name in owners(model):
        weight = getattr(module, name).detach()
        matrices = matrix_view(weight, layout_of(module, name))
        if path == "words.weight":
            assert torch.equal(weight[3], torch.zeros(64))  # the padding row
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
    model = initialised(init.variance_scaling_, preserve=preserve, distribution="rademacher", gain=1.0)
    for path, module, name in owners(model):
        weight, layout = getattr(module, name).detach(), layout_of(module, name)
        rows, cols = matrix_view(weight, layout).shape[1:]
        kernel, stride = prod(weight.shape[2:]), prod(layout.stride)
        fan_in = cols / (stride if layout.transposed else 1)
        fan_out = rows * kernel / (1 if layout.transposed else stride)
        assert init.fans(weight.shape, layout) == init.Fans(fan_in, fan_out), path
        sizes = torch.cat([weight[:3], weight[4:]]).abs() if path == "words.weight" else weight.abs()
        size = 1 / sqrt(fan_out if preserve == "norm" else fan_in)
        torch.testing.assert_close(sizes, torch.full_like(sizes, size), msg=path)


def test_one_call_for_weight_says_what_it_leaves() -> None:
    model = Tagger()
    before = {path: getattr(module, name).detach().clone() for path, module, name in owners(model)}
    edited = gonio.init_(model, init.orthogonal_, gain=1.0)
    taken = {f"{change.path}.weight" for change in edited.changes}
    for path, module, name in owners(model):
        assert torch.equal(getattr(module, name), before[path]) == (path not in taken), path
    assert {"words.weight", "mixer.out_proj.weight", "up.weight"} <= taken
    assert not any("weight_ih" in path or "in_proj" in path for path in taken)
    assert "in_proj_weight" in str(edited)
    assert "weight_ih_l0, weight_hh_l0" in str(edited)
    assert "of LSTM layers stay as they are" in str(edited)


def test_tensors_of_one_layer_are_drawn_independently() -> None:
    model = nn.LSTM(16, 16)
    for name in ("weight_ih_l0", "weight_hh_l0"):
        edited = gonio.init_(model, init.orthogonal_, tensor=name, gain=1.0)
        assert f"{name}: orthogonal_(gain=1.0)" in str(edited)
    assert not torch.allclose(model.weight_ih_l0, model.weight_hh_l0)


# --- biases and kinds of gain -------------------------------------------------------------------------


def test_biases_are_zero_unless_asked() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Conv1d(4, 5, 1), nn.Linear(5, 6, bias=False))
    before = [model[0].bias.clone(), model[2].bias.clone()]
    edited = gonio.init_(model, gonio.init.he_)
    assert not model[0].bias.any()
    assert not model[2].bias.any()
    assert [change.what.rpartition(", ")[2] for change in edited.changes] == ["bias 0", "bias 0", "he_(gain=linear)"]
    edited.undo_()
    assert torch.equal(model[0].bias, before[0])
    gonio.init_(model, gonio.init.he_, bias="keep")
    assert torch.equal(model[2].bias, before[1])
    gonio.init_(model, gonio.init.he_, bias=0.5)
    assert model[0].bias.eq(0.5).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "zero", None])
def test_a_bias_is_a_finite_number_or_kept(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match='init_ takes a finite number or "keep" as bias; found'):
        gonio.init_(nn.Linear(2, 2), gonio.init.he_, bias=value)


def test_the_bias_of_a_further_matrix_and_of_a_tied_one() -> None:
    lstm = nn.LSTM(2, 3)
    gonio.init_(lstm, gonio.init.orthogonal_, tensor="weight_hh_l0")
    assert not lstm.bias_hh_l0.any()
    assert lstm.bias_ih_l0.any()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    gonio.init_(model, gonio.init.orthogonal_)
    assert not model[1].bias.any()


def test_a_vector_named_bias_of_another_length_is_not_one_of_the_filters() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(3))  # of the inputs

    model = nn.Sequential(Shifted(), nn.Linear(3, 3))
    gonio.init_(model, gonio.init.orthogonal_)
    assert model[0].bias.eq(1).all()
    assert not model[1].bias.any()


def test_gains_by_kind() -> None:
    def largest(**options: Any) -> float:
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        edited = gonio.init_(model, gonio.init.orthogonal_, **options)
        assert str(options.get("gain", "tanh")) in edited.changes[0].what
        return float(torch.linalg.matrix_norm(model[0].weight.detach(), 2))

    assert largest() == pytest.approx(1, rel=1e-5)
    assert largest(gain="rms") == pytest.approx(1.5925, rel=1e-4)
    assert largest(gain="torch") == pytest.approx(5 / 3, rel=1e-5)
    assert largest(gain="tanh") == pytest.approx(1, rel=1e-5)


def test_deep_tanh_networks_keep_signals_apart() -> None:
    """Document 004: with random biases 50 layers map different inputs to nearly the same output."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(50)])
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(1))

    def common() -> float:
        out = model(x).detach().double()
        return float(out.mean(0).norm() / out.norm(dim=1).mean())

    gonio.init_(model, gonio.init.orthogonal_, gain=1.0, bias="keep")
    kept = common()
    gonio.init_(model, gonio.init.orthogonal_, gain=1.0)
    assert common() < 0.1 < kept


# --- depth ------------------------------------------------------------------------------------------------------------


def _stream_grows(model: nn.Module) -> float:
    """By what factor the blocks of a ByteTransformer raise the variance of the residual stream."""
    seen: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda _, args, out: seen.extend((args[0], out))) for block in model.blocks]
    with torch.no_grad():
        model(torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(0)))
    for hook in hooks:
        hook.remove()
    return float(seen[-1].var() / seen[0].var())


def test_layers_that_add_to_the_stream_are_divided_by_the_root_of_their_number() -> None:
    model = gonio.models.ByteTransformer(width=32, heads=2, depth=8)
    found = gonio.surgery.anatomy(model)
    gonio.init_(model, init.xavier_, seed=1)
    plain = {name: p.detach().clone() for name, p in model.named_parameters()}
    unscaled = _stream_grows(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    edited = gonio.init_(model, init.xavier_, seed=1, depth_scaled=found)
    scaled = {f"blocks.{i}.{layer}.weight" for i in range(8) for layer in ("out", "down")}
    for name, p in model.named_parameters():
        assert torch.allclose(p, plain[name] / 4 if name in scaled else plain[name], rtol=1e-6, atol=0), name
    assert "blocks.0.out  xavier_() / √16" in str(edited).replace("   ", "  ")
    assert _stream_grows(model) < unscaled / 4
    edited.undo_()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_the_number_of_blocks_is_that_of_gpt2() -> None:
    transformers = foreign.transformers()
    config = transformers.GPT2Config(vocab_size=24, n_positions=32, n_embd=16, n_layer=3, n_head=2,
                                     bos_token_id=0, eos_token_id=0)  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(24, (2, 8), generator=torch.Generator().manual_seed(0))
    edited = gonio.init_(
        model, init.xavier_, where="*c_proj", depth_scaled=gonio.surgery.anatomy(model, example=tokens)
    )
    assert len(edited.changes) == 6
    assert all(f"/ √{2 * config.n_layer}" in change.what for change in edited.changes)


def test_depth_needs_the_anatomy_of_the_model_and_a_layer_that_adds() -> None:
    model, other = (gonio.models.ByteTransformer(width=16, heads=2, depth=depth) for depth in (1, 2))
    with pytest.raises(InvalidArgumentError, match=r"takes the anatomy of this model; found a blocks\.1\.down\.weight"):
        gonio.init_(model, init.xavier_, depth_scaled=gonio.surgery.anatomy(other))
    with pytest.raises(InvalidArgumentError, match=r"divides layers that add to the stream; found none chosen"):
        gonio.init_(model, init.xavier_, where="*up", depth_scaled=gonio.surgery.anatomy(model))


class TiedFirst(nn.Module):
    """A head that is registered before the embedding with padding whose weight it has."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.words = nn.Linear(16, 30, bias=False), nn.Embedding(30, 16, padding_idx=2)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(x))


def test_the_padding_row_of_a_tied_weight_stays_whichever_layer_comes_first() -> None:
    model = TiedFirst()
    edited = gonio.init_(model, gonio.init.orthogonal_)
    assert [change.path for change in edited.changes] == ["head", "words"]
    assert torch.equal(model.words.weight[2], torch.zeros(16))
    assert bool(model.words.weight[[1, 3]].any(1).all())
    found = gonio.measure(model)
    assert [finding.code for finding in found.findings if finding.level != "info"] == []
    with torch.no_grad():
        model.head.weight[3] = 0  # the control: another row of zeros
    assert "G102" in [finding.code for finding in gonio.measure(model).findings]
