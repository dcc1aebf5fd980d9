"""What the configuration beside a checkpoint states of its model, and the checkpoint lacks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from gonio.measuring.reading.configurations import Configurations
from gonio.measuring.reading.opened import Problem
from gonio.messages import counted, say

_TENSORS = 4  # that blocks have in common, at least


def less_than_stated(
    shapes: Mapping[str, Sequence[int] | None], known: Iterable[Problem], beside: Configurations
) -> list[Problem]:
    """A problem for a list of blocks that is too short, and one for tables of tokens that are too few.

    Args:
        shapes: of all tensors by name; None where it is not known.
        known: problems that are told already; the tensors that they name are missed no second time.
    """
    told = {name for problem in known for name in (problem.path, *problem.tensors)}
    found = [] if beside.layers is None else [*fewer_blocks({*told, *shapes}, beside.layers)]
    return found if told else [*found, *fewer_tables(shapes, beside)]


def fewer_blocks(names: Iterable[str], stated: int) -> Iterator[Problem]:
    """A problem where the longest list of numbered blocks has fewer than the configuration states.

    A list has two blocks or more, with four tensors or more in common. Nothing is said of one block that runs several
    times, of blocks that are built in different ways, nor where the number is that of all lists together.

    Args:
        names: of all tensors, also of those whose values are not there.

    Example:
        >>> from gonio.measuring.reading.stated import fewer_blocks
        >>> names = [f"model.layers.{block}.{part}" for block in range(3) for part in ("q", "k", "v", "o")]
        >>> list(fewer_blocks(names, 3)), [(each.path, each.found) for each in fewer_blocks(names, 4)]
        ([], [('model.layers', '3 blocks, and the configuration states 4')])
    """
    lists: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in names:
        parts = name.split(".")
        at = next((at for at, part in enumerate(parts[:-1]) if part.isdecimal()), None)
        if at is not None:
            lists[".".join(parts[:at])][parts[at]].add(".".join(parts[at + 1 :]))
    alike = {path for path, blocks in lists.items() if len(set.intersection(*blocks.values())) >= _TENSORS}
    path = max(lists, key=lambda each: len(lists[each]), default="")
    if path in alike and 1 < len(lists[path]) < stated != sum(len(lists[each]) for each in alike):
        said = {"blocks": counted(len(lists[path]), "block"), "stated": stated}
        yield Problem("G717", path, say("{blocks}, and the configuration states {stated}", **said))


def fewer_tables(shapes: Mapping[str, Sequence[int] | None], beside: Configurations) -> Iterator[Problem]:
    """A problem where a language model has fewer tables of tokens than its configuration states.

    It has one, and a second one for its outputs where the configuration states that this is not the same. A table is a
    matrix with a side as long as the vocabulary, or longer.
    """
    vocabulary, needed = beside.vocabulary, beside.tables
    matrices = {name: shape for name, shape in shapes.items() if shape is None or len(shape) == 2}
    if not vocabulary or None in matrices.values():
        return
    tables = [name for name, shape in matrices.items() if shape is not None and max(shape) >= vocabulary]
    if len(tables) < needed:
        said = {"tables": counted(len(tables), "table"), "vocabulary": vocabulary, "needed": needed}
        text = say("{tables} of {vocabulary:,} tokens, and the configuration states {needed}", **said)
        yield Problem("G717", "".join(tables), text)
