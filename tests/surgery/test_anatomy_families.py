"""anatomy of many families: every head of every block, what is not known, and the kinds that they showed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import gonio
from bank.live.transformers_models import MODELS as OF_BANK
from bank.live.transformers_models import made, text
from catalog import seeded
from foreign import timm
from gonio.errors import NotApplicableError
from gonio.surgery import Attention, anatomy, balance_, rotate_
from surgery import anatomy_families, anatomy_families_of_timm
from surgery.anatomy_families import FAMILIES, QUICK
from surgery.anatomy_families_of_timm import FAMILIES as OF_TIMM
from surgery.anatomy_truth import TIMM, TRANSFORMERS
from surgery.net import Net

LAYOUTS = {name: row[-1] for name, row in (FAMILIES | OF_TIMM).items()}
MAKE = anatomy_families.MAKE | anatomy_families_of_timm.MAKE
every_family = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LAYOUTS]
)


@pytest.mark.slow  # timm is slow to import
def test_there_are_enough_of_them() -> None:
    configurations = {OF_BANK[name][1] for name in TRANSFORMERS} | {row[1] for row in FAMILIES.values()}
    assert len(configurations) >= 130
    entry = timm().models.model_entrypoint
    assert len({entry(name).__module__ for name in (*TIMM, *OF_TIMM)}) >= 40


def words(block: Attention) -> dict[str, Any]:
    roles = (block.query, block.key, block.value)
    query, key, value = ([" ".join(map(str, parts)) for parts in each] for each in roles)
    return {
        "heads": (block.heads, block.kv_heads, block.head_size),
        "query": query,
        "key": key,
        "value": value,
        "output": list(map(str, block.output)),
        "groups": block.groups,
        "positions": (block.rotary, block.normed),
        "shared": " ".join(map(str, block.shared_key)),
    }


@every_family
def test_every_head_of_every_block_is_where_the_source_has_it(name: str) -> None:
    torch.manual_seed(0)
    model, example = MAKE[name]()
    found = anatomy(model, example=example)
    truth = {path: block for layout in LAYOUTS[name] for path, block in layout.blocks().items()}
    assert {block.path: words(block) for block in found.attention} == truth
    assert len(found.attention) == len(truth)
    assert found.unknown == {}


# --- their symmetries -------------------------------------------------------------------------------------------------

_QK, _VO = "query and key", "value and output"
# What stays beside queries and keys that a norm follows: a bias of positions that is computed from queries, a clip,
# a norm or a rectifier of the result, and positions that are complex numbers in float32.
STAY = {
    **dict.fromkeys(("w2v-BERT", "samvit_base_patch16", "DeepSeek V2"), frozenset({_QK})),
    **dict.fromkeys(("DBRX", "botnet26t_256", "halonet26t"), frozenset({_QK, _VO})),
    **dict.fromkeys(("BitNet", "shvit_s1"), frozenset({_VO})),
}
# Norms before keys and values give them their scales.
BEHIND_NORMS = ("mobilenetv4_hybrid_medium",)
# They turn or multiply queries and keys in float32, whatever the dtype of the model is.
IN_FLOAT32 = ("Cohere2", "Ernie4_5", "CodeGen", "ModernBERT decoder", "ESM")


def in_float64(name: str) -> tuple[nn.Module, Any]:
    """With vectors as after training."""
    torch.manual_seed(0)
    model, example = MAKE[name]()
    model = model.double().eval()
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            if parameter.ndim == 1:
                parameter += 0.1 * seeded(*parameter.shape, seed=seed)
        example = tree_map(lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t, example)
        if name in OF_TIMM:
            model.train()(example)  # the statistics of the batch norms
    return model.eval(), example


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "GPT" else pytest.mark.slow) for n in LAYOUTS])
def test_scales_and_turns_are_exact_or_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "XGLM":  # its mask is a tensor of the default dtype, in which the least float64 has to be a number
        monkeypatch.setattr(torch, "full", partial(torch.full, dtype=torch.float64))
    model, example = in_float64(name)
    old = copy.deepcopy(model)
    stay = STAY.get(name, frozenset()) | ({_QK} if any(layout.normed for layout in LAYOUTS[name]) else set())
    for verb in (balance_, partial(rotate_, what=("values",))):
        turned = verb is not balance_
        with (
            nullcontext() if not turned or _VO not in stay else pytest.raises(NotApplicableError, match="the values of")
        ):
            edited = verb(model, example=example)
            notes = [note for note in edited.notes if " stay" in note]
            moved = gonio.equivalent(old, model, example=example).relative
            assert moved <= (1e-6 if name in IN_FLOAT32 and not turned else 1e-12)
            changed = {n for n, p in model.named_parameters() if not torch.equal(p, old.get_parameter(n))}
            for layout in LAYOUTS[name]:
                for path, block in layout.blocks().items():
                    pairs = {_VO: ("value", "output")} if turned else {_QK: ("query", "key"), _VO: ("value", "output")}
                    for kind, roles in pairs.items():
                        tensors = {row.partition("[")[0] for role in roles for row in block[role]}
                        noted = any(kind in note and path in note for note in notes)
                        assert noted or tensors <= changed
                        assert noted == (kind in stay) or (noted and name in BEHIND_NORMS)
            edited.undo_()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), old.parameters(), strict=True))


# --- models whose heads cannot be told apart --------------------------------------------------------------------------

_TALK = "a layer with a weight of its own computes its logits or shares from those of all heads"
_LLAMA = {**anatomy_families._LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8}
_XLNET = {"vocab_size": 24, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 24}
UNKNOWN: dict[str, tuple[Callable[[], tuple[nn.Module, Any]], str]] = {
    "cait_xxs24_224": (lambda: _of_timm("cait_xxs24_224", 32, embed_dim=16, depth=2, num_heads=2, img_size=32), _TALK),
    "efficientformerv2_s0": (lambda: _of_timm("efficientformerv2_s0", 64, img_size=64), _TALK),
    "mvitv2_tiny": (lambda: _of_timm("mvitv2_tiny", 64, img_size=64), "a head does not have as many columns as values"),
    "lowformer_b0": (lambda: _of_timm("lowformer_b0", 64), "a head does not have as many columns as values"),
    "DiffLlama": (made("DiffLlamaForCausalLM", "DiffLlamaConfig", _LLAMA, text), "share keys and values differently"),
    "JetMoE": (made("JetMoeForCausalLM", "JetMoeConfig", _LLAMA, text), "the rows of its heads, or of its queries"),
    "XLNet": (made("XLNetModel", "XLNetConfig", _XLNET, text), ""),
}


def _of_timm(name: str, size: int, **options: Any) -> tuple[nn.Module, Any]:
    return timm().create_model(name, num_classes=5, **options), seeded(2, 3, size, size)


@pytest.mark.slow
@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_told_apart_is_unknown(name: str) -> None:
    torch.manual_seed(0)
    make, why = UNKNOWN[name]
    model, example = make()
    found = anatomy(model.eval(), example=example)
    assert found.unknown
    assert all(why in reason for reason in found.unknown.values())
    apart = {"cait_xxs24_224": 2, "efficientformerv2_s0": 1, "mvitv2_tiny": 1}  # class attention, strides, one head
    assert len(found.attention) == apart.get(name, 0)


# --- one kind at a time -----------------------------------------------------------------------------------------------

X = seeded(2, 5, 8)
_ROWS = ["q.weight[0:4]", "q.weight[4:8]"]


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, 4)).transpose(1, 2)


def attention(compute: Callable[..., Tensor], **layers: nn.Module) -> nn.Module:
    """q, k, v of two heads go to `compute`, the result to o."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = compute(m, *(heads(layer(x)) for layer in (m.q, m.k, m.v)))
        return m.o(y.transpose(1, 2).flatten(2))

    return Net(forward, **{name: nn.Linear(8, 8) for name in "qkvo"}, **layers)


def over_heads(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x.movedim(1, -1)).movedim(-1, 1)


@pytest.mark.parametrize("place", ["logits", "shares"])
def test_talking_heads_are_unknown(place: str) -> None:
    """Queries have no derivative through the layer that mixes them: each head would seem to be on its own."""

    def compute(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = q @ k.mT
        shares = (over_heads(m.mix, logits) if place == "logits" else logits).softmax(-1)
        return (over_heads(m.mix, shares) if place == "shares" else shares) @ v

    found = anatomy(attention(compute, mix=nn.Linear(2, 2)), example=X)
    assert found.attention == ()
    assert found.unknown == {"": _TALK}


def test_attention_after_a_product_without_a_softmax_is_found() -> None:
    """As in hybrids: the result of linear attention, from an empty state, goes on and meets a router's softmax, too."""

    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = (heads(layer(x)) for layer in (m.a, m.b, m.c))
        x = x + (q @ torch.zeros(2, 2, 4, 4) + (q @ k.mT) @ v).transpose(1, 2).flatten(2)
        x = x * m.router(x).softmax(-1)
        return x + m.rest(x)

    rest = attention(lambda m, q, k, v: (q @ k.mT).softmax(-1) @ v)
    layers = {name: nn.Linear(8, 8) for name in "abc"}
    found = anatomy(Net(forward, **layers, router=nn.Linear(8, 1), rest=rest), example=X)
    assert [words(block)["query"] for block in found.attention] == [[f"rest.{row}" for row in _ROWS]]
    assert found.unknown == {}


def test_heads_that_are_one_dimension_with_the_batch_in_the_product_alone() -> None:
    def compute(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = torch.baddbmm(torch.zeros(4, 5, 5), q.flatten(0, 1), k.flatten(0, 1).mT)
        return logits.view(2, 2, 5, 5).softmax(-1) @ v

    (block,) = anatomy(attention(compute), example=X).attention
    assert words(block)["query"] == _ROWS
    assert words(block)["output"] == ["o.weight[:, 0:4]", "o.weight[:, 4:8]"]


@pytest.mark.parametrize("rectifier", [nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6(), nn.Hardswish()])
def test_channels_that_a_rectifier_makes_0_in_the_run_are_columns(rectifier: nn.Module) -> None:
    model = attention(lambda m, q, k, v: m.act((q @ k.mT).softmax(-1) @ v), act=rectifier)
    with torch.no_grad():
        model.v.bias[:] = torch.tensor([-9.0, 9.0] * 4)
    (block,) = anatomy(model, example=X).attention
    assert words(block)["output"] == ["o.weight[:, 0:4]", "o.weight[:, 4:8]"]
