"""What the functions of geometry take: arrays, lists, weights of convolutions, numbers of any size."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from catalog import seeded
from gonio import geometry as G
from gonio.errors import InvalidArgumentError

OF_FILTERS: dict[str, Callable[[Any], Any]] = {
    name: getattr(G, name)
    for name in (
        "alignment",
        "alignment_zscore",
        "angles",
        "coherence",
        "condition_number",
        "cosines",
        "effective_rank",
        "filter_norms",
        "sign_hash",
        "sign_similarity",
        "singular_values",
        "spectral_norm",
        "stable_rank",
    )
}
OF_FILTERS |= {
    "match": lambda x: G.match(x, x).cosines,
    "near_duplicates": lambda x: G.near_duplicates(x).pairs,
    "orthogonality_defect": lambda x: G.orthogonality_defect(x).frobenius,
    "spectrum": lambda x: G.spectrum(x).values,
}
OF_DIRECTIONS = ("alignment", "angles", "coherence", "cosines", "match", "near_duplicates", "sign_similarity")
FEW = ("match", "near_duplicates")  # take no stack


@pytest.mark.parametrize("name", OF_FILTERS)
def test_weights_of_convolutions_are_flattened(name: str) -> None:
    for shape in ((6, 3, 2, 2), (6, 2, 2, 2, 2)):
        weight = seeded(*shape)
        torch.testing.assert_close(OF_FILTERS[name](weight), OF_FILTERS[name](weight.flatten(1)))


@pytest.mark.parametrize("name", OF_FILTERS)
def test_arrays_and_lists_are_taken(name: str) -> None:
    weight = seeded(6, 12, dtype=torch.float64)
    expected = OF_FILTERS[name](weight)
    torch.testing.assert_close(OF_FILTERS[name](weight.numpy()), expected)
    torch.testing.assert_close(OF_FILTERS[name](weight.tolist()), expected, check_dtype=False, rtol=1e-5, atol=1e-6)
    integers = np.array([[1, 2], [2, 4], [0, 1]])
    torch.testing.assert_close(OF_FILTERS[name](integers), OF_FILTERS[name](integers.astype(np.float32)))


@pytest.mark.parametrize("name", OF_FILTERS)
def test_other_ranks_and_types_are_refused(name: str) -> None:
    for bad in (torch.ones(3), torch.ones(1, 2, 3, 4, 5, 6), *([torch.ones(2, 3, 4)] if name in FEW else [])):
        with pytest.raises(InvalidArgumentError, match=r"takes a matrix \(n, d\), one filter per row"):
            OF_FILTERS[name](bad)
    for kind in (torch.complex64, torch.int64):
        with pytest.raises(InvalidArgumentError, match="real floating-point tensors; found dtype"):
            OF_FILTERS[name](torch.ones(3, 3, dtype=kind))


@pytest.mark.parametrize("name", OF_DIRECTIONS)
@pytest.mark.parametrize("size", [1e-11, 1e19, 1e30])
def test_directions_do_not_depend_on_the_size_of_float32_numbers(name: str, size: float) -> None:
    vectors = torch.cat([seeded(5, 8), 2 * seeded(5, 8)[:1]])
    torch.testing.assert_close(OF_FILTERS[name](size * vectors), OF_FILTERS[name](vectors), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OF_DIRECTIONS)
def test_vectors_below_the_stated_norm_have_no_direction(name: str) -> None:
    vectors = torch.cat([seeded(5, 8), 1e-14 * seeded(1, 8)])
    found, without = OF_FILTERS[name](vectors), OF_FILTERS[name](torch.cat([seeded(5, 8), torch.zeros(1, 8)]))
    torch.testing.assert_close(found, without)


def test_pairs_of_vectors_of_any_size_and_two_dtypes() -> None:
    a, b = seeded(5, 8), seeded(5, 8, seed=1)
    torch.testing.assert_close(G.angle_between(1e25 * a, b), G.angle_between(a, b))
    torch.testing.assert_close(G.angle_between(a.numpy(), b.numpy()), G.angle_between(a, b))
    torch.testing.assert_close(G.match(a.double(), b).cosines, G.match(a.double(), b.double()).cosines)
    torch.testing.assert_close(G.scale_imbalance([a.numpy(), b]), G.scale_imbalance([a, b]))


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e25])
def test_an_index_of_vectors_of_any_size(size: float) -> None:
    vectors = size * seeded(200, 16)
    found = G.SignIndex(vectors.numpy()).query(vectors[7])
    assert found.indices.tolist() == [[7]]
    assert float(found.cosines) == pytest.approx(1.0, abs=1e-5)
    with pytest.raises(InvalidArgumentError, match=r"found 1 of 2 zero or non-finite\. Leave these rows out"):
        G.SignIndex(torch.tensor([[1.0, 0.0], [1e-20, 0.0]]))


KERNEL = seeded(4, 3, 3, 3, dtype=torch.float64)
BOX = torch.linspace(0, 3, 5, dtype=torch.float64)
OTHERS = {  # that take more than one array of filters; each with its arrays alone
    "angle_between": (G.angle_between, (seeded(5, 8), seeded(5, 8, seed=1))),
    "conv_spectral_norm": (lambda w: G.conv_spectral_norm(w, (6, 6)), (KERNEL,)),
    "conv_spectral_norm_bound": (G.conv_spectral_norm_bound, (KERNEL,)),
    "conv_spectral_norm_certificate": (G.conv_spectral_norm_certificate, (KERNEL,)),
    "conv_spectral_norm_estimate": (lambda w: G.conv_spectral_norm_estimate(w, (6, 6)), (KERNEL,)),
    "fake_quantize": (lambda w: G.fake_quantize(w, bits=4), (seeded(6, 8),)),
    "intruder_dimensions": (
        lambda a, b: G.intruder_dimensions(a, b, k=2).cosines,
        (seeded(6, 8), seeded(6, 8, seed=1)),
    ),
    "least_scale": (lambda a, b: G.least_scale([a, b]), (seeded(3, 4), seeded(5, 3))),
    "logit_bound": (G.logit_bound, (seeded(2, 4, 6), seeded(1, 4, 6, seed=1))),
    "match": (lambda a, b: G.match(a, b).cosines, (seeded(5, 8), seeded(5, 8, seed=1))),
    "matrix_view": (G.matrix_view, (KERNEL,)),
    "normalize": (G.normalize, (KERNEL,)),
    "operator_matrix": (lambda w: G.operator_matrix(w, (4, 4)), (KERNEL,)),
    "operator_norm_bound": (G.operator_norm_bound, (KERNEL,)),
    "quantization_error": (G.quantization_error, (seeded(6, 8),)),
    "principal_angles": (G.principal_angles, (seeded(8, 2), seeded(8, 3, seed=1))),
    "random_angle_density": (lambda t: G.random_angle_density(t, 5), (BOX,)),
    "safe_norm": (lambda x: G.safe_norm(x, dim=-1), (KERNEL,)),
    "scale_imbalance": (lambda a, b: G.scale_imbalance([a, b]), (seeded(3, 4), seeded(5, 3))),
    "top_subspace": (lambda m: G.top_subspace(m, 2).values, (seeded(6, 8),)),
    "unview": (lambda m: G.unview(m, KERNEL.shape), (G.matrix_view(KERNEL),)),
    "unview_operator": (lambda m: G.unview_operator(m, (4, 3, 3, 3), (4, 4)), (G.operator_matrix(KERNEL, (4, 4)),)),
}
OF_NUMBERS = {"alignment_deviation", "expected_coherence", "marchenko_pastur", "welch_bound"}
OF_MODULES_AND_FUNCTIONS = {"layout_of", "nonnegative_norm"}


@pytest.mark.parametrize("name", OTHERS)
def test_every_function_takes_arrays(name: str) -> None:
    function, tensors = OTHERS[name]
    expected = torch.as_tensor(function(*tensors))
    found = torch.as_tensor(function(*(tensor.numpy() for tensor in tensors)))
    torch.testing.assert_close(found, expected)


def test_no_function_is_left_out() -> None:
    functions = {name for name in G.__all__ if inspect.isfunction(getattr(G, name))}
    assert functions == {*OF_FILTERS, *OTHERS, *OF_NUMBERS, *OF_MODULES_AND_FUNCTIONS}


@pytest.mark.parametrize("name", [*OF_FILTERS, "operator_norm_bound"])
def test_a_tensor_that_is_not_dense_is_refused(name: str) -> None:
    function = OF_FILTERS.get(name, G.operator_norm_bound)
    with pytest.raises(InvalidArgumentError, match=r"dense tensors; found layout torch.sparse_coo"):
        function(seeded(3, 4).to_sparse())


@pytest.mark.parametrize("size", [1e300, 1e-170, 1e-300, 1e-318])
@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 3, 3)])
def test_the_operator_norm_is_bounded_beyond_the_range_of_squares(shape: tuple[int, ...], size: float) -> None:
    weight = seeded(*shape, dtype=torch.float64)
    within = (weight * size / 2.0**-1000 if size < 1 else weight * size / 2.0**900).double()
    expected = G.operator_norm_bound(within) * (2.0**-1000 if size < 1 else 2.0**900)
    found = G.operator_norm_bound(weight * size)
    assert found == pytest.approx(expected, rel=1e-6, abs=0)
    assert found >= float(torch.linalg.matrix_norm((weight * size).flatten(1) / size, 2)) * size * (1 - 1e-6)


def test_the_check_of_document_004_as_it_is_printed() -> None:
    """Corollary 2: a matrix of n² numbers from N(0, 1/n) is nearly orthogonal."""
    np.random.seed(0)  # noqa: NPY002 - the document draws so
    n = 100
    W = np.random.randn(n, n) / np.sqrt(n)  # noqa: NPY002
    X = np.dot(W.T, W)
    mse = np.square(X - np.eye(n)).mean()
    assert mse == pytest.approx(1 / n, rel=0.1)
    assert float(G.orthogonality_defect(W).entrywise) == pytest.approx(mse, rel=1e-9)
