"""Small adapters that peft trains and saves, for rules that must stay silent on them; resumable.

    python -m benchmarks.adapters [seeds]

Three bases (a byte transformer on Python source, a convolutional net and a perceptron on digits) are tuned on another
task (English, digits turned by 90 degrees) by adapters of several kinds, ranks, layers and learning rates. Each is a
folder below benchmarks/results/local/adapters, with its scores beside it; one that is there is not trained again.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gonio
from benchmarks.fine_tuning import english
from benchmarks.results import FOLDER
from gonio.lab.plan import TrainingConfig
from gonio.lab.running.training import evaluate, fit
from gonio.lab.tasks import bytes_, digits
from gonio.lab.tasks.task import Split, Task

__all__ = ["BASES", "LOCAL", "Tuning", "base_of", "main", "trained", "tunings"]

LOCAL = FOLDER / "local" / "adapters"
SEEDS = 2
SCORES = (("before", "after"), ("old_before", "old_after"))  # on the task of the adapter, and of the base
USUAL = (1e-3, 3e-3)  # learning rates of AdamW
HIGH = 3e-2
KINDS = (
    *(("LoRA", 1), ("LoRA", 4), ("LoRA", 16), ("rsLoRA", 8)),
    *(("DoRA", 4), ("PiSSA", 8), ("AdaLoRA", 4), ("OFT", 8)),
)


@dataclass(frozen=True)
class Base:
    """A kind of network: the layers that adapters change, by a name of the choice, and how long it is trained."""

    targets: dict[str, list[str]]
    lr: float
    epochs: int
    tuned: int  # epochs of an adapter


CONVOLUTIONS, LINEAR = ["conv1", "conv2", "conv3"], ["fc1", "fc2"]
BASES = {
    "transformer": Base(
        {"attention": ["qkv", "out"], "MLP": ["up", "down"], "all": ["qkv", "out", "up", "down"]}, 3e-3, 6, 3
    ),
    "convolutions": Base(
        {
            "convolutions": ["conv2", "conv3"],
            "linear": ["fc1", "fc2"],
            "all": ["conv1", "conv2", "conv3", "fc1", "fc2"],
        },
        3e-3,
        20,
        20,
    ),
    "perceptron": Base({"hidden": ["3", "5", "7", "9"], "all": ["1", "3", "5", "7", "9", "11"]}, 3e-3, 40, 30),
}


@dataclass(frozen=True)
class Tuning:
    """One adapter: of which base, its kind, rank (the size of OFT's blocks), layers and learning rate."""

    base: str
    kind: str
    rank: int
    targets: str
    lr: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.base}-{self.kind}-{self.rank}-{self.targets}-{self.lr:g}-{self.seed}".replace(" ", "_")

    @property
    def usual(self) -> bool:
        return self.lr in USUAL


def tunings(seeds: int = SEEDS) -> Iterator[Tuning]:
    """Every base and layers with one kind and rank after the other, so that all kinds meet all bases."""
    for seed in range(seeds):
        for base, one in BASES.items():
            for kind, rank in KINDS:
                for at, targets in enumerate(one.targets):
                    if targets != "linear" and base == "convolutions" and kind in ("AdaLoRA", "PiSSA", "OFT"):
                        continue  # peft has them for linear layers only, or in blocks that must divide each kernel
                    yield Tuning(base, kind, rank, targets, USUAL[(at + seed) % 2], seed)
            yield Tuning(base, "LoRA", 4, "all", HIGH, seed)


def turned() -> Task:
    """Digits turned by 90 degrees."""
    task = digits()
    parts = {name: getattr(task, name) for name in ("train", "validation", "test")}
    return replace(task, **{n: Split(s.inputs.rot90(1, (-2, -1)).contiguous(), s.targets) for n, s in parts.items()})


def network(base: str) -> nn.Module:
    if base == "transformer":
        return gonio.models.ByteTransformer(width=64, depth=4)
    if base == "convolutions":
        return gonio.models.digits_cnn()
    widths = [64, *[64] * 5]
    hidden = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64, 10))


@cache
def tasks(base: str) -> tuple[Task, Task]:
    """The task of the base, and that of the adapters."""
    return (bytes_(), english()) if base == "transformer" else (digits(), turned())


def learn(model: nn.Module, task: Task, lr: float, epochs: int, seed: int) -> None:
    training = TrainingConfig(epochs=epochs, batch_size=16, lr=lr, optimizer="adamw", warm_up=0.5)
    if (why := fit(model, task, training=training, seed=seed).diverged) is not None:
        raise RuntimeError(why)


@cache
def base_of(base: str, seed: int) -> nn.Module:
    """The trained network, from its file if it was trained before."""
    torch.manual_seed(seed)
    model, path = network(base), LOCAL / f"{base}-{seed}.pt"
    if path.exists():
        model.load_state_dict(torch.load(path))
        return model
    learn(model, tasks(base)[0], BASES[base].lr, BASES[base].epochs, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)
    return model


def adapted(model: nn.Module, tuning: Tuning, steps: int) -> nn.Module:
    """peft's model."""
    import peft

    targets, rank = BASES[tuning.base].targets[tuning.targets], tuning.rank
    if tuning.kind == "OFT":
        config: Any = peft.OFTConfig(r=0, oft_block_size=rank, target_modules=targets)
    elif tuning.kind == "AdaLoRA":
        config = peft.AdaLoraConfig(
            init_r=rank, target_r=rank, lora_alpha=2 * rank, target_modules=targets, total_step=steps
        )
    else:
        more: dict[str, Any] = {
            "LoRA": {},
            "rsLoRA": {"use_rslora": True},
            "DoRA": {"use_dora": True},
            "PiSSA": {"init_lora_weights": "pissa"},
        }[tuning.kind]
        config = peft.LoraConfig(r=rank, lora_alpha=rank if more else 2 * rank, target_modules=targets, **more)
    return peft.get_peft_model(copy.deepcopy(model), config)


def trained(tuning: Tuning) -> tuple[Path, dict[str, Any]]:
    """The folder of the adapter, and its scores: before and after on its task, before and after on the base's."""
    folder = LOCAL / tuning.name
    if (folder / "scores.json").exists():
        return folder, json.loads((folder / "scores.json").read_text(encoding="utf-8"))
    base, (old, new) = base_of(tuning.base, tuning.seed), tasks(tuning.base)
    torch.manual_seed(tuning.seed)
    epochs = BASES[tuning.base].tuned
    model = adapted(base, tuning, epochs * (len(new.train) // 16))
    learn(model, new, tuning.lr, epochs, tuning.seed)
    model.save_pretrained(folder)
    scores = {
        **asdict(tuning),
        "direction": new.metric.direction,
        "before": evaluate(base, new, new.test),
        "after": evaluate(model, new, new.test),
        "old_before": evaluate(base, old, old.test),
        "old_after": evaluate(model, old, old.test),
    }
    (folder / "scores.json").write_text(json.dumps(scores, indent=1), encoding="utf-8")
    return folder, scores


def main(words: list[str]) -> None:
    every = list(tunings(int(words[0]) if words else SEEDS))
    start = time.monotonic()
    for at, tuning in enumerate(every, start=1):
        _, scores = trained(tuning)
        said = (f"{scores[before]:.2f} -> {scores[after]:.2f}" for before, after in SCORES)
        print(f"{at} of {len(every)}, {time.monotonic() - start:.0f} s: {tuning.name} {', '.join(said)}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
