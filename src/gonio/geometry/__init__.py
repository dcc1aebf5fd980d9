"""Norms, angles and spectra of weights: tensors in, tensors out, no state."""

from gonio.geometry.angles import alignment, alignment_zscore, angle_between, angles, coherence, cosines
from gonio.geometry.chance import random_angle_density, welch_bound
from gonio.geometry.lanczos import spectral_norm
from gonio.geometry.norms import filter_norms, normalize, safe_norm
from gonio.geometry.scale import least_scale, scale_imbalance
from gonio.geometry.spectra import (
    OrthogonalityDefect,
    Spectrum,
    condition_number,
    effective_rank,
    orthogonality_defect,
    singular_values,
    spectrum,
    stable_rank,
)
from gonio.geometry.views import Layout, View, layout_of, matrix_view, unview

__all__ = [
    "Layout",
    "OrthogonalityDefect",
    "Spectrum",
    "View",
    "alignment",
    "alignment_zscore",
    "angle_between",
    "angles",
    "coherence",
    "condition_number",
    "cosines",
    "effective_rank",
    "filter_norms",
    "layout_of",
    "least_scale",
    "matrix_view",
    "normalize",
    "orthogonality_defect",
    "random_angle_density",
    "safe_norm",
    "scale_imbalance",
    "singular_values",
    "spectral_norm",
    "spectrum",
    "stable_rank",
    "unview",
    "welch_bound",
]
