"""Folders of DeepSpeed's universal checkpoints: a folder for each weight, with a file for it and for each state of it.

`zero/NAME/fp32.pt` holds {"param": the float32 weight}, already joined over all ranks; `exp_avg.pt`, `exp_avg_sq.pt`
and `step.pt` hold the state of the optimizer. Other files of the folder hold what a trainer saved beside.

References: deepspeed/checkpoint/ds_to_universal.py of DeepSpeed; X. Lian et al., "Universal checkpointing", 2024,
arXiv 2406.18820, section 3.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gonio.escaping import plain
from gonio.measuring.reading.entry import StoredTensor, TensorEntry
from gonio.measuring.reading.optimizers import Raw, fitted
from gonio.measuring.reading.pickles import OF_TORCH, Archive, StoredPart
from gonio.measuring.reading.safetensors_files import damaged
from gonio.measuring.reading.state_dicts import Opened, Problem

_HOME, _WEIGHT, _PARAM = "zero", "fp32.pt", "param"
_MOST = 1 << 20  # folders


def is_universal(folder: Path) -> bool:
    """Whether a folder holds a universal checkpoint."""
    home = folder / _HOME
    return home.is_dir() and any((one / _WEIGHT).is_file() for one in islice(home.iterdir(), 1000))


def archives_in(folder: Path) -> list[Path]:
    """The files of its weights and of their states."""
    return sorted(file for one in islice((folder / _HOME).iterdir(), _MOST) for file in one.glob("*.pt"))


def open_universal(path: Path) -> Opened:
    """The float32 weights of a universal checkpoint, and the state of its optimizer."""
    stored, others, problems = dict[str, StoredTensor](), list[TensorEntry](), list[Problem]()
    states: dict[str, dict[str, Any]] = {}
    for file in archives_in(path):
        name, word = file.parent.name, file.name.removesuffix(".pt")
        try:
            held = _held(file)
            if file.name == _WEIGHT:
                if not isinstance(held, StoredTensor):
                    raise ValueError(f"it holds no tensor under {_PARAM!r}")
                stored[name] = held
            else:
                states.setdefault(name, {})[word] = held
        except Exception as error:  # a hostile pickle provokes almost any of them
            problems.append(Problem("G701", f"{plain(name)}/{file.name}", str(damaged(file, error))))
            if file.name == _WEIGHT:
                others.append(TensorEntry(name, "", None, None, f"its file {file.name} cannot be read"))
    raw = [Raw("optimizer", states, [{"params": list(states)}])] if states else []
    beside = {
        f"{name}/{word}": one
        for name, state in states.items()
        for word, one in state.items()
        if isinstance(one, StoredTensor)
    }
    notes = ["a universal checkpoint of DeepSpeed: its float32 weights"]
    optimizer = fitted(raw, stored, in_order=True)
    return Opened(stored, tuple(others), tuple(notes), beside, tuple(problems), optimizer=optimizer)


def _held(file: Path) -> Any:
    """The tensor in a file, or what else it holds: a number of steps."""
    archive = Archive(file, allowed=OF_TORCH)
    part = archive.content.get(_PARAM) if isinstance(archive.content, dict) else archive.content
    if not isinstance(part, StoredPart):
        return part
    if not archive.holds(part):
        raise ValueError("its archive holds fewer entries than it claims")
    return StoredTensor(part.shape, part.dtype, partial(_read, archive, part), file=file.name)


def _read(archive: Archive, part: StoredPart) -> Tensor:
    found = torch.empty(part.shape, dtype=getattr(torch, part.dtype))
    try:
        archive.read(part, found)
    except Exception as error:
        raise damaged(archive.path, error) from error
    return found
