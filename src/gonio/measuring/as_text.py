"""What a terminal would show, as a string."""

from __future__ import annotations

import io
import shutil

from rich.console import Console, RenderableType

__all__ = ["as_text"]


def as_text(shown: RenderableType) -> str:
    """`shown` without colours, as wide as the terminal, or 100 columns where there is none."""
    stream = io.StringIO()
    width = shutil.get_terminal_size((100, 24)).columns
    Console(file=stream, width=width, color_system=None, legacy_windows=False).print(shown)
    return "\n".join(line.rstrip() for line in stream.getvalue().rstrip("\n").splitlines())
