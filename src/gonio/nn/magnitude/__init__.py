r"""Magnitude functions :math:`h(\lVert x \rVert)`: what a decoupled operator does with the length.

Each is a frozen dataclass of numbers and pure functions. `alpha` scales the output, `beta` is the
second slope where there is one, `radius` is the operator radius :math:`\rho` where there is one.

`radius_in` says in what unit the radius is measured: `"mean_norm"` (the mean norm of the layer's
inputs, over the batch in training, its running mean in evaluation) or `"absolute"`. Norms grow as
the square root of the number of inputs, so an absolute radius of 1 means nothing by itself; one mean
norm means the same in every layer.
"""

from __future__ import annotations

from gonio.nn.magnitude.base import Magnitude
from gonio.nn.magnitude.bounded import Ball, Sphere, Tanh
from gonio.nn.magnitude.unbounded import Linear, Logarithm, Mixed, Segmented

__all__ = ["Ball", "Linear", "Logarithm", "Magnitude", "Mixed", "Segmented", "Sphere", "Tanh"]
