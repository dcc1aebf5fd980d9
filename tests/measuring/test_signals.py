"""Signals forward and backward, against autograd by hand and the laws of initialisation; norms; angles from outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import gonio
from catalog import seeded
from foreign import SHARDING_ON_A_CPU, STILL_STATISTICS
from gonio import init
from gonio.errors import InvalidArgumentError
from gonio.measuring import measure
from gonio.measuring.figures.signals import Signal
from gonio.seeding import generator
from measuring.nets import Residual, Scaled
from ranks import group

DEPTH = 20


def signals(model: nn.Module, batch: object) -> dict[str, Signal]:
    return {signal.path: signal for signal in measure(model, batch=batch).signals}


def rms(x: Tensor) -> float:
    return float(x.detach().double().square().mean().sqrt())


def test_gradients_are_autograds() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    x = seeded(50, 6)
    found = signals(model, x)
    first = model[0](x)
    second = first.tanh()
    cotangent = torch.randn(50, 3, generator=generator(0, "cotangent", 0))
    expected = torch.autograd.grad(model[2](second), [first, second], cotangent)
    assert found["2"].gradient_rms == pytest.approx(rms(cotangent), rel=1e-5)
    assert found["1"].gradient_rms == pytest.approx(rms(expected[1]), rel=1e-5)
    assert found["0"].gradient_rms == pytest.approx(rms(expected[0]), rel=1e-5)
    assert found["1"].gradient_gain == pytest.approx(rms(expected[0]) / rms(expected[1]), rel=1e-5)
    assert found["2"].gradient_norm_ratio == pytest.approx(float(expected[1].norm() / cotangent.norm()), rel=1e-5)
    assert found["0"].norm_ratio == pytest.approx(float(first.detach().norm() / x.norm()), rel=1e-5)
    reached = expected[0] @ model[0].weight
    assert found["0"].gradient_gain == pytest.approx(rms(reached) / rms(expected[0]), rel=1e-5)  # to the model's input


def test_what_the_skip_sends_back_is_not_the_layers() -> None:
    layer = nn.Linear(6, 6, bias=False)
    found = signals(nn.Sequential(nn.Linear(6, 6), Residual(layer)), seeded(40, 6))
    cotangent = torch.randn(40, 6, generator=generator(0, "cotangent", 0))
    assert found["1.branch"].gradient_gain == pytest.approx(rms(cotangent @ layer.weight) / rms(cotangent), rel=1e-5)
    assert found["0"].gradient_rms == pytest.approx(rms(cotangent + cotangent @ layer.weight), rel=1e-5)


def test_an_orthogonal_chain_keeps_both_norms_exactly() -> None:
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(DEPTH)))
    gonio.init_(model, init.orthogonal_, gain=1.0)
    for signal in signals(model, seeded(64, 32)).values():
        assert signal.norm_ratio == pytest.approx(1, abs=1e-5)
        assert signal.gradient_norm_ratio == pytest.approx(1, abs=1e-5)


def relu_chain() -> nn.Sequential:
    layers = [part for _ in range(DEPTH) for part in (nn.Linear(256, 256, bias=False), nn.ReLU())]
    return nn.Sequential(*layers)


def test_he_keeps_the_signal_through_twenty_layers_and_torchs_default_loses_it() -> None:
    """A sixth of the second moment per layer remains under torch's default, forward and backward."""
    model, x = relu_chain(), seeded(128, 256)
    last, first = f"{2 * DEPTH - 2}", "0"
    found = signals(model, x)
    per_layer = (found[last].rms / found[first].rms) ** (1 / (DEPTH - 1))
    back = (found[first].gradient_rms / found[last].gradient_rms) ** (1 / (DEPTH - 1))
    assert (per_layer, back) == pytest.approx((sqrt(1 / 6), sqrt(1 / 6)), rel=0.05)
    gonio.init_(model, init.he_, gain="relu")
    found = signals(model, x)
    assert 0.5 < found[last].rms / found[first].rms < 2
    assert 0.5 < found[first].gradient_rms / found[last].gradient_rms < 2


def test_rms_goes_forward_and_norm_back_through_rectangles() -> None:
    """Variance 1/fan_in keeps entries forward and norms of gradients backward; 1/fan_out the other way round."""
    model, x = nn.Sequential(nn.Linear(400, 100, bias=False)), seeded(500, 400)
    gonio.init_(model, init.variance_scaling_, preserve="rms", gain=1.0)
    rows = signals(model, x)["0"]
    gonio.init_(model, init.variance_scaling_, preserve="norm", gain=1.0)
    columns = signals(model, x)["0"]
    assert (rows.gain, columns.norm_ratio, columns.gradient_gain) == pytest.approx((1, 1, 1), abs=0.02)
    assert min(abs(rows.norm_ratio - 1), abs(columns.gain - 1)) > 0.3


def test_a_zero_initialised_branch_is_neither_dead_nor_vanishing() -> None:
    def block() -> nn.Module:
        conv1, conv2 = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        branch = nn.Sequential(conv1, nn.BatchNorm2d(8), nn.ReLU(), conv2, nn.BatchNorm2d(8))
        return nn.Sequential(Residual(branch), nn.ReLU())

    model = nn.Sequential(nn.Conv2d(3, 8, 3), block(), block(), nn.Flatten(), nn.Linear(288, 4))
    nn.init.zeros_(model[1][0].branch[4].weight)
    found = signals(model, seeded(16, 3, 8, 8))
    assert found["1.0.branch.4"].branch == "ends"
    assert found["1.0.branch.4"].gradient_rms > 0  # it does learn
    for path in ("1.0.branch.0", "1.0.branch.1", "1.0.branch.2", "1.0.branch.3"):
        assert (found[path].branch, found[path].gradient_rms) == ("waits", 0.0)
        assert found[path].rms > 0
    assert {found[path].branch for path in found if not path.startswith("1.0.")} == {""}
    assert found["0"].gradient_rms > 0  # through the skip
    text = str(measure(model, batch=seeded(16, 3, 8, 8)))
    assert "ends a branch" in text
    assert text.count("waits") == 4


def test_a_branch_multiplied_by_zero_waits() -> None:
    branch = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    found = signals(nn.Sequential(nn.Linear(8, 8), Scaled(branch), nn.Linear(8, 2)), seeded(16, 8))
    assert [found[path].branch for path in ("0", "1.branch.0", "1.branch.1", "2")] == ["", "waits", "waits", ""]


def test_a_dead_layer_is_dead() -> None:
    """Negative control: no gradient because of units that are 0, not because of a branch."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].bias.fill_(-100)
    found = signals(model, seeded(16, 8))
    assert (found["0"].gradient_rms, found["0"].branch) == (0.0, "")
    assert (found["1"].dead_units, found["1"].branch) == (8, "")


def test_nothing_is_left_behind() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 2))
    model[0].weight.requires_grad_(False)
    model[4].weight.grad = torch.ones_like(model[4].weight)
    before, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    found = signals(model, seeded(5, 3, 8, 8))
    assert not model[0].weight.requires_grad
    assert model[0].weight.grad is None
    assert torch.equal(model[4].weight.grad, torch.ones_like(model[4].weight))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert model[1].track_running_stats
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert signals(model, seeded(5, 3, 8, 8)) == found  # a frozen model passes gradients all the same
    with pytest.raises(InvalidArgumentError, match=r"measure\(batch=\) must be an input that the model takes"):
        measure(model, batch=seeded(4, 5, 4, 4))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert [m.training for m in model.modules()] == modes


def test_a_batch_norm_without_statistics_uses_those_of_the_batch() -> None:
    model, x = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)), seeded(64, 6)
    assert signals(model, x)["1"].rms == pytest.approx(1, abs=1e-3)
    assert not model[1].num_batches_tracked
    assert signals(model, x[:1])["1"].rms == pytest.approx(rms(model[0](x[:1])), rel=1e-3)  # one value has no variance
    model[1].running_var.fill_(4.0)
    model[1].num_batches_tracked += 1
    assert signals(model, x)["1"].rms == pytest.approx(rms(model[0](x)) / 2, rel=1e-3)


def test_working_in_place_changes_no_figure() -> None:
    def model(*, inplace: bool) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=inplace), nn.Linear(8, 3))

    plain, written = (signals(model(inplace=inplace), seeded(50, 6)) for inplace in (False, True))
    assert written["0"] == plain["0"]
    assert written["1"].gain == plain["1"].gain < 1
    assert written["1"].gradient_gain is None  # its input and its output are one tensor
    assert written["2"] == plain["2"]


def test_a_checkpointed_model_gives_the_same() -> None:
    class Checkpointed(nn.Module):
        def __init__(self, body: nn.Module, reentrant: bool | None) -> None:
            super().__init__()
            self.body, self.reentrant = body, reentrant

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) if self.reentrant is None else checkpoint(self.body, x, use_reentrant=self.reentrant)

    body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    assert signals(Checkpointed(body, False), seeded(9, 6)) == signals(Checkpointed(body, None), seeded(9, 6))


def test_without_a_derivative_it_says_so() -> None:
    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x).argmax(-1)

    found = measure(Choice(), batch=seeded(5, 4))
    assert found.signals[0].gradient_rms is None
    assert found.signals[0].rms > 0
    assert "Gradients were not measured: its output has no gradient." in found.notes


def test_what_torch_says_of_a_derivative_is_quoted_in_one_short_line() -> None:
    """As of BigBird, which writes into a tensor that its backward needs."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x).exp()
            y.add_(1)
            return y

    (note,) = (n for n in measure(InPlace(), batch=seeded(5, 4)).notes if n.startswith("Gradients were not measured: "))
    assert note.startswith("Gradients were not measured: derivatives cannot be computed: one of the variables needed")
    assert note.endswith("….")
    assert len(note) < 150


def test_parametrized_layers_are_layers_and_what_computes_their_weight_is_none() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    gonio.parametrize_(model, gonio.parametrizations.WeightNorm(), where="0")
    nn.utils.parametrizations.weight_norm(model[1])
    assert list(signals(model, seeded(5, 8))) == ["0", "1"]


def gap(norm: nn.Module, x: Tensor) -> float | None:
    (signal,) = measure(nn.Sequential(norm), batch=x).signals
    return signal.train_eval_gap


def trained(kind: str, *, shift: float = 0.0, scale: float = 1.0) -> nn.Module:
    """A norm with running statistics of many normal batches, and a scale and shift of its own."""
    norm: nn.Module = {
        "batch": lambda: nn.BatchNorm2d(4),
        "plain": lambda: nn.BatchNorm2d(4, affine=False),
        "instance": lambda: nn.InstanceNorm2d(4, track_running_stats=True),
        "switchable": lambda: gonio.nn.SwitchableNorm2d(4),
    }[kind]()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _ in range(200):
            norm(shift + scale * torch.randn(64, 4, 6, 6, generator=generator))
        for parameter in (p for p in (norm.weight, norm.bias) if p is not None):
            parameter.copy_(torch.randn(4, generator=generator))
    return norm


def batch(count: int, shift: float = 0.0) -> Tensor:
    return shift + torch.randn(count, 4, 6, 6, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kind", ["batch", "plain", pytest.param("instance", marks=STILL_STATISTICS), "switchable"])
def test_the_gap_is_between_the_two_modes(kind: str) -> None:
    norm, x = trained(kind, shift=0.5, scale=2.0), batch(8)
    before = copy.deepcopy(norm.state_dict())
    found = gap(norm, x)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), norm.state_dict().values(), strict=True))
    assert norm.training
    there, here = copy.deepcopy(norm).train()(x).detach().double(), copy.deepcopy(norm).eval()(x).detach().double()
    expected = float((there - here).square().mean().sqrt() / here.std(correction=0))
    assert found == pytest.approx(expected, rel=1e-5)
    assert found > 0.1


@pytest.mark.parametrize("count", [8, 100])
def test_a_batch_of_the_training_shows_what_its_size_makes(count: int) -> None:
    found = gap(trained("plain"), batch(count))
    assert found == pytest.approx(sqrt(1.5 / (36 * count)), rel=0.5)


def test_other_data_show_more_and_calibration_closes_the_gap() -> None:
    norm, shifted = trained("plain"), batch(100, shift=1.0)
    assert gap(norm, shifted) == pytest.approx(1.0, rel=0.1)
    gonio.calibrate_(nn.Sequential(norm), [shifted])
    assert gap(norm, shifted) < 0.01


@pytest.mark.parametrize(
    ("norm", "x"),
    [
        (nn.BatchNorm2d(4), batch(8)),  # has seen no batch
        (nn.BatchNorm2d(4, track_running_stats=False), batch(8)),
        (nn.GroupNorm(2, 4), batch(8)),
        (nn.Linear(6, 4), batch(8)),
        (trained("batch"), torch.randn(1, 4, 1, 1)),  # one value per channel
    ],
)
def test_what_has_no_statistics_has_no_gap(norm: nn.Module, x: Tensor) -> None:
    assert gap(norm, x) is None
    assert norm.training


def exact(weight: torch.Tensor) -> float:
    """From the formula, in float64: √(mean over pairs of (90° − θ)²)."""
    w = weight.double().flatten(1)
    unit = w / w.norm(dim=1, keepdim=True)
    off = ~torch.eye(len(w), dtype=torch.bool)
    degrees = torch.rad2deg(torch.arccos((unit @ unit.T)[off].clamp(-1, 1)))
    return float((degrees - 90).square().mean().sqrt())


@pytest.mark.parametrize("lean", [0.0, 0.5, 1.5])
def test_both_agree_for_inputs_uniform_in_direction(lean: float) -> None:
    layer = nn.Linear(24, 12)
    with torch.no_grad():
        layer.weight.copy_(seeded(12, 24) + lean)  # filters that share a direction
    (signal,) = gonio.measure(layer, batch=seeded(4096, 24, seed=1)).signals
    assert signal.angles_exact == pytest.approx(exact(layer.weight.detach()), rel=1e-5)
    assert signal.angles_read == pytest.approx(signal.angles_exact, rel=0.06)


def test_the_sample_adds_nothing_to_orthogonal_filters() -> None:
    """Without the correction 100 samples of orthogonal filters would read as 90°/√99, 9°."""
    layer = nn.Linear(64, 32)
    nn.init.orthogonal_(layer.weight)
    (signal,) = gonio.measure(layer, batch=seeded(100, 64)).signals
    assert signal.angles_exact == pytest.approx(0, abs=1e-3)
    assert signal.angles_read == pytest.approx(0, abs=3)


def test_the_gap_and_the_angles_are_shown() -> None:
    found = measure(nn.Sequential(trained("batch"), nn.Conv2d(4, 6, 1)), batch=batch(8, shift=3.0))
    for shown in ("train–eval", f"{found.signals[0].train_eval_gap:.2f}", "off 90°"):
        assert shown in str(found)
        assert shown in found.to_html()


def test_inputs_in_few_directions_show_other_angles_than_the_weights() -> None:
    """Negative control: the two are different figures."""
    layer = nn.Linear(24, 12)
    narrow = seeded(4096, 2, seed=1) @ seeded(2, 24, seed=2)
    (signal,) = gonio.measure(layer, batch=narrow).signals
    assert signal.angles_read > 2 * signal.angles_exact  # type: ignore[operator]


def test_groups_are_not_paired() -> None:
    layer = nn.Conv2d(4, 8, 3, groups=2)
    with torch.no_grad():
        layer.weight[4:] = layer.weight[:4]  # twins in another group see other inputs
    (signal,) = gonio.measure(layer, batch=seeded(64, 4, 10, 10)).signals
    blocks = [exact(layer.weight[:4].detach()), exact(layer.weight[4:].detach())]
    assert signal.angles_exact == pytest.approx((sum(b * b for b in blocks) / 2) ** 0.5, rel=1e-5)
    assert signal.angles_read < 45  # type: ignore[operator]


@SHARDING_ON_A_CPU
@pytest.mark.skipif(not dist.is_available(), reason="torch without its distributed package")
def test_layers_sharded_one_by_one_show_the_same(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)), seeded(64, 8)
    expected = gonio.measure(copy.deepcopy(model), batch=x).signals
    with group(tmp_path):
        mesh = init_device_mesh("cpu", (1,))
        for part in (model[0], model[2], model):
            fully_shard(part, mesh=mesh)
        found = gonio.measure(model, batch=x).signals
    assert [s.angles_exact for s in found] == pytest.approx([s.angles_exact for s in expected])
    assert [s.gradient_rms for s in found] == pytest.approx([s.gradient_rms for s in expected])


def test_where_there_is_nothing_to_read() -> None:
    model = nn.Sequential(nn.Linear(4, 1), nn.ReLU())
    for signal in gonio.measure(model, batch=seeded(32, 4)).signals:
        assert (signal.angles_read, signal.angles_exact) == (None, None)
    (one,) = gonio.measure(nn.Linear(4, 3), batch=seeded(2, 4)).signals
    assert one.angles_read is None


class NormWithActivation(nn.BatchNorm2d):
    """A batch norm with an activation as its part, as timm builds it."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


class Gated(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gate, self.drop = nn.Conv2d(channels, channels, 1), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True))))


@pytest.mark.parametrize("dead", [False, True])
def test_parts_of_a_zeroed_norm_and_a_dropout_behind_its_gate_are_not_dead(dead: bool) -> None:
    branch = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), NormWithActivation(8), Gated(8))
    nn.init.zeros_(branch[1].weight)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), Residual(branch), nn.Flatten(), nn.Linear(288, 4))
    if dead:  # negative control
        nn.init.constant_(model[0].bias, -100)
    found = measure(model, batch=seeded(16, 3, 8, 8))
    branches = {signal.path: signal.branch for signal in found.signals}
    assert (branches["2.branch.1.act"], branches["2.branch.2.drop"], branches["1"]) == ("ends", "ends", "")
    assert [finding.found for finding in found.findings if finding.code == "G408"] == (
        ["units whose output is 0 on the whole batch: 1 (8 of 8)"] if dead else []
    )


class WithGain(nn.Linear):
    """A layer with a gain of its own, which an activation may follow."""

    def __init__(self, gain: float, bias: float) -> None:
        super().__init__(8, 8)
        nn.init.constant_(self.bias, bias)
        self.gain = nn.Parameter(torch.full((8, 1), gain))

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.gain * self.weight, self.bias)
        return torch.relu(y) if self.bias.any() else y


@pytest.mark.parametrize(("gain", "bias", "branch"), [(0.0, 0.0, "ends"), (1.0, -100.0, "")])
def test_a_layer_with_a_gain_of_zero_trains_and_a_dead_one_does_not(gain: float, bias: float, branch: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Residual(WithGain(gain, bias)), nn.Linear(8, 2))
    found = measure(model, batch=seeded(16, 8))
    assert {signal.path: signal.branch for signal in found.signals}["1.branch"] == branch
    assert ["G408"] * (branch == "") == [finding.code for finding in found.findings if finding.code == "G408"]


class Behind(nn.Module):
    """A residual branch: what `zeros` makes of a layer's output, and a layer without a bias that reads it."""

    def __init__(self, zeros: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.up, self.down, self.zeros = nn.Linear(8, 16), nn.Linear(16, 8, bias=False), zeros
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.zeros(self, self.up(x)))


def _zero_gate() -> nn.Linear:
    gate = nn.Linear(16, 16)
    nn.init.zeros_(gate.weight)
    nn.init.zeros_(gate.bias)
    return gate


BEHIND: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "a gate that starts at 0": (lambda: Behind(lambda m, y: y * m.gate(y), gate=_zero_gate()), False),
    "a gain of the block": (lambda: Behind(lambda m, y: y * m.gain, gain=nn.Parameter(torch.zeros(16))), False),
    "dead units": (lambda: Behind(lambda m, y: torch.relu(y - 100)), True),
    "dead units behind such a gate": (
        lambda: nn.Sequential(
            Behind(lambda m, y: y * m.gate(y), gate=_zero_gate()), Behind(lambda m, y: torch.relu(y - 100))
        ),
        True,
    ),
}


@pytest.mark.parametrize("name", BEHIND)
def test_a_layer_behind_zeros_of_the_start_is_not_dead_and_one_behind_dead_units_is(name: str) -> None:
    torch.manual_seed(0)
    build, dead = BEHIND[name]
    model = nn.Sequential(nn.Linear(8, 8), build(), nn.Linear(8, 2))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = measure(model, batch=seeded(16, 8))
    said = [finding.found for finding in found.findings if finding.code == "G408"]
    assert ["down (8 of 8)" in each for each in said] == [True] * dead, said
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


class Decoder(nn.Module):
    """Its queries start at 0, as those of detection transformers do; two layers without a gradient read them."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(8, 8, bias=bias), nn.Linear(8, 8, bias=bias)
        self.read = nn.Linear(8, 8)
        for layer in (self.query, self.value) if bias else ():
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        queries = torch.zeros_like(x)
        return self.read(x + self.query(queries) * self.value(queries))


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_of_constant_zeros_is_dead_unless_it_has_a_bias(bias: bool) -> None:
    found = measure(Decoder(bias), batch=seeded(16, 8))
    assert ["G408"] * (not bias) == [finding.code for finding in found.findings if finding.code == "G408"]


class Drawing(nn.Module):
    """It draws the positions that it reads, in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x[torch.randperm(len(x))[:4]])


def test_a_model_that_draws_random_numbers_draws_the_same_ones_and_leaves_the_generator() -> None:
    model, x, before = Drawing(), seeded(64, 4), torch.get_rng_state()
    once = measure(model, batch=x)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    assert measure(model, batch=x).signals == once.signals


class Logarithm(nn.Module):
    """A finite model whose output is not finite where the layer before is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).log())


def test_outputs_that_are_not_finite_are_said() -> None:
    torch.manual_seed(0)
    found = measure(Logarithm(), batch=torch.randn(8, 4))
    assert [(finding.code, finding.level) for finding in found.findings] == [("G417", "warn")]
    assert "1 of 2 layers gave NaN or infinity on this batch; the first: last" in " ".join(str(found).split())


class Masking(nn.Module):
    def forward(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(scores < 0, -torch.inf)


def test_infinite_scores_before_a_softmax_are_a_remark() -> None:
    torch.manual_seed(0)
    found = measure(nn.Sequential(nn.Linear(4, 8), Masking(), nn.Softmax(-1)), batch=torch.randn(8, 4))
    assert [(finding.code, finding.level) for finding in found.findings] == [("G417", "info")]


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ("text", "no tensor, but str"),
        (numpy.zeros((4, 3)), r"no tensor, but ndarray. Give tensors; torch.from_numpy\(array\)"),
        (torch.zeros(4, 3), "float32 at the layer '0', which takes indices"),
        (torch.full((4, 3), 10), "the index 10 at the layer '0', which has 10 rows. Give indices from 0 to 9"),
    ],
)
def test_a_batch_that_is_no_input_of_the_model_is_said_to_be_none(batch: Any, said: str) -> None:
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4))
    asked = r"measure\(batch=\) must be an input that the model takes"
    with pytest.raises(InvalidArgumentError, match=f"{asked}; found {said}"):
        measure(model, batch=batch)


def test_a_batch_without_examples_is_said() -> None:
    found = measure(nn.Sequential(nn.Linear(4, 3)), batch=torch.zeros(0, 4))
    assert found.signals == ()
    assert "Outputs were not measured: no layer had one with values on this batch." in found.notes
