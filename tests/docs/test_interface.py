"""The public names with their signatures are those of tests/interface.txt."""

from __future__ import annotations

import difflib
import functools

import pytest

import interface
from gonio.errors import MissingExtraError


def test_the_public_interface_is_the_one_written_down() -> None:
    """A name that is gone or renamed needs a line in CHANGELOG.md; see docs/releasing.md."""
    try:
        now = interface.interface()
    except MissingExtraError as error:
        pytest.skip(str(error))
    written = interface.FILE.read_text(encoding="utf-8")
    changes = difflib.unified_diff(written.splitlines(), now.splitlines(), "written", "now", lineterm="", n=0)
    assert now == written, "run `make interface` and look at the difference:\n" + "\n".join(changes)


def test_how_signatures_are_written() -> None:
    class Control:
        def method(self, a: int, *, b: object = object(), c: object = len) -> None: ...

        @property
        def size(self) -> int:
            return 1

        @functools.cached_property
        def kept(self) -> int:
            return 2

        @classmethod
        def made(cls, x: float = 1e-3) -> Control:
            return cls()

        def _hidden(self) -> None: ...

    Control.__module__ = "gonio.control"
    assert dict(interface.members(Control)) == {
        "kept": "",
        "made": "(x=0.001)",
        "method": "(self, a, *, b=<object object>, c=len)",
        "size": "",
    }
