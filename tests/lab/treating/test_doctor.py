"""`gonio.doctor`: findings are treated on a copy, and a change is kept only with a proof."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import gonio
from gonio.errors import InvalidArgumentError, NotApplicableError
from gonio.lab import Split, Task, TrainingConfig
from gonio.lab.tasks import Metric, resolve
from gonio.lab.treating.doctor import best_scale
from gonio.lab.treating.proof import held_out, study_of
from gonio.lab.treating.treatment import TreatmentStep
from gonio.measuring import explain
from gonio.measuring.findings.remedies import PROOFS
from gonio.measuring.findings.rules import HEAD_RULES, RULES, rule_texts


def network() -> nn.Sequential:
    """Three classes by their prototypes, behind a batch norm whose statistics are those of the task."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    data = task()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(30):
        optimizer.zero_grad()
        data.loss(model(data.train.inputs), data.train.targets).backward()
        optimizer.step()
    gonio.calibrate_(model, [data.train.inputs])
    return model.eval()


def task() -> Task:
    random = torch.Generator().manual_seed(1)
    prototypes = 3 * torch.randn(3, 8, generator=random)

    def split(count: int) -> Split:
        targets = torch.arange(count) % 3
        return Split(prototypes[targets] + torch.randn(count, 8, generator=random), targets)

    training = TrainingConfig(epochs=1, batch_size=12, lr=0.05)
    return Task(
        name="blobs", train=split(96), validation=split(96), test=split(96), model="none", sizes={}, training=training,
        sesoi=1.0,
    )  # fmt: skip


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x.nan_to_num(7), y.nan_to_num(7)) for x, y in pairs)


def scaled() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    with torch.no_grad():
        model[0].weight.mul_(1000)
        model[0].bias.mul_(1000)
        model[2].weight.div_(1000)
    return model


@pytest.mark.parametrize("code", RULES)
def test_every_rule_has_a_prescription_or_the_reason_why_not(code: str) -> None:
    prescription = rule_texts()[code].prescription
    assert bool(prescription.remedies) != bool(prescription.none)
    for each in prescription.remedies:
        assert callable(getattr(gonio.lab if each.verb == "retrain_" else gonio, each.verb))
        assert each.proof in PROOFS
        assert all((each.why, each.changes, each.cannot))
    assert f"gonio.doctor: {prescription}" in explain(code)


def test_a_healthy_model_gets_nothing() -> None:
    model = network()
    treated = gonio.doctor(model, task=task())
    assert (treated.steps, treated.untreated, treated.recipe["steps"]) == ((), (), [])
    assert "Nothing to do" in str(treated)
    assert same(model, treated.model)
    assert treated.model is not model


def test_scale_is_moved_with_the_same_function_and_undone_exactly() -> None:
    model, x = scaled(), torch.randn(32, 16)
    before = copy.deepcopy(model)
    treated = gonio.doctor(model, batch=x)
    assert [finding.code for finding in treated.before.findings] == ["G409"]
    assert not treated.after.findings
    assert [(step.verb, step.verdict, step.proved) for step in treated.steps] == [("balance_", "kept", True)]
    assert treated.recipe["steps"] == [{"verb": "balance_", "options": {}, "for": ["G409"]}]
    reference = copy.deepcopy(before).double()
    assert torch.allclose(treated.model(x).double(), reference(x.double()), rtol=1e-4, atol=1e-4)
    assert same(model, before)
    assert not same(treated.model, before)
    treated.undo_()
    assert same(treated.model, before)
    with pytest.raises(gonio.surgery.UndoError, match="undone before"):
        treated.undo_()


@pytest.mark.parametrize(
    ("buffer", "value", "code"),
    [("running_var", -1.0, "G105"), ("running_mean", float("nan"), "G001"), ("running_mean", 50.0, "G410")],
)
def test_statistics_are_measured_anew_with_a_proof(buffer: str, value: float, code: str) -> None:
    healthy, data = network(), task()
    score = gonio.lab.tasks.accuracy(healthy(data.test.inputs), data.test.targets)
    damaged = copy.deepcopy(healthy)
    damaged[1].get_buffer(buffer).fill_(value)
    before = copy.deepcopy(damaged)
    treated = gonio.doctor(damaged, task=data)
    assert [(step.verb, step.proved) for step in treated.kept] == [("calibrate_", True)]
    assert code in treated.kept[0].codes
    assert not treated.after.findings
    assert abs(gonio.lab.tasks.accuracy(treated.model(data.test.inputs), data.test.targets) - score) <= 2
    assert same(damaged, before)


WRAPPERS = {
    "parallel": nn.DataParallel,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "averaged": torch.optim.swa_utils.AveragedModel,
    "a compiled part": lambda model: nn.Sequential(torch.compile(model, backend="eager")),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_layers_inside_wrappers_are_treated_as_those_of_the_plain_model(wrapper: str) -> None:
    plain = network()
    with torch.no_grad():
        plain[0].weight[3] *= 100
        plain[1].running_var[4] = torch.nan
        plain[3].weight.zero_()
    model = WRAPPERS[wrapper](copy.deepcopy(plain)).eval()
    treated = gonio.doctor(model, task=task())
    expected = gonio.doctor(nn.Sequential(plain).eval() if "part" in wrapper else plain, task=task())
    found, wanted = ([(s.verb, s.proved, s.options.get("where")) for s in each.kept] for each in (treated, expected))
    assert found == wanted
    assert {step.verb for step in treated.kept} >= {"calibrate_", "retrain_"}
    values = list(zip(treated.model.parameters(), expected.model.parameters(), strict=True))
    assert all(torch.equal(mine, theirs) for mine, theirs in values)
    treated.undo_()
    assert same(treated.model, model)


def test_without_data_nothing_is_applied_unless_it_is_asked_for() -> None:
    damaged, x = network(), task().train.inputs
    damaged[1].running_var[0] = -1
    refused = gonio.doctor(damaged, batch=x)
    assert [(step.verdict, step.proved) for step in refused.steps] == [("not applied", False)]
    assert "not provable without data" in refused.steps[0].proof
    assert same(refused.model, damaged)
    kept = gonio.doctor(damaged, batch=x, apply_unproven=True)
    assert [(step.verdict, step.proved) for step in kept.steps] == [("kept", False)]
    assert "not proved" in kept.steps[0].proof
    assert gonio.doctor(damaged, apply_unproven=True).steps[0].verdict == "not applied"


@torch.no_grad()
def mlp(*, dead: bool = False, copied: bool = False, weak: float = 1.0) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    if dead:
        model[0].weight[5] = 0
    if copied:
        model[0].weight[7], model[0].bias[7] = model[0].weight[3], model[0].bias[3]
    model[0].weight[9] *= weak
    model[0].bias[9] *= weak
    return model.eval()


def test_dead_and_duplicate_filters_are_recycled_with_the_same_function() -> None:
    model, x = mlp(dead=True, copied=True), torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
    treated = gonio.doctor(model, batch=x)
    assert {finding.code for finding in treated.before.findings} == {"G102", "G203"}
    assert not treated.after.findings
    assert [(step.verb, step.verdict, step.proved) for step in treated.steps] == [("recycle_", "kept", True)]
    assert treated.recipe["steps"][0]["options"] == {"where": ["0"]}
    assert torch.allclose(treated.model(x), model(x), atol=1e-5)
    assert treated.model[0].weight[5].any()
    assert not treated.model[2].weight[:, [5, 7]].any()
    treated.undo_()
    assert same(model, treated.model)


def test_a_weak_filter_gets_its_scale_back_or_is_drawn_anew() -> None:
    model, x = mlp(weak=1e-4), torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model[2].weight[:, 9] *= 4
    treated = gonio.doctor(model, batch=x)
    assert [(step.verb, step.verdict) for step in treated.steps] == [("balance_", "kept")]
    assert not treated.after.findings
    model = mlp(weak=1e-7)
    alone = gonio.doctor(model, batch=x)
    steps = {step.verb: step for step in alone.steps}
    assert (steps["balance_"].verdict, steps["recycle_"].verdict) == ("undone", "not applied")
    assert all("not provable without data" in s.proof for s in alone.steps if s.verdict == "not applied")
    asked = gonio.doctor(model, batch=x, apply_unproven=True)
    assert [(step.verb, step.proved) for step in asked.kept] == [("even_out_", False)]
    assert asked.recipe["steps"][0]["options"] == {"where": ["0"]}


def test_statistics_are_measured_in_the_named_layers_first() -> None:
    torch.manual_seed(0)
    first, second = (nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU()), (nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU())
    model = nn.Sequential(*first, *second, nn.Linear(8, 3))
    data = task()
    gonio.calibrate_(model.eval(), [data.train.inputs])
    model[1].running_var[0] = -1
    treated = gonio.doctor(model, task=data)
    assert [step.verdict for step in treated.steps] == ["kept"]
    assert treated.steps[0].options == {"channels": "invalid", "where": ["1"]}
    assert torch.equal(treated.model[4].running_mean, model[4].running_mean)
    assert not treated.after.findings


def fine_tuned() -> tuple[nn.Sequential, nn.Sequential]:
    """A network, and one with four new large directions in a weight."""
    wide = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in wide.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) / 8)
        tuned = copy.deepcopy(wide)
        u, v = (torch.linalg.qr(torch.randn(64, 4, generator=random))[0] for _ in range(2))
        tuned[2].weight += 3 * u @ v.T
    return wide, tuned


def test_intruders_take_the_base_and_a_task() -> None:
    base, tuned = fine_tuned()
    without = gonio.doctor(tuned, batch=task().train.inputs)
    assert "G501" not in {finding.code for finding in without.before.findings}
    named = gonio.doctor(tuned, batch=task().train.inputs, base=base)
    steps = {step.verb: step for step in named.steps}
    assert steps["shrink_intruders_"].codes == ("G501",)
    assert "not provable without data" in steps["shrink_intruders_"].proof
    judged = gonio.doctor(tuned, task=task(), base=base)
    step = {step.verb: step for step in judged.steps}["shrink_intruders_"]
    assert step.options == {"factor": 0.0, "where": ["2"]}
    assert step.verdict in ("kept", "undone")
    assert step.proved == (step.verdict == "kept")


def explained(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    return float(100 - 100 * (outputs.double() - targets.double()).square().mean() / targets.double().var())


def linear_change(scale: float) -> tuple[nn.Sequential, nn.Sequential, Task]:
    """A linear base, a model whose change is `scale` times the right one, and the task that it was changed for."""
    random = torch.Generator().manual_seed(5)
    base, right = (nn.Sequential(nn.Linear(8, 4)) for _ in range(2))
    with torch.no_grad():
        for model, size in ((base, 1.0), (right, 0.5)):
            for parameter in model.parameters():
                parameter.copy_(size * torch.randn(parameter.shape, generator=random))
        right[0].weight += base[0].weight
        tuned = copy.deepcopy(right)
        for new, old in zip(tuned.parameters(), base.parameters(), strict=True):
            new.copy_(old + scale * (new - old))

    def split(count: int) -> Split:
        inputs = torch.randn(count, 8, generator=random)
        return Split(inputs, right(inputs).detach() + 0.1 * torch.randn(count, 4, generator=random))

    task = Task(
        name="plane", train=split(96), validation=split(96), test=split(96), model="none", sizes={}, sesoi=1.0,
        loss=nn.functional.mse_loss, metric=Metric("explained variance", explained, "max", "%"),
        training=TrainingConfig(epochs=1, batch_size=12, lr=0.05),
    )  # fmt: skip
    return base, tuned, task


def test_a_change_with_a_wrong_scale_gets_the_right_one() -> None:
    base, wrong, data = linear_change(8.0)
    _, right, _ = linear_change(1.0)
    treated = gonio.doctor(wrong, task=data, base=base)
    (step,) = treated.kept
    assert (step.verb, step.codes, step.options) == ("shrink_change_", ("G502",), {"factor": 0.125})
    assert step.proof.startswith("improved: explained variance")
    assert "G502" not in {finding.code for finding in treated.after.findings}
    for new, exact in zip(treated.model.parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(new, exact, rtol=1e-4, atol=1e-5)


def test_the_factor_is_told_by_the_training_data_and_the_model_stays() -> None:
    base, tuned, data = linear_change(8.0)
    before = copy.deepcopy(tuned.state_dict())
    assert best_scale(tuned.train(), base, data, ["0"]) == {"factor": 0.125}
    assert tuned.training
    assert all(torch.equal(value, before[name]) for name, value in tuned.state_dict().items())
    base, tuned, data = linear_change(1.0)
    with pytest.raises(NotApplicableError, match="no smaller change has a lower loss on the training data"):
        best_scale(tuned, base, data, [])


def test_the_proof_says_improved_or_not_inferior() -> None:
    model, data = network(), task()
    model[1].running_mean.fill_(50.0)
    treated = gonio.doctor(model, task=data)
    assert treated.steps[0].proof.startswith("improved: accuracy on held-out blobs: +")


def test_a_nan_weight_is_refused_without_data_and_set_to_0_with_a_proof() -> None:
    model = network()
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    refused = gonio.doctor(model, batch=task().train.inputs)
    assert not refused.kept
    assert any("G001" in step.codes and "not provable without data" in step.proof for step in refused.steps)
    assert same(refused.model, model)
    treated = gonio.doctor(model, task=task())
    assert [step.verb for step in treated.kept] == ["even_out_"]
    assert "restored in part" in treated.kept[0].cannot
    assert treated.model[0].weight[0, 0] == 0
    assert torch.isnan(model[0].weight[0, 0])


def test_a_change_that_makes_the_score_worse_is_undone() -> None:
    """The statistics are right for the validation data, and the training data are not like them."""
    model, data = network(), task()
    shifted = replace(data, train=Split(data.train.inputs + 20, data.train.targets))
    treated = gonio.doctor(model, task=shifted)
    assert not treated.kept
    assert (treated.steps[0].verb, treated.steps[0].verdict) == ("calibrate_", "undone")
    assert "accuracy on held-out blobs: -" in treated.steps[0].proof
    assert same(treated.model, model)


def test_a_change_that_leaves_the_finding_is_undone() -> None:
    """A dominant filter of the last layer: no layer after it takes its scale."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
    with torch.no_grad():
        model[2].weight[0] *= 1000
    treated = gonio.doctor(model)
    (step,) = [step for step in treated.steps if step.verdict != "not applied"]
    assert (step.verb, step.verdict) == ("balance_", "undone")
    assert step.proof.startswith("the findings remain after it (")
    assert "2 keeps its scale: it is the model's output" in step.proof
    assert same(treated.model, model)


def test_a_verb_that_refuses_is_reported() -> None:
    model = nn.Sequential(nn.Linear(16, 32))
    with torch.no_grad():
        model[0].weight[0] *= 1000
    treated = gonio.doctor(model)
    assert treated.steps[0].verdict in ("not applied", "undone")
    assert same(treated.model, model)


def test_of_a_state_dict_treatments_are_only_named() -> None:
    damaged = network()
    damaged[1].running_var[0] = -1
    treated = gonio.doctor(damaged.state_dict())
    assert (treated.model, treated.edits) == (None, ())
    assert [(step.verb, step.verdict) for step in treated.steps] == [("calibrate_", "not applied")]
    assert "pass the model" in treated.steps[0].proof
    with pytest.raises(gonio.GonioError, match="on a task or a batch, and compares it with a base; found OrderedDict"):
        gonio.doctor(damaged.state_dict(), task=task())


def test_a_number_that_is_not_finite_is_written_as_null() -> None:
    step = TreatmentStep("hold_", {"radius": float("nan"), "norm": "filters"}, ("G409",), "kept", "")
    assert json.loads(json.dumps(step.to_dict(), allow_nan=False))["options"] == {"radius": None, "norm": "filters"}


def test_shown_and_written(tmp_path: Path) -> None:
    treated = gonio.doctor(scaled(), batch=torch.randn(32, 16))
    assert json.loads(json.dumps(treated.to_dict()))["recipe"] == treated.recipe
    assert "balance_: kept (for G409)" in str(treated)
    assert "<td>balance_</td>" in treated._repr_html_()
    text = treated.page(tmp_path / "page.html").read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert "largest deviation" in text
    assert repr(treated) == "<Treatment of Sequential: 1 of 1 steps kept>"


def test_the_proof_is_an_ordinary_study(tmp_path: Path) -> None:
    model, data = network(), task()
    model[1].running_mean.fill_(50.0)
    treated = gonio.doctor(model, task=data)
    (step,) = treated.kept
    assert step.results is not None
    studies = treated.studies(tmp_path)
    opened = gonio.lab.Study.open(tmp_path / "0-calibrate")
    assert opened.path == studies[0].path
    assert not opened.missing()
    results = opened.results()
    assert results.effects[0].verdict == "helps"
    assert results.effects[0].differences == step.results.effects[0].differences
    assert "a block of validation examples" in gonio.lab.showing.html(results)
    assert "helps: +" in gonio.lab.showing.to_markdown(results)


def test_what_the_statistics_know_comes_before_guesses_and_training() -> None:
    healthy, data = network(), task()
    damaged = copy.deepcopy(healthy)
    with torch.no_grad():
        damaged[0].weight[3] *= 1000
    treated = gonio.doctor(damaged, task=data)
    assert [step.verb for step in treated.kept] == ["match_statistics_"]
    assert torch.allclose(treated.model[0].weight, healthy[0].weight, rtol=1e-2, atol=1e-3)
    assert treated.recipe["steps"][0]["options"] == {"where": ["0"]}


def test_a_lost_layer_is_trained_anew_with_a_proof_and_undone() -> None:
    healthy, data = network(), task()
    damaged = copy.deepcopy(healthy)
    with torch.no_grad():
        damaged[3].weight.zero_()
    before = copy.deepcopy(damaged)
    assert not gonio.doctor(damaged, batch=data.train.inputs).kept
    treated = gonio.doctor(damaged, task=data)
    (step,) = treated.kept
    assert (step.verb, step.options["where"], step.proved) == ("retrain_", ["3"], True)
    assert step.proof.startswith("improved")
    assert "learnt" in step.cannot
    assert gonio.lab.tasks.accuracy(treated.model(data.test.inputs), data.test.targets) > 90
    assert same(damaged, before)
    treated.undo_()
    assert same(treated.model, before)


def test_a_random_input_is_no_data() -> None:
    """Its numbers have the statistics of no data: what averages over them is refused, and G410 does not count."""
    given = gonio.seeding.RandomInput((64, 8))
    healthy = network()
    assert "G410" in {finding.code for finding in gonio.measure(healthy, batch=given.value).findings}
    treated = gonio.doctor(healthy, batch=given, apply_unproven=True)
    assert (treated.before.findings, treated.steps) == ((), ())
    assert treated.notes == ("not counted, because the batch is random numbers and no data: G410",)
    assert treated.to_dict()["notes"] == [*treated.notes]
    assert treated.notes[0] in str(treated)
    assert treated.notes[0] in treated._repr_html_()
    healthy[1].running_var[0] = -1
    refused = gonio.doctor(healthy, batch=given, apply_unproven=True)
    assert [(step.verb, step.verdict) for step in refused.steps] == [("calibrate_", "not applied")]
    assert "it averages over data, and the batch is random numbers" in refused.steps[0].proof
    assert same(refused.model, healthy)
    proved = gonio.doctor(healthy, batch=given, task=task())  # which averages over the task's training data
    assert [(step.verb, step.proved) for step in proved.kept] == [("calibrate_", True)]
    moved = gonio.doctor(scaled(), batch=gonio.seeding.RandomInput((32, 16)))  # proved by equal outputs
    assert [step.verb for step in moved.kept] == ["balance_"]


def test_rules_on_outputs_say_so() -> None:
    """A finding of outputs on random numbers is no evidence of those on data."""
    assert {text.batch for text in rule_texts().values()} == {"", "seen", "compared"}
    assert {rule_texts()[code].batch for code in HEAD_RULES} == {"seen"}
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).eval()
    with torch.no_grad():
        model[0].weight *= 1000
        model[1].running_mean += 1
        model[1].bias -= 1e5
    codes = [{f.code for f in gonio.measure(model, batch=batch).findings} for batch in (torch.randn(64, 8), None)]
    assert {code: rule_texts()[code].batch for code in codes[0] - codes[1]} == {
        "G408": "seen", "G409": "seen", "G410": "compared"
    }  # fmt: skip


def test_a_gain_that_is_not_shown_is_said_not_to_be_shown() -> None:
    data, before, step = task(), [90.0, 91.0, 92.0, 93.0] * 2, {"verb": "retrain_", "options": {}}
    noisy = study_of(data, "", "m", step, [*before], [b + (-1) ** k * 0.3 for k, b in enumerate(before)])
    assert held_out(noisy, better=False)[1].startswith("not inferior: ")
    assert held_out(noisy, better=True)[0] is False
    assert held_out(noisy, better=True)[1].startswith("not shown to improve: accuracy on held-out blobs: +0.00 [")


@pytest.mark.parametrize("code", RULES)
def test_a_remedy_is_named_as_it_is_called(code: str) -> None:
    for remedy in rule_texts()[code].prescription.remedies:
        place: object = gonio
        for word in remedy.call.removeprefix("gonio.").split("."):
            place = getattr(place, word)
        assert callable(place)
        assert f"{remedy.call}(" in explain(code)


def test_a_verb_that_is_kept_twice_is_named_once() -> None:
    treated = gonio.doctor(scaled(), batch=torch.randn(32, 16))
    step = treated.steps[0]
    twice = replace(treated, steps=(replace(step, options={"where": ["0"]}), replace(step, options={"where": ["2"]})))
    assert "Done: balance_ (2 times)." in twice.summary
    assert [row[0] for row in twice.rows] == ["balance_ of 0, 2"]


@pytest.mark.parametrize("batch", [None, torch.ones(4, 8)])
@pytest.mark.parametrize(("path", "code"), [("2.bias", "G001"), ("", "")])
def test_what_cannot_be_compared_names_the_errors_behind_it(batch: torch.Tensor | None, path: str, code: str) -> None:
    """An unrelated layer is not repaired while a NaN elsewhere hides the outputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    with torch.no_grad():
        model[0].weight[3] = 0
        model[2].bias[1] = float("nan") if code else 0.0
    step = next(step for step in gonio.doctor(model, batch=batch).steps if step.verb == "recycle_")
    if code:
        assert step.verdict != "kept"
        assert (
            step.proof == f"the outputs are NaN or infinite, and there are errors: {path} ({code}). Repair them first"
        )
    else:
        assert step.verdict == "kept"


def of_three_channels() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(10))
    model(torch.ones(1, 3, 8, 8))
    return model


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (of_three_channels, "found 1 channel"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).half(), "found .*dtype"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(60, 10)), "found .*64"),
    ],
)
def test_a_model_that_does_not_take_the_inputs_of_the_task(model: Callable[[], nn.Module], said: str) -> None:
    for act in (gonio.doctor, partial(gonio.lab.retrain_, where="type:Linear")):
        with pytest.raises(
            InvalidArgumentError, match=rf"^task='digits' must be an input that the model takes; {said}"
        ):
            act(model(), task=resolve("digits"))


@pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning")
def test_a_scripted_model_is_judged_and_not_treated() -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))
    with torch.no_grad():
        next(model.parameters())[0].fill_(float("nan"))
    treated = gonio.doctor(model, batch=torch.randn(4, 6))
    assert "Findings: 1 before, 1 after. Done: nothing." in str(treated)


class _Logarithm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(-1 - x.abs())


def test_a_model_whose_outputs_are_not_finite_is_not_called_healthy() -> None:
    model = nn.Sequential(nn.Linear(16, 16), _Logarithm(), nn.Linear(16, 4))
    treated = gonio.doctor(model, batch=torch.randn(8, 16))
    assert [finding.code for finding in treated.before.findings] == ["G417"]
    assert "untreated (for G417)" in str(treated)
    assert "Done: nothing." in str(treated)


def test_a_model_without_values_is_not_called_healthy() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    assert gonio.doctor(model).summary.startswith("Nothing was measured")
