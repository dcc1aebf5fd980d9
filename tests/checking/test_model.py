"""A checkpoint that is held against a model: what it lacks, what it has too much, and what has another shape."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import foreign
import gonio
from catalog import seeded
from cli.shell import invoke
from gonio.errors import InvalidArgumentError, MissingExtraError
from gonio.measuring.reading.fitting import fit_of, shapes_of

State = dict[str, Tensor]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 4))


def told(state: State, model: nn.Module) -> list[tuple[str, str, str]]:
    findings = gonio.check(state, model=model).findings
    return [(f.code, f.path, f.found) for f in findings if f.code in ("G719", "G720")]


def without(state: State, *names: str) -> State:
    return {name: tensor for name, tensor in state.items() if name not in names}


def test_its_own_state_dict_fits_and_nothing_changes() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    found = gonio.check(model.state_dict(), model=model)
    assert found.intact
    assert "fits Sequential by name and shape: 9 tensors" in found.notes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not gonio.check(model.state_dict()).notes[:-1]  # nothing is said of a model that is not given


def test_every_tensor_that_differs_is_named() -> None:
    model = network()
    state = without(model.state_dict(), "3.bias") | {"3.weight": seeded(5, 24), "head.weight": seeded(3)}
    found = gonio.check(state, model=model)
    assert found.verdict == "Does not fit the model: 2 errors and 1 warning."
    assert told(state, model) == [
        ("G719", "3", "5×24, and 4×24 in Sequential"),
        ("G719", "3.bias", "missing: Sequential has it (4)"),
        ("G720", "head", "Sequential has no tensor of this name"),
    ]


def test_a_checkpoint_that_is_damaged_as_well_is_called_so() -> None:
    model = network()
    state = without(model.state_dict(), "3.bias") | {"0.weight": torch.full((24, 16), torch.nan)}
    assert gonio.check(state, model=model).verdict == "Damaged: 2 errors."


def test_a_model_on_the_meta_device_is_enough() -> None:
    with torch.device("meta"):
        model = network()
    assert told(network().state_dict(), model) == []


def test_batches_that_old_files_do_not_count_are_not_missed() -> None:
    model = network()
    assert told(without(model.state_dict(), "1.num_batches_tracked"), model) == []


@pytest.mark.parametrize(
    ("prefix", "note"),
    [
        ("model.", "names are compared without model., which stands before all of them"),
        ("module.", "names are compared without those of wrappers (_orig_mod, module, …)"),
        ("_orig_mod.", "names are compared without those of wrappers (_orig_mod, module, …)"),
    ],
)
def test_what_stands_before_all_names_is_a_note(prefix: str, note: str) -> None:
    model = network()
    found = gonio.check({prefix + name: tensor for name, tensor in model.state_dict().items()}, model=model)
    assert found.intact
    assert note in found.notes
    assert "fits Sequential by name and shape: 9 tensors" in found.notes


def prefixed(prefix: str, state: State) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


def test_what_stands_before_the_names_of_the_model_alone() -> None:
    model = network()
    state = prefixed("net.", without(model.state_dict(), "3.bias")) | {"loss.weight": seeded(4)}
    found = gonio.check(state, model=model)
    assert [(f.code, f.path) for f in found.findings] == [("G719", "3.bias"), ("G720", "loss")]
    assert "names are compared without net., which stands before 8 of 9" in found.notes
    averaged = torch.optim.swa_utils.AveragedModel(model).state_dict()
    assert [path for _, path, _ in told(averaged, model)] == ["n_averaged"]
    few = prefixed("a.", {"0.weight": seeded(24, 16)}) | {f"b.{i}.x": seeded(3, seed=i) for i in range(3)}
    assert [(code, path) for code, path, _ in told(few, model)] == [("G719", "")]
    assert [(code, path) for code, path, _ in told(averaged, nn.Linear(4, 4))] == [("G719", "")]


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.optim.swa_utils.AveragedModel, torch.compile])
def test_a_wrapped_model_is_held_against_the_file_of_its_content(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = network()
    found = gonio.check(without(model.state_dict(), "3.bias"), model=wrap(model))
    assert [(f.code, f.path) for f in found.findings] == [("G719", "3.bias")]
    assert "names are compared without those of wrappers (_orig_mod, module, …)" in found.notes
    assert told(wrap(model).state_dict(), wrap(model)) == []


def test_a_checkpoint_of_several_models_has_the_one_that_fits(tmp_path: Path) -> None:
    model, other = network(), nn.Linear(6, 3)
    torch.save({"first": other.state_dict(), "second": model.state_dict()}, tmp_path / "both.pt")
    for one, name, count in ((other, "first", 2), (model, "second", 9)):
        found = gonio.check(tmp_path / "both.pt", model=one)
        assert not [f for f in found.findings if f.code in ("G719", "G720")]
        assert f"names are compared without {name}., which stands before {count} of 11" in found.notes
        assert f"fits {type(one).__name__} by name and shape: {count} tensors" in found.notes
    torch.save([*model.parameters()], tmp_path / "list.pt")
    found = gonio.check(tmp_path / "list.pt", model=model)
    assert [f.found for f in found.findings if f.code == "G719"] == [
        "none of its 6 tensors is one of Sequential by name: 0, and there 0.weight"
    ]


def test_another_architecture_is_told_once() -> None:
    others = {f"blocks.{i}.proj.weight": seeded(8, 8, seed=i) for i in range(5)}
    said = "none of its 5 tensors is one of Sequential by name: blocks.0.proj.weight, and there 0.weight"
    assert told(others, network()) == [("G719", "", said)]


def test_a_shared_tensor_is_missed_under_no_second_name_and_once_if_it_is_lost() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, 8)
            self.body = nn.Linear(8, 8)
            self.head = nn.Linear(8, 20, bias=False)
            self.head.weight = self.table.weight

    model = Tied()
    state = model.state_dict()
    assert told(without(state, "head.weight"), model) == []
    assert told(without(state, "table.weight"), model) == []
    lost = told(without(state, "head.weight", "table.weight"), model)
    assert lost == [("G719", "table", "missing: Tied has it (20×8)")]


def test_names_of_former_versions_are_read_as_the_layer_reads_them() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 4)))
    new = model.state_dict()
    old = {
        "0.bias": new["0.bias"],
        "0.weight_g": new["0.parametrizations.weight.original0"],
        "0.weight_v": new["0.parametrizations.weight.original1"],
    }
    assert told(old, model) == []


class Halves(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def old_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.utils.weight_norm(nn.Linear(6, 4))  # leaves a computed tensor, which torch does not copy


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))


def parametrized() -> nn.Module:
    layer = nn.Linear(6, 4)
    parametrize.register_parametrization(layer, "weight", Halves())
    return layer


class Counts(nn.Linear):
    """One with a state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        if not isinstance(state["calls"], int):
            raise TypeError


class Refuses(nn.Linear):
    """One whose own loader wants values."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        if state_dict[f"{prefix}weight"].sum().item() > 1e9:
            raise ValueError("too large")
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Returns(nn.Linear):
    """One whose own loader returns nothing."""

    def load_state_dict(self, *given: Any, **options: Any) -> None:  # type: ignore[override]
        super().load_state_dict(*given, **options)


@pytest.mark.parametrize(
    "make",
    [
        old_weight_norm,
        lazy,
        parametrized,
        nn.ReLU,
        *(lambda kind=kind: kind(6, 4) for kind in (Counts, Refuses, Returns)),
    ],
)
def test_models_of_other_kinds(make: Callable[[], nn.Module]) -> None:
    model = make()
    shapes = shapes_of(model.state_dict())
    assert fit_of(model, shapes).whole
    found = fit_of(model, {**shapes, "more.weight": (2, 2)})
    assert (dict(found.missing), found.unknown, dict(found.reshaped)) == ({}, ("more.weight",), {})
    for name in shapes:
        lost = fit_of(model, {kept: shape for kept, shape in shapes.items() if kept != name})
        assert name in lost.missing


class Renamed(nn.Module):
    """One that reads a linear layer of former files, under another name and as a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 4, 1)
        self.register_load_state_dict_pre_hook(self._read)

    @staticmethod
    def _read(module: nn.Module, state: State, prefix: str, *_: Any) -> None:
        for part in ("weight", "bias"):
            if (tensor := state.pop(f"{prefix}linear.{part}", None)) is not None:
                state[f"{prefix}conv.{part}"] = tensor[..., None, None] if part == "weight" else tensor


def test_shapes_are_compared_when_the_hooks_of_the_model_have_read_the_names() -> None:
    model, bias = nn.Sequential(Renamed()), seeded(4)
    assert told({"0.linear.weight": seeded(4, 6), "0.linear.bias": bias}, model) == []
    found = told({"0.linear.weight": seeded(4, 5), "0.linear.bias": bias}, model)
    assert found == [("G719", "0.conv", "4×5×1×1, and 4×6×1×1 in Sequential")]


class Sized(nn.Linear):
    """One that makes a buffer of the size that the file has."""

    def __init__(self) -> None:
        super().__init__(6, 4)
        self.register_buffer("seen", torch.zeros(0))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        if (seen := state_dict.get(f"{prefix}seen")) is not None:
            self.seen = torch.zeros(seen.shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_what_a_layer_sizes_by_the_file_fits() -> None:
    model = Sized()
    state = without(model.state_dict(), "bias") | {"seen": seeded(7)}
    assert told(state, model) == [("G719", "bias", "missing: Sized has it (4)")]
    assert model.seen.shape == (0,)


class Counted(nn.Linear):
    """One whose own state is a tensor of any size."""

    def get_extra_state(self) -> Tensor:
        return torch.ones(3)

    def set_extra_state(self, state: Tensor) -> None:
        self.total = state.sum().item()


def test_a_state_that_the_layer_reads_itself_has_any_size() -> None:
    model = nn.Sequential(Counted(6, 4))
    assert told(model.state_dict() | {"0._extra_state": seeded(9)}, model) == []
    assert [code for code, *_ in told(without(model.state_dict(), "0._extra_state"), model)] == ["G719"]


def test_one_number_is_read_from_a_vector_as_torch_does() -> None:
    model = network()
    assert told(model.state_dict() | {"1.num_batches_tracked": torch.tensor([7])}, model) == []
    found = told(model.state_dict() | {"1.num_batches_tracked": torch.tensor([[7]])}, model)
    assert found == [("G719", "1.num_batches_tracked", "1×1, and a single number in Sequential")]


def test_only_a_model_is_taken() -> None:
    model: Any = network
    with pytest.raises(InvalidArgumentError, match="takes a model"):
        gonio.check({"w": seeded(2)}, model=model)


def test_a_shard_that_is_lost_is_told_once(tmp_path: Path) -> None:
    model = network()
    state = model.state_dict()
    save_file(
        {name: t.contiguous() for name, t in state.items() if not name.startswith("3.")}, tmp_path / "a.safetensors"
    )
    index = {name: "b.safetensors" if name.startswith("3.") else "a.safetensors" for name in state}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    found = gonio.check(tmp_path, model=model).findings
    assert {finding.code for finding in found} == {"G702"}, found
    (tmp_path / "b.safetensors").write_bytes(b"cut")
    found = gonio.check(tmp_path, model=model).findings
    assert {finding.code for finding in found} == {"G701"}, found


def test_adapters_are_tensors_of_a_model_that_has_them() -> None:
    foreign.transformers()  # peft imports it
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(target_modules=["0", "3"], r=2)
    model = peft.get_peft_model(network(), config)
    state = model.state_dict()
    assert told(state, model) == []
    assert [path for _, path, _ in told(without(state, next(n for n in state if "lora_A" in n)), model)]
    assert told(state, network()) == []  # the layers that the adapters adapt are there


def test_the_command_builds_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = gonio.models.resolve("digits-cnn")().state_dict()
    save_file(state, tmp_path / "ckpt.safetensors")
    run = invoke("check", str(tmp_path / "ckpt.safetensors"), "--model", "digits-cnn")
    assert run.exit_code == 0
    assert f"fits Sequential by name and shape: {len(state)} tensors" in run.output
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\n"
        "def small():\n    model = nn.Linear(4, 4)\n    print(float(model.weight.sum()))\n    return model\n"
    )
    run = invoke("check", str(tmp_path / "ckpt.safetensors"), "--model", f"{tmp_path / 'net.py'}:small")
    assert run.exit_code == 1
    assert "none of its" in run.output
    run = invoke("check", str(tmp_path / "ckpt.safetensors"), "--model", "digits-cmm")
    assert run.exit_code == 2
    assert "digits-cnn" in run.output


def test_a_model_that_loads_values_while_it_is_built(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    save_file(nn.Linear(3, 3).state_dict(), tmp_path / "a.safetensors")
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "def net():\n    model = nn.Linear(3, 3)\n"
        "    model.load_state_dict({'weight': torch.zeros(3, 3, device='cpu'), 'bias': torch.zeros(3, device='cpu')})\n"
        "    return model\n"
    )
    run = invoke("check", str(tmp_path / "a.safetensors"), "--model", f"{tmp_path / 'net.py'}:net")
    assert run.exit_code == 0
    assert not [str(each.message) for each in recwarn if "copying" in str(each.message)]


@pytest.mark.parametrize("ending", [".safetensors", ".pt"])
def test_the_recipe_of_a_checkpoint_is_applied_to_its_model(tmp_path: Path, ending: str) -> None:
    torch.manual_seed(0)
    plain, made = tmp_path / "plain.safetensors", str(tmp_path / f"made{ending}")
    save_file(gonio.models.resolve("digits-cnn")().state_dict(), plain)
    assert invoke("apply", "switchable-norm", str(plain), "--model", "digits-cnn", "-o", made).exit_code == 0
    run = invoke("check", made, str(plain), "--model", "digits-cnn")
    assert run.exit_code == 0, run.output
    assert "28 tensors" in run.output
    assert run.output.count("fits Sequential") == 2
    (tmp_path / f"cut{ending}").write_bytes(Path(made).read_bytes()[:900])
    assert invoke("check", str(tmp_path / f"cut{ending}"), "--model", "digits-cnn").exit_code in (1, 3)


# --- transformers -----------------------------------------------------------------------------------------------------

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
OF_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {**SIZES, "num_key_value_heads": 2},
    "MixtralForCausalLM": {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4},
    "BertForMaskedLM": SIZES,
    "T5ForConditionalGeneration": {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 50},
    "ViTForImageClassification": SIZES,
}


def of_transformers(name: str) -> nn.Module:
    kind = getattr(foreign.transformers(), name)
    torch.manual_seed(0)
    return kind(kind.config_class(**OF_TRANSFORMERS[name]))


def saved(model: Any, folder: Path) -> State:
    """What `save_pretrained` writes."""
    from safetensors.torch import load_file

    model.save_pretrained(folder)
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_what_transformers_writes_fits_and_what_is_lost_is_named(name: str, tmp_path: Path) -> None:
    model = of_transformers(name)
    state = saved(model, tmp_path)
    assert told(state, model) == []
    matrices = [key for key, tensor in state.items() if tensor.ndim == 2 and ".1." in key]
    lost, odd = matrices[-1], matrices[0]
    found = fit_of(model, shapes_of({**without(state, lost), odd: seeded(3, 5), "mine.weight": seeded(2)}))
    assert len(found.missing) == len(found.reshaped) == 1
    assert next(iter(found.reshaped.values())) == ((3, 5), tuple(state[odd].shape))
    assert found.unknown == ("mine.weight",)


def test_the_folder_of_a_model_of_transformers(tmp_path: Path) -> None:
    model: Any = of_transformers("LlamaForCausalLM")
    model.save_pretrained(tmp_path)
    run = invoke("check", str(tmp_path), "--model", f"transformers:{tmp_path}")
    assert run.exit_code == 0
    assert "fits LlamaForCausalLM by name and shape: 21 tensors" in run.output
    assert "Loading weights" not in run.output
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    run = invoke("check", str(tmp_path), "--model", f"transformers:{tmp_path}")
    assert run.exit_code == 1
    assert "48×32, and 64×32 in LlamaForCausalLM" in run.output
    assert "LOAD REPORT" not in run.output


def test_transformers_reads_no_vector_for_one_number() -> None:
    t = foreign.transformers()
    text = {**SIZES, "projection_dim": 16}
    model = t.CLIPModel(t.CLIPConfig(text_config=text, vision_config={**text, "image_size": 32, "patch_size": 16}))
    found = fit_of(model, {**shapes_of(model.state_dict()), "logit_scale": (1,)})
    assert dict(found.reshaped) == {"logit_scale": ((1,), ())}


def test_an_encoder_without_its_head_lacks_the_head_alone(tmp_path: Path) -> None:
    state = saved(of_transformers("BertForMaskedLM"), tmp_path)
    encoder = {name: tensor for name, tensor in state.items() if not name.startswith("cls.")}
    found = fit_of(of_transformers("BertForMaskedLM"), shapes_of(encoder))
    assert not found.unknown
    assert found.missing
    assert all(name.startswith("cls.") for name in found.missing)


def test_a_model_of_transformers_that_was_changed_is_asked_itself(tmp_path: Path) -> None:
    model = of_transformers("LlamaForCausalLM")
    plain = saved(model, tmp_path)
    for module in list(model.modules()):
        if isinstance(module, nn.Linear) and module.out_features == module.in_features:
            parametrizations.orthogonal(module)
    assert told(model.state_dict(), model) == []
    assert {code for code, path, _ in told(plain, model) if "q_proj" in path} == {"G719", "G720"}


def test_without_accelerate_transformers_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = of_transformers("MixtralForCausalLM")
    monkeypatch.setitem(__import__("sys").modules, "accelerate", None)
    with pytest.raises(MissingExtraError, match="accelerate"):
        fit_of(model, {"model.layers.0.block_sparse_moe.experts.0.w1.weight": (48, 32)})


# --- adapters ---------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.table = nn.Embedding(12, width)
        self.conv = nn.Conv2d(3, 6, 3)
        self.h = nn.ModuleList(
            nn.ModuleDict({"q": nn.Linear(width, width), "v": nn.Linear(width, 4)}) for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x


def adapter(folder: Path, **options: Any) -> Path:
    """What peft saves for the network of two blocks."""
    foreign.torchvision()
    peft = pytest.importorskip("peft")
    given = {"r": 2, "target_modules": ["q", "v", "table", "conv"], "init_lora_weights": False, **options}
    peft.get_peft_model(Attention(8, 2), peft.LoraConfig(**given)).save_pretrained(folder)
    return folder


def test_adapters_fit_the_model_that_they_adapt(tmp_path: Path) -> None:
    found = gonio.check(adapter(tmp_path), model=Attention(8, 2))
    assert [f.code for f in found.findings if f.level != "info"] == []
    assert "fits the layers of Attention: 6 adapters" in found.notes
    with torch.device("meta"):
        larger = Attention(8, 5)
    assert told_of(tmp_path, larger) == []


def told_of(folder: Path, model: nn.Module) -> list[tuple[str, str]]:
    return [(f.path, f.found) for f in gonio.check(folder, model=model).findings if f.code == "G719"]


def test_adapters_of_other_layers_and_shapes_are_named(tmp_path: Path) -> None:
    adapter(tmp_path)
    assert told_of(tmp_path, Attention(8, 1)) == [
        ("h.1.q", "Attention has no layer of this path"),
        ("h.1.v", "Attention has no layer of this path"),
    ]
    assert told_of(tmp_path, Attention(16, 2)) == [
        ("h.0.q", "made for a weight of 8×8, and 16×16 in Attention"),
        ("h.0.v", "made for a weight of 4×8, and 4×16 in Attention"),
        ("h.1.q", "made for a weight of 8×8, and 16×16 in Attention"),
        ("h.1.v", "made for a weight of 4×8, and 4×16 in Attention"),
        ("table", "made for a weight of 12×8, and 12×16 in Attention"),
    ]
    assert told_of(tmp_path, network()) == [("", "Sequential has the layer of none of 6 adapters: conv, …")]


def test_adapters_of_layers_that_store_their_inputs_first(tmp_path: Path) -> None:
    peft, layer = pytest.importorskip("peft"), foreign.transformers().pytorch_utils.Conv1D

    def inner(width: int) -> nn.Module:
        return nn.Sequential(nn.Identity(), layer(3 * width, width))

    config = peft.LoraConfig(r=2, target_modules=["1"], fan_in_fan_out=True)
    peft.get_peft_model(inner(8), config).save_pretrained(tmp_path)
    assert told_of(tmp_path, inner(8)) == []
    assert told_of(tmp_path, inner(16)) == [("1", "made for a weight of 8×24, and 16×48 in Sequential")]


def test_the_whole_state_of_an_adapted_model_is_held_against_that_model() -> None:
    foreign.torchvision()
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(Attention(8, 2), peft.LoraConfig(r=2, target_modules=["q"]))
    state = model.state_dict()
    found = gonio.check(state, model=model)
    assert f"fits PeftModel by name and shape: {len(state)} tensors" in found.notes
    lost = next(name for name in state if name.endswith("lora_A.default.weight"))
    assert {(f.code, f.found) for f in gonio.check(without(state, lost), model=model).findings if f.code == "G719"} == {
        ("G719", "missing: PeftModel has it (2×8)")
    }
