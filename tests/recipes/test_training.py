"""`optimizer`, `hold` and `clip_qk` of a recipe: as data, in plans, on an optimizer that is made or handed over."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest
import torch
from torch import nn

import gonio
from gonio.editing import steps
from gonio.errors import (
    AlreadyAppliedError,
    InvalidArgumentError,
    NoMatchError,
    NotApplicableError,
    PendingRecipeError,
    RecipeError,
    UnmatchedRuleError,
)
from gonio.optim.named import OPTIMIZERS, arguments_of, type_of
from gonio.recipes import Recipe
from recipes.models import convnet, recipe, state

KNOWN = ", ".join(sorted(OPTIMIZERS))
TEXT = """
name: turned
hold: {where: "conv*", norm: filters, step: fixed}
optimizer: {use: sgd, lr: 0.1, momentum: 0.5}
"""


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    draw = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=draw)
    optimizer.step()


def norms(model: nn.Module) -> torch.Tensor:
    return torch.cat([layer.weight.detach().flatten(1).norm(dim=1) for layer in (model.conv1, model.conv2)])


# --- as data ----------------------------------------------------------------------------------------------------------


def test_reading_and_writing() -> None:
    read = Recipe.from_yaml(TEXT)
    assert read.to_dict() == {
        "name": "turned",
        "optimizer": {"use": "sgd", "lr": 0.1, "momentum": 0.5},
        "hold": {"where": "conv*", "norm": "filters", "step": "fixed"},
    }
    for again in (Recipe.from_yaml(read.to_yaml()), Recipe.from_dict(json.loads(json.dumps(read.to_dict())))):
        assert again == read
        assert again.hash == read.hash
    assert repr(read) == "<Recipe turned: no rules, sgd(lr=0.1, momentum=0.5), hold_(norm=filters, step=fixed)>"
    assert "sgd(lr=0.1, momentum=0.5)" in read._repr_html_()
    assert recipe(hold={}).to_dict()["hold"] == {"where": None}, "all arguments have defaults"


def test_recipes_without_them_are_as_they_were() -> None:
    """The hashes are those of a gonio that knew neither; studies store them."""
    plain = Recipe.load("scale-shift")
    assert plain.hash == "fa8820f35033968d58d5e3216f08ccbdfc65f55c7513d97b15d407d9e5c7bec6"
    assert Recipe.load("decoupled-tanh").hash == "fe50b604e21a8b0a8eecb8fe0629222fe0f31b69c238173b4ee8b7bf1bb09acc"
    assert plain.to_dict().keys() == {"name", "source", "description", "penalty"}


@pytest.mark.parametrize(("old", "new"), [("0.5", "0.6"), ("sgd", "muon"), ("fixed", "free"), ("conv*", "fc*")])
def test_they_are_part_of_the_hash(old: str, new: str) -> None:
    assert Recipe.from_yaml(TEXT.replace(old, new)).hash != Recipe.from_yaml(TEXT).hash


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"optimizer": {"use": "moun"}}, r"optimizer\.use: there is no optimizer named 'moun'\. Did you mean muon\?"),
        (
            {"optimizer": {"use": "lbfgs"}},
            rf"no optimizer named 'lbfgs'\. Known: {KNOWN}\.",
        ),
        ({"optimizer": {"lr": 0.1}}, rf"the optimizer needs `use` with a name; known: {', '.join(OPTIMIZERS)}"),
        ({"optimizer": "muon"}, r"optimizer: must be a mapping such as \{use: muon, lr: 0\.02\}; found 'muon'"),
        ({"optimizer": None}, r"optimizer: must be a mapping .*; found None"),
        ({"optimizer": {"use": "sgd", "betas": [0.9, 0.99]}}, r"sgd has no option 'betas'\. Its options: lr,"),
        ({"optimizer": {"use": "sgd", "lr": "0.1"}}, r"optimizer\.lr: found '0\.1'; expected a valid number"),
        ({"optimizer": {"use": "sgd", "lr": 0}}, r"lr must be a positive number; found 0\.0"),
        ({"optimizer": {"use": "sgd", "lr": 1.0, "momentum": 1.0}}, r"momentum must be from 0 to below 1; found 1\.0"),
        ({"optimizer": {"use": "adamw", "betas": [0.9]}}, r"betas must be two numbers from 0 to below 1"),
        ({"optimizer": {"use": "adamw", "weight_decay": -1}}, r"weight_decay must be 0 or above; found -1\.0"),
        ({"optimizer": {"use": "muon", "others_factor": 0}}, r"others_factor must be a positive number; found 0\.0"),
        ({"optimizer": {"use": "adamw", "decay": "some"}}, r"optimizer\.decay: found 'some'; expected 'all' or"),
        ({"hold": [{"norm": "matrix"}]}, r"hold: must be a mapping such as \{where: …"),
        ({"hold": {"nrom": "matrix"}}, r"hold\.nrom: hold_ has no option 'nrom'\. Did you mean norm\?"),
        (
            {"hold": {"norm": "rows"}},
            r"hold\.norm: found 'rows'; expected 'matrix', 'spectral', 'filters' or 'col",
        ),
        ({"hold": {"radius": -1.0}}, r"radius=\) is 'initial' or a positive number; found -1\.0"),
        ({"hold": {"magnitude": "learned"}}, r"magnitude='learned'\) holds filters"),
        ({"hold": {"where": "re:("}}, r"hold\.where: "),
        ({"clip_qk": [{"limit": 1.0}]}, r"clip_qk: must be a mapping such as \{where: …, limit: …"),
        ({"clip_qk": {"limits": 1.0}}, r"clip_qk\.limits: clip_qk_ has no option 'limits'\. Did you mean limit\?"),
        ({"clip_qk": {"limit": 0.0}}, r"clip_qk: .*clip_qk_\(limit=\) is a positive number; found 0\.0"),
        ({"clip_qk": {"example": 1}}, r"clip_qk_ has no option 'example'"),
        ({"penalty": [{"use": "muon"}]}, r"no entry of penalty \(it belongs under optimizer\) named 'muon'"),
        ({"name": "baseline", "hold": {"norm": "matrix"}}, r"`baseline` is the name of the unchanged model"),
    ],
)
def test_mistakes_are_found_without_a_model(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe(**parts)


def test_mistakes_have_their_line() -> None:
    with pytest.raises(RecipeError, match=r"t\.yaml:4: optimizer: lr must be a positive number"):
        Recipe.from_yaml(TEXT.replace("0.1", "-0.1"), origin="t.yaml")


def test_the_schema_has_every_name_with_its_options() -> None:
    known = Recipe.json_schema()["properties"]
    assert [arm["properties"]["use"]["const"] for arm in known["optimizer"]["oneOf"]] == list(OPTIMIZERS)
    for arm in known["optimizer"]["oneOf"]:
        assert arm["properties"].keys() == {"use", *arguments_of(arm["properties"]["use"]["const"])}
        assert arm["required"] == ["use"]
    options = {"where", "norm", "radius", "step", "magnitude", "magnitude_lr"}
    assert known["hold"]["properties"].keys() == options
    assert known["clip_qk"]["properties"].keys() == {"where", "limit"}


# --- plans ------------------------------------------------------------------------------------------------------------


def test_the_plan_has_the_optimizer_and_each_held_layer() -> None:
    model = convnet()
    before = state(model)
    plan = Recipe.from_yaml(TEXT).plan(model)
    assert [(step.verb, step.path, step.what) for step in plan.steps] == [
        ("optimizer", "", "sgd(lr=0.1, momentum=0.5)"),
        ("hold", "conv1", "hold_(norm=filters, step=fixed)"),
        ("hold", "conv2", "hold_(norm=filters, step=fixed)"),
    ]
    assert [path for path, _ in plan.untouched] == ["norm1", "norm2", "fc1", "fc2"]
    assert state(model) == before


def test_the_plan_says_which_layers_the_hold_leaves_out() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
    steps = recipe(hold={"norm": "columns"}).plan(model).steps
    assert [(step.path, step.skipped) for step in steps] == [
        ("0", ""),
        ("2", "its columns have one entry each, which could not move"),
    ]


def test_the_ends_of_the_network_can_be_named() -> None:
    assert [step.path for step in recipe(hold={"where": "classifier"}).plan(convnet()).steps] == ["fc2"]


def test_a_hold_without_effect_is_refused_by_the_plan() -> None:
    read = Recipe.from_yaml(TEXT.replace("conv*", "cnov1"), origin="t.yaml")
    with pytest.raises(UnmatchedRuleError, match=r"t\.yaml:3: hold \(cnov1: .*selects nothing; did you mean conv1"):
        read.plan(convnet())
    thin = nn.Sequential(nn.Linear(3, 1))
    with pytest.raises(UnmatchedRuleError, match=r"hold \(every module: .*has no effect: .*its columns have one entry"):
        recipe(hold={"norm": "columns"}).plan(thin)
    with pytest.raises(NotApplicableError, match=r"a normalisation layer after it removes the learned gain") as caught:
        recipe(hold={"norm": "filters", "magnitude": "learned"}).plan(convnet())
    assert caught.value.__notes__ == ["in recipe mine: hold (every module: hold_(magnitude=learned, norm=filters))"]


# --- on a model -------------------------------------------------------------------------------------------------------


def test_the_optimizer_that_is_made_has_the_settings_and_the_hold() -> None:
    model = convnet()
    applied = Recipe.from_yaml(TEXT).apply_(model)
    optimizer = applied.make_optimizer()
    assert isinstance(optimizer, torch.optim.SGD)
    assert {(g["lr"], g["momentum"], g["nesterov"]) for g in optimizer.param_groups} == {(0.1, 0.5, True)}
    before, weight = norms(model), model.conv1.weight.detach().clone()
    for _ in range(3):
        stepped(model, optimizer)
    assert torch.allclose(norms(model), before, rtol=1e-6)
    assert not torch.allclose(model.conv1.weight, weight)
    applied.undo_()
    stepped(model, optimizer)
    assert not torch.allclose(norms(model), before, rtol=1e-3), "the optimizer stays, without the hold"


def test_an_optimizer_that_is_handed_over_keeps_its_settings() -> None:
    model = convnet()
    applied = Recipe.from_yaml(TEXT).apply_(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.7, weight_decay=0.1)
    held = applied.hold_(optimizer)
    assert held is not None
    assert [change.path for change in held.changes] == ["conv1", "conv2"]
    assert "weight decay of 0.1 is 0 for conv1.weight" in str(applied)
    before = norms(model)
    stepped(model, optimizer)
    assert torch.allclose(norms(model), before, rtol=1e-6)
    with pytest.raises(AlreadyAppliedError, match=r"cannot be applied twice to 'conv1'"):
        applied.hold_(optimizer)


@pytest.mark.parametrize("name", ["muon", "hyperball"])
@pytest.mark.parametrize("other", [torch.optim.SGD, torch.optim.AdamW])
def test_another_optimizer_may_not_train_the_model(name: str, other: type[torch.optim.Optimizer]) -> None:
    model = convnet()
    applied = Recipe.load(name).apply_(model)
    optimizer = other(model.parameters(), lr=0.1)
    before = state(model)
    with pytest.raises(PendingRecipeError, match=rf"the recipe '{name}' acts on the .* found {other.__name__}, which"):
        stepped(model, optimizer)
    assert state(model)["values"] == before["values"]
    stepped(convnet(), other(convnet().parameters(), lr=0.1))  # other models are free
    applied.undo_()
    stepped(model, optimizer)
    assert state(model)["values"] != before["values"]


def test_a_model_that_is_gone_waits_for_nothing() -> None:
    for _ in range(3):
        Recipe.load("muon").apply_(convnet())
    gc.collect()
    before = len(steps._OF_ALL)
    Recipe.load("muon").apply_(model := convnet())
    assert len(steps._OF_ALL) == before + 1
    del model
    gc.collect()
    assert len(steps._OF_ALL) == before


def test_an_optimizer_of_another_kind_is_refused() -> None:
    model = convnet()
    applied = Recipe.load("muon").apply_(model)
    with pytest.raises(InvalidArgumentError, match=r"the recipe 'muon' trains with muon; found AdamW"):
        applied.hold_(torch.optim.AdamW(model.parameters()))
    groups = gonio.param_groups(model, matrices=True)
    assert applied.hold_(gonio.optim.Muon(groups, lr=0.1)) is None


def test_a_learning_rate_is_the_recipes_or_the_callers() -> None:
    applied = recipe(optimizer={"use": "adamw"}).apply_(nn.Linear(2, 2))
    with pytest.raises(InvalidArgumentError, match=r"the optimizer of the recipe 'mine' needs a learning rate"):
        applied.make_optimizer()
    assert applied.make_optimizer(lr=0.3, weight_decay=0.2).param_groups[0]["weight_decay"] == 0.2


@pytest.mark.parametrize("parts", [{}, {"hold": {"norm": "matrix"}}])
def test_a_recipe_without_an_optimizer_makes_none(parts: dict[str, Any]) -> None:
    applied = recipe(**parts).apply_(nn.Linear(2, 2))
    with pytest.raises(InvalidArgumentError, match=r"the recipe 'mine' names no optimizer; found none to make"):
        applied.make_optimizer(lr=0.1)
    applied.undo_()


def test_where_is_about_the_model_as_given_and_holds_what_is_there_then() -> None:
    model = convnet()
    applied = recipe(
        swap=[{"where": "type:Conv2d", "use": "DecoupledConv2d.from_conv", "magnitude": "Tanh"}],
        hold={"where": "type:Conv2d"},
    ).apply_(model)
    assert type(model.conv1) is not nn.Conv2d
    held = applied.hold_(torch.optim.SGD(model.parameters(), lr=0.1))
    assert held is not None
    assert [change.path for change in held.changes] == ["conv1", "conv2"]


def test_a_failure_at_the_handover_names_the_hold() -> None:
    model = convnet()
    applied = recipe(hold={"where": "fc1"}).apply_(model)
    with pytest.raises(NoMatchError, match=r"it selects only fc1 \(its weight is not in the optimizer") as caught:
        applied.hold_(torch.optim.SGD(model.conv1.parameters(), lr=0.1))
    assert caught.value.__notes__ == ["in recipe mine: hold (fc1: hold_)"]
    with pytest.raises(PendingRecipeError, match="acts on the optimizer's steps"):
        stepped(model, torch.optim.SGD(model.parameters(), lr=0.1))


# --- a clip -----------------------------------------------------------------------------------------------------------


def attentive() -> nn.Module:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2)
    return nn.Sequential(model, nn.Linear(8, 3))


def test_a_clip_is_data_and_its_plan_names_the_layers_that_it_scales() -> None:
    read = Recipe.from_yaml("name: clipped\nclip_qk: {where: '*1.self_attn', limit: 2}\n")
    assert read.to_dict() == {"name": "clipped", "clip_qk": {"where": "*1.self_attn", "limit": 2.0}}
    assert read.hash != recipe(clip_qk={"limit": 2.0}).hash
    plan = read.plan(attentive())
    assert [(s.verb, s.path, s.what) for s in plan.steps] == [("clip_qk", "0.layers.1.self_attn", "clip_qk_(limit=2)")]
    untouched = [path for path, _ in plan.untouched]
    assert "0.layers.0.self_attn" in untouched
    assert "0.layers.1.self_attn" not in untouched
    inside = recipe(clip_qk={}).plan(gonio.models.ByteTransformer(9, width=8, heads=2, depth=1, context=16))
    assert [step.path for step in inside.steps] == ["blocks.0"]
    assert "blocks.0.qkv" not in [path for path, _ in inside.untouched]
    assert "blocks.0.out" in [path for path, _ in inside.untouched]


def test_a_clip_that_finds_no_attention_is_refused_by_the_plan() -> None:
    with pytest.raises(UnmatchedRuleError, match=r"clip_qk \(every module: .*has no effect: "):
        recipe(clip_qk={}).plan(convnet())


def test_a_clip_acts_beside_a_hold_and_both_end_together() -> None:
    model, x = attentive(), torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    parts = {"hold": {"where": "1", "norm": "filters"}, "clip_qk": {"limit": 1e-3}}
    applied = recipe(**parts).apply_(model)
    assert "clip_qk_(limit=0.001): 2 modules" in str(applied)
    with pytest.raises(PendingRecipeError, match="acts on the optimizer's steps"):
        stepped(model, torch.optim.SGD(model.parameters(), lr=0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    assert applied.hold_(optimizer) is not None
    assert "clip_qk_: 2 modules" in str(applied)
    assert "limited to 0.001" in applied._repr_html_()
    before = model[0].layers[0].self_attn.in_proj_weight.detach().clone()
    model(x)
    optimizer.step()
    after = model[0].layers[0].self_attn.in_proj_weight
    assert not torch.equal(after[:16], before[:16]), "queries and keys are scaled"
    assert torch.equal(after[16:], before[16:]), "values are not"
    applied.undo_()
    changed = after.detach().clone()
    model(x)
    optimizer.step()
    assert torch.equal(after, changed)


def test_a_clip_that_is_refused_leaves_no_hold_behind() -> None:
    model = attentive()
    applied = recipe(hold={"where": "1"}, clip_qk={}).apply_(model)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with pytest.raises(NoMatchError, match=r"is not in the optimizer") as caught:
        applied.hold_(optimizer)
    assert caught.value.__notes__ == ["in recipe mine: clip_qk (every module: clip_qk_)"]
    assert gonio.optim.hold.step_of_hold(model[1].weight) is None


def test_what_waits_and_what_was_done_are_shown() -> None:
    applied = Recipe.load("hyperball").apply_(convnet())
    assert str(applied).splitlines() == [
        "hyperball:",
        "optimizer: adamw(lr=0.01, weight_decay=0)",
        "hold_(norm=matrix, step=fixed): 4 modules",
        "  note: waits for make_optimizer(), or hold_(optimizer)",
    ]
    applied.make_optimizer()
    assert "hold_: 4 modules\n  conv1  weight: norm of 1 matrix held at" in str(applied)
    assert "held at" in applied._repr_html_()


def test_all_parts_together_are_undone_to_the_bit() -> None:
    model = convnet()
    before = state(model)
    applied = recipe(
        init=[{"where": None, "use": "orthogonal_"}],
        penalty=[{"where": "conv*", "use": "Orthogonality", "strength": 0.1}],
        hold={"where": "fc*", "norm": "filters", "radius": 2.0, "magnitude": "learned", "magnitude_lr": 0.1},
    ).apply_(model)
    applied.hold_(torch.optim.SGD(model.parameters(), lr=0.1))
    assert state(model) != before
    applied.undo_()
    assert state(model) == before


# --- the optimizers ---------------------------------------------------------------------------------------------------


def test_the_rate_of_what_is_no_matrix_follows_that_of_matrices() -> None:
    model = convnet()
    optimizer = recipe(optimizer={"use": "muon", "lr": 0.2, "others_factor": 0.1}).apply_(model).make_optimizer()
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert [rates[id(p)] for p in (model.conv1.weight, model.fc1.weight)] == [0.2, 0.2]
    others = (model.norm1.weight, model.fc1.bias, model.fc2.weight)
    assert [rates[id(p)] for p in others] == pytest.approx([0.02] * 3)


@pytest.mark.parametrize("use", ["sgd", "adamw"])
def test_decay_of_weights_alone(use: str) -> None:
    model = convnet()
    options = {"use": use, "lr": 0.1, "weight_decay": 0.3, "decay": "weights"}
    optimizer = recipe(optimizer=options).apply_(model).make_optimizer()
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert [decays[id(p)] for p in (model.conv1.weight, model.norm1.weight, model.fc1.bias)] == [0.3, 0, 0]


def test_an_unknown_optimizer_lists_the_known_ones() -> None:
    with pytest.raises(gonio.errors.UnknownNameError, match=rf"no optimizer named 'lamb'\. Known: {KNOWN}"):
        arguments_of("lamb")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_takes_a_rate_and_a_decay_and_lowers_the_loss(name: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(8, 4)
    assert {"lr", "weight_decay"} <= arguments_of(name).keys()
    optimizer = OPTIMIZERS[name](model, lr=1e-3, weight_decay=0.1)
    assert type(optimizer) is type_of(name)
    assert {group["weight_decay"] for group in optimizer.param_groups} <= {0.0, 0.1}
    losses = []
    for _ in range(5):
        loss = model(x).square().mean()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses == sorted(losses, reverse=True)
