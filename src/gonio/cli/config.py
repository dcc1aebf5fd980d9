"""The findings that `gonio.toml`, or `[tool.gonio]` in `pyproject.toml`, suppresses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gonio.cli.settings import COMMANDS, OWN, SHARED, nearest, own_table, read
from gonio.errors import ConfigError, GonioError, closest, listing
from gonio.measuring import Suppression

KEYS = ("ignore", "per-layer-ignores", *COMMANDS)


def suppression(file: str | None, ignore: list[str]) -> Suppression | None:
    """The suppressed findings of the options and the configuration file; None if there are none.

    Args:
        file: the configuration file; None: the nearest one, from the working directory upward.
        ignore: of `--ignore`: codes, each of them or several joined by commas.
    """
    path = Path(file) if file is not None else nearest(Path.cwd())
    codes = [code for word in ignore for code in word.split(",") if code.strip()]
    Suppression(tuple(codes))  # an unknown code on the command line is reported before the file is read
    table = {} if path is None else _table(path)
    if path is None and not codes:
        return None
    shown = "" if path is None else os.path.relpath(path)
    far = shown.startswith("..") and shown.count("..") > 2
    origin = " and ".join(name for name in (str(path) if far else shown, "--ignore" if codes else "") if name)
    return Suppression((*table.get("ignore", ()), *codes), tuple(table.get("per-layer-ignores", {}).items()), origin)


def _table(path: Path) -> dict[str, Any]:
    """The checked content."""
    content: Any = read(path)
    if path.name == SHARED:
        content = own_table(content)
        if content is None:
            raise ConfigError(str(path), ["it has no table [tool.gonio]"])
    problems = _problems(content, where="[tool.gonio]" if path.name == SHARED else "the file")
    if problems:
        raise ConfigError(str(path), problems)
    return content


def _problems(table: Any, *, where: str) -> list[str]:
    """Every problem, one sentence each."""
    if not isinstance(table, dict):
        return [f"{where} must be a table; found {table!r:.80}"]
    found = []
    for key in (key for key in table if key not in KEYS):
        near = closest(key, KEYS)
        hint = f"did you mean {listing(near)}?" if near else f"its keys are {listing(KEYS)}"
        if key == "tool":
            hint = f"in {OWN} the keys stand at the top, without [tool.gonio]"
        found.append(f"{where} has no key {key!r:.80}; {hint}")
    found += _code_problems("ignore", table.get("ignore", []))
    layers = table.get("per-layer-ignores", {})
    if not isinstance(layers, dict):
        example = '"head.*" = ["G101"]'
        return [*found, f"per-layer-ignores must be a table of selectors such as {example}; found {layers!r:.80}"]
    for selector, codes in layers.items():
        at = f'per-layer-ignores."{selector}"'
        refused = _refused((), ((selector, ()),)) if selector else "use ignore for the whole model"
        found += _code_problems(at, codes) or ([f"{at}: {refused}"] if refused else [])
    return found


def _code_problems(at: str, codes: Any) -> list[str]:
    if not isinstance(codes, list) or not all(isinstance(code, str) for code in codes):
        return [f'{at} must be a list of rule codes such as ["G101"]; found {codes!r:.80}']
    return [refused for code in codes if (refused := _refused((code,)))]


def _refused(*values: Any) -> str:
    """The message of the error that a Suppression of these values raises; empty if none is."""
    try:
        Suppression(*values)
    except (GonioError, OverflowError) as error:  # OverflowError: of re.compile
        return str(error)
    return ""
