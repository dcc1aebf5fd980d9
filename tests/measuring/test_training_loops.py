"""The tracker in loops of others: loggers that fail, folders that change, numbers that are left out, divergence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gonio
from gonio.errors import GonioWarning


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_a_logger_that_fails_costs_its_own_steps_only(with_optimizer: bool) -> None:
    model, steps = layer(), list[int]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fails(step: int, rows: Any) -> None:
        raise ConnectionError("no server")

    tracker = gonio.Tracker(
        model, [fails, lambda step, rows: steps.append(step)], optimizer=optimizer if with_optimizer else None, every=1
    )

    def train() -> None:
        for _ in range(3):
            model(torch.randn(5, 4)).square().sum().backward()
            optimizer.step()
            tracker.step()

    with pytest.warns(GonioWarning, match="lacks step 1: ConnectionError: no server") as found:
        train()
    assert len(found) == 1
    assert steps == [row["step"] for row in tracker.rows] == [1, 2, 3]


def test_files_stay_where_they_were_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = gonio.Tracker(model, "run.csv", optimizer=optimizer, every=1, figures="training", page="run.html")
    os.chdir("other")
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    tracker.undo_()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "run.csv", "run.html"]
    assert len((tmp_path / "run.csv").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("numbers", "steps"),
    [
        (range(1, 40, 2), [11, 21, 31]),  # two optimizers, after a step of one of them
        (range(3, 40, 3), [12, 21, 30]),
        (range(25, 45), [30, 40]),  # a resumed training
    ],
)
def test_numbers_that_leave_out_the_interval_are_measured_after_it(numbers: range, steps: list[int]) -> None:
    tracker = gonio.Tracker(layer(), every=10)
    for number in numbers:
        tracker.step(number)
    assert [row["step"] for row in tracker.rows] == steps


def test_a_divergence_is_found_with_the_figures_of_the_training_alone() -> None:
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = gonio.Tracker(model, optimizer=optimizer, every=1, figures="training")
    for scale in (1.0, torch.nan, 1.0):
        optimizer.zero_grad()
        (model(torch.randn(5, 4)).square().sum() * scale).backward()
        optimizer.step()
    assert [row.get("nonfinite") for row in tracker.rows] == [None, 12, 12]
    assert [(step, found.code) for step, found in tracker.findings] == [(2, "G001")]
    assert "From step 2 on" in tracker.to_html()
