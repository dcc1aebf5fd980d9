"""Every public name with its signature, so that a change of the interface is seen in review.

    make interface       # writes tests/interface.txt anew

One line per public name of each public package, and one per public method and property of its classes.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gonio

FILE = Path(__file__).with_suffix(".txt")
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def packages() -> list[str]:
    """The public packages: `gonio`, those that it lists, and the two of functions for decoupled layers."""
    listed = [f"gonio.{name}" for name in gonio.__all__ if inspect.ismodule(getattr(gonio, name))]
    return ["gonio", *sorted([*listed, "gonio.nn.angular", "gonio.nn.magnitude"])]


def default_of(value: Any) -> str:
    """A default without addresses; functions and classes by name."""
    return getattr(value, "__qualname__", None) or ADDRESS.sub("", repr(value))


class _Shown:
    """Its repr is the text: the way to choose how `str(signature)` shows a default."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def signature(member: Any) -> str:
    """Names, kinds and defaults of the parameters; types are left to mypy."""
    try:
        found = inspect.signature(member)
    except (TypeError, ValueError):  # of a built-in
        return "(…)"
    bare = []
    for parameter in found.parameters.values():
        default = parameter.default
        shown = default if default is parameter.empty else _Shown(default_of(default))
        bare.append(parameter.replace(annotation=parameter.empty, default=shown))
    return str(found.replace(parameters=bare, return_annotation=found.empty))


def members(kind: type) -> Iterator[tuple[str, str]]:
    """(name, signature) of the public methods and properties that a class has from classes of gonio."""
    owned = [base for base in kind.__mro__ if base.__module__.partition(".")[0] == "gonio"]
    for name in sorted({name for base in owned for name in vars(base) if not name.startswith("_")}):
        found = inspect.getattr_static(kind, name)
        if isinstance(found, property) or hasattr(found, "func"):  # functools.cached_property
            yield name, ""
        elif isinstance(found, classmethod | staticmethod) or inspect.isfunction(found):
            yield name, signature(getattr(kind, name))


def lines_of(package: str) -> Iterator[str]:
    module = importlib.import_module(package)
    for name in sorted(module.__all__):
        member = getattr(module, name)
        if inspect.ismodule(member):
            continue
        called = inspect.isclass(member) or inspect.isroutine(member)
        yield f"{package}.{name}{signature(member) if called else ''}"
        if inspect.isclass(member) and package != "gonio":  # the home of the class lists its methods
            yield from (f"    .{method}{parameters}" for method, parameters in members(member))


def interface() -> str:
    return "\n".join(line for package in packages() for line in lines_of(package)) + "\n"


if __name__ == "__main__":
    FILE.write_text(interface(), encoding="utf-8")
