"""Orthogonal convolutions beside Orthogonium and torchlip: training steps, deviation from orthogonality, memory.

    python -m benchmarks.orthogonal_conv [--quick]

It needs `pip install orthogonium deel-torchlip` and measures all of them in one process. The result is
benchmarks/results/orthogonal_conv.json, from which `benchmarks.tables` fills a page's `orthogonal_conv` block.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Candidate, Operation, Row, Settings, measure
from benchmarks.machine import TUNED_MALLOC, describe, restart_with, versions
from benchmarks.results import RowResult, path_of
from gonio import parametrizations as P
from gonio.geometry import layout_of
from gonio.geometry.conv_operator import frequencies, polyphase_grid, taps_of

RESULT = path_of("orthogonal_conv")
DEPTH, STEPS = 3, 5  # layers of a chain; training steps before orthogonality is measured
RATE = 1e-3  # of SGD: at 0.05 the iterations of Orthogonium no longer converge for 256 channels, and σ is off by 1


@dataclass(frozen=True)
class Case:
    """A chain of equal layers and its batch; a strided layer stands alone."""

    channels: int
    out: int
    kernel: int
    stride: int
    size: int
    batch: int

    @property
    def name(self) -> str:
        stride = f", stride {self.stride}" if self.stride > 1 else ""
        return f"{self.channels} → {self.out}, {self.kernel}×{self.kernel}{stride}, {self.batch} maps of {self.size}²"

    @property
    def depth(self) -> int:
        return DEPTH if self.stride == 1 else 1


CASES = (
    Case(64, 64, 3, 1, 32, 32), Case(256, 256, 3, 1, 8, 32), Case(512, 512, 3, 1, 4, 32),
    Case(64, 128, 2, 2, 32, 32), Case(64, 128, 4, 2, 32, 32),
)  # fmt: skip
QUICK = (Case(4, 4, 3, 1, 8, 2), Case(4, 8, 2, 2, 8, 2), Case(4, 8, 4, 2, 8, 2))


def _plain(case: Case) -> nn.Module:
    padding = (case.kernel - case.stride + 1) // 2
    return nn.Conv2d(case.channels, case.out, case.kernel, case.stride, padding, bias=False, padding_mode="circular")


def _gonio(case: Case) -> nn.Module:
    layer = _plain(case)
    P.attach(layer, "weight", P.OrthogonalConv())
    return layer


def _orthogonium(case: Case) -> nn.Module:
    from orthogonium.layers.conv.AOC import AdaptiveOrthoConv2d

    like = _plain(case)
    return AdaptiveOrthoConv2d(
        case.channels, case.out, case.kernel, case.stride, like.padding[0], bias=False, padding_mode="circular"
    )


def _torchlip(case: Case) -> nn.Module:
    from deel.torchlip import SpectralConv2d

    like = _plain(case)
    return SpectralConv2d(
        case.channels, case.out, case.kernel, case.stride, like.padding[0], bias=False, padding_mode="circular"
    )


LIBRARIES: dict[str, Callable[[Case], nn.Module]] = {
    "gonio": _gonio, "Orthogonium": _orthogonium, "torchlip": _torchlip,
}  # fmt: skip


def _step(case: Case, build: Callable[[Case], nn.Module]) -> tuple[nn.Module, Operation]:
    """A chain of layers in training, and one step of it: forward, backward and SGD."""
    torch.manual_seed(0)
    model = nn.Sequential(*(build(case) for _ in range(case.depth)))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(case.batch, case.channels, case.size, case.size, generator=draw)
    target = torch.randn(case.batch, case.out, generator=draw)

    def step() -> list[Tensor]:
        optimizer.zero_grad()
        (model(x).mean((2, 3)) - target).square().sum(1).mean().backward()
        optimizer.step()
        return []

    return model, step


def _operation(case: Case, build: Callable[[Case], nn.Module]) -> Operation:
    return _step(case, build)[1]


@torch.no_grad()
def defect(model: nn.Module, size: int) -> float:
    """The largest |σ − 1| of the layers' operators on a periodic grid, in float64.

    All singular values of a layer that can be orthogonal or row- or column-orthogonal; those that the shapes force to
    be 0 do not exist on the smaller side.
    """
    worst = 0.0
    for layer in model.eval():
        weight, layout = layer.weight.double(), layout_of(layer)
        taps = taps_of(weight, layout)
        grid = polyphase_grid((size, size), layout, weight, taps.reach)
        sigma = torch.linalg.svdvals(taps.symbol(frequencies(grid, weight)))
        worst = max(worst, float((sigma - 1).abs().max()))
    return worst


def trained(case: Case, build: Callable[[Case], nn.Module]) -> float:
    """The deviation from orthogonality after some training steps."""
    model, step = _step(case, build)
    for _ in range(STEPS):
        step()
    return defect(model, case.size)


def measured(cases: tuple[Case, ...], settings: Settings) -> Iterator[dict[str, Any]]:
    for case in cases:
        candidates = [Candidate(name, partial(_operation, case, build)) for name, build in LIBRARIES.items()]
        floor = Candidate("plain", partial(_operation, case, _plain))
        found: RowResult = measure(Row(case.name, "step", floor, tuple(candidates)), settings)
        defects = {name: trained(case, build) for name, build in LIBRARIES.items()}
        print(case.name, {c.name: round(c.wall.median, 2) for c in found.candidates}, defects, file=sys.stderr)
        yield {**asdict(found), "defects": defects}


def table(found: dict[str, Any]) -> str:
    """A line per case: times of all libraries, what they leave of orthogonality, and their peak memory."""
    lines = [
        "| | plain step, ms | " + " | ".join(f"{name}: step · σ off by · MiB" for name in LIBRARIES) + " |",
        "|---|--:|" + "--:|" * len(LIBRARIES),
    ]
    for row in found["rows"]:
        cells = [
            f"×{each['wall']['median']:.2f} · {row['defects'][each['name']]:.0e} · {each['peak_mib']:.0f}"
            for each in row["candidates"]
        ]
        mark = " ¹" if row["disturbed"] else ""
        lines.append(f"| {row['case']}{mark} | {row['floor']['milliseconds']:.1f} | {' | '.join(cells)} |")
    names = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    noisy = " ¹ Other programs were running." if any(row["disturbed"] for row in found["rows"]) else ""
    said = (
        f"A step is forward, backward and SGD of {DEPTH} equal layers, one where it has a stride, as a ratio to the "
        f"same step with free kernels, median of rounds. σ: largest |σ − 1| on the periodic grid after {STEPS} steps. "
        f"MiB: newly allocated at the peak of one step. {found['machine']['processor']}, {found['threads']} threads; "
        f"{names}."
    )
    return "\n".join([*lines, "", said + noisy])


def main(words: list[str]) -> int:
    quick = "--quick" in words
    restart_with(TUNED_MALLOC, "benchmarks.orthogonal_conv", words)
    settings = Settings(rounds=2, sample_seconds=0.001, retries=0) if quick else Settings(rounds=9)
    threads = int(describe()["cores"])
    torch.set_num_threads(threads)
    names = {name: version(name) for name in ("orthogonium", "deel-torchlip")}
    found = {
        "machine": describe(), "threads": threads, "versions": versions() | names,
        "rows": list(measured(QUICK if quick else CASES, settings)),
    }  # fmt: skip
    path = RESULT.parent / "local" / RESULT.name if quick else RESULT
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
