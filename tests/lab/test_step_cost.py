"""What a training step costs on a model of the user's own, from Python and by `gonio cost`."""

from __future__ import annotations

import gc
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gonio
from cli.shell import invoke
from gonio.errors import InvalidArgumentError
from gonio.lab.running.cost import peak_bytes
from gonio.lab.running.step_cost import AGAIN, step_costs

BATCH = torch.ones(4, 1, 8, 8)
costs = partial(step_costs, gonio.models.digits_cnn, BATCH, seconds=0.0)


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


def test_each_recipe_has_a_row_beside_the_plain_model_and_the_same_again() -> None:
    names = ("orthogonal-init", "switchable-norm", "hyperball", "decoupled-tanh-1d")
    rows = costs([gonio.Recipe.load(name) for name in names])
    assert [row.name for row in rows] == ["baseline", AGAIN, *names]
    plain, again, init, norm, held, unfit = rows
    numbers = sum(p.numel() for p in gonio.models.digits_cnn().parameters())
    assert [row.parameters for row in rows[:3]] == [numbers] * 3
    assert norm.parameters == numbers + 3 * 6  # three norms, each with two triples of weights
    assert plain.time == (1.0, 1.0, 1.0)
    assert (again.memory, init.memory) == pytest.approx((1.0, 1.0), rel=0.01)  # torch caches a few KiB at a first use
    assert norm.memory is not None
    assert norm.memory > 1.0
    assert all(row.time and row.time[1] <= row.time[0] <= row.time[2] for row in (again, init, norm, held))
    assert "type:Conv1d" in unfit.reason
    assert (unfit.time, unfit.memory, unfit.parameters) == (None, None, None)


def test_garbage_of_an_earlier_profile_is_not_taken_off_a_peak() -> None:
    class Holder:
        def __init__(self) -> None:
            self.me, self.values = self, torch.ones(1 << 20)

    def step() -> None:
        if gc.isenabled():  # a collection may begin at any allocation
            gc.collect()
        torch.ones(1 << 18)

    def leaving() -> None:
        Holder()

    expected = peak_bytes(step)
    peak_bytes(leaving)
    assert peak_bytes(step) == expected >= 1 << 20
    assert gc.isenabled()


def test_memory_is_that_of_a_step() -> None:
    """Gradients of all parameters are held at its end, and no more than some activations beside them."""
    row, _ = step_costs(small, torch.ones(4, 64), [], seconds=0.0)
    numbers = 64 * 64 + 64 + 2 * 64 + 2
    assert row.parameters == numbers
    assert row.mebibytes is not None
    assert 4 * numbers / 2**20 <= row.mebibytes < 4 * 4 * numbers / 2**20


@pytest.mark.slow  # it reads a clock: no gate of every change
def test_twice_the_work_takes_twice_the_time() -> None:
    class Twice(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            first: Tensor = super().forward(x)
            second: Tensor = super().forward(x)
            return first + second

    layers = partial(lambda kind: kind(*(nn.Linear(256, 256) for _ in range(6))))
    one, _ = step_costs(partial(layers, nn.Sequential), torch.ones(256, 256), [], seconds=3.0)
    two, _ = step_costs(partial(layers, Twice), torch.ones(256, 256), [], seconds=3.0)
    assert one.milliseconds is not None
    assert two.milliseconds is not None
    assert 1.4 < two.milliseconds / one.milliseconds < 2.4


def test_nothing_of_the_process_is_changed() -> None:
    torch.manual_seed(0)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    model = small()
    before = model.state_dict()
    torch.set_rng_state(state)
    step_costs(lambda: small(), torch.ones(4, 64), [], seconds=0.0)
    assert torch.get_num_threads() == threads
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


class Idle(nn.Linear):
    """Its outputs do not depend on its weight."""

    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("build", "example", "match"),
    [
        (gonio.models.digits_cnn, torch.ones(4, 3, 8, 8), r"3 channels at the layer 'conv1', which takes 1"),
        (nn.ReLU, torch.ones(4, 3), r"a step of training needs parameters; found none"),
        (Idle, torch.ones(4, 3), r"a step of training needs outputs that depend on the parameters; found none"),
    ],
)
def test_what_cannot_be_trained_is_refused(build: type[nn.Module], example: Tensor, match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        step_costs(build, example, [], seconds=0.0, optimizer="sgd")


def test_an_unknown_optimizer() -> None:
    with pytest.raises(InvalidArgumentError, match="an optimizer is one of sgd, adamw, muon; found 'adam'"):
        costs([], optimizer="adam")


def test_the_command_shows_a_table_and_writes_json(tmp_path: Path) -> None:
    words = (
        "cost",
        "scale-shift",
        "decoupled-tanh-1d",
        "--model",
        "digits-cnn",
        "--batch",
        "8x1x8x8",
        "--seconds",
        "0",
    )
    shown = invoke(*words)
    assert shown.exit_code == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0].split() == ["recipe", "time", "quartiles", "ms", "memory", "MiB", "parameters"]
    assert [line.split("  ")[0] for line in lines[1:]] == ["baseline", AGAIN, "scale-shift", "decoupled-tanh-1d"]
    assert lines[1].endswith("40,506")
    assert "not measured: " in lines[4]
    assert "CPU time on one thread" in shown.stderr
    assert invoke(*words, "--json", str(tmp_path / "c.json")).stdout == ""
    written = json.loads((tmp_path / "c.json").read_text())
    assert [row["name"] for row in written["rows"]] == ["baseline", AGAIN, "scale-shift", "decoupled-tanh-1d"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model digits-cnn", "Missing option '--batch'"),
        ("--model digits-cnn --batch 8x3x8x8", "Give an input of the sizes 8x1x8x8."),
        ("scaleshift --model digits-cnn --batch 8x1x8x8", "Did you mean scale-shift"),
    ],
)
def test_mistakes(words: str, message: str) -> None:
    result = invoke("cost", *words.split())
    assert message in " ".join(result.stderr.split())
    assert (result.exit_code, result.stdout) == (2, "")
