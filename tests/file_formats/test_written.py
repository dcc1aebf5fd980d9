"""Folders that DeepSpeed 0.19.8 and megatron-core 0.16.1 wrote (`written/write.py`), beside other readers."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import gonio
from foreign import ONE_PROCESS
from gonio.measuring.reading.deepspeed_files import _CLASSES
from gonio.measuring.reading.pickles import Archive
from gonio.measuring.reading.source import contents_of, optimizer_of

WRITTEN = Path(__file__).parent / "written"
DECAYED, OTHERS = {"0.weight": (16, 12), "3.weight": (6, 16)}, {"0.bias": (16,), "2.weight": (16,), "2.bias": (16,)}
OTHERS["3.bias"] = (6,)


def unpacked(name: str, folder: Path) -> Path:
    shutil.unpack_archive(WRITTEN / f"{name}.zip", folder / name)
    return folder / name


def read(archive: Archive, part: Any) -> Tensor:
    return archive.entries(part).reshape(part.shape)


def moments(source: Path) -> dict[str, dict[str, Tensor]]:
    return {one.name: {word: t.load() for word, t in one.tensors.items()} for one in optimizer_of(source).parameters}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_is_intact_and_its_weights_are_those_of_its_copy_in_16_bits(tmp_path: Path, stage: int) -> None:
    source = unpacked(f"deepspeed-{stage}", tmp_path)
    found = gonio.check(source)
    assert found.verdict == "Intact: 24 tensors are there, and every value is finite."
    assert not found.findings
    weights = {entry.name: entry.read() for entry in contents_of(source).entries}
    assert {name: tuple(w.shape) for name, w in weights.items() if w is not None} == DECAYED | OTHERS
    if stage < 3:  # the third keeps no copy
        archive = Archive(source / "mp_rank_00_model_states.pt", allowed=_CLASSES)
        for name, part in archive.content["module"].items():
            value = weights[name]
            assert value is not None
            assert torch.equal(value.bfloat16(), read(archive, part))


@pytest.mark.parametrize("stage", [1, 2])
def test_moments_of_deepspeed_are_cut_as_its_partitions(tmp_path: Path, stage: int) -> None:
    """The moments of the last rank have a padding that its partition lacks."""
    source = unpacked(f"deepspeed-{stage}", tmp_path)
    files = sorted(source.glob("*_optim_states.pt"))
    archives = [Archive(file, allowed=_CLASSES) for file in files]
    found = moments(source)
    for word in ("exp_avg", "exp_avg_sq"):
        for number, group in enumerate((DECAYED, OTHERS)):
            states = [a.content["optimizer_state_dict"]["base_optimizer_state"]["state"][number] for a in archives]
            flat = torch.cat([read(a, s[word]) for a, s in zip(archives, states, strict=True)])
            for name, shape in group.items():
                size = torch.Size(shape).numel()
                assert torch.equal(found[name][word], flat[:size].view(shape))
                flat = flat[size:]
    rows = {row.name: row for row in gonio.measure(source).optimizer}
    assert {row.step for row in rows.values()} == {5.0}
    assert {row.learning_rate for row in rows.values()} == {0.01}
    assert all(row.relative_update is not None and not row.reason for row in rows.values())


def test_all_stages_of_deepspeed_have_the_same_moments(tmp_path: Path) -> None:
    first, *others = [moments(unpacked(f"deepspeed-{stage}", tmp_path)) for stage in (1, 2, 3)]
    assert first.keys() == DECAYED.keys() | OTHERS.keys()
    for other in others:
        for name, held in first.items():
            for word, value in held.items():
                torch.testing.assert_close(other[name][word], value)


def test_megatron_has_the_values_that_torch_reads(tmp_path: Path) -> None:
    source = unpacked("megatron", tmp_path)
    found = gonio.check(source)
    assert found.verdict == "Intact: 9 tensors are there, and every value is finite."
    assert (found.contents.tensors, found.contents.beside) == (3, 6)
    weights = {entry.name: entry.read() for entry in contents_of(source).entries}
    state = {name: torch.zeros_like(w) for name, w in weights.items() if w is not None}
    mine = moments(source)
    flat = {
        f"optimizer.state.{word}.{name}": torch.zeros_like(v) for name, held in mine.items() for word, v in held.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")
        dcp.load(whole := {**state, **flat}, checkpoint_id=source, **ONE_PROCESS)
    assert all(torch.equal(whole[name], w) for name, w in weights.items() if w is not None)
    assert len(mine) == 2
    for name, held in mine.items():
        assert all(torch.equal(whole[f"optimizer.state.{word}.{name}"], value) for word, value in held.items())
    rows = gonio.measure(source).optimizer
    assert {row.reason for row in rows} == {"the options of its group, such as the learning rate, are not stored"}
    assert all(row.gradient_rms for row in rows)
