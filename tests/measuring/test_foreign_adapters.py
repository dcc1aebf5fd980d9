"""Adapters of every tuner of peft and every option of its LoRA: what peft merges, or a refusal; never "equal"."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import gonio
from bank.files.adapters import GatedMixture, Mixture, Net, adapted, base, plain
from foreign import torchvision
from gonio.measuring import difference, measure
from gonio.measuring.reading.adapters import AdapterConfig

torchvision()  # peft imports transformers, and that torchvision
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # peft's own


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
    "FourierFTConfig": {"n_frequency": 20}, "GraloraConfig": {}, "HRAConfig": {},
    "IA3Config": {"feedforward_modules": []},
    "LNTuningConfig": {"target_modules": ["ln"]}, "LoHaConfig": {}, "LoKrConfig": {}, "LoraConfig": {},
    "MissConfig": {"r": 4},
    "OFTConfig": {"oft_block_size": 4}, "OSFConfig": {}, "RandLoraConfig": {}, "ShiraConfig": {"r": 2},
    "TrainableTokensConfig": {"target_modules": ["emb"], "token_indices": [1, 2]},
    "VBLoRAConfig": {"vector_length": 16, "num_vectors": 8}, "VeraConfig": {},
}  # fmt: skip


@pytest.fixture(scope="module")
def net() -> nn.Module:
    return base(Net)


@pytest.mark.parametrize("name", [name for name in TUNERS if hasattr(peft, name)])
def test_a_tuner_in_memory_has_the_weights_that_peft_merges_and_its_state_dict_is_not_called_equal(
    name: str, net: nn.Module
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


def test_a_tuner_that_peft_cannot_merge_is_named(net: nn.Module) -> None:
    model = adapted(peft.PolyConfig(target_modules=["q", "v"]), net)
    row = difference(plain(net), model)["q"]
    assert row.status == "not compared"
    assert "changed by an adapter of type poly, which peft does not merge" in row.reason


def test_the_active_adapters_count_and_none_where_they_are_disabled(net: nn.Module) -> None:
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


def test_attention_s_packed_projection_is_adapted_too(net: nn.Module) -> None:
    model = adapted(peft.LoraConfig(r=2, target_modules=["mha"]), net)
    merged = copy.deepcopy(model).merge_and_unload().mha.in_proj_weight
    found = difference(plain(net), model)["mha.in_proj_weight"]
    assert found.change_norm == pytest.approx(float((merged - net.mha.in_proj_weight).norm()), rel=1e-4)


# --- stacked experts in memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Mixture, GatedMixture])
@pytest.mark.parametrize("target", ["experts.up", "experts.down"])
def test_lora_of_stacked_experts_in_memory(target: str, kind: type[nn.Module]) -> None:
    model = adapted(peft.LoraConfig(r=2, lora_alpha=4, target_modules=[], target_parameters=[target]), base(kind))
    merged, before = plain(copy.deepcopy(model).merge_and_unload()), plain(base(kind))
    agrees(before, merged, model)
    product = next(t for t in measure(model).values() if "experts" in t.path and ".lora_BA" in t.path)
    expected = float((merged[target] - before[target]).norm())
    assert (product.groups, product.frobenius) == (3, pytest.approx(expected, rel=1e-4))


@pytest.mark.parametrize("kind", [Mixture, GatedMixture])
def test_lora_of_two_parameters_of_one_module_is_known_in_memory(kind: type[nn.Module]) -> None:
    both = ["experts.up", "experts.down"]
    model = adapted(peft.LoraConfig(r=2, target_modules=[], target_parameters=both), base(kind))
    merged = plain(copy.deepcopy(model).merge_and_unload())
    agrees(plain(base(kind)), merged, model)
    model.merge_adapter()
    agrees(plain(base(kind)), merged, model)


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


def test_an_unknown_scale_is_not_one(net: nn.Module, tmp_path: Path) -> None:
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


def test_parts_that_are_not_read_refuse_their_layer_and_no_other(net: nn.Module, tmp_path: Path) -> None:
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
        "lora_unet_d.lora_down.weight": torch.ones(2, 3), "lora_unet_d.lora_up.weight": torch.ones(3, 2)}))  # fmt: skip
    assert found["b"].status == "compared"
    assert (found["c"].status, found["c"].reason) == ("not compared", "only before")


def test_a_configuration_is_checked_key_by_key() -> None:
    assert AdapterConfig({"twist": None, "lora_alpha": 4}).refusal == ""
    assert AdapterConfig({"lora_alpha": True}).number("lora_alpha") is None
    assert AdapterConfig({"alpha_pattern": {"q": 3, ".*": 4}}).pattern("alpha_pattern", "a.q") == 3

    def fits(path: str) -> float | None:
        return AdapterConfig({"alpha_pattern": {"b.c": 2}}).pattern("alpha_pattern", path)

    assert (fits("b.c"), fits("a.b.c"), fits("a.b.cd"), fits("ab.c")) == (2, 2, None, None)


def test_a_frozen_factor_of_an_adapter_is_no_layer_that_was_never_loaded() -> None:
    """As LoRA-FA trains: B alone, so that A keeps the values with which torch built it."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
    for layer in net:
        torch.nn.init.normal_(layer.weight), torch.nn.init.normal_(layer.bias)
    model = peft.get_peft_model(net, peft.LoraConfig(target_modules=["0", "1"], r=4, init_lora_weights=True))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    assert "G415" not in {finding.code for finding in gonio.measure(model).findings}
    net.append(torch.nn.Linear(16, 16))
    assert "G415" in {finding.code for finding in gonio.measure(model).findings}
