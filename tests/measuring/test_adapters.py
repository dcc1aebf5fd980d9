"""Low-rank adapters as peft writes them: what they add and the sum, held against peft's own merged weights."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from foreign import torchvision
from gonio.errors import InvalidArgumentError
from gonio.measuring import TensorMeasurement, measure

torchvision()  # peft imports transformers, and that torchvision
peft = pytest.importorskip("peft")


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.q, self.v = nn.Embedding(20, 12), nn.Linear(12, 16), nn.Linear(16, 16)
        self.conv, self.one = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.v(self.q(self.emb(x)))


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["emb", "q", "conv", "one"]},
    "patterns": {"target_modules": ["q", "v"], "alpha_pattern": {"q": 6}, "rank_pattern": {"v": 4}},
    "rank-stabilised": {"target_modules": ["q", "v"], "use_rslora": True},
    "directions": {"target_modules": ["q", "conv"], "use_dora": True},
}


def adapted(name: str) -> tuple[nn.Module, Any]:
    """A network, and a copy of it with adapters of random values."""
    torch.manual_seed(0)
    base = Network()
    config = peft.LoraConfig(r=2, lora_alpha=8, init_lora_weights=False, **CONFIGS[name])
    return base, peft.get_peft_model(copy.deepcopy(base), config)


def same(first: TensorMeasurement, second: TensorMeasurement) -> None:
    assert (first.status, first.shape) == ("measured", second.shape), first.reason
    for figure in ("frobenius", "sigma_max", "alignment", "norm_mean"):
        assert getattr(first, figure) == pytest.approx(getattr(second, figure), rel=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_an_adapter_s_file_and_its_base_give_what_peft_merges(name: str, tmp_path: Path) -> None:
    base, model = adapted(name)
    model.save_pretrained(tmp_path)
    merged = copy.deepcopy(model).merge_and_unload()
    found = measure(tmp_path, base=base)
    expected, before = measure(merged), measure(base)
    for path in CONFIGS[name]["target_modules"]:
        same(found[f"{path}.base_and_lora"], expected[path])
        same(found[path], before[path])
        layer = model.get_submodule(f"base_model.model.{path}")
        delta = layer.get_delta_weight("default").detach()
        same(found[f"{path}.lora_BA"], measure({"w.weight": delta})["w"])
    alone = measure(tmp_path)
    same(alone[f"{path}.lora_BA"], found[f"{path}.lora_BA"])
    assert "with its scale" in alone[f"{path}.lora_BA"].notes[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_an_adapted_model_shows_the_same(name: str, tmp_path: Path) -> None:
    base, model = adapted(name)
    model.save_pretrained(tmp_path)
    found, files = measure(model), measure(tmp_path, base=base)
    for path in CONFIGS[name]["target_modules"]:
        at = f"base_model.model.{path}"
        same(found[f"{at}.base_and_lora.default"], files[f"{path}.base_and_lora"])
        same(found[f"{at}.lora_BA.default"], files[f"{path}.lora_BA"])


def test_merged_adapters_are_not_added_twice() -> None:
    _, model = adapted("plain")
    separate = measure(model)["base_model.model.q.base_and_lora.default"]
    model.merge_adapter()
    merged = measure(model)["base_model.model.q.base_and_lora.default"]
    assert merged.frobenius == pytest.approx(separate.frobenius, rel=1e-5)
    assert merged.notes == ("merged into the base's weight: default",)


def test_two_adapters_have_rows_of_their_own() -> None:
    _, model = adapted("plain")
    model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["q"], init_lora_weights=False))
    found = measure(model)
    state = measure(model.state_dict())
    for name in ("default", "second"):
        assert found[f"base_model.model.q.lora_BA.{name}"].shape == (16, 12)
        assert state[f"q.lora_BA.{name}"].shape == (16, 12)
        assert "without its scale" in state[f"q.lora_BA.{name}"].notes[0]


def test_weights_stored_as_inputs_by_outputs(tmp_path: Path) -> None:
    from transformers.pytorch_utils import Conv1D

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c_attn = Conv1D(10, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.c_attn(x)

    base = Turned()
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
    model = peft.get_peft_model(copy.deepcopy(base), config)
    model.save_pretrained(tmp_path)
    found = measure(tmp_path, base=base)["c_attn.base_and_lora"]
    assert (found.shape, found.filters, found.dim) == ((6, 10), 10, 6)
    same(found, measure(copy.deepcopy(model).merge_and_unload())["c_attn"])


def test_adapters_of_diffusion_tools_have_their_alpha_beside_them(tmp_path: Path) -> None:
    down, up = torch.randn(4, 12), torch.randn(16, 4)
    state = {"a.lora_down.weight": down, "a.lora_up.weight": up, "a.alpha": torch.tensor(2.0)}
    save_file(state, tmp_path / "lora.safetensors")
    found = measure(tmp_path / "lora.safetensors")
    same(found["a.lora_BA"], measure({"w.weight": 0.5 * up @ down})["w"])


def test_what_does_not_fit_keeps_its_row_and_says_why(tmp_path: Path) -> None:
    base, model = adapted("plain")
    model.save_pretrained(tmp_path)
    del base.q
    base.one = nn.Conv2d(3, 8, 3)
    found = measure(tmp_path, base=base)
    assert found["q.base_and_lora"].reason == "the base has no weight q"
    assert (
        "made for a weight of the shape (8, 3, 1, 1), the base has the shape (8, 3, 3, 3)"
        in found["one.base_and_lora"].reason
    )
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": "eight"}))
    unscaled = measure(tmp_path, base=base)
    assert "without its scale" in unscaled["emb.lora_BA"].notes[0]
    assert unscaled["emb.base_and_lora"].reason == "the adapter's scale is not known"


def test_a_base_needs_adapters(tmp_path: Path) -> None:
    base, _ = adapted("plain")
    with pytest.raises(InvalidArgumentError, match=r"found Network without adapters"):
        measure(base, base=base)


def test_matrices_that_do_not_match_are_no_adapter(tmp_path: Path) -> None:
    base, model = adapted("plain")
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "adapter_model.safetensors")
    state["base_model.model.q.lora_B.weight"] = torch.ones(16, 5)
    save_file(state, tmp_path / "adapter_model.safetensors")
    found = measure(tmp_path, base=base)
    assert "q.lora_BA" not in found
    assert found["emb.base_and_lora"].status == "measured"
