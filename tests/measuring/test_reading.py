"""Models, state dicts and files: every tensor gets figures or a reason, and nothing is changed."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from catalog import seeded
from gonio import parametrizations
from gonio.errors import InvalidArgumentError, UnknownNameError, UnreadableFileError
from gonio.measuring import Measurements, measure, outline
from gonio.measuring.reading.safetensors_files import open_safetensors


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(8, 4)
    )


def same(a: Measurements, b: Measurements, *paths: str) -> None:
    for path in paths:
        for figure in ("alignment", "norm_mean", "sigma_max"):
            assert getattr(a[path], figure) == getattr(b[path], figure)


def test_every_tensor_has_a_row_with_figures_or_a_reason() -> None:
    made = model()
    found = measure(made)
    assert [t.name for t in found.values()] == [
        *("0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"),
        *("3.weight", "3.bias", "5.weight", "5.bias"),
    ]
    assert all(t.status == "measured" or t.reason for t in found.values())
    assert [t.path for t in found.layers] == ["0", "3", "5"]
    assert found.coverage == (
        "Measured: 3 of 11 tensors. Checked only for NaN and infinity: 8 (7 vectors, 1 counter). Skipped: none."
    )
    assert found["3"].pairs == 0
    assert found["3"].alignment is None
    assert found["3.weight"] is found["3"]
    assert "3" in found
    assert "4" not in found


def test_an_unknown_path_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"no tensor named 'conv'.*Did you mean conv1"):
        measure({"conv1.weight": torch.ones(2, 2)})["conv"]


def test_measuring_changes_nothing_and_draws_no_numbers() -> None:
    made = model()
    nn.utils.parametrizations.spectral_norm(made[5])
    made.train()
    before, state = copy.deepcopy(made.state_dict()), torch.get_rng_state()
    modes = [m.training for m in made.modules()]
    for _ in range(3):
        measure(made)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), made.state_dict().values(), strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in made.modules()] == modes
    assert all(p.grad is None for p in made.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in made.modules())


def test_a_model_its_state_dict_and_its_files_agree(tmp_path: Path) -> None:
    made = model()
    found = measure(made)
    state = made.state_dict()
    save_file(state, tmp_path / "m.safetensors")
    torch.save(state, tmp_path / "m.pt")
    torch.save({"epoch": 3, "state_dict": state, "args": [1, "a"]}, tmp_path / "m.ckpt")
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    for source in (state, *sorted(tmp_path.iterdir()), str(tmp_path / "m.pt")):
        same(measure(source), found, "0", "5")
    assert measure(tmp_path / "m.ckpt").notes == ("read from 'state_dict' of the checkpoint",)
    assert "depthwise, or of one input channel" in measure(state)["3"].notes
    assert "groups unknown, read as 1" in measure(state)["0"].notes


@pytest.mark.parametrize("wrap", [lambda m: nn.DataParallel(m), torch.compile])
def test_wrapped_models_keep_the_names_of_what_they_wrap(wrap) -> None:
    made = model()
    wrapped = wrap(made)
    assert [t.name for t in measure(wrapped).values()] == [t.name for t in measure(made).values()]
    assert [t.name for t in measure(wrapped.state_dict()).values()] == [t.name for t in measure(made).values()]


def test_tied_weights_are_measured_once_and_the_other_place_is_named() -> None:
    made = nn.ModuleDict({"embed": nn.Embedding(10, 6), "head": nn.Linear(6, 10, bias=False)})
    made["head"].weight = made["embed"].weight
    shared = nn.ModuleList([made["embed"], made["embed"]])
    found = measure(made)
    assert found["embed"].status == "measured"
    assert found["head"].reason == "tied to embed.weight, where it is measured"
    assert measure(shared)["0"].notes == ("also 1.weight",)


@pytest.mark.parametrize("train", [True, False])
def test_parametrized_weights_are_measured_as_the_layer_uses_them(train: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    made = nn.Linear(6, 5).train(train)
    with torch.no_grad():
        made.weight.normal_(generator=generator)
    parametrizations.attach(made, "weight", parametrizations.Sphere())
    found = measure(made)["weight"]
    assert found.norm_quantiles == pytest.approx((1.0,) * 5)
    assert found.kind == "ParametrizedLinear"
    assert found.notes == ("the weight that Sphere computes",)
    torchs = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5), n_power_iterations=50).train(train)
    found = measure(torchs)
    assert found["weight"].sigma_max == pytest.approx(1.0, rel=1e-3)
    assert found["parametrizations.weight.original"].reason == "a part of a parametrization"
    state = measure(torchs.state_dict())["weight"]
    assert state.frobenius == pytest.approx(found["weight"].frobenius, rel=1e-6)
    raw = {"parametrizations.weight.original": torch.randn(5, 6), "parametrizations.weight.0.base": torch.eye(5, 6)}
    row = measure(raw)["parametrizations.weight.original"]
    assert (row.status, row.reason) == ("no filters", "a part of a parametrization that is not read")


@pytest.mark.parametrize("kind", [parametrizations.Sphere, parametrizations.SpectralNorm])
def test_an_own_parametrized_checkpoint_has_the_weight_that_the_layer_uses(kind: type, tmp_path: Path) -> None:
    made = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    parametrizations.attach(made[0], "weight", kind())
    save_file(made.state_dict(), tmp_path / "m.safetensors")
    for source in (made.state_dict(), tmp_path / "m.safetensors"):
        found = measure(source)
        assert found["0"].notes == ("computed by the parametrization that the file describes",)
        assert found["0"].frobenius == pytest.approx(float(made[0].weight.detach().norm()), rel=1e-6)
        assert found["1"].notes == ()


def test_recurrent_and_attention_weights_are_split_into_their_matrices_without_the_model() -> None:
    made = nn.ModuleDict({"l": nn.LSTM(6, 5), "g": nn.GRU(6, 5), "a": nn.MultiheadAttention(12, 2)})
    found, state = measure(made), measure(made.state_dict())
    for path in ("l.weight_ih_l0", "l.weight_hh_l0", "g.weight_ih_l0", "a.in_proj_weight"):
        assert (state[path].groups, state[path].filters) == (found[path].groups, found[path].filters)
        assert state[path].alignment == found[path].alignment


def test_non_finite_values_are_found_counted_and_left_out() -> None:
    weight = torch.randn(6, 5, 3, generator=torch.Generator().manual_seed(0))
    fine = measure({"w.weight": weight[[0, 1, 3, 5]]})["w"]
    weight[2, 1, 2] = float("nan")
    weight[4, 0, 0] = float("inf")
    found = measure({"w.weight": weight})["w"]
    assert (found.nonfinite, found.first_nonfinite) == (2, (2, 1, 2))
    assert found.alignment == pytest.approx(fine.alignment)
    assert found.norm_mean == pytest.approx(fine.norm_mean)
    assert found.sigma_max is None
    assert "2 filters with non-finite entries left out" in found.notes


def test_progress_is_told_after_each_tensor() -> None:
    seen: list[tuple[int, int]] = []
    measure({"a": torch.ones(2), "b": torch.ones(2)}, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]


STATE = {name: seeded(4, 3, seed=seed) for seed, name in enumerate(("a.weight", "b.weight", "c.weight"))}


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    """A missing, damaged or incomplete shard takes only its own tensors with it."""
    shards = {"1": {"a.weight": STATE["a.weight"], "b.weight": STATE["b.weight"]}, "2": STATE}
    for shard, state in shards.items():
        save_file(state, tmp_path / f"{shard}.safetensors")
    (tmp_path / "3.safetensors").write_bytes(b"\xff" * 100)
    placed = (("a", "1"), ("b", "2"), ("broken", "3"), ("gone", "4"), ("no", "1"), ("a", "2"))
    pairs = ", ".join(f'"{name}.weight": "{shard}.safetensors"' for name, shard in placed)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(f'{{"weight_map": {{{pairs}}}}}')
    for source in (index, tmp_path):
        found = measure(source)
        same(found, measure(STATE), "a", "b")
        assert [t.path for t in found.layers] == ["a", "b"]
        assert found["gone"].reason == "its shard 4.safetensors is missing"
        assert found["no"].reason == "the shard 1.safetensors does not hold it"
        assert found["broken"].reason.startswith("its shard 3.safetensors cannot be read")
        assert "Skipped: 3 (broken: its shard 3" in found.coverage
        assert found.notes == ("where index and shards differ, the index is followed; of two places in it, the last",)
        assert {(each.path, each.found) for each in found.findings if each.code == "G703"} == {
            ("a.weight", "named twice in the index"),
            ("a.weight", "stored in 2 shards: 1.safetensors, 2.safetensors"),
            ("b.weight", "stored in 2 shards: 1.safetensors, 2.safetensors"),
            ("c.weight", "in 2.safetensors, but not in the index"),
        }


def test_a_tensor_in_two_shards_is_read_where_the_index_says(tmp_path: Path) -> None:
    for shard, factor in (("1", 1.0), ("2", 2.0)):
        save_file({"b.weight": factor * STATE["b.weight"]}, tmp_path / f"{shard}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"b.weight": "2.safetensors"}}))
    assert measure(index)["b"].frobenius == pytest.approx(2 * float(STATE["b.weight"].norm()), rel=1e-6)


def test_parts_without_their_index(tmp_path: Path) -> None:
    for number, name in ((1, "a.weight"), (3, "b.weight")):
        save_file({name: STATE[name]}, tmp_path / f"model-0000{number}-of-00003.safetensors")
    found = measure(tmp_path)
    assert sorted(t.path for t in found.layers) == ["a", "b"]
    assert found.notes == ("the parts have no index: what is missing cannot be told",)
    assert [(f.code, f.found) for f in found.findings] == [("G702", "2 of 3 parts are there")]
    (tmp_path / "model-00001-of-00003.safetensors").write_bytes(b"no")
    with pytest.raises(UnreadableFileError, match="cannot be read"):
        measure(tmp_path)


NESTED: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "plain": (STATE, "", ()),
    "state_dict": ({"state_dict": STATE, "epoch": 3}, "state_dict", ()),
    "two deep": ({"model": {"state_dict": STATE}}, "model.state_dict", ()),
    "three deep": ({"state": {"model": {"params": STATE}}}, "state.model.params", ()),
    "with an average": (
        {"state_dict": STATE, "state_dict_ema": STATE},
        "state_dict",
        ("not read: state_dict_ema, of the same checkpoint",),
    ),
    "an average alone": ({"model_ema": STATE, "step": 1}, "model_ema", ()),
    "the nearest first": (
        {"model": {"weights": STATE}, "params_ema": STATE},
        "params_ema",
        ("not read: model.weights, of the same checkpoint",),
    ),
    "an optimizer beside": (
        {"model": STATE, "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}},
        "model",
        ("not read: optimizer, of the same checkpoint",),
    ),
}


@pytest.mark.parametrize("name", NESTED)
def test_weights_are_found_where_trainers_put_them(name: str, tmp_path: Path) -> None:
    content, key, notes = NESTED[name]
    torch.save(content, tmp_path / "c.pt")
    for found in (measure(content), measure(tmp_path / "c.pt")):
        assert [t.path for t in found.layers] == ["a", "b", "c"]
        read = (f"read from {key!r} of the checkpoint",) if key else ()
        assert found.notes == (*read, *notes)


@pytest.mark.parametrize("content", [{"optimizer": {"state": STATE}}, {"a": {"b": {"c": STATE}}}, [STATE]])
def test_weights_elsewhere_are_not_guessed(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "c.pt")
    with pytest.raises(InvalidArgumentError, match=r"looks for named tensors in 'c\.pt'"):
        measure(tmp_path / "c.pt")


# --- headers alone --------------------------------------------------------------------------------
def test_headers_tell_shapes_dtypes_and_sizes_without_the_values(tmp_path: Path) -> None:
    state = {"w.weight": torch.ones(6, 4, 3, 3).half(), "b": torch.ones(6), "n": torch.tensor(3)}
    save_file(state, tmp_path / "m.safetensors")
    torch.save({"state_dict": state}, tmp_path / "m.pt")
    for source in (state, tmp_path / "m.safetensors", tmp_path / "m.pt"):
        found = outline(source)
        w = found["w"]
        assert (w.shape, w.dtype, w.entries, w.bytes) == ((6, 4, 3, 3), "float16", 216, 432)
        assert (w.groups, w.filters, w.dim) == (1, 6, 36)
        assert found["b"].filters is None
        assert (found.entries, found.bytes, len(found)) == (223, 432 + 24 + 8, 3)
        assert found.to_dict()["schema"] == "gonio.outline/1"
        text = " ".join(str(found).split())
        assert "3 tensors, 223 numbers, 464 B" in text
        assert "w.weight 6×4×3×3 float16 216 432 B" in text
    assert outline(tmp_path / "m.pt").notes == ("read from 'state_dict' of the checkpoint",)
    with pytest.raises(UnknownNameError, match="no tensor named 'x'"):
        found["x"]


def test_a_file_of_terabytes_is_outlined(tmp_path: Path) -> None:
    """Its data are a hole in the file: reading any of them would show."""
    path, size = tmp_path / "large.safetensors", 1 << 41
    text = json.dumps({"w.weight": {"dtype": "BF16", "shape": [1 << 20, 1 << 20], "data_offsets": [0, size]}}).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)
    found = outline(path)
    assert found["w"].bytes == size
    assert "2.2 TB" in str(found)
    assert os.stat(path).st_blocks * 512 < 1 << 20


def test_headers_of_models() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(8, 12, 3, groups=4), nn.LazyLinear(4))
    model.append(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)))
    found = outline(model)
    assert (found["0"].groups, found["0"].filters, found["0"].dim) == (4, 3, 18)
    assert found["1"].shape is None
    assert found["2"].shape is None
    assert "a lazy layer that has seen no input yet" in str(found)


def test_a_tensor_on_meta_is_measured_by_its_shape() -> None:
    row = measure(nn.ConvTranspose2d(6, 10, 3, groups=2, device="meta"))["weight"]
    assert (row.status, row.groups, row.filters, row.dim) == ("skipped", 2, 5, 27)


def test_a_file_cut_after_its_header_was_read(tmp_path: Path) -> None:
    save_file({"w": torch.ones(100)}, tmp_path / "m.safetensors")
    stored = open_safetensors(tmp_path / "m.safetensors").stored
    os.truncate(tmp_path / "m.safetensors", 200)
    with pytest.raises(UnreadableFileError, match="it ends before this tensor does"):
        stored["w"].load()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e5m2, torch.int16, torch.bool])
def test_values_read_from_their_place_are_those_that_were_written(dtype: torch.dtype, tmp_path: Path) -> None:
    state: dict[str, Tensor] = {"x": seeded(3, 5).to(dtype), "y": seeded(7).to(dtype), "z": torch.empty(0, 2).to(dtype)}
    save_file(state, tmp_path / "m.safetensors")
    for name, tensor in open_safetensors(tmp_path / "m.safetensors").stored.items():
        read = tensor.load()
        assert read.dtype == dtype
        assert torch.equal(read.double(), state[name].double())


@pytest.mark.parametrize("keys", [(0, 1), (b"a.weight", b"b.weight"), (("a", 0), ("a", 1))])
def test_keys_that_are_no_text_are_read_from_a_file_too(keys: tuple[Any, Any], tmp_path: Path) -> None:
    state = {keys[0]: torch.randn(6, 4), keys[1]: torch.randn(4, 6)}
    torch.save({"state_dict": state}, tmp_path / "m.pt")
    found, held = measure(tmp_path / "m.pt"), measure(state)
    assert [(t.path, t.status) for t in found.tensors] == [(str(key), "measured") for key in keys]
    assert [t.frobenius for t in found.tensors] == [t.frobenius for t in held.tensors]
