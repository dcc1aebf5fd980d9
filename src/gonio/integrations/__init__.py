"""Trainers of other libraries: a penalty in their loss, a tracker as their callback."""

from gonio.integrations import lightning, transformers

__all__ = ["lightning", "transformers"]
__dir__ = __all__.copy  # the public names alone
