"""What the figures show equals the numbers that they are made from; missing numbers and packages are errors."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch
from torch import nn

import gonio
from gonio import plots
from gonio.errors import InvalidArgumentError, MissingExtraError
from gonio.geometry import singular_values
from gonio.nn import angular, magnitude
from lab.showing.samples import results

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def measured() -> gonio.Measurements:
    torch.manual_seed(0)
    return gonio.measure(nn.Sequential(nn.Conv2d(3, 24, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 10)))


def test_angles_are_the_histogram_and_the_law(measured: gonio.Measurements) -> None:
    row = measured["0"]
    axes = row.plot_angles().axes[0]
    law_xs, law = (torch.as_tensor(values, dtype=torch.float64) for values in axes.lines[0].get_data())
    assert float(torch.trapezoid(law, law_xs)) == pytest.approx(1.0, abs=1e-3)
    outline = torch.as_tensor(axes.collections[0].get_paths()[0].vertices)
    x, y = outline.unbind(1)
    enclosed = ((x.roll(-1) - x) * (y.roll(-1) + y) / 2).sum()  # the area of a polygon
    assert abs(float(enclosed)) == pytest.approx(1.0, abs=1e-9)
    low, high = axes.get_xlim()
    assert low <= 90 - 4 * row.angle_std_random
    assert high >= 90 + 4 * row.angle_std_random


def test_the_spectrum_is_that_of_the_weight(measured: gonio.Measurements) -> None:
    drawn = torch.as_tensor(measured["0"].plot_spectrum().axes[0].collections[0].get_paths()[0].vertices)
    torch.manual_seed(0)
    values = singular_values(nn.Conv2d(3, 24, 3).weight.detach().flatten(1).double())
    expected = values.quantile(torch.linspace(0, 1, 17, dtype=torch.float64))
    assert {round(float(y), 5) for y in drawn[:, 1]} - {0.0} == {round(float(y), 5) for y in expected}


def test_depth_shows_every_layer(measured: gonio.Measurements) -> None:
    axes = measured.plot("sigma_max").axes[0]
    assert list(axes.lines[0].get_ydata()) == [measured["0"].sigma_max, measured["3"].sigma_max]
    assert list(axes.lines[1].get_ydata()) == [measured["0"].sigma_random, measured["3"].sigma_random]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "3"]


def test_the_map_of_heads_has_a_row_per_attention_and_a_white_cell_where_there_is_no_head() -> None:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(8, heads, 8, batch_first=True) for heads in (2, 4)]
    heads = gonio.measure(nn.Sequential(*layers), batch=torch.randn(2, 3, 8)).heads
    axes, bar = plots.heads(heads, "largest_logit").axes
    drawn = axes.images[0].get_array()
    expected = [[head.largest_logit for head in heads if head.path.startswith(n)] for n in "01"]
    assert drawn[0].tolist() == [*expected[0], None, None]
    assert drawn[1].tolist() == expected[1]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0.self_attn", "1.self_attn"]
    assert bar.get_ylabel() == "largest logit"
    without = gonio.measure(nn.Sequential(*layers)).heads
    with pytest.raises(InvalidArgumentError, match=r"plots\.heads: 'entropy' has no values"):
        plots.heads(without, "entropy")


def test_panels_share_a_figure_that_a_notebook_shows(measured: gonio.Measurements) -> None:
    figure, panels = plots.panels(2)
    assert figure.axes == panels
    assert plots.angles(measured["0"], ax=panels[1]) is figure
    assert not panels[0].collections
    assert panels[1].collections
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]


def test_a_study() -> None:
    found = results()
    axes = plots.effects(found).axes[0]
    shown = [effect for effect in found.effects if effect.mean is not None]
    assert {label.get_text() for label in axes.get_yticklabels()} == {effect.recipe for effect in shown}
    curves = plots.learning_curves(found).axes[0]
    assert {text.get_text() for text in curves.get_legend().get_texts()} == {e.name for e in found.plan.recipes}


def test_what_the_curves_of_operators_show() -> None:
    h = magnitude.Ball(radius=2.0)
    norms, values = (torch.as_tensor(v, dtype=torch.float64) for v in h.plot().axes[0].lines[0].get_data())
    torch.testing.assert_close(values, h(norms))
    assert (float(norms.min()), float(norms.max())) == (0.0, 6.0)
    degrees, values = (
        torch.as_tensor(v, dtype=torch.float64) for v in angular.Linear().plot().axes[0].lines[0].get_data()
    )
    torch.testing.assert_close(values, 1 - degrees / 90)


def test_the_operator_over_the_plane() -> None:
    """Odd along the filter, even across it, 0 in the middle, and what the picture shows."""
    plane = plots.on_plane(magnitude.Tanh(), angular.Cosine(), reach=3.0)
    torch.testing.assert_close(plane, -plane.flip(1))
    torch.testing.assert_close(plane, plane.flip(0))
    assert abs(float(plane[60, 60])) < 1e-12
    axes = magnitude.Tanh().plot(angular=angular.Cosine()).axes[0]
    torch.testing.assert_close(torch.as_tensor(axes.images[0].get_array().data), plane)


def test_a_notebook_shows_a_figure_and_axes_of_the_caller_are_used() -> None:
    figure = magnitude.Tanh().plot()
    assert figure._repr_png_().startswith(b"\x89PNG")
    axes = figure.add_subplot()
    assert angular.Cosine().plot(axes) is figure


def test_nothing_to_draw_is_an_error(measured: gonio.Measurements) -> None:
    bare = dataclasses.replace(measured["0"], angle_histogram=None, spectrum_quantiles=None)
    with pytest.raises(InvalidArgumentError, match=r"plots\.angles: '0' has no angles"):
        plots.angles(bare)
    with pytest.raises(InvalidArgumentError, match=r"plots\.spectrum: '0' has no singular values"):
        plots.spectrum(bare)
    with pytest.raises(InvalidArgumentError, match=r"plots\.depth: 'nonsense' has no values"):
        measured.plot("nonsense")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    plots._picture.cache_clear()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"'matplotlib'.*pip install .gonio\[lab\]. \(in a clone"):
        magnitude.Tanh().plot()


# --- normalisation ------------------------------------------------------------------------------------


def expected_regions(shape: tuple[int, int, int]) -> dict[str, torch.Tensor]:
    """By definition: the entries that share statistics with the first one."""
    regions = {name: torch.zeros(shape, dtype=torch.bool) for name in ("BN", "LN", "IN", "GN", "SN")}
    regions["BN"][:, 0] = True
    regions["LN"][0] = True
    regions["IN"][0, 0] = True
    regions["GN"][0, : shape[1] // 2] = True
    regions["SN"] = regions["BN"] | regions["LN"]
    return regions


@pytest.mark.parametrize("name", ["BN", "LN", "IN", "GN", "SN"])
def test_regions_are_those_of_the_definitions(name: str) -> None:
    shape = (3, 4, 5)
    norm = plots._usual_norms(4, 5)[name]
    before = {key: value.clone() for key, value in norm.state_dict().items()}
    assert torch.equal(plots.averaged_over(norm, shape), expected_regions(shape)[name])
    assert all(torch.equal(before[key], value) for key, value in norm.state_dict().items())


def test_the_switchable_panel_is_that_of_the_layer() -> None:
    found = [plots.averaged_over(norm, (3, 4, 5)) for norm in (plots._EqualShares(), gonio.nn.SwitchableNorm1d(4))]
    assert torch.equal(*found)
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = gonio.nn.SwitchableNorm1d(4, eps=1e-12).double()(x)
    torch.testing.assert_close(plots._EqualShares()(x), expected, rtol=1e-6, atol=1e-8)


def test_regions_of_a_layer_of_ones_own() -> None:
    figure = plots.normalisation_regions({"tokens": nn.LayerNorm(5)}, shape=(2, 3, 5))
    assert [axes.get_title() for axes in figure.axes] == ["tokens"]
    assert plots.averaged_over(nn.LayerNorm(5), (2, 3, 5)).sum() == 5
    with pytest.raises(InvalidArgumentError, match=r"the shape that it takes; found \(2, 3, 2\) for \(2, 3, 5\)"):
        plots.normalisation_regions({"pool": nn.AdaptiveAvgPool1d(2)}, shape=(2, 3, 5))
