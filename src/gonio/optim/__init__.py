"""What acts on the steps of an optimizer: norms that are held, and orthogonalised updates."""

from gonio.optim.hold import Held, hold_, release_
from gonio.optim.muon import Muon

__all__ = ["Held", "Muon", "hold_", "release_"]
__dir__ = __all__.copy  # the public names alone
