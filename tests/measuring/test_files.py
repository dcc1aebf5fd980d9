"""Checkpoints as trainers and hubs leave them: in shards, nested, averaged, with parts missing; and headers alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from catalog import seeded
from gonio.errors import InvalidArgumentError, UnknownNameError, UnreadableFileError
from gonio.measuring import measure, outline

STATE = {name: seeded(4, 3, seed=seed) for seed, name in enumerate(("a.weight", "b.weight", "c.weight"))}


def sharded(folder: Path, placed: dict[str, list[str]], weight_map: str | dict[str, str]) -> Path:
    for shard, names in placed.items():
        save_file({name: STATE[name] for name in names}, folder / shard)
    index = folder / "model.safetensors.index.json"
    text = weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map})
    index.write_text(text)
    return index


def test_a_damaged_shard_takes_only_its_own_tensors_with_it(tmp_path: Path) -> None:
    index = sharded(
        tmp_path,
        {"1.safetensors": ["a.weight"], "2.safetensors": ["b.weight"]},
        {"a.weight": "1.safetensors", "b.weight": "2.safetensors"},
    )
    (tmp_path / "2.safetensors").write_bytes(b"\xff" * 100)
    found = measure(index)
    assert found["a"].status == "measured"
    assert found["b"].reason.startswith("its shard 2.safetensors cannot be read")
    assert "Skipped: 1 (b" in found.coverage


def test_a_tensor_in_two_shards_is_read_where_the_index_says(tmp_path: Path) -> None:
    index = sharded(
        tmp_path,
        {"1.safetensors": ["a.weight", "b.weight"]},
        {"a.weight": "1.safetensors", "b.weight": "2.safetensors"},
    )
    save_file({"b.weight": 2 * STATE["b.weight"]}, tmp_path / "2.safetensors")
    found = measure(index)
    assert found["b"].frobenius == pytest.approx(2 * float(STATE["b.weight"].norm()), rel=1e-6)
    assert "in several shards, read where the index says: b.weight (in 1.safetensors too)" in found.notes


def test_what_the_index_leaves_out_is_named(tmp_path: Path) -> None:
    index = sharded(tmp_path, {"1.safetensors": ["a.weight", "c.weight"]}, {"a.weight": "1.safetensors"})
    found = measure(index)
    assert [t.path for t in found] == ["a"]
    assert "in the shards but not in the index, and not read: c.weight (in 1.safetensors)" in found.notes


def test_a_name_that_stands_twice_in_the_index(tmp_path: Path) -> None:
    text = '{"weight_map": {"a.weight": "0.safetensors", "a.weight": "1.safetensors"}}'
    found = measure(sharded(tmp_path, {"1.safetensors": ["a.weight"]}, text))
    assert found["a"].status == "measured"
    assert "the index names a.weight twice; the last place is read" in found.notes


def test_parts_without_their_index(tmp_path: Path) -> None:
    for number, name in ((1, "a.weight"), (3, "b.weight")):
        save_file({name: STATE[name]}, tmp_path / f"model-0000{number}-of-00003.safetensors")
    found = measure(tmp_path)
    assert sorted(t.path for t in found.layers) == ["a", "b"]
    assert found.notes == ("the parts have no index: what is missing cannot be told", "2 of 3 parts are there")
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
    "an optimizer beside": ({"model": STATE, "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}}, "model", ()),
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


def test_a_scripted_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    import zipfile

    path = tmp_path / "scripted.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("scripted/constants.pkl", b"\x80\x02).")
        archive.writestr("scripted/data.pkl", b"\x80\x02).")
        archive.writestr("scripted/version", b"3\n")
    with pytest.raises(UnreadableFileError, match="it is damaged or holds more than tensors"):
        measure(path)


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
    from gonio.measuring.reading.formats import stored_in_safetensors

    save_file({"w": torch.ones(100)}, tmp_path / "m.safetensors")
    stored = stored_in_safetensors(tmp_path / "m.safetensors")
    os.truncate(tmp_path / "m.safetensors", 200)
    with pytest.raises(UnreadableFileError, match="it ends before this tensor does"):
        stored["w"].load()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e5m2, torch.int16, torch.bool])
def test_values_read_from_their_place_are_those_that_were_written(dtype: torch.dtype, tmp_path: Path) -> None:
    from gonio.measuring.reading.formats import stored_in_safetensors

    state: dict[str, Tensor] = {"x": seeded(3, 5).to(dtype), "y": seeded(7).to(dtype), "z": torch.empty(0, 2).to(dtype)}
    save_file(state, tmp_path / "m.safetensors")
    for name, tensor in stored_in_safetensors(tmp_path / "m.safetensors").items():
        read = tensor.load()
        assert read.dtype == dtype
        assert torch.equal(read.double(), state[name].double())
