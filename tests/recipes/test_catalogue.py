"""The catalogue is what the packages export, and every name in it works from a file."""

from __future__ import annotations

import inspect
import typing
from typing import Any

import pytest
import torch
from torch import nn

from gonio import init, models, parametrizations, regularizers
from gonio import nn as layers
from gonio.errors import RecipeError, UnknownNameError
from gonio.nn import angular, magnitude
from gonio.recipes import Recipe
from gonio.recipes.catalogue import TRAINING, VERBS, catalogue, find, objects_of
from gonio.surgery.swap import accepted_layers

# One layer of each kind that a converter takes.
LAYERS = [
    nn.Linear(6, 6),
    nn.Conv1d(4, 4, 3),
    nn.Conv2d(4, 4, 3, padding=1),
    nn.Conv3d(4, 4, 3),
    nn.ConvTranspose1d(4, 4, 3),
    nn.ConvTranspose2d(4, 4, 3),
    nn.ConvTranspose3d(4, 4, 3),
    nn.BatchNorm1d(4),
    nn.BatchNorm2d(4),
    nn.BatchNorm3d(4),
    nn.InstanceNorm2d(4),
]
REQUIRED = {"strength": 0.5, "direction_strength": 0.5, "steps": 10, "steps_per_epoch": 10}


ENTRIES = [pytest.param(verb, use, id=f"{verb}-{use}") for verb in VERBS for use in catalogue(verb)]


def named(verb: str, use: str) -> Recipe:
    """A rule of this name for the first layer, with the options that it needs."""
    required = {name: REQUIRED[name] for name, option in catalogue(verb)[use].options.items() if option.required}
    return Recipe.from_dict({"name": "one", verb: [{"where": "0", "use": use, **required}]})


def model_for(verb: str, use: str) -> nn.Sequential:
    """One layer that the verb can act on, and one that it is told to leave alone."""
    accepts = accepted_layers(catalogue(verb)[use].target) if verb == "swap" else (nn.Conv2d,)
    layer = next(layer for layer in LAYERS if type(layer) in accepts)
    return nn.Sequential(type(layer)(*_arguments(layer)), nn.Identity())


def _arguments(layer: nn.Module) -> tuple[Any, ...]:
    if isinstance(layer, nn.Linear):
        return 6, 6
    return (4,) if isinstance(layer, nn.modules.batchnorm._NormBase) else (4, 4, 3)


@pytest.mark.parametrize(("verb", "use"), ENTRIES)
def test_every_name_works_from_data(verb: str, use: str) -> None:
    recipe = named(verb, use)
    model = model_for(verb, use)
    applied = recipe.apply_(model)
    assert len(applied.edits) == (verb != "penalty")
    assert (applied.penalty is not None) == (verb == "penalty")
    applied.undo_()
    assert Recipe.from_yaml(recipe.to_yaml()) == recipe


@pytest.mark.parametrize(("verb", "use"), ENTRIES)
def test_no_option_is_lost(verb: str, use: str) -> None:
    """What a recipe cannot give is what the verb gives: the weight or layer, its layout, the generator."""
    entry = catalogue(verb)[use]
    parameters = list(inspect.signature(entry.target).parameters)
    if options := getattr(getattr(entry.target, "__self__", None), "options", None):
        parameters[1:] = inspect.signature(options).parameters
    filled = (
        {"init": {parameters[0], "layout", "generator"}, "swap": {parameters[0]}}.get(verb, set())
        if parameters
        else set()
    )
    assert set(parameters) - set(entry.options) == filled


@pytest.mark.parametrize("kind", [magnitude.Magnitude, angular.Angular, regularizers.Schedule])
def test_every_object_can_be_an_option(kind: type) -> None:
    rule = {
        magnitude.Magnitude: ("swap", "magnitude", {"where": "0", "use": "DecoupledConv2d"}),
        angular.Angular: ("swap", "angular", {"where": "0", "use": "DecoupledConv2d"}),
        regularizers.Schedule: ("penalty", "schedule", {"where": "0", "use": "Orthogonality", "strength": 1.0}),
    }
    verb, option, base = rule[kind]
    assert len(objects_of(kind)) >= 2
    for name, entry in objects_of(kind).items():
        required = {key: REQUIRED[key] for key, value in entry.options.items() if value.required and key in REQUIRED}
        if name == "Milestones":
            required = {"steps": [10, 20], "factors": [0.5, 0]}
        recipe = Recipe.from_dict({"name": "one", verb: [{**base, option: {name: required}}]})
        built = recipe.rules(verb)[0].arguments()[option]
        assert isinstance(built, kind)
        assert Recipe.from_yaml(recipe.to_yaml()) == recipe
        recipe.apply_(nn.Sequential(nn.Conv2d(4, 4, 3))).undo_()


def test_the_catalogue_is_what_the_packages_export() -> None:
    assert set(catalogue("init")) == {name for name in init.__all__ if name.endswith("_")} - {"mup_"}
    assert {name.partition(".")[0] for name in catalogue("swap")} == {
        name
        for name in layers.__all__
        if name.startswith("to_")
        or (name[0].isupper() and any(m.startswith("from_") for m in dir(getattr(layers, name))))
    }
    for verb, module, base in (
        ("parametrize", parametrizations, parametrizations.Parametrization),
        ("penalty", regularizers, regularizers.Regularizer),
    ):
        classes = {
            n for n in module.__all__ if inspect.isclass(getattr(module, n)) and issubclass(getattr(module, n), base)
        }
        concrete = {n for n in classes if not inspect.isabstract(getattr(module, n)) and getattr(module, n) is not base}
        assert {name.partition(".")[0] for name in catalogue(verb)} == concrete


def test_a_short_name_is_its_only_converter() -> None:
    short = Recipe.from_dict({"name": "a", "swap": [{"use": "DecoupledConv2d"}]})
    long = Recipe.from_dict({"name": "a", "swap": [{"use": "DecoupledConv2d.from_conv"}]})
    assert (short, short.hash, short.to_yaml()) == (long, long.hash, long.to_yaml())


def test_a_name_under_the_wrong_verb_says_where_it_belongs() -> None:
    with pytest.raises(UnknownNameError, match=r"no entry of swap \(it belongs under penalty\) named 'L2'"):
        find("swap", "L2")


def test_objects_of_the_same_name_are_told_apart() -> None:
    recipe = Recipe.from_dict(
        {"name": "a", "swap": [{"use": "DecoupledConv2d", "magnitude": {"Linear": {"alpha": 2}}, "angular": "Linear"}]}
    )
    options = recipe.swap[0].arguments()
    assert options["magnitude"] == magnitude.Linear(alpha=2.0)
    assert options["angular"] == angular.Linear()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"Tanh": {"radius": -1}}, r"magnitude\.Tanh: .*-1"),
        ({"Tanh": {"radios": 1}}, r"Tanh has no option 'radios'\. Did you mean radius"),
        ({"Tanh": 3}, r"the options of Tanh are a mapping; found 3"),
        ({"Tanh": {}, "Ball": {}}, r"magnitude: found .*expected one of"),
        ("Tahn", r"no magnitude named 'Tahn'\. Did you mean Tanh"),
        (3, r"magnitude: found 3; expected one of .*Tanh"),
        ([], r"magnitude: found \[\]; expected one of"),
    ],
)
def test_a_wrong_object_is_refused_at_reading(value: object, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Recipe.from_dict({"name": "a", "swap": [{"use": "DecoupledConv2d", "magnitude": value}]})


def test_reading_a_recipe_draws_no_random_number() -> None:
    before = torch.random.get_rng_state()
    for verb in VERBS:
        for use in catalogue(verb):
            named(verb, use)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_official_recipe_is_that_of_the_released_code() -> None:
    """He's variance, a decoupled stem, a plain classifier, and 1e-5 · ½‖ŴŴᵀ − I‖² of every decoupled layer."""
    model = models.digits_cnn()
    applied = Recipe.load("decoupled-official").apply_(model, seed=0)
    assert [type(model.get_submodule(f"conv{i}")) for i in (1, 2, 3)] == [layers.DecoupledConv2d] * 3
    assert isinstance(model.fc2, nn.Linear)
    weights = [model.get_submodule(f"conv{i}").weight.detach().double().flatten(1) for i in (1, 2, 3)]
    for weight in (*weights[1:], model.fc1.weight.detach()):
        assert float(weight.var()) == pytest.approx(2 / weight.shape[1], rel=0.1)
    unit = [weight / weight.norm(dim=1, keepdim=True) for weight in weights]
    half = [0.5 * (w @ w.T - torch.eye(len(w), dtype=w.dtype)).square().sum() for w in unit]
    assert float(applied.penalty().detach()) == pytest.approx(1e-5 * float(sum(half)), rel=1e-5)


@pytest.mark.parametrize("verb", [*VERBS, *TRAINING])
def test_true_is_no_number_of_any_option(verb: str) -> None:
    for entry in catalogue(verb).values():
        for option in entry.options.values():
            arms = typing.get_args(option.plain) or (option.plain,)
            if option.plain is None or bool in arms:
                continue
            for value in (True, False, [True], [0.5, False]):
                with pytest.raises(ValueError, match="expected"):
                    option.check(value)
