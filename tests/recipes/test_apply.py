"""Applying: order of the verbs, `where` about the model as given, all or nothing, exact undo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from catalog import seeded
from gonio import nn as layers
from gonio.errors import AlreadyAppliedError, RecipeError, UnmatchedRuleError
from gonio.recipes import Recipe, built_in_names
from gonio.surgery import UndoError
from recipes.models import convnet, model_for, recipe, state

ALL_VERBS = recipe(
    # not in the order in which they run
    penalty=[{"where": "type:Conv2d", "use": "Orthogonality", "strength": 0.1}],
    parametrize=[{"where": "fc1", "use": "Sphere"}],
    swap=[{"where": "type:BatchNorm2d", "use": "SwitchableNorm2d.from_batch_norm"}],
    init=[{"where": None, "use": "orthogonal_"}],
)


def test_verbs_run_in_their_fixed_order_and_each_does_its_part() -> None:
    model = convnet()
    applied = ALL_VERBS.apply_(model)
    assert [edit.verb for edit in applied.edits] == ["init_", "swap_", "parametrize_"]
    text = str(applied)
    assert text.index("init_") < text.index("swap_") < text.index("parametrize_") < text.index("Orthogonality")
    rows = model.conv2.weight.detach().flatten(1)
    gram = rows @ rows.T
    assert torch.allclose(gram, torch.eye(6) * gram[0, 0], atol=1e-5)
    assert isinstance(model.norm1, layers.SwitchableNorm2d)
    assert torch.allclose(model.fc1.weight.norm(dim=1), torch.ones(8))
    with torch.no_grad():
        model.conv1.weight.add_(0.1)
    assert applied.penalty().item() > 0


def test_where_speaks_about_the_model_as_given() -> None:
    model = convnet()
    applied = recipe(
        swap=[{"where": "type:Conv2d", "use": "DecoupledConv2d.from_conv", "magnitude": "Tanh"}],
        init=[{"where": "type:Conv2d", "use": "orthogonal_"}],
        parametrize=[{"where": "type:Linear", "use": "Sphere"}],
        penalty=[{"where": "classifier", "use": "L2", "strength": 1.0}],
    ).apply_(model)
    assert [[change.path for change in edit.changes] for edit in applied.edits] == [
        ["conv1", "conv2"],
        ["conv1", "conv2"],
        ["fc1", "fc2"],
    ]
    assert torch.allclose(applied.penalty(), model.fc2.weight.square().sum() / 2)


def test_a_decoupled_layer_can_be_penalised_under_its_old_type() -> None:
    model = convnet()
    applied = recipe(
        swap=[{"where": "conv2", "use": "DecoupledConv2d.from_conv", "magnitude": "Tanh", "angular": "Cosine"}],
        penalty=[{"where": "type:Conv2d", "use": "Orthogonality", "strength": 1.0}],
    ).apply_(model)
    assert isinstance(model.conv2, layers.DecoupledConv2d)
    applied.penalty()
    assert list(applied.penalty.values()) == ["conv1.weight/Orthogonality", "conv2.weight/Orthogonality"]


def test_nested_objects_reach_the_layer() -> None:
    model = convnet()
    options = {"magnitude": {"Tanh": {"learn_radius": True}}, "angular": "SquaredCosine"}
    recipe(swap=[{"where": "conv2", "use": "DecoupledConv2d.from_conv", **options}]).apply_(model)
    assert type(model.conv2.operator.magnitude).__name__ == "Tanh"
    assert type(model.conv2.operator.angular).__name__ == "SquaredCosine"


def test_packed_projections_are_named_by_their_tensor() -> None:
    model = nn.Sequential(nn.MultiheadAttention(8, 2))
    before = state(model)
    applied = recipe(
        init=[{"where": "0", "use": "orthogonal_", "tensor": "in_proj_weight", "gain": 1.0}],
        parametrize=[{"where": "0", "use": "Sphere", "tensor": "in_proj_weight"}],
    ).apply_(model)
    for block in model[0].in_proj_weight.detach().chunk(3):
        assert torch.allclose(block @ block.T, torch.eye(8), atol=1e-5)
    applied.undo_()
    assert state(model) == before


def test_the_seed_decides_and_the_global_generator_does_not() -> None:
    def weights(seed: int, noise: int) -> torch.Tensor:
        torch.manual_seed(0)
        model = convnet()
        torch.manual_seed(noise)
        Recipe.load("orthogonal-init").apply_(model, seed=seed)
        return model.conv2.weight

    assert torch.equal(weights(1, 2), weights(1, 3))
    assert not torch.equal(weights(1, 2), weights(2, 2))


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("name", [*built_in_names(), None])
def test_undo_restores_every_bit_and_after_use_the_structure(name: str | None, used: bool) -> None:
    model = model_for(name or "")
    before = state(model)
    applied = (Recipe.load(name) if name else ALL_VERBS).apply_(model)
    if used:
        model(torch.randn(4, 1, 8, 8))
        if applied.penalty is not None:
            applied.penalty()
    applied.undo_()
    after = state(model)
    assert all(after[part] == before[part] for part in before if not (used and part == "values"))


def test_undo_happens_once() -> None:
    applied = ALL_VERBS.apply_(convnet())
    applied.undo_()
    with pytest.raises(UndoError, match="it was undone before"):
        applied.undo_()


def test_a_failure_takes_everything_back_and_names_the_rule() -> None:
    model = convnet()
    before = state(model)
    text = (
        "name: mine\n"
        "init:\n"
        "  - {where: null, use: orthogonal_}\n"
        "swap:\n"
        "  - {where: 'type:BatchNorm2d', use: SwitchableNorm2d.from_batch_norm}\n"
        "parametrize:\n"
        "  - {where: fc1, use: Sphere}\n"
    )
    first = Recipe.from_dict({"name": "first", "parametrize": [{"where": "fc1", "use": "Sphere"}]}).apply_(model)
    between = state(model)
    with pytest.raises(AlreadyAppliedError, match="'fc1'; found Sphere") as caught:
        Recipe.from_yaml(text.replace("null", "conv*"), origin="mine.yaml").apply_(model)
    assert caught.value.__notes__ == ["in mine.yaml:7: rule 1 of parametrize (fc1: Sphere)"]
    assert state(model) == between
    first.undo_()
    assert state(model) == before
    with pytest.raises(RecipeError, match=r"mine\.yaml:3: rule 1 of init .*'nonsense'"):
        Recipe.from_yaml(text.replace("orthogonal_", "orthogonal_, gain: nonsense"), origin="mine.yaml").apply_(model)
    assert state(model) == before


def test_a_late_failure_takes_the_early_verbs_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = convnet()
    before = state(model)

    def fails(*args: object, **keywords: object) -> None:
        raise KeyboardInterrupt("pressed")

    monkeypatch.setattr("gonio.recipes.apply.Penalty", fails)
    with pytest.raises(KeyboardInterrupt, match="pressed"):
        ALL_VERBS.apply_(model)
    assert state(model) == before


def test_what_a_verb_leaves_out_is_no_success() -> None:
    model = convnet()
    rules = recipe(parametrize=[{"where": "fc1", "use": "Sphere"}])
    rules.apply_(model)
    before = state(model)
    problem = r"rule 1 of init \(fc\*: orthogonal_\) cannot act on fc1: its weight is parametrized; initialise first"
    with pytest.raises(UnmatchedRuleError, match=problem):
        recipe(init=[{"where": "fc*", "use": "orthogonal_"}]).apply_(model)
    assert state(model) == before


def test_the_empty_recipe_does_nothing() -> None:
    model = convnet()
    before = state(model)
    applied = Recipe.load("baseline").apply_(model)
    assert (applied.edits, applied.penalty, str(applied)) == ((), None, "baseline: nothing to do")
    assert state(model) == before


@pytest.mark.parametrize("name", built_in_names())
def test_built_in_recipes_train_a_small_network(name: str) -> None:
    model = model_for(name)
    applied = Recipe.load(name).apply_(model, seed=3)
    own = Recipe.load(name).optimizer is not None
    plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = applied.make_optimizer(lr=0.05) if own else plain  # 30 steps are few for the recipes' own rates
    y = torch.arange(24) % 3
    x = torch.randn(3, 1, 8, 8)[y] + 0.1 * torch.randn(24, 1, 8, 8)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        (loss if applied.penalty is None else loss + applied.penalty()).backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert losses[-1] < 0.7 * losses[0]


# The recipes that the documentation keeps.
FILES = sorted((Path(__file__).parents[2] / "docs" / "recipes").glob("decoupled-*.yaml"))


def test_the_documentation_has_a_recipe_for_the_magnitudes_of_the_paper() -> None:
    names = {file.stem.removeprefix("decoupled-") for file in FILES}
    assert len(names) == 7
    assert names <= {name.lower() for name in layers.magnitude.__all__}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_decoupled_recipe(file: Path) -> None:
    convolutions = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(16, 10))
    found = Recipe.load(file)
    found.apply_(model)
    assert [type(layer) for layer in (model[0], model[4])] == [nn.Conv2d, nn.Linear]
    for layer in (model[1], model[2]):
        assert isinstance(layer, layers.DecoupledConv2d)
        assert f"decoupled-{type(layer.operator.magnitude).__name__.lower()}" == found.name == file.stem
    assert bool(torch.isfinite(model(seeded(2, 1, 8, 8))).all())
