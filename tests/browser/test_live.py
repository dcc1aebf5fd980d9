"""The page of a tracker in a browser while a network trains: it reloads itself, and stops with the training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gonio
from browser.test_narrow import BROKEN

RELOADS = "body[data-reload]"


@dataclass
class Run:
    """A training whose page is written after each step, and reloads itself each second."""

    path: Path
    model: nn.Module
    optimizer: torch.optim.Optimizer
    tracker: gonio.Tracker

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(16, 8)).square().sum().backward()
            self.tracker._live._due = float("-inf")  # type: ignore[union-attr]
            self.optimizer.step()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr("gonio.measuring.tracker.SECONDS", 1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    path = tmp_path / "run.html"
    made = Run(path, model, optimizer, gonio.Tracker(model, optimizer=optimizer, every=1, page=path))
    made.train(2)
    return made


@pytest.fixture
def opened(chromium: Any, run: Run) -> Iterator[Callable[..., Any]]:
    """The page of the run as a function of options; a message on the console fails the test."""
    contexts: list[Any] = []
    said: list[str] = []

    def open_(**options: Any) -> Any:
        contexts.append(chromium.new_context(**{"viewport": {"width": 1200, "height": 900}, **options}))
        page = contexts[-1].new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(run.path.as_uri())
        return page

    yield open_
    for context in contexts:
        context.close()
    assert said == []


def test_it_shows_later_steps_by_itself_and_stops_with_the_training(run: Run, opened: Callable[..., Any]) -> None:
    page = opened()
    shown = page.locator("main").inner_text()
    assert page.locator(RELOADS).count() == 1
    run.train(5)
    changed = "(old) => document.querySelector('main')?.innerText !== old"
    page.wait_for_function(changed, arg=shown, timeout=15_000)
    run.tracker.undo_()
    page.wait_for_function(f"() => document.querySelector('{RELOADS}') === null", timeout=15_000)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(
    scheme: str,
    run: Run,
    opened: Callable[..., Any],
    violations: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gonio.measuring.tracker.SECONDS", 600)  # it must not reload while it is looked at
    run.train(1)
    page = opened(color_scheme=scheme)
    assert violations(page) == []
    page.set_viewport_size({"width": 390, "height": 900})
    assert page.evaluate(BROKEN) == []


def test_an_open_row_is_not_taken_from_the_reader(run: Run, opened: Callable[..., Any]) -> None:
    page = opened()
    row = page.locator("tr.open button").first
    row.click()
    run.train(3)
    page.wait_for_timeout(2500)
    assert row.get_attribute("aria-expanded") == "true"
    shown = page.locator("main").inner_text()
    row.click()
    page.wait_for_function("(old) => document.querySelector('main')?.innerText !== old", arg=shown, timeout=15_000)


def test_it_reloads_without_its_script_too(run: Run, opened: Callable[..., Any]) -> None:
    page = opened(java_script_enabled=False)
    shown = page.locator("main").inner_text()
    run.train(5)
    page.wait_for_timeout(3000)
    assert page.locator("main").inner_text() != shown
