"""What fine-tuning does to a trained transformer: all weights, LoRA, DoRA and OFT at several ranks and learning rates.

    python -m benchmarks.fine_tuning [SEEDS]

A byte-level transformer learns Python source (the task `bytes`) and is then tuned on English, the manual pages of
Python's `pydoc`. Adapters are those of peft, read from the folders that it saves. Each intruder count of
:func:`gonio.measure` is held against a full SVD in float64 of the weights that peft merges. It needs
peft, which imports transformers and with it torchvision: of one kind with torch, both for the CPU or both for CUDA. The
result is benchmarks/results/fine_tuning.json, from which `benchmarks.tables` fills a page's `fine_tuning` block.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn

import gonio
from benchmarks.machine import describe, versions
from benchmarks.results import FOLDER
from gonio.lab.plan import TrainingConfig
from gonio.lab.running.training import evaluate, fit, prepare_process
from gonio.lab.tasks import bytes_
from gonio.lab.tasks.task import Split, Task

__all__ = ["RESULT", "WAYS", "main", "table"]

RESULT = FOLDER / "fine_tuning.json"
SEEDS = 5
WIDTH, CONTEXT = 128, 128
TARGETS = ["qkv", "out", "up", "down"]  # of each block
PATHS = [f"blocks.{block}.{name}" for block in (0, 1) for name in TARGETS]
State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Way:
    """One way of tuning."""

    method: str
    lr: float
    rank: int = 0  # of an adapter; the size of OFT's blocks

    @property
    def name(self) -> str:
        size = {"full": "", "OFT": f", blocks of {self.rank}"}.get(self.method, f", rank {self.rank}")
        return f"{self.method}{size}"


WAYS = (
    *(Way("full", lr) for lr in (3e-4, 1e-3)),
    *(Way("LoRA", lr, rank) for rank in (1, 8, 64) for lr in (1e-3, 1e-2)),
    *(Way("DoRA", lr, rank) for rank in (1, 8) for lr in (1e-3, 1e-2)),
    *(Way("OFT", lr, rank) for rank in (16, 32) for lr in (1e-3, 1e-2)),
)


def english() -> Task:
    """Windows of the manual in place of those of the source; one in ten validates, one in five tests."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    starts = range(0, len(text) - CONTEXT - 1, CONTEXT)
    ids = torch.tensor([list(text[at : at + CONTEXT + 1]) for at in starts])
    place = torch.arange(len(ids)) // 16 % 10  # whole passages, so that neighbours are in one split
    chosen = {"train": place > 2, "validation": place == 0, "test": (place == 1) | (place == 2)}
    windows = {name: ids[rows][:512] for name, rows in chosen.items()}
    return replace(
        bytes_(), **{name: Split(w[:, :-1].contiguous(), w[:, 1:].contiguous()) for name, w in windows.items()}
    )


def trained(model: nn.Module, task: Task, *, lr: float, epochs: int, seed: int) -> None:
    training = TrainingConfig(epochs=epochs, batch_size=16, lr=lr, optimizer="adamw", warm_up=0.5)
    done = fit(model, task, training=training, seed=seed)
    if done.diverged is not None:
        raise RuntimeError(done.diverged)


def base_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = gonio.models.ByteTransformer(width=WIDTH, context=CONTEXT)
    trained(model, bytes_(), lr=3e-3, epochs=8, seed=seed)
    return model


def adapted(base: nn.Module, way: Way) -> nn.Module:
    """peft's model of an adapter; a copy of the base for full fine-tuning."""
    if way.method == "full":
        return copy.deepcopy(base)
    import peft

    if way.method == "OFT":
        config = peft.OFTConfig(r=0, oft_block_size=way.rank, target_modules=TARGETS)
    else:
        dora = way.method == "DoRA"
        config = peft.LoraConfig(r=way.rank, lora_alpha=2 * way.rank, target_modules=TARGETS, use_dora=dora)
    return peft.get_peft_model(copy.deepcopy(base), config)


def intruders_of(base: Tensor, tuned: Tensor, *, top: int = 10, least: float = 0.5) -> int:
    """The definition by a full SVD in float64."""
    before, after = (torch.linalg.svd(w.double(), full_matrices=False).U for w in (base, tuned))
    return int(((before.T @ after[:, :top]).abs().amax(0) < least).sum())


def tuned(base: nn.Module, way: Way, seed: int) -> dict[str, Any]:
    """One tuning: bits per byte on both texts, and what gonio says of the change."""
    torch.manual_seed(seed)
    model, text = adapted(base, way), english()
    trained(model, text, lr=way.lr, epochs=3, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        if way.method == "full":
            merged, source = model, dict(model.state_dict())
        else:
            model.save_pretrained(folder)
            merged, source = copy.deepcopy(model).merge_and_unload(), folder
        found = gonio.measure(base.state_dict(), source)
    exact = {path: intruders_of(base.get_submodule(path).weight, merged.get_submodule(path).weight) for path in PATHS}
    shown = {path: found[path] for path in PATHS}
    return {
        **asdict(way),
        "seed": seed,
        "english": evaluate(model, text, text.test),
        "python": evaluate(model, bytes_(), bytes_().test),
        "relative": statistics.fmean(d.relative for d in shown.values()),
        "effective_rank": statistics.fmean(d.effective_rank for d in shown.values()),
        "gram_change": statistics.fmean(d.gram_change / d.relative for d in shown.values()),
        "intruders": sum(d.intruders for d in shown.values()),
        "by_chance": sum(d.intruders_random or 0 for d in shown.values()),  # None without intruders
        "exact": sum(exact.values()),
        "forms": sorted({d.form for d in shown.values()}),
        "codes": sorted({finding.code for finding in found.findings}),
    }


def of_seed(seed: int) -> list[dict[str, Any]]:
    prepare_process()
    base = base_of(seed)
    start = {name: evaluate(base, task, task.test) for name, task in (("english", english()), ("python", bytes_()))}
    return [{"method": "base", "seed": seed, **start}, *(tuned(base, way, seed) for way in WAYS)]


# --- the table ----------------------------------------------------------------------------------------------------


def table(found: Mapping[str, Any]) -> str:
    """A line per way of tuning: means over the seeds."""
    runs, seeds = found["runs"], found["seeds"]
    start = [run for run in runs if run["method"] == "base"]
    head = "| tuned | rate | English | Python | ‖Δ‖/‖W‖ | effective rank | intruders of 80 (least–most) | by chance |"
    lines = [
        head,
        f"|---|{'--:|' * 7}",
        f"| not at all | – | {_mean(start, 'english')} | {_mean(start, 'python')} | – | – | – | – |",
    ]
    lines += [_line(way, [run for run in runs if _is(run, way)]) for way in WAYS]
    off = max(abs(run["intruders"] - run["exact"]) for run in runs if run["method"] != "base")
    same = "equal those" if off == 0 else f"differ by at most {off} from those"
    names = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return "\n".join(
        [
            *lines,
            "",
            f"Bits per byte on test windows of both texts, and figures of the eight tuned matrices, as means over "
            f"{seeds} bases with seeds of their own. All counts of intruders {same} of a full SVD in float64. {names}.",
        ]
    )


def _is(run: Mapping[str, Any], way: Way) -> bool:
    return (run["method"], run.get("lr"), run.get("rank")) == (way.method, way.lr, way.rank)


def _line(way: Way, runs: list[dict[str, Any]]) -> str:
    counts = [run["intruders"] for run in runs]
    intruders = f"{statistics.fmean(counts):.1f} ({min(counts)}–{max(counts)})"
    cells = [_mean(runs, "english"), _mean(runs, "python"), _mean(runs, "relative"), _mean(runs, "effective_rank", 0)]
    return f"| {way.name} | {way.lr:g} | {' | '.join(cells)} | {intruders} | {_mean(runs, 'by_chance', 1)} |"


def _mean(runs: list[dict[str, Any]], key: str, digits: int = 2) -> str:
    return f"{statistics.fmean(run[key] for run in runs):.{digits}f}"


def main(words: list[str]) -> None:
    seeds = int(words[0]) if words else SEEDS
    with ProcessPoolExecutor(describe()["cores"], mp_context=multiprocessing.get_context("fork")) as pool:
        runs = [run for found in pool.map(of_seed, range(seeds)) for run in found]
    RESULT.write_text(json.dumps({"seeds": seeds, "versions": versions() | _peft(), "runs": runs}, indent=1) + "\n")
    print(table(json.loads(RESULT.read_text(encoding="utf-8"))))


def _peft() -> dict[str, str]:
    import peft

    return {"peft": peft.__version__}


if __name__ == "__main__":
    main(sys.argv[1:])
