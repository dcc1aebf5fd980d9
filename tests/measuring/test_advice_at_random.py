"""Rules that claim to err never, held against what happens on random networks and trainings."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gonio
from catalog import seeded
from gonio import nn as gnn
from gonio.measuring import measure
from gonio.measuring.findings.advice import ADVICE
from gonio.measuring.findings.advice import SMALL

SETTINGS = 100
# G404 and G406 depend on no size; their cases are in test_advice.py
RUN = ("G401", "G402", "G403", "G405")


@dataclass(frozen=True)
class Chosen:
    """A network in float64, and how it is trained."""

    model: nn.Sequential
    loader: DataLoader[Any]
    optimizer: torch.optim.Optimizer

    @property
    def batch(self) -> Tensor:
        return seeded(4, 3, 6, 6, dtype=torch.float64)

    def norms(self, *kinds: type[nn.Module]) -> list[nn.Module]:
        return [module for module in self.model.modules() if isinstance(module, kinds)]

    def sizes(self) -> list[int]:
        return [len(x) for (x,) in self.loader]


def norm_of(draw: random.Random, channels: int) -> nn.Module:
    """Any norm, with an ε that does not blur an invariance."""
    groups = draw.choice([g for g in (1, 2, 4, channels) if channels % g == 0])
    kinds = [
        lambda: nn.BatchNorm2d(channels, eps=1e-14),
        lambda: nn.BatchNorm2d(channels, eps=1e-14),
        lambda: nn.GroupNorm(groups, channels, eps=1e-14),
        lambda: nn.InstanceNorm2d(channels, eps=1e-14),
        lambda: gnn.SwitchableNorm2d(channels, eps=1e-14),
        nn.Identity,
    ]
    return draw.choice(kinds)()


def chosen(number: int) -> Chosen:
    """The setting of this number."""
    draw = random.Random(number)
    torch.manual_seed(number)
    layers: list[nn.Module] = []
    channels = 3
    for _ in range(draw.choice([1, 2])):
        after = draw.choice([4, 8])
        layers += [nn.Conv2d(channels, after, 3, padding=1, bias=draw.random() < 0.5), norm_of(draw, after), nn.Tanh()]
        channels = after
    layers.append(nn.AdaptiveAvgPool2d(draw.choice([1, 2])))
    if draw.random() < 0.4:
        layers.append(nn.GroupNorm(draw.choice([1, channels]), channels, eps=1e-14))
    model = nn.Sequential(*layers).double().train()
    samples, batch = draw.randint(1, 40), draw.randint(1, 16)
    data = TensorDataset(torch.zeros(samples, 1))
    loader = DataLoader(data, batch_size=batch, drop_last=draw.random() < 0.3 and samples >= batch)
    decays = [{"params": [p], "weight_decay": draw.choice([0.0, 1e-4])} for p in model.parameters()]
    return Chosen(model, loader, torch.optim.SGD(decays, lr=0.1))


def listed(said: str) -> list[str]:
    return said.rpartition(": ")[2].split(", ")


def is_lost(case: Chosen, path: str) -> bool:
    """Whether a norm gives its shift, whatever comes in."""
    norm, seen = case.model.get_submodule(path), []
    handle = norm.register_forward_hook(lambda *a: seen.append(a[2].detach()))
    case.model(case.batch)
    handle.remove()
    return bool(torch.allclose(seen[0], norm.bias.view(1, -1, 1, 1).expand_as(seen[0]), atol=1e-6))


def is_free(case: Chosen, path: str) -> bool:
    """Whether the output stays when a weight is scaled."""
    weight, before = case.model.get_parameter(path), case.model(case.batch).detach()
    with torch.no_grad():
        weight.mul_(3)
        same = torch.allclose(case.model(case.batch), before, rtol=1e-6, atol=1e-8)
        weight.div_(3)
    return same


def truth(case: Chosen) -> dict[str, Any]:
    """What is so, from running the network and drawing from the loader, by rule."""
    sizes = case.sizes()
    batch_norms = case.norms(nn.BatchNorm2d)
    group_norms = [name for name, m in case.model.named_modules() if isinstance(m, nn.GroupNorm)]
    decayed = [
        name
        for name, p in case.model.named_parameters()
        if case.optimizer.param_groups[[id(q) for q in case.model.parameters()].index(id(p))]["weight_decay"]
    ]
    convolutions = [name for name in decayed if isinstance(case.model.get_submodule(name.split(".")[0]), nn.Conv2d)]
    weights = [name for name in convolutions if name.endswith("weight")]
    return {
        "G401": bool(batch_norms) and case.loader.batch_size < SMALL,
        "G402": bool(batch_norms) and sizes[-1] == 1,
        "G403": [name for name in group_norms if is_lost(case, name)],
        "G405": [name for name in weights if is_free(case, name)],
    }


@cache
def results() -> list[tuple[dict[str, str], dict[str, Any]]]:
    found = []
    for number in range(SETTINGS):
        case = chosen(number)
        measured = measure(case.model, batch=case.batch, loader=case.loader, optimizer=case.optimizer)
        said = {finding.code: finding.found for finding in measured.findings if finding.code in ADVICE}
        found.append((said, truth(case)))
    return found


def test_no_false_alarm() -> None:
    for number, (said, so) in enumerate(results()):
        for code in RUN:
            assert code not in said or so[code], (number, code, said[code])
        for code in ("G403", "G405"):
            names = listed(said.get(code, ""))
            wrong = [n for n in names if n and "more" not in n and n not in so[code]]
            assert not wrong, (number, code, said[code], so[code])


def test_nothing_is_missed() -> None:
    for number, (said, so) in enumerate(results()):
        assert not [code for code in ("G401", "G402", "G403") if so[code] and code not in said], (number, said, so)


def test_every_rule_fired_and_was_silent_often() -> None:
    """Five of a hundred: a rule that never fired, or always, would not have been held against anything."""
    fired = Counter(code for said, _ in results() for code in said)
    assert all(5 <= fired[code] <= SETTINGS - 5 for code in RUN), fired


def test_the_check_notices_a_false_claim() -> None:
    """The negative control: a weight that no norm follows is not free, and a norm over four values loses nothing."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.GroupNorm(4, 4)).double()
    case = Chosen(model, DataLoader(TensorDataset(torch.zeros(4, 1))), torch.optim.SGD(model.parameters(), lr=0.1))
    assert not is_free(case, "0.weight")
    assert not is_lost(case, "2")
    assert isinstance(gonio.measure(model), gonio.measuring.Measurements)
