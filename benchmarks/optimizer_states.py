"""How often the rules on optimizer states fire in trainings that go well, and which planted faults they find.

    python -m benchmarks.optimizer_states [seeds]

Four small networks are trained on handwritten digits and on Python source by ten optimizers at three learning rates,
constant or with a cycle; states are judged after 1, 2, 10, 100 and 400 steps. A training counts as one that goes well
if its loss is finite and below that at the beginning. Faults are planted in the states after 100 and 400 steps.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

import gonio
from benchmarks.false_alarms import upper
from benchmarks.machine import versions
from benchmarks.results import FOLDER
from gonio.lab.tasks import bytes_, digits
from gonio.measuring.figures.moments import StateMeasurement
from gonio.measuring.findings.rules import Finding
from gonio.measuring.findings.state_rules import judged_states
from gonio.measuring.reading.source import optimizer_of

RESULT = FOLDER / "optimizer_states.json"
SEEDS = 2
STEPS = (1, 2, 10, 100, 400)
PLANTED_AT = (100, 400)
BATCH, CONTEXT = 32, 16
Content = dict[str, Any]


def normalised() -> nn.Module:
    layers = [part for _ in range(5) for part in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, 10))


def deep() -> nn.Module:
    layers = [part for _ in range(5) for part in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, 10))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "convolutions": gonio.models.digits_cnn,
    "batch norms": normalised,
    "layer norms": deep,
    "transformer": lambda: gonio.models.ByteTransformer(width=32, depth=4),
}


@cache
def data(network: str) -> tuple[Tensor, Tensor]:
    """Inputs and targets; of text the first characters of each window."""
    task = bytes_() if network == "transformer" else digits()
    inputs, targets = task.train.inputs, task.train.targets
    return (inputs[:, :CONTEXT], targets[:, :CONTEXT]) if network == "transformer" else (inputs, targets)


RATES = (0.3, 1.0, 3.0)  # of the usual one
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], float]] = {
    "SGD": (lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, weight_decay=1e-4), 0.02),
    "Nesterov": (lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, nesterov=True), 0.02),
    "Adam": (lambda p, lr: torch.optim.Adam(p, lr=lr, weight_decay=1e-4), 1e-3),
    "AdamW": (lambda p, lr: torch.optim.AdamW(p, lr=lr), 1e-3),
    "AdamW 0.95": (lambda p, lr: torch.optim.AdamW(p, lr=lr, betas=(0.9, 0.95)), 1e-3),
    "AMSGrad": (lambda p, lr: torch.optim.Adam(p, lr=lr, amsgrad=True), 1e-3),
    "NAdam": (lambda p, lr: torch.optim.NAdam(p, lr=lr), 1e-3),
    "RAdam": (lambda p, lr: torch.optim.RAdam(p, lr=lr), 1e-3),
    "RMSprop": (lambda p, lr: torch.optim.RMSprop(p, lr=lr, momentum=0.9), 3e-4),
    "Adagrad": (lambda p, lr: torch.optim.Adagrad(p, lr=lr), 1e-2),
}


@dataclass(frozen=True)
class Training:
    """One training; whether its learning rate goes through a cycle follows from its seed."""

    network: str
    optimizer: str
    rate: float
    seed: int

    def checkpoints(self) -> Iterator[tuple[int, Content, float]]:
        """(step, content of the checkpoint, loss) at each of the steps."""
        torch.manual_seed(self.seed)
        model = NETWORKS[self.network]()
        make, lr = OPTIMIZERS[self.optimizer]
        optimizer = make(model.parameters(), lr=lr * self.rate)
        cycle = None
        if self.seed % 2 and "momentum" not in optimizer.defaults:  # which cycles the first of betas too
            cyclic = "betas" in optimizer.defaults
            cycle = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, lr * self.rate, total_steps=STEPS[-1], cycle_momentum=cyclic
            )
        inputs, targets = data(self.network)
        draw = torch.Generator().manual_seed(self.seed)
        for step in range(1, STEPS[-1] + 1):
            rows = torch.randint(len(inputs), (BATCH,), generator=draw)
            out = model(inputs[rows])
            loss = nn.functional.cross_entropy(out.flatten(0, -2), targets[rows].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if cycle is not None:
                cycle.step()
            if step in STEPS:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                yield step, copy.deepcopy(state), float(loss.detach())


def judged(content: Content) -> tuple[tuple[StateMeasurement, ...], list[Finding]]:
    rows, findings, _ = judged_states(optimizer_of(content))
    return rows, findings


# --- faults ---------------------------------------------------------------------------------------------------------


class NotHereError(Exception):
    """This fault cannot be planted in this state."""


def states(content: Content) -> dict[int, dict[str, Any]]:
    held: dict[int, dict[str, Any]] = content["optimizer"]["state"]
    return held


def matrices(content: Content, word: str) -> list[int]:
    found = [key for key, one in states(content).items() if word in one and one[word].ndim > 1]
    if not found:
        raise NotHereError
    return found


def moment(content: Content, word: str) -> Tensor:
    """That of a matrix in the middle."""
    found = matrices(content, word)
    tensor: Tensor = states(content)[found[len(found) // 2]][word]
    return tensor


def needs(content: Content, *words: str) -> None:
    if not all(set(words) <= one.keys() for one in states(content).values()):
        raise NotHereError


def first_times(content: Content) -> None:
    needs(content, "exp_avg", "exp_avg_sq")
    moment(content, "exp_avg").mul_(1e3)


def second_times(content: Content) -> None:
    needs(content, "exp_avg", "exp_avg_sq")
    moment(content, "exp_avg_sq").mul_(1e-8)


def second_zero(content: Content) -> None:
    needs(content, "exp_avg_sq")
    moment(content, "exp_avg_sq").zero_()


def negative(content: Content) -> None:
    needs(content, "exp_avg_sq")
    moment(content, "exp_avg_sq").view(-1)[3].neg_().sub_(1e-9)


def not_a_number(content: Content) -> None:
    word = next(w for w in ("exp_avg", "momentum_buffer", "sum") if w in next(iter(states(content).values())))
    moment(content, word).view(-1)[5] = torch.nan


def one_entry(content: Content) -> None:
    needs(content, "exp_avg_sq")
    moment(content, "exp_avg_sq").view(-1)[7] += 1e12 * float(moment(content, "exp_avg_sq").max())


def spike(content: Content) -> None:
    """One layer's gradients 300 times too large in one step."""
    needs(content, "exp_avg_sq")
    moment(content, "exp_avg_sq").mul_(1e5)


def exchanged(content: Content) -> None:
    held = states(content)
    first = next(key for key, one in held.items() if shape(one) != shape(held[0]))
    held[0], held[first] = held[first], held[0]


def exchanged_by_name(content: Content) -> None:
    """As `torch.distributed.checkpoint` stores them."""
    exchanged(content)
    names = [name for name, value in content["model"].items() if value.is_floating_point() and "running" not in name]
    group = content["optimizer"]["param_groups"][0]
    content["optimizer"]["state"] = {names[key]: one for key, one in states(content).items()}
    content["optimizer"]["param_groups"] = [{**group, "params": names}]


def shape(state: Mapping[str, Any]) -> tuple[int, ...]:
    return next((tuple(v.shape) for v in state.values() if isinstance(v, Tensor) and v.ndim), ())


def lost(content: Content) -> None:
    del states(content)[matrices(content, next(iter(set(states(content)[0]) - {"step"})))[0]]


def of_no_group(content: Content) -> None:
    groups = content["optimizer"]["param_groups"]
    groups[-1]["params"] = groups[-1]["params"][:-1]


def of_other_model(content: Content) -> None:
    for one in states(content).values():
        for word, value in one.items():
            if isinstance(value, Tensor) and value.ndim > 1:
                one[word] = torch.cat([value, value])


def rate_times(content: Content) -> None:
    if all(row.relative_update is None for row in judged(content)[0]):  # the update needs more than the state
        raise NotHereError
    content["optimizer"]["param_groups"][0]["lr"] *= 1e4


def cut(content: Content) -> None:
    """A layer that no gradient reached."""
    needs(content, "exp_avg", "exp_avg_sq")
    for word in ("exp_avg", "exp_avg_sq"):
        moment(content, word).zero_()


HIDDEN = "states of two numbered parameters exchanged"  # numbers follow the order in which a program lists weights
FAULTS: dict[str, Callable[[Content], None]] = {
    "first moments of a matrix × 1000": first_times,
    "second moments of a matrix / 10⁸": second_times,
    "second moments of a matrix 0": second_zero,
    "one second moment negative": negative,
    "one moment NaN": not_a_number,
    "one second moment × 10¹²": one_entry,
    "second moments of one layer × 10⁵": spike,
    "a layer that no gradient has reached": cut,
    "states of two named parameters exchanged": exchanged_by_name,
    HIDDEN: exchanged,
    "the state of one parameter lost": lost,
    "a state that is in no group": of_no_group,
    "the state of a wider model": of_other_model,
    "learning rate × 10⁴": rate_times,
}


# --- the result -----------------------------------------------------------------------------------------------------


def main(words: list[str]) -> None:
    healthy: list[dict[str, Any]] = []
    faults: list[dict[str, Any]] = []
    started = time.perf_counter()
    choices = product(range(int(words[0]) if words else SEEDS), NETWORKS, OPTIMIZERS, RATES)
    for seed, network, optimizer, rate in choices:
        training = Training(network, optimizer, rate, seed)
        kept = list(training.checkpoints())
        if not kept[-1][2] < kept[0][2]:
            continue
        for step, content, _ in kept:
            rows, found = judged(content)
            said = {"network": network, "optimizer": optimizer, "rate": rate, "seed": seed, "step": step}
            largest = {
                "relative_update": max((r.relative_update or 0.0 for r in rows if len(r.shape) > 1), default=0.0),
                "largest_share": max((r.largest_share or 0.0 for r in rows if r.entries >= 256), default=0.0),
                "distance": max((r.distance or 0.0 for r in rows), default=0.0),
                "ratio": max((max(r.ratio, 1 / r.ratio) for r in rows if r.ratio), default=1.0),
            }
            alarms = sorted({f.code for f in found if f.level != "info"})
            healthy.append({**said, **largest, "states": len(rows), "alarms": alarms})
            if step not in PLANTED_AT or rate != 1.0 or seed:
                continue
            before = {(f.code, f.path) for f in found}
            for name, plant in FAULTS.items():
                damaged = copy.deepcopy(content)
                try:
                    plant(damaged)
                except NotHereError:
                    continue
                new = {(f.code, f.path) for f in judged(damaged)[1]} - before
                faults.append({**said, "fault": name, "found": sorted({code for code, _ in new})})
        print(training, f"{time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    found = {"healthy": healthy, "faults": faults, "versions": versions()}
    save(found)
    print(table(found))


def save(found: Mapping[str, Any]) -> None:
    """A line for each record."""
    between = ",\n"
    parts = [f'"{name}": [\n{between.join(map(json.dumps, found[name]))}\n]' for name in ("healthy", "faults")]
    parts.append(f'"versions": {json.dumps(found["versions"])}')
    RESULT.write_text(f"{{\n{between.join(parts)}\n}}\n", encoding="utf-8")


def table(found: Mapping[str, Any]) -> str:
    """A line per fault, then the states of trainings that go well."""
    records, healthy = found["faults"], found["healthy"]
    lines = ["| fault | planted | found | rules |", "|---|--:|--:|---|"]
    for name in dict.fromkeys(record["fault"] for record in records):
        mine = [record["found"] for record in records if record["fault"] == name]
        codes = Counter(code for each in mine for code in each)
        said = ", ".join(sorted(codes, key=lambda code: (-codes[code], code))) or "–"
        mark = " ¹" if name == HIDDEN else ""
        lines.append(f"| {name}{mark} | {len(mine)} | {sum(map(bool, mine))} | {said} |")
    seen = [record for record in records if record["fault"] != HIDDEN]
    caught = sum(bool(record["found"]) for record in seen)
    alarms = Counter(code for record in healthy for code in record["alarms"])
    with_alarm = sum(bool(record["alarms"]) for record in healthy)
    said = ", ".join(f"{code} {n}" for code, n in sorted(alarms.items())) or "none"
    trainings = len({tuple(r[k] for k in ("network", "optimizer", "rate", "seed")) for r in healthy})
    used = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    states, kinds = sum(r["states"] for r in healthy), len({r["optimizer"] for r in healthy})
    last = (
        f"{caught} of {len(seen)} faults found. {len(healthy)} checkpoints of {trainings} trainings that went well, "
        f"with {states:,} states of {kinds} optimizers: {with_alarm} have a warning or an error ({said}; the true "
        f"rate is below {upper(with_alarm, len(healthy)):.2%}, 95 %). ¹ A program lists its weights in any order: no "
        f"file shows it. {used}."
    )
    return "\n".join([*lines, "", last])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
