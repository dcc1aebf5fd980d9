"""Models of transformers from a configuration: the class that a `config.json` names, with random weights.

Nothing is downloaded, and no code beside a configuration is run.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from gonio.errors import (
    InvalidArgumentError,
    MissingExtraError,
    NotApplicableError,
    UnknownNameError,
    UnreadableFileError,
)
from gonio.system import memory

CONFIG = "config.json"
_MOST_BYTES = 1 << 20
_DO = "Name a folder with a config.json, or build the model in a function of your own (file.py:factory)."
# Settings of how to run a model, which may name code elsewhere; the layers do not depend on them.
_RUN_SETTINGS = ("auto_map", "attn_implementation", "experts_implementation", "transformers_version", "torch_dtype")


@dataclass(frozen=True)
class Configured:
    """A factory of models of one class of transformers from one configuration."""

    spec: str  # the name it was resolved from, for messages
    model: Callable[..., nn.Module]
    config: Callable[..., Any]  # takes keywords that replace values of the configuration

    def __call__(self, **sizes: int) -> nn.Module:
        """A model with random weights, unless it is larger than this machine's memory."""
        config = self.configuration(**sizes)
        with self._building(), torch.device("meta"):
            planned = sum(p.numel() * p.element_size() for p in self.model(config).parameters())
        if planned > (memory() or planned):
            why = f"its weights would take {planned / 2**30:.0f} GiB, more than this machine's memory"
            raise _unbuilt(self.spec, why, _DO)
        with self._building():
            return self.model(self.configuration(**sizes))

    def empty(self, **sizes: int) -> nn.Module:
        """A model whose weights are on the meta device; what it computes from its configuration has its values."""
        config = self.configuration(**sizes)
        for name in ("_attn_implementation", "_experts_implementation"):
            if hasattr(config, name):
                setattr(config, name, "eager")  # written in functions of torch
        with self._building(), _EmptyParameters():
            return self.model(config)

    def configuration(self, **sizes: int) -> Any:
        """The configuration with these values."""
        with self._building():
            return self.config(**sizes)

    @contextmanager
    def _building(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the library raises anything for an incomplete or invalid configuration
            found = " ".join(str(error).split())[:200]
            why = f"its configuration builds no model ({type(error).__name__}: {found})"
            raise _unbuilt(self.spec, why, _DO) from error


def _unbuilt(spec: str, why: str, do: str) -> NotApplicableError:
    return NotApplicableError("", spec, why, do, action="build the model")


class _EmptyParameters(TorchFunctionMode):
    """Puts tensors that are made without values on the meta device, as layers make their weights."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def configured(library: ModuleType, spec: str, path: Path) -> tuple[Configured, Any]:
    """The factory of the models of a `config.json`, or of a folder that holds one, and their class."""
    data = read_config(path / CONFIG if path.is_dir() else path)
    if "quantization_config" in data:
        why = "its configuration is of a quantised model"
        raise _unbuilt(spec, why, "Name the original model.")
    names, listed = _class_names(library), data.get("architectures")
    known = [name for name in listed if isinstance(name, str) and name in names] if isinstance(listed, list) else []
    model = model_class(library, spec, known[0] if known else str(data.get("model_type", "")))
    kept = {key: value for key, value in data.items() if key not in _RUN_SETTINGS and not key.startswith("_")}
    return Configured(spec, model, lambda **sizes: model.config_class.from_dict({**kept, **sizes})), model


def read_config(path: Path) -> dict[str, Any]:
    """The content of a `config.json`."""
    if not path.is_file():
        do = "Name a folder with a config.json, a class (BertModel) or a type (bert); nothing is downloaded."
        raise InvalidArgumentError("'transformers:PATH' needs the path of a config.json", f"no file {str(path)!r}", do)
    try:
        with path.open("rb") as stream:
            data = json.loads(stream.read(_MOST_BYTES))
    except (ValueError, RecursionError) as error:
        raise UnreadableFileError(str(path), f"it is not JSON ({error})", "Copy or download it again.") from error
    if not isinstance(data, dict):
        raise UnreadableFileError(str(path), "it does not contain a mapping", "Name the config.json of a model.")
    return data


def model_class(library: ModuleType, spec: str, name: str) -> Any:
    """The class with this name, or the base class of the models of this type."""
    names = _class_names(library)
    types = library.models.auto.modeling_auto.MODEL_MAPPING_NAMES
    base = types.get(name, ())
    for candidate in (name, base) if isinstance(base, str) else (name, *base):
        try:
            found = getattr(library, candidate) if candidate in names else None  # imported on access
        except Exception as error:  # a dependency is missing, or built for another torch
            raise unusable("transformers", spec, error) from error
        if getattr(found, "config_class", None) is not None:
            return found
    raise UnknownNameError("transformers model", name, {*types, *names})


@cache  # the library takes seconds to list them
def _class_names(library: ModuleType) -> frozenset[str]:
    """The names of model classes; classes that are not imported yet are recognised by their names."""
    ends = (name for name in dir(library) if name.endswith("Model") or "For" in name)
    return frozenset(name for name in ends if not name.startswith(("_", "Auto")) and "PreTrainedModel" not in name)


def load_library(package: str, spec: str) -> ModuleType:
    """Import the package of the model `spec`."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise unusable(package, spec, error) from error
        raise MissingExtraError(f"the model {spec!r}", package, "models") from error
    except Exception as error:  # built for another torch: operators or symbols are missing
        raise unusable(package, spec, error) from error


def unusable(package: str, spec: str, error: Exception, *, action: str = "build the model") -> NotApplicableError:
    """The error for an installed package that cannot be imported, with the first cause."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    why = f"the installed {package} cannot be imported ({type(cause).__name__}: {cause})"
    do = f"Install a version of {package} that is compatible with this torch."
    if "torchvision::" in str(cause):  # its operators are compiled for one kind of torch
        do = "Install builds of torch and torchvision of one kind, both for the CPU or both for CUDA."
    return NotApplicableError("", spec, why, do, action=action)
