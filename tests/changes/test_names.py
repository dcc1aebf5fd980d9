"""Names are matched across prefixes, and no further."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gonio.measuring import difference
from gonio.measuring.changes.difference import block_of
from gonio.measuring.changes.sources import renamed

LAYERS = ["h.0.fc.weight", "h.0.fc.bias", "h.1.fc.weight", "ln_f.weight"]


@pytest.mark.parametrize("ours", ["", "transformer.", "base_model.model.transformer.", "module.net."])
@pytest.mark.parametrize("theirs", ["", "model.", "base_model.model."])
def test_a_prefix_on_either_side(ours: str, theirs: str) -> None:
    base, names = [ours + name for name in LAYERS], [theirs + name for name in LAYERS[:3]]
    assert renamed(names, base) == {theirs + name: ours + name for name in LAYERS[:3]}


def test_a_head_beside_a_body_with_a_prefix() -> None:
    base = [*(f"model.{name}" for name in LAYERS), "lm_head.weight"]
    names = [*(f"base_model.model.model.{name}" for name in LAYERS), "base_model.model.lm_head.weight"]
    assert renamed(names, base) == {name: name.removeprefix("base_model.model.") for name in names}


def test_unrelated_names_stay_apart() -> None:
    assert renamed(["a.weight"], ["b.weight"]) == {}
    assert renamed(["encoder.0.fc.weight"], ["decoder.1.fc.weight"]) == {}
    assert renamed(LAYERS, LAYERS) == {name: name for name in LAYERS}


def test_a_body_alone_is_compared_with_the_body_of_the_whole() -> None:
    body = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    whole = nn.ModuleDict({"body": body, "head": nn.Linear(3, 2)})
    before = {k: v.clone() for k, v in whole.state_dict().items()}
    with torch.no_grad():
        body[0].weight *= 2
    found = difference(before, body)
    assert found["body.0"].relative == pytest.approx(1.0)
    assert found["body.1"].status == "equal"
    assert found["head"].reason == "only before"
    assert found.notes == ("4 names matched across prefixes",)


@pytest.mark.parametrize(
    ("name", "block"),
    [("model.layers.11.mlp.up.weight", "model.layers.11"), ("layer1.0.conv1.weight", "layer1.0"), ("fc.weight", "fc"),
     ("0.weight", "0"), ("embed.weight", "embed")],
)  # fmt: skip
def test_the_block_of_a_tensor(name: str, block: str) -> None:
    assert block_of(name) == block
