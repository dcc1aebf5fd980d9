"""The sizes that built-in models accept: whole numbers of layers and units, within bounds."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, get_type_hints

from torch import nn

from gonio.errors import InvalidArgumentError
from gonio.messages import say

_LAYERS = ("depth", "blocks", "pools")  # each is one module or more, so that fewer of them fit into memory
_MOST_LAYERS, _MOST_UNITS = 1000, 1 << 16


def sized(make: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """The factory, which refuses a size that is no whole number within its bounds, and a name that is no text.

    Example:
        >>> from gonio.models.sizes import sized
        >>> @sized
        ... def layers(depth: int = 2) -> nn.Module:
        ...     return nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth)))
        >>> layers(depth=-1)
        Traceback (most recent call last):
        gonio.errors.InvalidArgumentError: layers(depth=) is a whole number from 1 to 1000; found -1. Change it.
    """
    hints, signature = get_type_hints(make), inspect.signature(make)

    @wraps(make)
    def checked(*given: Any, **named: Any) -> nn.Module:
        try:
            bound = signature.bind(*given, **named).arguments
        except TypeError:  # the call itself says it better, with the name of the function
            return make(*given, **named)
        for name, value in bound.items():
            least, most = 0 if name == "pools" else 1, _MOST_LAYERS if name in _LAYERS else _MOST_UNITS
            takes = f"{make.__name__}({name}=)"
            if hints[name] is int and not (type(value) is int and least <= value <= most):
                asked = say("{takes} is a whole number from {least} to {most}", takes=takes, least=least, most=most)
                raise InvalidArgumentError(asked, f"{value!r:.80}", "Change it.")
            if hints[name] is str and not isinstance(value, str):
                raise InvalidArgumentError(say("{takes} is a name", takes=takes), f"{value!r:.80}", "Change it.")
        return make(*given, **named)

    return checked
