"""Norms, angles and spectra of weights: tensors in, tensors out, no state."""

from gonio.geometry.angles import (
    alignment,
    alignment_zscore,
    angle_between,
    angles,
    coherence,
    cosines,
    sign_hash,
    sign_similarity,
)
from gonio.geometry.attention import logit_bound
from gonio.geometry.certified import nonnegative_norm, operator_norm_bound
from gonio.geometry.chance import (
    MarchenkoPastur,
    alignment_deviation,
    expected_coherence,
    marchenko_pastur,
    random_angle_density,
    welch_bound,
)
from gonio.geometry.conv_norm import (
    conv_spectral_norm,
    conv_spectral_norm_bound,
    conv_spectral_norm_certificate,
    conv_spectral_norm_estimate,
)
from gonio.geometry.conv_operator import operator_matrix, unview_operator
from gonio.geometry.duplicates import NearDuplicates, near_duplicates
from gonio.geometry.lanczos import spectral_norm
from gonio.geometry.match import Matching, match
from gonio.geometry.norms import filter_norms, normalize, safe_norm
from gonio.geometry.quantization import fake_quantize, quantization_error
from gonio.geometry.scale import least_scale, scale_imbalance
from gonio.geometry.sign_index import Neighbours, SignIndex
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
from gonio.geometry.subspaces import (
    IntruderDimensions,
    TopSubspace,
    intruder_dimensions,
    principal_angles,
    top_subspace,
)
from gonio.geometry.views import Layout, View, layout_of, matrix_view, unview

__all__ = [
    "IntruderDimensions",
    "Layout",
    "MarchenkoPastur",
    "Matching",
    "NearDuplicates",
    "Neighbours",
    "OrthogonalityDefect",
    "SignIndex",
    "Spectrum",
    "TopSubspace",
    "View",
    "alignment",
    "alignment_deviation",
    "alignment_zscore",
    "angle_between",
    "angles",
    "coherence",
    "condition_number",
    "conv_spectral_norm",
    "conv_spectral_norm_bound",
    "conv_spectral_norm_certificate",
    "conv_spectral_norm_estimate",
    "cosines",
    "effective_rank",
    "expected_coherence",
    "fake_quantize",
    "filter_norms",
    "intruder_dimensions",
    "layout_of",
    "least_scale",
    "logit_bound",
    "marchenko_pastur",
    "match",
    "matrix_view",
    "near_duplicates",
    "nonnegative_norm",
    "normalize",
    "operator_matrix",
    "operator_norm_bound",
    "orthogonality_defect",
    "principal_angles",
    "quantization_error",
    "random_angle_density",
    "safe_norm",
    "scale_imbalance",
    "sign_hash",
    "sign_similarity",
    "singular_values",
    "spectral_norm",
    "spectrum",
    "stable_rank",
    "top_subspace",
    "unview",
    "unview_operator",
    "welch_bound",
]
__dir__ = __all__.copy  # the public names alone
