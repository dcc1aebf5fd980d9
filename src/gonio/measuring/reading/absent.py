"""Values that a file should hold and does not: tensors that are empty, and where others of their name are not."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from gonio.errors import listing
from gonio.escaping import plain
from gonio.measuring.reading.state_dicts import Problem
from gonio.messages import are, counted, say

_EMPTY = (0,)  # what a sharded training leaves of a parameter whose values lie in other processes


def without_values(tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> list[Problem]:
    """A problem if no tensor has a value, or if some have none and others with the same end of their name have.

    A layer without inputs or outputs has a side of 0 beside others, and no shape `(0,)`; its bias may have it. Bytes of
    a layer's own (`_extra_state`) are often none.

    Args:
        tensors: shape and dtype of each.

    Example:
        >>> from gonio.measuring.reading.absent import without_values
        >>> shapes = {"a.weight": (0,), "b.weight": (3, 4), "b.bias": (3,)}
        >>> found = without_values({name: (shape, "float32") for name, shape in shapes.items()})
        >>> [problem.found for problem in found]
        ['1 of 3 tensors is empty, unlike others called weight: a.weight']
    """
    shapes = {name: shape for name, (shape, _) in tensors.items()}
    if not any(prod(shape) for shape in shapes.values()):
        every = counted(len(tensors), "tensor")
        found = say("none of {tensors} has a value", tensors=every) if tensors else say("it holds no tensor")
        return [Problem("G715", "", found)]
    filled = {_end(name) for name, shape in shapes.items() if prod(shape) > 1}
    narrow = {name.rpartition(".")[0] for name, shape in shapes.items() if len(shape) > 1 and not prod(shape)}
    floats = (name for name, (_, dtype) in tensors.items() if dtype.startswith(("float", "bfloat")))
    empty = [name for name in floats if shapes[name] == _EMPTY and _end(name) in filled]
    empty = [name for name in empty if name.rpartition(".")[0] not in narrow]
    if not empty:
        return []
    found = say(
        "{n} of {tensors} {are} empty, unlike others called {ends}: {names}",
        n=len(empty),
        tensors=counted(len(tensors), "tensor"),
        are=are(len(empty)),
        ends=listing([plain(end, longest=200) for end in sorted({_end(name) for name in empty})], limit=4),
        names=listing([plain(name, longest=200) for name in empty], limit=4),
    )
    return [Problem("G715", "", found, tuple(empty))]


def _end(name: str) -> str:
    return name.rpartition(".")[2]
