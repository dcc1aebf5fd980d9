"""HDF5 and Keras: equal figures, axes by the classes of layers, what is refused, planted damages, changed bytes."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gonio
from file_formats.cases import STATE, assert_equal_figures, codes, fuzz, rows
from gonio.errors import MissingExtraError, UnreadableFileError

h5py = pytest.importorskip("h5py")
NAMES = {f"layers.dense_{i}.vars.0": name for i, name in enumerate(STATE)}


def layer(kind: str, name: str, **facts: Any) -> dict[str, Any]:
    return {"module": "keras.layers", "class_name": kind, "config": {"name": name, **facts}, "registered_name": None}


DENSE = [layer("Dense", f"dense_{i}") for i in range(3)]


def config(layers: list[dict[str, Any]]) -> dict[str, Any]:
    return {"module": "keras", "class_name": "Sequential", "config": {"name": "sequential", "layers": layers}}


def keras(path: Path, arrays: dict[str, np.ndarray], layers: list[dict[str, Any]]) -> Path:
    """An archive as `keras.src.saving.saving_lib` writes it: `vars` of each layer has the layer's name."""
    inner = path.with_name("inner.h5")
    with h5py.File(inner, "w") as file:
        for place, value in arrays.items():
            file[f"{place}/vars/0"] = value
            file[f"{place}/vars"].attrs["name"] = place.rpartition("/")[2]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("metadata.json", "{}")
        archive.writestr("config.json", json.dumps(config(layers)))
        archive.write(inner, "model.weights.h5")
    inner.unlink()
    return path


def legacy(path: Path, **options: Any) -> Path:
    """A file as `legacy_h5_format` of Keras writes it."""
    with h5py.File(path, "w") as file:
        file.attrs["model_config"] = json.dumps(config(DENSE))
        for i, value in enumerate(STATE.values()):
            place = f"model_weights/dense_{i}/sequential/dense_{i}/kernel"
            file.create_dataset(place, data=np.ascontiguousarray(value.numpy().T), **options)
        file["optimizer_weights/adam/momentum"] = np.ones((20, 12), np.float32)
    return path


def transposed() -> dict[str, np.ndarray]:
    return {f"layers/dense_{i}": np.ascontiguousarray(value.numpy().T) for i, value in enumerate(STATE.values())}


def test_dense_layers_of_keras_have_the_figures_of_their_transposes(tmp_path: Path) -> None:
    source = keras(tmp_path / "m.keras", transposed(), DENSE)
    assert_equal_figures(source, STATE, tmp_path / "safe", as_stored=False, names=NAMES)


@pytest.mark.parametrize("options", [{}, {"compression": "gzip", "shuffle": True, "chunks": (5, 5)}])
def test_older_files_of_keras_have_the_same_figures(tmp_path: Path, options: dict[str, Any]) -> None:
    source = legacy(tmp_path / "m.h5", **options)
    names = {f"model_weights.dense_{i}.sequential.dense_{i}.kernel": name for i, name in enumerate(STATE)}
    assert_equal_figures(source, STATE, tmp_path / "safe", as_stored=False, names=names)
    found = gonio.check(source)
    assert [tensor.name for tensor in found.tensors if tensor.beside] == ["optimizer_weights.adam.momentum"]
    assert found.notes == ("not weights but the optimizer's: 1 tensors",)


@pytest.mark.parametrize(("kind", "made", "order", "facts"), [
    ("Conv2D", nn.Conv2d(6, 8, 3), (2, 3, 1, 0), {}),
    ("Conv2D", nn.Conv2d(6, 8, 3, groups=2), (2, 3, 1, 0), {"groups": 2}),
    ("Conv1D", nn.Conv1d(6, 8, 3), (2, 1, 0), {}),
    ("Conv3D", nn.Conv3d(6, 8, 3), (2, 3, 4, 1, 0), {}),
    ("Conv2DTranspose", nn.ConvTranspose2d(6, 8, 3), (2, 3, 1, 0), {}),
    ("Embedding", nn.Embedding(9, 7), (0, 1), {}),
])  # fmt: skip
def test_kernels_have_the_figures_of_the_same_layer(
    tmp_path: Path, kind: str, made: nn.Module, order: tuple[int, ...], facts: dict[str, Any]
) -> None:
    value = made.weight.detach().permute(order).contiguous().numpy()  # type: ignore[union-attr, operator]
    keras(tmp_path / "m.keras", {"layers/one": value}, [layer(kind, "one", **facts)])
    found, known = gonio.measure(tmp_path / "m.keras").tensors[0], gonio.measure(made).tensors[0]
    assert (found.shape, found.dim, found.norm_mean, found.alignment) == (
        known.shape, known.dim, known.norm_mean, known.alignment)  # fmt: skip


@pytest.mark.parametrize(("layers", "said"), [
    ([layer("MultiHeadAttention", "dense_0")], "of a layer MultiHeadAttention, whose dimensions are not known here"),
    ([{**layer("Dense", "dense_0"), "module": "mine", "registered_name": "Dense"}], "of dense_0, whose class"),
    ([], "of dense_0, whose class the file does not tell"),
])  # fmt: skip
def test_what_the_configuration_does_not_tell_is_unknown(tmp_path: Path, layers: list[Any], said: str) -> None:
    source = keras(tmp_path / "m.keras", {"layers/dense_0": np.ones((4, 3), np.float32)}, layers)
    assert said in gonio.measure(source).tensors[0].reason


@pytest.mark.parametrize("dtype", ["<f8", ">f4", "<f2", "i4", "u1", "?"])
def test_dtypes_are_read_as_stored(tmp_path: Path, dtype: str) -> None:
    value = np.arange(60).reshape(3, 20).astype(dtype)
    with h5py.File(tmp_path / "m.h5", "w") as file:
        file["w"] = value
    native = torch.from_numpy(value.astype(value.dtype.newbyteorder("=")))
    assert gonio.check(tmp_path / "m.h5")["w"].fingerprint == gonio.check({"w": native})["w"].fingerprint
    assert rows(tmp_path / "m.h5")["w"]["status"] != "measured"  # no file of HDF5 alone tells its axes


def test_bfloat16_of_keras_is_read(tmp_path: Path) -> None:
    value = STATE["layers.0.weight"].bfloat16()
    with h5py.File(tmp_path / "m.h5", "w") as file:
        file.create_dataset("w", data=value.view(torch.int16).numpy().view("V2")).attrs["dtype"] = "bfloat16"
    assert gonio.check(tmp_path / "m.h5")["w"].fingerprint == gonio.check({"w": value})["w"].fingerprint


def test_what_is_no_number_of_the_file_is_named_and_not_read(tmp_path: Path) -> None:
    (tmp_path / "raw.bin").write_bytes(bytes(4000))
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["w"] = np.ones((4, 5))
    with h5py.File(tmp_path / "m.h5", "w") as file:
        file["plain"] = np.ones((4, 5), np.float32)
        file["soft"] = h5py.SoftLink("/plain")
        file["away"] = h5py.ExternalLink("other.h5", "/w")
        file["again"] = file["plain"]
        file["loop"] = file["/"]
        file["text"] = np.array(["a"], dtype=h5py.string_dtype())
        file["pairs"] = np.zeros(3, [("a", "f4"), ("b", "f4")])
        file["none"] = h5py.Empty("f4")
        file.create_dataset("outside", (10,), "f4", external=[(str(tmp_path / "raw.bin"), 0, 40)])
        layout = h5py.VirtualLayout((4, 5), "f4")
        layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "w", (4, 5))
        file.create_virtual_dataset("virtual", layout)
        plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plan.set_chunk((4, 5))
        plan.set_filter(32015, h5py.h5z.FLAG_OPTIONAL)  # Zstandard
        h5py.h5d.create(file.id, b"plugin", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple((4, 5)), plan)
    found = {tensor.name: tensor.reason for tensor in gonio.check(tmp_path / "m.h5").tensors}
    said = {
        "soft": "a link",
        "away": "a link",
        "text": "text, objects",
        "pairs": "no dtype",
        "none": "an empty dataset",
        "outside": "in another file",
        "virtual": "in another file",
        "plugin": "shared library",
        "loop": "the same as",
    }
    assert all(reason in found[name] for name, reason in said.items()), found
    assert "the same as again" in {found["plain"], found["again"]}
    assert set(found) == {*said, "plain", "again"}
    assert {tensor.name for tensor in gonio.measure(tmp_path / "m.h5").tensors} == set(found)


@pytest.mark.parametrize("filters", [
    {"compression": "lzf", "shuffle": True}, {"compression": "gzip"}, {"compression": "gzip", "fletcher32": True},
])  # fmt: skip
def test_what_h5py_itself_packs_is_read(filters: dict[str, Any], tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(64, 48)).astype(np.float32)
    with h5py.File(tmp_path / "m.h5", "w") as file:
        file.create_dataset("w", data=values, chunks=(16, 16), **filters)
    (tensor,) = gonio.check(tmp_path / "m.h5").tensors
    assert (tensor.reason, tensor.largest) == ("", float(np.abs(values).max()))


def test_the_extra_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = legacy(tmp_path / "m.h5")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MissingExtraError, match=r"HDF5 files needs the package 'h5py'.*gonio\[hdf5\]"):
        gonio.check(source)


def edit(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with h5py.File(path, "a") as file:
            change(file)

    return damage


def cut(share: float) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, int(path.stat().st_size * share))


def values(path: Path) -> None:
    raw = path.read_bytes()
    at = raw.index(STATE["layers.1.weight"].numpy().T.tobytes())
    path.write_bytes(raw[:at] + np.float32(np.inf).tobytes() + raw[at + 4 :])


def checksum(path: Path) -> None:
    value = STATE["layers.0.weight"].numpy()
    edit(lambda file: file.create_dataset("new", data=value, fletcher32=True, chunks=value.shape))(path)
    raw = bytearray(path.read_bytes())
    raw[raw.index(value.tobytes()) + 9] ^= 1
    path.write_bytes(raw)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut off at the end": (cut(0.9), "refused"),
    "cut off in the middle": (cut(0.5), "refused"),
    "cut off in the header": (cut(0.01), "refused"),
    "an empty file": (cut(0), "refused"),
    "another file": (lambda path: path.write_bytes(b"PK" * 400), "refused"),
    "no magic": (lambda path: path.write_bytes(b"x" + path.read_bytes()[1:]), "refused"),
    "a dataset without values": (edit(lambda file: file.create_dataset("new", (5, 5), "f4")), "G702"),
    "chunks without values": (edit(lambda file: file.create_dataset(
        "new", (50, 50), "f4", chunks=(5, 5)).__setitem__((0, 0), 1.0)), "G704"),
    "a tensor of terabytes": (edit(lambda file: file.create_dataset(
        "new", (1 << 20, 1 << 20), "f4", chunks=(10, 10), compression="gzip").__setitem__((0, 0), 1.0)), "G704"),
    "values in another file": (edit(lambda file: file.create_dataset(
        "new", (10,), "f4", external=[("raw.bin", 0, 40)])), "G704"),
    "a chunk larger than its dataset": (edit(lambda file: file.create_dataset(
        "new", data=np.ones((2, 2), "f4"), chunks=(1 << 12, 1 << 11), maxshape=(None, None),
        compression="gzip")), "G704"),
    "bytes that differ from a checksum": (checksum, "G701"),
    "a value that is not finite": (values, "G001"),
    "a configuration that is no JSON": (edit(lambda file: file.attrs.__setitem__("model_config", "{")), "refused"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGES)
def test_damages_are_named(tmp_path: Path, kind: str) -> None:
    source, (damage, code) = legacy(tmp_path / "m.h5"), DAMAGES[kind]
    assert codes(source) == set()
    damage(source)
    assert code in codes(source)
    if code == "refused":
        with pytest.raises(UnreadableFileError, match="not an intact file"):
            gonio.measure(source)


# A table of links that is damaged can make the library of HDF5 itself take seconds and gigabytes (docs/limitations.md).
@pytest.mark.parametrize("times", [150, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["m.h5", "m.keras"])
def test_changed_bytes_leave_no_other_error(tmp_path: Path, times: int, kind: str) -> None:
    source = tmp_path / kind
    _ = keras(source, transposed(), DENSE) if kind == "m.keras" else legacy(source)
    assert fuzz(source, source, times, memory=8000) > 0
