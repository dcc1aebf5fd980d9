"""Matrices of a file that tells of none which dimension holds the outputs: read as they are stored, and said so."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor

from catalog import seeded
from gonio.measuring import measure
from gonio.measuring.reading.entry import AS_STORED, MATRIX


def state(names: str) -> dict[str, Tensor]:
    return {names.format(i): seeded(24, 40, seed=i) for i in range(3)}


@pytest.mark.parametrize("names", ["dense{}_w", "W{}", "arr_{}", "dense{}/kernel", "layers.{}.mlp.up"])
def test_matrices_without_a_known_name_are_measured(names: str, tmp_path: Path) -> None:
    tensors = state(names)
    tensors[names.format(1)][7] = 0
    tensors[names.format(2)][5] = tensors[names.format(2)][3]
    file = tmp_path / "model.npz"
    numpy.savez(file, **{name: tensor.numpy() for name, tensor in tensors.items()})
    for source in (file, tensors):
        measured = measure(source)
        assert [layer.kind for layer in measured.layers] == [MATRIX] * 3
        assert AS_STORED in measured.notes
        assert AS_STORED in measured.layers[0].notes
        known = measure({f"{name}.weight": tensor for name, tensor in tensors.items()})
        for one, other in zip(measured.layers, known.layers, strict=True):
            assert (one.sigma_max, one.alignment, one.zero_filters) == (
                other.sigma_max,
                other.alignment,
                other.zero_filters,
            )
        found = {(f.code, f.level, f.path) for f in measured.findings}
        assert found == {("G102", "warn", names.format(1)), ("G203", "info", names.format(2))}
        assert AS_STORED in str(measured).replace("\n", " ")


OTHERS = {
    "a weight with a known name": {"fc.weight": seeded(8, 6)},
    "a packed weight": {"q": torch.ones(8, 6, dtype=torch.int32)},
    "a tensor of three dimensions": {"experts": seeded(4, 8, 6)},
    "a matrix of one row": {"row": seeded(1, 6)},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_file_that_holds_more_is_not_read_so(kind: str) -> None:
    measured = measure({**state("W{}"), **OTHERS[kind]})
    assert not [layer for layer in measured.tensors if layer.kind == MATRIX]
    assert AS_STORED not in measured.notes
    assert "not called a weight" in measured.coverage


def test_a_model_is_not_read_so() -> None:
    model = torch.nn.Module()
    model.register_parameter("table", torch.nn.Parameter(seeded(24, 40)))
    assert not measure(model).layers
