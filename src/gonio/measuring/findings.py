"""What a rule found."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LEVELS", "Finding"]

LEVELS = ("info", "warn", "error")


@dataclass(frozen=True)
class Finding:
    """One thing about one tensor (or the whole model, path "") that does not look like working weights.

    Attributes:
        code: of the rule; :func:`gonio.measuring.explain` says more.
        level: `error` (it cannot work), `warn` (it hardly works as meant), `info` (worth knowing).
        found: what was found. `chance`: what random weights would show. `do`: what to do about it.
    """

    code: str
    level: str
    path: str
    found: str
    chance: str
    do: str
