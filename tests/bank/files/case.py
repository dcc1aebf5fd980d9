"""A case of the bank: a file as a tool writes it, with the weights that the tool itself computes from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


@dataclass(frozen=True, kw_only=True)
class File:
    """A file, and what is true of it.

    Attributes:
        source: a path, or a state dict in memory.
        weights: every weight of two or more dimensions that the tool computes, in float64, by its name in the plain
            model (of adapters: in the base).
        refused: names of tensors or weights that are not read, with a part of the reason.
        error: a pattern of the error that refuses the whole source.
        base: of adapters, the state dict of the model that they adapt.
        live: the model of the file, whose layers have the layouts that the file's tensors should get.
        fresh: whether the weights are those of a new model, so that no finding may be above `info`.
        exact: the largest relative deviation.
        folded: a model with these weights whose parametrizations `fold_` replaces by them.
    """

    source: Any
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    error: str = ""
    base: Mapping[str, Tensor] | None = None
    live: nn.Module | None = None
    fresh: bool = True
    exact: float = 2e-6
    folded: nn.Module | None = None


@dataclass(frozen=True)
class Case:
    """`make` writes the file of a tool, `origin`, into an empty folder.

    Attributes:
        slow: whether it takes more than a tenth of a second. `float8`: whether rows of 8-bit floats are read.
    """

    origin: str
    make: Callable[[Path], File]
    slow: bool = False
    float8: bool = False


def floats(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The matrices and kernels of a state dict in float64."""
    return {
        name: value.detach().double()
        for name, value in state.items()
        if isinstance(value, Tensor) and value.ndim > 1 and value.is_floating_point()
    }


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stored(folder: Path, state: Mapping[str, Tensor], config: Mapping[str, Any] | None = None) -> Path:
    """The folder with these tensors and a `config.json`."""
    save_file(
        {name: value.detach().clone().contiguous() for name, value in state.items()}, folder / "model.safetensors"
    )
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def tensors_of(source: Any) -> list[str]:
    """The place of every tensor in a source; of a torch file with the keys of its containers."""
    if not isinstance(source, Mapping):
        path = Path(source)
        found = sorted(path.rglob("*.safetensors")) if path.is_dir() else [path]
        found = [one for one in found if one.is_file()]
        if found and found[0].suffix == ".safetensors":
            names: list[str] = []
            for one in found:
                with safe_open(one, framework="np") as file:
                    names += file.keys()
            return names
        if (path / ".metadata").is_file():
            held = FileSystemReader(path).read_metadata().state_dict_metadata.items()
            return [name for name, value in held if isinstance(value, TensorStorageMetadata)]
        if path.suffix == ".onnx":
            import onnx

            return [tensor.name for tensor in onnx.load(path).graph.initializer]
        if path.suffix == ".gguf":
            import gguf

            return [tensor.name for tensor in gguf.GGUFReader(path).tensors]
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                return list(archive.files)
        candidates = [path] if path.is_file() else [f for end in ("bin", "pt", "pth") for f in path.glob(f"*.{end}")]
        source = torch.load(candidates[0], map_location="cpu", weights_only=False)
    return list(_leaves(source, ""))


def _leaves(held: Any, at: str) -> Any:
    if isinstance(held, Tensor):
        yield at.removeprefix(".")
    elif isinstance(held, (Mapping, list, tuple)):
        for key, value in held.items() if isinstance(held, Mapping) else enumerate(held):
            yield from _leaves(value, f"{at}.{key}")
