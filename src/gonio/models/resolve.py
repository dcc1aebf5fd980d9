"""From a model's name on the command line to a factory of models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from gonio.errors import InvalidArgumentError, UnknownNameError
from gonio.models.built_in import BUILT_IN
from gonio.models.libraries import LIBRARIES
from gonio.models.user_code import accepted, is_user_code, load_function


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
