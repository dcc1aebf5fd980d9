"""The anatomy of a checkpoint from its config.json: against that of the model, and what stays unknown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bank.live.transformers_models import MODELS
from foreign import transformers
from gonio.errors import InvalidArgumentError, MissingExtraError, UnreadableFileError
from gonio.measuring.reading.source import contents_of
from gonio.surgery import anatomy, planned

LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
# DeepSeek V3 and Gemma 2 have layers of two kinds; BART has two lists of them.
FAMILIES = (
    "BERT", "RoBERTa", "GPT-2", "GPT-NeoX", "OPT", "BLOOM", "Falcon", "Llama", "Llama, tied", "Mistral", "Qwen3",
    "Gemma 2", "Phi-3", "OLMo 2", "Cohere", "DeepSeek V3", "gpt-oss", "BART", "ModernBERT", "LFM2",
)  # fmt: skip
QUICK = ("Llama", "Gemma 2")


def saved(name: str, folder: Path, **other: Any) -> nn.Module:
    """A model of four layers, saved with its configuration."""
    library, (kind, config, options, _) = transformers(), MODELS[name]
    options = {key: value for key, value in options.items() if key != "attn_implementation"}
    more = {key: 4 for key in LAYERS if options.get(key) == 2 and "layer_types" not in options}
    torch.manual_seed(0)
    model = getattr(library, kind)(getattr(library, config)(**{**options, **more, **other}))
    model.config.architectures = [kind]
    model.config._attn_implementation = model.config._experts_implementation = "eager"
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)
def test_a_configuration_tells_what_its_model_shows(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path)
    found, shown = anatomy(tmp_path), anatomy(model, example=MODELS[name][3]())
    assert list(map(str, found.attention)) == list(map(str, shown.attention))
    for block, expected in zip(found.attention, shown.attention, strict=True):
        for role in ("path", "query", "key", "value", "output", "groups", "shared_key", "rotary", "normed", "linear"):
            assert getattr(block, role) == getattr(expected, role), (block.path, role)
    assert found.mlps == shown.mlps
    assert found.roles == shown.roles
    assert found.attention


def test_its_parts_are_those_of_the_file(tmp_path: Path) -> None:
    saved("Llama", tmp_path)
    shapes = {entry.name: entry.shape for entry in contents_of(tmp_path).entries}
    (last,) = (block for block in anatomy(tmp_path).attention if block.path == "model.layers.3.self_attn")
    parts = [*last.query[1], *last.key[0], *last.value[0], last.output[1]]
    assert [str(part) for part in parts] == [
        *(f"model.layers.3.self_attn.{name}" for name in ("q_proj.weight[8:16]", "k_proj.weight[0:8]")),
        *(f"model.layers.3.self_attn.{name}" for name in ("v_proj.weight[0:8]", "o_proj.weight[:, 8:16]")),
    ]
    assert all(max(part.indices) < shapes[part.tensor][part.dim] for part in parts)


def test_a_file_and_a_configuration_stand_for_their_folder(tmp_path: Path) -> None:
    saved("Llama", tmp_path)
    whole = anatomy(tmp_path)
    assert anatomy(tmp_path / "model.safetensors") == anatomy(str(tmp_path / "config.json")) == whole


def test_no_weights_are_needed_and_no_code_of_the_folder_runs(tmp_path: Path) -> None:
    saved("Llama", tmp_path)
    whole = anatomy(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "modeling_own.py").write_text("raise SystemExit('it ran')\n")
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.Own"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert anatomy(tmp_path) == whole


def test_layers_of_one_kind_run_once(tmp_path: Path) -> None:
    saved("Gemma 2", tmp_path, num_hidden_layers=6)
    plan = planned.planned(tmp_path)
    assert isinstance(plan, planned.Planned)
    (layers,) = plan.lists
    assert (layers.path, layers.like) == ("model.layers", (0, 1, 0, 1, 0, 1))
    assert len(plan.model.model.layers) == 2
    assert len(anatomy(tmp_path).attention) == 6


def test_tables_of_large_models_are_made_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("Llama", tmp_path, vocab_size=5000, eos_token_id=4999)
    whole = anatomy(tmp_path)
    monkeypatch.setattr(planned, "_MANY", 1000)
    plan = planned.planned(tmp_path)
    assert isinstance(plan, planned.Planned)
    assert len(plan.model.model.embed_tokens.weight) == 512
    assert anatomy(tmp_path).attention == whole.attention


def unknown(path: Path) -> str:
    found = anatomy(path)
    assert (found.attention, found.mlps, found.roles) == ((), (), {})
    return found.unknown[""]


def _written(folder: Path, content: Mapping[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(content))
    return folder


STATED = {"num_hidden_layers": 7, "num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 96}
NUMBERS = "its configuration states 7 layers, 12 heads, 3 heads of keys and values, 96 channels"


def test_what_cannot_be_built_is_unknown_with_what_is_stated(tmp_path: Path) -> None:
    transformers()
    found = unknown(_written(tmp_path, {"model_type": "of-my-own", **STATED}))
    assert "of-my-own" in found
    assert found.endswith(NUMBERS)
    assert "builds no model" in unknown(_written(tmp_path, {"model_type": "llama", **STATED, "hidden_size": "wide"}))


def test_without_transformers_only_numbers_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str, spec: str) -> Any:
        raise MissingExtraError(spec, package, "models")

    monkeypatch.setattr(planned, "load_library", missing)
    found = unknown(_written(tmp_path, {"model_type": "llama", **STATED}))
    assert found == f"transformers is not installed, which would build the model; {NUMBERS}"


def test_a_model_that_is_too_large_for_a_run_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("Llama", tmp_path)
    monkeypatch.setattr(planned, "memory", lambda: 1000)
    assert "more than 1/4 of this machine's memory" in unknown(tmp_path)


def test_a_model_of_inputs_that_cannot_be_made_is_unknown(tmp_path: Path) -> None:
    saved("time series", tmp_path)
    assert "the model of its configuration was not run" in unknown(tmp_path)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"anatomy\(\) of a checkpoint reads its config.json; found no file"):
        anatomy(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnreadableFileError, match="it is not JSON"):
        anatomy(tmp_path)


def test_a_setting_that_is_the_number_of_a_layer_is_no_difference() -> None:
    class Layer(nn.Linear):
        def __init__(self, number: int, other: int) -> None:
            super().__init__(2, 2)
            self.number, self.other = number, other

    alike = nn.ModuleList(Layer(n, 1) for n in range(4))
    assert [planned._kinds(alike).index(kind) for kind in planned._kinds(alike)] == [0, 0, 0, 0]
    differ = nn.ModuleList(Layer(n, n % 2) for n in range(4))
    assert [planned._kinds(differ).index(kind) for kind in planned._kinds(differ)] == [0, 1, 0, 1]


def test_an_early_kind_that_returns_is_not_counted_twice() -> None:
    found = planned.Repeated("layers", (0, 1, 0, 3, 1))
    assert found.run == 4
    names = ["layers.0.a.weight", "layers.1.a.weight", "layers.2.a.weight", "head.weight"]
    assert [found.places(iter([name])) for name in names] == [(0,), (1, 4), (2,), ()]
    assert found.places(iter(names[:2])) == ()
