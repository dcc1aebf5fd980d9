"""What acts on the steps of an optimizer: norms that are held, and orthogonalised updates."""

from __future__ import annotations

from gonio.optim.hold import Held, hold_
from gonio.optim.muon import Muon

__all__ = ["Held", "Muon", "hold_"]


def __dir__() -> list[str]:
    return sorted(__all__)
