"""A page that a tracker keeps up to date while a network trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gonio
from gonio.errors import InvalidArgumentError
from gonio.measuring import tracker as tracker_module
from gonio.measuring.showing import training
from gonio.measuring.showing.training import SECONDS, LivePage

REFRESH = f'data-reload="{SECONDS}"'


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 6, generator=generator)).square().mean().backward()
        optimizer.step()


@pytest.fixture
def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 9))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)


def test_it_is_written_from_the_first_measured_step_on(network: Any, tmp_path: Path) -> None:
    model, optimizer = network
    path = tmp_path / "run.html"
    tracker = gonio.Tracker(model, optimizer=optimizer, every=2, page=path)
    train(model, optimizer, 1)
    assert not path.exists()
    train(model, optimizer, 1)
    first = path.read_text(encoding="utf-8")
    assert REFRESH in first
    train(model, optimizer, 6)
    assert path.read_text(encoding="utf-8") == first, "less than 10 seconds later"
    tracker.undo_()
    last = path.read_text(encoding="utf-8")
    assert last == tracker.to_html()
    assert REFRESH not in last
    assert "http" not in last.replace("http-equiv", "").replace("http://www.w3.org", "")
    assert [each.name for each in tmp_path.iterdir()] == ["run.html"]


def test_it_is_written_again_when_it_is_due(network: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "SECONDS", 0)
    monkeypatch.setattr(training, "_SHARE", 1e9)
    model, optimizer = network
    path = tmp_path / "run.html"
    tracker = gonio.Tracker(model, optimizer=optimizer, every=1, page=path)
    train(model, optimizer, 1)
    first = path.read_text(encoding="utf-8")
    train(model, optimizer, 2)
    assert path.read_text(encoding="utf-8") != first
    tracker.undo_()


@pytest.mark.parametrize(("every", "steps"), [(None, [2, 6, 10]), (2, [2, 4, 6, 8, 10])])
def test_by_default_fast_steps_are_measured_once_a_second(
    every: int | None, steps: list[int], network: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = network
    clock = Clock()
    monkeypatch.setattr(tracker_module, "EVERY", 2)
    monkeypatch.setattr(tracker_module.time, "monotonic", clock)
    tracker = gonio.Tracker(model, optimizer=optimizer, every=every, page=tmp_path / "run.html")
    for _ in range(10):
        clock.now += 0.3
        train(model, optimizer, 1)
    assert sorted({row["step"] for row in tracker.rows}) == steps
    tracker.undo_()


def test_without_a_page_the_clock_plays_no_part(network: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = network
    monkeypatch.setattr(tracker_module, "EVERY", 2)
    tracker = gonio.Tracker(model, optimizer=optimizer)
    train(model, optimizer, 6)
    assert sorted({row["step"] for row in tracker.rows}) == [2, 4, 6]
    tracker.undo_()


def test_it_takes_a_fiftieth_of_the_time_at_most(tmp_path: Path) -> None:
    clock = Clock()
    page = LivePage(tmp_path / "a.html", clock)

    def slow() -> str:
        clock.now += 3.0
        return f"at {clock.now:g}"

    written = []
    while clock.now < 1000:
        before = clock.now
        if page.renew(slow):
            written.append(before)
        clock.now += 1.0
    assert len(written) * 3.0 / 1000 <= 0.021
    assert written[0] == 0.0
    quick = LivePage(tmp_path / "b.html", clock)
    assert quick.renew(lambda: "x")
    clock.now += SECONDS - 0.1
    assert not quick.renew(lambda: "y")
    clock.now += 0.1
    assert quick.renew(lambda: "z")
    assert quick.path.read_text() == "z"


def test_a_page_that_cannot_be_written_is_one_warning_and_training_goes_on(network: Any, tmp_path: Path) -> None:
    model, optimizer = network
    folder = tmp_path / "gone"
    folder.mkdir()
    tracker = gonio.Tracker(model, optimizer=optimizer, every=1, page=folder / "run.html")
    folder.rmdir()
    with pytest.warns(UserWarning, match="a logger or the page lacks step 1: FileNotFoundError"):
        train(model, optimizer, 3)
    assert {row["step"] for row in tracker.rows} == {1, 2, 3}


@pytest.mark.parametrize(
    ("page", "given", "match"),
    [
        ("run.txt", True, r"is the path of a page; found 'run\.txt'\. Let it end in \.html"),
        ("no/run.html", True, r"found no folder no\. Create it"),
        ("run.html", False, r"shows steps with optimizer=; found none"),
    ],
)
def test_errors(
    network: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str, given: bool, match: str
) -> None:
    monkeypatch.chdir(tmp_path)
    model, optimizer = network
    with pytest.raises(InvalidArgumentError, match=match):
        gonio.Tracker(model, optimizer=optimizer if given else None, page=page)
