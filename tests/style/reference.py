"""The builder of the reference pages, loaded from docs/, which is no package."""

from __future__ import annotations

import importlib
import sys

from style.source import ROOT

__all__ = ["builder", "docstrings"]

sys.path.insert(0, str(ROOT / "docs"))
builder = importlib.import_module("build_reference")
docstrings = importlib.import_module("docstrings")
