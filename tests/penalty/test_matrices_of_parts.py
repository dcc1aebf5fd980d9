"""Which parts of weights are matrices for Muon: each case that trainers of others, or this one, once got wrong.

=============================================  =============================================================
case                                           test
=============================================  =============================================================
queries, keys and values in one layer          test_fused_projections_by_hand, "three", "three, by head"
fused heads of shared keys, unequal sizes      "shared keys", "unequal"
a gated MLP's gate and up in one layer         "gate and up"; experts: test_stacks_of_experts
experts stored with their inputs first         test_stacks_of_experts, test_the_step_of_an_expert_is_that_of_a_layer
layers called `in_proj` or `qkv`, no attention test_a_name_cuts_nothing
convolutions, their groups, depthwise ones     test_convolutions
embeddings, tied and output layers             test_what_is_looked_up_or_compared_is_no_matrix
output layers inside of heads, and hidden ones test_output_layers_of_heads
factors of LoRA                                test_the_factors_of_an_adapter
a copy that gets a group                       test_a_copy_takes_a_group
an optimizer whose state is empty again        test_blocks_survive_a_reset_of_the_state
complex weights                                test_complex_weights
=============================================  =============================================================
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import foreign
import gonio
from bank.live.transformers_models import CASES
from catalog import seeded
from gonio.errors import InvalidArgumentError
from gonio.optim.muon import adjusted
from gonio.penalty.matrices import Blocks
from surgery.net import Net

X = seeded(2, 5, 8)


def cut(model: nn.Module, example: Any = X) -> dict[str, str]:
    found = gonio.surgery.anatomy(model, example=example)
    return dict(gonio.param_groups(model, matrices=True, heads=found).matrices)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)


def _three(m: Any, x: Tensor) -> Tensor:
    return m.head(m.out(attend(*m.fused(x).unflatten(-1, (3, 2, 4)).unbind(2))))  # type: ignore[no-any-return]


def _by_head(m: Any, x: Tensor) -> Tensor:
    return m.head(m.out(attend(*m.fused(x).unflatten(-1, (2, 3, 4)).unbind(3))))  # type: ignore[no-any-return]


def _shared(m: Any, x: Tensor) -> Tensor:
    parts = m.fused(x).split((16, 8, 8), -1)
    return m.head(m.out(attend(*(t.unflatten(-1, (-1, 4)) for t in parts))))  # type: ignore[no-any-return]


def _unequal(m: Any, x: Tensor) -> Tensor:
    """Values have six entries, queries and keys four."""
    q, k, v = m.fused(x).unflatten(-1, (2, 14)).split((4, 4, 6), -1)
    return m.head(m.out(attend(q, k, v)))  # type: ignore[no-any-return]


def _gated(m: Any, x: Tensor) -> Tensor:
    gate, up = m.fused(x).chunk(2, -1)
    return m.head(m.out(F.silu(gate) * up))  # type: ignore[no-any-return]


FUSED: dict[str, tuple[Callable[..., Any], int, int, str]] = {
    "three": (_three, 24, 8, "6 matrices 4×8"),
    "three, by head": (_by_head, 24, 8, "6 matrices 4×8"),
    "shared keys": (_shared, 32, 16, "8 matrices 4×8"),
    "unequal": (_unequal, 28, 12, "4 matrices 4×8, 2 matrices 6×8"),
    "gate and up": (_gated, 24, 12, "2 matrices 12×8"),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused_projections_by_hand(name: str) -> None:
    compute, rows, inner, expected = FUSED[name]
    model = Net(compute, fused=nn.Linear(8, rows), out=nn.Linear(inner, 8), head=nn.Linear(8, 3))
    found = cut(model)
    assert found["fused.weight"] == expected
    assert found["out.weight"] == f"matrix 8×{inner}"
    assert "head.weight" not in found
    blocks, weight = _blocks(model, "fused.weight"), model.fused.weight
    torch.testing.assert_close(blocks.join(blocks.split(weight), weight), weight, rtol=0, atol=0)


def _blocks(model: nn.Module, name: str, example: Any = X) -> Blocks:
    found = gonio.surgery.anatomy(model, example=example)
    groups = gonio.param_groups(model, matrices=True, heads=found)
    return Blocks.of(groups[0]["blocks"][list(groups.matrices).index(name)])


class Experts(nn.Module):
    """Two stacked experts of a gated MLP, all of them used; their weights have the inputs first or last."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.up = nn.Parameter(seeded(2, 8, 24) if first else seeded(2, 24, 8))
        self.down = nn.Parameter(seeded(2, 12, 8) if first else seeded(2, 8, 12))
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        up, down = (self.up, self.down) if self.first else (self.up.mT, self.down.mT)
        gate, units = torch.bmm(x.flatten(0, 1).expand(2, -1, -1), up).chunk(2, -1)
        return torch.bmm(F.silu(gate) * units, down).sum(0)


@pytest.mark.parametrize("first", [False, True])
def test_stacks_of_experts(first: bool) -> None:
    model = nn.Sequential(Experts(first), nn.Linear(8, 3))
    assert cut(model) == {"0.up": "4 matrices 12×8", "0.down": "2 matrices 8×12"}
    blocks = _blocks(model, "0.up")
    (parts,) = blocks.split(model[0].up)
    stored = model[0].up.mT if first else model[0].up
    torch.testing.assert_close(parts, stored.unflatten(1, (2, 12)).flatten(0, 1), rtol=0, atol=0)
    torch.testing.assert_close(blocks.join([parts], model[0].up), model[0].up, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["gpt-oss", pytest.param("Mixtral", marks=pytest.mark.slow)])
def test_the_step_of_an_expert_is_that_of_a_layer(name: str) -> None:
    """By fan-in and fan-out, whichever side is stored first."""
    model, example = next(case for case in CASES if case.name == name).make()
    for part, sides in (("gate_up_proj", (48, 16)), ("down_proj", (16, 24))):
        weight = f"model.layers.0.mlp.experts.{part}"
        blocks = _blocks(model, weight, example)
        (stack,) = blocks.split(model.get_parameter(weight))
        rows, columns = stack.shape[1:]
        assert (rows * (len(stack) // 4), columns) == sides
        assert adjusted(1.0, None, stack.shape) == max(1.0, rows / columns) ** 0.5


def test_convolutions() -> None:
    layers = [nn.Conv1d(6, 8, 3), nn.Conv1d(8, 8, 3, groups=2), nn.Conv1d(8, 8, 3, groups=8), nn.Conv1d(8, 8, 1)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3))
    model(seeded(2, 6, 9))
    groups = gonio.param_groups(model, matrices=True)
    assert groups.matrices == {"0.weight": "matrix 8×18", "1.weight": "2 matrices 4×12", "3.weight": "matrix 8×8"}
    assert groups.others["2.weight"] == "depthwise: each filter is a matrix of one row"


@pytest.mark.parametrize("tie", [False, True])
def test_what_is_looked_up_or_compared_is_no_matrix(tie: bool) -> None:
    layers = {"table": nn.Embedding(9, 8), "body": nn.Linear(8, 8), "head": nn.Linear(8, 9, bias=False)}
    model = Net(lambda m, x: m.head(m.body(m.table(x))), **layers)
    if tie:
        model.head.weight = model.table.weight
    groups = gonio.param_groups(model, matrices=True)
    assert groups.matrices == {"body.weight": "matrix 8×8"}
    expected = {"table.weight": "tied to the table table" if tie else "a table that is looked up"}
    expected |= {} if tie else {"head.weight": "the output layer"}
    assert {n: why for n, why in groups.others.items() if not n.endswith("bias")} == expected


class Named(nn.Module):
    """Layers with the names of fused attention; two factors and a convolution mix them."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.qkv, self.num_heads = nn.Linear(8, 24), nn.Linear(8, 24), 2

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.in_proj(x).chunk(3, -1)
        return a * b.sigmoid() + c * self.qkv(x)[..., :8]


def test_a_name_cuts_nothing() -> None:
    model = nn.Sequential(Named(), nn.Linear(8, 3))
    whole = {"0.in_proj.weight": "matrix 24×8", "0.qkv.weight": "matrix 24×8"}
    assert cut(model) == whole == dict(gonio.param_groups(model, matrices=True).matrices)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LFM2", "Mamba", "Mamba 2", "DeepSeek V3"])
def test_hybrids_are_cut_at_heads_alone(name: str) -> None:
    model, example = next(case for case in CASES if case.name == name).make()
    found = gonio.surgery.anatomy(model, example=example)
    roles = found.roles
    for weight, how in cut(model, example).items():
        attention = {"query", "key", "value"} & set(roles.get(weight, ()))
        assert how.startswith("matrix") or attention or found.rows_of_units(weight) or weight in dict(found.stacks)


OUTPUTS = {
    "BartForSequenceClassification": ("bart", "classification_head.out_proj.weight"),
    "RobertaForSequenceClassification": ("roberta", "classifier.out_proj.weight"),
    "ModernBertForMaskedLM": ("modernbert", "decoder.weight"),
}
HIDDEN = {
    "BartForSequenceClassification": "classification_head.dense.weight",
    "RobertaForSequenceClassification": "classifier.dense.weight",
    "ModernBertForMaskedLM": "head.dense.weight",
}
QUICK = "RobertaForSequenceClassification"
TINY = {
    "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 30,
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    "kind", [k if k.startswith("Rob") else pytest.param(k, marks=pytest.mark.slow) for k in OUTPUTS]
)
def test_output_layers_of_heads(kind: str) -> None:
    t = foreign.transformers()
    name, output = OUTPUTS[kind]
    groups = gonio.param_groups(getattr(t, kind)(t.AutoConfig.for_model(name, **TINY)), matrices=True)
    if output in groups.others:  # ModernBERT ties it
        assert groups.others[output] == "the output layer"
    assert output not in groups.matrices
    assert HIDDEN[kind] in groups.matrices


class Adapted(nn.Module):
    """A linear layer with a low-rank term, as adapters have it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(8, 8), nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def test_the_factors_of_an_adapter() -> None:
    groups = gonio.param_groups(nn.Sequential(Adapted(), nn.ReLU(), nn.Linear(8, 3)), matrices=True)
    assert groups.matrices == {"0.down.weight": "matrix 2×8", "0.up.weight": "matrix 8×2"}
    assert not any(name.startswith("0.base") for name in groups.others)


def _step(optimizer: torch.optim.Optimizer, weight: Tensor, gradient: Tensor) -> Tensor:
    before = weight.detach().clone()
    weight.grad = gradient
    optimizer.step()
    return weight.detach() - before


def test_a_copy_takes_a_group() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = copy.deepcopy(gonio.optim.Muon(gonio.param_groups(model, matrices=True), lr=0.1, others_lr=0.25))
    extra = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [extra], "matrices": False})
    assert optimizer.param_groups[-1]["lr"] == 0.25


def test_blocks_survive_a_reset_of_the_state() -> None:
    model = Net(_three, fused=nn.Linear(8, 24), out=nn.Linear(8, 8), head=nn.Linear(8, 3))
    found = gonio.surgery.anatomy(model, example=X)
    gradient, updates = seeded(24, 8, seed=3), []
    for reset in (False, True):
        optimizer = gonio.optim.Muon(gonio.param_groups(model, matrices=True, heads=found), lr=0.1, weight_decay=0.0)
        if reset:
            optimizer.state = defaultdict(dict)
        updates.append(_step(optimizer, model.fused.weight, gradient))
    torch.testing.assert_close(updates[1], updates[0], rtol=0, atol=1e-6)


def test_complex_weights() -> None:
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.complex64))
    groups = gonio.param_groups(model, matrices=True)
    assert "0.weight" not in groups.matrices
    with pytest.raises(InvalidArgumentError, match=r"Muon takes real parameters; found one of torch\.complex64"):
        gonio.optim.Muon(model.parameters())
