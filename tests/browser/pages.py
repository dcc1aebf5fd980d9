"""The pages that the tests open in a browser: one of each kind, each with something to show."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

import gonio
from docs.pages import ROOT
from gonio.lab.claims import from_data
from gonio.lab.showing import html
from gonio.lab.showing.claims import claims_html
from gonio.measuring.showing.table import PAGE
from lab.showing.samples import results
from lab.showing.test_page import PAYLOADS
from measuring.nets import tracked

FLAWED = {"body.2": "G203", "body.4": "G102"}  # layer → rule that it breaks


def network() -> nn.Sequential:
    """Ten layers of two types; two of them are flawed as FLAWED says."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.stem = nn.Conv2d(3, 16, 3)
    model.body = nn.Sequential(*(nn.Conv2d(16, 16, 3, bias=False) for _ in range(8)))
    model.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model.head = nn.Linear(16, 10)
    with torch.no_grad():
        model.body[2].weight[3] = model.body[2].weight[4]
        model.body[4].weight[7] = 0
    return model


def measured() -> str:
    found = gonio.measure(network(), batch=torch.ones(2, 3, 32, 32))
    other = gonio.measure(moved(1))
    return found.to_html(
        beside=[other], command="gonio measure nets.py:network --html page.html", date="2026-01-31 12:00"
    )


def chinese() -> str:
    with gonio.language("zh"):
        return measured()


def moved(seed: int) -> nn.Sequential:
    model, generator = network(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for i, weight in enumerate(model.parameters(), start=1):
            weight += 0.01 * i * torch.randn(weight.shape, generator=generator)
    return model


def scaled() -> str:
    """A hidden layer whose output grows with the width, and one rate for all layers."""
    torch.manual_seed(0)
    batch = torch.randn(16, 4), torch.randint(3, (16,))

    def factory(n: int) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, n), nn.ReLU(), nn.Linear(n, n), nn.ReLU(), nn.Linear(n, 3))
        nn.init.normal_(model[2].weight)
        return model

    found = gonio.measuring.widths(factory, (32, 64, 128), batch, seeds=2)
    return found.to_html(command="gonio measure mine.py:factory --widths 32,64,128 --html page.html", date="2026-01-31")


def claimed() -> str:
    """The committed results of two claims."""
    data = json.loads((ROOT / "benchmarks" / "results" / "claims" / "full.json").read_text(encoding="utf-8"))
    found = from_data(data)
    return claims_html(replace(found, results=found.results[:2]))


def large(layers: int = PAGE.longest) -> str:
    """A model of as many layers as a page lists: rows of two real ones, repeated under other names."""
    found = gonio.measure(network()[:2])
    rows = [
        replace(found.layers[i % 9], name=f"blocks.{i // 4}.layer{i % 4}.weight", path=f"blocks.{i // 4}.layer{i % 4}")
        for i in range(layers)
    ]
    findings = [replace(found.findings[0], path=rows[i].path) for i in range(0, layers, 9)]
    return replace(found, tensors=tuple(rows), findings=tuple(findings)).to_html()


def paths() -> str:
    """A file of a transformer: long names of layers, one of which is far from its siblings."""
    draw = torch.Generator().manual_seed(0)
    names = [f"model.layers.{i}.mlp.down_proj.weight" for i in range(5)]
    state = {name: torch.randn(12, 20, generator=draw) for name in names}
    state[names[3]] *= 100
    return gonio.measure(state).to_html()


def adapter() -> str:
    """Low-rank factors with long names: one is a million times too large, one is 0."""
    draw, state = torch.Generator().manual_seed(0), {}
    for i in range(4):
        for name in ("q_proj", "v_proj"):
            path = f"base_model.model.model.layers.{i}.self_attn.{name}"
            state[f"{path}.lora_A.weight"] = torch.randn(8, 128, generator=draw) / 11
            state[f"{path}.lora_B.weight"] = torch.randn(128, 8, generator=draw) / 100
    state["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"] *= 1e6
    state["base_model.model.model.layers.2.self_attn.v_proj.lora_B.weight"] *= 0
    return gonio.measure(state).to_html()


def treated() -> str:
    with TemporaryDirectory() as folder:
        treatment = gonio.doctor(network(), batch=torch.ones(2, 3, 32, 32))
        return treatment.page(Path(folder) / "page.html").read_text(encoding="utf-8")


PAGES: dict[str, Callable[[], str]] = {
    "measurements": measured,
    "chinese": chinese,
    "differences": lambda: gonio.measure(network(), moved(1)).to_html(),
    "changes": lambda: gonio.measure(network(), moved(1), moved(2)).to_html(),
    "training": lambda: tracked(steps=20).to_html(),
    "widths": scaled,
    "claims": claimed,
    "study": lambda: html(results(("orthogonal-init", "a-recipe-with-quite-a-long-name-" * 4), layers=1)),
    "payloads": lambda: html(results(tuple(PAYLOADS[::4]), seeds=1, layers=1)),
    "large": large,
    "paths": paths,
    "adapter": adapter,
    "doctor": treated,
}
