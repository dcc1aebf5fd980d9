"""G106 and G107: channels of a norm whose gain is 0, and norms without a variance, in files, state dicts and models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from catalog import seeded
from gonio.measuring import check, measure

Change = Callable[[Tensor, Tensor], None]


def network() -> nn.Sequential:
    """A trained network, as far as gains and shifts show it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3))
    with torch.no_grad():
        model[1].weight.copy_(1 + 0.2 * seeded(16))
        model[1].bias.copy_(0.1 * seeded(16, seed=1))
    return model


def changed(change: Change) -> nn.Sequential:
    model = network()
    with torch.no_grad():
        change(model[1].weight, model[1].bias)
    return model


def levels(model: nn.Module, tmp_path: Path) -> set[tuple[str, str, str]]:
    """What each verb says of the model, of its state and of its file: the same."""
    file = tmp_path / "model.safetensors"
    save_file(model.state_dict(), file)
    sources = [measure(model), measure(model.state_dict()), measure(file), check(model.state_dict()), check(file)]
    said = [{(f.code, f.level, f.path) for f in found.findings if f.code in ("G106", "G107")} for found in sources]
    assert all(one == said[0] for one in said), said
    return said[0]


def dead(gains: Tensor, shifts: Tensor) -> None:
    gains[7] = shifts[7] = 0


def dead_and_weak(gains: Tensor, shifts: Tensor) -> None:
    dead(gains, shifts)
    gains[2] = 1e-9


FOUND: dict[str, tuple[Change, set[str]]] = {
    "gain and shift are 0": (dead, {"warn"}),
    "a gain that decay left": (lambda gains, _: gains[7:9].fill_(1e-9), {"info"}),
    "a gain of 0 with a shift": (lambda gains, _: gains[7:8].zero_(), {"info"}),
    "both": (dead_and_weak, {"warn", "info"}),
    "most of them": (lambda gains, shifts: [t[1:].zero_() for t in (gains, shifts)], {"warn"}),
}


@pytest.mark.parametrize("kind", FOUND)
def test_constant_channels_are_found(kind: str, tmp_path: Path) -> None:
    change, expected = FOUND[kind]
    assert levels(changed(change), tmp_path) == {("G106", level, "1") for level in expected}


WELL: dict[str, Change] = {
    "as trained": lambda _, __: None,
    "all gains are 0, where training starts": lambda gains, shifts: [t.zero_() for t in (gains, shifts)],
    "a small gain": lambda gains, _: gains[7:8].fill_(1e-4),
    "a shift of 0": lambda _, shifts: shifts[3:9].zero_(),
    "a gain that is NaN": lambda gains, _: gains[7:8].fill_(torch.nan),
}


@pytest.mark.parametrize("kind", WELL)
def test_what_is_well_is_not_found(kind: str, tmp_path: Path) -> None:
    assert levels(changed(WELL[kind]), tmp_path) == set()


def test_gains_without_a_shift_are_not_judged(tmp_path: Path) -> None:
    norm, slopes = nn.RMSNorm(16), nn.PReLU(16)
    with torch.no_grad():
        norm.weight[3] = slopes.weight[5] = 0
    assert levels(nn.Sequential(norm, slopes), tmp_path) == set()


def test_the_states_of_an_optimizer_are_no_norms() -> None:
    model = network()
    state = {"weight": torch.ones(16), "bias": torch.zeros(16)}
    state["weight"][3] = 0
    saved = {"model": model.state_dict(), "optimizer": {"state": {0: state}, "param_groups": []}}
    assert "G106" not in {f.code for f in check(saved).findings}


def test_the_finding_names_channels_and_is_what_the_model_does() -> None:
    model = changed(dead).eval()
    (finding,) = [f for f in measure(model).findings if f.code == "G106"]
    assert finding.found == "gain and shift of 1 of 16 channels are 0, unlike those of the others: 7"
    with torch.no_grad():
        assert not model[:2](seeded(2, 3, 8, 8))[:, 7].any()
    half = {name: t.bfloat16() if t.is_floating_point() else t for name, t in model.state_dict().items()}
    assert [f.code for f in check(half).findings] == [f.code for f in measure(half).findings] == ["G106"]


def test_a_norm_without_a_variance_is_found(tmp_path: Path) -> None:
    model = network().eval()
    batch = seeded(2, 3, 8, 8)
    usual = model[:2](batch).std()
    model[1].running_var.zero_()
    assert levels(model, tmp_path) == {("G107", "warn", "1.running_var")}
    assert model[:2](batch).std() > 100 * usual
    model[1].running_var[3] = 1e-30  # of a channel that varies
    assert levels(model, tmp_path) == set()
