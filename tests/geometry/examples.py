"""How many examples property tests try: the same ones in every run, without a time limit per example."""

from __future__ import annotations

from hypothesis import settings

__all__ = ["THOROUGH"]

# Two busy cores can take any time for one example, and a failure has to be the same for everybody.
THOROUGH = settings(max_examples=200, deadline=None, derandomize=True)
