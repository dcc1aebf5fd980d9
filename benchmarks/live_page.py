"""What a tracker with a live page costs a training at its default interval, with the page that it writes.

    python -m benchmarks.live_page [rounds [seconds [network…]]]

Two copies of a network train in turns, one of them with `gonio.Tracker(model, optimizer=…, page=…)`: all figures at
every 100th step but at most once a second, a page at most every 10 seconds. A turn is at least so many seconds of whole
intervals of 100 steps, so that it has pages; the order of the two changes from round to round, and the ratio of a round
is that of the times of a step. The goal is 1.03. As many rounds of two copies without a tracker show the noise.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import gonio
from benchmarks.machine import describe, versions
from benchmarks.results import FOLDER, Ratio, ratio
from benchmarks.whole_steps import Network, networks

RESULT = FOLDER / "live_page.json"
ROUNDS, SECONDS, EVERY, GOAL = 7, 25.0, 100, 1.03
Train = Callable[[int], None]


def training(network: Network, page: Path | None) -> tuple[Train, gonio.Tracker | None]:
    """A function that trains a network for so many steps, with a tracker that writes a page or without one."""
    torch.manual_seed(0)
    model = network.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    tracker = None if page is None else gonio.Tracker(model, optimizer=optimizer, page=page)
    draw = torch.Generator().manual_seed(1)
    inputs = network.inputs(draw)
    labels = torch.randint(10, tuple(model(inputs).shape[:-1]), generator=draw)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten()).backward()
            optimizer.step()

    return train, tracker


def turn(train: Train, seconds: float) -> tuple[float, float]:
    """Seconds and processor seconds of a step in at least so many seconds of whole intervals."""
    began, cpu, steps = time.perf_counter(), time.process_time(), 0
    while not steps or time.perf_counter() - began < seconds:
        train(EVERY)
        steps += EVERY
    return (time.perf_counter() - began) / steps, (time.process_time() - cpu) / steps


def measured(network: Network, *, rounds: int, seconds: float, tracked: bool = True) -> dict[str, Any]:
    """The ratios of the rounds, and what was written meanwhile."""
    torch.set_num_threads(network.threads)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "run.html"
        plain, _ = training(network, None)
        ours, tracker = training(network, page if tracked else None)
        for train in (plain, ours):
            train(3)
        found: dict[str, list[float]] = {"wall": [], "cpu": []}
        steps = []
        for i in range(rounds):
            times = {}
            for name, train in [("plain", plain), ("ours", ours)][:: 1 if i % 2 else -1]:
                times[name] = turn(train, seconds)
            for ratios, with_page, without in zip(found.values(), times["ours"], times["plain"], strict=True):
                ratios.append(with_page / without)
            steps.append(times["plain"][0])
        size = page.stat().st_size if page.exists() else 0
        rows = 0 if tracker is None else len(tracker.rows)
    return {
        "case": network.name,
        "tracked": tracked,
        **{name: asdict(Ratio.of(ratios)) for name, ratios in found.items()},
        "milliseconds": 1e3 * sorted(steps)[len(steps) // 2],
        "rounds": rounds,
        "rows": rows,
        "page_bytes": size,
    }


def table(made: Mapping[str, Any]) -> str:
    """The table of docs/howto/training-dynamics.md."""
    titles = ("step, ms", "with tracker and page", "processor time", "without, beside itself", "page, kB")
    lines = [f"| | {' | '.join(titles)} |", "|---|" + "--:|" * len(titles)]
    by_case = {(row["case"], row["tracked"]): row for row in made["rows"]}
    for row in made["rows"]:
        if row["tracked"]:
            control = by_case.get((row["case"], False))
            noise = "–" if control is None else ratio(Ratio(**control["wall"]))
            cells = (
                row["case"],
                f"{row['milliseconds']:.1f}",
                *(ratio(Ratio(**row[name])) for name in ("wall", "cpu")),
                noise,
            )
            lines.append(f"| {' | '.join(cells)} | {row['page_bytes'] / 1000:.0f} |")
    names = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    text = (
        f"Time of a step as a ratio to the plain one with AdamW, median (quartiles) of {made['rounds']} rounds of "
        f"{made['seconds']:g} s; {made['machine']['processor']}, {names}."
    )
    return "\n".join([*lines, "", text + (" From a short run." if made["quick"] else "")])


def main() -> None:
    """Measure the networks of `benchmarks.whole_steps`, each also without a tracker, and write the result."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else SECONDS
    rows, chosen = [], sys.argv[3:]
    for network in (each for each in networks(quick=False) if not chosen or each.name in chosen):
        for tracked in (True, False):
            rows.append(measured(network, rounds=rounds, seconds=seconds, tracked=tracked))
            print(json.dumps(rows[-1]), flush=True)
    made = {"machine": describe(), "versions": versions(), "rounds": rounds, "seconds": seconds,
            "quick": rounds < ROUNDS or seconds < SECONDS, "rows": rows}  # fmt: skip
    RESULT.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
