"""Importing a library of models that may be absent, or made for another torch."""

from __future__ import annotations

import importlib
from types import ModuleType

from gonio.errors import MissingExtraError, NotApplicableError

__all__ = ["load_library", "unusable"]


def load_library(package: str, spec: str) -> ModuleType:
    """The package that the model `spec` comes from.

    Raises:
        MissingExtraError: it is not installed.
        NotApplicableError: it is installed, but cannot be imported beside this torch.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise unusable(package, spec, error) from error
        raise MissingExtraError(f"the model {spec!r}", package, "models") from error
    except Exception as error:  # installed, but for another torch: operators or symbols are missing
        raise unusable(package, spec, error) from error


def unusable(package: str, spec: str, error: Exception, *, kind: str = "a model") -> NotApplicableError:
    """The error for a package that is there and does not work; names the first cause."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    why = f"the installed {package} cannot be imported ({type(cause).__name__}: {cause})"
    do = f"Install a {package} that fits this torch."
    if "torchvision::" in str(cause):  # its operators are compiled against one kind of torch
        do = "Install builds of torch and torchvision of one kind, both for the CPU or both for CUDA."
    return NotApplicableError(kind, spec, why, do)
