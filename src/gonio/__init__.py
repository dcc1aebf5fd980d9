"""Measure and control the norms and angles of neural-network weights.

Names are loaded when they are first used, so that `import gonio` and the command line's `--help` do
not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_EXPORTS = {
    "errors": ("GonioError",),
    "lab": ("doctor",),
    "languages": ("language",),
    "measuring": ("Measurements", "Tracker", "certify", "check", "measure"),
    "optim": ("clip_qk_", "hold_"),
    "penalty": ("Penalty", "param_groups"),
    "recipes": ("Recipe",),
    "surgery": (
        "Edited",
        "OfType",
        "Path",
        "Regex",
        "balance_",
        "calibrate_",
        "convert_gradually_",
        "equivalent",
        "even_out_",
        "fold_",
        "init_",
        "lsuv_",
        "match_statistics_",
        "parametrize_",
        "recycle_",
        "rotate_",
        "shrink_change_",
        "shrink_intruders_",
        "swap_",
    ),
    **dict.fromkeys(("geometry", "init", "integrations", "models", "nn", "plots"), ()),
    **dict.fromkeys(("parametrizations", "regularizers", "seeding"), ()),
}
"""Every public subpackage, and those of its names that are available as `gonio.NAME`."""
_HOME = {name: package for package, names in _EXPORTS.items() for name in names}

__all__ = ["__version__", *_EXPORTS, *_HOME]

if TYPE_CHECKING:  # the same names for type checkers and editors, which do not read the table above
    from gonio import errors as errors
    from gonio import geometry as geometry
    from gonio import init as init
    from gonio import integrations as integrations
    from gonio import lab as lab
    from gonio import languages as languages
    from gonio import measuring as measuring
    from gonio import models as models
    from gonio import nn as nn
    from gonio import optim as optim
    from gonio import parametrizations as parametrizations
    from gonio import penalty as penalty
    from gonio import plots as plots
    from gonio import recipes as recipes
    from gonio import regularizers as regularizers
    from gonio import seeding as seeding
    from gonio import surgery as surgery
    from gonio.errors import GonioError as GonioError
    from gonio.lab.treating.doctor import doctor as doctor
    from gonio.languages import language as language
    from gonio.measuring import Measurements as Measurements
    from gonio.measuring import Tracker as Tracker
    from gonio.measuring.certificate import certify as certify
    from gonio.measuring.checking.check import check as check
    from gonio.measuring.measure import measure as measure
    from gonio.optim import clip_qk_ as clip_qk_
    from gonio.optim import hold_ as hold_
    from gonio.penalty import Penalty as Penalty
    from gonio.penalty.param_groups import param_groups as param_groups
    from gonio.recipes import Recipe as Recipe
    from gonio.surgery import Edited as Edited
    from gonio.surgery import OfType as OfType
    from gonio.surgery import Path as Path
    from gonio.surgery import Regex as Regex
    from gonio.surgery import balance_ as balance_
    from gonio.surgery import calibrate_ as calibrate_
    from gonio.surgery import convert_gradually_ as convert_gradually_
    from gonio.surgery import even_out_ as even_out_
    from gonio.surgery import fold_ as fold_
    from gonio.surgery import init_ as init_
    from gonio.surgery import lsuv_ as lsuv_
    from gonio.surgery import match_statistics_ as match_statistics_
    from gonio.surgery import parametrize_ as parametrize_
    from gonio.surgery import recycle_ as recycle_
    from gonio.surgery import rotate_ as rotate_
    from gonio.surgery import shrink_change_ as shrink_change_
    from gonio.surgery import shrink_intruders_ as shrink_intruders_
    from gonio.surgery import swap_ as swap_
    from gonio.surgery.equivalent import equivalent as equivalent


class _NoSuchNameError(AttributeError):
    """A name that `gonio` lacks. What shows it reads of the nearest names; `hasattr` does not load their packages."""

    def __str__(self) -> str:
        name = str(self.name)
        near = "" if name.startswith("_") else _nearest(name)
        return f"{self.args[0]}. Did you mean {near}?" if near else str(self.args[0])


def _nearest(name: str) -> str:
    """The nearest public names of all packages: the same name or verb elsewhere, otherwise the most similar ones."""
    errors: Any = importlib.import_module("gonio.errors")
    homes = {each: f"gonio.{each}" for each in __all__}
    for package in _EXPORTS:
        for each in importlib.import_module(f"gonio.{package}").__all__:
            homes.setdefault(each, f"gonio.{package}.{each}")
    same = [each for each in (name, f"{name}_", name.rstrip("_")) if each in homes]
    return str(errors.listing([homes[each] for each in same[:1] or errors.closest(name, homes)]))


def __getattr__(name: str) -> Any:
    errors: Any = importlib.import_module("gonio.errors")
    if name in _EXPORTS:
        value: Any = errors.imported(f"gonio.{name}")
    elif name in _HOME:
        value = getattr(errors.imported(f"gonio.{_HOME[name]}"), name)
    else:
        raise _NoSuchNameError(f"module 'gonio' has no attribute {name!r}", name=name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
