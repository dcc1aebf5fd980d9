"""Short forms of an experiment in a file: doses of an arm, a grid of arms, and patterns in a contrast, written out."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from gonio.escaping import shorten


class FormError(Exception):
    """A part of a claim that is written out before the schema sees it has another form; names the part."""


def _formed(value: Any, at: str, kind: type, what: str) -> Any:
    """The value, if it is of this kind; true and false are no numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
        raise FormError(f"{at}: {shorten(repr(value), longest=60)}, but expected {what}")
    return value


def expanded(setting: Any, at: str) -> Any:
    """An experiment as data with the arms of its `grid` and the patterns of its `contrast` written out."""
    if not isinstance(setting, dict):
        return setting
    listed = _formed(setting.get("arms", []), f"{at}.arms", list, "a list of arms")
    arms = [
        dose
        for number, arm in enumerate([*listed, *_grid(setting.get("grid", {}), f"{at}.grid")])
        for dose in _doses(arm, f"{at}.arms.{number}")
    ]
    names = list(dict.fromkeys(arm.get("of") or arm.get("name") for arm in arms if isinstance(arm, dict)))
    contrast: dict[str, Any] = {}
    terms = _formed(setting.get("contrast", {}), f"{at}.contrast", dict, "a mapping of arms to factors")
    for pattern, weight in terms.items():
        matched = [
            name
            for name in names
            if isinstance(name, str) and any(fnmatchcase(name, each) for each in pattern.split("|"))
        ]
        if twice := next((name for name in matched if name in contrast), None):
            raise FormError(f"{at}.contrast: {pattern} names the arm {twice}, which has a factor already")
        number = _formed(weight, f"{at}.contrast.{pattern}", float, "a number")
        contrast |= dict.fromkeys(matched or [pattern], number / len(matched) if len(matched) > 1 else number)
    rest = {key: value for key, value in setting.items() if key not in ("arms", "grid", "contrast")}
    return {**rest, **({"arms": arms} if arms else {}), **({"contrast": contrast} if contrast else {})}


def _grid(grid: Any, at: str) -> list[dict[str, Any]]:
    """One arm for each series and level."""
    if not _formed(grid, at, dict, "a mapping with series, levels and recipe"):
        return []
    if unknown := sorted(set(grid) - {"series", "levels", "recipe"}):
        raise FormError(f"{at}: a grid has series, levels and recipe, not {', '.join(unknown)}")
    if missing := [key for key in ("series", "levels", "recipe") if key not in grid]:
        raise FormError(f"{at}.{missing[0]}: it is missing")
    series = _formed(grid["series"], f"{at}.series", list, "a list of names")
    levels = _formed(grid["levels"], f"{at}.levels", list, "a list")
    return [
        {"name": f"{one}-{level}".lower(), "series": one.lower(), "level": number,
         "recipe": _filled(grid["recipe"], {"{series}": one, "{level}": level})}
        for one in (_formed(one, f"{at}.series.{place}", str, "a name") for place, one in enumerate(series))
        for number, level in enumerate(levels, start=1)
    ]  # fmt: skip


def _doses(arm: Any, at: str) -> list[Any]:
    """One arm for each of its doses; the arm itself if it has none."""
    if not isinstance(arm, dict) or "doses" not in arm:
        return [arm]
    doses = _formed(arm["doses"], f"{at}.doses", list, "a list of numbers")
    name, rest = arm.get("name"), {key: value for key, value in arm.items() if key != "doses"}
    if not doses or name is None:
        raise FormError(f"{at}.doses: it is empty" if name is not None else f"{at}.name: it is missing")
    return [
        {
            **_filled(rest, {"{dose}": _formed(dose, f"{at}.doses.{place}", float, "a number")}),
            "name": f"{name}-{dose:g}",
            "of": name,
            "series": name,
            "level": float(dose),
        }
        for place, dose in enumerate(doses)
    ]


def _filled(value: Any, names: Mapping[str, Any]) -> Any:
    """The data with the placeholders replaced."""
    if isinstance(value, dict):
        return {key: _filled(inner, names) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, names) for inner in value]
    return names.get(value, value) if isinstance(value, str) else value
