"""balance_ of transformer blocks: least sums by hand, the same function, what is left alone and why."""

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
from gonio.errors import NotApplicableError
from gonio.surgery import balance_, movable
from gonio.surgery.equivalent import SAME_OUTPUTS, or_coarser
from gonio.surgery.symmetries import BlockSymmetries, Side, Symmetry, block_symmetries
from surgery.net import Net

X = seeded(2, 5, 8, dtype=torch.float64)
Attend = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


def plain(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def rotated(x: Tensor) -> Tensor:
    """Rotary positions: entries i and i + 2 of a head of four turn together."""
    angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.1], dtype=x.dtype)
    cos, sin = angle.cos(), angle.sin()
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Block(nn.Module):
    """Grouped attention, four heads on two of keys and values, whose forward cannot be traced, and an MLP."""

    def __init__(self, attend: Attend = plain, act: Callable[[Tensor], Tensor] = torch.relu, gated: bool = False):
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(16, 8)
        self.up, self.gate, self.down = nn.Linear(8, 12), nn.Linear(8, 12) if gated else None, nn.Linear(12, 8)
        self.norm = nn.LayerNorm(8)
        self.attend, self.act = attend, act
        for seed, p in enumerate(self.parameters()):
            p.data = seeded(*p.shape, seed=seed, dtype=torch.float64) * (0.5 + seed % 3)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.isfinite(x).all():
            raise ValueError("not finite")
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2).repeat_interleave(2, 1) for y in (self.k(x), self.v(x)))
        x = self.norm(x + self.o(self.attend(self, q, k, v).transpose(1, 2).flatten(2)))
        up = self.up(x)
        return x + self.down(self.act(up) if self.gate is None else self.act(self.gate(x)) * up)


def some(names: Any, *quick: str) -> list[Any]:
    """All names, of which some run in `make test`."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


def squares(x: Tensor, *shape: int) -> Tensor:
    """Of rows, in the shape of heads."""
    return x.detach().square().sum(1).reshape(shape)


def pairs(m: Any, qk: str) -> list[tuple[Tensor, Tensor]]:
    """P and Q of each free scale, written down from the architecture."""
    q, k = squares(m.q.weight, 2, 2, 4).sum(1), squares(m.k.weight, 2, 4)  # (group, channel)
    if qk == "pairs":
        q, k = (x.reshape(2, 2, 2).sum(1) for x in (q, k))
    elif qk == "heads":
        q, k = q.sum(1), k.sum(1)
    v, o = squares(m.v.weight, 2, 4), squares(m.o.weight.T, 2, 2, 4).sum(1)
    return [(q, k), (v, o), (squares(m.up.weight, 12), squares(m.down.weight.T, 12))]


def total(model: nn.Module) -> float:
    return sum(float(p.detach().square().sum()) for p in model.parameters() if p.ndim > 1)


def moved(model: nn.Module, edited: Any) -> set[str]:
    return {change.path for change in edited.changes}


def assert_kept(model: nn.Module, x: Any, before: Tensor) -> None:
    assert float((model(x) - before).detach().abs().max() / before.abs().max()) <= 1e-12


BLOCKS: dict[str, tuple[Attend, str]] = {
    "no positions": (plain, "channels"),
    "rotary": (lambda m, q, k, v: plain(m, rotated(q), rotated(k), v), "pairs"),
    "a cap": (lambda m, q, k, v: (2 * torch.tanh(q @ k.mT / 2)).softmax(-1) @ v, "channels"),
    "alibi": (lambda m, q, k, v: (q @ k.mT - torch.arange(5.0).abs()).softmax(-1) @ v, "channels"),
    "mixed channels": (lambda m, q, k, v: plain(m, F.linear(q, TURN), F.linear(k, TURN), v), "heads"),
}
TURN = torch.linalg.qr(seeded(4, 4, dtype=torch.float64))[0]


@pytest.mark.parametrize("gated", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", some(BLOCKS, "rotary", "a cap", "mixed channels"))
def test_the_least_sum_is_reached_and_biases_move(name: str, gated: bool) -> None:
    attend, qk = BLOCKS[name]
    model = Block(attend, F.silu if gated else torch.relu, gated)
    before, start = model(X).detach(), total(model)
    sums = pairs(model, qk)
    least = start - sum(float((p + q).sum() - 2 * (p * q).sqrt().sum()) for p, q in sums)
    old = copy.deepcopy(model)
    edited = balance_(model, example=X)
    assert_kept(model, X, before)
    assert total(model) == pytest.approx(least, rel=1e-12)
    assert moved(model, edited) == {"q", "k", "v", "o", "up", "down"}
    for layer in ("q", "k", "v", "up"):
        ours, theirs = getattr(model, layer), getattr(old, layer)
        torch.testing.assert_close(ours.bias / theirs.bias, ours.weight[:, 0] / theirs.weight[:, 0])
    assert torch.equal(model.o.bias, old.o.bias)
    assert torch.equal(model.down.bias, old.down.bias)
    assert len(set((model.k.weight[:, 0] / old.k.weight[:, 0]).tolist())) >= {"heads": 2, "pairs": 4, "channels": 8}[qk]
    edited.undo_()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), old.parameters(), strict=True))


def test_one_scale_per_block() -> None:
    model = Block()
    before = model(X).detach()
    balance_(model, example=X, level="layer")
    assert_kept(model, X, before)
    for made, read in (("q", "k"), ("v", "o"), ("up", "down")):
        a, b = (getattr(model, name).weight.norm().detach() for name in (made, read))
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


def test_a_squared_relu_has_another_power() -> None:
    """s²P + Q/s⁴ is least at s⁶ = 2Q/P."""
    model = Block(act=lambda x: x.relu().square())
    before, (p, q) = model(X).detach(), pairs(model, "channels")[2]
    s = torch.logspace(-2, 2, 200_001, dtype=torch.float64)
    least = sum(float((s**2 * a + b / s**4).min()) for a, b in zip(p, q, strict=True))
    balance_(model, example=X)
    assert_kept(model, X, before)
    p, q = pairs(model, "channels")[2]
    assert float((p + q).sum()) == pytest.approx(least, rel=1e-8)


def test_experts_have_factors_of_their_own() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Parameter(seeded(3, 6, 16, dtype=torch.float64))
            self.narrow = nn.Parameter(seeded(3, 8, 6, seed=1, dtype=torch.float64))
            self.first = nn.Linear(6, 6).double()

        def forward(self, x: Tensor) -> Tensor:
            gate, up = torch.bmm(self.first(x).expand(len(self.wide), -1, -1), self.wide).chunk(2, -1)
            return torch.bmm(F.silu(gate) * up, self.narrow).sum(0)

    model = nn.Sequential(Experts(), nn.Linear(6, 2).double())
    x = seeded(5, 6, dtype=torch.float64)
    before, gate = model(x).detach(), model[0].wide[..., :8].clone()
    up, down = model[0].wide.detach()[..., 8:], model[0].narrow.detach()
    least = float(2 * (up.square().sum(1) * down.square().sum(2)).sqrt().sum())
    balance_(model, example=x)
    assert_kept(model, x, before)
    assert torch.equal(model[0].wide[..., :8], gate)
    wide, narrow = model[0].wide.detach()[..., 8:], model[0].narrow.detach()
    assert float(wide.square().sum() + narrow.square().sum()) == pytest.approx(least)


def test_weights_that_are_in_two_symmetries_reach_the_joint_least_sum() -> None:
    """A chain that cannot be traced rests where the one that can be traced does."""
    layers = [nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)]
    traced = nn.Sequential(*layers).double()
    x = seeded(6, 4, dtype=torch.float64)
    a, b, c = (copy.deepcopy(traced[n]) for n in (0, 2, 4))
    chain = opaque(lambda m, x: m.c(torch.relu(m.b(torch.relu(m.a(x))))))
    chain.a, chain.b, chain.c = a, b, c
    balance_(traced, example=x)
    balance_(chain, example=x)
    for ours, theirs in zip(chain.parameters(), traced.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_a_dead_head_stays_finite() -> None:
    model = Block()
    with torch.no_grad():
        model.v.weight[2] = 0
        model.o.weight[:, 5] = 0
    balance_(model, example=X)
    assert all(torch.isfinite(p).all() for p in model.parameters())


# --- what stays -------------------------------------------------------------------------------------------------------


def _norm(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def _read_elsewhere(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(m, q, k, v) * m.v.weight.norm()


def _read_in_training(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(m, q, k, v) * (m.v.weight.norm() if m.training else 1)


_QK, _VO, _MLP = "query and key", "value and output", "up and down"
STAY: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "norms of torch": (
        lambda: Block(lambda m, q, k, v: plain(m, F.normalize(q, dim=-1), F.normalize(k, dim=-1), v)),
        _QK,
        "a norm follows queries or keys",
    ),
    "written norms": (
        lambda: Block(lambda m, q, k, v: plain(m, _norm(q), _norm(k), v)),
        _QK,
        "the products are not proportional to queries and keys",
    ),
    "a norm of one": (lambda: Block(lambda m, q, k, v: plain(m, q, _norm(k), v)), _QK, "not proportional"),
    "a norm of values": (
        lambda: Block(lambda m, q, k, v: plain(m, q, k, F.layer_norm(v, (4,)))),
        _VO,
        "the next layer reads what is not proportional to the values",
    ),
    "a nonlinear value": (lambda: Block(lambda m, q, k, v: plain(m, q, k, v.tanh())), _VO, "not proportional"),
    "queries used twice": (
        lambda: Block(lambda m, q, k, v: plain(m, q, k, v) * q.sigmoid()),
        _QK,
        "the outputs change if it moves",
    ),
    "GELU": (lambda: Block(act=F.gelu), _MLP, "the activation is not positively homogeneous"),
    "ReLU6 that is not reached": (lambda: Block(act=lambda x: F.hardtanh(x, 0, 600)), _MLP, "the outputs change"),
    "read elsewhere": (lambda: Block(_read_elsewhere), _VO, "the outputs change if it moves"),
    "read in training": (lambda: Block(_read_in_training), _VO, "the outputs change if it moves"),
}


@pytest.mark.parametrize("name", some(STAY, "written norms", "a norm of values", "GELU", "read in training"))
def test_what_stays_is_said_and_the_rest_moves(name: str) -> None:
    make, kind, why = STAY[name]
    model = make().eval()
    before, old = model(X).detach(), copy.deepcopy(model)
    edited = balance_(model, example=X)
    (note,) = [note for note in edited.notes if note.startswith("the scale of ")]
    assert note.startswith(f"the scale of {kind} stays in {'down' if kind == _MLP else 'the model'}: ")
    assert why in note
    assert_kept(model, X, before)
    layers = {_QK: ("q", "k"), _VO: ("v", "o"), _MLP: ("up", "down")}
    assert moved(model, edited) == {layer for each, both in layers.items() if each != kind for layer in both}
    for layer in layers[kind]:
        assert torch.equal(getattr(model, layer).weight, getattr(old, layer).weight)


def test_shared_and_computed_and_odd_weights_stay() -> None:
    model = Block()
    model.other = nn.Linear(8, 8).double()
    model.other.weight = model.v.weight
    edited = balance_(model, example=X)
    assert "the scale of value and output stays in the model: v.weight is shared with another layer" in edited.notes
    model = Block()
    gonio.parametrize_(model, gonio.parametrizations.WeightNorm(), where="up")
    assert moved(model, balance_(model, example=X)) == {"q", "k", "v", "o"}
    model = Block()
    gonio.parametrize_(model, gonio.parametrizations.WeightNorm(), where="q")
    edited = balance_(model, example=X)
    assert moved(model, edited) == {"up", "down"}
    why = "a query, key or value is computed by no layer with a weight"
    assert f"the scale of query, key, value and output stays in the model: {why}" in edited.notes


def test_keys_that_two_blocks_read_stay() -> None:
    def compute(m: Any, x: Tensor) -> Tensor:
        k, v = m.a.k(x), m.a.v(x)
        for block in (m.a, m.b):
            q, kk, vv = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in (block.q(x), k, v))
            x = x + block.o(plain(m, q, kk, vv).transpose(1, 2).flatten(2))
        return x if bool((x == x).all()) else k

    parts = [nn.ModuleDict({name: nn.Linear(8, 8) for name in "qkvo"}).double() for _ in range(2)]
    for part in parts:
        part.__class__ = type("Part", (nn.ModuleDict,), {"__getattr__": _child})
    model = Net(compute, a=parts[0], b=parts[1])
    with pytest.raises(NotApplicableError, match=r"the scale of query and key stays in .*: the outputs change if it"):
        balance_(model, example=X)


def _child(self: Any, name: str) -> Any:
    return self[name] if name in "qkvo" else nn.Module.__getattr__(self, name)


def opaque(compute: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """A model that cannot be traced."""
    layers = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}
    return Net(lambda m, x: compute(m, x) if bool((x == x).all()) else x, **layers).double()


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (lambda m, x: m.a(x), "and it has no known attention or MLP"),
        (lambda m, x: m.b(F.gelu(m.a(x))), "and the scale of up and down stays in b: the activation is not positively"),
    ],
)
def test_a_model_in_which_nothing_moves_is_refused(compute: Callable[[Any, Tensor], Tensor], message: str) -> None:
    with pytest.raises(NotApplicableError, match=rf"balance_: cannot balance the model: .* traced .*, {message}"):
        balance_(opaque(compute), example=X)


def test_blocks_without_an_example_are_not_looked_for() -> None:
    model = nn.Transformer(8, 2, 1, 1, 12, batch_first=True)  # of two inputs
    message = r"attention and MLP blocks stays in the model: they are found by running it, and .*; pass example="
    with pytest.raises(NotApplicableError, match=message):
        balance_(model)


def test_a_wrong_symmetry_is_undone_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Block(act=F.gelu)
    up, down = (Side(f"{n}.weight", dim, bias, 0, torch.arange(12), torch.arange(12))
                for n, dim, bias in (("up", 0, "up.bias"), ("down", 1, "")))  # fmt: skip
    wrong = BlockSymmetries((Symmetry("", "up and down", (up,), (down,), 12),), dict(model.named_parameters()))
    monkeypatch.setattr(movable, "block_symmetries", lambda *args, **options: wrong)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(NotApplicableError, match=r"balance_: cannot balance .*the outputs changed: largest dev"):
        balance_(model, example=X)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


# --- optimizers, wrappers ---------------------------------------------------------------------------------------------


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    (model(X) * seeded(*X.shape, seed=7, dtype=torch.float64)).sum().backward()
    optimizer.step()
    return [p.detach() - b for p, b in zip(model.parameters(), before, strict=True)]


@pytest.mark.parametrize("make", [Block, lambda: nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True).double()])
def test_the_next_step_of_adam_is_the_same(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, eps=1e-30)
    for _ in range(3):
        step(model, optimizer)
    expected = step(*copy.deepcopy((model, optimizer)))
    assert balance_(model, example=X, optimizer=optimizer).changes
    names = [name for name, _ in model.named_parameters()]
    for name, found, wanted in zip(names, step(model, optimizer), expected, strict=True):
        if name.endswith(("k.bias", "in_proj_bias")):  # softmax is invariant to a key's bias: its gradient is rounding
            continue
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-12, msg=name)


def test_a_hold_follows() -> None:
    model = Block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gonio.hold_(model, optimizer, where="v")
    before = model(X).detach()
    assert "v.weight is held at its new norm from now on" in str(balance_(model, example=X))
    assert_kept(model, X, before)


def test_a_compiled_block_and_gonios_own_hooks() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Block()).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clip = gonio.clip_qk_(model, optimizer, limit=1e9, example=X)
    balance_(model, example=X)
    assert clip.largest() == {}  # nothing was recorded
    assert all(each.largest is None for each in clip._clip._observed)
    model[1] = torch.compile(model[1], backend="eager")
    assert "1.q" in moved(model, balance_(model, example=X, level="layer"))


# --- models of torch, timm and transformers ---------------------------------------------------------------------------

_BOTH, _ALL = frozenset({_QK, _VO}), frozenset({_QK, _VO, _MLP})
TORCH: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "attention": lambda: (nn.MultiheadAttention(8, 2, batch_first=True), (X, X, X)),
    "three widths": lambda: (nn.MultiheadAttention(8, 2, kdim=6, vdim=4), (X, seeded(2, 5, 6), seeded(2, 5, 4))),
    "encoder layer": lambda: (nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), X),
    "encoder layer, norm first": lambda: (nn.TransformerEncoderLayer(8, 2, 12, norm_first=True), X),
    "encoder": lambda: (nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 2), X),
    "transformer": lambda: (nn.Transformer(8, 2, 1, 1, 12, batch_first=True), (X, X)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", some(TORCH, "three widths", "encoder layer, norm first"))
def test_transformers_of_torch(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = TORCH[name]()
    model, x = model.to(dtype).eval(), tree_map(lambda t: t.to(dtype), x)
    old = copy.deepcopy(model)
    edited = balance_(model, example=x)
    assert all(
        "bias" in n or p.ndim == 1 or not torch.equal(p, dict(old.named_parameters())[n])
        for n, p in model.named_parameters()
    )
    assert gonio.equivalent(old, model, example=x).relative <= {torch.float64: 1e-12, torch.float32: 1e-5}[dtype]
    assert total(model) < total(old)
    edited.undo_()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), old.parameters(), strict=True))


CASES = {case.name: case for case in (*transformers_models.CASES, *timm_models.CASES)}
# By family, which pairs of weights move: queries and keys unless a norm follows or positions meet them in another way,
# up and down with a gate or ReLU.
FAMILIES: dict[str, frozenset[str]] = {
    **dict.fromkeys(("Llama", "Llama, tied", "Mistral", "Mixtral", "Qwen2", "Gemma", "Gemma 2", "Granite"), _ALL),
    **dict.fromkeys(("Cohere", "StableLM", "Phi-3", "DeepSeek V3", "T5", "OPT", "ModernBERT"), _ALL),
    **dict.fromkeys(("Qwen3", "Qwen3 MoE", "OLMo 2"), frozenset({_VO, _MLP})),
    **dict.fromkeys(("BERT", "RoBERTa", "ALBERT", "DistilBERT", "GPT-2", "GPT-J", "GPT-NeoX", "GPT-Neo"), _BOTH),
    **dict.fromkeys(("BLOOM", "Falcon", "MPT", "Phi", "BART", "Whisper", "ViT", "CLIP", "Swin", "SegFormer"), _BOTH),
    "DeBERTa v2": frozenset({_VO}),
    "Conformer": frozenset({_VO}),
    **dict.fromkeys(("vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "pit_ti_224"), _BOTH),
    "edgenext_xx_small": frozenset({_VO}),
}  # fmt: skip


@pytest.mark.parametrize("name", some(FAMILIES, "OLMo 2", "DeepSeek V3", "GPT-2"))
@pytest.mark.parametrize("level", ["neuron", pytest.param("layer", marks=pytest.mark.slow)])
def test_families_of_transformers(name: str, level: Any) -> None:
    torch.manual_seed(0)
    model, x = CASES[name].make()
    model = model.double().eval()
    x = tree_map(lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t, x)
    old, found = copy.deepcopy(model), gonio.surgery.anatomy(model, example=x)
    edited = balance_(model, example=x, level=level)
    now, before = dict(model.named_parameters()), dict(old.named_parameters())
    changed = {n for n, p in now.items() if not torch.equal(p, before[n])}
    parts = {
        _QK: [part for block in found.attention for head in (*block.query, *block.key) for part in head],
        _VO: [part for block in found.attention for head in (*block.value, block.output) for part in head],
        _MLP: [part for mlp in found.mlps for part in (mlp.up, mlp.down)],
    }  # fmt: skip
    rows = {kind: [_changed(now[p.tensor], before[p.tensor], p) for p in each] for kind, each in parts.items()}
    assert {kind for kind, each in rows.items() if each and all(each)} == FAMILIES[name]
    assert {kind for kind, each in rows.items() if any(each)} == FAMILIES[name]
    assert changed <= {name for each in parts.values() for p in each for name in (p.tensor, p.bias)} | {
        name for block in found.attention for p in block.shared_key for name in (p.tensor, p.bias)
    }
    single = CASES[name].origin == "transformers"  # their norms and softmaxes compute in float32
    assert gonio.equivalent(old, model, example=x).relative <= (1e-6 if single else 1e-12)
    assert total(model) < total(old)
    edited.undo_()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), old.parameters(), strict=True))


def _changed(now: Tensor, before: Tensor, part: Any) -> bool:
    index = torch.tensor(part.indices)
    return not torch.equal(now.index_select(part.dim, index), before.index_select(part.dim, index))


def test_a_vision_transformer_keeps_its_mlp() -> None:
    torch.manual_seed(0)
    model, x = CASES["vit_tiny_patch16_224"].make()
    edited = balance_(model.eval(), example=x)
    assert {path.rpartition(".")[2] for path in moved(model, edited)} == {"qkv", "proj"}


@pytest.mark.parametrize("training", [False, True])
def test_outputs_that_differ_from_run_to_run(training: bool) -> None:
    source = torch.Generator().manual_seed(0)  # of the model's own: no seed reaches it

    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        noise = torch.rand((), generator=source, dtype=q.dtype) if m.training or not training else 1.0
        return plain(m, q, k, v) * noise

    model = Block(attend)
    if training:
        note = "the outputs in training mode were not compared: they fail, or differ from run to run"
        edited = balance_(model, example=X)
        assert note in edited.notes
        assert moved(model, edited) == {"q", "k", "v", "o", "up", "down"}
    else:
        with pytest.raises(
            NotApplicableError, match=r"value and output stays in the model: the outputs differ from run"
        ):
            balance_(model, example=X)


def test_a_layer_that_the_graph_balances_is_left_to_it() -> None:
    """Rows of v are values; its columns read a ReLU, whose scale the graph moves."""
    layers = {name: nn.Linear(8, 8) for name in "aqkvo"}

    def compute(m: Any, x: Tensor) -> Tensor:
        y = torch.relu(m.a(x))
        q, k, v = (f(t).unflatten(-1, (2, 4)).transpose(1, 2) for f, t in ((m.q, x), (m.k, x), (m.v, y)))
        return m.o(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))

    model = Net(compute, **layers).double()
    before = model(X).detach()
    edited = balance_(model, example=X)
    assert_kept(model, X, before)
    assert moved(model, edited) == {"a", "v", "q", "k"}
    assert (
        "the scale of value and output stays in the model: v.weight takes part in the scales of other layers"
        in edited.notes
    )


@pytest.mark.parametrize("between", [nn.Dropout(0.1), None])
def test_a_gated_mlp_that_can_be_traced(between: nn.Module | None) -> None:
    layers = {"up": nn.Linear(8, 12), "gate": nn.Linear(8, 12), "down": nn.Linear(12, 8)}
    layers |= {} if between is None else {"drop": between}

    def compute(m: Any, x: Tensor) -> Tensor:
        y = F.silu(m.gate(x)) * m.up(x)
        return m.down(y if between is None else m.drop(y))

    assert {change.path for change in balance_(Net(compute, **layers).double(), example=X).changes} == {"up", "down"}


@pytest.mark.parametrize("single", [False, True])
def test_a_model_that_computes_in_float32_may_differ_by_its_rounding(single: bool) -> None:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q.float() @ k.float().mT).double().softmax(-1) @ v if single else plain(m, q, k, v)

    model = Block(attend)
    found = block_symmetries(model, X, traced=False, taken=frozenset())
    assert found.eps == torch.finfo(torch.float32 if single else torch.float64).eps
    assert [each.kind for each in found.symmetries] == [_QK, _MLP, _VO]
    assert or_coarser(SAME_OUTPUTS, found.eps)[torch.float64] == (64 * found.eps if single else 1e-12)
    before = model(X).detach()
    balance_(model, example=X)
    assert (float((model(X) - before).detach().abs().max() / before.abs().max()) > 1e-12) == single


@pytest.mark.parametrize("kind", ["gain", "bias"])
def test_parameters_of_0_are_tried_with_other_values(kind: str) -> None:
    """What has no effect yet has one after a step of training."""

    class Late(Block):
        def __init__(self) -> None:
            super().__init__(self._attends, self._acts)
            self.late = nn.Parameter(torch.zeros((), dtype=torch.float64))

        def _attends(self, m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return plain(m, q, k, v + self.late if kind == "bias" else v)

        def _acts(self, x: Tensor) -> Tensor:
            return x.relu() + self.late * x.tanh() if kind == "gain" else x.relu()

    model = Late()
    edited = balance_(model, example=X)
    assert moved(model, edited) == ({"q", "k", "v", "o"} if kind == "gain" else {"q", "k", "up", "down"})
    assert "the outputs change if it moves" in str(edited)
