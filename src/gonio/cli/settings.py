"""Settings from `gonio.toml`, or `[tool.gonio]` in `pyproject.toml`: options of commands, and suppressed findings.

A table with the name of a command holds values of its options: `[measure]` with `batch = "8x3x32x32"`. An option on the
command line wins. A file may not name code or files to write: a folder of somebody else's would otherwise run it.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

from gonio.errors import ConfigError, GonioError, closest, listing
from gonio.escaping import aligned
from gonio.messages import local, say

if TYPE_CHECKING:
    from gonio.measuring import Suppression

OWN, SHARED = "gonio.toml", "pyproject.toml"
COMMANDS = ("measure", "compare", "reproduce", "cost")
"""The commands whose options a file can set."""
SHOW = "--show-settings"
EPILOG = f"{SHOW} shows every setting and where it comes from, and stops. The table [NAME] of gonio.toml sets options."
MOST_BYTES = 1 << 20
_WRITTEN = ("html", "json", "csv", "md", "tex", "output", "journal")
_CODE = re.compile(r"\.py(?::|$)")


@dataclass(frozen=True)
class Setting:
    """What a file may give for an option.

    Attributes:
        parameter: the name in the command's function. `kind`: bool, int, float or str. `several`: whether it is a list.
    """

    parameter: str
    kind: type
    several: bool


def settings_of(function: Callable[..., Any] | None, options: Mapping[str, str]) -> dict[str, Setting]:
    """What a file may give for each option of a command, by the annotations of its function."""
    return {name: Setting(each, *_kind(function.__annotations__[each])) for name, each in options.items()}


def _kind(annotation: Any) -> tuple[type, bool]:
    """The type of a value, and whether the option takes a list of them; a choice and a path are text."""
    if annotation in (bool, int, float):
        return annotation, False
    inner = [each for each in get_args(annotation) if isinstance(each, type) or get_args(each)]
    if get_origin(annotation) is list:
        return _kind(inner[0])[0], True
    inner = [each for each in inner if each is not type(None)]
    return _kind(inner[0]) if inner else (str, False)


def nearest(start: Path) -> Path | None:
    """The nearest file upward: `gonio.toml`, or a `pyproject.toml` that has `[tool.gonio]`."""
    start = start.resolve()
    for folder in (start, *start.parents):
        if (folder / OWN).is_file():
            return folder / OWN
        if (folder / SHARED).is_file() and own_table(read(folder / SHARED)) is not None:
            return folder / SHARED
    return None


def read(path: Path) -> dict[str, Any]:
    """The content of a TOML file."""
    try:
        if not path.is_file():
            raise ConfigError(str(path), ["it is not a regular file" if path.exists() else "there is no such file"])
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(str(path), [f"it is larger than {MOST_BYTES // 1024} KiB"])
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(str(path), [f"it is not valid TOML: {error}"]) from error


def own_table(content: dict[str, Any]) -> Any:
    """The table `[tool.gonio]` of a `pyproject.toml`; None if there is none."""
    tools = content.get("tool")
    return tools.get("gonio") if isinstance(tools, dict) else None


def named_file(words: Sequence[str]) -> Path | None:
    """The file that the words of a command line name by `--config`, else the nearest one."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "--config":
            return Path(following)
        if word.startswith("--config="):
            return Path(word.removeprefix("--config="))
    return nearest(Path.cwd())


def defaults(path: Path | None, command: str, options: Mapping[str, Setting]) -> dict[str, Any]:
    """The values that a file sets for a command, by the names of its parameters.

    Args:
        options: by the name of the option, without dashes before it.

    Raises:
        ConfigError: with every problem of the command's table.
    """
    if path is None or not path.exists():  # a command that takes the file says that it is absent
        return {}
    content = _content(path)
    if not isinstance(content, dict) or not content.keys() <= {*KEYS}:
        raise ConfigError(str(path), _wrong_keys(content, path))
    table = content.get(command, {})
    if not isinstance(table, dict):
        raise ConfigError(str(path), [f"[{command}] must be a table of options; found {table!r:.80}"])
    problems = [found for name, value in table.items() if (found := _problem(command, name, value, options))]
    if problems:
        raise ConfigError(str(path), problems)
    return {options[name].parameter: value for name, value in table.items()}


def _problem(command: str, name: str, value: Any, options: Mapping[str, Setting]) -> str:
    """Why a file cannot set an option to a value, in one sentence; empty if it can."""
    at = f"[{command}] {name:.80}"
    if name not in options or name in ("help", "config"):
        near = closest(name, [each for each in options if each not in ("help", "config")])
        return f"{at} is no option of gonio {command}; " + (
            f"did you mean {listing(near)}?" if near else f"its options are {listing(sorted(options), limit=40)}"
        )
    if name in _WRITTEN:
        return f"{at} is a file to write, which only the command line can name"
    option, values = options[name], value if isinstance(value, list) else [value]
    if name == "script" or any(isinstance(each, str) and _CODE.search(each) for each in values):
        return f"{at} names code, which only the command line can name; found {value!r:.80}"
    if isinstance(value, list) is not option.several or not all(_fits(each, option.kind) for each in values):
        must = f"a list of {_MUST[option.kind]}" if option.several else _MUST[option.kind]
        return f"{at} must be {must}; found {_toml(value):.80}"
    return ""


_MUST: Mapping[type, str] = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}


def _fits(value: Any, kind: type) -> bool:
    """Whether a value of TOML has a type; true and false are no numbers, and a whole number is a number."""
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is kind


def _toml(value: Any) -> str:
    """A value as it stands in the file, as far as its spelling differs from Python's."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def shown(rows: Sequence[tuple[str, Any, str]], path: Path | None) -> str:
    """The settings as a table: the name, the value and where it comes from."""
    where = os.path.relpath(path) if path is not None else say("no gonio.toml, and no [tool.gonio]")
    lines = aligned([(name, _text(value), local(source)) for name, value, source in rows])
    return "\n".join([*lines, local(say("file: {path}", path=where))])


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "–"
    if isinstance(value, bool):  # 0 and 1 are equal to them
        return "true" if value else "false"
    return "–" if value is None or value == "" else str(value)


# --- suppressed findings ----------------------------------------------------------------------------------------------

KEYS = ("ignore", "per-layer-ignores", *COMMANDS)


def suppression(file: str | None, ignore: list[str]) -> Suppression | None:
    """The suppressed findings of the options and the configuration file; None if there are none.

    Args:
        file: the configuration file; None: the nearest one, from the working directory upward.
        ignore: of `--ignore`: codes, each of them or several joined by commas.
    """
    from gonio.measuring import Suppression

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
    content: dict[str, Any] = _content(path)
    if problems := _wrong_keys(content, path):
        raise ConfigError(str(path), problems)
    return content


def _content(path: Path) -> Any:
    """What a file sets: all of it, or `[tool.gonio]` of a `pyproject.toml`."""
    content = read(path)
    if path.name != SHARED:
        return content
    if (table := own_table(content)) is None:
        raise ConfigError(str(path), ["it has no table [tool.gonio]"])
    return table


def _wrong_keys(table: Any, path: Path) -> list[str]:
    """Every problem, one sentence each."""
    where = "[tool.gonio]" if path.name == SHARED else "the file"
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
    from gonio.measuring import Suppression

    try:
        Suppression(*values)
    except (GonioError, OverflowError) as error:  # OverflowError: of re.compile
        return str(error)
    return ""
