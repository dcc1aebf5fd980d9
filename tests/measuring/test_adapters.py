"""Adapters of peft, read without peft, equal what peft merges: as weights, as changes of a base, and in a model."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from catalog import seeded
from foreign import torchvision
from gonio.errors import InvalidArgumentError
from gonio.measuring import TensorMeasurement, check, difference, measure
from gonio.measuring.changes.sources import base_entries, tuned, values_of

torchvision()  # peft imports transformers, and that torchvision
peft = pytest.importorskip("peft")


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.q, self.v = nn.Embedding(50, 48), nn.Linear(48, 40), nn.Linear(40, 48)
        self.conv, self.one, self.head = nn.Conv2d(4, 8, 3), nn.Conv2d(4, 8, 1), nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.v(self.q(self.emb(x))))


def oft(**options: Any) -> Any:
    return peft.OFTConfig(target_modules=["q", "v"], init_weights=False, **options)


def lora(**options: Any) -> Any:
    return peft.LoraConfig(r=2, lora_alpha=8, init_lora_weights=False, **{"target_modules": ["q", "v"], **options})


CONFIGS: dict[str, Any] = {
    "lora": lambda: lora(target_modules=["emb", "q", "conv", "one"]),
    "lora, rank-stabilised": lambda: lora(use_rslora=True),
    "lora with patterns": lambda: lora(alpha_pattern={"q": 6}, rank_pattern={"v": 4}),
    "lora with a trained head": lambda: lora(modules_to_save=["head"]),
    "dora": lambda: lora(use_dora=True),
    "dora of a convolution": lambda: lora(use_dora=True, target_modules=["conv", "q"]),
    "oft": lambda: oft(oft_block_size=8),
    "oft, two blocks": lambda: oft(r=2, oft_block_size=0),
    "oft, exact": lambda: oft(oft_block_size=8, use_cayley_neumann=False),
    "oft, four terms": lambda: oft(oft_block_size=8, num_cayley_neumann_terms=4),
    "oft, three terms": lambda: oft(oft_block_size=8, num_cayley_neumann_terms=3),
    "oft, shared": lambda: oft(oft_block_size=8, block_share=True, use_cayley_neumann=False),
    "oft, constrained": lambda: oft(oft_block_size=8, coft=True, eps=0.05, use_cayley_neumann=False),
    "oft of a convolution": lambda: peft.OFTConfig(target_modules=["conv"], oft_block_size=12, init_weights=False),
}  # fmt: skip
LOW_RANK = ["lora", "lora with patterns", "lora, rank-stabilised", "dora of a convolution"]


def adapted(name: str) -> tuple[nn.Module, Any, nn.Module]:
    """A network, a copy of it with adapters of random values, and what peft merges."""
    torch.manual_seed(0)
    base = Network()
    model = peft.get_peft_model(copy.deepcopy(base), CONFIGS[name]())
    if name == "lora with a trained head":
        with torch.no_grad():
            model.base_model.model.head.modules_to_save.default.weight.mul_(2)
    return base, model, copy.deepcopy(model).merge_and_unload()


def figures(row: TensorMeasurement) -> dict[str, float]:
    """The sizes and some figures of a weight that was measured."""
    assert row.status == "measured", row.reason
    sizes = {f"size {axis}": size for axis, size in enumerate(row.shape)}
    return sizes | {name: getattr(row, name) for name in ("frobenius", "sigma_max", "alignment", "norm_mean")}


def near(row: TensorMeasurement) -> Any:
    return pytest.approx(figures(row), rel=1e-4)


# --- their weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOW_RANK)
def test_an_adapter_s_file_and_its_base_give_what_peft_merges(name: str, tmp_path: Path) -> None:
    base, model, merged = adapted(name)
    model.save_pretrained(tmp_path)
    found = measure(tmp_path, base=base)
    expected, before = measure(merged), measure(base)
    for path in model.peft_config["default"].target_modules:
        assert figures(found[f"{path}.base_and_lora"]) == near(expected[path])
        assert figures(found[path]) == near(before[path])
        layer = model.get_submodule(f"base_model.model.{path}")
        delta = layer.get_delta_weight("default").detach()
        assert figures(found[f"{path}.lora_BA"]) == near(measure({"w.weight": delta})["w"])
    alone = measure(tmp_path)
    assert figures(alone[f"{path}.lora_BA"]) == near(found[f"{path}.lora_BA"])
    assert "with its scale" in alone[f"{path}.lora_BA"].notes[0]


@pytest.mark.parametrize("name", LOW_RANK)
def test_an_adapted_model_shows_the_same(name: str, tmp_path: Path) -> None:
    base, model, _ = adapted(name)
    model.save_pretrained(tmp_path)
    found, files = measure(model), measure(tmp_path, base=base)
    for path in model.peft_config["default"].target_modules:
        at = f"base_model.model.{path}"
        assert figures(found[f"{at}.base_and_lora.default"]) == near(files[f"{path}.base_and_lora"])
        assert figures(found[f"{at}.lora_BA.default"]) == near(files[f"{path}.lora_BA"])


def test_merged_adapters_are_not_added_twice() -> None:
    _, model, _ = adapted("lora")
    separate = measure(model)["base_model.model.q.base_and_lora.default"]
    model.merge_adapter()
    merged = measure(model)["base_model.model.q.base_and_lora.default"]
    assert merged.frobenius == pytest.approx(separate.frobenius, rel=1e-5)
    assert merged.notes == ("merged into the base's weight: default",)


def test_two_adapters_have_rows_of_their_own() -> None:
    _, model, _ = adapted("lora")
    model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["q"], init_lora_weights=False))
    found = measure(model)
    state = measure(model.state_dict())
    for name in ("default", "second"):
        assert found[f"base_model.model.q.lora_BA.{name}"].shape == (40, 48)
        assert state[f"q.lora_BA.{name}"].shape == (40, 48)
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
    assert figures(found) == near(measure(copy.deepcopy(model).merge_and_unload())["c_attn"])


def test_adapters_of_diffusion_tools_have_their_alpha_beside_them(tmp_path: Path) -> None:
    down, up = torch.randn(4, 12), torch.randn(16, 4)
    state = {"a.lora_down.weight": down, "a.lora_up.weight": up, "a.alpha": torch.tensor(2.0)}
    save_file(state, tmp_path / "lora.safetensors")
    found = measure(tmp_path / "lora.safetensors")
    assert figures(found["a.lora_BA"]) == near(measure({"w.weight": 0.5 * up @ down})["w"])


def test_what_does_not_fit_keeps_its_row_and_says_why(tmp_path: Path) -> None:
    base, model, _ = adapted("lora")
    model.save_pretrained(tmp_path)
    del base.q
    base.one = nn.Conv2d(4, 8, 3)
    found = measure(tmp_path, base=base)
    assert found["q.base_and_lora"].reason == "the base has no weight q"
    assert (
        "made for a weight of the shape (8, 4, 1, 1), the base has the shape (8, 4, 3, 3)"
        in found["one.base_and_lora"].reason
    )
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": "eight"}))
    unscaled = measure(tmp_path, base=base)
    assert "without its scale" in unscaled["emb.lora_BA"].notes[0]
    assert unscaled["emb.base_and_lora"].reason == "the adapter's scale is not known"


def test_a_base_needs_adapters(tmp_path: Path) -> None:
    base, _, _ = adapted("lora")
    with pytest.raises(InvalidArgumentError, match=r"found Network without adapters"):
        measure(base, base=base)


def test_matrices_that_do_not_match_are_no_adapter(tmp_path: Path) -> None:
    base, model, _ = adapted("lora")
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "adapter_model.safetensors")
    state["base_model.model.q.lora_B.weight"] = torch.ones(40, 5)
    save_file(state, tmp_path / "adapter_model.safetensors")
    found = measure(tmp_path, base=base)
    assert "q.lora_BA" not in found
    assert found["emb.base_and_lora"].status == "measured"


# --- what they change -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_of_adapters_gives_what_peft_merges(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, model, merged = adapted(name)
    model.save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "peft", None)  # an import of it would fail
    read = tuned(base_entries(base), tmp_path)
    exact = dict(merged.named_parameters())
    assert read.adapters
    for key, entry in read.entries.items():
        torch.testing.assert_close(values_of(entry, "after"), exact[key].detach(), rtol=1e-5, atol=1e-6)
    changed = {key for key, value in exact.items() if not torch.equal(value, base.get_parameter(key))}
    assert changed <= set(read.entries)
    found = difference(base, tmp_path)
    assert {t.name for t in found.moved} == changed
    assert {t.status for t in found.values()} == {"compared", "equal"}


@pytest.mark.parametrize("name", ["lora", "dora", "lora with a trained head"])
def test_an_adapted_model_gives_the_same(name: str) -> None:
    base, model, merged = adapted(name)
    here, there = difference(base, model), difference(base, merged)
    assert [t.name for t in here.moved] == [t.name for t in there.moved]
    for mine, theirs in zip(here.moved, there.moved, strict=True):
        assert mine.relative == pytest.approx(theirs.relative, rel=1e-4)


def test_forms_of_adapters_are_named(tmp_path: Path) -> None:
    forms = {}
    for name in ("lora", "oft, exact"):
        base, model, _ = adapted(name)
        model.save_pretrained(tmp_path / name)
        forms[name] = difference(base, tmp_path / name)["q"].form
    assert forms == {"lora": "rank 2", "oft, exact": "rotation"}


def test_several_adapters_of_one_base(tmp_path: Path) -> None:
    for name in ("lora", "dora", "oft"):
        base, model, _ = adapted(name)
        model.save_pretrained(tmp_path / name)
    found = measure(base, *(tmp_path / name for name in ("lora", "dora", "oft")))
    assert len(found["q"].cosines) == 3
    assert "v" in found


def test_the_rotated_weight_is_measured_beside_its_base(tmp_path: Path) -> None:
    base, model, merged = adapted("oft")
    model.save_pretrained(tmp_path)
    assert figures(measure(tmp_path, base=base)["q.base_and_oft"]) == near(measure(merged)["q"])


def test_a_rotation_that_does_not_fit_keeps_its_row_and_says_why(tmp_path: Path) -> None:
    base, model, _ = adapted("oft")
    model.save_pretrained(tmp_path)
    base.q, base.v = nn.Linear(30, 40), None
    found = difference(base, tmp_path)
    assert "the adapter rotates 6 blocks of 8, the base has filters of length 30" in found["q"].reason
    assert found["v"].reason == "the base has no weight v"
    assert ("warn", "G713", "v") in {(f.level, f.code, f.path) for f in found.findings}
    assert ("warn", "G713", "q") in {(f.level, f.code, f.path) for f in found.findings}
    ragged = {"q.oft_R.weight": torch.ones(2, 5)}  # 5 entries are no triangle
    assert "no triangles of rotations" in measure(ragged)["q.base_and_oft"].reason


def test_a_base_that_has_none_of_the_weights_is_refused(tmp_path: Path) -> None:
    base, model, _ = adapted("lora")
    model.save_pretrained(tmp_path)
    other = nn.Sequential(nn.Linear(30, 40))
    with pytest.raises(InvalidArgumentError, match="which has none of the weights that they adapt, such as"):
        measure(tmp_path, base=other)
    base.q = None  # the others are enough
    assert measure(tmp_path, base=base)["q.base_and_lora"].reason == "the base has no weight q"


def test_a_trained_adapter_that_has_learned_one_direction_is_no_finding(tmp_path: Path) -> None:
    """Few directions are what an adapter is for; the same product as a weight of a model is one, and so is NaN."""
    random = torch.Generator().manual_seed(0)
    a, b = torch.randn(8, 128, generator=random), 0.05 * torch.randn(128, 8, generator=random)
    b[:, 0] += torch.randn(128, generator=random)
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))

    def codes(factor: Tensor) -> set[str]:
        state = {"base_model.model.q.lora_A.weight": a, "base_model.model.q.lora_B.weight": factor}
        save_file(state, tmp_path / "adapter_model.safetensors")
        return {finding.code for finding in measure(tmp_path).findings}

    assert codes(b) == set()
    assert {finding.code for finding in measure({"q.weight": 2 * b @ a}).findings} >= {"G201", "G202", "G301"}
    assert codes(torch.where(torch.arange(128)[:, None] < 5, torch.nan, b)) == {"G001"}
    assert codes(torch.where(torch.arange(128)[:, None] < 5, 0.0, b)) == set()  # rows that no gradient has reached
    assert {f.code for f in check(tmp_path).findings} == set()


def faulty(change: str, folder: Path) -> None:
    """An adapter of two layers with one fault, as a folder."""
    sizes = {"q": (48, 40), "v": (40, 48)}
    shapes = {f"{path}.lora_{part}": size for path, (inputs, outputs) in sizes.items()
              for part, size in (("A", (2, inputs)), ("B", (outputs, 2)))}  # fmt: skip
    state = {f"base_model.model.{name}.weight": torch.randn(*size) for name, size in shapes.items()}
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q", "v"]}
    key = "base_model.model.q.lora_B.weight"
    if change == "no partner":
        del state[key]
    elif change == "another rank":
        state[key] = torch.randn(40, 3)
    elif change == "a configuration of another rank":
        config["r"] = 16
    elif change == "a pattern of ranks":
        config |= {"r": 16, "rank_pattern": {"v": 2, "q": 2}}
    save_file(state, folder / "adapter_model.safetensors")
    if change != "no configuration":
        text = json.dumps(config)
        (folder / "adapter_config.json").write_text(text if change != "cut off" else text[:9])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("no partner", {"q": "its lora_A has no partner in the file"}),
        ("another rank", {"q": "its A (2, 48) and B (40, 3) do not fit"}),
        ("no configuration", {"": "no adapter_config.json that can be read, without which 2 changes are not known"}),
        ("cut off", {"": "no adapter_config.json that can be read, without which 2 changes are not known"}),
        (
            "a configuration of another rank",
            dict.fromkeys("qv", "its A and B have rank 2, and the configuration states 16"),
        ),
        ("a pattern of ranks", {}),
        ("none", {}),
    ],
)
def test_an_adapter_that_does_not_fit_is_a_finding(change: str, said: dict[str, str], tmp_path: Path) -> None:
    faulty(change, tmp_path)
    for found in (check(tmp_path).findings, measure(tmp_path).findings):
        assert {f.path: f.found for f in found if f.code == "G713"} == said
    if said and "" not in said:
        assert "G713" in {f.code for f in difference(Network(), tmp_path).findings}


@pytest.mark.parametrize(
    ("lost", "options", "named"),
    [
        ("h.2.q.", {}, ["h.2.q.lora_A.weight", "h.2.q.lora_B.weight"]),
        ("h.2.", {}, ["h.2"]),
        ("none", {}, []),
        ("h.2.q.", {"layers_to_transform": [0, 1, 3, 4]}, []),
        ("h.2.q.", {"exclude_modules": ["h.2.q"]}, []),
        ("h.2.q.", {"target_modules": "h.*"}, []),
        ("h.2.q.", {"target_modules": ["v", "h.0.q"]}, []),
        ("h.2.q.", {"peft_type": "ADALORA"}, []),
    ],
)
def test_a_layer_of_one_block_that_lacks_its_adapter(
    lost: str, options: dict[str, Any], named: list[str], tmp_path: Path
) -> None:
    """peft starts it from B = 0, and warns."""
    state = {f"h.{n}.{path}.lora_{part}.weight": seeded(*size, seed=n)
             for n in range(5) for path in "qv" for part, size in (("A", (2, 8)), ("B", (8, 2)))}  # fmt: skip
    kept = {f"base_model.model.{name}": tensor for name, tensor in state.items() if not name.startswith(lost)}
    save_file(kept, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q", "v"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **options}))
    for found in (check(tmp_path).findings, measure(tmp_path).findings):
        assert [f.path for f in found if f.code == "G714"] == [f"base_model.model.{name}" for name in named]


@pytest.mark.parametrize(
    ("options", "part", "shape", "tensor", "said"),
    [
        ({"use_dora": True}, "q.lora_magnitude_vector", (30,), "q", "the adapter has 30 norms for 40 filters"),
        ({"lora_bias": True}, "q.lora_B.bias", (1,), "q.bias", "made for a weight of the shape (1,)"),
        ({"trainable_token_indices": {"emb": [1, 2]}}, "emb.token_adapter.trainable_tokens_delta", (2, 30), "emb",
         "its trained tokens do not fit the base's shape (50, 48)"),
        ({"trainable_token_indices": {"emb": [1, 50]}}, "", (), "emb",
         "its trained tokens do not fit the base's shape (50, 48)"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Adapter 'default'. 1 LoRA tensor")  # peft takes the bias for a shard
def test_any_part_of_an_adapter_that_does_not_fit_the_base_is_a_finding(
    options: dict[str, Any], part: str, shape: tuple[int, ...], tensor: str, said: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    larger = Network()
    larger.emb = nn.Embedding(60, 48)
    peft.get_peft_model(larger, lora(target_modules=["q"], **options)).save_pretrained(tmp_path)
    state = load_file(tmp_path / "adapter_model.safetensors")
    state |= {key: torch.ones(shape) for key in state if part and key.removesuffix(".weight").endswith(part)}
    save_file(state, tmp_path / "adapter_model.safetensors")
    found = difference(Network(), tmp_path)
    assert [f.path for f in found.findings if f.code == "G713"] == [tensor]
    assert said in found[tensor].reason


class Tied(Network):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(48, 50, bias=False)
        self.head.weight = self.emb.weight


def test_what_is_tied_to_a_table_with_trained_tokens_is_not_called_equal(tmp_path: Path) -> None:
    """With a model of transformers that states the tie peft changes both, and with any other the table alone."""
    model = peft.get_peft_model(Tied(), lora(target_modules=["q"], trainable_token_indices={"emb": [1, 2]}))
    model.save_pretrained(tmp_path)
    found = difference(Tied(), tmp_path)
    assert found["emb"].status == "compared"
    assert found["head"].status == "not compared"
    assert found["head"].reason.startswith("tied to emb.weight, of which an adapter replaces rows; whether here too")


TIED: dict[str, tuple[Any, set[str]]] = {
    "of the head": (lambda: lora(target_modules=["head"]), {"head"}),
    "of the embedding": (lambda: lora(target_modules=["emb"]), {"emb"}),
    "a trained embedding": (lambda: lora(target_modules=["q"], modules_to_save=["emb"]), {"emb", "q"}),
}


@pytest.mark.filterwarnings("ignore")  # peft warns of tied weights
@pytest.mark.parametrize("name", TIED)
@pytest.mark.parametrize("live", [True, False])
def test_an_adapter_of_one_of_two_tied_layers_changes_that_one(name: str, live: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    base, (config, changed) = Tied(), TIED[name]
    model = peft.get_peft_model(copy.deepcopy(base), config())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 if parameter.requires_grad else 0.0)
    model.save_pretrained(tmp_path)
    found = difference(base, model if live else tmp_path)
    assert {path for path in ("emb", "head", "q") if found[path].relative} == changed
    inputs, units = torch.arange(50), torch.eye(48)
    used = model.base_model.model
    for path, weight in (("emb", used.emb(inputs)), ("head", used.head(units).mT)):
        if path in changed:
            before = base.emb.weight.detach().double()
            right = ((weight.detach().double() - before).norm() / before.norm()).item()
            assert found[path].relative == pytest.approx(right, rel=1e-5)


def test_the_size_of_one_factor_is_no_finding() -> None:
    """Scale moves between the factors without any effect, and one of them begins at 0."""
    torch.manual_seed(0)
    model = peft.get_peft_model(Network(), lora(target_modules=["q", "v", "head"]))
    ids = torch.arange(16).view(2, 8)
    for size in (1e-3, 1e3):
        with torch.no_grad():
            for name, factor in model.named_parameters():
                if "lora_B" in name:
                    factor.mul_(size)
                if "lora_A" in name:
                    factor.div_(size)
        assert [f.code for f in measure(model, batch=ids).findings if f.code in ("G409", "G412")] == []


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
@pytest.mark.parametrize(("layers", "measured"), [(["q_proj"], True), (["q_proj", "v_proj"], False)])
def test_logits_under_an_adapter_are_measured_or_have_the_reason(layers: list[str], measured: bool) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=64))
    found = measure(peft.get_peft_model(model, lora(target_modules=layers)), batch=torch.arange(32).reshape(2, 16))
    said = (
        "its values are sums of what several layers give: base_model.model.model.layers.0.self_attn.v_proj.base_layer"
    )
    assert any(said in note for note in found.notes) == (not measured)
    assert bool(found.heads) == measured
