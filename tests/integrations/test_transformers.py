"""A penalty in a Hugging Face Trainer's loss: once per optimizer step, and not in the evaluation."""

from __future__ import annotations

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
from gonio.errors import AlreadyAppliedError, NotApplicableError, UndoError
from gonio.integrations.transformers import add_penalty_, report_callback, tracker_callback

STRENGTH = 0.3


@pytest.fixture(scope="module")
def transformers() -> Any:
    with warnings.catch_warnings(action="ignore"):  # the library's own remarks, at import
        pytest.importorskip("accelerate", reason="accelerate is not installed")
        return foreign.transformers()


class Plain(nn.Module):
    """The loss is the mean over a micro-batch: the Trainer divides it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Scaled(Plain):
    """The loss is normalised by the whole batch: the Trainer does not divide it."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        logits = self.net(x)
        total = F.cross_entropy(logits, labels, reduction="sum")
        return {"loss": total / kwargs.get("num_items_in_batch", len(x)), "logits": logits}


def data() -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(4, generator=draw), "labels": torch.randint(2, (), generator=draw)} for _ in range(48)]


def trainer_of(transformers: Any, model: nn.Module, folder: Path, *, accumulate: int) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, gradient_accumulation_steps=accumulate,
        num_train_epochs=1, max_grad_norm=0.0, use_cpu=True, report_to=[], save_strategy="no",
        logging_strategy="no", disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    class Ordered(transformers.Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    return Ordered(
        model=model, args=arguments, train_dataset=data(), eval_dataset=data(), optimizers=(optimizer, constant)
    )


def by_hand(*, accumulate: int, strength: float = STRENGTH) -> torch.Tensor:
    """Whole batches: micro-batches of equal size change nothing but rounding."""
    net = Plain().net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rows, size = data(), 4 * accumulate
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        x, y = torch.stack([row["x"] for row in part]), torch.stack([row["labels"] for row in part])
        optimizer.zero_grad()
        (F.cross_entropy(net(x), y) + strength * net.weight.square().sum() / 2).backward()
        optimizer.step()
    return net.weight.detach()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Plain, Scaled])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_it_trains_as_a_loop_by_hand(transformers: Any, tmp_path: Path, kind: type[Plain], accumulate: int) -> None:
    model = kind()
    with warnings.catch_warnings(action="ignore"):
        trainer = trainer_of(transformers, model, tmp_path, accumulate=accumulate)
        before = trainer.evaluate()["eval_loss"]
        add_penalty_(trainer, gonio.Penalty(model.net, [(None, R.L2(STRENGTH))]))
        assert trainer.evaluate()["eval_loss"] == before
        trainer.train()
    found = model.net.weight.detach()
    torch.testing.assert_close(found, by_hand(accumulate=accumulate), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found, by_hand(accumulate=accumulate, strength=0.0), rtol=1e-3)


def test_the_first_step_of_a_resumed_training_has_its_number(transformers: Any) -> None:
    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = gonio.Tracker(model, optimizer=optimizer, every=1, figures="training")
    callback = tracker_callback(tracker)
    callback.on_train_begin(None, SimpleNamespace(global_step=100), None)
    model.net.weight.sum().backward()
    optimizer.step()
    assert [row["step"] for row in tracker.rows] == [101]


@pytest.mark.slow
@pytest.mark.parametrize(("accumulate", "steps"), [(1, [4, 8, 12]), (3, [4])])
def test_a_tracker_measures_at_optimizer_steps(
    transformers: Any, tmp_path: Path, accumulate: int, steps: list[int]
) -> None:
    weights = []
    for tracked in (False, True):
        model = Plain()
        tracker = gonio.Tracker(model, every=4)
        with warnings.catch_warnings(action="ignore"):
            trainer = trainer_of(transformers, model, tmp_path, accumulate=accumulate)
            if tracked:
                trainer.add_callback(tracker_callback(tracker))
            trainer.train()
        assert [(row["step"], row["layer"]) for row in tracker.rows] == [(n, "net") for n in steps if tracked]
        weights.append(model.net.weight.detach())
    assert torch.equal(*weights)


@pytest.mark.slow
def test_a_resumed_training_goes_on_with_the_penalty(transformers: Any, tmp_path: Path) -> None:
    """`every` and schedules count from the checkpoint; without its file a warning says that they do not."""
    penalties = []
    for _ in range(2):
        model = Plain()
        with warnings.catch_warnings(action="ignore"):
            trainer = trainer_of(transformers, model, tmp_path, accumulate=1)
            trainer.args.save_strategy, trainer.args.save_steps = "steps", 5
            penalty = gonio.Penalty(model.net, [(None, R.SRIP(STRENGTH, every=3))])
            add_penalty_(trainer, penalty)
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5") if penalties else None)
        penalties.append(penalty)
    assert [penalty.step for penalty in penalties] == [12, 12]
    (tmp_path / "checkpoint-5" / "gonio_penalty.pt").unlink()
    trainer = trainer_of(transformers, Plain(), tmp_path, accumulate=1)
    add_penalty_(trainer, gonio.Penalty(trainer.model.net, [(None, R.L2(STRENGTH))]))
    with pytest.warns(UserWarning, match="the training resumes at step 5, but the penalty at step 0"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))


# --- without the library ---------------------------------------------------------------------------


class Arguments:
    gradient_accumulation_steps = 4


class Small:
    """What is asked of a trainer, and no more."""

    args = Arguments()
    compute_loss_func = None

    def __init__(self, *, accepts: bool = False, scaled: bool | None = None) -> None:
        self.model_accepts_loss_kwargs = accepts
        self.loss_is_scaled_for_ga = scaled

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: int | None = None
    ) -> Any:
        loss = torch.tensor(1.0)
        return (loss, {"logits": 2}) if return_outputs else loss


@pytest.mark.parametrize(
    ("trainer", "items", "expected"),
    [
        (Small(), None, 9.0),
        (Small(), 5, 9.0),
        (Small(accepts=True), None, 9.0),
        (Small(accepts=True), 5, 3.0),
        (Small(scaled=True), None, 3.0),
        (Small(accepts=True, scaled=False), 5, 9.0),
    ],
)
def test_the_penalty_counts_once_per_optimizer_step(trainer: Small, items: int | None, expected: float) -> None:
    add_penalty_(trainer, lambda: torch.tensor(8.0))
    model = nn.Linear(2, 2)
    assert trainer.compute_loss(model, {}, num_items_in_batch=items) == expected
    assert trainer.compute_loss(model, {}, True, items) == (expected, {"logits": 2})
    assert trainer.compute_loss(model.eval(), {}, num_items_in_batch=items) == 1.0


def test_schedules_count_the_steps_of_the_optimizer() -> None:
    trainer, model = Small(), nn.Linear(2, 2)
    trainer.state = SimpleNamespace(global_step=0)  # type: ignore[attr-defined]
    penalty = gonio.Penalty(model, [(None, R.L2(1.0, every=2))])
    add_penalty_(trainer, penalty)
    active = []
    for batch in range(8):
        trainer.state.global_step = batch // 2  # type: ignore[attr-defined]
        active.append(trainer.compute_loss(model, {}).item() > 1)
    assert active == [True, True, False, False, True, True, False, False]
    assert penalty.step == 4


def test_the_mean_since_the_last_log_stands_beside_the_loss() -> None:
    class Logging(Small):
        def __init__(self) -> None:
            super().__init__()
            self.logs: list[dict[str, float]] = []

        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            self.logs.append(logs)

    trainer, given = Logging(), iter([1.0, 3.0, 5.0])
    added = add_penalty_(trainer, lambda: torch.tensor(next(given)))
    model = nn.Linear(2, 2)
    for _ in range(2):
        trainer.compute_loss(model, {"x": torch.ones(1, 2)})
    trainer.log({"loss": 0.5}, 1.0)
    trainer.log({"eval_loss": 0.5})
    trainer.log({"loss": 0.5})
    trainer.compute_loss(model, {"x": torch.ones(1, 2)})
    trainer.log({"loss": 0.5})
    added.undo_()
    trainer.log({"loss": 0.5})
    shown = [logs.get("gonio_penalty") for logs in trainer.logs]
    assert shown == [2.0, None, None, 5.0, None]


def test_twice_is_refused_and_undo_takes_it_out() -> None:
    trainer = Small()
    added = add_penalty_(trainer, lambda: torch.tensor(8.0))
    with pytest.raises(AlreadyAppliedError, match="found a penalty there already"):
        add_penalty_(trainer, lambda: torch.tensor(8.0))
    added.undo_()
    assert trainer.compute_loss(nn.Linear(2, 2), {}) == 1.0


def test_methods_of_the_object_itself_come_back() -> None:
    """Other libraries replace methods of one trainer, before and after."""
    trainer, model = Small(), nn.Linear(2, 2)
    trainer.compute_loss = own = lambda *given, **named: torch.tensor(3.0)
    added = add_penalty_(trainer, lambda: torch.tensor(8.0))
    assert trainer.compute_loss(model, {}) == 11.0
    theirs = trainer.compute_loss
    trainer.compute_loss = lambda *given, **named: 2 * theirs(*given, **named)
    with pytest.raises(UndoError, match="compute_loss was replaced since"):
        added.undo_()
    assert trainer.compute_loss(model, {}) == 22.0
    trainer.compute_loss = theirs
    added.undo_()
    assert trainer.compute_loss is own


def test_what_has_no_loss_is_refused() -> None:
    with pytest.raises(NotApplicableError, match=r"it has no compute_loss. Pass a transformers.Trainer"):
        add_penalty_(object(), lambda: torch.tensor(8.0))


def test_a_report_after_each_checkpoint(transformers: Any, tmp_path: Path) -> None:
    model, seen = Plain(), []
    trainer = trainer_of(transformers, model, tmp_path, accumulate=1)
    trainer.args.save_strategy, trainer.args.save_steps = "steps", 5
    trainer.add_callback(report_callback(lambda each: seen.append(gonio.doctor(each.net, batch=torch.ones(2, 4)))))
    trainer.train()
    assert len(seen) == 3  # after 5, 10 and the last of 12 steps
