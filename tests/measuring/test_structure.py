"""What a model tells beyond its tensors: movable scale, norms that follow, mixtures, signals."""

from __future__ import annotations

import json
import math
import re
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import gonio
from gonio.measuring import measure


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3))
    with torch.no_grad():
        made[2].weight.mul_(20)
    return made


def total(model: nn.Module) -> float:
    return sum(float(p.detach().square().sum()) for p in model.parameters() if p.ndim > 1)


def test_the_wasted_norm_is_what_balancing_saves() -> None:
    made = chain()
    found = measure(made).scale
    assert found is not None
    assert (found.layers, found.sum) == (3, pytest.approx(total(made), rel=1e-5))
    gonio.balance_(made)
    assert found.least == pytest.approx(total(made), rel=1e-3)
    assert 0.5 < found.wasted < 1
    after = measure(made).scale
    assert after is not None
    assert after.wasted == pytest.approx(0, abs=1e-4)
    assert "with 0.0% less squared weight norm" in str(measure(made))


def test_where_no_scale_can_move_nothing_is_said() -> None:
    assert measure(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))).scale is None
    assert measure(chain().state_dict()).scale is None

    class Loops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else self.layer(x)

    found = measure(Loops())
    assert found.scale is None
    assert "Scale between layers was not measured: the model cannot be traced" in str(found)


# --- blocks of attention ----------------------------------------------------------------------------------------------


def encoder(dtype: torch.dtype = torch.float64) -> nn.TransformerEncoderLayer:
    """Four channels in each of two heads, ReLU; values of channel 3 are ten times too large for their outputs."""
    torch.manual_seed(0)
    made = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, dtype=dtype)
    with torch.no_grad():
        made.self_attn.in_proj_weight[16 + 3].mul_(10)
        made.self_attn.out_proj.weight[:, 3].div_(10)
    return made


def least_pairs(made: nn.TransformerEncoderLayer) -> dict[str, tuple[float, float]]:
    """Sum and least sum of each pair of weights by hand: 2·‖row‖·‖column‖ for each channel or unit."""
    query, key, value = made.self_attn.in_proj_weight.detach().double().chunk(3)
    columns = {"value and output": (value, made.self_attn.out_proj.weight.detach().double().mT)}
    columns["query and key"] = (query, key)
    columns["up and down"] = (made.linear1.weight.detach().double(), made.linear2.weight.detach().double().mT)
    return {
        kind: (float(a.square().sum() + b.square().sum()), float(2 * (a.norm(dim=1) * b.norm(dim=1)).sum()))
        for kind, (a, b) in columns.items()
    }


def test_blocks_waste_what_their_least_sums_leave() -> None:
    made = encoder()
    measured = measure(made)
    found = measured.scale
    assert found is not None
    expected = least_pairs(made)
    assert {pair.kind: (pair.sum, pair.least) for pair in found.pairs} == {
        kind: pytest.approx(sums, rel=1e-12) for kind, sums in expected.items()
    }
    assert (found.layers, found.sum) == (4, pytest.approx(sum(before for before, _ in expected.values())))
    assert found.least == pytest.approx(sum(least for _, least in expected.values()), rel=1e-6)
    assert found.least <= found.least_by_layer <= found.sum
    shares = {kind: 1 - least / before for kind, (before, least) in expected.items()}
    said = " ".join(str(measured).split())
    assert f"By pairs of weights in blocks: query and key {shares['query and key']:.1%}" in said
    data = {pair["kind"]: pair["wasted"] for pair in json.loads(measured.to_json())["scale"]["pairs"]}
    assert data == pytest.approx(shares, rel=1e-9)
    assert shares["value and output"] > 0.5 > shares["query and key"]


@pytest.mark.parametrize("level", ["neuron", "layer"])
def test_what_is_measured_is_what_balancing_blocks_saves(level: Literal["neuron", "layer"]) -> None:
    made = nn.TransformerEncoder(encoder(), 2, enable_nested_tensor=False)
    found = measure(made).scale
    assert found is not None
    gonio.balance_(made, level=level)
    least = found.least if level == "neuron" else found.least_by_layer
    assert least == pytest.approx(total(made), rel=1e-6)
    after = measure(made).scale
    assert after is not None
    assert (after.wasted if level == "neuron" else after.wasted_by_layer) == pytest.approx(0, abs=1e-6)


class Opaque(nn.Module):
    """Attention that no tracer passes; with two inputs, so that none can be generated."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = encoder()

    def forward(self, x: Tensor, scale: float) -> Tensor:
        return self.inner(x * scale if x.sum() > 0 else x)


def test_blocks_are_found_on_the_batch_where_no_input_can_be_made() -> None:
    made = Opaque()
    without = measure(made)
    assert without.scale is None
    assert any("the model cannot be traced" in note and "pass batch=" in note for note in without.notes)
    found = measure(made, batch=(torch.ones(2, 5, 8, dtype=torch.float64), 2.0)).scale
    assert found is not None
    expected = least_pairs(made.inner)
    assert {pair.kind: pair.least for pair in found.pairs} == {
        kind: pytest.approx(least, rel=1e-12) for kind, (_, least) in expected.items()
    }


def test_a_model_without_blocks_is_not_run() -> None:
    made, calls = chain(), []
    made[0].register_forward_hook(lambda *_: calls.append(1))
    assert measure(made).scale is not None
    assert calls == []


def test_what_stays_in_blocks_is_said() -> None:
    made = nn.TransformerEncoderLayer(8, 2, 12, activation="gelu", batch_first=True)
    found = measure(made).scale
    assert found is not None
    assert found.left == ("the scale of up and down stays in linear2: the activation is not positively homogeneous",)


# --- other facts ------------------------------------------------------------------------------------------------------


def test_weights_before_a_normalisation_say_so() -> None:
    made = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    found = measure(made)
    assert found["0"].notes == ("followed by 1: the function does not depend on its norm",)
    assert found["3"].notes == ()
    assert measure(nn.DataParallel(made))["0"].notes == found["0"].notes


def test_the_mixture_of_each_switchable_norm_is_shown() -> None:
    made = nn.Sequential(nn.Conv2d(3, 8, 3), gonio.nn.SwitchableNorm2d(8))
    with torch.no_grad():
        made[1].mean_logits.copy_(torch.tensor([0.0, 1.0, 2.0]))
    found = measure(made)
    shares = found.mixtures["1"]["mean"]
    assert sum(shares.values()) == pytest.approx(1)
    assert list(shares.values()) == pytest.approx([math.exp(i) / sum(map(math.exp, range(3))) for i in range(3)])
    assert "1 mixes mean" in str(found)
    _, _, bar = found.to_html().partition('aria-label="instance 0.09, layer 0.24, batch 0.67"')
    drawn = [float(width) for width in re.findall(r'width="([\d.]+)"', bar[: bar.index("</svg>")])]
    assert drawn == pytest.approx([180 * share for share in shares.values()], abs=0.05)


def test_signals_are_the_outputs_of_the_layers() -> None:
    made = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        made[0].bias[2] = -100
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    found = {s.path: s for s in measure(made, batch=x).signals}
    y = made[0](x).detach().double()
    assert list(found) == ["0", "1", "2"]
    assert found["0"].rms == pytest.approx(float(y.square().mean().sqrt()), rel=1e-5)
    assert found["0"].gain == pytest.approx(found["0"].rms / float(x.square().mean().sqrt()), rel=1e-5)
    assert found["0"].std == pytest.approx(float(y.std(correction=0)), rel=1e-5)
    assert found["1"].zeros == pytest.approx(float((y <= 0).double().mean()))
    assert (found["1"].units, found["1"].dead_units) == (8, 1)
    assert "1 of 8" in str(measure(made, batch=x))
    assert json.loads(measure(made, batch=x).to_json())["signals"][1]["dead_units"] == 1


class Branches(nn.Module):
    """Outputs that are no tensors, a layer that runs twice, one that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.twice, self.never = nn.LSTM(4, 5), nn.Linear(5, 5), nn.Linear(2, 2)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, object]:
        y, (h, _) = self.rnn(x * scale)
        return {"y": self.twice(self.twice(y)), "rest": [h, None]}


@pytest.mark.parametrize(
    "batch", [torch.ones(3, 2, 4), (torch.ones(3, 2, 4),), {"x": torch.ones(3, 2, 4), "scale": 2.0}]
)
def test_any_call_and_any_output(batch: object) -> None:
    found = measure(Branches(), batch=batch).signals
    assert [(s.path, s.calls) for s in found] == [("rnn", 1), ("twice", 2)]
    assert found[0].shape == (3, 2, 5)


def test_a_compiled_model_is_measured_as_the_plain_one() -> None:
    made = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
    x = torch.randn(5, 6)
    compiled = torch.compile(made, backend="eager")
    compiled(x)
    assert measure(compiled, batch=x).signals == measure(made, batch=x).signals


def test_non_finite_outputs_are_counted_and_left_out() -> None:
    made = nn.Sequential(nn.Linear(2, 2))
    x = torch.tensor([[float("inf"), 1.0], [1.0, 1.0]])
    found = measure(made, batch=x)
    signal = found.signals[0]
    assert signal.nonfinite == 2
    assert "2 values NaN or infinite" in str(found)
    assert math.isfinite(signal.rms)


def test_blocks_of_a_large_model_are_found_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gonio.measuring.figures.structure.LARGEST_UNASKED", 100)
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    plain, asked = measure(model), measure(model, extra_figures=("blocks",))
    assert plain.heads == ()
    assert plain.scale is None or not plain.scale.pairs
    assert "extra_figures=('blocks',) does so" in str(plain.notes) + str(getattr(plain.scale, "left", ""))
    assert len(asked.heads) > 0
    assert asked.scale is not None
    assert asked.scale.pairs
