"""How often each rule of `gonio measure` fires on models that are in order: its rate of false alarms.

    python -m benchmarks.false_alarms random [models]
    python -m benchmarks.false_alarms trained [models]

Trained models are those of `trained_networks.py` that have learnt. Every random one is random in architecture
(perceptrons, convolutional nets with groups, depthwise and transposed layers, transformer blocks, recurrent nets,
embeddings), in initialisation and in dtype, and depends on its number alone. The result goes into the package, where
`gonio explain` reads it.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.trained_networks import LEARNT, RECIPES, trained
from gonio import init
from gonio.geometry import layout_of
from gonio.measuring import Measurements, measure
from gonio.measuring.findings.rules import WEIGHT_RULES

RESULT = Path(__file__).resolve().parents[1] / "src" / "gonio" / "measuring" / "findings" / "false_alarms.json"
WEIGHTED = (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)


def pick(choices: list[int], generator: torch.Generator) -> int:
    return choices[int(torch.randint(len(choices), (), generator=generator))]


def perceptron(generator: torch.Generator) -> nn.Module:
    widths = [pick([1, 4, 10, 16, 33, 64, 128, 300], generator) for _ in range(pick([2, 3, 5, 8], generator))]
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


def convolutional(generator: torch.Generator) -> nn.Module:
    channels = [pick([1, 3], generator), *(8 * pick([1, 2, 4, 8, 16], generator) for _ in range(4))]
    layers: list[nn.Module] = []
    for before, after in pairwise(channels):
        kernel = pick([1, 3, 5, 7], generator)
        groups = pick([1, 1, 2, 4], generator) if before % 8 == 0 else 1
        layers += [nn.Conv2d(before, after, kernel, groups=groups), nn.BatchNorm2d(after)]
    layers += [nn.Conv2d(after, after, 3, groups=after), nn.ConvTranspose2d(after, 8, 4, groups=2)]
    return nn.Sequential(*layers, nn.Conv1d(8, 16, 3), nn.Conv3d(1, 8, 3), nn.Linear(8, 10))


def transformer(generator: torch.Generator) -> nn.Module:
    width = pick([16, 32, 64, 128], generator)
    block = nn.TransformerEncoderLayer(width, 4, dim_feedforward=4 * width, batch_first=True)
    return nn.ModuleList([nn.Embedding(pick([100, 500], generator), width, padding_idx=0), block])


def recurrent(generator: torch.Generator) -> nn.Module:
    width = pick([4, 16, 50], generator)
    kind = [nn.LSTM, nn.GRU, nn.RNN][pick([0, 1, 2], generator)]
    return nn.Sequential(nn.Embedding(50, width), kind(width, pick([3, 8, 32], generator), num_layers=2))


KINDS: list[Callable[[torch.Generator], nn.Module]] = [perceptron, convolutional, transformer, recurrent]


def small_normal_(weight: torch.Tensor, *, generator: torch.Generator, **_: object) -> torch.Tensor:
    return weight.normal_(0, 0.02, generator=generator)


def truncated_(weight: torch.Tensor, *, generator: torch.Generator, **_: object) -> torch.Tensor:
    return nn.init.trunc_normal_(weight, std=0.02, generator=generator)


def uniform_(weight: torch.Tensor, *, generator: torch.Generator, **_: object) -> torch.Tensor:
    return weight.uniform_(-1, 1, generator=generator)


INITS = {
    "torch's own": None,
    "he": init.he_,
    "xavier": init.xavier_,
    "lecun": init.lecun_,
    "orthogonal": init.orthogonal_,
    "normal 0.02": small_normal_,
    "truncated normal 0.02": truncated_,
    "uniform": uniform_,
}


@torch.no_grad()
def random_model(number: int) -> nn.Module:
    """The model of this number."""
    torch.manual_seed(number)  # torch's own initialisations read the global generator
    generator = torch.Generator().manual_seed(number)
    model = KINDS[number % len(KINDS)](generator)
    function = list(INITS.values())[pick(list(range(len(INITS))), generator)]
    for module in model.modules():
        if function is not None and isinstance(module, WEIGHTED):
            function(module.weight, layout=layout_of(module), generator=generator)
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx].zero_()
    return model.to([torch.float32, torch.float32, torch.bfloat16, torch.float16][pick([0, 1, 2, 3], generator)])


def upper(hits: int, n: int) -> float:
    """Upper end of the one-sided 95 % Wilson interval."""
    z = 1.6449
    share = hits / n
    centre = share + z * z / (2 * n)
    return (centre + z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))) / (1 + z * z / n)


class Counts:
    """Findings of many models, by rule."""

    def __init__(self) -> None:
        self.models = self.tensors = 0
        self.by_tensor: Counter[str] = Counter()
        self.by_model: Counter[str] = Counter()

    def add(self, measured: Measurements) -> None:
        self.models += 1
        self.tensors += len(measured.layers)
        self.by_tensor.update(finding.code for finding in measured.findings)
        self.by_model.update({finding.code for finding in measured.findings})

    def result(self) -> dict[str, Any]:
        rules = {
            code: {
                "tensors": self.by_tensor[code],
                "models": self.by_model[code],
                "models_upper": upper(self.by_model[code], self.models),
            }
            for code, rule in WEIGHT_RULES.items()
            if not rule.text.exact
        }
        return {"models": self.models, "tensors": self.tensors, "rules": rules}


def on_random(models: int) -> dict[str, Any]:
    counts = Counts()
    for number in range(models):
        counts.add(measure(random_model(number)))
    return {
        **counts.result(),
        "kinds": [kind.__name__ for kind in KINDS],
        "initialisations": list(INITS),
        "dtypes": ["float32", "bfloat16", "float16"],
        "torch": torch.__version__,
    }


def on_trained(models: int) -> dict[str, Any]:
    counts, left_out = Counts(), 0
    scores: list[float] = []
    with multiprocessing.get_context("fork").Pool() as pool:
        for _, score, measured in pool.imap(trained, range(models)):
            if measured is None:
                left_out += 1
                continue
            scores.append(score)
            counts.add(measured)
    return {
        **counts.result(),
        "left out": left_out,
        "least score": LEARNT,
        "median score": statistics.median(scores),
        "task": "digits",
        "recipes": {kind: [name or "baseline" for name in names] for kind, names in RECIPES.items()},
        "torch": torch.__version__,
    }


def store(alarms: dict[str, int], cases: int, of: str) -> None:
    """Keep the rates of rules that judge something else than one tensor: alarms per code in so many `cases`."""
    known = json.loads(RESULT.read_text(encoding="utf-8"))
    for code, hits in alarms.items():
        known["cases"][code] = {"alarms": hits, "cases": cases, "upper": upper(hits, cases), "of": of}
    RESULT.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


SAMPLES: dict[str, tuple[Callable[[int], dict[str, Any]], int]] = {
    "random": (on_random, 3000),
    "trained": (on_trained, 300),
}


def main(words: list[str]) -> None:
    which, *rest = words or list(SAMPLES)[:1]
    function, models = SAMPLES[which]
    known = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    known[which] = function(int(rest[0]) if rest else models)
    RESULT.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in known[which].items() if k != "recipes"}, indent=1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
