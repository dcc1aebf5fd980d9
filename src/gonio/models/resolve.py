"""From a model's name on the command line to a function that builds it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from gonio.errors import InvalidArgumentError, UnknownNameError
from gonio.models.byte_transformer import byte_transformer
from gonio.models.digits_cnn import digits_cnn
from gonio.models.from_transformers import from_transformers
from gonio.models.library import load_library
from gonio.models.pointnet import pointnet
from gonio.models.user_code import accepted, is_user_code, load_function

__all__ = ["BUILT_IN", "ModelFactory", "resolve"]

BUILT_IN: Mapping[str, Callable[..., nn.Module]] = {
    "byte-transformer": byte_transformer,
    "digits-cnn": digits_cnn,
    "pointnet": pointnet,
}


@dataclass(frozen=True)
class ModelFactory:
    """Builds fresh, randomly initialised models of one kind.

    Attributes:
        spec: the name it was resolved from.
        keywords: what `function` calls `num_classes` and `in_channels`, where it takes them.
    """

    spec: str
    function: Callable[..., nn.Module]
    keywords: Mapping[str, str]

    def __call__(self, *, num_classes: int | None = None, in_channels: int | None = None) -> nn.Module:
        """A new model. A size that the function has no parameter for is left to the function."""
        sizes = {"num_classes": num_classes, "in_channels": in_channels}
        given = {self.keywords[k]: v for k, v in sizes.items() if v is not None and k in self.keywords}
        model = self.function(**given)
        if not isinstance(model, nn.Module):
            raise InvalidArgumentError(
                f"{self.spec!r} must build a model", f"a {type(model).__name__}", "Return a torch.nn.Module."
            )
        return model


def resolve(spec: str) -> ModelFactory:
    """The factory behind a model's name, with random weights.

    Args:
        spec: `timm:NAME`, `torchvision:NAME`, `transformers:NAME`, a built-in name, or `file.py:factory`, the
            only one that runs code of the user's. What `transformers:` takes as a NAME is a model class
            (`BertModel`), a model type (`bert`), or the path of a `config.json` or of the folder that holds it.
            Nothing is downloaded.

    Raises:
        UnknownNameError: no such model; gives the closest names.
        MissingExtraError: the library is not installed.
        NotApplicableError: it is installed, but cannot be imported beside this torch.
        InvalidArgumentError: a file, or a function in it, is missing.
        UnreadableFileError: a `config.json` is damaged.

    Example:
        >>> gonio.models.resolve("digits-cnn")(num_classes=3).fc2.out_features
        3
    """
    source, colon, name = spec.partition(":")
    if is_user_code(spec):
        return _own(spec, load_function(spec))
    if colon and source in _LIBRARIES:
        return _LIBRARIES[source](spec, name)
    if spec in BUILT_IN:
        return _own(spec, BUILT_IN[spec])
    raise UnknownNameError("model", spec, [*BUILT_IN, *(f"{source}:NAME" for source in _LIBRARIES)])


def _own(spec: str, function: Callable[..., nn.Module]) -> ModelFactory:
    return ModelFactory(spec, function, {k: k for k in accepted(function, ("num_classes", "in_channels"))})


def _timm(spec: str, name: str) -> ModelFactory:
    timm = load_library("timm", spec)
    if not timm.is_model(name):
        raise UnknownNameError("timm model", name, timm.list_models())
    function = functools.partial(timm.create_model, name, pretrained=False)
    return ModelFactory(spec, function, {"num_classes": "num_classes", "in_channels": "in_chans"})


def _torchvision(spec: str, name: str) -> ModelFactory:
    models = load_library("torchvision", spec).models
    if name not in models.list_models():
        raise UnknownNameError("torchvision model", name, models.list_models())
    function = functools.partial(models.get_model, name, weights=None)
    return ModelFactory(spec, function, {"num_classes": "num_classes"})


def _transformers(spec: str, name: str) -> ModelFactory:
    function, keywords = from_transformers(spec, name)
    return ModelFactory(spec, function, keywords)


_LIBRARIES: Mapping[str, Callable[[str, str], ModelFactory]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "transformers": _transformers,
}
