"""Figures of operators, and the error without matplotlib."""

from __future__ import annotations

import sys

import pytest
import torch

from gonio.errors import MissingExtraError
from gonio.nn import angular, magnitude
from gonio.nn.plots import operator_on_plane


def test_what_the_curves_show() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    h = magnitude.Ball(radius=2.0)
    norms, values = (torch.as_tensor(v, dtype=torch.float64) for v in h.plot(figure.add_subplot()).lines[0].get_data())
    torch.testing.assert_close(values, h(norms))
    assert (float(norms.min()), float(norms.max())) == (0.0, 6.0)
    degrees, values = (torch.as_tensor(v, dtype=torch.float64) for v in angular.Linear().plot().lines[0].get_data())
    torch.testing.assert_close(values, 1 - degrees / 90)


def test_the_operator_over_the_plane() -> None:
    """Odd along the filter, even across it, 0 in the middle, and what the picture shows."""
    pytest.importorskip("matplotlib")
    plane = operator_on_plane(magnitude.Tanh(), angular.Cosine(), reach=3.0)
    torch.testing.assert_close(plane, -plane.flip(1))
    torch.testing.assert_close(plane, plane.flip(0))
    assert abs(float(plane[60, 60])) < 1e-12
    ax = magnitude.Tanh().plot(angular=angular.Cosine())
    torch.testing.assert_close(torch.as_tensor(ax.images[0].get_array().data), plane)


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"needs the package 'matplotlib'.*pip install 'gonio\[lab\]'"):
        magnitude.Tanh().plot()
    with pytest.raises(MissingExtraError, match="an angular activation needs the package"):
        angular.Cosine().plot()
