"""anatomy: heads of models of torch, timm and transformers against their source, and modules that are no attention."""

from __future__ import annotations

import copy
import importlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gonio
from bank.live import timm_models, transformers_models
from catalog import seeded
from gonio.errors import InvalidArgumentError, NoMatchError
from gonio.penalty.matrices import Blocks
from gonio.surgery import Attention, Part, anatomy, facts
from surgery.anatomy_truth import TIMM, TRANSFORMERS, WITHOUT, Truth
from surgery.net import Net, between_channels

CASES = {case.name: case for case in (*transformers_models.CASES, *timm_models.CASES)}
QUICK = ("BERT", "GPT-2", "Falcon", "Llama", "OLMo 2", "DeepSeek V3", "vit_tiny_patch16_224")


def cases(names: Any) -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


def block_at(model: nn.Module, example: Any, path: str) -> Attention:
    return next(block for block in anatomy(model, example=example).attention if block.path == path)


def words(parts: tuple[Part, ...]) -> str:
    return " ".join(map(str, parts))


def test_there_are_enough_of_them() -> None:
    assert len(TRANSFORMERS) >= 30
    assert len(TIMM) >= 20


class Checkpointed(nn.Module):
    """Blocks that activation checkpointing runs again, with a sum that belongs to no layer, in evaluation too."""

    def __init__(self, active: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head, self.active = nn.Linear(16, 3), active

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(self.run, block, x, use_reentrant=False) if self.active else self.run(block, x)
        return self.head(x)

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return x + 0.5 * block(x)


def test_activation_checkpointing_hides_no_block() -> None:
    torch.manual_seed(0)
    plain, model, x = Checkpointed(False), Checkpointed(True), seeded(2, 5, 16)
    model.load_state_dict(plain.state_dict())
    assert len(anatomy(plain, example=x).attention) == 2
    assert str(anatomy(model, example=x)) == str(anatomy(plain, example=x))
    found, usual = (gonio.measure(each, batch=x) for each in (model, plain))
    assert found.notes == usual.notes
    assert found.scale == usual.scale
    assert found.heads == usual.heads


def test_why_a_model_was_not_read_is_one_sentence() -> None:
    model, x = Checkpointed(False), seeded(2, 5, 16)
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")
    (note,) = [note for note in gonio.measure(model, batch=x).notes if note.startswith("Scale")]
    assert note.startswith("Scale between layers was not measured: equivalent() compares finite outputs;")
    assert not note.endswith("..")


@pytest.mark.parametrize("name", cases([*TRANSFORMERS, *TIMM]))
def test_heads_are_where_the_source_has_them(name: str) -> None:
    truth: Truth = (TRANSFORMERS | TIMM)[name]
    torch.manual_seed(0)
    block = block_at(*CASES[name].make(), truth.path)
    found = Truth(
        block.path, block.heads, block.kv_heads, block.head_size, words(block.query[-1]), words(block.key[-1]),
        words(block.value[-1]), str(block.output[-1]), block.rotary, block.normed, words(block.shared_key),
    )  # fmt: skip
    assert found == truth


@pytest.mark.parametrize("name", cases([*TRANSFORMERS, *TIMM]))
def test_a_head_without_values_changes_its_columns_alone(name: str) -> None:
    """By the weights themselves, which anatomy does not change."""
    torch.manual_seed(0)
    model, example = CASES[name].make()
    model = model.eval()
    for block in anatomy(model, example=example).attention[:2]:
        before, after = (_read(model, example, block, zero) for zero in (False, True))
        if before is None or after is None:  # a function reads the weight, and no module
            assert name in ("WavLM", "SigLIP vision")
            continue
        convolution = model.get_parameter(block.output[0].tensor).ndim == 4
        before, after = (t.movedim(1 if convolution else -1, -1).flatten(0, -2) for t in (before, after))
        moved, cut = (after - before).abs().amax(0), (before == 0).all(0) & (after == 0).all(0)  # by a rectifier
        mine = {c for h, g in enumerate(block.groups) if g == block.kv_heads - 1 for c in block.output[h].indices}
        others = [c for part in block.output for c in part.indices if c not in mine]
        assert bool(((moved > 0) | cut)[sorted(mine)].all())
        assert bool((moved > 0)[sorted(mine)].any())
        assert not others or float(moved[others].max()) < 1e-6


def _read(model: nn.Module, example: Any, block: Attention, zero: bool) -> Tensor | None:
    """What the layer after the first call of a block reads, with the values of the last head or without."""
    twin = copy.deepcopy(model)
    found: list[Tensor] = []
    reader = twin.get_submodule(block.output[0].tensor.rpartition(".")[0])
    reader.register_forward_pre_hook(lambda module, inputs: found.append(inputs[0].detach()))
    if zero:
        with torch.no_grad():
            for part in block.value[-1]:
                for start, stop in part.rows:
                    twin.get_parameter(part.tensor).narrow(part.dim, start, stop - start).zero_()
    torch.manual_seed(0)  # of a random mask
    with torch.no_grad():
        twin(**example) if isinstance(example, dict) else twin(example)
    return found[0] if found else None


@pytest.mark.parametrize("name", cases(WITHOUT))
def test_models_without_attention_have_none(name: str) -> None:
    found = anatomy(CASES[name].make()[0], example=CASES[name].make()[1])
    assert found.attention == ()
    assert found.unknown == {}


# --- torch ------------------------------------------------------------------------------------------------------------

_X = seeded(2, 5, 12)


@pytest.mark.parametrize(
    ("attention", "example", "query", "key", "value"),
    [
        (nn.MultiheadAttention(12, 3), (_X, _X, _X), *(f"in_proj_weight[{n}:{n + 4}]" for n in (8, 20, 32))),
        (
            nn.MultiheadAttention(12, 3, kdim=6, vdim=7, batch_first=True, bias=False),
            (_X, seeded(2, 4, 6), seeded(2, 4, 7)),
            *("q_proj_weight[8:12]", "k_proj_weight[8:12]", "v_proj_weight[8:12]"),
        ),
    ],
)  # fmt: skip
def test_torchs_attention(attention: nn.Module, example: Any, query: str, key: str, value: str) -> None:
    (block,) = anatomy(attention, example=example).attention
    assert (block.heads, block.kv_heads, block.head_size, block.scales) == (3, 3, 4, (True, True))
    assert [words(part) for part in (block.query[2], block.key[2], block.value[2])] == [query, key, value]
    assert str(block.output[2]) == "out_proj.weight[:, 8:12]"


def test_biases_of_torchs_separate_weights_are_parts_of_one_tensor() -> None:
    attention = nn.MultiheadAttention(12, 3, kdim=6, vdim=7)
    (block,) = anatomy(attention, example=(_X, seeded(2, 5, 6), seeded(2, 5, 7))).attention
    parts = [heads[1][0] for heads in (block.query, block.key, block.value)]
    assert [part.bias_start + part.indices[0] for part in parts] == [4, 16, 28]
    (block,) = anatomy(nn.MultiheadAttention(12, 3), example=(_X, _X, _X)).attention
    assert [heads[1][0].bias_start for heads in (block.query, block.key, block.value)] == [0, 0, 0]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_norm_of_the_input_and_a_compiled_block(compiled: bool) -> None:
    layer = nn.TransformerEncoderLayer(12, 3, 20, batch_first=True, norm_first=True)
    found = anatomy(nn.Sequential(torch.compile(layer, backend="eager") if compiled else layer), example=_X)
    assert [str(block) for block in found.attention] == ["3 heads of 4"]
    assert [mlp.down.tensor for mlp in found.mlps] == ["0.linear2.weight"]


def test_torchs_transformer_layers_with_masks() -> None:
    model = nn.Transformer(12, 4, 1, 1, 20, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    padding = torch.tensor([[False] * 5, [False] * 4 + [True]])
    example = {"src": _X, "tgt": _X, "tgt_mask": mask, "src_key_padding_mask": padding}
    found = anatomy(model, example=example)
    assert [block.path for block in found.attention] == [
        "encoder.layers.0.self_attn", "decoder.layers.0.self_attn", "decoder.layers.0.multihead_attn",
    ]  # fmt: skip
    assert [(str(mlp.up), mlp.down.tensor) for mlp in found.mlps] == [
        (f"{part}.layers.0.linear1.weight[0:20]", f"{part}.layers.0.linear2.weight") for part in ("encoder", "decoder")
    ]
    assert found.unknown == {}


def test_a_frozen_model_in_evaluation_has_its_heads_and_stays_as_it_is() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 4, 20, batch_first=True), 2).eval()
    model.requires_grad_(False)
    state, seed = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    found = anatomy(model)
    assert [block.heads for block in found.attention] == [4, 4]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), seed)
    assert not any(m._forward_hooks or m._forward_pre_hooks or m.training for m in model.modules())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_it_runs_where_gradients_are_off(without: Callable[[], Any]) -> None:
    model = nn.TransformerEncoderLayer(12, 3, 20, batch_first=True)
    with without():
        assert str(anatomy(model).attention[0]) == "3 heads of 4"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = nn.TransformerEncoderLayer(12, 3, 20, batch_first=True).to(dtype)
    assert str(anatomy(model, example=_X.to(dtype)).attention[0]) == "3 heads of 4"


# --- roles ------------------------------------------------------------------------------------------------------------


def test_roles_of_a_decoder() -> None:
    model, example = CASES["Llama, tied"].make()
    found = anatomy(model, example=example)
    roles = {name.removeprefix("model.layers.0."): role for name, role in found.roles.items() if ".1." not in name}
    assert roles == {
        "self_attn.q_proj.weight": ("query",),
        "self_attn.k_proj.weight": ("key",),
        "self_attn.v_proj.weight": ("value",),
        "self_attn.o_proj.weight": ("output",),
        "mlp.gate_proj.weight": ("gate",),
        "mlp.up_proj.weight": ("up",),
        "mlp.down_proj.weight": ("down",),
        "input_layernorm.weight": ("norm gain",),
        "post_attention_layernorm.weight": ("norm gain",),
        "model.norm.weight": ("norm gain",),
        "model.embed_tokens.weight": ("embedding", "head"),
    }
    assert found.ties == (("model.embed_tokens.weight", "lm_head.weight"),)


def test_roles_of_experts() -> None:
    model, example = CASES["Mixtral"].make()
    found = anatomy(model, example=example)
    assert found.mlps[0].experts == 4
    assert str(found.mlps[0].gate) == "model.layers.0.mlp.experts.gate_up_proj[:, 0:24]"
    assert str(found.mlps[0].up) == "model.layers.0.mlp.experts.gate_up_proj[:, 24:48]"
    assert found.roles["model.layers.0.mlp.experts.down_proj"] == ("down", "expert")
    assert found.routers == ("model.layers.0.mlp.gate.weight", "model.layers.1.mlp.gate.weight")


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu, "gelu": F.gelu, "silu": F.silu, "sigmoid": torch.sigmoid, "squared": lambda x: x.relu() ** 2,
}  # fmt: skip


@pytest.mark.parametrize("name", _ACTIVATIONS)
def test_gate_and_up_are_told_apart_by_what_they_do(name: str) -> None:
    act = _ACTIVATIONS[name]
    layers = {"up": nn.Linear(6, 8), "gate": nn.Linear(6, 8), "down": nn.Linear(8, 4)}
    model = Net(lambda m, x: m.down(m.gate(x) * act(m.up(x))), **layers)  # the names are wrong
    (mlp,) = anatomy(model, example=seeded(5, 6)).mlps
    assert (str(mlp.up), str(mlp.gate), str(mlp.down)) == ("gate.weight[0:8]", "up.weight[0:8]", "down.weight[:, 0:8]")
    plain = Net(lambda m, x: m.down(act(m.up(x))), **layers)
    (mlp,) = anatomy(plain, example=seeded(5, 6)).mlps
    assert (str(mlp.up), mlp.gate, str(mlp.down)) == ("up.weight[0:8]", None, "down.weight[:, 0:8]")
    fused = Net(lambda m, x: m.down(m.both(x)[..., 8:] * act(m.both(x)[..., :8])), both=nn.Linear(6, 16), **layers)
    assert anatomy(fused, example=seeded(5, 6)).mlps == ()  # two calls of one layer
    (mlp,) = anatomy(Net(_once(act), both=nn.Linear(6, 16), **layers), example=seeded(5, 6)).mlps
    assert (str(mlp.up), str(mlp.gate)) == ("both.weight[8:16]", "both.weight[0:8]")


@pytest.mark.parametrize(
    ("act", "degree"),
    [(torch.relu, 1), (lambda x: x.relu() ** 2, 2), (F.gelu, 0), (lambda x: F.leaky_relu(x, 0.3), 1)],
)
def test_the_degree_of_an_activation(act: Callable[[Tensor], Tensor], degree: int) -> None:
    layers = {"up": nn.Linear(6, 8), "gate": nn.Linear(6, 8), "down": nn.Linear(8, 4)}
    (mlp,) = anatomy(Net(lambda m, x: m.down(act(m.up(x))), **layers), example=seeded(5, 6)).mlps
    assert mlp.degree == degree
    (mlp,) = anatomy(Net(lambda m, x: m.down(F.gelu(m.gate(x)) * m.up(x)), **layers), example=seeded(5, 6)).mlps
    assert mlp.degree == 1


@pytest.mark.parametrize("seed", range(20))
def test_a_gate_that_is_nearly_linear_is_a_gate(seed: int) -> None:
    torch.manual_seed(seed)
    layers = {"up": nn.Linear(6, 8), "gate": nn.Linear(6, 8), "down": nn.Linear(8, 4)}
    model = Net(lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)), **layers)
    (mlp,) = anatomy(model, example=0.05 * seeded(50, 6, seed=seed)).mlps
    assert (mlp.up.tensor, mlp.gate and mlp.gate.tensor) == ("up.weight", "gate.weight")


class Misnamed(nn.Module):
    """An RMSNorm whose gain is called a bias, and the shift a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.weight = nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        return x / x.square().mean(-1, keepdim=True).sqrt() * self.bias + self.weight


@pytest.mark.parametrize("frozen", [False, True])
def test_gains_are_what_multiplies(frozen: bool) -> None:
    layers = {"a": nn.Linear(6, 6), "b": nn.Linear(6, 6), "own": Misnamed(), "layer": nn.LayerNorm(6)}
    model = Net(lambda m, x: m.layer(m.b(m.own(m.a(x)))), **layers)
    model.requires_grad_(not frozen)
    assert anatomy(model, example=seeded(4, 6)).norms == ("own.bias", "layer.weight")


def test_experts_that_are_stored_with_their_inputs_first() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Parameter(torch.randn(3, 6, 16)), nn.Parameter(torch.randn(3, 8, 6))
            self.first = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            gate, up = torch.bmm(self.first(x).expand(3, -1, -1), self.wide).chunk(2, -1)
            return torch.bmm(F.silu(gate) * up, self.narrow).sum(0)

    model = nn.Sequential(Experts(), nn.Linear(6, 2))
    found = anatomy(model, example=seeded(5, 6))
    (mlp,) = found.mlps
    assert (mlp.experts, str(mlp.gate), str(mlp.up)) == (3, "0.wide[:, :, 0:8]", "0.wide[:, :, 8:16]")
    assert found.roles["0.narrow"] == ("down", "expert")
    groups = gonio.param_groups(model, matrices=True, heads=found)
    assert groups.matrices["0.wide"] == "6 matrices 8×6"
    assert groups.matrices["0.narrow"] == "3 matrices 6×8"
    blocks = Blocks.of(groups[0]["blocks"][0])
    assert torch.equal(blocks.join(blocks.split(model[0].wide), model[0].wide), model[0].wide)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"add_zero_attn": True}, "torch's attention has further keys, or an input without a batch"),
        ({"add_bias_kv": True}, "torch's attention has further keys, or an input without a batch"),
    ],
)
def test_torchs_attention_in_forms_that_are_not_taken_apart(options: dict[str, bool], why: str) -> None:
    layer = nn.MultiheadAttention(12, 3, **options)
    assert anatomy(layer, example=(_X, _X, _X)).unknown == {"": why}


def test_torchs_attention_with_a_computed_weight() -> None:
    layer = nn.MultiheadAttention(12, 3)
    gonio.parametrize_(layer, gonio.parametrizations.WeightNorm(), tensor="in_proj_weight")
    why = "a weight of torch's attention is computed from other tensors"
    assert anatomy(layer, example=(_X, _X, _X)).unknown == {"": why}


def _once(act: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    def compute(m: Any, x: Tensor) -> Tensor:
        gate, up = m.both(x).chunk(2, -1)
        return m.down(act(gate) * up)

    return compute


def test_products_that_are_no_mlp() -> None:
    layers = {"a": nn.Linear(6, 8), "b": nn.Linear(6, 8), "c": nn.Linear(8, 4)}
    for compute in (
        lambda m, x: m.c(m.a(x)),  # one linear map
        lambda m, x: m.c(m.a(x) * m.b(x)),  # neither is the gate
        lambda m, x: m.c(torch.relu(m.a(x)).flip(0, -2)),  # of another token
        lambda m, x: m.c(F.layer_norm(torch.relu(m.a(x)), (8,))),
        lambda m, x: m.c(torch.relu(m.a(x)).cumsum(-1)),
        lambda m, x: m.c(torch.relu(m.a(x)) + m.b(x)),
    ):
        assert anatomy(Net(compute, **layers), example=seeded(2, 4, 6)).mlps == ()


# --- named like attention, but none -----------------------------------------------------------------------------------


class MultiHeadAttention(nn.Module):
    """The names of attention, and another function."""

    num_heads = num_key_value_heads = 2

    def __init__(self, compute: Callable[[Any, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(8, 8) for _ in range(4))
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(self.compute(self, q, k, v).transpose(1, 2).flatten(2))


def _mixed(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = q @ k.mT
    return (logits + logits.flip(1)).softmax(-1) @ v


ADVERSARIAL: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Tensor]] = {
    "no softmax": lambda m, q, k, v: (q @ k.mT) @ v,
    "linear attention": lambda m, q, k, v: q.softmax(-1) @ (k.softmax(-2).mT @ v),
    "sigmoid instead": lambda m, q, k, v: (q @ k.mT).sigmoid() @ v,
    "softmax over heads": lambda m, q, k, v: (q @ k.mT).softmax(1) @ v,
    "a gate": lambda m, q, k, v: (q * k).softmax(-1) * v,
    "squeeze and excite": lambda m, q, k, v: (q.mean(2, keepdim=True) + k.mean(2, keepdim=True)).softmax(-1) * v,
    "heads mixed before the softmax": _mixed,
    "heads mixed after it": lambda m, q, k, v: (q @ k.mT).softmax(-1).flip(1) @ v + (q @ k.mT).softmax(-1) @ v,
    "values of the wrong head": lambda m, q, k, v: (q @ k.mT).softmax(-1) @ v.mean(1, keepdim=True).expand_as(v),
    "queries that are keys": lambda m, q, k, v: (q @ q.mT).softmax(-1) @ v,
    "queries that are values": lambda m, q, k, v: (q @ k.mT).softmax(-1) @ q,
    "shares in a sum over heads": lambda m, q, k, v: (
        torch.einsum("bhij,bhjd->bid", (q @ k.mT).softmax(-1), v).unsqueeze(1).expand_as(v)
    ),
    "shares in a product of three": lambda m, q, k, v: torch.einsum(
        "bhij,bhjk,bhkd->bhid", (q @ k.mT).softmax(-1), torch.eye(5).expand(2, 2, 5, 5), v
    ),
    "a sum over keys": lambda m, q, k, v: torch.einsum("bhid,bhjd->bhi", q, k).softmax(-1)[..., None] * v,
    "a diagonal": lambda m, q, k, v: torch.einsum("bhii,bhid->bhid", q @ k.mT, v).softmax(-1),
    "keys without a layer": lambda m, q, k, v: (q @ torch.eye(5, 4).expand_as(k).mT).softmax(-1) @ v,
    "a constant mixture": lambda m, q, k, v: torch.eye(5).softmax(-1) @ v,
    "a recurrence": lambda m, q, k, v: (q * k).cumsum(2) * v,
    "a norm over all heads that shifts": lambda m, q, k, v: (
        (q.roll(1, -1).roll(1, 1) @ k.mT).softmax(-1) @ v.roll(2, 2)
    ),
    "sorted": lambda m, q, k, v: (q @ k.mT).sort(-1).values @ v,
    "softmax over queries": lambda m, q, k, v: (q @ k.mT).softmax(-2) @ v,
    "distances instead of products": lambda m, q, k, v: (-torch.cdist(q, k)).softmax(-1) @ v,
    "additive": lambda m, q, k, v: (q[..., None, :] + k[..., None, :, :]).tanh().sum(-1).softmax(-1) @ v,
    "ReLU instead": lambda m, q, k, v: F.normalize((q @ k.mT).relu(), p=1.0, dim=-1) @ v,
    "attention over channels": lambda m, q, k, v: v @ (q.mT @ k).softmax(-1),
    "keys of all heads": lambda m, q, k, v: (q @ k.mean(1, keepdim=True).mT).softmax(-1) @ v,
    "a hard choice": lambda m, q, k, v: F.one_hot((q @ k.mT).argmax(-1), 5).to(v) @ v,
}


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_modules_that_are_only_named_like_attention(name: str) -> None:
    torch.manual_seed(0)
    found = anatomy(MultiHeadAttention(ADVERSARIAL[name]), example=seeded(2, 5, 8))
    if name == "a norm over all heads that shifts":  # the query rows belong to another head than their name says
        (block,) = found.attention
        assert str(block.query[0][0]) == "q_proj.weight[4:8]"
        assert str(block.key[0][0]) == "k_proj.weight[0:4]"
        return
    assert found.attention == ()


LINEAR: dict[str, tuple[Callable[[Any, Tensor, Tensor, Tensor], Tensor], tuple[bool, bool, bool]]] = {
    "a cap": (lambda m, q, k, v: (torch.tanh(q @ k.mT)).softmax(-1) @ v, (True, True, True)),
    "a bias": (lambda m, q, k, v: (q @ k.mT + torch.arange(5.0)).softmax(-1) @ v, (True, True, True)),
    "a written norm": (lambda m, q, k, v: (q / q.norm(dim=-1)[..., None] @ k.mT).softmax(-1) @ v, (False, True, True)),
    "a norm": (lambda m, q, k, v: (q @ F.normalize(k, dim=-1).mT).softmax(-1) @ v, (False, False, True)),
    "of values": (lambda m, q, k, v: (q @ k.mT).softmax(-1) @ F.layer_norm(v, (4,)), (True, True, False)),
    "after it": (lambda m, q, k, v: ((q @ k.mT).softmax(-1) @ v).tanh(), (True, True, False)),
}  # fmt: skip


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", LINEAR)
def test_what_is_proportional_to_the_rows(name: str, fused: bool) -> None:
    """Also where one weight computes all three, and the norm of one is not one of the others."""
    compute, linear = LINEAR[name]

    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in m.qkv(x).chunk(3, -1))
        return m.o(compute(m, q, k, v).transpose(1, 2).flatten(2))

    model = Net(forward, qkv=nn.Linear(8, 24), o=nn.Linear(8, 8)) if fused else MultiHeadAttention(compute)
    (block,) = anatomy(model, example=seeded(2, 5, 8)).attention
    assert block.linear == linear
    assert block.normed == (name == "a norm")


def test_the_control_is_attention() -> None:
    model = MultiHeadAttention(lambda m, q, k, v: (q @ k.mT).softmax(-1) @ v)
    assert str(anatomy(model, example=seeded(2, 5, 8)).attention[0]) == "2 heads of 4"


class _Foreign(torch.autograd.Function):
    """A kernel that torch does not see; tokens before heads."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, power: float) -> Tensor:
        with torch._C.DisableTorchFunction():
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            return ((q @ k.mT / q.shape[-1] ** power).softmax(-1) @ v).transpose(1, 2).clone()


class Kernel(nn.Module):
    def __init__(self, power: float = 0.5) -> None:
        super().__init__()
        self.power = power

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Foreign.apply(q, k, v, self.power)


def _with_kernel(kernel: nn.Module) -> nn.Module:
    layers = {name: nn.Linear(8, 8) for name in "abcd"}

    def compute(m: Any, x: Tensor) -> Tensor:
        return m.d(m.kernel(*(layer(x).unflatten(-1, (2, 4)) for layer in (m.a, m.b, m.c))).flatten(2))

    return Net(compute, kernel=kernel, **layers)


def test_a_kernel_of_your_own_is_registered_and_believed_where_it_runs_as_stated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(facts, "_STATED", dict(facts._STATED))
    example = seeded(2, 5, 8)
    assert anatomy(_with_kernel(Kernel()), example=example).attention == ()
    facts.register(
        Kernel,
        facts.Facts(
            attends=lambda q, k, v: (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)),
            returns=lambda y: y.transpose(1, 2),
        ),
    )
    (block,) = anatomy(_with_kernel(Kernel()), example=example).attention
    assert (str(block), words(block.query[1]), str(block.output[1])) == (
        "2 heads of 4",
        "a.weight[4:8]",
        "d.weight[:, 4:8]",
    )
    assert anatomy(_with_kernel(Kernel(power=1.0)), example=example).attention == ()  # another function
    model = _with_kernel(Kernel())
    with pytest.raises(NoMatchError, match="a registered kernel computes its logits, which cannot be read"):
        gonio.clip_qk_(model, torch.optim.SGD(model.parameters()), example=example)


def test_what_is_not_known_is_named() -> None:
    found = anatomy(MultiHeadAttention(_mixed), example=seeded(2, 5, 8))
    assert found.unknown == {
        "": "its heads are mixed: changes of a head's queries and of its values act on different columns"
    }
    assert "unknown: its heads are mixed" in str(found)
    one = anatomy(MultiHeadAttention(lambda m, q, k, v: (q @ k.mT).softmax(-1) @ v), example=seeded(2, 1, 8))
    assert one.unknown == {"": "its softmax is over one key: pass an example of more tokens"}


def test_an_attention_that_looks_at_one_token_is_attention() -> None:
    """Its queries have no derivative, but values have: heads of their own are known by them, shared ones are not."""
    layers = {name: nn.Linear(8, 8) for name in "abcd"}

    def compute(m: Any, x: Tensor, shared: bool = False) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (m.a, m.b, m.c))
        k, v = (t[:, :1].expand(-1, 2, -1, -1) if shared else t for t in (k, v))
        return m.d(((1e6 * q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))

    (block,) = anatomy(Net(compute, **layers), example=seeded(2, 5, 8)).attention
    assert [str(part) for part in block.output] == ["d.weight[:, 0:4]", "d.weight[:, 4:8]"]
    found = anatomy(Net(lambda m, x: compute(m, x, True), **layers), example=seeded(2, 5, 8))
    assert found.attention == ()
    assert list(found.unknown) == [""]


def test_a_permutation_of_tokens_is_no_mlp() -> None:
    """Of the same entries at most positions: every one is looked at."""
    order = torch.tensor([0, 1, 2, 4, 3, 5, 6, 7])
    model = Net(lambda m, x: m.b(torch.relu(m.a(x))[:, order]), a=nn.Linear(6, 8), b=nn.Linear(8, 6))
    assert anatomy(model, example=seeded(4, 8, 6)).mlps == ()


def test_computed_weights_are_not_those_of_a_parameter() -> None:
    model = MultiHeadAttention(lambda m, q, k, v: (q @ k.mT).softmax(-1) @ v)
    gonio.parametrize_(model, gonio.parametrizations.WeightNorm(), where="q_proj")
    assert anatomy(model, example=seeded(2, 5, 8)).unknown == {
        "": "a query, key or value is computed by no layer with a weight"
    }


def test_a_model_without_an_example_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="no example input was found for the model"):
        anatomy(nn.Identity())


def test_attention_between_channels_takes_no_gradient_for_each_position(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("gonio.surgery.anatomy")
    calls, gradients = [], module._gradients
    monkeypatch.setattr(module, "_gradients", lambda *args, **kwargs: calls.append(1) or gradients(*args, **kwargs))
    counted = []
    for positions in (100, 400):
        calls.clear()
        model = Net(between_channels, qkv=nn.Linear(8, 24), proj=nn.Linear(8, 8))
        (block,) = anatomy(model, example=seeded(1, positions, 8)).attention
        assert (block.heads, block.rotary) == (2, "")
        counted.append(len(calls))
    assert max(counted) < 60


_CHANNELS_LAST = """
import torch, gonio
from torch import nn

class Channels(nn.Module):
    def forward(self, x):
        return x.to(memory_format=torch.channels_last)

model = nn.Sequential(nn.Conv2d(3, 96, 1), Channels(), nn.GroupNorm(1, 96))
print(gonio.surgery.anatomy(model, example=torch.randn(2, 3, 4, 4)).norms)
"""


def test_a_group_norm_of_channels_last() -> None:
    """In a process of its own, which torch ends if the derivative of the gain is computed without that of the input."""
    done = subprocess.run([sys.executable, "-c", _CHANNELS_LAST], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "('2.weight',)"), done.stderr


def test_what_is_not_known_is_said_in_chinese() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    one = torch.ones(1, 1, 8)
    found = gonio.surgery.anatomy(model, example=(one, one, one))
    why = "its softmax is over one key: pass an example of more tokens"
    assert list(found.unknown.values()) == [why]
    assert f"  the model        unknown: {why}\n" in str(found)
    with gonio.language("zh"):
        head, unknown, _ = str(found).splitlines()
        assert head == "0 个注意力块、0 个 MLP"
        assert unknown == "  整个模型         未知：其 softmax 只有一个 key：请给出含更多 token 的示例"
        assert "2 个头，各 4 行" in str(gonio.surgery.anatomy(model, example=(torch.ones(1, 3, 8),) * 3))


@pytest.mark.parametrize("make", ["expanded", "lazy"])
def test_weights_without_rows_of_their_own_are_no_obstacle(make: str) -> None:
    """A row that is stored once for all, or none yet."""
    layer: nn.Module = nn.LazyLinear(8)
    if make == "expanded":
        layer = nn.Linear(8, 8)
        layer.weight = nn.Parameter(seeded(1, 8).expand(8, 8))
    model = nn.Sequential(layer, nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    assert [block.path for block in anatomy(model, example=seeded(2, 5, 8)).attention] == ["1.self_attn"]
