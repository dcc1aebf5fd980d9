"""How often the rules on changes fire on changes that are in order: their rates of false alarms.

    python -m benchmarks.change_alarms [changes]

A change in order is random in all entries, or the sum of many small gradients, in proportion to a weight that is random
or has the spectrum of a trained one; pairs of changes are unrelated. Each depends on its number alone. The result goes
into the package, where `gonio explain` reads it.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from benchmarks.false_alarms import pick, store
from gonio.measuring import changes, difference

SIZES = [40, 48, 64, 96, 128]
RELATIVE = [1e-3, 1e-2, 0.1, 0.3]


def weight(generator: torch.Generator) -> Tensor:
    """A weight with independent entries, or with singular values that fall as a power."""
    n, d = pick(SIZES, generator), pick(SIZES, generator)
    draw = torch.randn(n, d, generator=generator) / d**0.5
    if pick([0, 1], generator):
        left, _, right = torch.linalg.svd(draw, full_matrices=False)
        draw = left * torch.arange(1.0, min(n, d) + 1).pow(-0.6) @ right
    return draw


def tuned(base: Tensor, generator: torch.Generator) -> Tensor:
    """The weight after a change in order: noise, or descent of a random quadratic function on random inputs."""
    n, d = base.shape
    change = torch.randn(n, d, generator=generator)
    if pick([0, 1], generator):
        inputs, targets = torch.randn(4 * d, d, generator=generator), torch.randn(4 * d, n, generator=generator)
        moved = base.clone()
        for _ in range(20):
            moved -= 0.02 * (inputs @ moved.mT - targets).mT @ inputs / len(inputs)
        change = moved - base
    size = RELATIVE[pick(list(range(len(RELATIVE))), generator)]
    return base + change * (size * base.norm() / change.norm())


def main(words: list[str]) -> None:
    count = int(words[0]) if words else 2000
    alarms = {"G501": 0, "G504": 0}
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        base = weight(generator)
        one, two = ({"w.weight": tuned(base, generator)} for _ in range(2))
        found = difference({"w.weight": base}, one)
        alarms["G501"] += any(finding.code == "G501" for finding in found.findings)
        alarms["G504"] += any(finding.code == "G504" for finding in changes({"w.weight": base}, one, two).findings)
    store({"G501": alarms["G501"]}, count, "changes of weights in order")
    store({"G504": alarms["G504"]}, count, "pairs of unrelated changes")
    print(alarms)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
