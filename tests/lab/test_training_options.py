"""Each option of a training against its definition, in the one loop that every run goes through."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gonio.errors import InvalidArgumentError, PlanChangedError
from gonio.lab import Split, Task, TrainingConfig
from gonio.lab.plan import SCHEDULES, StudyPlan, extended
from gonio.lab.planning.planner import check_training, make_plan
from gonio.lab.running.training import (
    Average,
    TrainingStep,
    autocast,
    execute_run,
    fit,
    make_optimizer,
    make_schedule,
    metrics_on,
)
from gonio.lab.tasks import Metric, resolve
from lab.plans import TINY, plan_of

PLAIN = TrainingConfig(epochs=2, batch_size=8, lr=0.1)
OPTIONS: dict[str, Any] = {
    "schedule": "step", "warm_up": 1.0, "decay": "weights", "clip": 1.0, "label_smoothing": 0.1, "ema": 0.9,
    "precision": "bf16", "accumulate": 2, "betas": (0.8, 0.95), "others_factor": 0.1, "channels_last": True,
}  # fmt: skip


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def batch(count: int = 8) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(count, 1, 2, 2, generator=draw), torch.randint(0, 4, (count,), generator=draw)


def stepped(task: Task, training: TrainingConfig, **more: Any) -> list[Tensor]:
    model = net()
    TrainingStep(model, task, training, **more)(*batch())
    return [parameter.detach() for parameter in model.parameters()]


@pytest.fixture(scope="module")
def task() -> Task:
    return resolve(f"{TINY}:task")


def test_a_plan_without_options_keeps_the_hash_that_it_had_before_there_were_any() -> None:
    plan = plan_of()
    assert plan.hash == "5f19f13b901cc76b6300713a03b6d5cd1e7b6745add1472fb474db42edc80e58"
    old = plan.to_dict()
    old["training"] = {name: old["training"][name] for name in list(asdict(PLAIN))[:6]}
    for name in ("device", "metrics", "workers"):
        del old[name]
    assert StudyPlan.from_dict(json.loads(json.dumps(old))) == plan


@pytest.mark.parametrize("name", [each.name for each in fields(TrainingConfig)][6:])
def test_every_option_is_part_of_the_plan_and_of_its_hash(name: str) -> None:
    changed = plan_of(training=replace(plan_of().trained, **{name: OPTIONS[name]}))
    assert changed.hash != plan_of().hash
    assert StudyPlan.from_dict(json.loads(json.dumps(changed.to_dict()))) == changed
    with pytest.raises(PlanChangedError, match=rf"training.{name} is .* in the study and"):
        extended(plan_of(), changed, path="s", finished=0)


def test_the_options_of_a_run_in_words() -> None:
    text = str(replace(PLAIN, warm_up=0.5, **{k: v for k, v in OPTIONS.items() if k != "warm_up"}))
    assert "with step decay after 0.5 epochs of warm-up, momentum 0.9, weight decay 0.0005 of weights alone)" in text
    assert "clipped at norm 1.0, label smoothing 0.1, moving average of the parameters with decay 0.9" in text
    assert "autocast to bf16, each batch in 2 parts, betas (0.8, 0.95), 0.1 of the learning rate for what is" in text


def rates(training: TrainingConfig, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=training.lr)
    schedule, found = make_schedule(optimizer, training, steps), []
    for _ in range(training.epochs * steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_schedules_follow_their_formulas() -> None:
    total, of = 40, {name: rates(replace(PLAIN, epochs=4, schedule=name), 10) for name in SCHEDULES}
    cosine = [0.05 * (1 + math.cos(math.pi * t / total)) for t in range(total)]
    assert of["cosine"] == pytest.approx(cosine, rel=1e-6)
    assert of["constant"] == [0.1] * total
    assert of["step"] == pytest.approx([0.1] * 20 + [0.01] * 10 + [0.001] * 10)
    cycle = of["one-cycle"]
    assert cycle[0] == pytest.approx(0.1 / 25)
    assert max(cycle) == pytest.approx(0.1, rel=1e-2)
    assert cycle.index(max(cycle)) in (11, 12)
    assert cycle[-1] < 1e-3


def test_warm_up_rises_linearly_and_the_schedule_has_the_rest() -> None:
    found = rates(replace(PLAIN, epochs=4, warm_up=1.0), 10)
    assert found[:10] == pytest.approx([0.1 * (0.01 + 0.99 * t / 10) for t in range(10)])
    assert found[10:] == pytest.approx([0.05 * (1 + math.cos(math.pi * t / 30)) for t in range(30)])


def test_decay_of_weights_alone_spares_norms_and_biases() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = make_optimizer(model, replace(PLAIN, decay="weights", weight_decay=0.3))
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert [decays[id(p)] for p in model.parameters()] == [0.3, 0, 0, 0]


def test_a_clipped_step_has_the_length_of_its_limit(task: Task) -> None:
    plain = replace(PLAIN, momentum=0.0, weight_decay=0.0, lr=1.0)
    before = [parameter.detach() for parameter in net().parameters()]
    for limit, length in ((1e-3, 1e-3), (None, None)):
        after = stepped(task, replace(plain, clip=limit))
        moved = torch.cat([(a - b).flatten() for a, b in zip(after, before, strict=True)]).norm().item()
        assert moved == pytest.approx(length, rel=1e-3) if length else moved > 0.01


def test_label_smoothing_is_that_of_cross_entropy(task: Task) -> None:
    model, (x, y) = net(), batch()
    with torch.no_grad():
        log = model(x).double().log_softmax(1)
        reference = -(0.8 * log.gather(1, y[:, None])[:, 0] + 0.2 * log.mean(1)).mean().item()
    assert TrainingStep(model, task, replace(PLAIN, label_smoothing=0.2))(x, y)[0] == pytest.approx(reference, rel=1e-6)


@pytest.mark.parametrize("parts", [2, 3])
def test_a_batch_in_parts_takes_the_step_of_the_whole_batch(task: Task, parts: int) -> None:
    whole = stepped(task, PLAIN)
    # 8 examples in 3 parts are 3, 3 and 2, so equal weights would be wrong; the tolerance is float32's sum of 8
    for a, b in zip(stepped(task, replace(PLAIN, accumulate=parts)), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_the_penalty_of_a_batch_in_parts_is_that_of_the_step(tmp_path: Path) -> None:
    recipe = tmp_path / "decay.yaml"
    recipe.write_text("name: strong\npenalty:\n  - {where: 'type:Linear', use: L2, strength: 10.0}\n")
    norms = []
    for parts in (1, 2):
        plan = make_plan([str(recipe)], task=f"{TINY}:task", model=f"{__file__}:flat", seeds=1,
                         training={"accumulate": parts, "epochs": 1, "lr": 1e-3})  # fmt: skip
        record = execute_run(plan, plan.recipes[1], 0)["record"]
        assert record["status"] == "finished", record["error"]
        norms.append(record["curve"]["train_loss"][0])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def flat() -> nn.Module:
    return net()


def test_the_moving_average_is_its_recursion_and_is_what_is_judged(task: Task) -> None:
    model = nn.Linear(1, 1, bias=False)
    average, reference = Average(model, 0.5), model.weight.item()
    for t in range(1, 8):
        nn.init.constant_(model.weight, t)
        average.update()
        decay = min(0.5, (1 + t) / (10 + t))
        reference = decay * reference + (1 - decay) * t
    with average.in_place():
        assert model.weight.item() == pytest.approx(reference, rel=1e-6)
    assert model.weight.item() == 7
    with pytest.raises(KeyboardInterrupt, match="stopped"), average.in_place():
        raise KeyboardInterrupt("stopped")
    assert model.weight.item() == 7
    seen: list[Tensor] = []
    net_ = net()
    watching = replace(
        task, metric=replace(task.metric, function=lambda o, t: seen.append(net_[1].weight.clone()) or 0)
    )
    done = fit(net_, watching, training=replace(PLAIN, ema=0.99), seed=0)
    assert torch.equal(done.state["1.weight"], seen[-1])
    assert not torch.equal(net_[1].weight, seen[-1])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_computes_outputs_in_its_precision_and_keeps_the_weights(task: Task, precision: str) -> None:
    kinds = []
    model = net()
    model[1].register_forward_hook(lambda module, x, y: kinds.append(y.dtype))
    TrainingStep(model, task, replace(PLAIN, precision=precision))(*batch())
    assert kinds == [{"bf16": torch.bfloat16, "fp16": torch.float16}[precision]]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for a, b in zip(model.parameters(), stepped(task, PLAIN), strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=0.05, atol=0.01)  # 8 bits of mantissa
    metrics_on(model, task, task.validation, [task.metric])
    assert kinds[1:] == [torch.float32]


def test_a_scaled_loss_that_overflows_skips_the_step_and_does_not_end_the_run(task: Task) -> None:
    model = net()
    step = TrainingStep(model, task, replace(PLAIN, precision="fp16"))
    model[1].weight.register_hook(lambda gradient: gradient * torch.inf)
    before = model[3].weight.detach().clone()
    _, objective = step(*batch())
    assert math.isfinite(objective)
    assert torch.equal(model[3].weight, before)


def test_a_device_without_the_precision_is_refused(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    def unable(*_: object, **__: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(F, "conv2d", unable)
    monkeypatch.setattr(nn.Conv2d, "_conv_forward", unable)
    with pytest.raises(InvalidArgumentError, match=r"precision fp16 needs a device .*; found cpu: no such kernel"):
        check_training(replace(PLAIN, precision="fp16"), task)
    check_training(PLAIN, task)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "linear"}, "schedule must be one of cosine, constant, step, one-cycle; found 'linear'"),
        ({"decay": "some"}, "decay must be one of all, weights"),
        ({"precision": "fp8"}, "precision must be one of fp32, bf16, fp16"),
        ({"warm_up": 2.0}, "warm_up must be shorter than the 2 epochs; found 2.0"),
        ({"warm_up": 1.0, "schedule": "one-cycle"}, "one-cycle warms up by itself; found 'warm_up=1'"),
        ({"clip": 0.0}, "clip must be a positive number; found 0.0"),
        ({"clip": 1e300}, r"training\(clip=\) is between 1e-19 and 1e\+19"),
        ({"ema": 1.0}, "ema must be from 0 to below 1; found 1.0"),
        ({"label_smoothing": -0.1}, "label_smoothing must be from 0"),
        ({"weight_decay": -1.0}, "weight_decay must be 0 or above; found -1.0"),
        ({"accumulate": 5}, "accumulate needs two examples in each part; found 5 parts of 8"),
        ({"lr": math.nan}, "lr must be a positive number; found nan"),
    ],
)
def test_a_training_that_cannot_be_done_is_refused(task: Task, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        check_training(replace(PLAIN, **changes), task)


def test_label_smoothing_of_another_loss_is_refused(task: Task) -> None:
    other = replace(task, loss=lambda outputs, targets: F.cross_entropy(outputs, targets))
    with pytest.raises(InvalidArgumentError, match="needs a task whose loss is cross_entropy; found 'tiny'"):
        check_training(replace(PLAIN, label_smoothing=0.1), other)


def with_metrics() -> Task:
    kept = resolve(f"{TINY}:task")
    loss = Metric("log loss", lambda outputs, targets: float(F.cross_entropy(outputs, targets)), "min", "nats")
    return replace(kept, metrics=(loss, Metric("nothing", lambda o, t: math.nan)))


def test_further_metrics_are_recorded_and_decide_nothing() -> None:
    plans = [make_plan([], task=name, seeds=1) for name in (f"{__file__}:with_metrics", f"{TINY}:task")]
    assert plans[0].metrics == {"log loss": "nats", "nothing": ""}
    ours, plain = (execute_run(plan, plan.baseline, 0)["record"] for plan in plans)
    assert ours["score"] == plain["score"]
    assert 0 < ours["metrics"]["log loss"] < 3
    assert ours["metrics"]["nothing"] is None


def test_the_last_batch_has_two_examples_in_each_part(task: Task) -> None:
    split = Split(torch.zeros(11, 1, 2, 2), torch.zeros(11, dtype=torch.long))
    for parts, sizes in ((1, [8, 3]), (2, [8])):
        assert split.steps(8, smallest=2 * parts) == len(sizes)
        found = split.shuffled(8, seed=0, epoch=0, smallest=2 * parts, augment=None, workers=0)
        assert [len(y) for _, y in found] == sizes


def test_no_autocast_without_a_precision() -> None:
    with autocast(torch.device("cpu"), "fp32"):
        assert not torch.is_autocast_enabled("cpu")
