"""`transformers:NAME`: a model of Hugging Face's library from a configuration, with random weights and no download."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from gonio.errors import InvalidArgumentError, NotApplicableError, UnknownNameError, UnreadableFileError
from gonio.models.library import load_library, unusable

__all__ = ["Configured", "from_transformers"]

_CONFIG = "config.json"
_MOST_BYTES = 1 << 20
_DO = "Name a folder with a config.json, or build the model in a function of your own (file.py:factory)."
# What a configuration says about how to run a model, which may name code elsewhere; the layers do not depend on it.
_ABOUT_RUNNING = ("auto_map", "attn_implementation", "experts_implementation", "transformers_version", "torch_dtype")


@dataclass(frozen=True)
class Configured:
    """Builds models of one class from one configuration.

    Attributes:
        model: the class.
        config: builds the configuration from keywords that replace its values.
    """

    spec: str
    model: Callable[..., nn.Module]
    config: Callable[..., Any]

    def __call__(self, **sizes: int) -> nn.Module:
        """A model with random weights.

        Raises:
            NotApplicableError: if the configuration builds no model, or one larger than the memory.
        """
        config = self.configuration(**sizes)
        with self._building(), torch.device("meta"):
            planned = sum(p.numel() * p.element_size() for p in self.model(config).parameters())
        if planned > _memory():
            why = f"its weights would take {planned / 2**30:.0f} GiB, more than this machine's memory"
            raise NotApplicableError("a model", self.spec, why, _DO)
        with self._building():
            return self.model(self.configuration(**sizes))

    def configuration(self, **sizes: int) -> Any:
        """The configuration with these values in it."""
        with self._building():
            return self.config(**sizes)

    @contextmanager
    def _building(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # what a library makes of a configuration that says too little, or nonsense
            found = " ".join(str(error).split())[:200]
            why = f"its configuration builds no model ({type(error).__name__}: {found})"
            raise NotApplicableError("a model", self.spec, why, _DO) from error


def from_transformers(spec: str, name: str) -> tuple[Configured, dict[str, str]]:
    """The model behind a name, and what it calls `num_classes` and `in_channels`, where it has them.

    Args:
        spec: as the user wrote it, for messages.
        name: a model class (`BertModel`), a model type (`bert`), both with the sizes that the library
            gives them by default, or the path of a `config.json` or of a folder that holds one.

    Raises:
        UnknownNameError: no such class or type; gives the closest.
        InvalidArgumentError: no such file. Names of a model hub are not looked up.
        UnreadableFileError: the file is no configuration.
        NotApplicableError: the configuration is of a quantised model.
    """
    library = load_library("transformers", spec)
    if name and (name.endswith(".json") or "/" in name or Path(name).is_dir()):
        return _from_file(library, spec, Path(name))
    model = _model_class(library, spec, name)
    return _sized(Configured(spec, model, model.config_class), model)


def _sized(found: Configured, model: Any) -> tuple[Configured, dict[str, str]]:
    keywords = {}
    if "Classification" in model.__name__:
        keywords["num_classes"] = "num_labels"
    if hasattr(found.configuration(), "num_channels"):
        keywords["in_channels"] = "num_channels"
    return found, keywords


def _from_file(library: ModuleType, spec: str, path: Path) -> tuple[Configured, dict[str, str]]:
    data = _read(path / _CONFIG if path.is_dir() else path)
    if "quantization_config" in data:
        raise NotApplicableError(
            "a model", spec, "its configuration is of a quantised model", "Name the model that it was made from."
        )
    kind = str(data.get("model_type", ""))
    names = _class_names(library)
    model = _model_class(library, spec, next((a for a in _architectures(data) if a in names), kind))
    kept = {key: value for key, value in data.items() if key not in _ABOUT_RUNNING and not key.startswith("_")}
    return _sized(Configured(spec, model, lambda **sizes: model.config_class.from_dict({**kept, **sizes})), model)


def _architectures(data: Mapping[str, Any]) -> list[str]:
    found = data.get("architectures")
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        do = "Name a folder that holds a config.json, a class (BertModel) or a type (bert); nothing is downloaded."
        raise InvalidArgumentError("a model of transformers by its path", f"no file {str(path)!r}", do)
    try:
        with path.open("rb") as stream:
            data = json.loads(stream.read(_MOST_BYTES))
    except (ValueError, RecursionError) as error:
        raise UnreadableFileError(str(path), f"it is no JSON ({error})", "Copy or download it again.") from error
    if not isinstance(data, dict):
        raise UnreadableFileError(str(path), "it holds no mapping", "Name the config.json of a model.")
    return data


def _model_class(library: ModuleType, spec: str, name: str) -> Any:
    """The class of that name, or the base class of the models of that type."""
    names = _class_names(library)
    types = library.models.auto.modeling_auto.MODEL_MAPPING_NAMES
    base = types.get(name, ())
    for candidate in (name, base) if isinstance(base, str) else (name, *base):
        found = _attribute(library, spec, candidate) if candidate in names else None
        if getattr(found, "config_class", None) is not None:
            return found
    raise UnknownNameError("transformers model", name, {*types, *names})


def _class_names(library: ModuleType) -> set[str]:
    """The names that model classes have; what is not imported yet can be told by its name alone."""
    ends = (name for name in dir(library) if name.endswith("Model") or "For" in name)
    return {name for name in ends if not name.startswith(("_", "Auto")) and "PreTrainedModel" not in name}


def _attribute(library: ModuleType, spec: str, name: str) -> Any:
    """A class of the library, which imports it when it is asked for."""
    try:
        return getattr(library, name)
    except Exception as error:  # what it needs is missing, or made for another torch
        raise unusable("transformers", spec, error) from error


def _memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
