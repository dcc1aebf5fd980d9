"""Exponents of the width: planted mistakes are found, and right models cause no finding."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from cli.shell import invoke
from gonio import param_groups
from gonio.errors import InvalidArgumentError
from gonio.init import mup_
from gonio.measuring import Widths, widths
from gonio.measuring.widths import _exponent, _student
from html_reader import Page

SIZES = (64, 128, 256)


def right(n: int, *, head: float = 1.0, hidden: float = 0.5) -> nn.Module:
    """Embedding, two hidden layers and a head in μP; the exponents of the two initial scales can be wrong."""
    model = nn.Sequential(nn.Embedding(32, n), nn.Linear(n, n), nn.ReLU(), nn.Linear(n, n), nn.ReLU(), nn.Linear(n, 4))
    for layer in (model[1], model[3]):
        mup_(layer.weight, base=(64, 64), gain="relu")
    mup_(model[5].weight, base=(4, 64))
    with torch.no_grad():
        for layer in (model[1], model[3]):
            layer.weight.mul_((n / 64) ** (0.5 - hidden))
        model[5].weight.mul_((n / 64) ** (1.0 - head))
        for layer in (model[1], model[3], model[5]):
            layer.bias.zero_()
    return model


def trainer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(param_groups(model, mup=True, base=right(64), lr=1e-2))


def slow_embedding(model: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": [p], "lr": g["lr"]}
        for g in param_groups(model, mup=True, base=right(64), lr=1e-2)
        for p in g["params"]
    ]
    groups[0]["lr"] *= 64 / model[0].weight.shape[1]
    return torch.optim.Adam(groups)


def measured(factory: Callable[[int], nn.Module], optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> Widths:
    batch = torch.randint(32, (64,)), torch.randint(4, (64,))
    return widths(factory, SIZES, batch, optimizer=optimizer)


MISTAKES = {
    "wrong head scale": (lambda n: right(n, head=0.5), trainer, ("G601", "5")),
    "hidden without 1/√width": (lambda n: right(n, hidden=0.0), trainer, ("G601", "1")),
    "embedding rate over the width": (right, slow_embedding, ("G602", "0")),
    "one rate for all layers": (right, lambda m: torch.optim.Adam(m.parameters(), lr=1e-2), ("G602", "1")),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_found_in_every_seed(name: str) -> None:
    factory, optimizer, expected = MISTAKES[name]
    for seed in range(3):
        torch.manual_seed(seed)
        found = measured(factory, optimizer)
        assert expected in {(finding.code, finding.path) for finding in found.findings}, (name, seed, str(found))


class Positioned(nn.Module):
    """A right model with a weight of its own, added to the output of the embedding."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.position, self.layers = nn.Parameter(torch.zeros(1, n)), right(n)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1:](self.layers[0](x) + self.position)


def test_a_model_around_its_layers_is_not_its_last_layer() -> None:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(param_groups(model, mup=True, base=Positioned(64), lr=1e-2))

    found = measured(Positioned, optimizer)
    assert list(found) == ["layers.0", "layers.1", "layers.3", "layers.5"]
    assert [row.path for row in found.values() if row.last] == ["layers.5"]
    assert found.findings == ()


def test_right_models_cause_no_finding() -> None:
    for seed in range(8):
        torch.manual_seed(seed)
        found = measured(right, trainer)
        assert found.findings == (), (seed, str(found))


def test_the_exponent_is_that_of_a_planted_power() -> None:
    draw = torch.Generator().manual_seed(0)
    inside = 0
    for _ in range(400):
        noise = torch.randn(12, generator=draw).mul(0.1).exp().tolist()
        points = [(size, size**0.5 * e) for size, e in zip(SIZES * 4, noise, strict=True)]
        slope, interval = _exponent(points)
        assert slope == pytest.approx(0.5, abs=0.2)
        inside += interval[0] <= 0.5 <= interval[1]
    assert 0.92 <= inside / 400 <= 0.98
    assert _exponent([(64, 0.0), (128, 1.0)] * 2) == (None, None)


@pytest.mark.parametrize(("freedom", "quantile"), [(4, 2.776), (10, 2.228), (100, 1.984)])
def test_the_quantile_of_students_law(freedom: int, quantile: float) -> None:
    assert _student(freedom) == pytest.approx(quantile, rel=0.02)


def test_it_prints_and_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    torch.manual_seed(0)
    found = measured(lambda n: right(n, hidden=0.0), trainer)
    assert max(map(len, str(found).splitlines())) <= 80
    assert "Exponents of the width (64, 128, 256; 4 seeds, 4 steps)" in str(found)
    assert json.loads(found.to_json())["schema"] == "gonio.widths/1"
    assert found.to_markdown().startswith("- **warn G601** 1: its output scales as width^")
    assert found["1"].activation == pytest.approx(0.5, abs=0.1)
    hostile = replace(found, tensors=(replace(found.tensors[0], path="a|<b>"), *found.tensors[1:]))
    assert r"| a\|&lt;b&gt; |" in hostile.to_markdown()


def test_the_page_shows_every_layer_with_its_fitted_and_its_promised_exponent() -> None:
    torch.manual_seed(0)
    found = measured(lambda n: right(n, hidden=0.0), trainer)
    pages = {"whole": found.to_html(command="gonio measure <b>", date="today"), "part": found._repr_html_()}
    assert len(Page(pages["whole"]).may_run()) == 1
    assert "script" not in Page(pages["part"]).names()
    for html in pages.values():
        read = Page(html)
        labels = [
            attributes["aria-label"] or "" for tag, attributes in read.tags if tag == "svg" and "role" in attributes
        ]
        charts = [label for label in labels if "fitted exponents" in label]
        assert [label.split(" over")[0] for label in charts] == ["output", "gradient", "change"]
        assert charts[0].endswith("promised −0.50 for the last layer, 0 for the others")
        assert sum("fitted exponent " in label for label in labels) == 3 * len(found)
        # a part has ids of its own, with a mark before them
        links = {re.sub(r"#g\d+-", "#", attributes.get("href") or "") for tag, attributes in read.tags if tag == "a"}
        rows = {re.sub(r"^g\d+-", "", attributes.get("id") or "") for tag, attributes in read.tags if tag == "tr"}
        assert {f"#t{list(found).index(finding.path)}" for finding in found.findings} <= links
        assert {f"t{i}" for i in range(len(found))} <= rows
    assert "gonio measure <b>" in Page(pages["whole"]).text


def test_a_page_of_layers_without_exponents_and_of_a_path_with_markup() -> None:
    row = replace(measured(right, trainer)["5"], path="<b>", activation=None, activation_interval=None)
    for rows in ((row,), (replace(row, gradient=None, change=None),), ()):
        text = Page(Widths((64, 128), 2, 1, rows).to_html()).text
        assert "No findings." in text
        assert ("<b>" in text) == bool(rows)


def test_values_that_are_not_finite_are_null() -> None:
    batch = torch.full((4, 2), math.inf), torch.zeros(4, dtype=torch.int64)
    found = widths(lambda n: nn.Sequential(nn.Linear(2, n), nn.Linear(n, 2)), (4, 8), batch, seeds=2)
    read = json.loads(found.to_json())
    assert read["tensors"][0]["activation"] is None
    assert read["tensors"][0]["activation_rms"] == [[None, None], [None, None]]
    assert "No findings." in Page(found.to_html()).text


def test_refusals() -> None:
    with pytest.raises(InvalidArgumentError, match=r"two widths, two seeds and one step at least; found 1 widths"):
        widths(right, (64,), (torch.zeros(1), torch.zeros(1)))


def test_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "from gonio.models import ByteTransformer\n\ndef make(n):\n    return ByteTransformer(width=n, depth=1)\n"
    )
    result = invoke("measure", "mine.py:make", "--widths", "8,16", "--json", "-")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["sizes"] == [8, 16]
    result = invoke("measure", "mine.py:make", "--widths", "8,16", "--html", "page.html")
    assert result.exit_code == 0, result.stderr
    assert "Widths 8, 16; 4 models of each" in Page(Path("page.html").read_text(encoding="utf-8")).text
