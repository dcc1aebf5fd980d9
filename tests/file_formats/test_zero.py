"""Folders of DeepSpeed's ZeRO, stages 1 to 3: equal figures, what is beside, planted damages, hostile pickles."""

from __future__ import annotations

import argparse
import os
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gonio
from file_formats.cases import DRAW, STATE, assert_equal_figures, codes, fuzz
from gonio.errors import UnreadableFileError

WEIGHTS: dict[str, Tensor] = {**STATE, "norm.gain": torch.randn(7, generator=DRAW), "norm.bias": torch.ones(5)}
GROUPS = [list(STATE), ["norm.gain", "norm.bias"]]  # with and without weight decay
RANKS = 2


@pytest.fixture(autouse=True)
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """DeepSpeed's classes under their names while files are written; reading needs none of them."""
    made = {}
    for home in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.zero", "deepspeed.runtime.fp16"):
        monkeypatch.setitem(sys.modules, home, types.ModuleType(home))
    for home, name in (("zero.config", "ZeroStageEnum"), ("fp16.loss_scaler", "LossScaler")):
        module = types.ModuleType(f"deepspeed.runtime.{home}")
        bases: Any = IntEnum(name, {"one": 1, "two": 2, "three": 3}) if name == "ZeroStageEnum" else type(name, (), {})
        bases.__module__ = module.__name__
        bases.__qualname__ = name
        setattr(module, name, bases)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        made[name] = bases
    return made


def flat(names: list[str]) -> Tensor:
    return torch.cat([WEIGHTS[name].flatten() for name in names])


def partitions(stage: int) -> list[list[Tensor]]:
    """Of each rank the flat partition of each group."""
    if stage < 3:
        whole = []
        for names in GROUPS:
            vector = flat(names)
            padded = torch.cat([vector, torch.zeros(-len(vector) % (2 * RANKS))])
            whole.append(padded.chunk(RANKS))
        return [[group[rank].clone() for group in whole] for rank in range(RANKS)]
    found = []
    for rank in range(RANKS):
        groups = []
        for names in GROUPS:
            pieces = []
            for name in names:
                value = WEIGHTS[name].flatten()
                size = -(-len(value) // RANKS)
                piece = value[rank * size : (rank + 1) * size]
                pieces.append(torch.cat([piece, torch.zeros(size - len(piece))]))
            groups.append(torch.cat(pieces))
        found.append(groups)
    return found


def save(
    folder: Path, stage: int, classes: dict[str, Any], change: Callable[[dict[str, Any]], Any] | None = None
) -> Path:
    """As `deepspeed.runtime.engine` writes them; `change` edits the content of all files by their names."""
    folder.mkdir(exist_ok=True)
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    files: dict[str, Any] = {}
    for rank, groups in enumerate(partitions(stage)):
        state = {
            "loss_scaler": classes["LossScaler"](),
            "zero_stage": classes["ZeroStageEnum"](stage),
            "partition_count": [RANKS] * len(groups) if stage < 3 else RANKS,
            key: groups,
            "base_optimizer_state": [{"exp_avg": torch.ones(len(group)), "step": 3} for group in groups],
            "ds_version": "0.18.2",
        }
        files[f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = {"optimizer_state_dict": state, "ds_config": {}}
    shapes = [OrderedDict((name, WEIGHTS[name].shape) for name in names) for names in GROUPS]
    model = {
        "module": {**{name: value.bfloat16() for name, value in WEIGHTS.items()}, "norm.count": torch.ones(4, 4)},
        "buffer_names": ["norm.count"],
        "param_shapes": shapes,
        "shared_params": {"head.weight": "layers.0.weight"},
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "args": argparse.Namespace(lr=0.1),
        "ds_version": "0.18.2",
    }
    files["mp_rank_00_model_states.pt" if stage < 3 else "zero_pp_rank_0_mp_rank_00_model_states.pt"] = model
    if stage == 3:
        files["zero_pp_rank_1_mp_rank_00_model_states.pt"] = model
    if change is not None:
        change(files)
    for name, content in files.items():
        torch.save(content, folder / name)
    return folder


EXPECTED = {**WEIGHTS, "norm.count": torch.ones(4, 4), "head.weight": STATE["layers.0.weight"]}


def test_lists_of_the_same_lists_are_read_once(tmp_path: Path, deepspeed: dict[str, Any]) -> None:
    nested: list[Any] = [torch.ones(2)]
    for _ in range(14):
        nested = [nested] * 8  # 8 ** 14 places of one tensor
    first = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    source = save(tmp_path / "zero", 2, deepspeed, lambda files: files[first].update(ds_config=nested))
    assert gonio.check(source).contents.beside == 2 * RANKS + len(WEIGHTS) + 1


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_equal_weights_have_equal_figures(tmp_path: Path, stage: int, deepspeed: dict[str, Any]) -> None:
    source = save(tmp_path / "zero", stage, deepspeed)
    assert_equal_figures(source, EXPECTED, tmp_path / "safe")
    found = gonio.check(source)
    assert found.contents.beside == 2 * RANKS + len(WEIGHTS)  # moments, and the copy in 16 bits
    assert f"ZeRO stage {stage}, 2 partitions of the float32 weights" in found.notes


def test_a_folder_of_steps_names_the_step(tmp_path: Path, deepspeed: dict[str, Any]) -> None:
    save(tmp_path / "global_step3", 2, deepspeed)
    with pytest.raises(UnreadableFileError, match="its folders do: global_step3"):
        gonio.measure(tmp_path)


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_weights_are_read_from_their_fragments(tmp_path: Path, stage: int, deepspeed: dict[str, Any]) -> None:
    value = torch.randn(5, 5, generator=DRAW)

    def freeze(files: dict[str, Any]) -> None:
        models = [files[name] for name in files if "model_states" in name]
        pieces = [value.flatten()[:13], torch.cat([value.flatten()[13:], torch.zeros(1)])] if stage == 3 else [value]
        for name in [name for name in files if "model_states" in name]:
            files[name] = {**files[name], "frozen_param_shapes": {"base.weight": value.shape}}
        for name, piece in zip([name for name in files if "model_states" in name], pieces, strict=True):
            files[name]["frozen_param_fragments"] = {"base.weight": piece}
        assert models

    source = save(tmp_path / "zero", stage, deepspeed, freeze)
    assert_equal_figures(source, {**EXPECTED, "base.weight": value}, tmp_path / "safe")


RANK_0, RANK_1 = (f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2))
MODEL = "mp_rank_00_model_states.pt"
KEY = "single_partition_of_fp32_groups"


def content(change: Callable[[Any], Any], name: str = RANK_0) -> Callable[[dict[str, Any]], Any]:
    return lambda files: change(files[name].get("optimizer_state_dict", files[name]))


def shapes(change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], Any]:
    return content(lambda model: change(model["param_shapes"][0]), MODEL)


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a rank is missing": (lambda files: files.pop(RANK_1), "G702"),
    "the model's states are missing": (lambda files: files.pop(MODEL), "refused"),
    "partitions of two sizes": (content(lambda state: state[KEY].__setitem__(0, state[KEY][0][:-8])), "G704"),
    "a partition of a group is missing": (content(lambda state: state[KEY].pop()), "G704"),
    "no partitions": (content(lambda state: state.pop(KEY)), "G704"),
    "partitions that are no vectors": (content(lambda state: state[KEY].__setitem__(
        0, state[KEY][0].reshape(2, -1))), "G704"),
    "partitions of two dtypes": (content(lambda state: state[KEY].__setitem__(0, state[KEY][0].double())), "G704"),
    "a shape that is too large": (shapes(lambda held: held.update({"layers.2.weight": torch.Size([13, 20])})), "G704"),
    "a tensor of terabytes": (shapes(lambda held: held.update({"layers.2.weight": torch.Size([1 << 40, 20])})), "G704"),
    "a shape that is too small": (shapes(lambda held: held.update({"layers.2.weight": torch.Size([1, 20])})), "G705"),
    "a weight without shape": (shapes(lambda held: held.pop("layers.2.weight")), "G705"),
    "a shape that is none": (shapes(lambda held: held.update({"layers.2.weight": (-1, 20)})), "refused"),
    "a stage that is none": (content(lambda state: state.update(zero_stage=7)), "refused"),
    "partitions of no number": (content(lambda state: state.update(partition_count=0)), "refused"),
    "a value that is not finite": (content(lambda state: state[KEY][0].__setitem__(5, torch.nan)), "G001"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGES)
def test_damages_are_named(tmp_path: Path, kind: str, deepspeed: dict[str, Any]) -> None:
    change, code = CHANGES[kind]
    source = save(tmp_path / "zero", 2, deepspeed, change)
    assert code in codes(source)
    if code == "refused":
        with pytest.raises(UnreadableFileError, match="cannot be read"):
            gonio.measure(source)
    elif "weight" not in kind:
        names = {tensor.name for tensor in gonio.check(source).tensors if not tensor.beside}
        assert set(STATE) <= names  # all are accounted for


def flipped(file: Path) -> None:
    raw = file.read_bytes()
    at = raw.index(STATE["layers.0.weight"].numpy().tobytes()[:400])
    file.write_bytes(raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :])


@pytest.mark.parametrize(("damage", "code"), [
    (flipped, "G711"), (lambda file: os.truncate(file, 900), "G701"), (lambda file: os.truncate(file, 0), "G701"),
    (lambda file: file.write_bytes(file.read_bytes()[:-30]), "G701"), (lambda file: file.unlink(), "G702"),
])  # fmt: skip
def test_damaged_files_are_named(
    tmp_path: Path, damage: Callable[[Path], Any], code: str, deepspeed: dict[str, Any]
) -> None:
    source = save(tmp_path / "zero", 2, deepspeed)
    assert codes(source) == set()
    damage(source / RANK_0)
    assert code in codes(source)


def test_tensor_parallelism_is_refused_by_name(tmp_path: Path, deepspeed: dict[str, Any]) -> None:
    source = save(tmp_path / "zero", 2, deepspeed)
    torch.save({}, source / "zero_pp_rank_0_mp_rank_01_optim_states.pt")
    with pytest.raises(UnreadableFileError, match="divided over ranks of tensor parallelism"):
        gonio.measure(source)


class Runs:
    """Runs `os.mkdir` where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder / "ran"),)


def test_a_class_that_is_not_on_the_list_is_named(tmp_path: Path, deepspeed: dict[str, Any]) -> None:
    source = save(tmp_path / "zero", 2, deepspeed, content(lambda state: state.update(evil=Runs(tmp_path))))
    found = gonio.check(source)
    assert ["posix.mkdir" in finding.found for finding in found.findings if finding.code == "G701"] == [True]
    assert {tensor.name for tensor in gonio.measure(source).tensors} >= set(STATE)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("times", [100, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [RANK_0, MODEL])
def test_changed_bytes_leave_no_other_error(tmp_path: Path, times: int, name: str, deepspeed: dict[str, Any]) -> None:
    source = save(tmp_path / "zero", 2, deepspeed)
    assert fuzz(source, source / name, times) > 0
