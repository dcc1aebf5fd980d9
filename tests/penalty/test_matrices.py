"""Which weights are matrices and how they are cut: golden lists of models that people train."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import foreign
import gonio
from gonio.errors import InvalidArgumentError
from gonio.penalty.matrices import Blocks
from surgery.net import Net

GOLDEN = Path(__file__).with_name("matrices.txt")
TIMM = (
    "beit_base_patch16_224", "cait_xxs24_224", "coat_tiny", "coatnet_0_rw_224", "convmixer_768_32", "convnext_tiny",
    "crossvit_tiny_240", "deit_tiny_distilled_patch16_224", "densenet121", "dpn68", "edgenext_xx_small",
    "efficientformer_l1", "efficientnet_b0", "eva02_tiny_patch14_224", "gmlp_ti16_224", "inception_v3", "levit_128",
    "maxvit_tiny_rw_224", "mixer_s32_224", "mobilenetv3_large_100", "nf_resnet50", "poolformer_s12", "pvt_v2_b0",
    "regnety_002", "resmlp_12_224", "resnet18", "resnext50_32x4d", "swin_tiny_patch4_window7_224", "twins_pcpvt_small",
    "vgg11", "vit_tiny_patch16_224",
)  # fmt: skip
TINY = {"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 16, "intermediate_size": 32, "vocab_size": 50}
GQA = {**TINY, "num_key_value_heads": 2}
LAYERS = {"num_layers": 1, "num_heads": 4, "vocab_size": 50}
TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", TINY),
    "bloom": ("BloomForCausalLM", {"hidden_size": 16, "n_layer": 1, "n_head": 4, "vocab_size": 50}),
    "falcon": ("FalconForCausalLM", TINY),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 16, "n_layer": 1, "n_head": 4, "vocab_size": 50}),
    "gpt_neox": ("GPTNeoXForCausalLM", TINY),
    "gptj": ("GPTJForCausalLM", {"n_embd": 16, "n_layer": 1, "n_head": 4, "vocab_size": 50, "rotary_dim": 4}),
    "llama": ("LlamaForCausalLM", GQA),
    "mistral": ("MistralForCausalLM", GQA),
    "mixtral": ("MixtralForCausalLM", {**GQA, "num_local_experts": 4}),
    "opt": ("OPTForCausalLM", {**TINY, "ffn_dim": 32, "word_embed_proj_dim": 16}),
    "phi3": ("Phi3ForCausalLM", {**GQA, "pad_token_id": 0}),
    "qwen2": ("Qwen2ForCausalLM", GQA),
    "roberta": ("RobertaForSequenceClassification", TINY),
    "t5": ("T5ForConditionalGeneration", {**LAYERS, "d_model": 16, "d_kv": 4, "d_ff": 32}),
    "vit": ("ViTForImageClassification", {**TINY, "image_size": 16, "patch_size": 4}),
    "whisper": (
        "WhisperForConditionalGeneration",
        {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 50, "pad_token_id": 0}
        | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
        | {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    ),
}


def timm_model(name: str) -> nn.Module:
    timm = foreign.timm()
    with torch.device("meta"):
        return timm.create_model(name)


def transformers_model(name: str) -> nn.Module:
    t = foreign.transformers()
    kind, options = TRANSFORMERS[name]
    config = t.AutoConfig.for_model(name, **options)
    return getattr(t, kind)(config)


def lines_of(model: nn.Module) -> list[str]:
    """Layers of the same kind as one line, blocks counted: numbers in paths are replaced by `N`."""
    found = gonio.param_groups(model, matrices=True)
    counts: dict[str, int] = {}
    for name, text in (*found.matrices.items(), *((n, f"– {why}") for n, why in found.others.items())):
        if text.startswith("– ") and text[2:] in ("a bias", "one number per unit"):
            continue
        line = f"{re.sub(r'[0-9]+', 'N', name)}  {text}"
        counts[line] = counts.get(line, 0) + 1
    return [f"{line}" + (f"  ×{n}" if n > 1 else "") for line, n in counts.items()]


def golden() -> dict[str, list[str]]:
    parts = re.split(r"^## (.*)\n", GOLDEN.read_text("utf-8"), flags=re.M)[1:]
    return {name: text.strip().splitlines() for name, text in zip(parts[::2], parts[1::2], strict=True)}


def write() -> None:
    """Write the file: `python -c "from penalty.test_matrices import write; write()"` in `tests/`; review the change."""
    made = {f"timm:{n}": timm_model(n) for n in TIMM} | {
        f"transformers:{n}": transformers_model(n) for n in TRANSFORMERS
    }
    text = "\n".join(f"## {name}\n" + "\n".join(lines_of(model)) + "\n" for name, model in made.items())
    GOLDEN.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name: str) -> None:
    assert lines_of(transformers_model(name)) == golden()[f"transformers:{name}"]


@pytest.mark.grid(4)
@pytest.mark.parametrize("name", TIMM)
def test_timm(name: str) -> None:
    assert lines_of(timm_model(name)) == golden()[f"timm:{name}"]


def test_every_golden_list_belongs_to_a_model() -> None:
    expected = [*(f"timm:{n}" for n in TIMM), *(f"transformers:{n}" for n in TRANSFORMERS)]
    assert list(golden()) == expected
    assert len(expected) >= 40


def test_every_trained_parameter_is_in_one_group() -> None:
    model = named(body=nn.Linear(4, 4), frozen=nn.Linear(4, 4), norm=nn.LayerNorm(4), head=nn.Linear(4, 4))
    model.frozen.requires_grad_(False)
    model.add_module("again", model.body)
    members = [p for group in gonio.param_groups(model, 0.1, matrices=True) for p in group["params"]]
    assert {id(p) for p in members} == {id(p) for p in model.parameters() if p.requires_grad}
    assert len(members) == 6  # weight and bias of three layers


def test_decay_without_and_with_a_number() -> None:
    model = named(body=nn.Linear(4, 4), head=nn.Linear(4, 2))
    default = gonio.param_groups(model, matrices=True)
    assert [(g["matrices"], g.get("weight_decay")) for g in default] == [(True, None), (False, 0.0)]
    given = gonio.param_groups(model, 0.1, matrices=True)
    assert [(g["matrices"], g["weight_decay"], len(g["params"])) for g in given] == [
        (True, 0.1, 1), (False, 0.1, 1), (False, 0.0, 2),
    ]  # fmt: skip


class Packed(nn.Module):
    """Heads whose number no attribute has."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        return self.qkv(x)[..., :8]


def named(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


def test_heads_that_no_module_knows_are_asked_for() -> None:
    model = named(a=Packed(), head=nn.Linear(8, 2))
    assert gonio.param_groups(model, matrices=True).matrices == {"a.qkv.weight": "matrix 24×8"}
    asked = gonio.param_groups(model, matrices=True, heads={"*.qkv": 4})
    assert asked.matrices == {"a.qkv.weight": "6 matrices 4×8"}
    assert asked[0]["blocks"] == [Blocks(rows=(4,)).code]


class Split(nn.Module):
    """Queries, keys and values by layers of their own; the configuration has the number of heads."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=heads)
        self.q_proj, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.q_proj(x))


def test_heads_that_only_the_configuration_states_are_noted() -> None:
    said = "the model has 4 attention heads, and the weights that compute them are whole: pass heads="
    assert said in str(gonio.param_groups(Split(4), matrices=True))
    assert said not in str(gonio.param_groups(Split(1), matrices=True))
    assert said not in str(gonio.param_groups(Split(4), matrices=True, heads={"q_proj": 2}))


def test_the_representation_has_no_tensors() -> None:
    model = nn.Linear(64, 64)
    assert repr(gonio.param_groups(nn.Sequential(model, nn.ReLU(), nn.Linear(64, 2)), matrices=True)) == (
        "<MatrixGroups: 1 matrix, 3 other parameters>"
    )
    assert repr(gonio.param_groups(model, 0.1)) == "<ParamGroups: weight decay 0.1 on 1 tensor, not on 1>"


def test_packed_projections_of_torchs_attention() -> None:
    model = Net(lambda m, x: m.head(m.attn(x, x, x)[0]), attn=nn.MultiheadAttention(8, 2), head=nn.Linear(8, 2))
    found = gonio.param_groups(model, matrices=True)
    assert found.matrices == {"attn.in_proj_weight": "6 matrices 4×8", "attn.out_proj.weight": "matrix 8×8"}


ANATOMY = ["Llama", "GPT-2", "Falcon", "Phi-3", "BLOOM", "test_vit3", "vit_tiny_patch16_224"]


@pytest.mark.parametrize("name", [ANATOMY[0], *(pytest.param(n, marks=pytest.mark.slow) for n in ANATOMY[1:])])
def test_blocks_of_the_anatomy_are_those_that_types_state(name: str) -> None:
    from bank.live import timm_models, transformers_models

    case = next(case for case in (*transformers_models.CASES, *timm_models.CASES) if case.name == name)
    model, example = case.make()
    found = gonio.surgery.anatomy(model, example=example)
    by_run, by_type = (gonio.param_groups(model, matrices=True, heads=heads) for heads in (found, None))
    assert by_run.others == by_type.others
    differ = {name for name in by_run.matrices if by_run.matrices[name] != by_type.matrices[name]}
    assert all(found.rows_of_units(n) for n in differ)  # no type states that gate and up are in one weight


def test_the_anatomy_cuts_what_no_type_states() -> None:
    def attend(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        q, k, v = m.both(x).unflatten(-1, (2, 12)).transpose(1, 2).split((4, 4, 4), -1)
        return m.head(m.out((torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2).flatten(2)))

    model = Net(attend, both=nn.Linear(8, 24), out=nn.Linear(8, 8), head=nn.Linear(8, 3))
    found = gonio.surgery.anatomy(model, example=torch.randn(2, 5, 8))
    assert gonio.param_groups(model, matrices=True).matrices["both.weight"] == "matrix 24×8"
    assert gonio.param_groups(model, matrices=True, heads=found).matrices["both.weight"] == "6 matrices 4×8"


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda m: gonio.param_groups(m), r"param_groups\(\) needs weight_decay; found none"),
        (lambda m: gonio.param_groups(m, 0.1, heads={"a": 2}), r"heads=\) cuts matrices; found matrices=False"),
        (lambda m: gonio.param_groups(m, matrices=True, heads={"b*": 2}), r"names layers; found 'b\*'"),
        (lambda m: gonio.param_groups(m, matrices=True, heads={"a.qkv": 7}), r"24 rows of a.qkv.weight in heads of 7"),
    ],
)
def test_errors(call: Callable[[nn.Module], object], match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        call(named(a=Packed(), head=nn.Linear(8, 2)))


class Wrapped(nn.Module):
    def __init__(self, model: nn.Module, *, runs: bool = True) -> None:
        super().__init__()
        self.model, self.runs = model, runs

    def forward(self, x):
        if not self.runs:
            raise NotImplementedError
        return {"logits": self.model(x)}


@pytest.mark.parametrize("wrap", [Wrapped, lambda m: Wrapped(m, runs=False), lambda m: Wrapped(nn.Sequential(m))])
def test_the_output_layer_is_found_inside_of_wrappers(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = Net(lambda m, x: m.first(torch.relu(m.head(x))), first=nn.Linear(16, 4), head=nn.Linear(8, 16))
    model.head, model.first = model.head, model.first
    inputs = nn.Sequential(nn.Linear(8, 8), model)
    groups = gonio.param_groups(wrap(inputs), matrices=True)
    ends = [name for name, why in groups.others.items() if why == "the output layer"]
    assert [name.rsplit(".", 2)[-2] for name in ends] == ["first"]
    assert groups.notes == ()


def test_a_model_that_cannot_be_run_has_no_known_output_layer_and_says_so() -> None:
    groups = gonio.param_groups(nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 2)}), matrices=True)
    assert "head.weight" in groups.matrices
    assert "note: no layer is left out as the output layer: the model could not be run" in str(groups)


class ByValue(nn.Module):
    """A projection before a head in a model that reads a value of its inputs, so that it has no run on shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.projector = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.classifier = nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.projector(self.words(tokens))
        return self.classifier(x.mean(1) if tokens.max().item() < 20 else x[:, 0])


def test_output_layers_of_a_model_that_reads_values_are_found_by_a_run_on_them() -> None:
    model = ByValue()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    groups = gonio.param_groups(model, matrices=True)
    assert set(groups.matrices) == {"projector.weight"}
    assert groups.others["classifier.weight"] == "the output layer"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["DebertaV2ForSequenceClassification", "Wav2Vec2ForSequenceClassification"])
def test_a_projection_before_the_head_is_a_matrix(kind: str) -> None:
    t = foreign.transformers()
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 32}
    sound = {"conv_dim": [32, 32], "conv_kernel": [3, 3], "conv_stride": [2, 2], "num_feat_extract_layers": 2}
    more = {"vocab_size": 50} if "Deberta" in kind else {**sound, "num_conv_pos_embedding_groups": 2}
    model = getattr(t, kind)(getattr(t, kind).config_class(**sizes, **more))
    found = gonio.param_groups(model, matrices=True)
    hidden = "pooler.dense.weight" if "Deberta" in kind else "projector.weight"
    assert hidden in found.matrices
    assert found.others["classifier.weight"] == "the output layer"


MATRICES = {"router": "4×16", "up": "32×16", "down": "16×32", "mix": "12×16", "first": "16×2", "second": "16×2"}
OTHERS = ("positions", "queries", "normed", "codes", "table", "part", "tokens")


class Bare(nn.Module):
    """Parameters that functions take in several ways; those of `MATRICES` could be linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend = nn.Linear(8, 16), nn.Linear(16, 16)
        shapes = {"router": (4, 16), "up": (16, 32), "down": (32, 16), "mix": (16, 12), "first": (16, 2)}
        shapes |= {"second": (2, 16), "positions": (6, 16), "queries": (3, 16), "normed": (16, 16), "codes": (9, 16)}
        shapes |= {"table": (7, 16), "part": (20, 16), "tokens": (3, 16), "head": (16, 5), "second_head": (16, 2)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        f = nn.functional
        h = self.embed(x)
        h = h * f.linear(h, self.router).softmax(-1).sum(-1, keepdim=True)
        h = h + (h @ self.up).relu() @ self.down + h @ (self.first @ self.second)
        h = h + torch.einsum("bi,io->bo", h, self.mix).sum(-1, keepdim=True)
        h = h + self.positions[: len(h)].sum(0) + self.attend(self.queries).mean(0) + h @ f.normalize(self.normed)
        h = h + (h @ self.codes.T).softmax(-1) @ self.codes + f.embedding(x.argmax(-1) % 7, self.table)
        h = h + f.linear(h, self.part[:16]) + (self.tokens @ self.attend.weight.T).mean(0)
        return h @ self.head, torch.matmul(h, self.second_head)


def test_bare_parameters_are_matrices_where_linear_functions_take_them_whole() -> None:
    model = Bare()
    groups = gonio.param_groups(model, 0.1, matrices=True)
    found = dict(groups.matrices)
    assert {name: found.pop(name) for name in MATRICES} == {n: f"matrix {s}" for n, s in MATRICES.items()}
    assert set(found) == {"embed.weight", "attend.weight"}
    assert {name: groups.others[name] for name in OTHERS} == dict.fromkeys(OTHERS, "no weight with filters")
    assert groups.others["head"] == groups.others["second_head"] == "the output layer"
    optimizer = gonio.optim.Muon(groups, lr=0.1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    sum(y.square().mean() for y in model(torch.randn(4, 8))).backward()
    optimizer.step()
    assert all(not torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


def test_a_bare_matrix_takes_the_step_of_a_linear_layer() -> None:
    """x @ w is the linear layer of wᵀ: the same step of Muon, transposed."""
    layer, bare = nn.Sequential(nn.Linear(6, 9, bias=False), nn.Linear(9, 3)), Bare.__new__(Bare)
    nn.Module.__init__(bare)
    bare.w, bare.out = nn.Parameter(layer[0].weight.detach().T.clone()), nn.Linear(9, 3)
    bare.out.load_state_dict(layer[1].state_dict())
    bare.forward = lambda x: bare.out(x @ bare.w)
    x = torch.randn(5, 6)
    for model in (layer, bare):
        named_example = Net(lambda m, y: m.inner(m.first(y)), first=nn.Linear(6, 6), inner=model)
        named_example.first.requires_grad_(False).load_state_dict({"weight": torch.eye(6), "bias": torch.zeros(6)})
        optimizer = gonio.optim.Muon(gonio.param_groups(named_example, matrices=True), lr=0.1)
        named_example(x).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(bare.w.T, layer[0].weight)
