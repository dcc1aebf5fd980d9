"""Norms, angles and spectra of weights: tensors in, tensors out, no state."""

from gonio.geometry.angles import alignment, alignment_zscore, angle_between, angles, coherence, cosines
from gonio.geometry.chance import random_angle_density, welch_bound
from gonio.geometry.norms import filter_norms, normalize, safe_norm
from gonio.geometry.views import Layout, View, layout_of, matrix_view, unview

__all__ = [
    "Layout",
    "View",
    "alignment",
    "alignment_zscore",
    "angle_between",
    "angles",
    "coherence",
    "cosines",
    "filter_norms",
    "layout_of",
    "matrix_view",
    "normalize",
    "random_angle_density",
    "safe_norm",
    "unview",
    "welch_bound",
]
