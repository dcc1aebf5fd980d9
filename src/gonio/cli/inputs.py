"""The models, sources and batches that words of the command line stand for."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from gonio import models
from gonio.cli.app import print_err, users_code
from gonio.errors import InvalidArgumentError, UnknownNameError, UnreadableFileError, with_article
from gonio.measuring.reading.hub import snapshot
from gonio.measuring.reading.shards import KINDS
from gonio.measuring.reading.source import CheckpointPart, absent, nearly_a_file
from gonio.measuring.reading.torch_files import load_torch
from gonio.messages import say
from gonio.models.by_name import LIBRARIES, is_user_code
from gonio.seeding import RandomInput, state_kept
from gonio.surgery import Selector, as_selector
from gonio.surgery.configured import Configured
from gonio.surgery.equivalent import fitting, outputs

_BATCH_SUFFIXES = (".pt", ".pth", ".npy", ".safetensors")
_SOURCE_SUFFIXES = (*KINDS, ".json")
_MOST_NUMBERS = 2**28  # in a batch, 1 GiB; more is a typing error


def build_model(spec: str, *, seed: int = 0, **sizes: int) -> nn.Module:
    """A model by a name that :func:`gonio.models.resolve` takes; the same random weights for the same seed."""
    with users_code(spec):
        return drawn(models.resolve(spec), seed=seed, **sizes)


def drawn(factory: Callable[..., nn.Module], *, seed: int, **sizes: int) -> nn.Module:
    """A model of a factory; the same random weights for the same seed."""
    with state_kept():
        torch.manual_seed(seed)
        return factory(**sizes)


def build_empty(spec: str) -> nn.Module:
    """A model by such a name for its names and shapes: on the meta device, unless it cannot be built there."""
    with users_code(spec):
        factory = models.resolve(spec)
        if isinstance(factory.function, Configured):
            return factory.function.empty()
        try:
            with torch.device("meta"), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "for .*: copying from a non-meta", UserWarning)  # no value is needed
                return drawn(factory, seed=0)
        except Exception:  # a model that computes with its weights while it is built
            return drawn(factory, seed=0)


def build_of_width(spec: str, width: int, *, seed: int) -> nn.Module:
    """The model that a factory of the user builds for a width; the same random weights for the same seed.

    Raises:
        UserCodeError: if the user's own code raises anything.
        InvalidArgumentError: for a name that is not of the user's own code, or if it builds no model.
    """
    if not is_user_code(spec):
        raise InvalidArgumentError("--widths takes a file.py:factory of the width", f"{spec!r:.80}", "Write a factory.")
    with users_code(spec):
        model = drawn(lambda: models.resolve(spec).function(width), seed=seed)
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(
            say("{spec} builds a model of a width", spec=spec), type(model).__name__, "Return the model."
        )
    return model


def read_where(word: str | None) -> Selector:
    """The modules that an option `--where` selects."""
    try:
        return as_selector(word)
    except OverflowError as error:  # of re.compile
        raise InvalidArgumentError(
            "--where takes a selector", f"{word!r:.80} ({error})", "Write e.g. conv2."
        ) from error


def in_cache(word: str) -> str | None:
    """The folder of a model on a hub in the cache of this machine, with a message; None for any other word."""
    found = None if Path(word).exists() or word in models.BUILT_IN else snapshot(word)
    if found is None:
        return None
    print_err(say("{word}: the copy in the cache of this machine, {found}", word=word, found=found))
    return str(found)


def read_source(word: str, *, seed: int, key: str | None = None) -> str | CheckpointPart | nn.Module:
    """The path of a checkpoint if the word is one or looks like one, otherwise a model, with a message."""
    word = in_cache(word) or word
    path = Path(word)
    of_library = word.partition(":")[0] in LIBRARIES  # transformers:FOLDER/config.json is no file
    if (path.exists() or (path.suffix in _SOURCE_SUFFIXES and not of_library)) and not is_user_code(word):
        return word if key is None else CheckpointPart(word, key)
    if is_user_code(word):
        built = build_model(word, seed=seed)
        print_err(say("{word} built with seed {seed}", word=word, seed=seed))
        return built
    try:
        found = models.resolve(word)
    except UnknownNameError:
        if nearly_a_file(path) or _is_path(word):
            raise absent(word) from None
        raise
    print_err(
        say(
            "{word}: random weights (seed {seed}); nothing is downloaded. To measure trained ones name their file, or "
            "a hub's snapshot.",
            word=word,
            seed=seed,
        )
    )
    return drawn(found, seed=seed)


def _is_path(word: str) -> bool:
    """Whether a word is a path by its form: from a place such as `.` or `~`, or in a folder that is there."""
    path = Path(word)
    return word.startswith((".", "~")) or path.is_absolute() or (len(path.parts) > 1 and path.parent.is_dir())


def read_batch(word: str) -> Any:
    """The values of :func:`read_input`, where it does not matter whether they are data."""
    return _values(read_input(word))


def _values(given: Any) -> Any:
    return given.value if isinstance(given, RandomInput) else given


def read_input(word: str) -> Any:
    """A batch: `2x3x224x224` for standard normal numbers, the same in every call, or a file.

    A file holds one tensor (`.pt`, `.npy`, `.safetensors`), or named tensors, which become keyword arguments.
    """
    path = Path(word)
    if path.suffix in _BATCH_SUFFIXES:
        return _batch_from_file(path)
    sizes = word.replace(",", "x").split("x")
    digits = all(size.isascii() and size.isdigit() and len(size) <= 10 and int(size) > 0 for size in sizes)
    if not digits or math.prod(map(int, sizes)) > _MOST_NUMBERS:
        takes = f"--batch takes positive sizes joined by x, or a file ({', '.join(_BATCH_SUFFIXES)})"
        raise InvalidArgumentError(takes, f"{word!r:.80}", "Write e.g. 2x3x224x224.")
    return RandomInput(tuple(map(int, sizes)))


def _batch_from_file(path: Path) -> Any:
    if not path.is_file():
        raise absent(path)
    try:
        if path.suffix == ".npy":
            content: Any = torch.from_numpy(numpy.load(path, allow_pickle=False))
        elif path.suffix == ".safetensors":
            content = load_file(path)
        else:
            content = load_torch(path)
    except UnreadableFileError:
        raise
    except Exception as error:  # a hostile or damaged file provokes almost anything
        why = f"it is damaged or holds more than tensors ({(str(error).splitlines() or [''])[0][:200]})"
        raise UnreadableFileError(str(path), why, "Save one tensor, or a dict of tensors.") from error
    named = isinstance(content, dict) and content and all(isinstance(value, Tensor) for value in content.values())
    if not (isinstance(content, Tensor) or named):
        found = f"it holds {with_article(type(content).__name__)}"
        raise UnreadableFileError(str(path), found, "Save one tensor, or a dict of them.")
    return next(iter(content.values())) if named and len(content) == 1 else content


def check_runs(model: nn.Module, batch: Any) -> None:
    """Run the model on a batch of the user; its error becomes one of `--batch`."""
    batch = _values(batch)
    with fitting(model, batch, "--batch", always=True):
        outputs(model, batch)
