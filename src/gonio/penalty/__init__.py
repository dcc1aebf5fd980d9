"""Regularizers bound to a model, to be added to the loss."""

from gonio.penalty.penalty import Penalty

__all__ = ["Penalty"]
