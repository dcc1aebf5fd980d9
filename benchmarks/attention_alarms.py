"""How often the rules on attention fire on transformers that are in order, and on ones with enlarged queries.

    python -m benchmarks.attention_alarms [trained] [random]

A network depends on its number alone: an encoder of images of handwritten digits, or a decoder of text; its width,
depth, heads, order of norms, optimizer's rate and decay. Trained ones that have not learnt are left out. Its logits are
read on a batch that it was not trained on. In every healthy trained one the queries of each attention are then
enlarged. The rates go into the package, where `gonio explain` reads them, and all counts into
benchmarks/results/attention_alarms.json.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import random
import sys
from collections import Counter
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.false_alarms import store, upper
from benchmarks.healthy_networks import LEARNT, TRAINED_ON, digits
from benchmarks.results import FOLDER
from gonio.lab import tasks
from gonio.measuring.figures.attention import logits_on
from gonio.measuring.findings.model_rules import findings_of
from gonio.models import ByteTransformer
from gonio.surgery import Anatomy, anatomy

RESULT = FOLDER / "attention_alarms.json"
CODES = ("G413", "G414")
FACTORS = (10, 100, 1000)  # of the queries of one attention
BITS = 4.5  # per byte: a decoder above has not learnt
BATCH = 64


class Encoder(nn.Module):
    """An image of 8 by 8 as tokens of `pixels` pixels each."""

    def __init__(self, pick: random.Random) -> None:
        super().__init__()
        width, self.pixels = pick.choice([32, 48, 64, 96]), pick.choice([4, 8, 16])
        heads = pick.choice([2, 4, 8])
        self.embed = nn.Linear(self.pixels, width)
        self.positions = nn.Parameter(torch.randn(64 // self.pixels, width))
        block = nn.TransformerEncoderLayer(
            width, heads, pick.choice([1, 2, 4]) * width, dropout=pick.choice([0.0, 0.1]), batch_first=True,
            norm_first=pick.random() < 0.5, activation=pick.choice(["relu", "gelu"]),
        )  # fmt: skip
        self.encoder = nn.TransformerEncoder(block, pick.choice([1, 2, 3, 4]), enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x.flatten(1).unflatten(1, (-1, self.pixels))) + self.positions
        return self.head(self.encoder(tokens).mean(1))


@cache
def texts() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Windows of text and the bytes after each, to be trained on and not."""
    task = tasks.resolve("bytes")
    return (task.train.inputs, task.train.targets), (task.test.inputs, task.test.targets)


def untrained(number: int) -> tuple[str, nn.Module, random.Random]:
    """The kind of the network of this number, and the network."""
    pick = random.Random(number)
    torch.manual_seed(number)  # torch's own initialisations read the global generator
    if number % 2:
        sizes = {"width": pick.choice([32, 64, 96]), "heads": pick.choice([2, 4, 8]), "depth": pick.choice([1, 2, 3])}
        return "text", ByteTransformer(256, **sizes), pick
    return "digits", Encoder(pick), pick


def batch_of(kind: str) -> Tensor:
    """What no network was trained on."""
    return digits()[0][TRAINED_ON : TRAINED_ON + BATCH] if kind == "digits" else texts()[1][0][:BATCH]


def trained(number: int) -> tuple[str, nn.Module | None]:
    """The network of this number after its training; None if it has not learnt."""
    kind, model, pick = untrained(number)
    x, y = (t[:TRAINED_ON] for t in digits()) if kind == "digits" else texts()[0]
    rate, decay = pick.choice([1e-3, 2e-3, 4e-3]), pick.choice([0.0, 1e-2, 1e-1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay)
    epochs, size = (pick.choice([15, 30]), BATCH) if kind == "digits" else (2, 16)
    for _ in range(epochs):
        for part in torch.randperm(len(x)).split(size):
            optimizer.zero_grad()
            F.cross_entropy(model(x[part]).flatten(0, -2), y[part].flatten()).backward()
            optimizer.step()
    model.eval()
    held, truth = (t[TRAINED_ON:] for t in digits()) if kind == "digits" else texts()[1]
    with torch.no_grad():
        out = model(held).flatten(0, -2)
    loss = float(F.cross_entropy(out, truth.flatten())) / torch.log(torch.tensor(2.0)).item()
    right = float((out.argmax(1) == truth.flatten()).double().mean())
    return kind, model if (right >= LEARNT if kind == "digits" else loss <= BITS) else None


def alarms(model: nn.Module, batch: Tensor, found: Anatomy) -> tuple[list[tuple[str, str]], list[float], list[float]]:
    """Code and path of each finding, and of all heads the largest logits and the shares of single tokens."""
    heads, left = logits_on(model, batch, found)
    if left:
        raise RuntimeError(f"logits were not read: {left}")
    made = [(each.code, each.path) for each in findings_of((), None, heads)]
    return made, [head.largest_logit or 0.0 for head in heads], [head.one_token or 0.0 for head in heads]


def seen(number: int, *, train: bool) -> dict[str, Any] | None:
    """What is found in the network of this number, and with queries enlarged; None if it has not learnt."""
    kind, model = trained(number) if train else untrained(number)[:2]
    if model is None:
        return None
    model.eval()
    batch = batch_of(kind)
    found = anatomy(model, example=batch[:2])
    made, logits, single = alarms(model, batch, found)
    result: dict[str, Any] = {"kind": kind, "findings": made, "logits": logits, "single": single, "planted": []}
    for block in found.attention if train else ():
        for factor in FACTORS:
            twin = copy.deepcopy(model)
            with torch.no_grad():
                for part in {part for head in block.query for part in head}:
                    twin.get_parameter(part.tensor).movedim(part.dim, 0)[part.indices] *= factor
                    if part.bias:
                        twin.get_parameter(part.bias)[[n + part.bias_start for n in part.indices]] *= factor
            codes = [code for code, path in alarms(twin, batch, found)[0] if path == block.path]
            result["planted"].append([factor, codes])
    return result


def _trained(number: int) -> dict[str, Any] | None:
    return seen(number, train=True)


def _random(number: int) -> dict[str, Any] | None:
    return seen(number, train=False)


def summary(models: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts of models and attentions with a finding, and what is usual."""
    hits = Counter(code for model in models for code in {code for code, _ in model["findings"]})
    logits = torch.tensor([max(model["logits"]) for model in models])
    single = torch.tensor([max(model["single"]) for model in models])
    return {
        "models": len(models),
        "kinds": dict(Counter(model["kind"] for model in models)),
        "heads": sum(len(model["logits"]) for model in models),
        "findings": {code: {"models": hits[code], "upper": upper(hits[code], len(models))} for code in CODES},
        "largest logit": {"median": float(logits.median()), "largest": float(logits.max())},
        "most queries on one token, of a head": {"median": float(single.median()), "largest": float(single.max())},
    }


def main(words: list[str]) -> None:
    counts = [int(word) for word in words]
    total, drawn = (*counts, *(200, 600)[len(counts) :])
    with multiprocessing.get_context("fork").Pool() as pool:
        made = list(pool.imap(_trained, range(total)))
        at_random = [each for each in pool.imap(_random, range(drawn)) if each is not None]
    healthy = [each for each in made if each is not None]
    planted = {
        f"queries × {factor}": {
            "attentions": len(codes := [c for model in healthy for f, c in model["planted"] if f == factor]),
            **{code: sum(code in each for each in codes) for code in CODES},
            "found": sum(bool(each) for each in codes),
        }
        for factor in FACTORS
    }
    result = {
        "trained": {**summary(healthy), "left out": len(made) - len(healthy)},
        "random": summary(at_random),
        "planted in trained": planted,
        "torch": torch.__version__,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))
    hits = {code: seen["models"] for code, seen in result["trained"]["findings"].items()}
    store(hits, len(healthy), "healthy small transformers that were trained on images or text")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
