"""The order of a file's tensors along the depth of the model, as far as the file tells it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from gonio.measuring.reading.entry import StoredTensor

SIBLINGS = 3  # of one shape, and of one name up to numbers in it, that a matrix of a stack of layers has at least
_NUMBER = re.compile(r"(\d+)")


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A key that sorts the numbers in names as numbers.

    Example:
        >>> from gonio.measuring.reading.order import natural
        >>> sorted(["layers.10", "layers.9", "layers.9.bias"], key=natural)
        ['layers.9', 'layers.9.bias', 'layers.10']
    """
    parts = (part for part in _NUMBER.split(name) if part)
    return tuple((0, int(part), "") if part.isdecimal() and len(part) < 20 else (1, 0, part) for part in parts)


def pattern_of(path: str) -> str:
    """A path with a star for each number.

    Example:
        >>> from gonio.measuring.reading.order import pattern_of
        >>> pattern_of("model.layers.31.mlp.up_proj")
        'model.layers.*.mlp.up_proj'
    """
    return _NUMBER.sub("*", path)


def families(shapes: Mapping[str, tuple[int, ...]]) -> list[list[str]]:
    """The matrices that repeat from layer to layer: at least four of one shape and one name up to numbers in it.

    Example:
        >>> from gonio.measuring.reading.order import families
        >>> families({"embed": (9, 2)} | {f"layers.{i}.up": (4, 2) for i in range(4)})
        [['layers.0.up', 'layers.1.up', 'layers.2.up', 'layers.3.up']]
    """
    found: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, shape in shapes.items():
        if len(shape) > 1:
            found.setdefault((pattern_of(name), shape), []).append(name)
    return [names for names in found.values() if len(names) > SIBLINGS]


def tells_depth(names: Sequence[str]) -> bool:
    """Whether tensors in this order are in the order of a model: in another than that of their names, or numbered.

    Example:
        >>> from gonio.measuring.reading.order import tells_depth
        >>> names = ["layers.0.down", "layers.1.down"], ["stem", "body"], ["body", "stem"]
        >>> tuple(map(tells_depth, names))
        (True, True, False)
    """
    stacks = {_NUMBER.split(name)[0] if _NUMBER.search(name) else name for name in names}
    return len(stacks) < 2 or list(names) != sorted(names, key=natural)


def in_depth_order(stored: Mapping[str, StoredTensor], vocabulary: int | None = None) -> dict[str, StoredTensor]:
    """The tensors in natural order if the file lists them by the alphabet; any other order is the model's, and stays.

    Args:
        vocabulary: the configuration's `vocab_size`. The only matrix with so many rows, or the one in the module that
            holds the numbered blocks, is where the model begins; one outside of that module is where the model ends.
    """
    names = list(stored)
    if names != sorted(names):
        return dict(stored)
    ordered = sorted(names, key=natural)
    homes = Counter(name.split(".")[0] for name in names if any(part.isdecimal() for part in name.split(".")[1:]))
    home = homes.most_common(1)[0][0] if homes else None
    tables = [
        name
        for name in ordered
        if len(stored[name].shape) == 2
        and stored[name].shape[0] == vocabulary
        and not any(part.isdecimal() for part in name.split("."))
    ]
    first = [name for name in tables if len(tables) == 1 or (home is not None and name.startswith(f"{home}."))]
    ends = {name.rpartition(".")[0] for name in tables if name not in first} if first else set()
    last = [name for name in ordered if name.rpartition(".")[0] in ends]
    moved = {*first, *last}
    return {name: stored[name] for name in (*first, *(n for n in ordered if n not in moved), *last)}
