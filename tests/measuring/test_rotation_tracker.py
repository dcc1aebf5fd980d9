"""The tracker at an optimizer's steps: figures of each step, the same training to the last bit, any kind of step."""

from __future__ import annotations

import csv
import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim.optimizer import register_optimizer_step_pre_hook

import gonio
from gonio.errors import GonioWarning, InvalidArgumentError, NoMatchError
from gonio.measuring.training.steps import TRAINING
from measuring.nets import OPTIMIZERS, Watch, train


def watched(*, lr: float = 0.1, every: int = 1) -> tuple[nn.Module, torch.optim.Optimizer, gonio.Tracker]:
    """A layer, its optimizer, and a tracker at the optimizer's steps."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return model, optimizer, gonio.Tracker(model, optimizer=optimizer, every=every)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_training_is_the_same_to_the_last_bit(optimizer: str) -> None:
    also = ("filter_rotation", "initial_angle")
    plain, _ = train(optimizer)
    tracked, tracker = train(optimizer, lambda m, o: gonio.Tracker(m, optimizer=o, every=1, also=also))
    assert plain.keys() == tracked.keys()
    assert [name for name in plain if not torch.equal(plain[name], tracked[name])] == []
    assert [row["step"] for row in tracker.rows] == [step for step in range(1, 7) for _ in range(3)]
    assert {row["layer"] for row in tracker.rows} == {"0", "4", "6"}


def test_the_figures_are_those_of_the_step() -> None:
    """An independent computation in float64 from weights that the test keeps itself."""
    kept: list[Tensor] = []

    def watch(model: nn.Module, opt: torch.optim.Optimizer) -> gonio.Tracker:
        opt.register_step_pre_hook(lambda *_: kept.append(model[0].weight.detach().double().flatten()))
        opt.register_step_post_hook(lambda *_: kept.append(model[0].weight.detach().double().flatten()))
        return gonio.Tracker(model, optimizer=opt, every=1, where="0", also=("filter_rotation", "initial_angle"))

    _, tracker = train("SGD", watch)
    for row, before, after in zip(tracker.rows, kept[::2], kept[1::2], strict=True):
        cosine = before @ after / before.norm() / after.norm()
        assert row["rotation"] == pytest.approx(math.acos(cosine), rel=1e-6)
        assert row["relative_update"] == pytest.approx(float((after - before).norm() / before.norm()))
        along = (after - before) @ before / before.norm()
        assert row["radial_share"] == pytest.approx(float(along**2 / (after - before).square().sum()))
        assert row["effective_rate"] == pytest.approx(0.1 / float(before.square().sum()))
        assert row["predicted_rotation"] == pytest.approx(math.sqrt(2 * 0.1 * 0.01 / 1.9))
        assert row["frobenius"] == pytest.approx(float(after.norm()), rel=1e-6)
        turned = torch.arccos(torch.cosine_similarity(before.view(6, -1), after.view(6, -1)))
        found = [row[f"filter_rotation_{name}"] for name in ("min", "median", "max")]
        assert found == pytest.approx([float(turned.min()), float(turned.median()), float(turned.max())], rel=1e-6)
        start = torch.arccos(torch.cosine_similarity(kept[0], after, dim=0))
        assert row["initial_angle"] == pytest.approx(math.degrees(start), rel=1e-5)


def test_scale_invariance_is_read_from_the_graph() -> None:
    _, tracker = train("SGD", lambda m, o: gonio.Tracker(m, optimizer=o, every=6, figures="training"))
    assert {row["layer"]: "effective_rate" in row for row in tracker.rows} == {"0": True, "4": False, "6": False}
    assert "alignment" not in tracker.rows[0]


def test_intervals_and_numbers_counted_elsewhere() -> None:
    _, tracker = train("SGD", lambda m, o: gonio.Tracker(m, optimizer=o, every=4, where="0"), steps=9)
    assert [row["step"] for row in tracker.rows] == [4, 8]
    model, opt, tracker = watched(every=5)
    tracker.step(1004)  # a resumed training
    step(model, opt)
    tracker.step()
    assert [row["step"] for row in tracker.rows] == [1005]


def test_one_copy_at_a_time_takes_the_layers_in_turn() -> None:
    watch: Watch = lambda m, o: gonio.Tracker(m, optimizer=o, every=1, copies="one")  # noqa: E731
    _, tracker = train("SGD", watch)
    assert [(row["step"], row["layer"]) for row in tracker.rows] == [
        (1, "0"), (2, "4"), (3, "6"), (4, "0"), (5, "4"), (6, "6"),
    ]  # fmt: skip


def test_steps_that_a_scaler_skips_have_no_row() -> None:
    model, opt, tracker = watched()
    scaler = torch.amp.GradScaler("cpu")
    for overflows in (False, True, False):
        opt.zero_grad()
        loss = model(torch.ones(1, 3)).sum()
        scaler.scale(loss * (torch.inf if overflows else 1)).backward()
        scaler.step(opt)
        scaler.update()
    assert [row["step"] for row in tracker.rows] == [1, 2]


def test_a_step_after_which_weights_are_not_finite_has_rows_and_findings(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = gonio.Tracker(model, optimizer=opt, every=1, page=tmp_path / "run.html")
    for scale in (1.0, torch.nan, 1.0):
        opt.zero_grad()
        (model(torch.ones(1, 3)).sum() * scale).backward()
        opt.step()
    assert [row["step"] for row in tracker.rows] == [1, 2, 3]
    assert [row["nonfinite"] for row in tracker.rows] == [0, 6, 6]
    assert "rotation" not in tracker.rows[1]
    assert [(step, found.code) for step, found in tracker.findings] == [(2, "G001")]
    assert "From step 2 on" in tracker.to_html()
    tracker.undo_()
    assert "From step 2 on" in (tmp_path / "run.html").read_text()


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("wrap", [nn.utils.weight_norm, nn.utils.spectral_norm, prune.random_unstructured])
def test_weights_that_hooks_compute_have_rows(wrap: Any) -> None:
    options = {"name": "weight", "amount": 1} if wrap is prune.random_unstructured else {}
    model = wrap(nn.Linear(3, 2), **options)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = gonio.Tracker(model, optimizer=opt, every=1, also=("gradient",))
    step(model, opt)
    (row,) = tracker.rows
    assert row["rotation"] > 0
    assert row["gradient_norm"] > 0


def test_a_fused_step_that_changes_nothing_has_no_row() -> None:
    model, opt, tracker = watched(lr=0.0)
    step(model, opt)
    assert tracker.rows == []


@pytest.mark.parametrize("every", [1, 2, 3])
def test_steps_that_a_scaler_skips_inside_a_fused_optimizer_are_not_counted(every: int) -> None:
    """As without `fused`, where a skipped step does not reach the optimizer."""
    rows = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        opt = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
        tracker = gonio.Tracker(model, optimizer=opt, every=every, figures="training")
        for number in range(14):
            opt.zero_grad()
            loss = model(torch.ones(1, 3)).sum() * (torch.inf if number in (0, 3, 4, 8) else 1.0)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        rows.append([row["step"] for row in tracker.rows])
    assert rows[0] == rows[1] == list(range(every, 11, every))


def test_accumulated_gradients_are_one_step() -> None:
    model, opt, tracker = watched()
    for micro in range(6):
        model(torch.ones(1, 3)).sum().backward()
        if micro % 3 == 2:
            opt.step()
            opt.zero_grad()
    assert [row["step"] for row in tracker.rows] == [1, 2]


def test_several_optimizers_each_with_its_layers() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.AdamW(model[1].parameters(), lr=0.01)
    tracker = gonio.Tracker(model, optimizer=[first, second], every=1)
    for step in range(2):
        model(torch.ones(1, 3)).sum().backward()
        first.step()
        if step:
            second.step()
    assert [(row["step"], row["layer"], row["learning_rate"]) for row in tracker.rows] == [
        (1, "0", 0.1), (2, "0", 0.1), (1, "1", 0.01),
    ]  # fmt: skip


def test_it_sees_what_other_hooks_do_whenever_they_were_registered() -> None:
    model, opt, tracker = watched()

    def double(*_: Any) -> None:
        model.weight.data.mul_(2)

    opt.register_step_post_hook(double)
    model(torch.zeros(1, 3)).sum().backward()  # no gradient
    opt.step()
    assert tracker.rows[0]["relative_update"] == pytest.approx(1)
    assert tracker.rows[0]["radial_share"] == pytest.approx(1)


def test_its_hooks_end_with_it() -> None:
    model, opt, tracker = watched()
    other = gonio.Tracker(model, optimizer=opt, every=1)
    assert len(vars(opt)["_gonio_watches"]) == 2
    with pytest.warns(GonioWarning, match="the SGD made no step, and no weight of the model has changed"):
        tracker.undo_()
    tracker.undo_()  # says it once
    del other
    gc.collect()
    assert "_gonio_watches" not in vars(opt)
    step(model, opt)
    assert tracker.rows == []


@pytest.mark.parametrize("cause", ["logger", "weight", "optimizer"])
def test_an_error_does_not_end_the_training(cause: str) -> None:
    """Of a logger, of a model that changes under the tracker, of an optimizer whose groups lack what others have."""
    model = nn.Linear(3, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail(*_: Any) -> None:
        raise OSError("disk")

    tracker = gonio.Tracker(model, fail if cause == "logger" else (), optimizer=opt, every=1)
    if cause == "weight":
        tracker._entries = fail  # type: ignore[method-assign]
    elif cause == "optimizer":
        tracker.training._figures = fail  # type: ignore[union-attr, method-assign]
    before = model.weight.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    lost = "a logger or the page lacks step 1" if cause == "logger" else "its rows are missing"
    with pytest.warns(UserWarning, match=f"{lost}: OSError: disk"):
        opt.step()
    opt.step()  # without a second warning
    assert torch.allclose(model.weight, before - 0.2)


class Descent(torch.optim.Optimizer):
    """Gradient descent with any options in its groups."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=group["lr"] or 0.1)


@pytest.mark.parametrize(
    ("name", "options", "rate"),
    [
        ("Muon", {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9}, True),  # no option of torch's Muon but these
        ("SGD", {"lr": 0.1, "weight_decay": 0.1}, True),
        ("AdamW", {"lr": 0.1, "weight_decay": 0.1, "betas": None}, True),
        ("Adafactor", {"lr": None, "weight_decay": None}, False),  # it computes its own rate
    ],
)
def test_an_optimizer_is_not_what_its_name_says(name: str, options: dict[str, Any], rate: bool) -> None:
    """Its rows have no prediction, and training goes on."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    opt = type(name, (Descent,), {})(model.parameters(), options)
    tracker = gonio.Tracker(model, optimizer=opt, every=1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    assert [row["layer"] for row in tracker.rows] == ["0", "1"]
    assert all(("learning_rate" in row) == rate and "predicted_rotation" not in row for row in tracker.rows)
    assert {layer.reason for layer in tracker.rotations} == {f"the equilibrium of {name} is not known"}
    assert tracker.to_html()


def test_complex_weights_have_no_rows() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, dtype=torch.complex64))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = gonio.Tracker(model, optimizer=opt, every=1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    assert [row["layer"] for row in tracker.rows] == ["0"]
    with pytest.raises(NoMatchError, match=r"selects only 1 \(its weight is complex\)"):
        gonio.Tracker(model, optimizer=opt, where="1")


def test_a_tracker_that_is_collected_during_a_step_does_not_disturb_it() -> None:
    """Torch iterates over its hooks during a step, and raises if one is removed before the last."""
    model, opt, tracker = watched()
    held: list[Any] = [tracker]
    del tracker
    acts: list[Any] = [lambda *_: held.clear(), lambda *_: None]
    handles = [register_optimizer_step_pre_hook(act) for act in acts]
    try:
        step(model, opt)
    finally:
        for handle in handles:
            handle.remove()
    assert held == []


def test_loggers_and_files_get_the_figures(tmp_path: Path) -> None:
    sent: list[Any] = []
    path = tmp_path / "t.csv"
    to = [lambda step, rows: sent.append((step, rows)), path]
    watch: Watch = lambda m, o: gonio.Tracker(m, to, optimizer=o, every=6, figures="training")  # noqa: E731
    _, tracker = train("AdamW", watch)
    assert sent[0][0] == 6
    assert sent[0][1]["0"]["rotation"] == tracker.rows[0]["rotation"]
    with path.open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert list(lines[0]) == ["step", "layer", *TRAINING]
    assert float(lines[0]["rotation"]) == tracker.rows[0]["rotation"]
    assert list(tracker.to_frame().columns) == ["step", "layer", *TRAINING]


def test_errors() -> None:
    model = nn.Linear(3, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InvalidArgumentError, match=r"Tracker\(optimizer=\) is an optimizer; found str"):
        gonio.Tracker(model, optimizer="adam")
    with pytest.raises(InvalidArgumentError, match=r"trains the model's parameters; found an SGD of other"):
        gonio.Tracker(nn.Linear(3, 2), optimizer=opt)
    with pytest.raises(
        InvalidArgumentError,
        match=r"also=\) takes filter_rotation, initial_angle, gradient, state, attention; found \('x',\)",
    ):
        gonio.Tracker(model, optimizer=opt, also=("x",))
    with pytest.raises(InvalidArgumentError, match=r"copies=\) is one of all, one; found 'two'"):
        gonio.Tracker(model, optimizer=opt, copies="two")
    with pytest.raises(InvalidArgumentError, match=r"measures steps with optimizer=; found figures='training'"):
        gonio.Tracker(model, figures="training")


def test_gradients_and_states_are_those_of_the_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    tracker = gonio.Tracker(model, optimizer=optimizer, every=1, also=("gradient", "state"), figures="training")
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().sum().backward()
        gradient = model[0].weight.grad
        assert gradient is not None
        before = model[0].weight.detach().clone()
        optimizer.step()
        row = next(row for row in reversed(tracker.rows) if row["layer"] == "0")
        change = model[0].weight.detach() - before
        assert row["gradient_norm"] == pytest.approx(float(gradient.norm()), rel=1e-6)
        assert row["update_rms"] == pytest.approx(float(change.square().mean().sqrt()) / 0.01, rel=1e-4)
        moment = optimizer.state[model[0].weight]["exp_avg_sq"] / (1 - 0.999 ** row["step"])
        assert row["gradient_rms"] == pytest.approx(float(moment.mean().sqrt()), rel=1e-5)
    optimizer.state[model[2].weight]["exp_avg_sq"].sub_(1.0)
    optimizer.step()
    assert [(step, one.code, one.path) for step, one in tracker.findings] == [(4, "G001", "2"), (4, "G804", "2")]
    tracker.undo_()
