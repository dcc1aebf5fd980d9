"""Folders and files of other libraries: what is not read is named, and a refusal says what to do."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import gonio
from catalog import seeded
from gonio.errors import InvalidArgumentError, UnreadableFileError
from gonio.measuring.changes.difference import difference


def test_a_folder_of_a_kind_that_is_not_read_is_not_called_empty(tmp_path: Path) -> None:
    for name in ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt", "d/part"):  # as orbax-checkpoint 0.12.8 writes
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    said = r"no checkpoint of a kind that is read; there are _CHECKPOINT_METADATA, _METADATA, d, manifest\.ocdbt"
    for reads in (gonio.check, gonio.measure):
        with pytest.raises(UnreadableFileError, match=said + r"\. Known kinds: \.safetensors, .*\.npz\."):
            reads(tmp_path)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFileError, match=r"it is empty\. Name a \.safetensors or \.pt file"):
        gonio.check(tmp_path)


def test_models_in_the_folders_of_a_model_are_named(tmp_path: Path) -> None:
    """sentence-transformers 6.2 writes the layers after the transformer into folders."""
    (tmp_path / "2_Dense").mkdir()
    save_file({"h.weight": torch.randn(8, 6)}, tmp_path / "model.safetensors")
    save_file({"linear.weight": torch.randn(4, 8)}, tmp_path / "2_Dense" / "model.safetensors")
    for found in (gonio.check(tmp_path), gonio.measure(tmp_path)):
        assert "not read: models in the folders 2_Dense" in found.notes


def sharded(folder: Path, state: dict[str, torch.Tensor], stem: str = "model", kind: str = "safetensors") -> list[Path]:
    """Two shards and their index."""
    names = {name: f"{stem}-0000{number}-of-00002.{kind}" for number, name in enumerate(state, start=1)}
    for name, shard in names.items():
        one = {name: state[name]}
        save_file(one, folder / shard) if kind == "safetensors" else torch.save(one, folder / shard)
    (folder / f"{stem}.{kind}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return [folder / shard for shard in names.values()]


OLD = {"a.weight": seeded(8, 6), "b.weight": seeded(4, 8)}
NEW = {name: 2 * tensor for name, tensor in OLD.items()}


@pytest.mark.parametrize(
    ("stem", "kind", "read", "norms"),
    [
        ("model", "safetensors", "model.safetensors", OLD),
        ("pytorch_model", "bin", "pytorch_model.bin", OLD),
        ("diffusion_pytorch_model", "safetensors", "diffusion_pytorch_model.safetensors.index.json", NEW),
    ],
)
def test_a_model_in_one_file_beside_shards(
    stem: str, kind: str, read: str, norms: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """As transformers 5.13 leaves and loads them; diffusers reads the index."""
    single = tmp_path / f"{stem}.{kind}"
    save_file(OLD, single) if kind == "safetensors" else torch.save(OLD, single)
    shards = sharded(tmp_path, NEW, stem, kind)
    said = (
        f"{single.name} and {single.name}.index.json with shards are two models: {read} is read, other programs differ"
    )
    for found in (gonio.check(tmp_path), gonio.measure(tmp_path)):
        assert [(each.path, each.found) for each in found.findings if each.code == "G703"] == [(single.name, said)]
    for name, tensor in norms.items():
        measured = gonio.measure(tmp_path)[name.removesuffix(".weight")]
        assert measured.norm_mean == pytest.approx(float(tensor.norm(dim=1).mean()), rel=1e-5)
    for file in (single, tmp_path / f"{single.name}.index.json"):  # that is named is meant
        assert not [each for each in gonio.check(file).findings if each.code == "G703"]
    if norms is OLD:  # transformers removes the shards when it saves in one file, and not their index
        for shard in shards:
            shard.unlink()
        for found in (gonio.check(tmp_path), gonio.measure(tmp_path)):
            assert not found.findings
            assert f"not read: {single.name}.index.json" in found.notes


def test_an_index_of_one_file_is_followed(tmp_path: Path) -> None:
    save_file(OLD, tmp_path / "model.safetensors")
    index = {"weight_map": dict.fromkeys([*OLD, "c.weight"], "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [(each.code, each.path) for each in gonio.check(tmp_path).findings] == [("G702", "c.weight")]


def test_a_download_that_has_not_ended(tmp_path: Path) -> None:
    shards = sharded(tmp_path, OLD)
    (tmp_path / f"{shards[1].name}.aria2").write_bytes(b"\0\1")
    said = f"its download has not ended: {shards[1].name}.aria2 is beside it"
    for source in (tmp_path, tmp_path / "model.safetensors.index.json", shards[1]):
        for found in (gonio.check(source), gonio.measure(source)):
            told = [(each.path, each.found) for each in found.findings if each.code == "G715"]
            assert told == [(shards[1].name, said)]
    assert not gonio.check(shards[0]).findings


def test_states_that_are_read_are_not_told_as_left_out(tmp_path: Path) -> None:
    """Accelerate 1.15 writes pytorch_model.bin and optimizer.bin, Lightning 2.6 a list of states."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 6)).sum().backward()
    optimizer.step()
    states = optimizer.state_dict()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    torch.save(states, tmp_path / "optimizer.bin")
    torch.save({"other": torch.ones(3)}, tmp_path / "third.bin")
    for found in (gonio.check(tmp_path), gonio.measure(tmp_path)):
        assert "the optimizer's state: of 4 parameters" in found.notes
        assert [note for note in found.notes if "not read" in note] == ["not read: third.bin"]
    content = {"state_dict": model.state_dict(), "optimizer_states": [states], "averages": model.state_dict()}
    torch.save(content, tmp_path / "last.ckpt")
    for source in (content, tmp_path / "last.ckpt"):
        notes = gonio.measure(source).notes
        assert [note for note in notes if "not read" in note] == ["not read: averages, of the same checkpoint"]
        assert "the state of an optimizer, not weights: optimizer_states" in notes


def test_an_adapter_that_is_not_computed_is_no_other_architecture(tmp_path: Path) -> None:
    save_file({"base_model.model.q.hada_w1_a": torch.ones(4, 2)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LOHA", "target_modules": ["q"]}))
    said = r"\(an adapter of type LOHA, which is not computed\)\. Merge the adapter into its base"
    with pytest.raises(InvalidArgumentError, match=said):
        difference({"q.weight": torch.ones(4, 4)}, tmp_path)


class Wrapper(torch.Tensor):
    """A tensor subclass around another tensor, as those of torchao."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        return made

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        return NotImplemented


def test_a_subclass_in_a_file_of_torch_is_no_state_dict_that_was_not_saved(tmp_path: Path) -> None:
    torch.save({"q.weight": Wrapper(torch.ones(4, 4))}, tmp_path / "model.pt")
    said = r"tensors of the subclass \S+Wrapper\. .* save plain tensors, such as the dequantize\(\) of each"
    with pytest.raises(UnreadableFileError, match=said):
        gonio.check(tmp_path / "model.pt")


def test_a_pickle_of_another_program_is_refused_without_the_advice_to_run_it(tmp_path: Path) -> None:
    """PaddlePaddle pickles arrays by protocol 4; torch's error advises `weights_only=False` first."""
    (tmp_path / "paddle.pt").write_bytes(pickle.dumps({"w": numpy.ones((3, 4))}, protocol=4))
    said = r"containers \(WeightsUnpickler error: [^\n]{1,200}\)\. Code in a file is never run here"
    with pytest.raises(UnreadableFileError, match=said) as refused:
        gonio.check(tmp_path / "paddle.pt")
    assert "weights_only" not in str(refused.value)
