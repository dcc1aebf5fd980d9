"""Measures of claims against values computed by other means, each with a case in which it must differ."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gonio.errors import InvalidArgumentError, NotApplicableError
from gonio.lab.plan import Measure, TrainingConfig
from gonio.lab.running.measures import FinishedRun, measures, scale, spec_of
from gonio.lab.running.training import fit
from gonio.lab.tasks import resolve
from gonio.models import ByteTransformer, deep_cnn, deep_mlp, residual_mlp
from gonio.nn import DecoupledConv2d

TRAINING = TrainingConfig(epochs=1, batch_size=50, lr=0.05)


def subject(model: nn.Module, **fields: Any) -> FinishedRun:
    return FinishedRun(model.eval(), resolve("digits"), TRAINING, 3, **fields)


def measured(name: str, model: nn.Module, *, robustness: Any = None, **options: Any) -> float:
    return spec_of(Measure(name, options)).function(subject(model, robustness=robustness or {}), **options)


@pytest.fixture(autouse=True)
def fixed_draws() -> None:
    torch.manual_seed(0)


def test_every_measure_says_in_one_sentence_what_it_is() -> None:
    for name, kind in measures().items():
        assert kind.summary.endswith("."), name
        assert kind.unit
    assert list(measures()) == sorted(measures())


def spectral(layer: nn.Module) -> float:
    return float(np.linalg.norm(layer.weight.detach().double().numpy(), 2))


def test_the_bound_of_a_chain_is_the_product_of_its_norms() -> None:
    model = deep_mlp(depth=2, width=8)
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    assert measured("lipschitz_bound", model) == pytest.approx(sum(math.log10(spectral(layer)) for layer in layers))
    frobenius = sum(math.log10(float(np.linalg.norm(layer.weight.detach().double().numpy()))) for layer in layers)
    assert measured("lipschitz_bound", model, norm="frobenius") == pytest.approx(frobenius)


def test_a_residual_block_counts_with_one_more_than_its_branch() -> None:
    model = residual_mlp(blocks=2, width=8)
    first, *blocks, last = [layer for layer in model if not isinstance(layer, nn.Flatten)]
    expected = spectral(first) * spectral(last)
    for block in blocks:
        expected *= 1 + spectral(block.branch[0]) * spectral(block.branch[2])
    assert measured("lipschitz_bound", model) == pytest.approx(math.log10(expected))


@pytest.mark.parametrize("norm", ["spectral", "frobenius"])
@pytest.mark.parametrize("make", [lambda: deep_mlp(depth=3, width=16), lambda: residual_mlp(width=16)])
def test_no_gradient_is_above_the_bound(make: Any, norm: str) -> None:
    model = make()
    assert measured("lipschitz_slack", model, norm=norm) > 0
    assert measured("lipschitz_bound", model, norm=norm) > measured("input_gradient", model)


def test_the_frobenius_bound_is_never_below_the_spectral_one_for_convolutions() -> None:
    model = deep_cnn(depth=2, width=8, norm="none")
    assert measured("lipschitz_bound", model, norm="frobenius") >= measured("lipschitz_bound", model)


def test_moved_scale_shows_for_gelu_alone() -> None:
    assert measured("shift_deviation", deep_mlp(depth=3, width=16)) < 1e-9
    assert measured("shift_deviation", deep_mlp(depth=3, width=16, activation="gelu")) > 0.1


def test_a_relu_is_part_of_the_operator_without_a_bias_alone() -> None:
    model = deep_cnn(depth=2, width=8, norm="none")
    assert measured("rectified_deviation", model, biases="zero") < 1e-9
    assert measured("rectified_deviation", model, biases="kept") > 1e-3


def test_the_change_of_a_gradient_by_one_step() -> None:
    """Against a step made by torch.func on the same batch."""
    from gonio.lab.running.training import batches

    model = deep_mlp(depth=1, width=4)
    task = resolve("digits")
    inputs, targets = next(batches(task, 50, seed=3, epoch=0))
    start = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        call = lambda x: torch.func.functional_call(model, parameters, (x,))  # noqa: E731
        return task.loss(task.outputs(call, inputs), targets)

    def flat(gradient: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([g.double().flatten() for g in gradient.values()])

    before = torch.func.grad(loss)(start)
    after = torch.func.grad(loss)({name: p - TRAINING.lr * before[name] for name, p in start.items()})
    expected = 100 * float((flat(after) - flat(before)).norm() / flat(before).norm())
    assert measured("gradient_change", model, steps=1) == pytest.approx(expected, rel=1e-4)  # float32 steps


def test_hidden_gradients_are_the_points_by_which_another_attack_is_stronger() -> None:
    scores = {"noise": 90.0, "transfer": 50.0, "smoothed": 58.0}
    model = deep_mlp(depth=1, width=4)
    assert measured("hidden_gradients", model, robustness={**scores, "pgd": 60.0}) == 10.0
    assert measured("hidden_gradients", model, robustness={**scores, "pgd": 40.0}) == 0.0


def test_a_trained_model_is_changed_and_trained_further() -> None:
    model = deep_cnn(depth=2, width=8)
    recipe = {"swap": [{"where": "stem", "use": "keep"}, {"where": "type:Conv2d", "use": "DecoupledConv2d.from_conv"}]}
    weights = [p.detach().clone() for p in model.parameters()]
    score = measured("accuracy_after", model, epochs=1, recipe=recipe)
    assert 0 <= score <= 100
    assert [type(m) for m in model.modules() if isinstance(m, nn.Conv2d)] == [nn.Conv2d, DecoupledConv2d]
    assert all(not torch.equal(p, was) for p, was in zip(model.parameters(), weights, strict=False))


def test_the_gap_is_that_between_two_accuracies() -> None:
    model = deep_mlp(depth=1, width=16).eval()
    task = resolve("digits")
    shares = [
        100 * float((task.outputs(model, split.inputs).argmax(1) == split.targets).double().mean())
        for split in (task.train, task.test)
    ]
    assert measured("overfit", model) == pytest.approx(shares[0] - shares[1])


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match="'lipschitz_bound' has the options norm; found size"):
        spec_of(Measure("lipschitz_bound", {"size": 1}))


@pytest.mark.parametrize(
    ("name", "option", "wrong"),
    [
        ("angle_bias", "read", "output"),
        ("angle_spread", "layers", "convs"),
        ("penalty_change", "penalty", "L2"),
        ("penalty_change", "move", "shuffle"),
        ("int4_cost", "axes", "pca"),
        ("lipschitz_bound", "norm", "fro"),
        ("lipschitz_slack", "norm", "fro"),
        ("calibrated_accuracy", "average", "batch"),
        ("rectified_deviation", "biases", "none"),
        ("robust_accuracy", "attack", "pdg"),
    ],
)
def test_a_wrong_word_does_not_choose_the_other_branch(name: str, option: str, wrong: str) -> None:
    with pytest.raises(
        InvalidArgumentError, match=f"the option '{option}' of the measure '{name}' is '.*found '{wrong}'"
    ):
        spec_of(Measure(name, {option: wrong}))


def test_rotation_is_compared_with_the_equilibrium_of_scale_invariant_layers() -> None:
    training = replace(TRAINING, lr=0.1, weight_decay=0.05, momentum=0.0, schedule="constant")
    task, model = resolve("digits"), deep_cnn(depth=2, width=8, norm="batch")
    found = measures()["rotation_excess"].function(FinishedRun(copy.deepcopy(model), task, training, 3), epochs=4)

    seen: list[list[float]] = [[], []]

    def watch(optimizer: torch.optim.Optimizer) -> None:
        weights = [layer.weight for layer in model.modules() if isinstance(layer, nn.Conv2d)]
        before: list[torch.Tensor] = []
        optimizer.register_step_pre_hook(lambda *_: before.extend(w.detach().double().clone() for w in weights))

        def after(*_: object) -> None:
            for angles, was, now in zip(seen, before, weights, strict=True):
                now = now.detach().double()
                angles.append(float(torch.arccos((was * now).sum() / was.norm() / now.norm())))
            before.clear()

        optimizer.register_step_post_hook(after)

    fit(model, task, training=replace(training, epochs=4), seed=3, hold=watch)
    predicted = math.sqrt(2 * 0.1 * 0.05)
    late = [angles[len(angles) // 2 :] for angles in seen]
    ratios = [math.sqrt(sum(a * a for a in angles) / len(angles)) / predicted for angles in late]
    assert found == pytest.approx(100 * (sum(ratios) / 2 - 1), rel=1e-4)  # arccos of small angles in float64: 1e-6


def test_held_layers_turn_by_the_arctangent_and_free_ones_without_decay_have_no_prediction() -> None:
    training = replace(TRAINING, lr=0.01, weight_decay=0.0, optimizer="adamw")
    held, free = (
        measures()["rotation_excess"].function(
            FinishedRun(deep_cnn(depth=2, width=8, norm="batch"), resolve("digits"), training, 3), epochs=2, hold=hold
        )
        for hold in (True, False)
    )
    assert abs(held) < 5  # percent: the updates of AdamW are nearly orthogonal to the weight
    assert math.isnan(free)


def best_rate(training: TrainingConfig, octaves: list[float], **options: Any) -> float:
    torch.manual_seed(0)
    model = deep_cnn(depth=2, width=8, norm="batch")
    return measures()["best_rate"].function(
        FinishedRun(model, resolve("digits"), training, 3), octaves=octaves, **options
    )


def test_the_best_rate_is_the_vertex_of_the_parabola_through_the_best_scores() -> None:
    octaves = [-8.0, -6.0, -4.0, -2.0, 0.0, 2.0, 4.0, 6.0]
    torch.manual_seed(0)
    start, scores = deep_cnn(depth=2, width=8, norm="batch"), []
    for octave in octaves:
        training = replace(TRAINING, lr=0.05 * 2**octave)
        scores.append(fit(copy.deepcopy(start), resolve("digits"), training=training, seed=3).curve["val_score"][-1])
    at = int(np.argmax(scores))
    assert 0 < at < len(octaves) - 1  # or this test would not see a vertex
    low, top, high = scores[at - 1 : at + 2]
    expected = octaves[at] + 2 * (high - low) / (2 * (2 * top - low - high))
    assert best_rate(TRAINING, octaves) == pytest.approx(expected)


def test_the_best_rate_does_not_depend_on_the_rate_that_the_grid_starts_from() -> None:
    octaves = [-4.0, -2.0, 0.0, 2.0, 4.0]
    found = best_rate(TRAINING, octaves, examples=200)
    moved = best_rate(replace(TRAINING, lr=0.1), [octave - 1 for octave in octaves], examples=200)
    assert moved == pytest.approx(found - 1)


def test_a_best_rate_at_the_end_of_the_grid_is_that_end() -> None:
    assert best_rate(TRAINING, [-6.0, -4.0, -2.0]) == -2.0


def test_held_weights_have_another_best_rate() -> None:
    training, octaves = replace(TRAINING, lr=0.01, optimizer="adamw"), [-4.0, -2.0, 0.0, 2.0, 4.0]
    assert best_rate(training, octaves, hold=True) != best_rate(training, octaves)


def test_certified_accuracy_is_that_of_margins_over_the_bound() -> None:
    """A linear classifier, whose radius is exact: the smallest margin over the distance of two rows."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    test = resolve("digits").test
    model[1].weight.data.copy_(torch.stack([test.inputs[test.targets == k].mean(0).flatten() for k in range(10)]))
    model[1].bias.data.copy_(-model[1].weight.data.square().sum(1) / 2)
    weight, logits = model[1].weight.detach().double(), model(test.inputs).detach().double()
    best = logits.argmax(1)
    apart = torch.cdist(weight, weight)[best].scatter(1, best[:, None], 1.0)
    radius = ((logits.amax(1)[:, None] - logits) / apart).scatter(1, best[:, None], math.inf).amin(1)
    shares = []
    for eps in (0.0, 0.3, 1.0):
        shares.append(measured("certified_accuracy", model, eps=eps))
        expected = 100 * float(((best == test.targets) & (radius > eps)).double().mean())
        assert shares[-1] == pytest.approx(expected, abs=0.2)
    assert shares[0] > shares[1] > shares[2]


def test_certified_radii_are_in_the_unit_of_the_inputs() -> None:
    model = deep_mlp(depth=1, width=8)
    run, scaled = subject(model), resolve("digits")
    function = spec_of(Measure("certified_accuracy", {"eps": 0.1})).function
    halved = replace(run, task=replace(scaled, standardize=((0.0,), (1.0,))))
    assert function(halved, eps=0.02) == function(run, eps=0.02)
    # inputs that are divided by 1/4: what moves by eps in its own unit moves four times as far in the network
    fine = replace(run, task=replace(scaled, standardize=((0.0,), (0.25,))))
    stretched = copy.deepcopy(model)
    stretched[1].weight.data.mul_(4)
    assert function(fine, eps=0.02) == pytest.approx(function(subject(stretched), eps=0.02), abs=1e-9)


def test_the_certified_constant_is_the_product_of_the_norms() -> None:
    model = deep_mlp(depth=2, width=8)
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    expected = sum(math.log10(spectral(layer)) for layer in layers)
    assert measured("certified_constant", model) == pytest.approx(expected)


def test_outlier_channels_cost_bits_in_int4_and_a_turn_regains_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transformer that knows the next byte by heart, of inputs in which a few directions are strong."""
    model = ByteTransformer(width=16, heads=2, depth=1).eval()
    with torch.no_grad():
        axes = torch.linalg.qr(torch.randn(16, 16))[0]
        for weight in (model.blocks[0].qkv.weight, model.blocks[0].up.weight, model.head.weight):
            weight.copy_(weight @ (axes * torch.logspace(0, -2, 16)) @ axes.T * 8)
        for norm in (model.norm, model.blocks[0].norm1, model.blocks[0].norm2):
            norm.weight.uniform_(0.5, 2)
    task = resolve("bytes")
    run = replace(
        subject(model),
        task=replace(
            task, test=replace(task.test, inputs=task.test.inputs[:8], targets=model(task.test.inputs[:8]).argmax(-1))
        ),
    )

    def share(**options: Any) -> float:
        return spec_of(Measure("int4_cost", options)).function(run, **options)

    assert share(axes="principal") == pytest.approx(100.0)
    assert 0 < share(axes="principal", turn=True) < 80
    monkeypatch.setattr(scale, "_rounded", lambda *_: 0.0)
    with pytest.raises(NotApplicableError, match=r"it costs nothing with outlier channels"):
        share()
