"""The recipes that the documentation keeps load, and take the layers that they are meant for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import gonio
from catalog import seeded

FOLDER = Path(__file__).parents[2] / "docs" / "recipes"
FILES = sorted(FOLDER.glob("decoupled-*.yaml"))


def test_there_is_one_for_every_magnitude() -> None:
    names = {file.stem.removeprefix("decoupled-") for file in FILES}
    assert names == {name.lower() for name in gonio.nn.magnitude.__all__ if name != "Magnitude"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_decoupled_recipe(file: Path) -> None:
    layers = [nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 10)]
    model = nn.Sequential(*layers)
    recipe = gonio.Recipe.load(file)
    recipe.apply_(model)
    assert [type(layer) for layer in (model[0], model[4])] == [nn.Conv2d, nn.Linear]
    for layer in (model[1], model[2]):
        assert isinstance(layer, gonio.nn.DecoupledConv2d)
        assert f"decoupled-{type(layer.magnitude).__name__.lower()}" == recipe.name == file.stem
    assert bool(torch.isfinite(model(seeded(2, 1, 8, 8))).all())
