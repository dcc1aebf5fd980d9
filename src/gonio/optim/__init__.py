"""What acts on the steps of an optimizer: norms that are held, logits that are clipped, and orthogonalised updates."""

from gonio.optim.clip_qk import Clipped, clip_qk_
from gonio.optim.hold import Held, hold_, release_
from gonio.optim.muon import Muon

__all__ = ["Clipped", "Held", "Muon", "clip_qk_", "hold_", "release_"]
__dir__ = __all__.copy  # the public names alone
