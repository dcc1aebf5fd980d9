"""How many examples property tests try, and awkward matrices for those that try all they can."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

# Two busy cores can take any time for one example, and a failure has to be the same for everybody.
REPEATABLE = settings(max_examples=200, deadline=None, derandomize=True)
settings.register_profile("thorough", REPEATABLE, max_examples=10_000, suppress_health_check=list(HealthCheck))
THOROUGH = settings.get_profile("thorough")

# Powers of ten between which the fourth power of an entry and the inverse of a norm are numbers of the dtype.
EXPONENTS = {torch.float64: (-70, 70), torch.float32: (-9, 9), torch.bfloat16: (-9, 9), torch.float16: (-4, 4)}
DTYPES = list(EXPONENTS)
Array = NDArray[np.float64]

# What a row can be, from its own random numbers and the row before it (the last one for the first).
ROWS: list[Callable[[Array, Array], Array]] = [
    lambda row, _: row,
    lambda row, _: 0 * row,
    lambda _, before: before,
    lambda _, before: -3 * before,
    lambda row, before: before + 1e-8 * row,
    lambda row, _: 1e-6 * row,
    lambda row, _: 1e-41 * row,
    lambda row, _: row * (np.arange(len(row)) == 0),
    lambda row, _: 1e3 * row,
]
NUMBER = st.integers(0, 2**40)  # one draw that decides many things is several times as fast as many draws


def awkward_matrices(*, rows: int = 1, groups: bool = True) -> st.SearchStrategy[Tensor]:
    """Matrices of up to 6 × 6 of any dtype, whose rows repeat, oppose, vanish or differ in size by decades."""

    def make(stack: int, n: int, d: int, seed: int) -> Tensor:
        count = max(1, stack - 3) if groups else 1  # half of them are single matrices
        tensor = _awkward(count * n, d, seed).reshape(count, n, d)
        return tensor if groups and stack > 3 else tensor[0]

    return st.builds(make, st.integers(1, 6), st.integers(rows, 6), st.integers(1, 6), NUMBER)


def awkward(shape: tuple[int, ...], seed: int) -> Tensor:
    """A tensor of a shape with the same awkward rows."""
    return _awkward(shape[0], max(1, torch.Size(shape[1:]).numel()), seed).reshape(shape)


def _awkward(n: int, d: int, seed: int) -> Tensor:
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((n, d))
    for i, kind in enumerate(rng.integers(len(ROWS), size=n)):
        matrix[i] = ROWS[kind](matrix[i].copy(), matrix[i - 1])
    dtype = DTYPES[seed % len(DTYPES)]
    low, high = EXPONENTS[dtype]
    limit = torch.finfo(dtype).max / 4
    scaled = matrix * 10.0 ** rng.integers(low, high - 2)
    return torch.from_numpy(scaled.clip(-limit, limit)).to(dtype)
