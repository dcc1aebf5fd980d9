"""What `gonio measure BEFORE AFTER` says of changes that were planted, one kind in one layer of a small model.

    python -m benchmarks.planted_changes

A case is a kind of change × a base (random, with a falling spectrum, trained on digits, convolutional) × a seed; all
other layers get a small dense change, as full fine-tuning makes. A case is named if the planted layer has the form and
the findings of its kind, and no other layer has a finding; a control has none at all. Each case depends on its names
and its seed alone.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product

import torch
from torch import Tensor, nn

from benchmarks.healthy_networks import digits
from gonio.measuring import Differences, changes, difference

State = dict[str, Tensor]
PLANTED = "2.weight"  # of each base
SEEDS = 4


# --- bases ------------------------------------------------------------------------------------------------------------


def falling(weight: Tensor) -> Tensor:
    """The weight with singular values that fall as those of trained weights."""
    left, values, right = torch.linalg.svd(weight.flatten(1), full_matrices=False)
    law = torch.arange(1.0, len(values) + 1).pow(-0.6)
    return ((left * law) @ right * (weight.norm() / law.norm())).view_as(weight)


def perceptron(draw: torch.Generator) -> State:
    made = {}
    for i, (d, n) in enumerate(pairwise((64, 96, 64, 80))):
        made[f"{2 * i}.weight"] = torch.randn(n, d, generator=draw) / d**0.5
        made[f"{2 * i}.bias"] = 0.1 * torch.randn(n, generator=draw)
    return made


def convolutional(draw: torch.Generator) -> State:
    shapes = ((48, 3, 3, 3), (64, 48, 3, 3), (48, 64, 1, 1))
    return {
        f"{2 * i}.weight": torch.randn(s, generator=draw) / (s[1] * s[2] * s[3]) ** 0.5 for i, s in enumerate(shapes)
    }


@cache
def trained(seed: int) -> State:
    """A perceptron after 150 steps on handwritten digits."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    images, labels = digits()
    for _ in range(150):
        some = torch.randint(len(labels), (128,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[some].flatten(1)), labels[some]).backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


BASES: dict[str, Callable[[torch.Generator, int], State]] = {
    "random": lambda draw, _: perceptron(draw),
    "falling": lambda draw, _: {n: falling(w) if w.ndim > 1 else w for n, w in perceptron(draw).items()},
    "trained": lambda _, seed: trained(seed),
    "convolutional": lambda draw, _: {n: falling(w) for n, w in convolutional(draw).items()},
}


# --- changes ----------------------------------------------------------------------------------------------------------


def sized(change: Tensor, weight: Tensor, share: float) -> Tensor:
    return change * (share * weight.norm() / change.norm())


def dense(weight: Tensor, draw: torch.Generator, share: float = 0.01) -> Tensor:
    """Noise, as the sum of many small gradients."""
    return weight + sized(torch.randn(weight.shape, generator=draw), weight, share)


def low_rank(rank: int, share: float) -> Callable[[Tensor, torch.Generator], Tensor]:
    def change(weight: Tensor, draw: torch.Generator) -> Tensor:
        n, d = weight.flatten(1).shape
        left, right = torch.randn(n, rank, generator=draw), torch.randn(rank, d, generator=draw)
        return weight + sized((left @ right).view_as(weight), weight, share)

    return change


def rotated(blocks: int) -> Callable[[Tensor, torch.Generator], Tensor]:
    """Inputs turned by an orthogonal matrix, block-diagonal as that of OFT."""

    def change(weight: Tensor, draw: torch.Generator) -> Tensor:
        rows = weight.flatten(1)
        size = rows.shape[1] // blocks
        skew = 0.02 * torch.randn(blocks, size, size, generator=draw)
        turn = torch.block_diag(*torch.linalg.matrix_exp(skew - skew.mT))
        return (rows @ turn).view_as(weight)

    return change


def gained(weight: Tensor, draw: torch.Generator) -> Tensor:
    """Each filter by its own factor, as the magnitudes of DoRA."""
    gains = 1 + 0.1 * torch.randn(len(weight), generator=draw)
    return (weight.flatten(1) * gains[:, None]).view_as(weight)


def permuted(weight: Tensor, draw: torch.Generator) -> Tensor:
    return weight[torch.randperm(len(weight), generator=draw)]


def swapped(weight: Tensor, draw: torch.Generator) -> Tensor:
    order = torch.arange(len(weight))
    first, second = torch.randperm(len(weight), generator=draw)[:2]
    order[first], order[second] = order[second].clone(), order[first].clone()
    return weight[order]


def zeroed_filters(weight: Tensor, draw: torch.Generator) -> Tensor:
    made = weight.clone()
    made[torch.randperm(len(weight), generator=draw)[:3]] = 0
    return made


def zeroed_entries(weight: Tensor, draw: torch.Generator) -> Tensor:
    return weight * (torch.rand(weight.shape, generator=draw) > 0.1)


def entry(value: float) -> Callable[[Tensor, torch.Generator], Tensor]:
    def change(weight: Tensor, draw: torch.Generator) -> Tensor:
        made = dense(weight, draw)
        made.view(-1)[int(torch.randint(made.numel(), (), generator=draw))] = value
        return made

    return change


def intruding(weight: Tensor, draw: torch.Generator) -> Tensor:
    """Three directions larger than all of the base."""
    rows = weight.flatten(1)
    left, right = (torch.linalg.qr(torch.randn(size, 3, generator=draw)).Q for size in rows.shape)
    return weight + (1.5 * torch.linalg.matrix_norm(rows, 2) * left @ right.mT).view_as(weight)


@dataclass(frozen=True)
class Kind:
    """One kind of change: what it does, the form that it must have, and the codes that must and may be found."""

    name: str
    change: Callable[[Tensor, torch.Generator], Tensor]
    form: str
    codes: frozenset[str] = frozenset()
    allowed: frozenset[str] = frozenset()


def kind(name: str, change: Callable[[Tensor, torch.Generator], Tensor], form: str, *codes: str, may: str = "") -> Kind:
    return Kind(name, change, form, frozenset(codes), frozenset(may.split()))


KINDS = (
    kind("control: dense 0.1 %", lambda w, g: dense(w, g, 1e-3), "full"),
    kind("control: dense 5 %", lambda w, g: dense(w, g, 0.05), "full"),
    kind("LoRA of rank 1", low_rank(1, 0.02), "rank"),
    kind("LoRA of rank 4", low_rank(4, 0.05), "rank"),
    kind("LoRA of rank 8", low_rank(8, 0.05), "rank"),
    kind("LoRA of rank 4, merged in half precision", lambda w, g: low_rank(4, 0.1)(w, g).bfloat16(), "rank"),
    kind("scaled by 1.01", lambda w, _: 1.01 * w, "scaled"),
    kind("scaled by 0.5", lambda w, _: 0.5 * w, "scaled"),
    kind("gains", gained, "gains"),
    kind("rotation", rotated(1), "rotation", may="G501"),
    kind("rotation in blocks", rotated(4), "rotation", may="G501"),
    kind("filters permuted", permuted, "reordered", "G505", may="G501 G502"),
    kind("two filters swapped", swapped, "reordered", "G505"),
    kind("untouched", lambda w, _: w.clone(), "equal", "G503"),
    kind("intruders", intruding, "rank", "G501", may="G502"),
    kind("larger than its base", low_rank(8, 3.0), "rank", "G502", may="G501"),
    kind("filters set to 0", zeroed_filters, "pruned", "G506"),
    kind("entries set to 0", zeroed_entries, "pruned", "G506"),
    kind("an entry NaN", entry(float("nan")), "", "G001"),
    kind("an entry infinite", entry(float("-inf")), "", "G001"),
)
PAIRS = ("control: unrelated", "a merge that cancels")


# --- cases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One planted change; `kind` is of :data:`KINDS` or :data:`PAIRS`."""

    kind: str
    base: str
    seed: int

    def __str__(self) -> str:
        return f"{self.kind} / {self.base} / {self.seed}"


def cases(seeds: int = SEEDS) -> Iterator[Case]:
    for name, base, seed in product((*(one.name for one in KINDS), *PAIRS), BASES, range(seeds)):
        yield Case(name, base, seed)


def wrong(case: Case) -> str:
    """What is not named as planted; empty if all is."""
    draw = torch.Generator().manual_seed(1000 * case.seed + list(BASES).index(case.base))
    base = BASES[case.base](draw, case.seed)
    if case.kind in PAIRS:
        return _wrong_pair(case, base, draw)
    made = next(one for one in KINDS if one.name == case.kind)
    after = {name: dense(value, draw) for name, value in base.items()}
    after[PLANTED] = made.change(base[PLANTED], draw)
    return _wrong_names(made, difference(base, after), base, after)


def _wrong_names(made: Kind, found: Differences, base: State, after: State) -> str:
    row = found[PLANTED]
    form = made.form if made.form != "rank" else f"rank {_rank(after[PLANTED].float() - base[PLANTED])}"
    codes = {finding.code for finding in found.findings if finding.path in (row.path, "")}
    said = []
    if row.form != form:
        said.append(f"form {row.form!r}, not {form!r}")
    if not made.codes <= codes <= made.codes | made.allowed:
        said.append(f"codes {sorted(codes)}, not {sorted(made.codes)}")
    if others := {(f.code, f.path) for f in found.findings if f.path not in (row.path, "")}:
        said.append(f"elsewhere {sorted(others)}")
    if rest := {t.path: t.form for t in found.moved if t.form not in ("full", "") and t.path != row.path}:
        said.append(f"forms elsewhere {rest}")
    return "; ".join(said)


def _rank(change: Tensor) -> int:
    """The number of directions with 99 % of the squared norm, in float64."""
    squares = torch.linalg.svdvals(change.flatten(1).double()).square()
    return int((squares.cumsum(0) / squares.sum() >= 0.99).int().argmax()) + 1


def _wrong_pair(case: Case, base: State, draw: torch.Generator) -> str:
    first = {name: dense(value, draw, 0.05) for name, value in base.items()}
    second = {name: dense(value, draw, 0.05) for name, value in base.items()}
    if case.kind != PAIRS[0]:
        second = {name: value - 0.7 * (first[name] - base[name]) for name, value in second.items()}
    codes = [finding.code for finding in changes(base, first, second).all_findings]
    expected = [] if case.kind == PAIRS[0] else ["G504"]
    return "" if codes == expected else f"codes {codes}, not {expected}"


def main(words: list[str]) -> None:
    tried, named = Counter[str](), Counter[str]()
    for case in cases(int(words[0]) if words else SEEDS):
        said = wrong(case)
        tried[case.kind] += 1
        named[case.kind] += not said
        if said:
            print(f"{case}: {said}", flush=True)
    for name, count in tried.items():
        print(f"{named[name]:4} of {count:4}  {name}")
    print(f"{named.total():4} of {tried.total():4}  in all")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
