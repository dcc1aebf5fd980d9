"""A penalty in a LightningModule's loss: the same weights as a loop by hand, whatever Lightning does around it."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import foreign
import gonio
from gonio import regularizers as R
from gonio.errors import AlreadyAppliedError, InvalidArgumentError, NotApplicableError
from gonio.integrations.lightning import add_penalty_, report_callback, tracker_callback

STRENGTH = 0.3


@pytest.fixture(scope="module")
def lightning() -> Any:
    foreign.torchvision()  # which the library imports where it finds it
    with warnings.catch_warnings(action="ignore"):  # the library's own remarks on its dependencies, at import
        return pytest.importorskip("lightning.pytorch", reason="lightning is not installed")


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 4, generator=draw), torch.randint(2, (8,), generator=draw)) for _ in range(6)]


def module_of(lightning: Any, *, as_dict: bool = False, manual: bool = False) -> Any:
    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 2)
            self.automatic_optimization = not manual
            self.validated: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            return {"loss": loss, "other": 1} if as_dict else loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.validated.append(F.cross_entropy(self.net(batch[0]), batch[1]).item())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(0)
    return Module()


def fit(
    lightning: Any, module: Any, folder: Path, *, epochs: int = 1, checkpoint: Path | None = None, **options: Any
) -> torch.Tensor:
    """The weight after a training, whose checkpoint is saved under its epochs."""
    quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger"), False)
    with warnings.catch_warnings(action="ignore"):  # on worker counts and the absence of a logger
        own = {"max_epochs": epochs, "accelerator": "cpu", "devices": 1, "default_root_dir": folder}
        trainer = lightning.Trainer(**{**quiet, **options, **own})
        loader = torch.utils.data.DataLoader(batches(), batch_size=None)
        trainer.fit(module, loader, loader, ckpt_path=checkpoint)
        trainer.save_checkpoint(folder / f"{epochs}.ckpt")
    return module.net.weight.detach()


def by_hand(*, accumulate: int = 1, strength: float = STRENGTH) -> torch.Tensor:
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for i, (x, y) in enumerate(batches()):
        ((F.cross_entropy(net(x), y) + strength * net.weight.square().sum() / 2) / accumulate).backward()
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return net.weight.detach()


@pytest.mark.slow
@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_it_trains_as_a_loop_by_hand(lightning: Any, tmp_path: Path, as_dict: bool, accumulate: int) -> None:
    module = module_of(lightning, as_dict=as_dict)
    add_penalty_(module, gonio.Penalty(module.net, [(None, R.L2(STRENGTH))]))
    found = fit(lightning, module, tmp_path, accumulate_grad_batches=accumulate)
    torch.testing.assert_close(found, by_hand(accumulate=accumulate), rtol=1e-6, atol=1e-7)
    assert not torch.allclose(found, by_hand(accumulate=accumulate, strength=0.0))


@pytest.mark.slow
def test_the_penalty_is_logged_beside_the_loss(lightning: Any, tmp_path: Path) -> None:
    module = module_of(lightning)
    penalty = gonio.Penalty(module.net, [(None, R.L2(STRENGTH))])
    add_penalty_(module, penalty)
    with torch.no_grad():
        start = float(penalty())
    logger = lightning.loggers.CSVLogger(tmp_path)
    fit(lightning, module, tmp_path, logger=logger, log_every_n_steps=1)
    logger.save()
    with Path(logger.log_dir, "metrics.csv").open(encoding="utf-8") as file:
        values = [float(row["gonio.penalty"]) for row in csv.DictReader(file)]
    assert values[0] == pytest.approx(start, rel=1e-6)
    assert len(set(values)) == len(values) > 1


@pytest.mark.slow
def test_twice_and_by_hand_are_refused(lightning: Any) -> None:
    module = module_of(lightning)
    add_penalty_(module, lambda: torch.zeros(()))
    with pytest.raises(AlreadyAppliedError, match="found a penalty there already"):
        add_penalty_(module, lambda: torch.zeros(()))
    with pytest.raises(NotApplicableError, match=r"it uses manual optimization.*Add penalty\(\) to the loss"):
        add_penalty_(module_of(lightning, manual=True), lambda: torch.zeros(()))


@pytest.mark.slow
@pytest.mark.parametrize(("accumulate", "steps"), [(1, [2, 4, 6]), (3, [2])])
def test_a_tracker_measures_at_optimizer_steps(
    lightning: Any, tmp_path: Path, accumulate: int, steps: list[int]
) -> None:
    plain = fit(lightning, module_of(lightning), tmp_path, accumulate_grad_batches=accumulate)
    module = module_of(lightning)
    tracker = gonio.Tracker(module, tmp_path / "track.csv", every=2)
    callbacks = [tracker_callback(tracker)]
    found = fit(lightning, module, tmp_path, accumulate_grad_batches=accumulate, callbacks=callbacks)
    assert torch.equal(found, plain)
    assert [(row["step"], row["layer"]) for row in tracker.rows] == [(step, "net") for step in steps]
    assert len((tmp_path / "track.csv").read_text().splitlines()) == 1 + len(steps)
    assert tracker.rows[-1]["frobenius"] == pytest.approx(float(found.norm()), rel=1e-6)


SCRIPT = f"""
import sys
import warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import foreign
foreign.torchvision()
"""
SCRIPT += """
import lightning.pytorch as L
import torch
from torch import nn
from torch.nn import functional as F
from gonio.integrations.lightning import add_penalty_


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(run):
    x = torch.randn(64, 4)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long()), batch_size=16)
    trainer = L.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
                        enable_progress_bar=False, default_root_dir=run.folder)
    module = Module()
    run.apply_(module)
    add_penalty_(module, run.penalty)
    trainer.fit(module, loader, loader)
    return trainer.callback_metrics["accuracy"]
"""


@pytest.mark.slow
def test_a_comparison_of_a_lightning_module(lightning: Any, tmp_path: Path) -> None:
    script = tmp_path / "fit_module.py"
    script.write_text(SCRIPT)
    plan = gonio.lab.make_script_plan(["scale-shift"], script=f"{script}:train", seeds=1)
    records = gonio.lab.run(plan, tmp_path / "study", jobs=2).runs()
    assert [(record.status, record.error) for record in records] == [("finished", None)] * 2
    assert set(records[1].geometry["layers"]) == {"net"}


@pytest.mark.slow
def test_a_resumed_training_continues_the_penalty(lightning: Any, tmp_path: Path) -> None:
    """Half of a training, a checkpoint, and the other half in a new process equal the whole."""

    def train(epochs: int, checkpoint: Path | None = None) -> tuple[gonio.Penalty, torch.Tensor]:
        module = module_of(lightning)
        penalty = gonio.Penalty(module.net, [(None, R.L2(STRENGTH, every=4))])
        add_penalty_(module, penalty)
        return penalty, fit(lightning, module, tmp_path, epochs=epochs, checkpoint=checkpoint)

    whole = train(3)
    train(1)
    resumed = train(3, tmp_path / "1.ckpt")
    assert resumed[0].state_dict() == whole[0].state_dict()
    torch.testing.assert_close(resumed[1], whole[1])


# --- without the library ---------------------------------------------------------------------------


class Stepping(nn.Linear):
    """What is asked of a module, and no more."""

    def __init__(self, output: Any) -> None:
        super().__init__(2, 2)
        self.output = output

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.output


@pytest.mark.parametrize(
    ("output", "expected"),
    [(torch.tensor(1.0), 3.0), ({"loss": torch.tensor(1.0), "x": 5}, {"loss": 3.0, "x": 5}), (None, None)],
)
def test_what_a_step_may_return(output: Any, expected: Any) -> None:
    module = Stepping(output)
    add_penalty_(module, lambda: torch.tensor(2.0))
    found = module.training_step(None, 0)
    assert found == expected


def test_checkpoints_hold_the_state_of_the_penalty() -> None:
    """Beside what the module's own hooks save and load; `undo_` removes both."""

    class Saving(Stepping):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["own"] = True

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.loaded = checkpoint["own"]

    def made() -> tuple[Saving, gonio.Penalty]:
        module = Saving(torch.zeros(()))
        return module, gonio.Penalty(module, [(None, R.L2(STRENGTH))])

    checkpoint: dict[str, Any] = {}
    module, penalty = made()
    added = add_penalty_(module, penalty)
    for _ in range(3):
        module.training_step(None, 0)
    module.on_save_checkpoint(checkpoint)
    other, resumed = made()
    add_penalty_(other, resumed)
    assert resumed.state_dict() != penalty.state_dict()
    other.on_load_checkpoint(checkpoint)
    assert other.loaded
    assert resumed.state_dict() == penalty.state_dict()
    added.undo_()
    module.on_save_checkpoint(plain := {})
    assert plain == {"own": True}


def test_schedules_count_the_steps_of_the_optimizer() -> None:
    """Three batches for each step: the penalty ramps up by steps, and those of one step are those of one value."""
    module = Stepping(torch.zeros(()))
    trainer = SimpleNamespace(global_step=0)
    module.trainer = trainer
    penalty = gonio.Penalty(module, [(None, R.L2(1.0, every=2, schedule=R.Warmup(4)))])
    add_penalty_(module, penalty)
    values = []
    for batch in range(12):
        trainer.global_step = batch // 3
        values.append(module.training_step(None, batch).item())
    strengths = [penalty._terms[0].regularizer.strength_at(step) for step in range(4)]
    half = float(module.weight.detach().square().sum()) / 2
    assert values == pytest.approx([strength * half for strength in strengths for _ in range(3)])
    assert len({*strengths}) > 2
    assert penalty.step == 4


def test_an_error_of_the_logger_is_not_hidden() -> None:
    class Logging(Stepping):
        def log(self, name: str, value: Any) -> None:
            raise RuntimeError(f"no room for {name}")

    module = Logging(torch.zeros(()))
    add_penalty_(module, lambda: torch.tensor(2.0))
    assert module.training_step(None, 0) == 2.0
    module.trainer = SimpleNamespace(global_step=0)
    with pytest.raises(RuntimeError, match=r"no room for gonio\.penalty"):
        module.training_step(None, 0)


def test_a_penalty_that_divides_itself_is_refused() -> None:
    module = Stepping(torch.zeros(()))
    penalty = gonio.Penalty(module, [(None, R.L2(1.0))], accumulate=3)
    with pytest.raises(InvalidArgumentError, match=r"accumulate=1, because the trainer divides .*; found accumulate=3"):
        add_penalty_(module, penalty)


def test_what_a_step_may_not_return() -> None:
    module = Stepping("loss")
    add_penalty_(module, lambda: torch.tensor(2.0))
    with pytest.raises(InvalidArgumentError, match=r"training_step returns the loss, .*; found a str"):
        module.training_step(None, 0)


def test_a_module_without_steps_is_refused() -> None:
    with pytest.raises(NotApplicableError, match=r"it has no training_step. Pass a LightningModule"):
        add_penalty_(nn.Linear(2, 2), lambda: torch.tensor(2.0))


def test_a_report_at_each_checkpoint_changes_nothing(lightning: Any, tmp_path: Path) -> None:
    seen: list[Any] = []
    plain = fit(lightning, module_of(lightning), tmp_path)
    callback = report_callback(lambda model: seen.append(gonio.doctor(model)))
    reported = fit(lightning, module_of(lightning), tmp_path, callbacks=[callback])
    assert [type(each).__name__ for each in seen] == ["Treatment"]
    assert torch.equal(plain, reported)
