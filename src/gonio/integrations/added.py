"""A method of one object that was replaced, and how to put it back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gonio.errors import AlreadyAppliedError

__all__ = ["AddedPenalty", "replaced_"]

_MARK = "_gonio_penalty"


class AddedPenalty:
    """A penalty in a trainer's loss; `undo_` takes it out."""

    def __init__(self, owner: Any, method: str) -> None:
        self._owner, self._method = owner, method

    def undo_(self) -> None:
        """Give the object its own method back. A second call does nothing."""
        vars(self._owner).pop(self._method, None)


def replaced_(owner: Any, method: str, new: Callable[..., Any]) -> AddedPenalty:
    """Let the object's own attribute stand before its class's method.

    Raises:
        AlreadyAppliedError: a penalty was added to it before.
    """
    if hasattr(getattr(owner, method), _MARK):
        raise AlreadyAppliedError("add_penalty_", type(owner).__name__, "a penalty")
    setattr(new, _MARK, True)
    setattr(owner, method, new)
    return AddedPenalty(owner, method)
