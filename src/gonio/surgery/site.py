"""Where an edit happens: one module of a model, under all the names it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from gonio.errors import NoMatchError
from gonio.surgery.where import Where, as_selector
from gonio.surgery.wrapping import adds_no_name

__all__ = ["Site", "select", "sites"]


@dataclass(frozen=True)
class Site:
    """One module of a model.

    Attributes:
        path: its first dotted path, without the names that wrappers add; `""` is the model itself.
        module: the module.
        owners: every `(parent, attribute)` that refers to it. A tied module has several.
        aliases: its other paths.
    """

    path: str
    module: nn.Module
    owners: tuple[tuple[nn.Module, str], ...]
    aliases: tuple[str, ...] = ()

    def matches(self, selector: Callable[[str, nn.Module], bool]) -> bool:
        """Whether the selector takes this module under any of its paths."""
        return any(selector(path, self.module) for path in (self.path, *self.aliases))


def sites(model: nn.Module) -> list[Site]:
    """Every distinct module of a model once, in registration order, the model itself first.

    The walk is iterative, so a model nested thousands deep is no problem, and a module that is
    registered twice is one site with two owners.

    Example:
        >>> shared = nn.Linear(2, 2)
        >>> [(site.path, site.aliases) for site in sites(nn.Sequential(shared, nn.ReLU(), shared))]
        [('', ()), ('0', ('2',)), ('1', ())]
    """
    paths: dict[int, list[str]] = {id(model): [""]}
    owners: dict[int, list[tuple[nn.Module, str]]] = {id(model): []}
    modules: dict[int, nn.Module] = {id(model): model}
    for path, parent, name, child in _edges(model):
        owners.setdefault(id(child), []).append((parent, name))
        paths.setdefault(id(child), []).append(path)
        modules.setdefault(id(child), child)
    return [Site(paths[key][0], module, tuple(owners[key]), tuple(paths[key][1:])) for key, module in modules.items()]


def _edges(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """Every (path, parent, attribute, child), depth first in registration order."""
    expanded: set[int] = set()
    stack: list[tuple[str, nn.Module | None, str, nn.Module]] = [("", None, "", model)]
    while stack:
        path, parent, name, module = stack.pop()
        if parent is not None:
            yield path, parent, name, module
        if id(module) in expanded:
            continue
        expanded.add(id(module))
        children = [(_join(path, key, module), module, key, c) for key, c in module._modules.items() if c is not None]
        stack.extend(reversed(children))


def _join(path: str, name: str, parent: nn.Module) -> str:
    if adds_no_name(parent, name):
        return path
    return f"{path}.{name}" if path else name


def select(model: nn.Module, where: Where, *, verb: str, can_act: Callable[[nn.Module], str | None]) -> list[Site]:
    """The sites that `where` selects and on which the verb can act.

    A selected module that cannot be acted on is left out: containers match globs all the time. The
    caller reports what was taken; selecting nothing is an error.

    Args:
        where: see :func:`gonio.surgery.as_selector`.
        verb: the name of the verb, for the error.
        can_act: returns None for a module that the verb can act on, otherwise the reason why not.

    Raises:
        NoMatchError: if nothing is left, with what the verb could act on.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> only_linear = lambda module: None if isinstance(module, nn.Linear) else "has no weight"
        >>> [site.path for site in select(model, None, verb="demo_", can_act=only_linear)]
        ['0']
    """
    selector = as_selector(where)
    everything = sites(model)
    matched = [site for site in everything if site.matches(selector)]
    taken = [site for site in matched if can_act(site.module) is None]
    if not taken:
        able = [site.path for site in everything if can_act(site.module) is None]
        refused = [f"{site.path or 'the model'} ({can_act(site.module)})" for site in matched]
        raise NoMatchError(verb, str(selector), able, refused=refused)
    return taken
