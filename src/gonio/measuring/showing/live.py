"""A page that is written anew while a network trains."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from gonio.errors import InvalidArgumentError

SECONDS = 10
"""The least time between two versions of a page, and after which a browser loads it anew."""
_SHARE = 0.02  # of the time, which writing the page may take


class LivePage:
    """Writes a page from time to time; the file is replaced whole, so that a browser never sees half of it.

    Example:
        >>> import tempfile
        >>> from gonio.measuring.showing.live import LivePage
        >>> page = LivePage(Path(tempfile.mkdtemp()) / "run.html")
        >>> page.renew(lambda: "first"), page.renew(lambda: "too early")
        (True, False)
        >>> page.path.read_text()
        'first'
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path, self._clock, self._due = path, clock, float("-inf")

    def renew(self, make: Callable[[], str]) -> bool:
        """Write the page that `make` returns, unless it is too early; whether it was written."""
        began = self._clock()
        if began < self._due:
            return False
        self.write(make())
        ended = self._clock()
        self._due = ended + max(SECONDS, (ended - began) / _SHARE)
        return True

    def write(self, text: str) -> None:
        """Write the page now."""
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
        try:
            draft.write_text(text, encoding="utf-8")
            draft.replace(self.path)
        finally:
            draft.unlink(missing_ok=True)


def checked_page(page: str | os.PathLike[str], optimizer: object) -> Path:
    """The path of a page of a :class:`gonio.Tracker`.

    Raises:
        InvalidArgumentError: if it does not end in .html, its folder does not exist, or there is no optimizer.
    """
    path = Path(page)
    if path.suffix != ".html":
        raise InvalidArgumentError("Tracker(page=) is the path of a page", repr(str(path)), "Let it end in .html.")
    if not path.parent.is_dir():
        raise InvalidArgumentError("Tracker(page=) is written into a folder", f"no folder {path.parent}", "Create it.")
    if optimizer is None:
        raise InvalidArgumentError("Tracker(page=) shows steps with optimizer=", "none", "Pass the optimizer.")
    return path
