"""Files that are links, shards in folders of their index, and what is said of what is not there or cannot be opened."""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import gonio
from catalog import seeded
from foreign import ONE_PROCESS
from gonio.errors import RefusedFileError, UnreadableFileError
from gonio.measuring.journal import Journal
from gonio.measuring.reading.opened import damaged

ONE, TWO = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
INDEX = "model.safetensors.index.json"


def sharded(folder: Path, *places: str, **metadata: Any) -> Path:
    """Two shards at these places, and their index."""
    for number, place in enumerate(places):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        save_file({f"{'ab'[number]}.weight": seeded(8, 8, seed=number, dtype=torch.float32)}, folder / place)
    named = {"a.weight": places[0], "b.weight": places[1]}
    (folder / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": named}))
    return folder


def test_shards_in_folders_of_the_index_are_read(tmp_path: Path) -> None:
    """Two of them may have the same name in two folders."""
    folder = sharded(tmp_path, "first/model.safetensors", "second/model.safetensors")
    found, rows = gonio.check(folder), gonio.measure(folder)
    assert (found.intact, len(found.tensors), found.contents.files) == (True, 2, 2)
    assert rows["b"].frobenius == pytest.approx(float(seeded(8, 8, seed=1, dtype=torch.float32).norm()))
    assert not any("not read" in note for note in (*found.notes, *rows.notes))
    (folder / "first" / "other.safetensors").write_bytes(b"")
    assert "not read: models in the folders first" in gonio.check(folder).notes
    (folder / "second" / "model.safetensors").unlink()
    assert {(f.code, f.path) for f in gonio.check(folder).findings} == {("G702", "second/model.safetensors")}


@pytest.mark.parametrize(("place", "said"), [
    ("../model.safetensors", "a file outside its folder:"), ("/m.safetensors", "a file outside its folder:"),
    ("a/../../m.safetensors", "a file outside its folder:"), ("out/model.safetensors", "outside its folder, by a link"),
    ("", "by what is no path"), ("a\\m.safetensors", "by what is no path"), ("a\0b", "by what is no path"),
])  # fmt: skip
def test_an_index_of_files_elsewhere_is_refused(place: str, said: str, tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "model"
    for one in (outside, folder):
        one.mkdir()
    save_file({"a.weight": torch.ones(2, 2)}, outside / "model.safetensors")
    (folder / "out").symlink_to(outside)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a.weight": place}}))
    for verb in (gonio.check, gonio.measure):
        with pytest.raises(UnreadableFileError, match=said):
            verb(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "model.gguf", "loop.pt"])
def test_a_link_to_nothing_is_said_to_be_one(name: str, tmp_path: Path) -> None:
    target = "loop.pt" if name == "loop.pt" else "../blobs/0a1b"
    where = "which leads back to it" if name == target else "where there is nothing"
    (tmp_path / name).symlink_to(target)
    for verb in (gonio.check, gonio.measure):
        for path in (tmp_path / name, tmp_path):
            with pytest.raises(UnreadableFileError, match=f"it is a link to {target}, {where}"):
                verb(path)


def test_a_link_of_a_folder_and_of_fingerprints(tmp_path: Path) -> None:
    (tmp_path / "folder").symlink_to("gone")
    with pytest.raises(UnreadableFileError, match=r"its folder folder is a link to gone, where"):
        gonio.check(tmp_path / "folder" / "model.pt")
    with pytest.raises(UnreadableFileError, match=r"it is a link to gone, where.*--save"):
        gonio.check({"w": torch.ones(2)}, against=tmp_path / "folder")


@pytest.mark.parametrize("index", [True, False])
def test_a_shard_that_is_a_link_to_nothing_is_missing(index: bool, tmp_path: Path) -> None:
    folder = sharded(tmp_path, ONE, TWO)
    (folder / TWO).unlink()
    (folder / TWO).symlink_to("../blobs/0a1b")
    if not index:
        (folder / INDEX).unlink()
    for found in (gonio.check(folder), gonio.measure(folder)):
        told = {f.path: f.found for f in found.findings if f.code == "G702"}
        assert "it is a link to ../blobs/0a1b, where there is nothing" in told[TWO]
        assert index or told[""] == "1 of 2 parts are there"
    (folder / ONE).unlink()
    (folder / ONE).symlink_to("../blobs/2c3d")
    if not index:
        with pytest.raises(UnreadableFileError, match="it is a link to"):
            gonio.check(folder)


@pytest.mark.parametrize(("stated", "said"), [
    (512, False), (512.0, False), (None, False), ("512", False), (float("nan"), False), (500, True),
])  # fmt: skip
def test_another_size_than_the_index_states_is_a_note(stated: Any, said: bool, tmp_path: Path) -> None:
    found = gonio.check(sharded(tmp_path, ONE, TWO, total_size=stated))
    assert found.intact
    assert ("the index states 500 bytes of tensors, its shards hold 512" in found.notes) is said


def test_the_size_of_whole_files_is_a_size_too(tmp_path: Path) -> None:
    folder = sharded(tmp_path, ONE, TWO)
    sharded(folder, ONE, TWO, total_size=sum((folder / shard).stat().st_size for shard in (ONE, TWO)))
    assert not gonio.check(folder).notes


def test_tied_tensors_of_torch_count_once_or_twice(tmp_path: Path) -> None:
    weight = torch.ones(4, 4)
    torch.save({"a.weight": weight, "b.weight": weight}, tmp_path / "m-1.bin")
    for size in (64, 128, 96):
        index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(("a.weight", "b.weight"), "m-1.bin")}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        assert any("the index states" in note for note in gonio.check(tmp_path).notes) is (size == 96)


def test_pieces_without_their_metadata_are_a_save_that_did_not_end(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")
        dcp.save({"w": torch.ones(3, 3)}, checkpoint_id=tmp_path, **ONE_PROCESS)
    (tmp_path / ".metadata").unlink()
    with pytest.raises(UnreadableFileError, match=r"torch.distributed.checkpoint without .metadata, which is written"):
        gonio.check(tmp_path)


def test_models_in_folders_of_folders_are_named(tmp_path: Path) -> None:
    """As a hub's cache and Megatron have them."""
    (tmp_path / "snapshots" / "0a1b").mkdir(parents=True)
    save_file({"w": torch.ones(3, 3)}, tmp_path / "snapshots" / "0a1b" / "model.safetensors")
    with pytest.raises(UnreadableFileError, match=r"but its folders do: snapshots/0a1b\. Name one"):
        gonio.measure(tmp_path)


@pytest.mark.parametrize("name", ["m.safetensors", "m.gguf", "m.safetensors.index.json"])
def test_a_file_that_may_not_be_opened_is_not_called_damaged(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"w": torch.ones(3, 3)}, tmp_path / name)
    opened = Path.open

    def refused(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **options)

    monkeypatch.setattr(Path, "open", refused)
    verbs = [gonio.check, gonio.measure, lambda path: gonio.check({"w": torch.ones(3)}, against=path)]
    for verb in verbs:
        with pytest.raises(RefusedFileError, match=r"refuses it \(Permission denied\)\. Check the permissions"):
            verb(tmp_path / name)
    with pytest.raises(RefusedFileError, match="Check the disk"):
        damaged(tmp_path / "m.pt", OSError(5, "Input/output error"))


@pytest.mark.parametrize(
    ("verb", "others"), [(gonio.check, 0), (gonio.measure, 0), (gonio.measure, 1), (gonio.measure, 2)]
)
def test_a_file_that_changes_while_it_is_read(verb: Callable[..., Any], others: int, tmp_path: Path) -> None:
    """Alone, and beside others that `measure` compares it with."""
    path, state = tmp_path / "m.safetensors", {"w": seeded(64, 64, dtype=torch.float32)}
    save_file(state, path)

    def replaced(*_: int) -> None:
        save_file({"w": seeded(64, 64, seed=1, dtype=torch.float32)}, tmp_path / "new")
        os.replace(tmp_path / "new", path)

    def codes(**named: Any) -> list[tuple[str, str, str]]:
        found = verb(*[{"w": seeded(64, 64, seed=2 + i)} for i in range(others)], path, **named)
        return [(f.code, f.path, f.found) for f in found.findings if f.code == "G701"]

    said = "it changed while it was read; check it again when it is whole"
    assert codes(progress=replaced) == [("G701", "m.safetensors", said)]
    assert not codes()


def test_a_part_of_a_training_that_divided_layers_is_said_to_be_one(tmp_path: Path) -> None:
    """As Megatron stores its settings beside the weights of each process."""
    for number, (processes, place) in enumerate({1: "mp_rank_00", 2: "mp_rank_01"}.items()):
        settings = argparse.Namespace(tensor_model_parallel_size=processes, hidden_size=8)
        content = {"model": {"w.weight": seeded(8, 8)}, "args": settings, "iteration": 3}
        torch.save(content, tmp_path / f"{place}.pt")
        for found in (gonio.check(tmp_path / f"{place}.pt"), gonio.measure(tmp_path / f"{place}.pt")):
            assert sum("divided layers over 2 processes (args.tensor_" in note for note in found.notes) == number


def test_a_journal_is_a_file(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFileError, match="it is no regular file"):
        Journal(tmp_path, {}, gonio.measuring.TensorMeasurement)
    with Journal(tmp_path / "j.txt", {}, gonio.measuring.TensorMeasurement) as journal:
        journal._file.close()
        journal._file = Path("/dev/full").open("r+b")  # noqa: SIM115
        with pytest.raises(OSError, match=r"No space left on device: .*j\.txt"):
            journal._write({})
