"""Weights that files store in their own ways: the numbers that the tool computes, or the reason why there are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import gonio
from catalog import seeded
from foreign import FLOAT8_ROWS, torchvision
from gonio.errors import InvalidArgumentError, UnreadableFileError
from gonio.measuring import Measurements, difference, measure
from gonio.measuring.reading.source import CheckpointPart

old = nn.utils
new = nn.utils.parametrizations


def norm(weight: Tensor) -> Any:
    return pytest.approx(float(weight.double().norm()), rel=1e-5)


def accounted(found: Measurements) -> None:
    """Every tensor is measured, or says why it is not."""
    assert all(t.status == "measured" or t.reason for t in found.values())


# --- weights that a norm or a mask computes --------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("kind", [old.weight_norm, old.spectral_norm])
def test_an_old_norm_is_read_as_the_next_forward_would(kind: Any) -> None:
    trained, fresh = (kind(nn.Conv1d(16, 32, 7)).eval() for _ in range(2))
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(5)
    trained(torch.zeros(1, 16, 9))
    fresh.load_state_dict(trained.state_dict())
    before = fresh.weight.detach().clone()
    assert measure(fresh)["weight"].frobenius == norm(trained.weight.detach())
    assert torch.equal(fresh.weight.detach(), before)


def test_names_alone_make_no_weight_norm() -> None:
    gates = {"mlp.w_g": seeded(8, 4), "mlp.w_v": seeded(8, 4, seed=1), "a.weight_mask": torch.ones(4, 4)}
    found = measure(gates | {"head.weight": seeded(4, 8)})
    assert "mlp.w" not in found
    assert all(found[name].status == "no filters" for name in gates)


# --- scales ----------------------------------------------------------------------------------------------------------


@FLOAT8_ROWS
def test_an_8_bit_weight_beside_what_may_be_its_scale_is_not_compared() -> None:
    weight = seeded(256, 192)
    scaled = {"l.weight": weight.to(torch.float8_e4m3fn), "l.factor": torch.ones(256, 1)}
    assert difference({"l.weight": weight}, scaled)["l"].status == "not compared"


# --- layouts ---------------------------------------------------------------------------------------------------------

ELEMENTWISE: dict[str, Any] = {
    "LayerNorm": lambda: nn.LayerNorm((16, 32)), "LayerNorm of maps": lambda: nn.LayerNorm((4, 8, 8)),
    "RMSNorm": lambda: nn.RMSNorm((16, 32)), "LayerNorm of 4": lambda: nn.LayerNorm((2, 3, 4, 5)),
    "LayerNorm without shifts": lambda: nn.LayerNorm((8, 8), bias=False),
}  # fmt: skip


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("trained", [False, True])
def test_gains_of_every_entry_are_no_filters(name: str, trained: bool) -> None:
    layer = ELEMENTWISE[name]()
    if trained:
        with torch.no_grad():
            layer.weight.add_(0.1 * seeded(*layer.weight.shape)[...].clamp(-4, 4))
    for source in (nn.Sequential(layer), {f"norm.{k}": v for k, v in layer.state_dict().items()}):
        found = measure(source)
        assert found.findings == ()
        assert found.layers == ()
        accounted(found)


def test_fixed_kernels_are_no_filters() -> None:
    kernel = torch.tensor([1.0, 3, 3, 1])
    kernel = kernel[:, None] * kernel / 64

    class Blur(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", kernel.expand(16, 1, 4, 4).clone())

    files: dict[str, Tensor] = {"up.blur.kernel": kernel, "down.filt": kernel[None, None].repeat(3, 1, 1, 1)}
    files |= {"blur.weight": kernel.expand(16, 1, 4, 4).clone(), "box.weight": torch.full((8, 1, 3, 3), 1 / 9)}
    for source in (files, nn.Sequential(nn.Conv2d(3, 16, 3), Blur())):
        found = measure(source)
        assert found.findings == ()
        accounted(found)
    assert measure(files)["box"].reason == "the same kernel in every channel: fixed, not trained"


def test_damage_is_still_found_in_files() -> None:
    """The same shapes with a weight that is all equal, or 0, is damaged and not a fixed kernel."""
    assert measure({"a.weight": torch.full((8, 6), 0.1)}).findings
    assert measure({"a.weight": torch.full((8, 2, 3, 3), 0.1)}).findings
    assert (
        measure({"a.weight": torch.zeros(8, 1, 3, 3)}).findings == ()
        or measure({"a.weight": torch.zeros(8, 6)}).findings
    )


def test_weights_stored_with_their_inputs_first_are_told_by_their_bias(tmp_path: Path) -> None:
    torchvision()
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=50, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight[:, 5] = 0
    model.save_pretrained(tmp_path)
    live, file = measure(model), measure(tmp_path)
    for path in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        mine, theirs = (found[f"transformer.h.0.{path}"] for found in (file, live))
        assert (mine.filters, mine.dim, mine.alignment) == (theirs.filters, theirs.dim, theirs.alignment)
    assert [f.code for f in file.findings if "c_fc" in f.path] == ["G102"]
    linear = measure(
        {"a.weight": seeded(6, 4), "a.bias": torch.zeros(6), "b.weight": seeded(4, 4), "b.bias": torch.zeros(4)}
    )
    assert (linear["a"].filters, linear["b"].notes) == (6, ())


@pytest.mark.parametrize(
    "layer",
    [nn.LSTM(6, 12, proj_size=4), nn.LSTM(6, 12, proj_size=4, bidirectional=True, num_layers=2), nn.LSTMCell(6, 5),
     nn.GRUCell(6, 5), nn.ConvTranspose2d(4, 8, 3), nn.ConvTranspose1d(4, 6, 5)],
)  # fmt: skip
def test_layouts_of_files_are_those_of_the_layers(layer: nn.Module) -> None:
    found, file = measure(nn.ModuleDict({"l": layer})), measure({f"l.{k}": v for k, v in layer.state_dict().items()})
    for row in found.layers:
        mine = file[row.name]
        assert (mine.groups, mine.filters, mine.dim) == (row.groups, row.filters, row.dim), row.name


def test_a_modulated_convolution_s_weight_has_a_filter_for_each_output() -> None:
    weight = seeded(1, 16, 24, 3, 3)
    weight[0, 3] = 0

    class Modulated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight)

    for source in ({"c.weight": weight}, nn.ModuleDict({"c": Modulated()})):
        found = measure(source)
        assert (found["c"].filters, found["c"].dim, found["c"].zero_filters) == (16, 216, 1)
    assert measure({"c.weight": seeded(1, 16, 3, 7, 7)})["c"].filters == 1  # a 3-d convolution with one output


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.LSTMCell])
def test_quantised_recurrent_layers_have_rows(kind: Any) -> None:
    layer = kind(8, 6)
    quantised = torch.ao.quantization.quantize_dynamic(
        nn.Sequential(nn.Linear(4, 4), layer), {nn.Linear, kind}, dtype=torch.qint8
    )
    found = measure(quantised)
    for name in ("weight_ih", "weight_hh"):
        key = f"1.{name}" + ("" if "Cell" in kind.__name__ else "_l0")
        exact = getattr(layer, key[2:]).detach()
        assert (found[key].status, found[key].groups) == ("measured", exact.shape[0] // 6)
        assert found[key].frobenius == pytest.approx(float(exact.norm()), rel=0.02)


# --- checkpoints -----------------------------------------------------------------------------------------------------

STATE = {"a.weight": seeded(8, 6), "b.bias": torch.zeros(6)}
BESIDE: dict[str, Any] = {
    "a metric": torch.tensor(71.2), "class weights": torch.ones(10),
    "random state": torch.ones(5000, dtype=torch.uint8),
    "an optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}, "a list": [torch.ones(2)], "a matrix": torch.ones(4, 4),
}  # fmt: skip


@pytest.mark.parametrize("name", BESIDE)
def test_what_lies_beside_a_state_dict_is_named_and_does_not_hide_it(name: str, tmp_path: Path) -> None:
    broken = {
        **STATE,
        "a.weight": STATE["a.weight"].clone(),
        "c.weight": torch.ones(3, 3),
        "d.weight": torch.ones(3, 3),
    }
    broken["a.weight"][3, 3] = float("nan")
    torch.save({"epoch": 3, "state_dict": broken, "beside": BESIDE[name]}, tmp_path / "model_best.pth.tar")
    found = measure(tmp_path / "model_best.pth.tar")
    assert [f.code for f in found.findings if f.path == "a"] == ["G001"]
    assert found.notes == ("read from 'state_dict' of the checkpoint", "not read: beside, of the same checkpoint")


def _steps(*models: nn.Module) -> list[dict[str, Any]]:
    """The state of an optimizer of each model, after a step."""
    optimizers = [torch.optim.AdamW(each.parameters()) for each in models]
    for each, optimizer in zip(models, optimizers, strict=True):
        each(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return [optimizer.state_dict() for optimizer in optimizers]


def test_the_optimizer_tells_which_mapping_is_the_model(tmp_path: Path) -> None:
    """Under keys that no list has, as of nnU-Net: by the shapes of the optimizer's parameters, and not by a name."""
    net, other = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    (own, foreign), state = _steps(net, other), net.state_dict()
    settings = {"init_args": {"fold": 0}, "trainer_name": "nnUNetTrainer", "grad_scaler_state": {"scale": 65536.0}}
    torch.save({"network_weights": state, "optimizer_state": own, **settings}, tmp_path / "unet.pt")
    torch.save({"trainer": {"policy": state, "opt": own}, "step": torch.tensor(3)}, tmp_path / "deep.pt")
    for name, key in (("unet.pt", "network_weights"), ("deep.pt", "trainer.policy")):
        found = measure(tmp_path / name)
        assert (found.notes[0], found["0"].filters) == (f"read from {key!r} of the checkpoint", 3)
        assert f"the model is read from {key!r} of the checkpoint" in gonio.check(tmp_path / name).notes
    assert str(difference(tmp_path / "unet.pt", tmp_path / "deep.pt").verdict).startswith("6 of 7 tensors are equal")
    for content, choice in (
        ({"generator": state, "critic": other.state_dict(), "opt": own}, "generator"),
        ({"nets": {"one": state}, "opt": foreign}, "nets.one"),
        ({"ours": state, "note": {"exp_avg": torch.ones(3, 4)}, "opt": own}, "ours"),
        ({"ours": state}, "ours"),
    ):
        torch.save(content, tmp_path / "several.pt")
        with pytest.raises(InvalidArgumentError, match=rf"Name the one to measure \(--key {choice} on"):
            measure(tmp_path / "several.pt")
        assert len(measure(CheckpointPart(str(tmp_path / "several.pt"), choice)).layers)


def test_arrays_of_numpy_are_named(tmp_path: Path) -> None:
    torch.save({"model": {"a.weight": np.ones((3, 4))}, "__author__": "someone"}, tmp_path / "d2.pt")
    with pytest.raises(
        UnreadableFileError, match=r"its weights are arrays of numpy, .*by torch\.from_numpy\(array\)\."
    ):
        measure(tmp_path / "d2.pt")
    torch.save({"a": STATE, "b": STATE, "random": np.ones(3)}, tmp_path / "gan.pt")
    with pytest.raises(InvalidArgumentError, match="Name the one to measure"):
        measure(tmp_path / "gan.pt")


def test_a_state_dict_under_any_key_can_be_named(tmp_path: Path) -> None:
    path = tmp_path / "gan.pt"
    torch.save({"generator": {"state_dict": STATE}, "discriminator": STATE, "step": torch.tensor(3)}, path)
    averages = {"decay": 0.9, "shadow_params": [torch.eye(3)]}
    with pytest.raises(InvalidArgumentError, match="as a mapping: a list has none"):
        measure(averages)
    with pytest.raises(InvalidArgumentError, match=r"Name the one to measure \(--key generator on the command line\)"):
        measure({"generator": STATE, "discriminator": STATE})
    for key, read in (("generator", "generator.state_dict"), ("generator.state_dict", "generator.state_dict"),
                      ("discriminator", "discriminator")):  # fmt: skip
        found = measure(CheckpointPart(str(path), key))
        assert found["a"].frobenius == norm(STATE["a.weight"])
        assert found.notes[0] == f"read from {read!r} of the checkpoint"
        assert "not read: " in found.notes[1]
    with pytest.raises(InvalidArgumentError, match=r"under the key 'ema' of 'gan.pt'.*Tensors are under: 'generator'"):
        measure(CheckpointPart(str(path), "ema"))
    save_file(STATE, tmp_path / "m.safetensors")
    with pytest.raises(InvalidArgumentError, match="a key names a state dict in a checkpoint of torch"):
        measure(CheckpointPart(str(tmp_path / "m.safetensors"), "generator"))


def test_a_key_is_refused_for_shards_too(tmp_path: Path) -> None:
    """Of a model in several files, with an index and without one."""
    for part, name in enumerate(STATE, 1):
        save_file({name: STATE[name]}, tmp_path / f"model-{part}-of-{len(STATE)}.safetensors")
    for source in (tmp_path, tmp_path / "model.safetensors.index.json"):
        with pytest.raises(InvalidArgumentError, match=r"a key names a state dict in .*; found model"):
            measure(CheckpointPart(str(source), "generator"))
        placed = {name: f"model-{part}-of-{len(STATE)}.safetensors" for part, name in enumerate(STATE, 1)}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))


def test_keys_may_have_dots_or_be_numbers(tmp_path: Path) -> None:
    one, two = ({"layer.weight": torch.full((2, 3), value)} for value in (3.0, 5.0))
    torch.save({"my.model": one, "my": {"model.b": two}, "models": {0: one, 1: two}}, tmp_path / "several.pt")
    places = {"my.model": 3.0, "my.model.b": 5.0, "models.0": 3.0, "models.1": 5.0, "models.1.layer": 5.0}
    for key, value in places.items():
        assert measure(CheckpointPart(str(tmp_path / "several.pt"), key)).layers[0].frobenius == pytest.approx(
            value * 6**0.5
        )
    notes = measure(CheckpointPart(str(tmp_path / "several.pt"), "models.1")).notes
    assert "not read: my.model, my, models.0, of the same checkpoint" in notes


@pytest.mark.filterwarnings("error", "ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_is_named_as_such(tmp_path: Path) -> None:
    torch.jit.script(nn.Linear(2, 2)).save(str(tmp_path / "scripted.pt"))
    with pytest.raises(UnreadableFileError, match=r"it is a TorchScript archive.*Load it with torch\.jit\.load"):
        measure(tmp_path / "scripted.pt")


def test_a_trainer_s_folder_has_one_model(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "pytorch_model.bin")
    torch.save([1], tmp_path / "training_args.bin")
    found = measure(tmp_path)
    assert found["a"].frobenius == norm(STATE["a.weight"])
    assert found.notes == ("not read: training_args.bin",)
