"""A rule of a recipe run by its verb, on a model or, to see whether it would be refused, on copies of single layers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from copy import deepcopy
from functools import partial

from torch import nn

from gonio.editing.edit import Edited
from gonio.editing.where import Site, Where
from gonio.errors import GonioError
from gonio.recipes.catalogue import find
from gonio.recipes.rule import Rule
from gonio.seeding import state_kept
from gonio.surgery import init_, parametrize_, swap_

_LARGE = 1 << 22  # numbers of a layer that is not tried where a smaller one is


def act_(model: nn.Module, verb: str, rule: Rule, *, where: Where, seed: int) -> Edited:
    """Run `init`, `swap` or `parametrize` by a rule."""
    arguments = rule.arguments()
    target, tensor = find(verb, rule.use).target, arguments.pop("tensor", "weight")
    match verb:
        case "swap":
            return swap_(model, target, where=where, **arguments)
        case "init":
            return init_(model, target, where=where, tensor=tensor, seed=seed, **arguments)
    return parametrize_(model, target(**arguments), where=where, tensor=tensor)


def refusal(verb: str, rule: Rule, sites: Iterable[Site]) -> Exception | None:
    """The error of a verb that refuses a rule on one of these layers; None if it refuses it on none.

    It is tried on a copy of the smallest layer of each type: a value out of range fails on every layer, and a method
    that does not fit a type of layers fails on each of them.
    """
    smallest: dict[type, tuple[int, Site]] = {}
    for site in sites:
        size = sum(each.numel() for each in site.module.parameters())
        if size < smallest.get(type(site.module), (size + 1, site))[0]:
            smallest[type(site.module)] = size, site
    tried = sorted(smallest.values(), key=lambda pair: pair[0])
    for number, (size, site) in enumerate(tried):
        if number and size > _LARGE:
            break
        try:
            alone = _alone(site)
        except Exception:  # a layer of the user's that cannot be copied is refused, or not, when the verb runs
            continue
        try:
            with state_kept():
                act_(alone, verb, rule, where=partial(_is_at, site.path), seed=0)
        except (GonioError, ArithmeticError, RuntimeError, TypeError, ValueError) as error:  # torch's for a wrong value
            return error
    return None


def _alone(site: Site) -> nn.Module:
    """A model with a copy of one layer, under the same path."""
    layer = deepcopy(site.module)
    for name in reversed(site.path.split(".") if site.path else ()):
        layer = nn.Sequential(OrderedDict([(name, layer)]))
    return layer


def _is_at(at: str, path: str, module: nn.Module) -> bool:
    return path == at
