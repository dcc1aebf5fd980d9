"""Tasks by name: the built-in ones and the user's own."""

from __future__ import annotations

from gonio.compare.tasks.digits import digits
from gonio.compare.tasks.resolve import BUILT_IN, resolve

__all__ = ["BUILT_IN", "digits", "resolve"]
