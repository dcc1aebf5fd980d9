"""Methods of one object that were replaced, and how to restore them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gonio.errors import AlreadyAppliedError

__all__ = ["AddedPenalty", "replaced_"]

_MARK = "_gonio_penalty"


class AddedPenalty:
    """A penalty in a trainer's loss; `undo_` removes it."""

    def __init__(self, owner: Any, methods: tuple[str, ...]) -> None:
        self._owner, self._methods = owner, methods

    def undo_(self) -> None:
        """Restore the methods of the object's class. A second call has no effect."""
        for method in self._methods:
            vars(self._owner).pop(method, None)


def replaced_(owner: Any, **methods: Callable[..., Any]) -> AddedPenalty:
    """Set methods on the object itself, where they take precedence over those of its class.

    Raises: AlreadyAppliedError if one of them was replaced by this function before.

    Example:
        >>> from gonio.integrations.added import replaced_
        >>> layer = nn.Identity()
        >>> added = replaced_(layer, forward=lambda x: x + 1)
        >>> before = layer(torch.zeros(1))
        >>> added.undo_()
        >>> before, layer(torch.zeros(1))
        (tensor([1.]), tensor([0.]))
    """
    if any(hasattr(getattr(owner, method, None), _MARK) for method in methods):
        raise AlreadyAppliedError("add_penalty_", type(owner).__name__, "a penalty")
    for method, new in methods.items():
        setattr(new, _MARK, True)
        setattr(owner, method, new)
    return AddedPenalty(owner, tuple(methods))
