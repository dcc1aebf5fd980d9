"""Figures while a model trains: the training is the same to the last bit, and every logger gets its scalars."""

from __future__ import annotations

import copy
import csv
import logging
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gonio
from gonio.errors import InvalidArgumentError, NoMatchError
from gonio.measuring.tracker import FIGURES
from measuring.nets import Watch, network
from measuring.nets import train as trained


def train(tracker_of: Watch | None = None) -> tuple[dict[str, Any], Any]:
    return trained("SGD", tracker_of, each=True)


def test_the_training_is_the_same_to_the_last_bit() -> None:
    plain, _ = train()
    tracked, tracker = train(lambda model, _: gonio.Tracker(model, every=1))
    assert plain.keys() == tracked.keys()
    assert [name for name in plain if not torch.equal(plain[name], tracked[name])] == []
    assert len(tracker.rows) == 18
    disturbed, _ = train(lambda model, _: Disturbing(model))
    assert not torch.equal(plain["random"], disturbed["random"])


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_tracker_is_not_copied_and_its_model_and_rows_are(act: Callable[[Any], Any]) -> None:
    """A copy would record nothing, and its undo_() would end the tracker that records."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = gonio.Tracker(model, optimizer=optimizer, every=1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with pytest.raises(
        InvalidArgumentError, match=r"a Tracker observes .*; found a copy or a pickle of it\. Keep rows"
    ):
        act(tracker)
    for each in (model, optimizer, tracker.rows, tracker.heads, tracker.findings):
        act(each)
    tracker.undo_()


class Disturbing:
    """What a tracker must not do."""

    def __init__(self, model: nn.Module) -> None: ...

    def step(self) -> None:
        torch.rand(1)


def test_the_figures_are_those_of_measure() -> None:
    model = network()
    tracker = gonio.Tracker(model)
    tracker.measure()
    found = gonio.measure(model)
    assert [row["layer"] for row in tracker.rows] == ["0", "4", "6"]
    for row in tracker.rows:
        tensor = found[row["layer"]]
        assert row["step"] == 0
        assert row["norm_max"] == tensor.norm_quantiles[-1]
        assert row["norm_min"] == tensor.norm_quantiles[0]
        for name in set(FIGURES) - {"norm_min", "norm_max"}:
            assert row.get(name) == getattr(tensor, name), name
    assert "alignment" not in tracker.rows[1]  # depthwise: no pairs


def test_it_measures_at_its_interval_and_no_number_twice() -> None:
    tracker = gonio.Tracker(nn.Linear(4, 3), every=3)
    for _ in range(7):
        tracker.step()
    assert [row["step"] for row in tracker.rows] == [3, 6]
    for number in (8, 9, 9, 9, 10, 12):
        tracker.step(number)
    assert [row["step"] for row in tracker.rows] == [3, 6, 9, 12]


def test_layers_are_chosen_and_swaps_are_followed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tracker = gonio.Tracker(model, every=1, where="1")
    tracker.step()
    model[1] = nn.Linear(9, 2)
    tracker.step()
    assert [row["layer"] for row in tracker.rows] == ["1", "1"]
    assert tracker.rows[1]["frobenius"] == pytest.approx(float(model[1].weight.detach().norm()), rel=1e-6)
    with pytest.raises(NoMatchError, match=r"Tracker.* where=2.*: 0, 1"):
        gonio.Tracker(model, where="2")


def test_a_weight_that_diverged_says_so() -> None:
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight.fill_(torch.nan)
    tracker = gonio.Tracker(model, every=1)
    tracker.step()
    assert tracker.rows[0]["nonfinite"] == 12
    assert "frobenius" not in tracker.rows[0]


class Recorder:
    """A logger with one method; what it was called with."""

    def __init__(self, method: str) -> None:
        self.calls: list[tuple[Any, ...]] = []
        setattr(self, method, lambda *words, **named: self.calls.append((*words, named)))


def tracked(logger: Any) -> dict[str, float]:
    tracker = gonio.Tracker(nn.Linear(4, 3), logger, every=5)
    for _ in range(5):
        tracker.step()
    (row,) = tracker.rows
    return {name: row[name] for name in FIGURES}


def test_tensorboard_and_mlflow_get_one_scalar_at_a_time() -> None:
    for method, end in (("add_scalar", (5, {})), ("log_metric", ({"step": 5},))):
        logger = Recorder(method)
        row = tracked(logger)
        assert logger.calls == [(f"gonio.{name}/weight", row[name], *end) for name in FIGURES]


@pytest.mark.parametrize("method", ["log_metrics", "log"])
def test_lightning_and_wandb_get_them_together(method: str) -> None:
    logger = Recorder(method)
    row = tracked(logger)
    assert logger.calls == [({f"gonio.{name}/weight": row[name] for name in FIGURES}, {"step": 5})]


def test_a_function_gets_the_figures_by_layer() -> None:
    calls: list[Any] = []
    row = tracked(lambda step, rows: calls.append((step, rows)))
    assert calls == [(5, {"weight": row})]


def test_several_loggers_get_the_same() -> None:
    first, second = Recorder("log"), Recorder("log")
    tracked([first, second])
    assert first.calls == second.calls != []


def test_a_csv_file_is_appended_to_and_never_mixed(tmp_path: Path) -> None:
    path = tmp_path / "track.csv"
    row = tracked(path)
    tracked(str(path))
    with path.open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [(line["step"], line["layer"]) for line in lines] == [("5", "weight")] * 2
    assert {name: float(lines[0][name]) for name in FIGURES} == row
    path.write_text("a,b\n")
    with pytest.raises(InvalidArgumentError, match=r"found a file with a, b\. Name another file"):
        tracked(path)
    assert path.read_text() == "a,b\n"


@pytest.mark.parametrize("logger", [7, object(), logging.getLogger("x")])
def test_what_is_no_logger_is_refused(logger: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"a logger has add_scalar, log_metrics, .*; found (int|object|Log)"):
        gonio.Tracker(nn.Linear(2, 2), logger)


@pytest.mark.parametrize("every", [0, -1, 2.5, True])
def test_the_interval_is_a_number_of_steps(every: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"Tracker\(every=\) is a number of steps; found"):
        gonio.Tracker(nn.Linear(2, 2), every=every)


def test_the_frame_has_every_column() -> None:
    tracker = gonio.Tracker(network(), every=1)
    tracker.step()
    frame = tracker.to_frame()
    assert list(frame.columns) == ["step", "layer", *FIGURES]
    assert frame["alignment"].isna().tolist() == [False, True, False]


def test_findings_arise_with_the_step_at_which_they_are_seen() -> None:
    """Filters that become one direction at the third step: found there, once; a healthy network has none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 12))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tracker = gonio.Tracker(model, optimizer=optimizer, every=1)
    healthy = gonio.Tracker(model[2], every=1)
    for step in range(1, 6):
        optimizer.zero_grad()
        model(torch.randn(4, 20)).square().mean().backward()
        if step == 3:
            with torch.no_grad():
                model[0].weight.copy_(torch.randn(20) + 0.01 * torch.randn(16, 20))
        optimizer.step()
        healthy.step()
    assert {step for step, _ in tracker.findings} == {3}
    assert {finding.code for _, finding in tracker.findings} & {"G201", "G301"}
    assert {finding.path for _, finding in tracker.findings} == {"0"}
    assert healthy.findings == []
    assert "From step 3 on, 0: " in tracker.to_html()
    assert "finding" in repr(tracker)
    tracker.undo_()


# --- histograms -------------------------------------------------------------------------------------------------------


class Drawer(Recorder):
    """A logger that takes scalars and histograms, as TensorBoard's writer does."""

    def __init__(self) -> None:
        super().__init__("add_scalar")
        self.drawn: dict[str, dict[str, Any]] = {}

    def add_histogram_raw(self, tag: str, **named: Any) -> None:
        self.drawn[tag] = named


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.Conv2d(4, 4, 3, groups=4))


def test_tensorboard_gets_histograms_of_norms_and_angles_on_request() -> None:
    model, logger, plainly = layers(), Drawer(), Drawer()
    tracker = gonio.Tracker(model, logger, every=1, histograms=True)
    gonio.Tracker(model, plainly, every=1).step()
    tracker.step(7)
    assert plainly.drawn == {}
    assert [(*call[:2], call[2]) for call in logger.calls] == [(*call[:2], 7) for call in plainly.calls]
    assert {*logger.drawn} == {"gonio.norms/0", "gonio.angles/0", "gonio.norms/1"}  # a depthwise layer has no angles
    norms = torch.linalg.vector_norm(model[0].weight.detach().double(), dim=1).numpy()
    counts, edges = np.histogram(norms, 64)
    drawn = logger.drawn["gonio.norms/0"]
    assert (drawn["bucket_counts"], drawn["num"], drawn["global_step"]) == (counts.tolist(), 30, 7)
    assert drawn["bucket_limits"] == pytest.approx(edges[1:])
    moments = [norms.min(), norms.max(), norms.sum(), np.square(norms).sum()]
    assert [drawn[name] for name in ("min", "max", "sum", "sum_squares")] == pytest.approx(moments)
    angles, row = logger.drawn["gonio.angles/0"], gonio.measure(model)["0"]
    assert angles["bucket_counts"] == list(row.angle_histogram or ())
    assert (angles["bucket_limits"], angles["num"]) == ([*range(1, 181)], 435)
    assert angles["sum"] == pytest.approx(435 * (row.angle_mean or 0))
    assert angles["min"] <= (row.angle_mean or 0) <= angles["max"]


def test_a_run_of_wandb_gets_histograms(monkeypatch: pytest.MonkeyPatch) -> None:
    class Run:
        def __init__(self) -> None:
            self.logged: list[tuple[dict[str, Any], int]] = []

        def log(self, figures: dict[str, Any], *, step: int) -> None:
            self.logged.append((figures, step))

    fake = SimpleNamespace(Run=Run, Histogram=lambda np_histogram: ("histogram", *np_histogram))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run = Run()
    gonio.Tracker(layers(), run, every=1, histograms=True).step()
    (scalars, _), (drawn, step) = run.logged
    assert all(isinstance(value, float) for value in scalars.values())
    kind, counts, edges = drawn["gonio.norms/0"]
    assert (kind, step, sum(counts), len(edges) - len(counts)) == ("histogram", 1, 30, 1)


def test_histograms_are_sent_with_the_steps_of_an_optimizer() -> None:
    model, logger = nn.Sequential(nn.Linear(4, 3)), Drawer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = gonio.Tracker(model, logger, optimizer=optimizer, every=2, histograms=True)
    for step in range(1, 4):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        assert {each["global_step"] for each in logger.drawn.values()} == ({2} if step > 1 else set())
    tracker.undo_()


def test_a_layer_that_is_not_finite_has_the_histogram_of_the_rest() -> None:
    model, logger = nn.Sequential(nn.Linear(4, 3)), Drawer()
    with torch.no_grad():
        model[0].weight[0] = torch.inf
    gonio.Tracker(model, logger, every=1, histograms=True).step()
    assert logger.drawn["gonio.norms/0"]["num"] == 2


def test_histograms_need_a_logger_that_takes_them() -> None:
    optimizer = torch.optim.SGD((model := layers()).parameters(), lr=0.1)
    with pytest.raises(InvalidArgumentError, match="sends norms and angles to a logger; found no logger that takes"):
        gonio.Tracker(model, [Recorder("log"), Recorder("add_scalar")], histograms=True)
    with pytest.raises(InvalidArgumentError, match=r"found figures='training'\. Pass a SummaryWriter"):
        gonio.Tracker(model, Drawer(), optimizer=optimizer, figures="training", histograms=True)


def test_the_writer_of_tensorboard_stores_histograms(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        gonio.Tracker(layers(), writer, every=1, histograms=True).step()
    read = EventAccumulator(str(tmp_path)).Reload()
    assert {*read.Tags()["histograms"]} == {"gonio.norms/0", "gonio.angles/0", "gonio.norms/1"}
    assert read.Histograms("gonio.angles/0")[0].histogram_value.num == 435
