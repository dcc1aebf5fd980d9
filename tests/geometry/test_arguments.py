"""What the functions of geometry take: arrays, lists, weights of convolutions, numbers of any size."""

from __future__ import annotations

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
