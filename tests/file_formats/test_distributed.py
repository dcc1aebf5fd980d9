"""Folders of torch.distributed.checkpoint: equal figures, sharded pieces, planted damages, hostile metadata."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import gonio
from file_formats.cases import STATE, assert_equal_figures, codes, fuzz
from foreign import ONE_PROCESS
from gonio.errors import InvalidArgumentError, UnreadableFileError
from gonio.measuring.reading.source import CheckpointPart
from ranks import WORLD, spawned


def saved(folder: Path, content: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(content, checkpoint_id=folder, **ONE_PROCESS)
    return folder


def optimizer_of(model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer.state_dict()


LAYERS = nn.ParameterList([nn.Parameter(value.clone()) for value in STATE.values()])


def sharded(folder: Path, pieces: int = 2) -> Path:
    """The folder that several ranks write: each tensor in pieces of rows and of columns."""
    folder.mkdir()
    tensors, storage = {}, {}
    files = [(folder / f"__{rank}_0.distcp").open("wb") for rank in range(pieces)]
    for name, value in STATE.items():
        chunks = []
        rows, columns = value.shape[0] // pieces, value.shape[1] // pieces
        for rank in range(pieces):
            for part in range(pieces):
                offset = torch.Size([rank * rows, part * columns])
                piece = value[offset[0] : offset[0] + rows, offset[1] : offset[1] + columns].clone()
                chunks.append(ChunkStorageMetadata(offset, piece.shape))
                begin = files[rank].tell()
                torch.save(piece, files[rank])
                place = _StorageInfo(files[rank].name.rpartition("/")[2], begin, files[rank].tell() - begin)
                storage[MetadataIndex(name, offset)] = place
        tensors[name] = TensorStorageMetadata(TensorProperties(torch.float32), value.shape, chunks)
    for file in files:
        file.close()
    return written(folder, Metadata(tensors, None, storage))


def written(folder: Path, metadata: Any) -> Path:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def metadata_of(folder: Path) -> Metadata:
    with (folder / ".metadata").open("rb") as file:
        found: Metadata = pickle.load(file)
    return found


@pytest.mark.parametrize("content", [
    STATE,
    {"model": STATE, "optimizer": optimizer_of(LAYERS), "step": 3, "lr": "constant"},
    {**STATE, "optimizer": {  # torchtitan's: the model's keys beside flat ones of the optimizer
        **{f"state.{name}.{slot}": torch.ones(12, 20) for name in STATE for slot in ("exp_avg", "exp_avg_sq")},
        **{f"param_groups.{name}.lr": 0.1 for name in STATE}}, "train_state": {"step": 3}},
    {"app": {"model": STATE, "optim": optimizer_of(LAYERS)}, "model": STATE},
    {"state_dict": {"module." + name: value for name, value in STATE.items()}},
])  # fmt: skip
def test_equal_weights_have_equal_figures(tmp_path: Path, content: dict[str, Any]) -> None:
    source = saved(tmp_path / "dcp", content)
    state = content.get("state_dict", STATE)
    if state is STATE:
        assert_equal_figures(source, STATE, tmp_path / "safe")
    assert [row.path for row in gonio.measure(source).values()] == [name.removesuffix(".weight") for name in STATE]
    if "optimizer" in content:
        assert "the state of an optimizer, not weights: optimizer" in gonio.measure(source).notes


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtypes_are_read_as_stored(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {name: value.to(dtype) for name, value in STATE.items()}
    assert_equal_figures(saved(tmp_path / "dcp", {"model": state}), state, tmp_path / "safe")


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_folders_that_other_pythons_wrote_are_read(
    tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metadata hold a path, whose class has had its home in `pathlib._local` in Python 3.13."""
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, module, pathlib)
        patch.setattr(type(tmp_path), "__module__", module)
        source = saved(tmp_path / "dcp", {"model": STATE})
    assert module.encode() + b"\x94" in (source / ".metadata").read_bytes()
    assert_equal_figures(source, STATE, tmp_path / "safe")


def test_pieces_of_several_ranks_are_put_together(tmp_path: Path) -> None:
    assert_equal_figures(sharded(tmp_path / "dcp"), STATE, tmp_path / "safe")


def test_a_key_names_one_of_several_models(tmp_path: Path) -> None:
    source = saved(tmp_path / "dcp", {"student": STATE, "teacher": STATE})
    with pytest.raises(InvalidArgumentError, match=r"Name the one to measure .*student"):
        gonio.measure(source)
    assert len(gonio.measure(CheckpointPart(str(source), "student"))) == 3
    found = gonio.check(source)
    assert (found.intact, found.contents.beside, len(found.tensors)) == (True, 6, 6)


# --- damages ---------------------------------------------------------------------------------------------------------

NAME, OTHER = "layers.0.weight", "layers.1.weight"


def edit(change: Callable[[Metadata], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        metadata = metadata_of(folder)
        change(metadata)
        written(folder, metadata)

    return damage


def first(metadata: Metadata, name: str = NAME) -> tuple[MetadataIndex, _StorageInfo]:
    return next((index, info) for index, info in metadata.storage_data.items() if index.fqn == name)


def on_file(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / "__1_0.distcp").write_bytes(change((folder / "__1_0.distcp").read_bytes()))  # type: ignore[func-returns-value]


def not_a_number(folder: Path) -> None:
    metadata = metadata_of(folder)
    _, info = first(metadata)
    tail = (folder / info.relative_path).read_bytes()[info.offset + info.length :]
    assert tail
    begin = (folder / "__0_0.distcp").stat().st_size
    with (folder / "__0_0.distcp").open("ab") as file:
        torch.save(torch.full((6, 10), torch.nan), file)
        info.offset, info.length = begin, file.tell() - begin
    written(folder, metadata)


def repointed(folder: Path, piece: Tensor) -> None:
    """The first piece replaced by another tensor."""
    metadata = metadata_of(folder)
    _, info = first(metadata)
    with (folder / "new.distcp").open("wb") as file:
        torch.save(piece, file)
        info.relative_path, info.offset, info.length = "new.distcp", 0, file.tell()
    written(folder, metadata)


def flipped(raw: bytes) -> bytes:
    """A value of the first tensor changed: its checksum is not."""
    at = raw.index(STATE[NAME][6, 0].numpy().tobytes())
    return raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :]


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a file is missing": (lambda f: (f / "__1_0.distcp").unlink(), "G702"),
    "a file is cut off": (on_file(lambda raw: raw[:-500]), "G704"),
    "a file is empty": (on_file(lambda raw: b""), "G704"),
    "bytes are changed": (on_file(flipped), "G701"),
    "the archive of a piece is damaged": (on_file(lambda raw: raw.replace(b"PK\x01\x02", b"PKxx")), "G701"),
    "a piece has no place": (edit(lambda m: m.storage_data.pop(first(m)[0])), "G702"),
    "a piece is not in the tensor": (edit(lambda m: m.state_dict_metadata[NAME].chunks.pop()), "G702"),
    "pieces overlap": (edit(lambda m: m.state_dict_metadata[NAME].chunks.append(
        m.state_dict_metadata[NAME].chunks[0])), "G704"),
    "a piece leaves the tensor": (edit(lambda m: setattr(
        m.state_dict_metadata[NAME], "size", torch.Size([12, 19]))), "G704"),
    "the tensor is larger than its pieces": (edit(lambda m: setattr(
        m.state_dict_metadata[NAME], "size", torch.Size([12, 21]))), "G702"),
    "a tensor of terabytes": (edit(lambda m: setattr(
        m.state_dict_metadata[NAME], "size", torch.Size([1 << 40, 20]))), "G702"),
    "another dtype": (edit(lambda m: setattr(m.state_dict_metadata[NAME].properties, "dtype", torch.float16)), "G701"),
    "a wider dtype": (edit(lambda m: setattr(
        m.state_dict_metadata[NAME].properties, "dtype", torch.complex128)), "G701"),
    "places overlap": (edit(lambda m: setattr(first(m, OTHER)[1], "offset", 100)), "G704"),
    "a place is of another tensor": (edit(lambda m: m.storage_data.update({
        MetadataIndex("gone", torch.Size([0, 0])): first(m)[1]})), "G703"),
    "a file that nothing names": (lambda f: (f / "__9_0.distcp").write_bytes(b"x" * 10), "G705"),
    "a piece of another shape": (lambda f: repointed(f, torch.ones(10, 6)), "G701"),
    "a piece of another dtype": (lambda f: repointed(f, torch.ones(6, 10).double()), "G701"),
    "a piece that is no tensor": (lambda f: repointed(f, [torch.ones(6, 10)]), "G701"),  # type: ignore[arg-type]
    "values that are not finite": (not_a_number, "G001"),
    "negative sizes": (edit(lambda m: setattr(m.state_dict_metadata[NAME], "size", (-1, 20))), "G704"),
    "sizes that are no numbers": (edit(lambda m: setattr(m.state_dict_metadata[NAME], "size", ("a", 20))), "G704"),
    "a file outside": (edit(lambda m: setattr(first(m)[1], "relative_path", "../__0_0.distcp")), "G704"),
    "the metadata is cut off": (lambda f: os.truncate(f / ".metadata", 900), "refused"),
    "the metadata is of something else": (lambda f: written(f, {"a": 1}), "refused"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGES)
def test_damages_are_named(tmp_path: Path, kind: str) -> None:
    source, (damage, code) = sharded(tmp_path / "dcp"), DAMAGES[kind]
    assert codes(source) == set()
    damage(source)
    assert code in codes(source)
    if code != "refused":
        whole = gonio.check(source)
        assert {tensor.name for tensor in whole.tensors} == set(STATE)  # all are accounted for
        assert len(gonio.measure(source).values()) == 3


def test_transformed_pieces_are_named_and_not_read(tmp_path: Path) -> None:
    source = sharded(tmp_path / "dcp")
    edit(lambda m: setattr(first(m)[1], "transform_descriptors", ["stream.zstd/1"]))(source)
    assert "stream.zstd/1" in gonio.check(source)[NAME].reason


class Runs:
    """Runs `os.mkdir` where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder / "ran"),)


def test_no_code_runs(tmp_path: Path) -> None:
    source = sharded(tmp_path / "dcp")
    metadata = metadata_of(source)
    metadata.planner_data = Runs(tmp_path)
    written(source, metadata)
    for verb in (gonio.check, gonio.measure):
        with pytest.raises(UnreadableFileError, match=r"it holds an object of posix\.mkdir"):
            verb(source)
    shutil.rmtree(source)
    repointed(sharded(tmp_path / "dcp"), Runs(tmp_path))  # type: ignore[arg-type]
    assert "posix.mkdir" in gonio.check(source)[NAME].reason
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("raw", [
    b"\x80\x04\x96" + (1 << 40).to_bytes(8, "little") + b".",  # a bytearray of a terabyte
    b"\x80\x04]r\xff\xff\xff\xff.",  # a memo of four billion places
    b"\x80\x04\x8d" + (1 << 60).to_bytes(8, "little") + b".",
    b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.",
    b"\x80\x02ctorch\nSize\n]\x85R}b.",
    b"\x80\x02ctorch\nload\n.",
    b"\x80\x04]\x94h\x00h\x00e.",
    b"",
])  # fmt: skip
def test_hostile_metadata_are_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(raw)
    with pytest.raises(UnreadableFileError, match="not an intact file"):
        gonio.check(tmp_path)


@pytest.mark.parametrize("times", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_changed_bytes_leave_no_other_error(tmp_path: Path, times: int) -> None:
    source = sharded(tmp_path / "dcp")
    assert fuzz(source, source / ".metadata", times) > 0
    assert fuzz(source, source / "__1_0.distcp", times) > 0


# --- written by several processes ------------------------------------------------------------------------------------


def save_fsdp() -> str:
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 12, bias=False), nn.Linear(12, 5, bias=False))
    plain = {name: value.detach().clone() for name, value in model.state_dict().items()}
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    folder = os.environ["GONIO_DCP"]
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    torch.save(plain, f"{folder}.pt")
    return "saved"


@pytest.mark.slow
def test_what_fsdp_writes_equals_the_whole_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GONIO_DCP", str(tmp_path / "dcp"))
    (tmp_path / "ranks").mkdir()
    spawned(save_fsdp_checked, tmp_path / "ranks")
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) > 1
    plain = torch.load(tmp_path / "dcp.pt", weights_only=True)
    assert_equal_figures(tmp_path / "dcp", plain, tmp_path / "safe")
    assert gonio.check(tmp_path / "dcp").contents.beside > 0


def save_fsdp_checked() -> dict[str, int]:
    save_fsdp()
    return {"saved": 1}


LAYERS, WIDTH = (int(os.environ.get(f"GONIO_DCP_{name}", least)) for name, least in (("LAYERS", 1), ("WIDTH", 64)))


def decoder() -> Iterator[tuple[str, Tensor]]:
    """The tensors of a decoder in bf16, one after the other: 27 layers of width 2048 are 1.5 billion parameters."""
    hidden, vocabulary = 11 * WIDTH // 4, 125 * WIDTH // 8
    shapes = {
        "embed_tokens.weight": (vocabulary, WIDTH),
        "norm.weight": (WIDTH,),
        "lm_head.weight": (vocabulary, WIDTH),
    }
    for layer in range(LAYERS):
        shapes |= {f"layers.{layer}.self_attn.{name}_proj.weight": (WIDTH, WIDTH) for name in "qkvo"}
        shapes |= {f"layers.{layer}.mlp.{name}_proj.weight": (hidden, WIDTH) for name in ("gate", "up")}
        shapes |= {f"layers.{layer}.mlp.down_proj.weight": (WIDTH, hidden)}
        shapes |= {f"layers.{layer}.{name}_layernorm.weight": (WIDTH,) for name in ("input", "post_attention")}
    pool = torch.randn(vocabulary * WIDTH + (1 << 16), generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    for number, (name, shape) in enumerate(shapes.items()):
        place = number * 7919 % (1 << 16)
        yield name, pool[place : place + prod(shape)].view(shape)


def save_decoder() -> dict[str, int]:
    """Each rank saves its rows."""
    from torch import distributed as dist
    from torch.distributed.tensor import DTensor, Shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    held = {
        name: DTensor.from_local(
            whole.chunk(mesh.size())[mesh.get_local_rank()].clone(), mesh, [Shard(0)],
            run_check=False, shape=whole.shape, stride=whole.stride(),
        )
        for name, whole in decoder()
    }  # fmt: skip
    dcp.save({"model": held}, checkpoint_id=os.environ["GONIO_DCP"])
    return {"saved": 1}


@pytest.mark.slow
def test_a_decoder_that_ranks_write_equals_its_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit. GONIO_WORLD ranks; GONIO_DCP_LAYERS and GONIO_DCP_WIDTH set the size of the model."""
    monkeypatch.setenv("GONIO_DCP", str(tmp_path / "dcp"))
    for folder in ("ranks", "safe"):
        (tmp_path / folder).mkdir()
    spawned(save_decoder, tmp_path / "ranks")
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == WORLD
    names, shard = dict[str, str](), dict[str, Tensor]()
    for name, whole in decoder():
        shard[name] = whole.clone()
        names[name] = f"model-{len(names) // 32:05d}.safetensors"
        if len(names) % 32 == 0:
            save_file(shard, tmp_path / "safe" / names[name])
            shard.clear()
    if shard:
        save_file(shard, tmp_path / "safe" / names[name])
    (tmp_path / "safe" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    ours, theirs = (gonio.measure(tmp_path / folder).to_dict() for folder in ("dcp", "safe"))
    assert [row["name"] for row in ours["tensors"]] != []
    by_name = [{row["name"]: row for row in found["tensors"]} for found in (ours, theirs)]
    assert by_name[0] == by_name[1]
    assert [found["path"] for found in ours["findings"]] == [found["path"] for found in theirs["findings"]]
