"""Checkpoints of the command line: named tensors, and the recipe under which they make sense."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import gonio
from gonio.errors import InvalidArgumentError, NotApplicableError, UnreadableFileError, listing
from gonio.measuring.checkpoint import state_in
from gonio.recipes import Recipe

__all__ = ["SUFFIXES", "Checkpoint", "check_target", "load_into_", "read", "write"]

SUFFIXES = (".safetensors", ".pt", ".pth")
_RECIPE, _HASH, _SEED = "gonio.recipe", "gonio.recipe_hash", "gonio.seed"
_FOLDED, _VERSION, _TORCH = "gonio.folded_recipe_hash", "gonio.version", "gonio.torch"


@dataclass(frozen=True)
class Checkpoint:
    """A state dict, and the recipe that was applied to the model that it belongs to.

    Attributes:
        folded: hash of the recipe that was folded into the tensors; empty if there was none.
    """

    path: str
    state: Mapping[str, Any]
    recipe: Recipe | None = None
    seed: int = 0
    folded: str = ""

    def said(self) -> dict[str, str]:
        """What the file says beside the tensors."""
        made_by = {_VERSION: gonio.__version__, _TORCH: str(torch.__version__)}
        if self.recipe is not None:
            text, seed = self.recipe.to_yaml(), str(self.seed)
            return {**made_by, _RECIPE: text, _HASH: self.recipe.hash, _SEED: seed}
        return {**made_by, _FOLDED: self.folded} if self.folded else made_by


def read(path: str) -> Checkpoint:
    """Read a checkpoint as data; no code in it runs.

    Raises:
        UnreadableFileError: if it is missing, damaged, of an unknown kind, holds more than data, or a recipe
            that is not the one it was written with.
    """
    file = Path(path)
    if not file.is_file():
        raise UnreadableFileError(path, "there is no such file", "Check the path.")
    _check_suffix(path)
    state, said = _safetensors(file) if file.suffix == ".safetensors" else _torch(file)
    seed, folded = str(said.get(_SEED, 0)), str(said.get(_FOLDED, ""))
    return Checkpoint(path, state, _recipe(path, said), int(seed) if seed.isdecimal() else 0, folded)


def _recipe(path: str, said: Mapping[str, Any]) -> Recipe | None:
    text, wanted = said.get(_RECIPE), said.get(_HASH)
    if not isinstance(text, str):
        return None
    recipe = Recipe.from_yaml(text, origin=f"the recipe in {path}")
    if wanted is not None and wanted != recipe.hash:
        found = f"its recipe {recipe.name!r} has another hash than the file says"
        raise UnreadableFileError(path, found, "Somebody changed it: apply the recipe to a plain checkpoint again.")
    return recipe


def write(checkpoint: Checkpoint) -> None:
    """Write a checkpoint beside its path and move it there when it is whole: a kill leaves what was there before."""
    target = Path(checkpoint.path)
    draft, said = target.with_name(f".{target.name}.{os.getpid()}.part"), checkpoint.said()
    try:
        if target.suffix == ".safetensors":
            # Tied tensors share memory, which the format refuses; loading ties them again.
            tensors = {name: tensor.detach().clone().contiguous() for name, tensor in checkpoint.state.items()}
            save_file(tensors, draft, metadata={"format": "pt", **said})
        else:
            torch.save({"state_dict": dict(checkpoint.state), **said}, draft)
        with draft.open("rb") as stream:
            os.fsync(stream.fileno())
        draft.replace(target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def load_into_(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Load every tensor; nothing may be missing or left over.

    Raises:
        NotApplicableError: with the names that do not fit.
    """
    try:
        model.load_state_dict(dict(checkpoint.state), strict=True)
    except (RuntimeError, TypeError, ValueError) as error:
        lines = [line.strip() for line in str(error).splitlines()[1:] if line.strip()] or [str(error)]
        do = "Name the model that the checkpoint is of, with its number of classes (file.py:factory)."
        raise NotApplicableError("the checkpoint", checkpoint.path, listing(lines, limit=4), do) from error


def check_target(path: str) -> None:
    """Find out before the work that the result could not be written.

    Raises:
        InvalidArgumentError: if the suffix is unknown or the folder missing.
    """
    _check_suffix(path)
    if not Path(path).parent.is_dir():
        raise InvalidArgumentError(f"{path!r} is to be written", f"no folder {str(Path(path).parent)!r}", "Make it.")


def _check_suffix(path: str) -> None:
    if Path(path).suffix not in SUFFIXES:
        raise InvalidArgumentError(
            f"a checkpoint ends in {listing(SUFFIXES)}", repr(Path(path).suffix), "Use .safetensors."
        )


def _safetensors(path: Path) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except Exception as error:  # the reader's own errors, and what a hostile header provokes
        raise UnreadableFileError(str(path), f"it is not intact ({error})", "Copy or download it again.") from error


def _torch(path: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a hostile pickle provokes almost any of them
        raise UnreadableFileError(
            str(path),
            f"it is damaged or holds more than tensors and plain containers ({str(error).splitlines()[0][:200]})",
            "Code in a file is never run here: save model.state_dict(), best as .safetensors.",
        ) from error
    found = state_in(content, what=repr(path.name))
    return found.state, content if found.key else {}
