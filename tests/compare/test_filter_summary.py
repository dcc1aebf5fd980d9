"""Filter summaries: norms and angles, against a plain reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from gonio.compare import filter_summary
from gonio.compare.judging.filter_summary import ANGLE_EDGES, QUANTILES


def reference(filters: np.ndarray) -> tuple[list[float], list[int]]:
    """Norm quantiles and angle counts of one matrix, filter by filter and pair by pair."""
    norms = np.sqrt((filters**2).sum(axis=1))
    found = []
    for i in range(len(filters)):
        for j in range(i):
            if norms[i] > 0 and norms[j] > 0:
                cosine = np.clip(filters[i] @ filters[j] / norms[i] / norms[j], -1, 1)
                found.append(np.degrees(np.arccos(cosine)))
    return np.quantile(norms, QUANTILES).tolist(), np.histogram(found, ANGLE_EDGES)[0].tolist()


@pytest.mark.parametrize(
    "layer",
    [nn.Linear(7, 5), nn.Conv2d(3, 6, 3), nn.Conv1d(4, 9, 2)],
    ids=["linear", "conv2d", "conv1d"],
)
def test_norms_and_angles_of_flattened_filters(layer: nn.Module) -> None:
    weight = layer.weight.detach().double().numpy()
    norms, counts = reference(weight.reshape(len(weight), -1))
    found = filter_summary(nn.Sequential(layer))["layers"]["0"]
    assert found["norms"] == pytest.approx(norms, rel=1e-9)
    assert found["angle_counts"] == counts
    assert (found["dim"], found["filters"]) == (weight[0].size, len(weight))


def test_groups_are_compared_within_themselves() -> None:
    layer = nn.Conv2d(4, 6, 1, groups=2)
    found = filter_summary(nn.Sequential(layer))["layers"]["0"]
    assert (found["dim"], found["filters"], sum(found["angle_counts"])) == (2, 6, 2 * 3)


def test_zero_filters_have_a_norm_and_no_angle() -> None:
    layer = nn.Linear(3, 4)
    with torch.no_grad():
        layer.weight[0] = 0
    found = filter_summary(nn.Sequential(layer))["layers"]["0"]
    assert found["norms"][0] == 0
    assert sum(found["angle_counts"]) == 3


def test_parallel_and_opposite_filters_are_counted_in_the_outer_bins() -> None:
    layer = nn.Linear(2, 3)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 2.0], [2.0, 4.0], [-1.0, -2.0]]))
    counts = filter_summary(nn.Sequential(layer))["layers"]["0"]["angle_counts"]
    assert (counts[0], counts[-1], sum(counts)) == (1, 2, 3)


def test_a_single_filter_has_no_pairs() -> None:
    assert sum(filter_summary(nn.Sequential(nn.Linear(3, 1)))["layers"]["0"]["angle_counts"]) == 0


def test_layers_without_filters_are_left_out() -> None:
    assert list(filter_summary(nn.Sequential(nn.BatchNorm2d(3), nn.Embedding(3, 2)))["layers"]) == []
