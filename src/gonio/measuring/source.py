"""What can be measured, and its tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from gonio.errors import InvalidArgumentError
from gonio.escaping import redact
from gonio.measuring.adapters import entries_of_adapters
from gonio.measuring.checkpoint import state_in
from gonio.measuring.from_file import entries_of_file
from gonio.measuring.from_model import entries_of_model
from gonio.measuring.from_state import Contents, entries_of_mapping

__all__ = ["Source", "contents_of", "name_of"]

Source = nn.Module | Mapping[str, Any] | str | os.PathLike[str]


def name_of(source: Source) -> str:
    """What the source is called in tables."""
    if isinstance(source, nn.Module):
        return type(source).__name__
    return redact(os.fspath(source)) if isinstance(source, (str, os.PathLike)) else "state dict"


def contents_of(source: Source, base: Source | None = None) -> Contents:
    """The source's tensors with, for each adapter, what it adds.

    Args:
        base: of a source that holds adapters, the model that they adapt.

    Raises:
        InvalidArgumentError, UnreadableFileError: as :func:`gonio.measure`.
    """
    found = _contents(source)
    if base is not None and not found.adapters:
        raise InvalidArgumentError(
            "measure(base=) adds adapters to the weights that they adapt",
            f"{name_of(source)} without adapters",
            "Pass the adapters first and the model that they adapt as base, or no base.",
        )
    held = {} if base is None else {entry.path: entry for entry in _contents(base).entries}
    return replace(found, entries=[*found.entries, *entries_of_adapters(found.adapters, held)])


def _contents(source: Source) -> Contents:
    if isinstance(source, nn.Module):
        return Contents(entries_of_model(source), [])
    if isinstance(source, (str, os.PathLike)):
        return entries_of_file(source)
    if not isinstance(source, Mapping):
        raise InvalidArgumentError(
            "measure() takes a model, a state dict or a path",
            type(source).__name__,
            "For one tensor use the functions of gonio.geometry.",
        )
    state = state_in(source, what="the mapping")
    return entries_of_mapping(state.state, state.notes)
