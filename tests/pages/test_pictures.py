"""Figures against independent numbers: the coordinates of an SVG give back the data, and hostile text stays text."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import gonio
from docs.pages import builder_of
from gonio.measuring.showing.page import agreement_lanes
from gonio.pages import pictures
from gonio.pages.charts import Lane, depth_lane, marks
from gonio.pages.picture import Area, Axis, Dots, Line, Picture, bare, fitted, spark, stairs, svg, ticks
from gonio.recipes import BASELINE
from html_reader import Page
from lab.showing.samples import effect, run
from lab.showing.test_page import PAYLOADS

HOSTILE = " ".join(PAYLOADS)
ROOT = Path(__file__).resolve().parents[2]


def points(data: str) -> list[list[tuple[float, float]]]:
    """The runs of points of path data with absolute M, L, H and V."""
    runs: list[list[tuple[float, float]]] = []
    x = y = 0.0
    for command, numbers in re.findall(r"([MLHV])([-\d. e]*)", data):
        values = [float(value) for value in numbers.split()]
        x = values[0] if command in "MLH" else x
        y = values[-1] if command in "MLV" else y
        runs += [[]] if command == "M" else []
        runs[-1].append((x, y))
    return runs


def paths(markup: Any) -> list[dict[str, str | None]]:
    return [attributes for tag, attributes in Page(f"<p>{markup}</p>").tags if tag == "path"]


def scale(markup: Any, labels: dict[str, float]) -> np.poly1d:
    """From pixels to data along one side, by the places of the tick labels."""
    places = re.findall(r'<text x="([\d.]+)"[^>]*text-anchor="middle"[^>]*>([^<]*)<', str(markup))
    found = {text: float(x) for x, text in places}
    known = [(found[text], value) for text, value in labels.items()]
    return np.poly1d(np.polyfit(*zip(*known, strict=True), 1))


@pytest.mark.parametrize(
    ("low", "high", "log", "expected"),
    [
        (0.0, 1.0, False, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (-0.3, 0.3, False, [-0.3, -0.2, -0.1, 0, 0.1, 0.2, 0.3]),
        (97.1, 97.2, False, [97.1, 97.12, 97.14, 97.16, 97.18, 97.2]),
        (1e-3, 1e3, True, [1e-3, 1e-2, 0.1, 1, 10, 100, 1e3]),
        (0.4, 6.0, True, [0.5, 1, 2, 5]),
        (2.0, 5.0, True, [2, 2.5, 3, 3.5, 4, 4.5, 5]),
    ],
)
def test_ticks_are_round_and_within(low: float, high: float, log: bool, expected: list[float]) -> None:
    assert ticks(low, high, log=log) == pytest.approx(expected)


def test_ticks_of_random_ranges_are_few_and_even() -> None:
    generator = np.random.default_rng(0)
    for _ in range(500):
        low = generator.normal() * 10.0 ** generator.integers(-6, 6)
        high = low + abs(generator.normal()) * 10.0 ** generator.integers(-6, 6) + 1e-9
        found = ticks(low, high)
        assert 2 <= len(found) <= 8, (low, high, found)
        assert all(low - 1e-6 * (high - low) <= at <= high + 1e-6 * (high - low) for at in found)
        assert np.ptp(np.diff(found)) <= 1e-5 * (high - low)
    assert ticks(0.5, 3.5, whole=True) == [1, 2, 3]


def test_the_coordinates_of_a_line_give_back_its_data() -> None:
    xs, ys = [1.0, 2.0, 3.0, 7.0], [0.5, None, 2.5, 0.25]
    picture = Picture("t", Axis(0.0, 10.0), Axis(0.0, 5.0), (Line(xs, ys),))
    drawn = svg(picture, width=300)
    to_x = scale(drawn, {"0": 0.0, "10": 10.0})
    line = next(one for one in paths(drawn) if one["stroke"] == "var(--c1)")
    first, second = points(line["d"] or "")
    assert [to_x(x) for x, _ in first + second] == pytest.approx([1.0, 3.0, 7.0], abs=0.02)
    (_, top), (_, bottom) = second
    assert first[0][1] == pytest.approx(bottom + (top - bottom) * (0.5 - 0.25) / (2.5 - 0.25), abs=0.2)


def test_logarithmic_and_downward_axes() -> None:
    assert Axis(1.0, 100.0, log=True).share(10.0) == pytest.approx(0.5)
    up, down = (Picture("t", Axis(0, 1), Axis(0, 1, down=way), (Line([0, 1], [0, 0.25]),)) for way in (False, True))
    heights = [[y for _, y in points(paths(bare(one, 10, 103))[0]["d"] or "")[0]] for one in (up, down)]
    assert heights == [[102, 77], [2, 27]]


def test_an_area_is_interrupted_where_a_value_is_missing() -> None:
    area = Area([0, 1, 2, 3, 4], [0, 0, None, 0, 0], [1, 1, 1, 1, 1], opacity=1.0)
    (only,) = paths(bare(Picture("t", Axis(0, 4), Axis(0, 1), (area,)), 40, 13))
    assert [[x for x, _ in run] for run in points(only["d"] or "")] == [[0, 10, 10, 0], [30, 40, 40, 30]]
    assert "fill-opacity:1" in (only["style"] or "")


@pytest.mark.parametrize(("dim", "width"), [(2, 5), (10, 1), (500, 2)])
def test_the_law_of_random_directions_is_a_density_per_degree(dim: int, width: int) -> None:
    edges = tuple(range(0, 181, width))
    shares = np.array(pictures.random_shares(dim, edges))
    assert (shares * width).sum() == pytest.approx(1.0, abs=1e-4)
    generator = np.random.default_rng(0)
    vectors = generator.standard_normal((2, 200_000, dim)) if dim <= 10 else None
    if vectors is not None:  # against directions that were drawn
        cosines = (vectors[0] * vectors[1]).sum(-1) / np.linalg.norm(vectors, axis=-1).prod(0)
        counted = np.histogram(np.degrees(np.arccos(cosines)), edges)[0] / (200_000 * width)
        assert np.abs(counted - shares).max() < 0.1 * shares.max()


def test_the_histogram_of_a_layer_gives_back_its_counts() -> None:
    torch.manual_seed(0)
    row = gonio.measure({"weight": torch.randn(40, 30)})["weight"]
    picture = pictures.layer_angles(row)
    assert picture is not None
    area, law = picture.marks
    assert isinstance(area, Area)
    assert isinstance(law, Line)
    edges, shares = np.array(area.xs)[::2], np.array(area.highs)[::2]
    widths = np.array(area.xs)[1::2] - edges
    assert (shares * widths).sum() * row.pairs == pytest.approx(40 * 39 / 2)
    for low, width, share in zip(edges, widths, shares, strict=True):
        assert share * width * row.pairs == pytest.approx(sum(row.angle_histogram[int(low) : int(low + width)]))
    drawn = points(paths(spark(picture))[0]["d"] or "")[0]
    top = min(y for _, y in drawn)
    assert (119 - top) / 117 == pytest.approx(max(shares) / picture.y.high, abs=0.01)


def test_the_spectrum_of_a_random_matrix_follows_its_law() -> None:
    torch.manual_seed(0)
    row = gonio.measure({"weight": torch.randn(300, 400)})["weight"]
    picture = pictures.layer_spectrum(row)
    assert picture is not None
    area, law = picture.marks
    assert isinstance(area, Area)
    assert isinstance(law, Line)
    torch.testing.assert_close(torch.tensor(area.highs), torch.tensor(law.ys), rtol=0.03, atol=0.3)
    planted = torch.randn(300, 400) + 0.5
    spiked = pictures.layer_spectrum(gonio.measure({"weight": planted})["weight"])
    assert spiked is not None
    assert spiked.marks[0].highs[-1] > 2 * spiked.marks[1].ys[-1]  # type: ignore[union-attr,operator,index]


def test_nothing_to_draw_is_none() -> None:
    row = gonio.measure({"weight": torch.ones(1, 3)})["weight"]
    assert pictures.layer_angles(row) is None
    assert spark(None) == ""
    assert (
        pictures.learning_curves([run(BASELINE, 0, curve={})], {BASELINE: "base"}, key="val_score", label="s") is None
    )


def test_effects_have_their_means_intervals_and_seeds() -> None:
    found = [effect("a", mean=0.6, half=0.2), effect("b", mean=-0.7, differences=(-0.7, 50.0, -60.0))]
    picture = pictures.effects(found, unit="points", band=0.5, better="max")
    lines = [mark for mark in picture.marks if isinstance(mark, Line) and mark.color != "muted"]
    assert [list(line.xs) for line in lines] == [pytest.approx([0.4, 0.8]), pytest.approx([-0.9, -0.5])]
    dots = [mark for mark in picture.marks if isinstance(mark, Dots)]
    assert [dot.xs[0] for dot in dots if dot.radius == 4.5] == [0.6, -0.7]
    assert [dot.shape for dot in dots if dot.shape != "dot"] == ["left", "right"]
    assert picture.x.label == "← worse · difference from the baseline, points · better →"
    assert pictures.effects(found, unit="", band=0.0, better="min").x.label.startswith("← better")
    assert picture.y.labels == ((0.0, "a"), (1.0, "b"))


def test_learning_curves_are_medians_over_finished_runs_with_their_range() -> None:
    curves = {0: [10.0, 20.0, 90.0], 1: [20.0, 30.0, None], 2: [60.0, 40.0, 95.0]}
    runs = [run("a", seed, curve={"val_score": curve}) for seed, curve in curves.items()]
    runs.append(run("a", 9, status="diverged", curve={"val_score": [1.0, 2.0]}))
    picture = pictures.learning_curves(runs, {"a": "c1"}, key="val_score", label="score")
    assert picture is not None
    area, line, lost, cross = picture.marks
    assert isinstance(area, Area)
    assert (list(line.xs), list(line.ys)) == ([1.0, 2.0, 3.0], [20.0, 30.0, 92.5])  # type: ignore[union-attr]
    assert (list(area.lows), list(area.highs)) == ([10.0, 20.0, 90.0], [60.0, 40.0, 95.0])
    assert (list(lost.xs), cross.shape, list(cross.xs)) == ([1.0, 2.0], "cross", [2.0])  # type: ignore[union-attr]
    assert picture.series == {"a": [20.0, 30.0, 92.5]}


def test_an_epoch_in_which_no_run_has_a_value_is_a_gap() -> None:
    runs = [run("a", seed, curve={"val_score": [0.5 + seed, None, 0.7 + seed]}) for seed in (0, 1)]
    picture = pictures.learning_curves(runs, {"a": "c1"}, key="val_score", label="score")
    assert picture is not None
    area, line = picture.marks
    assert isinstance(area, Area)
    assert list(line.ys) == pytest.approx([1.0, None, 1.2])  # type: ignore[union-attr]
    assert (list(area.lows), list(area.highs)) == ([0.5, None, 0.7], [1.5, None, 1.7])


def test_an_epoch_takes_its_measured_time_and_pictures_share_their_axes() -> None:
    runs = [run(name, 0, epochs=30) for name in (BASELINE, "a", "b")]
    shown, paces = {BASELINE: "base", "a": "c1"}, {"a": 1.5, "b": 2.0}
    timed = pictures.learning_curves(runs, shown, key="val_score", label="s", among=["a", "b"], paces=paces)
    plain = pictures.learning_curves(runs, shown, key="val_score", label="s", among=["a", "b"])
    assert timed is not None
    assert plain is not None
    assert [max(mark.xs) for mark in timed.marks if isinstance(mark, Line)] == [30, 45]
    assert [max(mark.xs) for mark in plain.marks if isinstance(mark, Line)] == [30, 30]
    assert timed.x.high >= 60
    assert (timed.series, list(plain.series or ())) == (None, [BASELINE, "a"])


def test_levels_and_pairs() -> None:
    series = {"b": [(4.0, [1.0, 3.0]), (1.0, [5.0])], "a": [(32.0, [2.0])]}
    picture = pictures.over_levels(series, axis="batch", label="accuracy", title="t")
    lines = [mark for mark in picture.marks if isinstance(mark, Line)]
    assert [(line.label, list(line.xs), list(line.ys)) for line in lines] == [("b", [1, 4], [5, 2]), ("a", [32], [2])]
    assert picture.x.log
    assert [text for _, text in picture.x.labels] == ["1", "4", "32"]
    scores = {"plain": {0: 1.0, 1: 2.0}, "other": {1: 4.0, 2: 6.0}}
    joined = [mark for mark in pictures.pairs(scores, label="s", title="t").marks if isinstance(mark, Line)]
    assert [list(line.ys) for line in joined] == [[2.0, 4.0], [1.5, 1.5], [5.0, 5.0]]
    many = pictures.pairs({f"arm-{i}": {0: float(i)} for i in range(9)}, label="s", title="t")
    assert [text for _, text in many.y.labels] == [f"arm-{i}" for i in range(9)]


def test_lanes_have_a_bar_per_layer_and_their_worst_level() -> None:
    lane = depth_lane(
        Lane("norm", "n", [1.0, None, 3.0], [(0.5, 2.0), None, (2.0, 4.0)], [1.0, 1.0, None]), ["", "", "warn"]
    )
    assert lane is not None
    assert (lane.top, lane.bottom) == ("4.00", "0")
    quiet, warned, *_ = paths(lane.svg)
    assert ("quiet" in (quiet["style"] or ""), "c5" in (warned["style"] or "")) == (True, True)
    ((x, top), *_, (_, bottom)) = points(warned["d"] or "")[0]
    assert x == pytest.approx(1000 * 2.15 / 3, abs=0.1)
    assert (55 - top, 55 - bottom) == pytest.approx((53, 53 / 2), abs=0.1)
    assert depth_lane(Lane("norm", "n", [None, math.nan]), ["", ""]) is None
    signed = depth_lane(Lane("cosine", "n", [1.0, -1.0]), ["", ""])
    assert signed is not None
    up, down = points(paths(signed.svg)[0]["d"] or "")
    assert ({y for _, y in up}, {y for _, y in down}) == ({2.0, 28.5}, {55.0, 28.5})
    assert len(paths(marks(["", "warn", "error", "warn"], "findings"))) == 3


def test_a_lane_of_every_layer_draws_the_small_beside_the_huge() -> None:
    """On four decades below the largest, healthy layers would all lie below the lower edge."""
    values = [0.02, 26_000.0, 0.0, 1.0]
    ranges = [(0.01, 0.03), (11_000.0, 95_000.0), (0.0, 0.0), (0.9, 1.1)]
    whole = depth_lane(Lane("norm", "n", values, ranges, every=True), [""] * 4)
    short = depth_lane(Lane("norm", "n", values, ranges), [""] * 4)
    assert whole is not None
    assert short is not None
    assert (whole.bottom, short.bottom) == ("0.01", "≤ 9.50")
    assert whole.note == "n; orange: 0"
    assert "stroke:var(--c2)" in whole.svg
    heights = [float(top) for top in re.findall(r"M[\d.]+ ([\d.]+)", re.findall(r'd="([^"]*)"', str(whole.svg))[0])]
    assert len(set(heights)) > 2


def test_several_changes_have_a_mark_where_they_are_all_alike() -> None:
    rows = [SimpleNamespace(relative=(0.1, 0.1, None), cosine_mean=0.5), SimpleNamespace(relative=(), cosine_mean=None)]
    change = agreement_lanes(rows)[0]
    assert (change.middles, change.ranges) == ([0.1, None], [(0.1, 0.1), None])


def test_a_lane_says_where_its_axis_is_cut() -> None:
    ranges = [(2.2e-16, 1.5), (0.4, 1.2), (0.0, 1.0)]
    lane = depth_lane(Lane("spectrum", "n", [1.0, 1.0, 0.5], ranges), [""] * 3)
    assert lane is not None
    assert lane.bottom == "≤ 1.5e−04"
    assert "≤ 1.5e−04" in lane.svg
    full = depth_lane(Lane("spectrum", "n", [1.0, 1.0], ranges=[(0.01, 1.5), (0.4, 1.2)]), ["", ""])
    assert full is not None
    assert full.bottom == "0.01"


def test_a_picture_alone_has_both_schemes_and_a_name() -> None:
    made = builder_of("build_claims").standalone(
        svg(Picture("A & B", Axis(0, 1), Axis(0, 1), (Line([0, 1], [0, 1]),)), width=200)
    )
    assert "var(" not in made
    assert 'xmlns="http://www.w3.org/2000/svg"' in made
    assert "<title>A &amp; B</title>" in made
    assert '[stroke="#0072b2"]{stroke:#56aee6}' in made
    assert 'stroke="#0072b2"' in made


def test_hostile_text_stays_text() -> None:
    axis = Axis(0, 1, HOSTILE, ticks=((0.5, HOSTILE),), opposite=((0.5, HOSTILE),))
    line = Line([0, 1], [0, 1], label=HOSTILE)
    picture = Picture(HOSTILE, axis, axis, (line, line), description=HOSTILE, ends=HOSTILE, series={HOSTILE: [1.0]})
    lane = depth_lane(Lane(HOSTILE, HOSTILE, [1.0]), [""])
    assert lane is not None
    for made in (svg(picture, width=300, legend=True), spark(picture), lane.svg):
        read = Page(f"<p>{made}</p>")
        assert read.names() <= {"p", "svg", "desc", "path", "text"}
        assert not {name for name in read.attributes() if name.startswith("on")}
        assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", str(made))
    home = svg(Picture("/home/alice/x", Axis(0, 1, "/home/alice/x"), Axis(0, 1), ()), width=200)
    assert "alice" not in str(home)


def test_the_same_picture_gives_the_same_text() -> None:
    xs, ys = stairs([0, 1, 2], [3.0, 4.0])
    assert (xs, ys) == ([0, 1, 1, 2], [3, 3, 4, 4])
    picture = Picture("t", Axis(*fitted(xs)), Axis(*fitted(ys)), (Line(xs, ys),))
    assert svg(picture, width=300) == svg(picture, width=300)


def test_a_long_path_is_whole() -> None:
    xs = [float(x) for x in range(5000)]
    line = Line(xs, [math.sin(x) for x in xs])
    for made in (
        svg(Picture("t", Axis(0, 5000), Axis(-1, 1), (line,)), width=9000),
        bare(Picture("t", Axis(0, 5000), Axis(-1, 1), (line,)), 9000, 100),
    ):
        assert max(len(points(one["d"] or "")[0]) for one in paths(made)) == 5000
    many = Picture("t", Axis(0, 5000), Axis(-1, 1), (line,), series={"<a>": line.ys})
    (curve,) = Page(f"<p>{svg(many, width=300)}</p>").values("data-curve")
    assert json.loads(curve)["series"]["<a>"] == list(line.ys)
    assert "more characters" in str(svg(Picture("t" * 30_000, Axis(0, 1), Axis(0, 1), ()), width=9))


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs" / "claims" / "images").glob("*.svg")), ids=lambda path: path.stem
)
def test_a_picture_of_a_claim_has_colours_for_dark_pages(path: Path) -> None:
    """Each colour that is dark on a light page has another one where the page is dark."""
    text = path.read_text(encoding="utf-8")
    sheet = re.search(r"@media \(prefers-color-scheme: dark\)\{(.*?)\}</style>", text, flags=re.DOTALL)
    assert sheet is not None
    changed = set(re.findall(r'\[(fill|stroke)="(#[0-9a-f]{6})"\]', sheet[1]))
    used = set(re.findall(r' (fill|stroke)="(#[0-9a-f]{6})"', text.replace(sheet[0], "")))
    assert used <= changed
