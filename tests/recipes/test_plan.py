"""Plans: first match wins, keep excludes, stem and classifier, unmatched rules; nothing happens."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gonio.errors import AlreadyAppliedError, NoMatchError, NotApplicableError, RecipeError, UnmatchedRuleError
from gonio.recipes import Recipe
from recipes.models import Reversed, Untraceable, convnet, recipe, state


def taken(plan, verb: str) -> list[tuple[int, str]]:
    return [(step.rule, step.path) for step in plan.steps if step.verb == verb]


def test_the_first_rule_that_matches_takes_the_layer() -> None:
    plan = recipe(
        penalty=[
            {"where": "conv1", "use": "Orthogonality", "strength": 2},
            {"where": "conv*", "use": "Orthogonality", "strength": 1},
            {"where": None, "use": "L2", "strength": 2},
        ]
    ).plan(convnet())
    assert taken(plan, "penalty") == [(1, "conv1"), (2, "conv2"), (3, "fc1"), (3, "fc2")]


def test_each_verb_has_its_own_first_match() -> None:
    plan = recipe(
        init=[{"where": "conv1", "use": "he_"}],
        penalty=[{"where": "conv1", "use": "Orthogonality", "strength": 1}],
    ).plan(convnet())
    assert [(step.verb, step.path) for step in plan.steps] == [("init", "conv1"), ("penalty", "conv1")]


def test_keep_excludes_and_is_shown() -> None:
    plan = recipe(
        init=[
            {"where": "stem", "use": "keep"},
            {"where": "classifier", "use": "keep"},
            {"where": None, "use": "orthogonal_"},
        ]
    ).plan(convnet())
    assert taken(plan, "init") == [(1, "conv1"), (2, "fc2"), (3, "conv2"), (3, "fc1")]
    assert [path for path, _ in plan.untouched] == ["conv1", "norm1", "norm2", "fc2"]


def test_stem_and_classifier_go_by_execution() -> None:
    rules = recipe(init=[{"where": "stem", "use": "he_"}, {"where": "classifier", "use": "xavier_"}])
    assert taken(rules.plan(Reversed()), "init") == [(1, "entry"), (2, "head")]
    assert rules.plan(Reversed()).notes == ()


def test_without_a_graph_they_go_by_registration_and_the_plan_says_so() -> None:
    rules = recipe(init=[{"where": "stem", "use": "he_"}, {"where": "classifier", "use": "xavier_"}])
    plan = rules.plan(Untraceable())
    assert taken(plan, "init") == [(1, "head"), (2, "entry")]
    assert "by order of registration" in str(plan)
    assert "TraceError" in plan.notes[0]


def test_a_plan_is_a_table() -> None:
    plan = recipe(
        swap=[
            {"where": "stem", "use": "keep"},
            {"where": "type:Conv2d", "use": "DecoupledConv2d.from_conv", "magnitude": {"Tanh": {"radius": 2}}},
        ]
    ).plan(convnet())
    assert str(plan).splitlines() == [
        "mine:",
        "  verb  rule  layer  type    action",
        "  swap  1     conv1  Conv2d  keep",
        "  swap  2     conv2  Conv2d  DecoupledConv2d.from_conv(magnitude=Tanh(radius=2))",
        "untouched:",
        "  conv1  Conv2d",
        "  norm1  BatchNorm2d",
        "  norm2  BatchNorm2d",
        "  fc1    Linear",
        "  fc2    Linear",
    ]


def test_planning_changes_nothing() -> None:
    model = convnet()
    before, random = state(model), torch.random.get_rng_state()
    Recipe.load("decoupled-tanh").plan(model)
    assert state(model) == before
    assert torch.equal(torch.random.get_rng_state(), random)


UNMATCHED = """name: mine
swap:
  - {where: "type:Conv2D", use: DecoupledConv2d.from_conv}
penalty:
  - {where: conv3, use: L2, strength: 1}
  - {where: null, use: L2, strength: 1}
  - {where: "fc*", use: Orthogonality, strength: 1}
  - {where: pool, use: L2, strength: 1}
"""


def test_every_unmatched_rule_is_named_with_its_line_and_the_reason() -> None:
    with pytest.raises(UnmatchedRuleError, match=r"mine\.yaml has 4 problems") as caught:
        Recipe.from_yaml(UNMATCHED, origin="mine.yaml").plan(convnet())
    first, second, third, fourth = caught.value.problems
    assert first.startswith("mine.yaml:3: rule 1 of swap (type:Conv2D: DecoupledConv2d.from_conv) selects nothing")
    assert "did you mean type:Conv2d" in first
    assert second.startswith("mine.yaml:5: rule 1 of penalty (conv3: L2(strength=1)) selects nothing")
    assert "selects nothing; did you mean conv2, conv1, type:Conv2d? It can act on: conv1 (Conv2d)" in second
    assert third.startswith("mine.yaml:7: rule 3 of penalty")
    assert "applies to no module: fc1, fc2 went to rule 2" in third
    assert fourth.startswith("mine.yaml:8: rule 4 of penalty")
    assert "cannot act on pool (AdaptiveAvgPool2d). It can act on: conv1 (Conv2d)" in fourth


@pytest.mark.parametrize("where", ["stem", "classifier", "*", "nowhere"])
def test_a_model_without_weights_has_nothing_to_select(where: str) -> None:
    with pytest.raises(NoMatchError, match=r"applies to no module|selects nothing") as caught:
        recipe(init=[{"where": where, "use": "he_"}]).plan(nn.Sequential(nn.ReLU()))
    assert "It can act on no module of this model" in str(caught.value)


def test_keeping_what_nothing_would_take_is_an_error() -> None:
    rules = recipe(penalty=[{"where": "act*", "use": "keep"}, {"where": None, "use": "L2", "strength": 1}])
    with pytest.raises(
        UnmatchedRuleError, match=r"rule 1 of penalty \(act\*: keep\) applies to no module: it cannot act"
    ):
        rules.plan(convnet())


def test_a_plan_says_what_a_penalty_would_skip() -> None:
    plan = recipe(penalty=[{"where": None, "use": "ScaleShift", "strength": 1}]).plan(convnet())
    skipped = {step.path: step.skipped for step in plan.steps}
    assert skipped == {
        "conv1": "its scale does not matter: norm1 normalises its output",
        "conv2": "its scale does not matter: norm2 normalises its output",
        "fc1": "",
        "fc2": "",
    }
    assert "conv1  Conv2d  ScaleShift(strength=1); skipped: its scale" in str(plan)
    assert ("conv1", "Conv2d") in plan.untouched
    assert ("fc1", "Linear") not in plan.untouched


def test_a_penalty_that_would_skip_everything_is_an_error() -> None:
    rules = recipe(penalty=[{"where": "conv*", "use": "ScaleShift", "strength": 1}])
    with pytest.raises(UnmatchedRuleError, match=r"rule 1 of penalty .* has no effect: .*norm1 normalises"):
        rules.plan(convnet())


def test_null_does_not_mean_embeddings() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3))
    rules = recipe(penalty=[{"where": None, "use": "L2", "strength": 1}])
    assert taken(rules.plan(model), "penalty") == [(1, "1")]
    named = recipe(penalty=[{"where": "0", "use": "L2", "strength": 1}])
    assert taken(named.plan(model), "penalty") == [(1, "0")]


def test_layers_with_several_weights_are_one_row() -> None:
    model = nn.Sequential(nn.LSTM(4, 3), nn.MultiheadAttention(4, 2))
    plan = recipe(penalty=[{"where": None, "use": "L2", "strength": 1}]).plan(model)
    assert taken(plan, "penalty") == [(1, "0"), (1, "1"), (1, "1.out_proj")]


def test_a_tied_layer_is_planned_once() -> None:
    shared = nn.Linear(3, 3)
    plan = recipe(init=[{"where": "2", "use": "orthogonal_"}]).plan(nn.Sequential(shared, nn.ReLU(), shared))
    assert taken(plan, "init") == [(1, "0")]


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"init": [{"where": None, "use": "orthogonal_", "gain": "text"}]}, "there is no activation named 'text'"),
        ({"init": [{"where": None, "use": "he_", "bias": 1e300}]}, r"init_\(bias=\) is between"),
        (
            {"init": [{"where": None, "use": "delta_orthogonal_"}]},
            r"needs a convolution's weight; found shape \(3, 8\)",
        ),
        ({"swap": [{"where": None, "use": "to_group_norm", "groups": -1}]}, "groups must be >= 1; found -1"),
        ({"swap": [{"where": None, "use": "to_layer_norm"}]}, "needs the sizes of 2 positions"),
        (
            {"swap": [{"where": None, "use": "to_layer_norm", "positions": [-1, 2]}]},
            "it fails: RuntimeError: Trying to",
        ),
    ],
)
def test_a_plan_refuses_what_the_verb_would(rules: dict, said: str) -> None:
    """Values out of range and methods that do not fit a type of layers, with the file, the line and the rule."""
    made, model = recipe(**rules), convnet()
    before = state(model)
    for act in (made.plan, made.apply_):
        with pytest.raises(RecipeError, match=rf"rule 1 of (init|swap) \(every module: .*{said}"):
            act(model)
    assert state(model) == before


def test_a_plan_refuses_values_that_a_layer_turns_into_infinity_or_has_already() -> None:
    huge = recipe(init=[{"where": "conv1", "use": "orthogonal_", "gain": 1e18}])
    with pytest.raises(
        NotApplicableError, match=r"init_: cannot initialise layer 'conv1' \(Conv2d\): orthogonal_ gave non-f"
    ):
        huge.plan(convnet().half())
    model, sphere = convnet(), recipe(parametrize=[{"where": "fc1", "use": "Sphere"}])
    sphere.apply_(model)
    with pytest.raises(AlreadyAppliedError, match="cannot be applied twice to 'fc1'"):
        sphere.plan(model)


def test_a_plan_tries_small_layers_and_draws_no_numbers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 6000))
    random = torch.get_rng_state()
    assert len(recipe(init=[{"where": None, "use": "orthogonal_"}]).plan(model)) == 2
    assert torch.equal(random, torch.get_rng_state())


def test_a_scripted_model_has_nothing_that_a_rule_can_act_on() -> None:
    model = torch.jit.trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.zeros(1, 4))
    for rules in ({"parametrize": [{"use": "WeightNorm"}]}, {"swap": [{"use": "DecoupledLinear"}]}):
        with pytest.raises(UnmatchedRuleError, match="It can act on no module of this model"):
            recipe(**rules).plan(model)
