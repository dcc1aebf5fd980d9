"""Adapters of every tuner of peft and every option of its LoRA: what peft merges, or a refusal; never "equal"."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from foreign import torchvision
from gonio.measuring import difference, measure
from gonio.measuring.reading.adapters import AdapterConfig

torchvision()  # peft imports transformers, and that torchvision
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # peft's own


class Net(nn.Module):
    config = {"model_type": "custom"}  # noqa: RUF012 — peft reads it

    def __init__(self) -> None:
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        self.emb, self.q, self.v, self.ln = nn.Embedding(30, 64), nn.Linear(64, 64), nn.Linear(64, 32), nn.LayerNorm(32)
        self.c, self.conv, self.head = Conv1D(48, 32), nn.Conv2d(4, 8, 3), nn.Linear(32, 5)
        self.layers = nn.ModuleList(nn.ModuleDict({"q": nn.Linear(16, 16)}) for _ in range(3))
        self.mha = nn.MultiheadAttention(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.ln(self.v(self.q(self.emb(x)))))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, 24, 16)), nn.Parameter(torch.randn(3, 16, 24))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("ehi,bi->bh", self.up, x)


class Mixture(nn.Module):
    config = {"model_type": "custom"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.gate = Experts(), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x)


def adapted(config: Any, base: nn.Module) -> nn.Module:
    """The base with adapters whose every parameter was moved."""
    torch.manual_seed(1)
    model = peft.get_peft_model(copy.deepcopy(base), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def plain(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def agrees(before: dict[str, Tensor], merged: dict[str, Tensor], after: Any, *, refused: tuple[str, ...] = ()) -> None:
    """Every tensor has the change that peft makes; those whose names end so are not compared, with a reason."""
    found = difference(before, after)
    for name, old in before.items():
        row, norm = found[name], float((merged[name] - old).norm())
        if name.endswith(refused) and refused:
            assert row.status == "not compared"
            assert row.reason
        elif norm == 0:
            assert row.status == "equal", (name, row.reason)
        else:
            assert row.status == "compared", (name, row.reason)
            assert row.change_norm == pytest.approx(norm, rel=1e-3), name


# --- tuners in memory ------------------------------------------------------------------------------------------------

TUNERS: dict[str, dict[str, Any]] = {
    "AdaLoraConfig": {"total_step": 10}, "AdamssConfig": {}, "BOFTConfig": {"boft_block_size": 4}, "DeloraConfig": {},
    "FourierFTConfig": {"n_frequency": 20}, "GraloraConfig": {}, "HRAConfig": {}, "IA3Config": {"feedforward_modules": []},
    "LNTuningConfig": {"target_modules": ["ln"]}, "LoHaConfig": {}, "LoKrConfig": {}, "LoraConfig": {}, "MissConfig": {"r": 4},
    "OFTConfig": {"oft_block_size": 4}, "OSFConfig": {}, "RandLoraConfig": {}, "ShiraConfig": {"r": 2},
    "TrainableTokensConfig": {"target_modules": ["emb"], "token_indices": [1, 2]},
    "VBLoRAConfig": {"vector_length": 16, "num_vectors": 8}, "VeraConfig": {},
}  # fmt: skip


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize("name", [name for name in TUNERS if hasattr(peft, name)])
def test_a_tuner_in_memory_has_the_weights_that_peft_merges_and_its_state_dict_is_not_called_equal(
    name: str, net: Net
) -> None:
    targets = ["emb"] if name == "TrainableTokensConfig" else ["q", "v"]
    model = adapted(getattr(peft, name)(**{"target_modules": targets, **TUNERS[name]}), net)
    before, merged = plain(net), plain(copy.deepcopy(model).merge_and_unload())
    changed = {key for key, value in merged.items() if not torch.equal(value, before[key])}
    assert changed
    agrees(before, merged, model)
    state = difference(before, model.state_dict())
    assert all(state[key].status == "not compared" for key in changed)
    in_use = [t for t in measure(model).values() if ".base_and_" in t.path]
    assert len(in_use) >= len({key for key in changed if key.endswith("weight")})


def test_a_tuner_that_peft_cannot_merge_is_named(net: Net) -> None:
    model = adapted(peft.PolyConfig(target_modules=["q", "v"]), net)
    row = difference(plain(net), model)["q"]
    assert row.status == "not compared"
    assert "changed by an adapter of type poly, which peft does not merge" in row.reason


def test_the_active_adapters_count_and_none_where_they_are_disabled(net: Net) -> None:
    lora = peft.LoraConfig(r=2, lora_alpha=8, target_modules=["q"], init_lora_weights=False)
    model = peft.get_peft_model(copy.deepcopy(net), lora)
    model.add_adapter("second", peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q"], init_lora_weights=False))
    layer, before = model.base_model.model.q, plain(net)
    deltas = {name: layer.get_delta_weight(name).detach() for name in ("default", "second")}
    for active in (["default"], ["second"], ["default", "second"]):
        model.base_model.set_adapter(active)
        expected = float(sum(deltas[name] for name in active).norm())
        assert difference(before, model)["q"].change_norm == pytest.approx(expected, rel=1e-5)
        assert f"base_model.model.q.base_and_lora.{'+'.join(active)}" in measure(model)
    with model.disable_adapter():
        assert difference(before, model)["q"].status == "equal"


def test_attention_s_packed_projection_is_adapted_too(net: Net) -> None:
    model = adapted(peft.LoraConfig(r=2, target_modules=["mha"]), net)
    merged = copy.deepcopy(model).merge_and_unload().mha.in_proj_weight
    found = difference(plain(net), model)["mha.in_proj_weight"]
    assert found.change_norm == pytest.approx(float((merged - net.mha.in_proj_weight).norm()), rel=1e-4)


# --- options of LoRA in folders --------------------------------------------------------------------------------------

Q = ("q.weight",)  # ends of the names that are refused
OPTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "alpha by a regular expression": ({"alpha_pattern": {r"layers\.[02]\.q": 3, "^q": 64}}, ()),
    "alpha, the first of two": ({"alpha_pattern": {"layers.1.q": 2, "q": 64}}, ()),
    "alpha by a class of characters": ({"target_modules": ["q", "v"], "alpha_pattern": {"[qv]": 3}}, ()),
    "alpha of rank-stabilised ones": ({"use_rslora": True, "alpha_pattern": {r".*\.1\..*": 1}}, ()),
    "ranks and alphas": ({"rank_pattern": {"^q": 2}, "alpha_pattern": {r"layers\.\d+\.q": 5}}, ()),
    "alpha by a pattern that takes for ever": ({"alpha_pattern": {"(a+)+q": 3}}, Q),
    "pissa": ({"init_lora_weights": "pissa", "alpha_pattern": {"^q": 3}}, ()),
    "pissa of Conv1D": ({"init_lora_weights": "pissa", "target_modules": ["c"], "fan_in_fan_out": True}, ()),
    "pissa by iterations": ({"init_lora_weights": "pissa_niter_4"}, Q),
    "olora": ({"init_lora_weights": "olora"}, ()),
    "olora, rank-stabilised": ({"init_lora_weights": "olora", "use_rslora": True, "target_modules": ["v"]}, ()),
    "orthogonal": ({"init_lora_weights": "orthogonal"}, ()),
    "gaussian": ({"init_lora_weights": "gaussian"}, ()),
    "biases of B": ({"lora_bias": True, "target_modules": ["q", "conv"]}, ()),
    "biases of the base": ({"bias": "lora_only"}, ()),
    "all biases": ({"bias": "all"}, ()),
    "trained tokens": ({"trainable_token_indices": {"emb": [1, 7]}}, ()),
    "dora of Conv1D": ({"use_dora": True, "target_modules": ["c"], "fan_in_fan_out": True}, ()),
    "dora of an embedding": ({"use_dora": True, "target_modules": ["emb"]}, ()),
    "a trained head and norm": ({"modules_to_save": ["head", "ln"]}, ()),
    "kasa": ({"kasa_config": "KasaConfig"}, Q),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_of_lora_gives_what_peft_loads_and_merges_or_is_refused(name: str, net: Net, tmp_path: Path) -> None:
    options, refused = OPTIONS[name]
    if "kasa_config" in options:
        options = {"kasa_config": peft.KasaConfig()}
    hostile = options.get("alpha_pattern", {}).get("(a+)+q")
    options = {"r": 4, "lora_alpha": 7, "target_modules": ["q"], **options}
    model = adapted(peft.LoraConfig(**({**options, "alpha_pattern": {}} if hostile else options)), net)
    model.save_pretrained(tmp_path)
    if hostile:
        rewrite(tmp_path, alpha_pattern=options["alpha_pattern"])
        merged = plain(net)
    else:
        merged = plain(peft.PeftModel.from_pretrained(copy.deepcopy(net), tmp_path).merge_and_unload())
    agrees(plain(net), merged, tmp_path, refused=refused)


def rewrite(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "options",
    [{"target_parameters": ["experts.up"]}, {"target_parameters": ["experts.down"], "use_rslora": True},
     {"target_parameters": ["experts.up"], "target_modules": ["gate"], "alpha_pattern": {"experts.up": 3}}],
)  # fmt: skip
def test_lora_of_stacked_experts(options: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = Mixture()
    model = adapted(peft.LoraConfig(r=2, lora_alpha=4, **{"target_modules": [], **options}), base)
    model.save_pretrained(tmp_path)
    merged = plain(copy.deepcopy(model).merge_and_unload())
    name = options["target_parameters"][0]
    for source in (model, tmp_path):
        agrees(plain(base), merged, source)
        product = next(t for t in measure(source).values() if "experts" in t.path and ".lora_BA" in t.path)
        assert (product.groups, product.frobenius) == (
            3,
            pytest.approx(float((merged[name] - plain(base)[name]).norm()), rel=1e-4),
        )


def test_lora_of_two_parameters_of_one_module_is_known_in_memory_and_refused_in_a_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base, both = Mixture(), ["experts.up", "experts.down"]
    model = adapted(peft.LoraConfig(r=2, target_modules=[], target_parameters=both), base)
    model.save_pretrained(tmp_path)
    agrees(plain(base), plain(copy.deepcopy(model).merge_and_unload()), model)
    found = difference(base, tmp_path)
    assert {found[name].reason for name in both} == {"which of the layer's parameters it changes is not known"}


# --- files of others, and scales that nobody stored ------------------------------------------------------------------


def kohya(**more: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {
        "b.lora_down.weight": torch.randn(4, 16),
        "b.lora_up.weight": torch.randn(32, 4),
        "b.alpha": torch.tensor(2.0),
        **more,
    }


def test_dora_of_kohya_s_tools_with_norms_of_outputs_or_of_inputs() -> None:
    state, weight = kohya(), torch.randn(32, 16, generator=torch.Generator().manual_seed(4))
    total = (weight + 0.5 * state["b.lora_up.weight"] @ state["b.lora_down.weight"]).double()
    for dim, shape in ((1, (32, 1)), (0, (1, 16))):
        scale = torch.linspace(0.5, 2, max(shape)).reshape(shape)
        expected = float((total / total.norm(dim=dim, keepdim=True) * scale).norm())
        found = measure({**state, "b.dora_scale": scale}, base={"b.weight": weight})["b.base_and_lora"]
        assert found.frobenius == pytest.approx(expected, rel=1e-5)


def test_a_tucker_core_is_a_kernel() -> None:
    torch.manual_seed(5)
    down, up, core = torch.randn(4, 16, 1, 1), torch.randn(32, 4, 1, 1), torch.randn(4, 4, 3, 3)
    state = {
        "b.lora_down.weight": down,
        "b.lora_up.weight": up,
        "b.lora_mid.weight": core,
        "b.alpha": torch.tensor(2.0),
    }
    expected = 0.5 * torch.einsum("om,mrkl,ri->oikl", up[:, :, 0, 0], core, down[:, :, 0, 0])
    found = measure(state)["b.lora_BA"]
    assert found.shape == (32, 16, 3, 3)
    assert found.frobenius == pytest.approx(float(expected.norm()), rel=1e-5)


def test_an_unknown_scale_is_not_one(net: Net, tmp_path: Path) -> None:
    model = adapted(peft.LoraConfig(r=4, lora_alpha=64, target_modules=["q"]), net)
    state = peft.get_peft_model_state_dict(model)
    for source in (state, model.state_dict()):
        row = difference(plain(net), source)["q"]
        assert (row.status, row.reason) == ("not compared", "the adapter's scale is not known")
        assert math.isnan(row.change_norm)
    beside = {
        **state,
        "base_model.model.q.alpha": torch.tensor(64.0),
        "base_model.model.layers.0.q.alpha": torch.tensor(8.0),
    }
    expected = float(model.base_model.model.q.get_delta_weight("default").norm())
    assert difference(plain(net), beside)["q"].change_norm == pytest.approx(expected, rel=1e-4)
    model.save_pretrained(tmp_path)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "renamed.safetensors")
    assert difference(net, tmp_path / "renamed.safetensors")["q"].change_norm == pytest.approx(expected, rel=1e-4)


def test_parts_that_are_not_read_refuse_their_layer_and_no_other(net: Net, tmp_path: Path) -> None:
    adapted(peft.LoraConfig(r=4, target_modules=["q", "v"]), net).save_pretrained(tmp_path)
    state = load_file(tmp_path / "adapter_model.safetensors")
    more = {"base_model.model.v.lora_magic": torch.ones(3), "base_model.model.head.hada_w1_a": torch.ones(3, 3)}
    save_file({**state, **more}, tmp_path / "adapter_model.safetensors")
    found = difference(net, tmp_path)
    assert found["v"].reason == "the adapter has a part that is not read: lora_magic"
    assert found["head"].reason == "changed by base_model.model.head.hada_w1_a, which is not read"
    assert found["head.bias"].status == "not compared"
    assert found["q"].status == "compared"
    assert found["ln"].status == "equal"


def test_an_adapter_without_a_layer_in_the_base_leaves_no_tensor_called_equal() -> None:
    found = difference({"b.weight": torch.ones(32, 16), "c.weight": torch.ones(3, 3)}, kohya(**{
        "lora_unet_c.lora_down.weight": torch.ones(2, 3), "lora_unet_c.lora_up.weight": torch.ones(3, 2)}))  # fmt: skip
    assert found["b"].status == "compared"
    assert (found["c"].status, found["c"].reason) == ("not compared", "only before")


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "another tuner": ({"peft_type": "LOHA"}, "an adapter of type LOHA, which is not computed"),
    "a new key": ({"twist": 3}, "a key that is not understood: twist"),
    "a type that is a number": ({"peft_type": 7}, "an adapter of type 7"),
    "an alpha of text": ({"lora_alpha": "eight"}, "scale is not known"),
    "an alpha without end": ({"lora_alpha": 10**400}, "scale is not known"),
    "patterns of a list": ({"alpha_pattern": [1]}, "alpha_pattern of the adapter's configuration is not understood"),
    "a pattern that is none": ({"alpha_pattern": {"(": 3}}, "alpha_pattern of the adapter's configuration"),
    "a pattern of many stars": ({"alpha_pattern": {".*.*.*.*x": 3}}, "alpha_pattern of the adapter's configuration"),
    "corda": ({"init_lora_weights": "corda"}, "its initialisation 'corda' changes the base"),
    "loftq": ({"init_lora_weights": "loftq"}, "its initialisation 'loftq' changes the base"),
    "an initialisation of a list": ({"init_lora_weights": [1]}, "its initialisation '[1]' changes the base"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_that_is_not_understood_is_a_refusal(name: str, net: Net, tmp_path: Path) -> None:
    adapted(peft.LoraConfig(r=4, target_modules=["v"]), net).save_pretrained(tmp_path)
    changes, said = CONFIGS[name]
    rewrite(tmp_path, **changes)
    row = difference(net, tmp_path)["v"]
    assert row.status == "not compared"
    assert said in row.reason


OFT: dict[str, tuple[dict[str, Any], str]] = {
    "terms": ({"num_cayley_neumann_terms": 10**9}, "terms of the Neumann series is not one of 0 to 100"),
    "terms of text": ({"num_cayley_neumann_terms": "x"}, "terms of the Neumann series"),
    "no terms": ({"num_cayley_neumann_terms": None}, "terms of the Neumann series"),
    "a radius of text": ({"coft": True, "eps": "x"}, r"its largest rotation (eps) is not a positive number"),
}


@pytest.mark.parametrize("name", OFT)
def test_numbers_that_set_loops_are_bounded(name: str, net: Net, tmp_path: Path) -> None:
    adapted(peft.OFTConfig(oft_block_size=4, target_modules=["v"]), net).save_pretrained(tmp_path)
    rewrite(tmp_path, **OFT[name][0])
    assert OFT[name][1] in difference(net, tmp_path)["v"].reason


def test_a_configuration_is_checked_key_by_key() -> None:
    assert AdapterConfig({"twist": None, "lora_alpha": 4}).refusal == ""
    assert AdapterConfig({"lora_alpha": True}).number("lora_alpha") is None
    assert AdapterConfig({"alpha_pattern": {"q": 3, ".*": 4}}).pattern("alpha_pattern", "a.q") == 3
    fits: Callable[[str], float | None] = lambda path: AdapterConfig({"alpha_pattern": {"b.c": 2}}).pattern(
        "alpha_pattern", path
    )  # noqa: E731
    assert (fits("b.c"), fits("a.b.c"), fits("a.b.cd"), fits("ab.c")) == (2, 2, None, None)
