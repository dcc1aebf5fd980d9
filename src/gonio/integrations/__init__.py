"""Trainers of other libraries: a penalty in their loss, a tracker as their callback."""

from gonio.integrations import lightning, transformers

__all__ = ["lightning", "transformers"]


def __dir__() -> list[str]:
    return sorted(__all__)
