"""Fans equal counted connections, where torch's do not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gonio.errors import InvalidArgumentError
from gonio.geometry import Layout
from gonio.init import Fans, fans
from references.init import counted_fans

SHAPES = [
    ((6, 4, 3), False, 1, (1,)),
    ((6, 2, 3), False, 2, (2,)),
    ((4, 1, 3, 3), False, 4, (1, 1)),
    ((8, 4, 3, 2), False, 1, (2, 2)),
    ((4, 6, 3, 3), True, 1, (1, 1)),
    ((4, 3, 3, 3), True, 2, (2, 2)),
    ((4, 1, 2, 2), True, 4, (2, 1)),
    ((2, 3, 2, 2, 1), False, 1, (1, 2, 1)),
]


@pytest.mark.parametrize(("shape", "transposed", "groups", "stride"), SHAPES)
def test_fans_equal_counted_connections(
    shape: tuple[int, ...], transposed: bool, groups: int, stride: tuple[int, ...]
) -> None:
    found = fans(shape, Layout(transposed=transposed, groups=groups, stride=stride))
    expected = counted_fans(shape, transposed=transposed, groups=groups, stride=stride)
    assert (found.fan_in, found.fan_out) == pytest.approx(expected)


def test_linear_embedding_and_stacked_blocks() -> None:
    assert fans((5, 3)) == Fans(3.0, 5.0)
    assert fans((12, 3), Layout(blocks=3)) == Fans(3.0, 4.0)
    assert fans((3, 5), Layout(transposed=True)) == Fans(3.0, 5.0)  # Hugging Face's Conv1D


def test_where_torch_counts_wrong() -> None:
    """Negative control: if torch is repaired, `Differs:` in the documentation has to go."""
    torch_fans = nn.init._calculate_fan_in_and_fan_out
    assert torch_fans(torch.empty(4, 1, 3, 3)) == (9, 36)  # depthwise: true fan_out 9
    assert torch_fans(torch.empty(4, 6, 3, 3)) == (54, 36)  # as ConvTranspose2d(4, 6, 3): true (36, 54)
    assert fans((4, 6, 3, 3), Layout(transposed=True)) == Fans(36.0, 54.0)


def test_layouts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"one stride per kernel dimension.* has 2; found stride=\(2,\)"):
        fans((4, 4, 3, 3), Layout(stride=(2,)))
    with pytest.raises(InvalidArgumentError, match=r"groups=3.* 3 equal parts; found shape \(4, 3\)"):
        fans((4, 3), Layout(groups=3))


def test_vectors_have_no_fans() -> None:
    with pytest.raises(InvalidArgumentError, match=r"at least 2 dimensions; found shape \(3,\)"):
        fans((3,))
