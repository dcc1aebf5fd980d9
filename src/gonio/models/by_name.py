"""From a model's name to a factory of models: built-in, of timm, torchvision or transformers, or the user's own.

All have random weights; nothing is downloaded.
"""

from __future__ import annotations

import functools
import importlib
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

from gonio.errors import (
    InvalidArgumentError,
    MissingExtraError,
    NotApplicableError,
    UnknownNameError,
    UnreadableFileError,
)
from gonio.models.built_in import BUILT_IN
from gonio.models.user_code import accepted, is_user_code, load_function

Found = tuple[Callable[..., nn.Module], Mapping[str, str]]
"""A function that builds models, and its names for `num_classes` and `in_channels`."""

_CONFIG = "config.json"
_MOST_BYTES = 1 << 20
_DO = "Name a folder with a config.json, or build the model in a function of your own (file.py:factory)."
# Settings of how to run a model, which may name code elsewhere; the layers do not depend on them.
_RUN_SETTINGS = ("auto_map", "attn_implementation", "experts_implementation", "transformers_version", "torch_dtype")


@dataclass(frozen=True)
class ModelFactory:
    """Builds fresh, randomly initialised models of one kind."""

    spec: str  # the name it was resolved from
    function: Callable[..., nn.Module]  # builds one model
    keywords: Mapping[str, str]  # the names of `num_classes` and `in_channels` among the parameters of `function`

    def __call__(self, *, num_classes: int | None = None, in_channels: int | None = None) -> nn.Module:
        """A new model. Sizes for which `function` has no parameter are ignored."""
        sizes = {"num_classes": num_classes, "in_channels": in_channels}
        given = {self.keywords[k]: v for k, v in sizes.items() if v is not None and k in self.keywords}
        model: Any = self.function(**given)
        if not isinstance(model, nn.Module):
            found = f"a {type(model).__name__}"
            raise InvalidArgumentError(f"{self.spec!r} must build a model", found, "Return a torch.nn.Module.")
        return model


def resolve(spec: str) -> ModelFactory:
    """The factory of the model with this name; models have random weights, and nothing is downloaded.

    Args:
        spec: `timm:NAME`, `torchvision:NAME`, `transformers:NAME`, a built-in name, or `file.py:factory`, the
            only form that runs code of the user. The NAME of `transformers:` is a model class (`BertModel`), a
            model type (`bert`), or the path of a `config.json` or of its folder.

    Raises:
        UnknownNameError: for an unknown name; the message has the closest names.
        MissingExtraError: if the library is not installed.
        NotApplicableError: if it is installed but cannot be imported with this torch.
        InvalidArgumentError: if a file, or the function in it, is missing.
        UnreadableFileError: if a `config.json` is damaged.

    Example:
        >>> gonio.models.resolve("digits-cnn")(num_classes=3).fc2.out_features
        3
    """
    source, colon, name = spec.partition(":")
    if is_user_code(spec):
        function = load_function(spec)
    elif spec in BUILT_IN:
        function = BUILT_IN[spec]
    elif colon and source in LIBRARIES:
        return ModelFactory(spec, *LIBRARIES[source](spec, name))
    elif Path(spec).is_file():
        raise InvalidArgumentError(
            "a model is built by a function: a built-in name, timm:NAME or FILE.py:FUNCTION",
            f"the file {spec!r}",
            "Name the function that builds the model.",
        )
    else:
        raise UnknownNameError("model", spec, [*BUILT_IN, *(f"{source}:NAME" for source in LIBRARIES)])
    return ModelFactory(spec, function, {k: k for k in accepted(function, ("num_classes", "in_channels"))})


# --- libraries ----------------------------------------------------------------------------------------


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


def unusable(package: str, spec: str, error: Exception, *, kind: str = "resolve()") -> NotApplicableError:
    """The error for an installed package that cannot be imported, with the first cause."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    why = f"the installed {package} cannot be imported ({type(cause).__name__}: {cause})"
    do = f"Install a version of {package} that is compatible with this torch."
    if "torchvision::" in str(cause):  # its operators are compiled for one kind of torch
        do = "Install builds of torch and torchvision of one kind, both for the CPU or both for CUDA."
    return NotApplicableError(kind, spec, why, do)


def from_timm(spec: str, name: str) -> Found:
    """The model of timm with this name."""
    timm = load_library("timm", spec)
    if not timm.is_model(name):
        raise UnknownNameError("timm model", name, timm.list_models())
    function = functools.partial(timm.create_model, name, pretrained=False)
    return function, {"num_classes": "num_classes", "in_channels": "in_chans"}


def from_torchvision(spec: str, name: str) -> Found:
    """The model of torchvision with this name."""
    models = load_library("torchvision", spec).models
    if name not in models.list_models():
        raise UnknownNameError("torchvision model", name, models.list_models())
    return functools.partial(models.get_model, name, weights=None), {"num_classes": "num_classes"}


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
        if planned > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
            why = f"its weights would take {planned / 2**30:.0f} GiB, more than this machine's memory"
            raise NotApplicableError("resolve()", self.spec, why, _DO)
        with self._building():
            return self.model(self.configuration(**sizes))

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
            raise NotApplicableError("resolve()", self.spec, why, _DO) from error


def from_transformers(spec: str, name: str) -> tuple[Configured, dict[str, str]]:
    """The model of a class (`BertModel`) or type (`bert`) in the library's default sizes, or of a `config.json`."""
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
        why = "its configuration is of a quantised model"
        raise NotApplicableError("resolve()", spec, why, "Name the original model.")
    names, listed = _class_names(library), data.get("architectures")
    known = [name for name in listed if isinstance(name, str) and name in names] if isinstance(listed, list) else []
    model = _model_class(library, spec, known[0] if known else str(data.get("model_type", "")))
    kept = {key: value for key, value in data.items() if key not in _RUN_SETTINGS and not key.startswith("_")}
    return _sized(Configured(spec, model, lambda **sizes: model.config_class.from_dict({**kept, **sizes})), model)


def _read(path: Path) -> dict[str, Any]:
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


def _model_class(library: ModuleType, spec: str, name: str) -> Any:
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


def _class_names(library: ModuleType) -> set[str]:
    """The names of model classes; classes that are not imported yet are recognised by their names."""
    ends = (name for name in dir(library) if name.endswith("Model") or "For" in name)
    return {name for name in ends if not name.startswith(("_", "Auto")) and "PreTrainedModel" not in name}


LIBRARIES: Mapping[str, Callable[[str, str], Found]] = {
    "timm": from_timm,
    "torchvision": from_torchvision,
    "transformers": from_transformers,
}
