"""The configuration file of `gonio measure`: `gonio.toml`, or `[tool.gonio]` in `pyproject.toml`."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from gonio.errors import ConfigError, GonioError, closest, listing
from gonio.measuring import Suppression

__all__ = ["find", "suppression"]

OWN, SHARED = "gonio.toml", "pyproject.toml"
KEYS = ("ignore", "per-layer-ignores")
MOST_BYTES = 1 << 20  # it is written by hand


def suppression(file: str | None, ignore: list[str], *, start: Path | None = None) -> Suppression | None:
    """What the options and the configuration file suppress together; None if neither says anything.

    Args:
        file: the configuration file; None: the nearest one upward from `start`, the working directory.
        ignore: of `--ignore`: codes, several of them joined by commas or not.

    Raises:
        ConfigError: with everything that is wrong in the file.
        UnknownNameError: for a code on the command line that no rule has.
    """
    path = Path(file) if file is not None else find(start or Path.cwd())
    codes = [code for words in ignore for code in words.split(",") if code.strip()]
    Suppression(tuple(codes))  # a slip on the command line is said before the file is read
    table = {} if path is None else _table(path)
    if path is None and not codes:
        return None
    origin = " and ".join([*([_shown(path)] if path is not None else []), *(["--ignore"] if codes else [])])
    return Suppression((*table.get("ignore", ()), *codes), tuple(table.get("per-layer-ignores", {}).items()), origin)


def find(start: Path) -> Path | None:
    """The nearest file upward: `gonio.toml`, or a `pyproject.toml` that has `[tool.gonio]`."""
    start = start.resolve()
    for folder in (start, *start.parents):
        if (folder / OWN).is_file():
            return folder / OWN
        if (folder / SHARED).is_file() and "gonio" in _tools(_read(folder / SHARED)):
            return folder / SHARED
    return None


def _table(path: Path) -> dict[str, Any]:
    """The checked content."""
    content = _read(path)
    if path.name == SHARED:
        if "gonio" not in _tools(content):
            raise ConfigError(str(path), ["it has no table [tool.gonio]"])
        content = _tools(content)["gonio"]
    problems = _problems(content, where="[tool.gonio]" if path.name == SHARED else "the file")
    if problems:
        raise ConfigError(str(path), problems)
    return content


def _read(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            raise ConfigError(str(path), ["it is not a regular file" if path.exists() else "there is no such file"])
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(str(path), [f"it is larger than {MOST_BYTES // 1024} KiB"])
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(str(path), [f"it is not valid TOML: {error}"]) from error


def _tools(content: dict[str, Any]) -> dict[str, Any]:
    tools = content.get("tool")
    return tools if isinstance(tools, dict) else {}


def _problems(table: Any, *, where: str) -> list[str]:
    """Everything that is wrong, one sentence each."""
    if not isinstance(table, dict):
        return [f"{where} must be a table, found {_cut(table)}"]
    found = [_unknown(key, where) for key in table if key not in KEYS]
    found += _wrong_codes("ignore", table.get("ignore", []))
    layers = table.get("per-layer-ignores", {})
    if not isinstance(layers, dict):
        return [*found, f'per-layer-ignores is a table of selectors, as in "head.*" = ["G101"]; found {_cut(layers)}']
    for selector, codes in layers.items():
        at = f'per-layer-ignores."{selector}"'
        found += _wrong_codes(at, codes) or _wrong_selector(at, selector)
    return found


def _unknown(key: str, where: str) -> str:
    near = closest(key, KEYS)
    if key == "tool":
        hint = f"in {OWN} the keys stand at the top, without [tool.gonio]"
    else:
        hint = f"did you mean {listing(near)}?" if near else f"there are {listing(KEYS)}"
    return f"{where} has no key {key!r}; {hint}"


def _wrong_codes(at: str, codes: Any) -> list[str]:
    if not isinstance(codes, list) or not all(isinstance(code, str) for code in codes):
        return [f'{at} is a list of codes of rules, as in ["G101"]; found {_cut(codes)}']
    return [said for code in codes if (said := _refused(Suppression, (code,)))]


def _wrong_selector(at: str, selector: str) -> list[str]:
    if not selector:
        return [f"{at} selects nothing; codes for the whole model belong in ignore"]
    said = _refused(Suppression, (), ((selector, ()),))
    return [f"{at}: {said}"] if said else []


def _refused(make: type[Suppression], *values: Any) -> str:
    try:
        make(*values)
    except GonioError as error:
        return str(error)
    return ""


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _shown(path: Path) -> str:
    """As a reader in the working directory would write it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") and relative.count("..") > 2 else relative
