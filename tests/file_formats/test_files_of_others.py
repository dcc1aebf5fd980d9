"""Files as other programs leave them: what is not read is named, and nothing else is taken for values."""

from __future__ import annotations

import json
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import gonio
from gonio.errors import InvalidArgumentError, UnreadableFileError
from gonio.measuring.reading.entry import clean_names

READ = (gonio.check, gonio.measure)


@pytest.fixture
def state() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    return {f"layers.{i}.up.weight": torch.randn(16, 12, generator=random) for i in range(4)}


def _sharded(folder: Path, state: dict[str, Tensor], index: str, stem: str = "model") -> None:
    """Two shards of a model, and an index of this name."""
    placed = {name: f"{stem}-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(state)}
    for shard in {*placed.values()}:
        save_file({name: state[name] for name in state if placed[name] == shard}, folder / shard)
    (folder / index).write_text(json.dumps({"weight_map": placed}))


# --- torch -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", READ)
def test_compressed_records_are_not_read_as_values(read: Any, state: dict[str, Tensor], tmp_path: Path) -> None:
    """Random numbers do not shrink, so that such an archive is no smaller than what it unfolds to."""
    torch.save(state, tmp_path / "plain.pt")
    path = tmp_path / "packed.pt"
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for info in plain.infolist():
            packed.writestr(info.filename, plain.read(info))
        packed.writestr("plain/pad", np.random.default_rng(0).bytes(4096))
    assert all(torch.equal(value, state[name]) for name, value in torch.load(path).items())
    with zipfile.ZipFile(path) as packed:
        assert sum(info.file_size for info in packed.infolist()) <= path.stat().st_size
    with pytest.raises(UnreadableFileError, match="the records of its archive are compressed"):
        read(path)


@pytest.mark.parametrize("protocol", [4, 5])
def test_other_protocols_of_pickle_are_read_as_data(protocol: int, state: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save({"model": state, "epoch": 3}, tmp_path / "m.pt", pickle_protocol=protocol)
    found = gonio.measure(tmp_path / "m.pt")
    assert found["layers.2.up"].frobenius == pytest.approx(float(state["layers.2.up.weight"].double().norm()))
    assert gonio.check(tmp_path / "m.pt").intact


@pytest.mark.parametrize("read", READ)
def test_a_program_of_torch_export_is_named(read: Any, tmp_path: Path) -> None:
    program = torch.export.export(nn.Linear(4, 3), (torch.ones(2, 4),))
    torch.export.save(program, tmp_path / "m.pt2")
    (tmp_path / "m.pt2").rename(tmp_path / "m.pt")
    with pytest.raises(UnreadableFileError, match=r"a program of torch\.export: code beside its tensors"):
        read(tmp_path / "m.pt")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_named(tmp_path: Path) -> None:
    nested = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(2, 4)])
    torch.save({"n.weight": nested, "d.weight": torch.eye(8)}, tmp_path / "m.pt")
    checked = gonio.check(tmp_path / "m.pt")
    assert [(t.name, t.reason[:7]) for t in checked.tensors if t.reason] == [("n.weight", "nested:")]
    assert str(checked.verdict).startswith("No damage found in 1 of 2 tensors")
    assert gonio.measure(tmp_path / "m.pt")["n"].reason == "nested: filters are not stored whole"


def test_arrays_of_numpy_in_a_state_dict_are_not_intact(tmp_path: Path) -> None:
    """An array beside the model is a trainer's, as the state of a random generator."""
    path = tmp_path / "m.pt"
    arrays = {"a.weight": torch.eye(8), "b.weight": np.full((8, 8), np.nan, np.float32)}
    torch.save({"state_dict": arrays, "rng": ("MT19937", np.arange(5))}, path)
    checked = gonio.check(path)
    assert [t.name for t in checked.tensors if t.reason] == ["b.weight"]
    assert "the others were not checked" in checked.verdict
    assert gonio.measure(path)["b"].reason == "an array of NumPy, which is not read from a file of torch"
    torch.save({"b.weight": arrays["b.weight"]}, path)
    assert [t.reason[:17] for t in gonio.check(path).tensors] == ["an array of NumPy"]


def test_errors_say_what_a_file_of_torch_holds(tmp_path: Path) -> None:
    import argparse

    torch.save(argparse.Namespace(a=1), tmp_path / "args.bin")
    with pytest.raises(InvalidArgumentError, match=r"found argparse\.Namespace\."):
        gonio.measure(tmp_path / "args.bin")
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2, 2))], momentum=0.9)
    optimizer.param_groups[0]["params"][0].sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    with pytest.raises(InvalidArgumentError, match="found the state of an optimizer, and no weights"):
        gonio.measure(tmp_path / "optimizer.pt")


def test_only_nan_is_no_constant(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.full((8, 8), torch.nan), "b.weight": torch.eye(8)}, tmp_path / "m.pt")
    assert {f.code for f in gonio.check(tmp_path / "m.pt").findings if f.path == "a"} == {"G001"}


def test_the_prefix_of_a_compiled_wrapper_is_left_out() -> None:
    names = ["_orig_mod.module.a.weight", "_orig_mod.module.b.weight"]
    assert [*clean_names(names).values()] == ["a.weight", "b.weight"]


# --- folders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("others", [("stale.safetensors",), ("a.bin", "scheduler.pt")])
def test_files_beside_an_index_are_named(
    read: Any, others: tuple[str, ...], state: dict[str, Tensor], tmp_path: Path
) -> None:
    _sharded(tmp_path, state, "model.safetensors.index.json")
    for name in others:
        save_file(state, tmp_path / name)
    assert f"not read: {', '.join(others)}" in read(tmp_path).notes


@pytest.mark.parametrize("read", READ)
def test_a_healthy_folder_has_no_such_note(read: Any, state: dict[str, Tensor], tmp_path: Path) -> None:
    _sharded(tmp_path, state, "model.safetensors.index.json")
    (tmp_path / "config.json").write_text("{}")
    assert not [note for note in read(tmp_path).notes if "not read" in note]


@pytest.mark.parametrize("read", READ)
def test_the_same_model_in_another_format_is_named(read: Any, state: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(state, tmp_path / "model.safetensors")
    torch.save({name: value * torch.nan for name, value in state.items()}, tmp_path / "pytorch_model.bin")
    assert "not read: pytorch_model.bin" in read(tmp_path).notes


@pytest.mark.parametrize("read", READ)
def test_the_index_of_a_variant_is_one(read: Any, state: dict[str, Tensor], tmp_path: Path) -> None:
    _sharded(tmp_path, state, "model.safetensors.index.fp16.json", stem="model.fp16")
    (tmp_path / "model.fp16-00002-of-00002.safetensors").unlink()
    for source in (tmp_path, tmp_path / "model.safetensors.index.fp16.json"):
        assert [f.code for f in read(source).findings] == ["G702"]


@pytest.mark.parametrize("read", READ)
def test_parts_that_are_missing_are_a_finding(read: Any, state: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(state, tmp_path / "model-00001-of-00003.safetensors")
    save_file({"layers.0.up.weight": torch.eye(9)}, tmp_path / "model-00003-of-00003.safetensors")
    found = read(tmp_path).findings
    assert ("G702", "2 of 3 parts are there") in {(f.code, f.found) for f in found}
    assert ("G703", "stored in 2 files") in {(f.code, f.found) for f in found}
    alone = read(tmp_path / "model-00001-of-00003.safetensors")
    assert "one of 3 parts: the others are read with it if their folder or index is named" in alone.notes


# --- other kinds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("ending", [".safetensors", ".pt", ".gguf", ".npz"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n", "it is a pointer of Git LFS"),
        (b"\n<!DOCTYPE html><html>404</html>", "it is a page of HTML"),
    ],
)
def test_what_came_instead_of_a_file(read: Any, ending: str, content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / f"m{ending}"
    path.write_bytes(content)
    with pytest.raises(UnreadableFileError, match=said):
        read(path)


@pytest.mark.parametrize("mode", ["w", "w:gz"])
@pytest.mark.parametrize("name", ["m.nemo", "m.tar", "m.pt"])
def test_archives_of_files_are_named(mode: Any, name: str, state: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save(state, tmp_path / "model_weights.ckpt")
    with tarfile.open(tmp_path / name, mode) as archive:
        archive.add(tmp_path / "model_weights.ckpt", "model_weights.ckpt")
    with pytest.raises(UnreadableFileError, match=r"it is an archive of files \(tar\)\. Unpack it"):
        gonio.check(tmp_path / name)
    (tmp_path / name).write_bytes(bytes(20_000))  # an archive without a file, as tar sees it
    with pytest.raises(UnreadableFileError, match=r"it is damaged|its kind"):
        gonio.check(tmp_path / name)


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (b"GGUF" + struct.pack(">I", 3), r"the highest byte first \(big-endian\)\."),
        (b"GGUF" + struct.pack("<I", 1), "its version 1 of GGUF is not read"),
        (b"GGUF" + struct.pack("<I", 4), "its version 4 of GGUF is not read"),
    ],
)
def test_other_versions_of_gguf_are_not_called_damaged(start: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(start + bytes(200))
    with pytest.raises(UnreadableFileError, match=f"cannot be read; {said}|cannot be read; its numbers.*{said}"):
        gonio.check(tmp_path / "m.gguf")


def test_dtypes_that_torch_lacks_are_named_once(tmp_path: Path) -> None:
    """The reason names neither the file nor what to do again."""
    header = {"a.weight": {"dtype": "F4", "shape": [4, 4], "data_offsets": [0, 8]}}
    raw = json.dumps(header).encode()
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(8))
    assert gonio.measure(tmp_path / "m.safetensors")["a"].reason == "torch has no dtype for F4"
    text = np.array(["a", "b"])
    np.savez(tmp_path / "m.npz", w=np.eye(4), t=text, o=np.array([{}], dtype=object))
    found = gonio.measure(tmp_path / "m.npz")
    assert found["t"].reason == "torch has no dtype for <U1"
    assert found["o"].reason == "objects of Python, which are never unpickled"
    assert {t.name for t in gonio.check(tmp_path / "m.npz").tensors if t.reason} == {"t", "o"}
