"""Trainers of other libraries: a penalty in their loss, with one call."""

from __future__ import annotations

from gonio.integrations import lightning, transformers

__all__ = ["lightning", "transformers"]
