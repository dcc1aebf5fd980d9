"""Units of outputs of any layout against counts by hand, and layers called by keyword against calls by position."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from catalog import seeded
from gonio.measuring import measure, widths
from gonio.measuring.figures.signals import Signal


def signals(model: nn.Module, batch: object) -> dict[str, Signal]:
    return {signal.path: signal for signal in measure(model, batch=batch).signals}


def with_dead(layer: nn.Module, dead: int) -> nn.Module:
    """A layer whose first channels are far below 0, and the others far above."""
    with torch.no_grad():
        layer.bias[:dead], layer.bias[dead:] = -100.0, 100.0  # type: ignore[index, operator]
    return layer


class Last(nn.Module):
    """The channels last, as linear layers take them."""

    def forward(self, x: Tensor) -> Tensor:
        return x.movedim(1, -1)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: with_dead(nn.Linear(3, 64), 60), (5, 3)),
    "linear of tokens": (lambda: with_dead(nn.Linear(3, 64), 60), (5, 7, 3)),
    "linear of positions": (lambda: with_dead(nn.Linear(3, 64), 60), (5, 7, 6, 3)),
    "linear of one": (lambda: with_dead(nn.Linear(3, 64), 60), (3,)),
    "1-d": (lambda: with_dead(nn.Conv1d(3, 64, 3), 60), (5, 3, 32)),
    "1-d of one": (lambda: with_dead(nn.Conv1d(3, 64, 3), 60), (3, 32)),
    "1-d transposed": (lambda: with_dead(nn.ConvTranspose1d(3, 64, 3), 60), (5, 3, 32)),
    "2-d": (lambda: with_dead(nn.Conv2d(3, 64, 3), 60), (5, 3, 8, 9)),
    "2-d of one": (lambda: with_dead(nn.Conv2d(3, 64, 3), 60), (3, 8, 9)),
}


@pytest.mark.parametrize("name", CASES)
def test_dead_channels_are_found_in_every_layout(name: str) -> None:
    make, shape = CASES[name]
    made = measure(nn.Sequential(make(), nn.ReLU()), batch=seeded(*shape, dtype=torch.float32))
    found = {signal.path: signal for signal in made.signals}
    assert (found["0"].units, found["0"].dead_units) == (64, 0)
    assert (found["1"].units, found["1"].dead_units) == (64, 60)
    assert ["1 (60 of 64)" in f.found for f in made.findings if f.code == "G408"] == [True]


def test_norms_and_poolings_of_channels_and_what_is_behind_them() -> None:
    model = nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.MaxPool1d(2), nn.Dropout(0.0))
    found = signals(model.eval(), seeded(5, 3, 34, dtype=torch.float32))
    assert [signal.units for signal in found.values()] == [8] * 5
    tokens = nn.Sequential(nn.Embedding(9, 6), nn.LayerNorm(6), nn.GELU(), nn.LSTM(6, 4, batch_first=True))
    found = signals(tokens, torch.arange(9).view(3, 3))
    assert [signal.units for signal in found.values()] == [6, 6, 6, 4]


def test_units_that_no_layer_tells_are_not_known() -> None:
    made = measure(nn.Sequential(Last(), nn.ReLU(), nn.Linear(3, 4)), batch=seeded(5, 3, 6, dtype=torch.float32))
    assert [(signal.units, signal.dead_units) for signal in made.signals] == [(None, None)] * 2 + [(4, 0)]
    assert "–" in str(made)


# --- calls by keyword -------------------------------------------------------------------------------------


class ByKeyword(nn.Module):
    """A layer that is called by position or by keyword."""

    def __init__(self, layer: nn.Module, keyword: bool) -> None:
        super().__init__()
        self.first, self.layer, self.keyword = nn.Linear(6, 6), layer, keyword

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.layer(input=x) if self.keyword else self.layer(x)
        return torch.tanh(y)


def fresh() -> nn.Module:
    return nn.BatchNorm1d(6)


def trained() -> nn.Module:
    norm = nn.BatchNorm1d(6)
    norm(3 + 2 * seeded(40, 6, dtype=torch.float32))
    return norm


@pytest.mark.parametrize(
    "make", [fresh, trained, lambda: nn.Linear(6, 6), nn.ReLU], ids=["fresh", "trained", "linear", "relu"]
)
def test_a_layer_that_is_called_by_keyword_has_the_same_figures(make: Callable[[], nn.Module]) -> None:
    x, found = seeded(20, 6, dtype=torch.float32), []
    for keyword in (False, True):
        torch.manual_seed(0)
        model = ByKeyword(make(), keyword)
        found.append(signals(model, x))
    assert found[0] == found[1]
    assert found[1]["layer"].gradient_gain is not None


def test_widths_of_layers_that_are_called_by_keyword() -> None:
    class Net(nn.Module):
        def __init__(self, width: int, keyword: bool) -> None:
            super().__init__()
            self.up, self.down, self.keyword = nn.Linear(4, width), nn.Linear(width, 1), keyword

        def forward(self, x: Tensor) -> Tensor:
            up = self.up(input=x) if self.keyword else self.up(x)
            return self.down(input=up) if self.keyword else self.down(up)

    batch, found = (seeded(8, 4, dtype=torch.float32), torch.zeros(8, 1)), list[Any]()
    for keyword in (False, True):
        torch.manual_seed(0)
        make = partial(Net, keyword=keyword)
        found.append(widths(make, (8, 16), batch, loss=nn.functional.mse_loss, seeds=2, steps=1))
    assert found[0].to_dict() == found[1].to_dict()
