"""Checkpoints of the command line: a state dict and the recipe of its model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import gonio
from gonio.cli.app import check_folders, print_err
from gonio.cli.inputs import build_model, in_cache
from gonio.errors import GonioError, InvalidArgumentError, NotApplicableError, UnreadableFileError, listing
from gonio.measuring.reading.adapters import AdapterConfig, adapters_in, may_hold_adapters
from gonio.measuring.reading.configurations import Configurations
from gonio.measuring.reading.entry import StoredTensor, clean_names
from gonio.measuring.reading.fitting import common_prefix, compared, shapes_of
from gonio.measuring.reading.opened import intact
from gonio.measuring.reading.shards import KINDS, is_index
from gonio.measuring.reading.source import absent, files_in, open_files
from gonio.measuring.reading.torch_files import SUFFIXES, mapped_content, state_of_torch
from gonio.messages import counted, joined, say
from gonio.parametrizations.checkpoints import kinds_in
from gonio.recipes import Recipe

_SUFFIXES = (".safetensors", ".pt", ".pth")
_RECIPE, _HASH, _SEED = "gonio.recipe", "gonio.recipe_hash", "gonio.seed"
_FOLDED, _VERSION, _TORCH = "gonio.folded_recipe_hash", "gonio.version", "gonio.torch"


@dataclass(frozen=True)
class Checkpoint:
    """A state dict and the recipe that was applied to its model.

    Attributes:
        folded: hash of the recipe that was folded into the tensors; empty if there was none.
    """

    path: str
    state: Mapping[str, Any]
    recipe: Recipe | None = None
    seed: int = 0
    folded: str = ""

    def metadata(self) -> dict[str, str]:
        """The text that the file holds beside the tensors."""
        made_by = {_VERSION: gonio.__version__, _TORCH: str(torch.__version__)}
        if self.recipe is not None:
            text, seed = self.recipe.to_yaml(), str(self.seed)
            return {**made_by, _RECIPE: text, _HASH: self.recipe.hash, _SEED: seed}
        return {**made_by, _FOLDED: self.folded} if self.folded else made_by


def read(path: str, *, key: str | None = None) -> Checkpoint:
    """Read a checkpoint, or a model of a hub in the cache of this machine, as data; no code in it runs.

    Args:
        key: of the state dict to read, where a checkpoint of torch holds several.
    """
    path = in_cache(path) or path
    file = Path(path)
    files = files_in(file)[0] if file.is_dir() else [file]
    if not files[0].exists():
        raise absent(path)
    state: Mapping[str, Any]
    metadata: Mapping[str, Any]
    if len(files) > 1 or files[0].is_dir() or is_index(files[0]):
        state, metadata = _parts(files, key or "")
    else:
        _check_loads(files[0])
        if files[0].suffix != ".safetensors":
            held, content = state_of_torch(files[0], key or "")
            state, metadata = held.state, content if held.at else {}
        else:
            state, metadata = _safetensors(files[0]) if key is None else _parts(files, key)
    recipe, seed = _recipe_in(metadata, path)
    return Checkpoint(path, state, recipe, seed, str(metadata.get(_FOLDED, "")))


def _recipe_in(metadata: Mapping[str, Any], path: str) -> tuple[Recipe | None, int]:
    """The recipe that a checkpoint states, and its seed."""
    seed, text, expected = str(metadata.get(_SEED, 0)), metadata.get(_RECIPE), metadata.get(_HASH)
    recipe = Recipe.from_yaml(text, origin=f"the recipe in {path}") if isinstance(text, str) else None
    if recipe is not None and expected not in (None, recipe.hash):
        found = f"its recipe {recipe.name!r} does not have the hash that the file states"
        raise UnreadableFileError(path, found, "It was changed: apply the recipe to a plain checkpoint again.")
    return recipe, int(seed) if seed.isdecimal() else 0


def write(checkpoint: Checkpoint, given: Checkpoint | None = None) -> None:
    """Write a checkpoint to a temporary file, then rename it: a kill leaves the old file as it was.

    Args:
        given: the one that was read; a line says which of its dtypes the written one lacks.
    """
    target = Path(checkpoint.path)
    draft, metadata = target.with_name(f".{target.name}.{os.getpid()}.part"), checkpoint.metadata()
    try:
        if target.suffix == ".safetensors":
            # Tied tensors share memory, which the format refuses; loading ties them again.
            tensors = {name: tensor.detach().clone().contiguous() for name, tensor in checkpoint.state.items()}
            save_file(tensors, draft, metadata={"format": "pt", **metadata})
        else:
            torch.save({"state_dict": dict(checkpoint.state), **metadata}, draft)
        with draft.open("rb") as stream:
            os.fsync(stream.fileno())
        draft.replace(target)
    except BaseException as error:
        draft.unlink(missing_ok=True)
        if isinstance(error, (RuntimeError, SafetensorError)):  # so both writers report a full disk
            why = str(error).split("\n", 1)[0][:200]
            raise OSError(
                say("{path} could not be written ({why}); check the space on its disk", path=checkpoint.path, why=why)
            ) from error
        raise
    before, after = (_floats({} if one is None else one.state) for one in (given, checkpoint))
    if lost := sorted(before - after):
        print_err(
            say(
                "its {before} numbers are written as {after}, which the model has",
                before=", ".join(lost),
                after=", ".join(sorted(after)),
            )
        )


def _floats(state: Mapping[str, Any]) -> set[str]:
    """The dtypes of the floating numbers of a state dict."""
    values = (value for value in state.values() if isinstance(value, Tensor))
    return {str(value.dtype).removeprefix("torch.") for value in values if value.is_floating_point()}


def restored_model(checkpoint: Checkpoint, spec: str, *, recipe: Recipe | None = None) -> nn.Module:
    """The model of a checkpoint, with its recipe applied and its weights.

    Args:
        recipe: that was applied to the model, if the checkpoint does not contain it.
    """
    model, used = build_model(spec), recipe or checkpoint.recipe
    if used is not None:
        _apply_(used, model, seed=checkpoint.seed)
    load_into_(model, checkpoint)
    return model


def _apply_(recipe: Recipe, model: nn.Module, *, seed: int) -> None:
    penalty = recipe.apply_(model, seed=seed).penalty
    if penalty is not None:
        penalty.undo_()


def model_of(path: str, spec: str, built: nn.Module) -> nn.Module:
    """The model whose tensors a checkpoint has, without its weights: `built`, or a new one with the stated recipe."""
    file, metadata = Path(path), dict[Any, Any]()
    if file.suffix in _SUFFIXES and file.is_file():
        with suppress(GonioError):  # of a damaged file, of which the check tells more
            content = _texts(file) if file.suffix == ".safetensors" else mapped_content(file)
            metadata = {**content} if isinstance(content, Mapping) else {}
    recipe, seed = _recipe_in(metadata, path)
    if recipe is None:
        return built
    model = build_model(spec)
    _apply_(recipe, model, seed=seed)
    return model


def _texts(path: Path) -> Mapping[str, str]:
    """The texts in the header of a safetensors file."""
    with intact(path), safe_open(path, framework="pt", device="cpu") as file:
        return file.metadata() or {}


def load_into_(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Load every tensor; none may be missing or unexpected.

    A file of transformers names a tied weight once; one of a trainer has the name of its attribute before all names.
    """
    own, state = model.state_dict(keep_vars=True), checkpoint.state
    if not own.keys() & state.keys():
        state = {clean: state[name] for name, clean in clean_names(state).items()}
        start = common_prefix(state, own)
        state = {name.removeprefix(start): tensor for name, tensor in state.items()}
    known = {id(own[name]): tensor for name, tensor in state.items() if name in own}
    tied = {name: known[id(tensor)] for name, tensor in own.items() if id(tensor) in known}
    try:
        model.load_state_dict({**tied, **state}, strict=True)
    except (RuntimeError, TypeError, ValueError) as error:
        found = compared(shapes_of(own), shapes_of(checkpoint.state)).said or f"{error!s:.300}"
        if adapted := _adapted(checkpoint):
            told = {"layers": counted(len(adapted), "layer"), "names": listing(adapted, limit=3)}
            why = say("it holds an adapter of {layers} ({names}), and --model is for a whole model", **told)
            merge = say("Merge the adapter into its base first (peft: merge_and_unload).")
            raise NotApplicableError(say("the checkpoint {path!r}", path=checkpoint.path), "", why, merge) from error
        do = say(
            "Name the model of the checkpoint, with its number of classes (file.py:factory); "
            "gonio check CKPT --model MODEL lists all that differs."
        )
        if checkpoint.folded:
            do = say(
                "Layers were folded in it, so that it has other tensors than the model. Take the file before the fold."
            )
        if not model.state_dict().keys() & checkpoint.state.keys():
            do = say(
                "No name is in both: the checkpoint is of another architecture. Name its own model (file.py:factory)."
            )
            if starts := _prefixes(checkpoint.state, own):
                after = joined([*map(repr, starts)], last=" and ")
                do = say("The model's names are in it after {named}. Save one of these parts alone.", named=after)
        kinds = kinds_in(checkpoint.state)
        if kinds or any(".parametrizations." in name for name in checkpoint.state):
            named = f" ({listing(kinds)})" if kinds else ""
            do = say(
                "Its weights are parametrized{named}: name a factory that parametrizes the model, or fold them first "
                "(gonio fold CKPT --recipe RECIPE).",
                named=named,
            )
        raise NotApplicableError(say("the checkpoint {path!r}", path=checkpoint.path), "", found, do) from error


def _prefixes(state: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """What stands before the names of the whole model, where a checkpoint holds it beside other parts."""
    first = next(iter(own), "")
    starts = [name.removesuffix(first) for name in state if first and name.endswith(f".{first}")]
    return [start for start in starts if all(f"{start}{name}" in state for name in own)]


def _adapted(checkpoint: Checkpoint) -> list[str]:
    """The layers of which a checkpoint holds adapters; their values are not read."""
    if not may_hold_adapters(checkpoint.state):
        return []
    config = Configurations.beside([Path(checkpoint.path)]).adapter
    stored = {name: StoredTensor.of(t) for name, t in checkpoint.state.items() if isinstance(t, Tensor)}
    return list(dict.fromkeys(adapter.path for adapter in adapters_in(stored, AdapterConfig(config))))


def check_target(path: str, reads: Sequence[str | None]) -> None:
    """Check before the work that the result can be written, and over none of the files that the command reads."""
    _check_suffix(path)
    check_folders({"output": path}, reads)


def _check_loads(file: Path) -> None:
    """Refuse a file whose tensors have no names of a module's: they can be measured, and not loaded into a model."""
    known = (".safetensors", *SUFFIXES)
    if file.suffix in KINDS and file.suffix not in known:
        raise InvalidArgumentError(
            say("the weights of a model are loaded from {known}", known=listing(known)),
            repr(file.suffix),
            say("gonio check {file} and gonio measure {file} read it without a model.", file=file),
        )
    _check_suffix(file.name, known)


def _check_suffix(path: str, known: tuple[str, ...] = _SUFFIXES) -> None:
    if Path(path).suffix not in known:
        raise InvalidArgumentError(
            say("a checkpoint ends in {known}", known=listing(known)), repr(Path(path).suffix), "Use .safetensors."
        )


def _parts(files: list[Path], key: str) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """The tensors of a checkpoint in several files."""
    opened = open_files(files, key, of_folder=True)
    if opened.refusal is not None:
        raise opened.refusal
    return {name: stored.load() for name, stored in opened.stored.items()}, {}


def _safetensors(path: Path) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    with intact(path), safe_open(path, framework="pt", device="cpu") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
