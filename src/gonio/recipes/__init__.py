"""Recipes: the verbs as data. Names from a closed catalogue, no code, one error for all mistakes."""

from gonio.recipes.apply import Applied
from gonio.recipes.plan import Plan, Step
from gonio.recipes.recipe import BASELINE, Recipe, built_in_names
from gonio.recipes.rule import Named, Rule

__all__ = ["BASELINE", "Applied", "Named", "Plan", "Recipe", "Rule", "Step", "built_in_names"]
__dir__ = __all__.copy  # the public names alone
